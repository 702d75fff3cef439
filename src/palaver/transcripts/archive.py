"""The ZIP archive in which ChatGPT and Claude export conversations: their text, and the files they name.

Sizes are checked in the archive's directory before anything is unpacked."""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from palaver.errors import RequestError
from palaver.media.base import MediaLimits

ZIP_START = b"PK\x03\x04"
MAX_MEMBERS = 100_000
MAX_TEXT_BYTES = 1 << 30
"""Of all conversations of an archive, unpacked."""
MAX_FILES_BYTES = 2 << 30
"""Of all files of an archive that belong to conversations, unpacked."""
MAX_RATIO = 200
"""How much larger than packed a member may be. JSON with text is about 10 times as large."""
_SMALL = 1 << 20
"""Members up to this size may be packed more tightly."""
_CONVERSATIONS = re.compile(r"conversations(-\d+)?\.json")
_ENCRYPTED = 0x1
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class BadArchive(RequestError):
    def __init__(self, why: str) -> None:
        super().__init__(f"Can't read this archive: {why}.")


@dataclass
class ExportFiles:
    """The files of an export that messages name by an id, with which their names begin. Empty outside of an archive."""

    archive: zipfile.ZipFile | None = None
    unread_bytes: int = MAX_FILES_BYTES
    _members: list[tuple[str, zipfile.ZipInfo]] = field(default_factory=list)
    """By name, sorted."""

    def __post_init__(self) -> None:
        members = self.archive.infolist() if self.archive else ()
        self._members = sorted(((PurePosixPath(one.filename).name, one) for one in members), key=lambda one: one[0])

    def find(self, id: str) -> tuple[str, bytes]:
        """The name and the contents of a file. Raises ValueError if it can't be read."""
        if self.archive is None:
            raise ValueError(f"the file {id} is not in conversations.json: import the whole ZIP archive")
        place = bisect_left(self._members, id, key=lambda one: one[0])
        name, member = self._members[place] if place < len(self._members) else ("", None)
        if member is None or not name.startswith(id) or name[len(id) : len(id) + 1].isalnum():
            raise ValueError(f"the archive does not contain the file {id}")
        if member.file_size > MediaLimits().bytes or member.file_size > self.unread_bytes:
            raise ValueError(f"the file {name} is too large")
        self.unread_bytes -= member.file_size
        try:
            return name, _unpack(self.archive, member)
        except BadArchive as error:
            raise ValueError(str(error)) from None


def open_export(data: bytes, max_text_bytes: int = MAX_TEXT_BYTES) -> tuple[tuple[bytes, ...], ExportFiles]:
    """The files with conversations, and the other files. Raises BadArchive."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError):
        raise BadArchive("it is damaged or incomplete") from None
    members = archive.infolist()
    if len(members) > MAX_MEMBERS:
        raise BadArchive(f"it has {len(members):,} files, but at most {MAX_MEMBERS:,} are read")
    found = [one for one in members if _CONVERSATIONS.fullmatch(PurePosixPath(one.filename).name)]
    if not found:
        raise BadArchive("it contains no conversations.json")
    if sum(member.file_size for member in found) > max_text_bytes:
        raise BadArchive(f"its conversations are larger than {max_text_bytes >> 20:,} MB")
    texts = tuple(_unpack(archive, member) for member in sorted(found, key=lambda one: one.filename))
    return texts, ExportFiles(archive)


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """At most the bytes that the directory announces: `zipfile` stops there."""
    if member.flag_bits & _ENCRYPTED:
        raise BadArchive(f"{member.filename} is protected by a password")
    if member.compress_type not in _PACKED:
        raise BadArchive(f"{member.filename} is packed by a method that is not supported")
    if member.file_size > _SMALL and member.file_size > MAX_RATIO * max(member.compress_size, 1):
        raise BadArchive(f"{member.filename} would be unpacked to more than {MAX_RATIO} times its size")
    try:
        return archive.read(member)
    except (zipfile.BadZipFile, EOFError, ValueError, OSError, NotImplementedError, zlib.error):
        raise BadArchive(f"{member.filename} is damaged") from None
