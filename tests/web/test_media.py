"""Files on the page: documents as text, media with previews, pictures that open, sound and videos that play."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests import media_files
from tests.web.conftest import PATIENCE, Served, stored
from tests.web.screen import answer, ask, conversation, ended

PARAGRAPH = "<w:p><w:r><w:t>{}</w:t></w:r></w:p>"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, built: None) -> Iterator[Served]:
    """A server whose model says that it accepts media."""
    script = [{"thought": "", "answer": "Yes."}]
    with Served(tmp_path_factory.mktemp("seeing"), "--media", "image", "audio", "video", script=script) as served:
        yield served


@pytest.fixture
def api(quick: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=quick.url, timeout=PATIENCE) as client:
        yield client


@pytest.mark.parametrize("kind", ["pdf", "docx"])
def test_a_document_is_attached_as_its_text(
    page: Page, quick: Served, api: httpx.Client, tmp_path: Path, kind: str
) -> None:
    words = "Leaves at nine"
    file = tmp_path / f"trip.{kind}"
    file.write_bytes(media_files.pdf(words) if kind == "pdf" else media_files.docx(PARAGRAPH.format(words)))
    page.goto(quick.url)
    page.locator("form input[type=file]").set_input_files([file])
    expect(page.get_by_label("Attached files")).to_contain_text(file.name)
    ask(page, "When does it leave?")
    ended(page)
    parts = stored(api, conversation(page))[0]["parts"]
    assert parts[1]["text"] == f"\n\nFile {file.name}:\n\n{words}"
    page.get_by_text(file.name).click()
    expect(page.locator("details.file pre")).to_have_text(words)


def test_a_damaged_pdf_says_why(page: Page, quick: Served, tmp_path: Path) -> None:
    file = tmp_path / "broken.pdf"
    file.write_bytes(b"%PDF-1.7 and no more")
    page.goto(quick.url)
    page.locator("form input[type=file]").set_input_files([file])
    expect(page.get_by_role("alert")).to_contain_text("broken.pdf is damaged")


PASTE = """(element, data) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0))
  const clipboard = new DataTransfer()
  clipboard.items.add(new File([bytes], 'image.png', { type: 'image/png' }))
  element.dispatchEvent(new ClipboardEvent('paste', { clipboardData: clipboard, bubbles: true, cancelable: true }))
}"""


def test_a_picture_is_pasted_and_seen(page: Page, tmp_path_factory: pytest.TempPathFactory, built: None) -> None:
    """By the model that sees and hears."""
    with Served(tmp_path_factory.mktemp("omni"), "--gguf", "sprout-omni") as omni:
        page.goto(omni.url)
        red = base64.b64encode(media_files.picture(size=(64, 64))).decode()
        page.get_by_label("Message", exact=True).evaluate(PASTE, red)
        expect(page.get_by_label("Attached files").get_by_role("img")).to_be_visible()
        ask(page, "What colour is it?")
        assert "red" in answer(ended(page)).lower()


def test_media_are_shown_before_they_are_sent(page: Page, seeing: Served, tmp_path: Path) -> None:
    picture, sound = tmp_path / "red.png", tmp_path / "tone.wav"
    picture.write_bytes(media_files.picture(size=(40, 30)))
    sound.write_bytes(media_files.sound())
    page.goto(seeing.url)
    page.locator("form input[type=file]").set_input_files([picture, sound])
    attached = page.get_by_label("Attached files")
    expect(attached.get_by_role("img", name="red.png")).to_be_visible()
    expect(attached.locator("audio")).to_be_visible()
    attached.get_by_role("button", name="Remove tone.wav").click()
    expect(attached.locator("audio")).to_have_count(0)
    page.reload()
    expect(attached.get_by_role("img", name="red.png")).to_be_visible()
    page.get_by_role("textbox", name="Message").fill("What is it?")
    with page.expect_request("**/say") as request:
        page.get_by_role("button", name="Send").click()
    text, blob = json.loads(request.value.post_data or "")["message"]["parts"]
    assert text == {"type": "text", "text": "What is it?"}
    assert (blob["type"], blob["kind"], blob["name"]) == ("blob", "image", "red.png")
    assert (blob["width"], blob["height"]) == (40, 30)


def test_a_file_that_lies_says_why(page: Page, seeing: Served, tmp_path: Path) -> None:
    file = tmp_path / "cat.png"
    file.write_bytes(b"MZ and no picture")
    page.goto(seeing.url)
    page.locator("form input[type=file]").set_input_files([file])
    expect(page.get_by_role("alert")).to_contain_text("cat.png is of a type that is not supported")


def test_stored_media_are_shown_and_pictures_open(page: Page, quick: Served, api: httpx.Client) -> None:
    talk = api.post("/api/conversations", json={}).json()["id"]
    files = {
        "red.png": media_files.picture(size=(900, 600)),
        "tone.wav": media_files.sound(),
        "film.webm": media_files.video("webm", 2.0, "libvpx", "libopus"),
    }
    octets = {"content-type": "application/octet-stream"}
    parts = [
        {"type": "blob", **api.post("/api/blobs", params={"name": name}, content=data, headers=octets).json()}
        for name, data in files.items()
    ]
    message = {"role": "user", "parts": [{"type": "text", "text": "See:"}, *parts]}
    api.post(f"/api/conversations/{talk}/messages", json={"parent": None, "message": message}).raise_for_status()
    page.goto(f"{quick.url}/#/c/{talk}")
    said = page.locator("article.user")
    expect(said.get_by_role("img", name="red.png")).to_be_visible()
    said.get_by_role("button", name="Open red.png").click()
    shown = page.get_by_role("dialog").get_by_role("img", name="red.png")
    expect(shown).to_be_visible()
    assert shown.evaluate("(image) => image.naturalWidth") == 900
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    for kind in ("audio", "video"):
        length = "(media) => media.readyState > 0 && media.duration > 0.4"
        script = f"() => ({length})(document.querySelector('article.user {kind}'))"
        page.wait_for_function(script, timeout=PATIENCE * 1000)
