"""HTML, SVG and diagrams that a model wrote are shown in a frame that can reach nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.web.conftest import Served
from tests.web.screen import ask, ended
from tests.web.test_manners import axe_violations

HTML = """<!doctype html><title>x</title><h1 id="made">Made</h1>
<img src="OUTSIDE/img"><link rel="stylesheet" href="OUTSIDE/css"><iframe src="OUTSIDE/frame"></iframe>
<form action="OUTSIDE/form"><button>go</button></form>
<script>
const told = []
const attempt = (name, act) => { try { act(); told.push(name) } catch { told.push('no ' + name) } }
attempt('cookie', () => document.cookie)
attempt('storage', () => localStorage.length)
attempt('parent', () => parent.document.title)
attempt('top', () => { top.location = 'OUTSIDE/top' })
attempt('popup', () => { if (!window.open('OUTSIDE/popup')) throw 0 })
attempt('peer', () => new RTCPeerConnection())
attempt('socket', () => { new WebSocket('ws' + 'OUTSIDE/socket'.slice(4)) })
const urls = ['OUTSIDE/fetch', 'SERVER/api/conversations', './api/session']
const tries = urls.map((url) => fetch(url).then(() => url, () => 'no fetch'))
new Image().src = 'OUTSIDE/image'
navigator.sendBeacon('OUTSIDE/beacon')
Promise.all(tries).then((all) => {
  document.getElementById('made').textContent = [...told, ...all, origin].join(', ')
})
</script>"""
SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="80" height="40" onload="parent.postMessage('ran', '*')">
<script>parent.postMessage('ran', '*')</script><image href="OUTSIDE/svg"/>
<rect width="80" height="40" fill="green"/></svg>"""
LEAVES = "<script>location = 'OUTSIDE/leave'</script><p>left behind</p>"
DIAGRAM = 'graph LR\n  A[Start] --> B["<img src=x onerror=alert(1)>"]\n  click A "OUTSIDE/click"'


class Outside:
    """Another server, which nobody may reach: counts connections."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.reached: list[bytes] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                self.reached.append(connection.recv(200))

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def outside() -> Iterator[Outside]:
    outside = Outside()
    yield outside
    outside.close()


def test_previews_reach_nothing(page: Page, outside: Outside, tmp_path: Path, built: None) -> None:
    served = Served(tmp_path / "preview")
    blocks = {"html": HTML, "svg": SVG, "htm": LEAVES, "mermaid": DIAGRAM, "python": "print(1)"}
    answer = "\n\n".join(f"```{name}\n{text}\n```" for name, text in blocks.items())
    answer = answer.replace("OUTSIDE", outside.url).replace("SERVER", served.url)
    with Served(tmp_path / "preview", script=[{"thought": "", "answer": answer}]) as served:
        page.goto(served.url)
        page.evaluate("() => { window.heard = []; addEventListener('message', (event) => heard.push(event.data)) }")
        ask(page, "Show me")
        reply = ended(page)
        assert reply.locator("iframe").count() == 0, "nothing is shown unasked"
        buttons = reply.get_by_role("button", name="Preview of")
        expect(buttons).to_have_count(4)
        buttons.nth(0).focus()
        page.keyboard.press("Enter")
        frame = reply.locator("iframe").first
        assert frame.get_attribute("sandbox") == "allow-scripts"
        heading = reply.frame_locator("iframe").first.locator("#made")
        expect(heading).to_have_text(
            "no cookie, no storage, no parent, no top, no popup, no peer, socket, no fetch, no fetch, no fetch, null"
        )
        assert axe_violations(page) == []
        buttons.nth(0).click()
        expect(reply.locator("iframe")).to_have_count(0)
        buttons.nth(1).click()
        picture = reply.frame_locator("iframe").locator("img")
        expect(picture).to_be_visible()
        assert picture.evaluate("picture => picture.decode().then(() => picture.naturalWidth)") == 80
        buttons.nth(1).click()
        with page.expect_event("console", lambda told: "frame-src" in told.text):
            buttons.nth(2).click()  # it tries to go elsewhere
        buttons.nth(2).click()
        buttons.nth(3).click()
        diagram = reply.frame_locator("iframe").locator("svg#diagram")
        expect(diagram).to_contain_text("Start")
        assert diagram.locator("[onerror]").count() == 0
        assert "ran" not in page.evaluate("heard")
        assert page.url.startswith(served.url)
    assert outside.reached == []
