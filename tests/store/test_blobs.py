"""Blobs in a folder, in another folder that servers share, and in object storage."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from palaver.errors import BadParameter
from palaver.messages import Image, Message, Role, Text
from palaver.store import NotFound, StoreError, open_store
from palaver.store.backup import backup, restore
from palaver.store.blobs import Blobs, RemoteBlobs, open_blobs
from palaver.store.errors import Damaged, StorageDisconnected, StorageNotFound, Unreachable


@pytest.fixture(params=["folder", "shared", "memory"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Blobs]:
    place = {"folder": None, "shared": str(tmp_path / "shared"), "memory": "memory://bucket/media"}[request.param]
    yield open_blobs(tmp_path / "blobs", place)
    fsspec.filesystem("memory").store.clear()


def test_what_is_put_is_read_by_its_digest(blobs: Blobs) -> None:
    digests = [blobs.put(data) for data in (b"one", b"two", b"one")]
    assert digests[0] == digests[2] == hashlib.sha256(b"one").hexdigest()
    assert [blobs.get(digest) for digest in digests] == [b"one", b"two", b"one"]
    assert list(blobs.digests()) == sorted(set(digests))
    with pytest.raises(NotFound):
        blobs.get("0" * 64)


def test_a_sweep_removes_what_is_old_and_not_referenced(blobs: Blobs) -> None:
    kept, old = blobs.put(b"kept"), blobs.put(b"old")
    assert blobs.sweep({kept}) == 0
    assert blobs.sweep({kept}, grace=-60) == 1
    assert list(blobs.digests()) == [kept]
    assert blobs.put(b"old") == old
    assert blobs.get(old) == b"old"


def old_blob(folder: Path, data: bytes = b"picture") -> tuple[Blobs, str]:
    """A blob in a folder that the next sweep deletes, unless it is referenced."""
    blobs = Blobs(folder)
    digest = blobs.put(data)
    os.utime(blobs.path(digest), (0, 0))
    return blobs, digest


def interpose(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, when: str, action: Callable[[], object]
) -> None:
    """Does something once, right before or after the next call of a function."""
    call = getattr(owner, name)

    def wrapped(*arguments: object) -> object:
        monkeypatch.setattr(owner, name, call)
        if when == "before":
            action()
        result = call(*arguments)
        if when == "after":
            action()
        return result

    monkeypatch.setattr(owner, name, wrapped)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["replace", "unlink"])
def test_a_blob_that_is_put_during_a_sweep_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, when: str
) -> None:
    blobs, digest = old_blob(tmp_path)
    interpose(monkeypatch, Path, step, when, lambda: blobs.put(b"picture"))
    blobs.sweep(set())
    assert blobs.get(digest) == b"picture"
    assert blobs.sweep(set()) == 0, "it is new again"


def test_a_blob_that_is_swept_during_a_put_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs, digest = old_blob(tmp_path)
    removed: list[int] = []
    interpose(monkeypatch, os, "utime", "before", lambda: removed.append(blobs.sweep(set())))
    assert blobs.put(b"picture") == digest
    assert removed == [1]
    assert blobs.get(digest) == b"picture"


@pytest.mark.parametrize("referenced", [True, False])
def test_an_interrupted_sweep_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, referenced: bool) -> None:
    def crash() -> None:
        raise KeyboardInterrupt

    blobs, digest = old_blob(tmp_path)
    interpose(monkeypatch, Path, "replace", "after", crash)
    with pytest.raises(KeyboardInterrupt):
        blobs.sweep(set())
    assert blobs.get(digest) == b"picture"
    assert blobs.sweep({digest} if referenced else set()) == (0 if referenced else 1)
    assert list(blobs.digests()) == ([digest] if referenced else [])
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == (1 if referenced else 0)


def test_two_servers_sweep_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs, digest = old_blob(tmp_path)
    removed: list[int] = []
    interpose(monkeypatch, Path, "replace", "before", lambda: removed.append(Blobs(tmp_path).sweep(set())))
    assert (blobs.sweep(set()), removed) == (0, [1])
    with pytest.raises(NotFound):
        blobs.get(digest)


def test_two_sweeps_and_a_put_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second sweep found the old file before the first one set it aside, and moves what is put afterwards."""
    blobs, digest = old_blob(tmp_path)
    found, may_move, moved = threading.Event(), threading.Event(), threading.Event()
    replace, unlink = Path.replace, Path.unlink
    second = threading.Thread(target=lambda: Blobs(tmp_path).sweep(set()))

    def replace_later(path: Path, target: Path) -> Path:
        if threading.current_thread() is not second or moved.is_set():
            return replace(path, target)
        found.set()
        assert may_move.wait(10)
        result = replace(path, target)
        moved.set()
        return result

    def put_and_move(path: Path, missing_ok: bool = False) -> None:
        if threading.current_thread() is not second:
            blobs.put(b"picture")
            may_move.set()
            assert moved.wait(10)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "replace", replace_later)
    monkeypatch.setattr(Path, "unlink", put_and_move)
    second.start()
    assert found.wait(10)
    blobs.sweep(set())
    second.join()
    assert blobs.get(digest) == b"picture"
    assert list(blobs.digests()) == [digest]


def test_two_servers_sweep_a_storage_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = RemoteBlobs(Path(), "memory://bucket/swept")
    for data in (b"one", b"two"):
        blobs.put(data)
    removed: list[int] = []
    other = RemoteBlobs(Path(), "memory://bucket/swept")
    interpose(monkeypatch, blobs._files, "modified", "before", lambda: removed.append(other.sweep(set(), grace=-60)))
    assert (blobs.sweep(set(), grace=-60), removed) == (0, [2])


class ListingFileSystem(MemoryFileSystem):
    """Remembers what it has listed, as s3fs does, and says the times of it."""

    protocol = "listed"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.removeprefix("listed:/")))

    def find(self, path: str, **options: Any) -> list[str]:
        found: list[str] = super().find(path, **options)
        for name in found:
            self.dircache[name] = super().modified(name)
        return found

    def modified(self, path: str) -> datetime:
        try:
            return cast(datetime, self.dircache[path])
        except KeyError:
            return cast(datetime, super().modified(path))


def test_an_object_that_is_put_after_a_sweep_has_listed_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("listed", ListingFileSystem, clobber=True)
    blobs = RemoteBlobs(Path(), "listed://bucket/listed")
    digest = blobs.put(b"picture")
    files = cast(MemoryFileSystem, blobs._files)
    files.store[blobs._address(digest)].modified = datetime(1970, 1, 1, tzinfo=UTC)
    other = RemoteBlobs(Path(), "memory://bucket/listed")
    interpose(monkeypatch, files, "find", "after", lambda: other.put(b"picture"))
    assert blobs.sweep(set()) == 0
    assert blobs.get(digest) == b"picture"


def old_object(place: str) -> tuple[RemoteBlobs, str]:
    blobs = RemoteBlobs(Path(), f"memory://bucket/{place}")
    digest = blobs.put(b"picture")
    age(blobs)
    return blobs, digest


def objects(blobs: RemoteBlobs) -> list[str]:
    return [path.rpartition("/")[2] for path in blobs._files.find(blobs._root)]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["cp_file", "rm_file", "glob"])
def test_an_object_that_is_put_during_a_sweep_stays(monkeypatch: pytest.MonkeyPatch, step: str, when: str) -> None:
    blobs, digest = old_object(f"put-{step}-{when}")
    interpose(monkeypatch, blobs._files, step, when, lambda: blobs.put(b"picture"))
    blobs.sweep(set())
    assert blobs.get(digest) == b"picture"
    assert blobs.sweep(set()) == 0, "it is new again"
    assert not [name for name in objects(blobs) if name.endswith(".sweep")]


def age(blobs: RemoteBlobs) -> None:
    for file in cast(MemoryFileSystem, blobs._files).store.values():
        file.modified = datetime(1970, 1, 1, tzinfo=UTC)


def test_a_sweep_leaves_what_others_keep_in_the_bucket() -> None:
    blobs, _ = old_object("busy")
    for name in ("report.pdf", "README", "7f/notes.put"):
        blobs._files.pipe_file(f"{blobs._root}/{name}", b"not ours")
    age(blobs)
    assert blobs.sweep(set()) == 1
    assert sorted(objects(blobs)) == ["README", "notes.put", "report.pdf"]


@pytest.mark.parametrize("place", ["a[b]", "what?", "all*"])
def test_a_place_is_no_pattern(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    blobs, digest = old_object(f"{place}/media")
    blobs.put(b"picture")
    assert len(objects(blobs)) == 2, "the object and one announcement"
    age(blobs)
    interpose(monkeypatch, blobs._files, "rm_file", "before", lambda: blobs.put(b"picture"))
    assert blobs.sweep(set()) == 0
    assert blobs.get(digest) == b"picture"


def test_the_announcements_of_an_object_do_not_accumulate(monkeypatch: pytest.MonkeyPatch) -> None:
    blobs, digest = old_object("announced")
    for _ in range(3):
        age(blobs)
        blobs.put(b"picture")
    assert len(objects(blobs)) == 2, "the object and one announcement"

    def put_again() -> None:
        age(blobs)
        blobs.put(b"picture")

    interpose(monkeypatch, blobs._files, "glob", "before", put_again)
    age(blobs)
    blobs.put(b"picture")
    assert digest in objects(blobs)
    assert len(objects(blobs)) > 1, "one of two puts at once stays announced"


def test_a_put_needs_no_permission_to_delete(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not allowed")

    blobs, digest = old_object("kept")
    monkeypatch.setattr(blobs._files, "rm_file", refuse)
    assert blobs.put(b"picture") == digest


@pytest.mark.parametrize("step", ["cp_file", "rm_file"])
def test_an_object_that_is_put_by_two_during_a_sweep_stays(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    blobs, digest = old_object(f"two-{step}")
    other = RemoteBlobs(Path(), f"memory://bucket/two-{step}")
    monkeypatch.setattr(other, "_is_fresh", lambda *_: False)
    interpose(monkeypatch, blobs._files, step, "before", lambda: (other.put(b"picture"), other.put(b"picture")))
    assert blobs.sweep(set()) == 0
    assert blobs.get(digest) == b"picture"


def test_a_sweep_of_a_storage_leaves_nothing() -> None:
    blobs, digest = old_object("nothing")
    assert blobs.sweep(set()) == 1
    assert objects(blobs) == []
    with pytest.raises(NotFound):
        blobs.get(digest)


@pytest.mark.parametrize("referenced", [True, False])
@pytest.mark.parametrize("step", ["cp_file", "rm_file"])
def test_an_interrupted_sweep_of_a_storage_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, step: str, referenced: bool
) -> None:
    def crash() -> None:
        raise KeyboardInterrupt

    blobs, digest = old_object(f"interrupted-{step}-{referenced}")
    interpose(monkeypatch, blobs._files, step, "after", crash)
    with pytest.raises(KeyboardInterrupt):
        blobs.sweep(set())
    assert blobs.get(digest) == b"picture"
    age(blobs)
    blobs.sweep({digest} if referenced else set())
    assert objects(blobs) == ([digest] if referenced else [])


def test_a_changed_object_is_reported() -> None:
    blobs = RemoteBlobs(Path(), "memory://bucket/changed")
    digest = blobs.put(b"picture")
    fsspec.filesystem("memory").pipe_file(f"/bucket/changed/{digest[:2]}/{digest}", b"pixture")
    with pytest.raises(Damaged):
        blobs.get(digest)


class ClientError(Exception):
    """As botocore raises it. The other classes have the names of botocore's and aiohttp's, too."""

    def __init__(self, code: str, status: int) -> None:
        super().__init__(f"{code}: bucket.example")
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class HTTPClientError(Exception):
    pass


class ReadTimeoutError(HTTPClientError):
    pass


class ClientConnectionError(Exception):
    pass


class NoCredentialsError(Exception):
    pass


class SSLError(ClientConnectionError):
    pass


def caused_by(error: Exception, cause: Exception) -> Exception:
    """As s3fs raises the errors of botocore."""
    error.__cause__ = cause
    return error


PASSING = [
    ConnectionError("refused"),
    TimeoutError("no answer"),
    ReadTimeoutError("no answer"),
    ClientConnectionError("no route to bucket.example"),
    OSError(errno.EHOSTUNREACH, "no route"),
    caused_by(OSError(errno.EBUSY, "slow down"), ClientError("SlowDown", 503)),
    caused_by(OSError(errno.EIO, "?"), ClientError("Throttling", 400)),
    caused_by(OSError(errno.EIO, "?"), ClientError("BadGateway", 502)),
]
LASTING = [
    PermissionError("bucket.example"),
    NoCredentialsError("Unable to locate credentials for bucket.example"),
    SSLError("certificate verify failed: bucket.example"),
    ValueError("Invalid endpoint: bucket.example"),
    caused_by(OSError(errno.EINVAL, "?"), ClientError("InvalidBucketName", 400)),
    caused_by(OSError(errno.ENOSYS, "?"), ClientError("NotImplemented", 501)),
]


def failing_blobs(monkeypatch: pytest.MonkeyPatch, failure: Exception, without: str = "") -> RemoteBlobs:
    blobs = RemoteBlobs(Path(), "memory://bucket/failing")

    def fail(*_: object, **__: object) -> None:
        raise failure

    for name in {"cat_file", "pipe_file", "find"} - {without}:
        monkeypatch.setattr(blobs._files, name, fail, raising=False)
    return blobs


@pytest.mark.parametrize(
    ("failure", "error"),
    [*((one, StorageDisconnected) for one in PASSING), *((one, Unreachable) for one in LASTING)],
)
def test_a_storage_that_fails_is_an_error_of_the_store(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, error: type[Unreachable]
) -> None:
    blobs = failing_blobs(monkeypatch, failure)
    for call in (lambda: blobs.get("0" * 64), lambda: blobs.put(b"new"), lambda: list(blobs.digests())):
        with pytest.raises(Unreachable) as caught:
            call()
        assert type(caught.value) is error
        assert "example" not in str(caught.value)


def test_a_missing_bucket_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = caused_by(FileNotFoundError("bucket.example"), ClientError("NoSuchBucket", 404))
    blobs = failing_blobs(monkeypatch, missing)
    for call in (lambda: blobs.get("0" * 64), lambda: blobs.put(b"new"), lambda: list(blobs.digests())):
        with pytest.raises(StorageNotFound, match="PALAVER_BLOBS"):
            call()
    monkeypatch.undo()
    blobs = failing_blobs(monkeypatch, FileNotFoundError("an object, or the bucket of another storage"), without="find")
    with pytest.raises(NotFound):
        blobs.get("0" * 64)
    with pytest.raises(StorageNotFound):
        blobs.put(b"new")


def test_a_storage_that_is_not_known_is_refused() -> None:
    with pytest.raises(BadParameter, match="blobs"):
        open_blobs(Path(), "nothing://bucket")


def test_two_stores_share_media_and_a_backup_moves_them(tmp_path: Path) -> None:
    place = "memory://bucket/shared"
    one = open_store(tmp_path / "one", blobs=place)
    talk = one.conversations.create(one.users.ensure().id)
    message = Message(Role.USER, (Text("Look"), Image("image/png", b"picture")))
    stored = one.messages.append(talk.id, None, message)
    with open_store(tmp_path / "other", one.database.url, blobs=place) as other:
        assert other.messages.load(other.messages.get(stored.id)) == message
    backup(one, tmp_path / "all.zip")
    one.close()
    restore(tmp_path / "all.zip", tmp_path / "new", blobs="memory://bucket/new")
    with open_store(tmp_path / "new", blobs="memory://bucket/new") as new:
        assert new.messages.load(new.messages.get(stored.id)) == message
    with open_store(tmp_path / "new") as without, pytest.raises((NotFound, StoreError)):
        without.messages.load(without.messages.get(stored.id))
