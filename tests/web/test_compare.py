"""Comparing replies on the page: side by side, as tabs on a phone, by keyboard, blind, after a kill of the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.store.test_comparisons import check_preferences
from tests.web.conftest import PATIENCE, Served
from tests.web.forked import HOLD
from tests.web.screen import act, ask, keep_picture, last_reply, replies, tab_to
from tests.web.test_manners import axe_violations
from tests.web.test_tools import press_on

RISES = " in the Alps, passes Basel, Cologne and Rotterdam, and ends in the North Sea. "
SCRIPT = [
    {"thought": "A river in Europe.", "answer": f"First: The Rhine rises{HOLD}{RISES}"},
    {"thought": "Another river.", "answer": f"Second: The Rhine rises{HOLD}{RISES}"},
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, built: None) -> Iterator[Served]:
    """A server that can hold both replies in the middle of their answers."""
    with Served(tmp_path_factory.mktemp("compare"), script=SCRIPT) as server:
        yield server


@pytest.fixture
def talk(page: Page, served: Served) -> Iterator[Page]:
    page.goto(served.url)
    expect(page.get_by_label("Message", exact=True)).to_be_enabled()
    yield page
    served.go_on()


def start_comparing(page: Page, blind: bool = False, is_phone: bool = False) -> None:
    """By the keyboard alone."""
    if is_phone:
        press_on(page, page.get_by_role("button", name="Attach and more"), key="Tab")
    press_on(page, page.get_by_role("button", name="Compare replies"), key="Tab")
    dialog = page.get_by_role("dialog", name="Compare replies")
    for field, text in ((dialog.get_by_label("Temperature").first, "0"), (dialog.get_by_label("Name").nth(1), "warm")):
        tab_to(page, field)
        page.keyboard.type(text)
    if blind:
        tab_to(page, dialog.get_by_label("Blind"))
        page.keyboard.press("Space")
        expect(dialog.get_by_label("Blind")).to_be_checked()
    press_on(page, dialog.get_by_role("button", name="Start comparing"), key="Tab")
    expect(dialog).to_have_count(0)


def compared(page: Page) -> Locator:
    return page.get_by_role("region", name="Compared replies")


def columns(page: Page) -> Locator:
    return compared(page).locator(".column")


def test_replies_stand_side_by_side_and_one_is_chosen(talk: Page, served: Served) -> None:
    start_comparing(talk)
    served.hold()
    ask(talk, "Name a river.")
    expect(columns(talk)).to_have_count(2)
    expect(columns(talk).nth(0)).to_contain_text("scripted · temperature 0")
    expect(columns(talk).nth(1)).to_contain_text("warm")
    boxes = [columns(talk).nth(number).bounding_box() for number in (0, 1)]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    compared(talk).get_by_role("button", name="Stop all").click()
    for number in (0, 1):
        expect(replies(talk).nth(number)).to_have_attribute("data-status", "stopped")
    served.go_on()
    for number in (0, 1):
        columns(talk).nth(number).get_by_role("button", name="Continue").click()
    for number in (0, 1):
        expect(replies(talk).nth(number)).to_have_attribute("data-status", "done")
    expect(compared(talk)).to_contain_text("Choose a reply to go on with it.")
    assert axe_violations(talk) == []
    compared(talk).get_by_role("button", name="Tokens").last.click()
    expect(compared(talk).get_by_role("application")).to_have_count(2)
    compared(talk).get_by_role("application").first.press("ArrowRight")
    assert axe_violations(talk) == []
    keep_picture(talk, "compare-tokens")
    compared(talk).get_by_role("button", name="Tokens").last.click()
    keep_picture(talk, "compare")
    talk.reload()  # the comparison is still there
    second = columns(talk).nth(1).locator("article").get_attribute("data-id")
    columns(talk).nth(1).get_by_role("button", name="Choose warm").click()
    expect(compared(talk)).to_have_count(0)
    expect(last_reply(talk)).to_have_attribute("data-id", second or "")
    expect(talk.get_by_label("Message", exact=True)).to_be_focused()
    act(talk.locator("article.user"), "Show the replies side by side")
    expect(columns(talk).nth(1)).to_contain_text("Go on with this")
    columns(talk).nth(1).get_by_role("button", name="Choose warm").click()
    expect(last_reply(talk)).to_have_attribute("data-id", second or "")
    talk.get_by_role("button", name="Compare replies").click()
    dialog = talk.get_by_role("dialog", name="Compare replies")
    expect(dialog.get_by_role("row", name="warm")).to_contain_text("1 of 1")
    assert axe_violations(talk) == []
    keep_picture(talk, "compare-settings")
    with talk.expect_download() as download:
        dialog.get_by_role("link", name="Export the choices").click()
    (pair,) = check_preferences(download.value.path().read_text())
    assert pair["prompt"] == [{"role": "user", "content": "Name a river."}]
    dialog.get_by_role("button", name="Stop comparing").click()
    ask(talk, "And now?")
    expect(replies(talk)).to_have_count(2)


def test_a_blind_comparison_by_keyboard_alone(talk: Page, served: Served) -> None:
    start_comparing(talk, blind=True)
    served.hold()
    talk.get_by_label("Message", exact=True).focus()
    talk.keyboard.type("Name a river.")
    talk.keyboard.press("Enter")
    expect(columns(talk).nth(1)).to_contain_text("Reply 2")
    talk.keyboard.press("Escape")  # stops both
    for number in (0, 1):
        expect(replies(talk).nth(number)).to_have_attribute("data-status", "stopped")
    assert "warm" not in (compared(talk).text_content() or "")
    press_on(talk, compared(talk).get_by_role("button", name="Choose Reply 2"))
    expect(talk.get_by_text("Reply 1 was")).to_contain_text("warm")
    expect(compared(talk)).to_have_count(0)
    expect(talk.get_by_label("Message", exact=True)).to_be_focused()


def test_a_phone_has_tabs(browser: Browser, served: Served) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 780}, color_scheme="dark", has_touch=True)
    page = context.new_page()
    page.goto(served.url)
    start_comparing(page, is_phone=True)
    page.get_by_label("Message", exact=True).fill("Name a river.")
    page.get_by_role("button", name="Send").click()
    tabs = compared(page).get_by_role("tab")
    expect(tabs).to_have_count(2)
    expect(columns(page).nth(0)).to_be_visible()
    expect(columns(page).nth(1)).to_be_hidden()
    tabs.first.focus()
    page.keyboard.press("ArrowRight")
    expect(columns(page).nth(1)).to_be_visible()
    expect(tabs.nth(1)).to_be_focused()
    expect(page.locator("article.assistant").nth(1)).to_have_attribute("data-status", "done")
    expect(page.locator("article.assistant").nth(0)).to_have_attribute("data-status", "done")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert axe_violations(page) == []
    keep_picture(page, "compare-phone")
    compared(page).get_by_role("tabpanel").get_by_role("button", name="Choose").click()
    expect(compared(page)).to_have_count(0)
    context.close()


@pytest.mark.slow
def test_both_replies_go_on_after_the_server_was_killed(page: Page, tmp_path: Path, built: None) -> None:
    with Served(tmp_path, script=SCRIPT) as server:
        page.goto(server.url)
        start_comparing(page)
        server.hold()
        ask(page, "Name a river.")
        for number in (0, 1):
            expect(replies(page).nth(number)).to_contain_text("The Rhine rises")
        server.kill()
        server.go_on()
        server.start()
        texts = set()
        for number in (0, 1):
            reply = replies(page).nth(number)
            expect(reply).to_have_attribute("data-status", "done")
            texts.add((reply.locator(".parts > .markdown").text_content() or "").strip()[:5])
        assert texts == {"First", "Secon"}
        columns(page).nth(0).get_by_role("button", name="Choose").click()
        expect(compared(page)).to_have_count(0)
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as api:
            lines = api.get("/api/comparisons/preferences").text.splitlines()
        assert [json.loads(line)["prompt"][0]["content"] for line in lines] == ["Name a river."]
