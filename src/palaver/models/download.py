"""Downloads of weights from the hub: resumable, checked by their SHA-256, and once for all processes of this machine.

The files go where the hub's client looks for them, so that it finds them and fetches only the small ones."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palaver.errors import ModelError

CHUNK_BYTES = 1 << 20
MAX_FAILURES = 4
"""Failed attempts in a row, without a byte in between, after which a download is given up."""
TIMEOUT_SECONDS = 30.0
MAX_RETRY_SECONDS = 30.0
"""The longest wait after a failed attempt. The first is 2 s, and each further one twice as long."""
_WAIT_STEP_SECONDS = 0.5
_REPORT_BYTES = 4 << 20


class DownloadFailed(ModelError):
    """A download was cut or damaged. What has arrived is kept where it is sound."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository."""

    name: str
    nbytes: int
    sha256: str = ""
    """Empty for small files, which the hub's client fetches."""


@dataclass(frozen=True, slots=True)
class Repository:
    """The files of a repository at one commit."""

    name: str
    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def sizes(self) -> dict[str, int]:
        return {file.name: file.nbytes for file in self.files}


def list_repository(name: str) -> Repository:
    """Asks the hub. Raises the errors of its client."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(name, files_metadata=True)
    return Repository(name, getattr(info, "sha", None) or "main", tuple(map(_remote_file, info.siblings or ())))


def _remote_file(file: Any) -> RemoteFile:
    lfs = getattr(file, "lfs", None)
    digest = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
    return RemoteFile(file.rfilename, file.size or 0, digest or "")


def fetch_weights(
    repository: Repository,
    names: Iterable[str],
    report: Callable[[float | None], None] | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Fetches those of the named files that are large, and not on disk yet. Raises DownloadFailed.

    `report` is called with the share of all bytes that is on disk. `wait` sleeps for some seconds before an attempt.
    """
    wanted = set(names)
    files = [file for file in repository.files if file.name in wanted and file.sha256]
    folder = _blobs(repository.name)
    total = sum(file.nbytes for file in files)
    missing = total - sum(_present(folder, file) for file in files)
    if missing <= 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise DownloadFailed(
            f"{repository.name} needs {missing / 1e9:.1f} GB more on disk, but {free / 1e9:.1f} GB are free."
        )
    done = 0
    for file in files:
        before = done

        def report_file(nbytes: int, before: int = before) -> None:
            if report is not None:
                report(min(1.0, (before + nbytes) / max(1, total)))

        _fetch(repository, file, folder, report_file, wait)
        done += file.nbytes


def _blobs(name: str) -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "blobs"


def _part(folder: Path, file: RemoteFile) -> Path:
    return folder / f"{file.sha256}.part"


def _present(folder: Path, file: RemoteFile) -> int:
    for path in (folder / file.sha256, _part(folder, file)):
        if path.is_file():
            return path.stat().st_size
    return 0


def _fetch(
    repository: Repository,
    file: RemoteFile,
    folder: Path,
    report: Callable[[int], None],
    wait: Callable[[float], None],
) -> None:
    """Fetches one file, or waits for the process that does."""
    whole, part = folder / file.sha256, _part(folder, file)
    with _lock(folder / f"{file.sha256}.part.lock"):
        if whole.is_file():
            return
        digest = hashlib.sha256()
        if part.is_file():
            _hash_file(part, digest)
        with part.open("ab") as stream:
            _receive(repository, file, stream, digest, report, wait)
        if digest.hexdigest() != file.sha256:
            part.unlink()
            raise DownloadFailed(
                f"The download of {file.name} of {repository.name} is damaged (its SHA-256 differs), and was deleted: "
                "download it again."
            )
        part.replace(whole)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    from huggingface_hub.utils import WeakFileLock

    with WeakFileLock(path):
        yield


def _hash_file(path: Path, digest: Any) -> None:
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)


def _receive(
    repository: Repository,
    file: RemoteFile,
    stream: Any,
    digest: Any,
    report: Callable[[int], None],
    wait: Callable[[float], None],
) -> None:
    """Appends the rest of the file. Resumes after a cut: at once if bytes have arrived, else after a wait."""
    import httpx

    failures, received = 0, stream.tell()
    reported = -_REPORT_BYTES
    with httpx.Client(follow_redirects=True, timeout=TIMEOUT_SECONDS) as client:
        while received < file.nbytes:
            before, error = received, ""
            try:
                for chunk in _chunks(client, repository, file, received):
                    stream.write(chunk)
                    digest.update(chunk)
                    received += len(chunk)
                    if received - reported >= _REPORT_BYTES or received >= file.nbytes:
                        reported = received
                        report(received)
            except httpx.HTTPError as failure:
                error = str(failure).strip() or type(failure).__name__
                if _is_final(failure):
                    failures = MAX_FAILURES
            stream.flush()
            failures = 0 if received > before else failures + 1
            if received < file.nbytes and failures >= MAX_FAILURES:
                raise DownloadFailed(
                    f"The download of {file.name} of {repository.name} was cut after {received:,} of {file.nbytes:,} "
                    f"bytes ({error or 'the connection ended'}). They are kept: `palaver models pull "
                    f"{repository.name}` goes on from there."
                )
            if received < file.nbytes and failures:
                for _ in range(round(min(2**failures, MAX_RETRY_SECONDS) / _WAIT_STEP_SECONDS)):
                    wait(_WAIT_STEP_SECONDS)
                    report(received)  # raises if the program is ending


def _is_final(failure: Exception) -> bool:
    """Whether the hub refused the request, so that another attempt is in vain."""
    import httpx

    return (
        isinstance(failure, httpx.HTTPStatusError)
        and failure.response.is_client_error
        and failure.response.status_code not in (408, 429)
    )


def _chunks(client: Any, repository: Repository, file: RemoteFile, start: int) -> Iterator[bytes]:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(repository.name, file.name, revision=repository.commit)
    headers = {**build_hf_headers(), "accept-encoding": "identity", **({"range": f"bytes={start}-"} if start else {})}
    with client.stream("GET", url, headers=headers) as response:
        response.raise_for_status()
        skip = start if response.status_code == 200 else 0  # the server ignores ranges
        for chunk in response.iter_bytes(CHUNK_BYTES):
            if skip >= len(chunk):
                skip -= len(chunk)
                continue
            yield chunk[skip:]
            skip = 0
