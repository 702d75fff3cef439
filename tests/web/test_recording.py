"""The microphone and the camera: sound and pictures to attach, and speech that is written down."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.voice.tiny_models import make_whisper
from tests.web.conftest import PATIENCE, Served
from tests.web.screen import ask, conversation, ended, keep_picture
from tests.web.test_design import rows_of_buttons, small_targets, too_wide
from tests.web.test_manners import axe_violations

DENIED = """navigator.mediaDevices.getUserMedia = () => Promise.reject(new DOMException('no', 'NotAllowedError'))"""


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory, built: None) -> Iterator[Served]:
    """A server whose model accepts media, and that transcribes."""
    whisper = make_whisper(tmp_path_factory.mktemp("whisper"))
    options = ("--media", "image", "audio", "video", "--transcriber", str(whisper))
    script = [{"thought": "", "answer": "Yes."}]
    with Served(tmp_path_factory.mktemp("listening"), *options, script=script) as served:
        yield served


@pytest.fixture
def open_page(page: Page, listening: Served) -> Page:
    page.goto(listening.url)
    expect(page.get_by_role("button", name="Dictate")).to_be_visible()
    return page


def record(page: Page, button: str, group: str) -> Locator:
    """Starts a recording, and waits until the microphone was heard."""
    page.get_by_role("button", name=button).click()
    panel = page.get_by_role("group", name=group)
    expect(panel.get_by_role("timer")).to_contain_text(" s")
    heard = "() => document.querySelector('meter').value > 0.3"
    page.wait_for_function(heard, timeout=PATIENCE * 1000)
    return panel


def attached_blob(page: Page) -> dict[str, object]:
    """The file that is sent with a message."""
    page.get_by_role("textbox", name="Message").fill("What is it?")
    with page.expect_request("**/say") as request:
        page.get_by_role("button", name="Send").click()
    _, blob = json.loads(request.value.post_data or "")["message"]["parts"]
    assert isinstance(blob, dict)
    return blob


def test_a_picture_is_taken_and_attached(open_page: Page) -> None:
    page = open_page
    page.get_by_role("button", name="Take a picture").click()
    dialog = page.get_by_role("dialog", name="Camera")
    expect(dialog.get_by_role("button", name="Take the picture")).to_be_enabled()
    dialog.get_by_role("button", name="Take the picture").click()
    expect(dialog).to_have_count(0)
    expect(page.get_by_label("Attached files").get_by_role("img", name="picture.jpg")).to_be_visible()
    blob = attached_blob(page)
    assert (blob["kind"], blob["media_type"]) == ("image", "image/jpeg")
    assert int(str(blob["width"])) >= 320


def test_sound_is_recorded_attached_and_played(open_page: Page) -> None:
    page = open_page
    panel = record(page, "Record sound", "Recording sound")
    page.wait_for_timeout(700)
    panel.get_by_role("button", name="Attach").click()
    expect(panel).to_have_count(0)
    player = page.get_by_label("Attached files").locator("audio")
    expect(player).to_be_visible()
    page.wait_for_function("() => document.querySelector('.files audio').readyState > 0", timeout=PATIENCE * 1000)
    blob = attached_blob(page)
    assert (blob["kind"], blob["media_type"]) == ("audio", "audio/webm")
    assert float(str(blob["seconds"])) > 0.5


def test_what_is_dictated_can_be_edited_before_it_is_sent(open_page: Page, listening: Served) -> None:
    page = open_page
    field = page.get_by_role("textbox", name="Message")
    field.fill("Please answer: ")
    panel = record(page, "Dictate", "Dictating")
    with page.expect_response("**/api/transcriptions*") as response:
        panel.get_by_role("button", name="Write it down").click()
    words = response.value.json()["text"]
    assert words
    expect(field).to_have_value(f"Please answer: {words}")
    expect(field).to_be_focused()
    ask(page, "Something else, which was edited")
    ended(page)
    leaf = httpx.get(f"{listening.url}/api/conversations/{conversation(page)}/newest-leaf").json()["id"]
    first, _ = httpx.get(f"{listening.url}/api/messages/{leaf}/path").json()
    assert [part["text"] for part in first["parts"]] == ["Something else, which was edited"]


def test_a_cancelled_recording_leaves_nothing(open_page: Page) -> None:
    page = open_page
    panel = record(page, "Dictate", "Dictating")
    expect(page.get_by_role("button", name="Record sound")).to_be_disabled()
    panel.get_by_role("button", name="Cancel").click()
    expect(panel).to_have_count(0)
    expect(page.get_by_role("button", name="Dictate")).to_be_enabled()
    expect(page.get_by_role("textbox", name="Message")).to_have_value("")
    page.get_by_role("button", name="Take a picture").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.get_by_label("Attached files")).to_have_count(0)


def test_a_device_that_is_denied_says_why(page: Page, listening: Served) -> None:
    page.add_init_script(DENIED)
    page.goto(listening.url)
    page.get_by_role("button", name="Dictate").click()
    expect(page.get_by_role("alert")).to_contain_text("The microphone may not be used here.")
    page.get_by_role("button", name="Take a picture").click()
    expect(page.get_by_role("alert")).to_contain_text("The camera may not be used here.")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_a_text_model_without_a_transcriber_offers_neither(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    expect(page.get_by_role("button", name="Attach files")).to_be_visible()
    for name in ("Dictate", "Record sound", "Take a picture"):
        expect(page.get_by_role("button", name=name)).to_have_count(0)


def test_axe_finds_nothing_grave(open_page: Page) -> None:
    page = open_page
    record(page, "Record sound", "Recording sound")
    assert axe_violations(page) == []
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Take a picture").click()
    expect(page.get_by_role("button", name="Take the picture")).to_be_enabled()
    assert axe_violations(page) == []


RECOGNISER = """
window.SpeechRecognition = class {
  static available = async ({ langs, processLocally }) => (processLocally && langs.length ? STATE : 'available')
  get processLocally() { return this.local }
  set processLocally(local) { this.local = local }
  start() {
    if (!this.local) throw new Error('sent elsewhere')
    const words = ['Two words', ' and three more']
    setTimeout(() => this.onresult({ results: words.map((transcript) => [{ transcript }]) }))
  }
  stop() { setTimeout(() => this.onend()) }
  abort() { }
}"""
"""A browser that recognises speech; STATE is whether it can on this device."""


def test_a_browser_that_recognises_speech_on_this_device_takes_dictation(page: Page, quick: Served) -> None:
    page.add_init_script(RECOGNISER.replace("STATE", "'available'"))
    page.goto(quick.url)
    field = page.get_by_role("textbox", name="Message")
    field.fill("Well:")
    page.get_by_role("button", name="Dictate").click()
    panel = page.get_by_role("group", name="Dictating")
    expect(panel.get_by_role("status")).to_have_text("Two words and three more")
    assert axe_violations(page) == []
    panel.get_by_role("button", name="Write it down").click()
    expect(panel).to_have_count(0)
    expect(field).to_have_value("Well: Two words and three more")
    expect(field).to_be_focused()


def test_a_browser_that_would_send_speech_elsewhere_takes_none(page: Page, quick: Served) -> None:
    page.add_init_script(RECOGNISER.replace("STATE", "'downloadable'"))
    page.goto(quick.url)
    expect(page.get_by_role("group", name="Examples")).to_be_visible()
    expect(page.get_by_role("button", name="Dictate")).to_have_count(0)


@pytest.mark.parametrize("width", [360, 390])
def test_the_buttons_of_a_phone_have_one_row(browser: Browser, listening: Served, width: int) -> None:
    """Of a model that sees and hears."""
    context = browser.new_context(viewport={"width": width, "height": 844}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(listening.url)
    expect(page.get_by_role("button", name="Dictate")).to_be_visible()
    expect(page.get_by_role("switch", name="Thinking")).to_be_visible()
    assert rows_of_buttons(page) == 1
    page.get_by_role("button", name="Attach and more").tap()
    for name in ("Attach files", "Record sound", "Voice", "Take a picture"):
        expect(page.get_by_role("button", name=name, exact=True)).to_be_visible()
    assert small_targets(page) == []
    keep_picture(page, f"phone-menu-{width}")
    page.get_by_role("button", name="Compare replies").tap()
    page.get_by_role("button", name="Start comparing").tap()
    expect(page.get_by_role("button", name="Compare replies")).to_contain_text("2")
    assert rows_of_buttons(page) == 1
    assert too_wide(page) == []
    keep_picture(page, f"phone-compare-{width}")
    page.get_by_label("Message", exact=True).fill("word " * 900)
    expect(page.locator(".composer .count")).to_be_visible()
    assert rows_of_buttons(page) == 1
    assert too_wide(page) == []
    assert page.evaluate("innerWidth") == width  # wider contents widen it
    keep_picture(page, f"phone-count-{width}")
    page.get_by_role("button", name="Attach and more").tap()
    page.get_by_role("button", name="Take a picture").tap()
    expect(page.get_by_role("dialog", name="Camera")).to_be_visible()
    context.close()
