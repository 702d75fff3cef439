"""The end of a reply, told while the tab is hidden."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.web.conftest import Served
from tests.web.forked import HOLD
from tests.web.screen import ask, conversation, ended, keep_picture, last_reply
from tests.web.test_manners import axe_violations

NOTIFICATION = """permission => {
  window.shown = []
  window.Notification = class {
    static permission = 'default'
    static requestPermission = async () => (Notification.permission = permission)
    constructor(title, { body }) { shown.push(`${title}: ${body}`) }
    close() {}
  }
}"""
SETTLED_MS = 2500


@pytest.fixture
def served(tmp_path_factory: pytest.TempPathFactory, built: None) -> Iterator[Served]:
    """A server that can hold a reply."""
    with Served(tmp_path_factory.mktemp("held"), script=[{"thought": "", "answer": f"One{HOLD} two."}]) as server:
        yield server


def see(page: Page, state: str) -> None:
    """A browser without a screen never hides a tab: the page is told so."""
    page.evaluate(
        """state => {
          Object.defineProperty(document, 'visibilityState', { value: state, configurable: true })
          document.dispatchEvent(new Event('visibilitychange'))
        }""",
        state,
    )


def open_page(page: Page, served: Served, permission: str) -> None:
    page.add_init_script(f"({NOTIFICATION})('{permission}')")
    page.goto(served.url)


def switch_on(page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("tab", name="Browser").click()
    dialog.get_by_role("switch", name="Tell me when a reply ends").click()
    keep_picture(page, "notification-settings")
    assert axe_violations(page) == []


def end_hidden(page: Page, served: Served) -> None:
    """A reply that ends while the tab is hidden."""
    served.hold()
    ask(page, "Count.")
    conversation(page)
    expect(last_reply(page)).to_contain_text("One")
    see(page, "hidden")
    served.go_on()


@pytest.mark.parametrize("permission", ["granted", "denied"])
def test_the_end_of_a_reply_is_told_while_the_tab_is_hidden(page: Page, served: Served, permission: str) -> None:
    open_page(page, served, permission)
    switch_on(page)
    denied = page.get_by_role("dialog").get_by_text("This browser allows no notifications here.")
    expect(denied).to_have_count(1 if permission == "denied" else 0)
    page.keyboard.press("Escape")
    end_hidden(page, served)
    expect(page).to_have_title("● Count. · Palaver")
    shown = ["Count.: The reply has ended."] if permission == "granted" else []
    assert page.evaluate("shown") == shown
    see(page, "visible")
    expect(page).to_have_title("Count. · Palaver")
    ended(page)


def test_nothing_is_told_unasked_or_while_the_tab_is_seen(page: Page, served: Served) -> None:
    open_page(page, served, "granted")
    end_hidden(page, served)
    page.wait_for_timeout(SETTLED_MS)
    see(page, "visible")
    ended(page)
    switch_on(page)
    page.keyboard.press("Escape")
    ask(page, "Again.")
    ended(page)
    page.wait_for_timeout(SETTLED_MS)
    expect(page).to_have_title(re.compile("^Count"))
    assert page.evaluate("shown") == []
