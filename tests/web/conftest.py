"""A real browser, the page as it is built, and servers that can be killed."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Playwright, expect, sync_playwright

from tests.web.forked import HELD, fork_server

ROOT = Path(__file__).parents[2]
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 240.0
"""Seconds for which anything is waited for; what takes its time on a busy machine is no failure."""
expect.set_options(timeout=PATIENCE * 1000)
THOUGHT = "The first line of it.\nThe second line of it.\n\nAnother paragraph."
ENDLESS_THOUGHT = THOUGHT + " and so on" * 8_000


class Served:
    """A server in a process of its own."""

    def __init__(self, folder: Path, *options: str, script: Sequence[dict[str, str]] = ()) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._options = list(options)
        if script:
            (folder / "script.json").write_text(json.dumps(list(script)))
            self._options += ["--script", str(folder / "script.json")]
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: BaseProcess | None = None

    def __enter__(self) -> Served:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, ready: bool = True) -> None:
        self._process = fork_server([str(self.folder), "--port", str(self.port), *self._options])
        until = time.monotonic() + PATIENCE
        while ready and not self._is_ready():
            assert self._process.exitcode is None, "the server ended"
            assert time.monotonic() < until, "the server did not come up"
            time.sleep(0.05)

    def hold(self, mark: int = 0) -> None:
        """Lets replies wait at this mark of their script and at those after it."""
        written = self.folder / f"{HELD}.new"
        written.write_text(str(mark))
        written.replace(self.folder / HELD)

    def go_on(self) -> None:
        (self.folder / HELD).unlink(missing_ok=True)

    def engine_processes(self) -> list[psutil.Process]:
        assert self._process is not None
        return psutil.Process(self._process.pid).children(recursive=True)

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def kill(self) -> None:
        """Without a word of warning."""
        if self._process is not None:
            self._process.kill()
            self._wait()

    def end(self) -> None:
        """In order."""
        if self._process is not None:
            self._process.terminate()
            self._wait()

    def _wait(self) -> None:
        assert self._process is not None
        self._process.join()
        self._process = None

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code in (200, 401)
        except httpx.HTTPError:
            return False


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def built() -> None:
    """The page, built once where its sources are newer."""
    building = runpy.run_path(str(ROOT / "web" / "build.py"))
    if not building["has_node"]():
        pytest.skip("!!! THE PAGE IS NOT TESTED: no Node to build it with (see web/build.py)")
    building["build"]()


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as playwright:
        yield playwright


@pytest.fixture(scope="session")
def browser(playwright: Playwright, built: None) -> Iterator[Browser]:
    if not _chromium():
        pytest.skip("!!! THE PAGE IS NOT TESTED: no Chromium on this machine (Debian: apt install chromium)")
    browser = launched(playwright)
    yield browser
    browser.close()


def _chromium() -> str | None:
    return next(filter(None, map(shutil.which, CHROMIUM)), None)


def launched(playwright: Playwright) -> Browser:
    """The machine's own Chromium, with a microphone that beeps and a camera that shows a moving shape."""
    devices = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    options = ["--no-sandbox", "--disable-dev-shm-usage", *devices]
    return playwright.chromium.launch(executable_path=_chromium(), args=options)


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """Without a service worker, past which no request can be held up."""
    context = browser.new_context(
        viewport={"width": 1200, "height": 800}, reduced_motion="reduce", service_workers="block"
    )
    context.set_default_timeout(PATIENCE * 1000)
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """Nothing on it may fail unseen."""
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    assert errors == []


@pytest.fixture(scope="session")
def sprout(tmp_path_factory: pytest.TempPathFactory, built: None) -> Iterator[Served]:
    """One server with the embedded model, for all tests that don't break it. `PALAVER_PAGE_MODEL=q8_0`: as GGUF."""
    kind = os.environ.get("PALAVER_PAGE_MODEL")
    folder = tmp_path_factory.mktemp("sprout")
    with Served(folder, *(("--gguf", str(gguf_sprout(folder, kind))) if kind else ())) as served:
        yield served


def gguf_sprout(folder: Path, kind: str) -> Path:
    """The embedded model as a GGUF file of this type."""
    from palaver.models.resolver import resolve_folder
    from tests.gguf_files import convert_qwen3

    return convert_qwen3(resolve_folder("sprout"), folder / "sprout.gguf", kind)


@pytest.fixture(scope="session")
def quick(tmp_path_factory: pytest.TempPathFactory, built: None) -> Iterator[Served]:
    """One server whose replies are over at once."""
    with Served(tmp_path_factory.mktemp("quick"), script=[{"thought": THOUGHT, "answer": "Yes."}]) as served:
        yield served


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory, built: None) -> Iterator[Served]:
    """One server whose replies think until they are stopped: nobody is too late to stop them."""
    script = [{"thought": ENDLESS_THOUGHT, "answer": "Yes."}]
    with Served(tmp_path_factory.mktemp("endless"), "--rate", "60", script=script) as served:
        yield served


@pytest.fixture
def api(sprout: Served) -> Iterator[httpx.Client]:
    alone = httpx.Limits(max_keepalive_connections=0)  # a connection that idles is closed at any moment
    with httpx.Client(base_url=sprout.url, timeout=PATIENCE, limits=alone) as client:
        yield client


def stored(api: httpx.Client, conversation: str) -> list[dict[str, Any]]:
    """The branch that was written to last, as the server has it."""
    leaf = api.get(f"/api/conversations/{conversation}/newest-leaf").json()["id"]
    found: list[dict[str, Any]] = api.get(f"/api/messages/{leaf}/path").json()
    return found


def text_of(message: dict[str, Any], kind: str = "text") -> str:
    return "".join(part["text"] for part in message["parts"] if part["type"] == kind)
