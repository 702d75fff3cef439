"""Downloads of weights from a hub that fails."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from palaver.models.download import DownloadFailed, RemoteFile, Repository, fetch_weights
from tests.hub import COMMIT, Hub, running_hub

NAME, FILE = "test/weights", "model.safetensors"
CONTENT = bytes(range(256)) * 5000
FILES = (RemoteFile(FILE, len(CONTENT), hashlib.sha256(CONTENT).hexdigest()),)
REPOSITORY = Repository(NAME, COMMIT, FILES)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub({NAME: {FILE: CONTENT}}) as hub:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(
            "huggingface_hub.hf_hub_url", lambda name, file, revision: f"{hub.url}/{name}/resolve/{revision}/{file}"
        )
        yield hub


def files(folder: Path) -> dict[str, bytes]:
    """By suffix: the file, and its part while it is downloaded."""
    return {path.suffix: path.read_bytes() for path in folder.rglob("blobs/*") if path.suffix != ".lock"}


def test_attempts_are_apart(hub: Hub, tmp_path: Path) -> None:
    hub.cut_after = 0
    seconds = 0.0

    def wait(duration: float) -> None:
        nonlocal seconds
        seconds += duration
        if seconds == 2 + 4:
            hub.cut_after = None

    fetch_weights(REPOSITORY, [FILE], wait=wait)
    assert (seconds, len(hub.ranges)) == (2 + 4, 3)
    assert files(tmp_path) == {"": CONTENT}


def test_a_hub_that_goes_away_keeps_what_arrived(hub: Hub, tmp_path: Path) -> None:
    waits: list[float] = []
    hub.cut_after = 1 << 20

    def report(share: float | None) -> None:
        hub.cut_after = 0  # from the second request on

    with pytest.raises(DownloadFailed, match=r"was cut after 1,048,576 of 1,280,000 bytes .*goes on from there"):
        fetch_weights(REPOSITORY, [FILE], report, waits.append)
    assert hub.ranges == ["", *["bytes=1048576-"] * 4]
    assert sum(waits) == 2 + 4 + 8
    assert files(tmp_path) == {".part": CONTENT[: 1 << 20]}
    hub.cut_after = None
    fetch_weights(REPOSITORY, [FILE], wait=waits.append)
    assert files(tmp_path) == {"": CONTENT}


def test_an_interrupt_ends_a_wait(hub: Hub) -> None:
    def wait(duration: float) -> None:
        raise KeyboardInterrupt

    hub.cut_after = 0
    with pytest.raises(KeyboardInterrupt):
        fetch_weights(REPOSITORY, [FILE], wait=wait)
    assert len(hub.ranges) == 1


def test_a_refusal_of_the_hub_is_final(hub: Hub) -> None:
    waits: list[float] = []
    repository = Repository("test/another", COMMIT, FILES)
    with pytest.raises(DownloadFailed, match="404"):
        fetch_weights(repository, [FILE], wait=waits.append)
    assert not waits
