"""Sharing a conversation, finding words in it, and what new conversations begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.web.conftest import Served
from tests.web.screen import ask, ended, hold, tab_to
from tests.web.test_manners import axe_violations
from tests.web.test_tools import press_on

WORDS = "The **first** word of it, and then a wordy end.\n\n```text\nword\n```"


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory, built: None) -> Iterator[Served]:
    script = [{"thought": "A word in a thought.", "answer": WORDS}]
    with Served(tmp_path_factory.mktemp("sharing"), "--share", script=script) as served:
        yield served


@pytest.fixture
def talk(page: Page, sharing: Served) -> Page:
    page.goto(sharing.url)
    ask(page, "What word?")
    ended(page)
    return page


def choose(page: Page, entry: str) -> None:
    page.get_by_role("button", name="More", exact=True).click()
    page.get_by_role("button", name=entry).click()


def test_a_link_is_made_read_by_a_stranger_and_revoked(talk: Page, browser: Browser) -> None:
    choose(talk, "Share…")
    dialog = talk.get_by_role("dialog", name="Share this conversation")
    dialog.get_by_role("button", name="Create link").click()
    expect(dialog.get_by_role("button", name="Copy")).to_be_focused()
    link = dialog.get_by_label("Link", exact=True).input_value()
    assert "/share/" in link
    assert axe_violations(talk) == []
    stranger = browser.new_context()
    page = stranger.new_page()
    broken: list[str] = []
    page.on("console", lambda told: broken.append(told.text))
    page.goto(link)
    expect(page.locator("article")).to_have_count(2)
    expect(page.locator("strong")).to_have_text("first")
    expect(page.get_by_text("A word in a thought.")).to_have_count(0)
    assert axe_violations_of_static(page) == []
    assert broken == []
    assert stranger.cookies() == []
    dialog.get_by_role("button", name="Revoke").click()
    expect(dialog.get_by_role("button", name="Revoke")).to_have_count(0)
    page.goto(link)
    expect(page.get_by_text("it has ended")).to_be_visible()
    assert axe_violations_of_static(page) == []
    stranger.close()


def axe_violations_of_static(page: Page) -> list[str]:
    """The sandbox of a shared page runs no script, so its elements are looked at from another page."""
    html = page.content()
    other = page.context.new_page()
    other.set_content(html)
    found = axe_violations(other)
    other.close()
    return found


def test_sharing_is_not_offered_where_the_operator_does_not_allow_it(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    ask(page, "Hello")
    ended(page)
    page.get_by_role("button", name="More", exact=True).click()
    expect(page.get_by_role("button", name="Find in conversation")).to_be_visible()
    expect(page.get_by_role("button", name="Share…")).to_have_count(0)


def test_words_are_found_in_what_is_shown(talk: Page) -> None:
    talk.get_by_role("heading", level=1).click()
    talk.keyboard.press("Alt+f")
    bar = talk.get_by_role("search", name="Find in conversation")
    field = bar.get_by_label("Find in conversation")
    expect(field).to_be_focused()
    field.fill("WORD")
    told = bar.get_by_role("status")
    expect(told).to_have_text("1 of 5")
    assert talk.evaluate("CSS.highlights.get('found').size") == 5
    field.press("Enter")
    expect(told).to_have_text("2 of 5, in a thought")
    expect(talk.get_by_text("A word in a thought.")).to_be_visible()
    field.press("Shift+Enter")
    field.press("Shift+Enter")
    expect(told).to_have_text("5 of 5")
    field.fill("first word")  # across elements
    expect(told).to_have_text("1 of 1")
    field.fill("(nothing")
    expect(told).to_have_text("No matches")
    assert axe_violations(talk) == []
    field.press("Escape")
    expect(bar).to_have_count(0)
    assert talk.evaluate("CSS.highlights.has('found')") is False
    expect(talk.get_by_text("A word in a thought.")).to_be_hidden()
    expect(talk.get_by_label("Message", exact=True)).to_be_focused()


def test_a_search_leads_to_a_thought_and_opens_it(talk: Page, sharing: Served) -> None:
    talk.goto(sharing.url)
    search = talk.get_by_label("Search conversations")
    search.fill("nowhere at all")
    expect(talk.get_by_text("Nothing found, neither in titles nor in messages.")).to_be_visible()
    search.fill("in thought")
    hit = talk.get_by_role("link", name="Thought:").first
    expect(hit).to_contain_text("A word in a thought.")
    assert axe_violations(talk) == []
    hit.focus()
    talk.keyboard.press("Enter")
    ended(talk)
    expect(talk.locator(".thinking .markdown")).to_have_text("A word in a thought.")


def test_new_conversations_begin_with_the_defaults_in_every_browser(
    page: Page, browser: Browser, sharing: Served
) -> None:
    page.goto(sharing.url)
    choose(page, "Defaults for new conversations")
    dialog = page.get_by_role("dialog", name="Defaults for new conversations")
    expect(dialog.get_by_role("tab", name="General")).to_be_focused()
    dialog.get_by_label("System prompt").fill("Be brief.")
    page.keyboard.press("Escape")
    expect(dialog.get_by_role("alert")).to_have_text("Discard your changes?")
    dialog.get_by_role("button", name="Keep editing").click()
    assert axe_violations(page) == []
    dialog.get_by_role("button", name="Save", exact=True).click()
    expect(dialog).to_have_count(0)
    context = browser.new_context(service_workers="block")
    other = context.new_page()
    go_on = hold(other, "**/api/defaults", "GET")
    other.route("**/api/defaults", lambda route: route.abort(), times=1)
    with other.expect_event("requestfailed", lambda one: one.url.endswith("/api/defaults")):
        other.goto(sharing.url)
    with other.expect_request(lambda one: one.method == "POST" and one.url.endswith("/api/conversations")) as made:
        ask(other, "Hello")
        expect(other.get_by_label("Message", exact=True)).to_have_value("Hello")  # it waits for them
        go_on()
    assert '"system":"Be brief."' in (made.value.post_data or "")
    ended(other)
    context.close()


def test_links_defaults_and_files_by_keyboard_alone(page: Page, sharing: Served, tmp_path: Path) -> None:
    def choose_entry(entry: str) -> None:
        press_on(page, page.get_by_role("button", name="More", exact=True))
        expect(page.locator("[popover]:popover-open").get_by_role("button").first).to_be_focused()
        for _ in range(20):
            if page.get_by_role("button", name=entry).evaluate("element => element === document.activeElement"):
                break
            page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")

    page.goto(sharing.url)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.type("What word?")
    page.keyboard.press("Enter")
    ended(page)

    choose_entry("Share…")
    dialog = page.get_by_role("dialog", name="Share this conversation")
    press_on(page, dialog.get_by_role("button", name="Create link"), key="Tab")
    expect(dialog.get_by_role("button", name="Copy")).to_be_focused()
    press_on(page, dialog.get_by_role("button", name="Revoke"), key="Tab")
    expect(dialog.get_by_role("button", name="Revoke")).to_have_count(0)
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)

    choose_entry("Defaults for new conversations")
    dialog = page.get_by_role("dialog", name="Defaults for new conversations")
    system = dialog.get_by_label("System prompt")
    tab_to(page, system)
    page.keyboard.press("Control+a")
    page.keyboard.type("Be polite.")
    with page.expect_request(lambda one: one.method != "GET" and one.url.endswith("/api/defaults")) as stored:
        press_on(page, dialog.get_by_role("button", name="Save", exact=True), key="Tab")
    assert "Be polite." in (stored.value.post_data or "")
    expect(dialog).to_have_count(0)

    file = tmp_path / "word.txt"
    file.write_text("a word")
    with page.expect_file_chooser() as chooser:
        press_on(page, page.get_by_role("button", name="Attach files", exact=True), key="Tab")
    chooser.value.set_files(file)  # the picker is the operating system's
    expect(page.get_by_role("list", name="Attached files")).to_contain_text("word.txt")
