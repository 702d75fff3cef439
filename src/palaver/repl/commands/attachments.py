"""The command that attaches files to the next message, and the paths of files that are dropped into the terminal."""

from __future__ import annotations

import asyncio
import re
import shlex
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from palaver.chat.attachments import check_accepted
from palaver.errors import RequestError
from palaver.media.headers import DOCUMENT_TYPES, sniff
from palaver.messages import Text as TextPart
from palaver.repl import strings
from palaver.repl.command_table import CommandGroup, complete_paths
from palaver.repl.text import format_blob, one_line
from palaver.store.encoding import media_part

if TYPE_CHECKING:
    from palaver.repl.session import Session

commands = CommandGroup(strings.GROUP_FILES)
_MAX_ATTACHMENT_BYTES = 50_000_000
_SNIFFED_BYTES = 4096


@commands.command("attach", ("file", "image", "audio"), complete_paths)
async def attach(session: Session, arguments: str) -> None:
    if arguments.strip() == "clear":
        session.attachments.clear()
        session.screen.note(strings.NOTHING_ATTACHED)
        return
    for path in parse_files(arguments) or [parse_path(arguments.strip())]:
        await attach_file(session, path)


async def read_file(arguments: str) -> tuple[bytes, str]:
    """The contents and the name of the one file that the arguments name."""
    path = next(iter(parse_files(arguments)), None) or parse_path(arguments.strip())
    return await _read_limited(path), path.name


async def _read_limited(path: Path) -> bytes:
    """In a thread of its own, which nothing waits for after Ctrl+C: reading a named pipe may never end."""
    reading: Future[bytes] = Future()

    def read() -> None:
        reading.set_running_or_notify_cancel()
        try:
            with path.open("rb") as file:
                reading.set_result(file.read(_MAX_ATTACHMENT_BYTES + 1))
        except Exception as error:  # a path with a null byte is a ValueError
            reading.set_exception(error)

    threading.Thread(target=read, daemon=True).start()
    data = await asyncio.wrap_future(reading)
    if len(data) > _MAX_ATTACHMENT_BYTES:
        raise RequestError(strings.FILE_TOO_LARGE.format(path=path, limit=_MAX_ATTACHMENT_BYTES // 1_000_000))
    return data


def check_file(path: Path) -> None:
    """Raises RequestError for pipes and devices: reading them may never end, and can't be cancelled."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise RequestError(strings.NOT_A_FILE.format(path=path))


async def attach_file(session: Session, path: Path) -> None:
    await attach_bytes(session, await _read_limited(path), path.name)


async def attach_bytes(session: Session, data: bytes, name: str) -> None:
    """Attaches a document as text, or media that the model accepts, to the next message."""
    media_type = sniff(data)
    if media_type is None or media_type in DOCUMENT_TYPES:
        session.attachments.append(TextPart(await session.chat.read_document(data, name)))
        session.screen.note(strings.ATTACHED.format(name=one_line(name)))
        return
    card = await session.wait_for(session.chat.wait_until_ready(), strings.WAITING_FOR_MODEL)
    why = card.lacks.get("media", "")
    check_accepted(str(media_type).partition("/")[0], card.name, card.media, why)
    blob = await session.chat.put_blob(data, name)
    check_accepted(blob.kind, card.name, card.media, why)
    session.attachments.append(media_part(blob, data))
    session.screen.note(strings.ATTACHED.format(name=format_blob(blob)))
    if blob.kind == "image":
        await session.show_picture(data)


def parse_path(text: str) -> Path:
    """The path that an argument names; `~` is the home folder. Raises RequestError if there is none, or no text."""
    if not text:
        raise RequestError(strings.FILE_NEEDED)
    try:
        return Path(text).expanduser()
    except RuntimeError:  # an unknown user
        raise RequestError(strings.NO_HOME.format(path=one_line(text))) from None


def parse_files(text: str) -> list[Path]:
    """The files that a line consists of, as terminals write files that are dropped into them: absolute paths or file
    URLs, quoted or with backslashes. Empty if any word is no such file."""
    try:
        paths = [_dropped_path(word) for word in shlex.split(text)]
        return paths if all(path.is_absolute() and path.is_file() for path in paths) else []
    except (ValueError, OSError, RequestError):
        return []


def split_media(text: str) -> tuple[list[Path], str]:
    """Pictures, sounds and videos at both ends of a line, as `parse_files` knows paths, and the text between them."""
    before: list[Path] = []
    after: list[Path] = []
    for pattern, found in ((_FIRST_WORD, before), (_LAST_WORD, after)):
        while (match := pattern.search(text)) and (path := _media_path(match[1])):
            found.append(path)
            text = text[: match.start()] + text[match.end() :]
    return before + after[::-1], text.strip() if before or after else text


_WORD = r"""('[^']+'|"[^"]+"|(?:\\.|[^\s\\'"])+)"""
_FIRST_WORD, _LAST_WORD = re.compile(rf"^\s*{_WORD}(?=\s|$)"), re.compile(rf"(?<!\S){_WORD}\s*$")


def _media_path(word: str) -> Path | None:
    try:
        (path,) = parse_files(word)
        with path.open("rb") as file:
            media_type = sniff(file.read(_SNIFFED_BYTES))
    except (ValueError, OSError):
        return None
    return path if media_type is not None and media_type not in DOCUMENT_TYPES else None


def _dropped_path(word: str) -> Path:
    return Path(unquote(word.removeprefix("file://"))) if word.startswith("file:///") else parse_path(word)
