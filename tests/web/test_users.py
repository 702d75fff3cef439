"""Several users of one browser: none sees or sends what another one has written and not sent yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from playwright.sync_api import Locator, Page, Route, expect

from palaver.store import open_store
from tests.web.conftest import PATIENCE, Served
from tests.web.screen import ask, ended, hold, until
from tests.web.test_never_lost import send_without_an_answer


@dataclass
class Users:
    served: Served
    keys: dict[str, str]

    def sign_in(self, page: Page, name: str) -> None:
        page.get_by_label("Key").fill(self.keys[name])
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("button", name="Sign out")).to_be_visible()

    def count(self, name: str) -> int:
        """How many conversations the user has."""
        headers = {"x-api-key": self.keys[name]}
        return len(httpx.get(f"{self.served.url}/api/conversations", headers=headers, timeout=PATIENCE).json())


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory, built: None) -> Iterator[Users]:
    folder = tmp_path_factory.mktemp("users")
    with open_store(folder) as store:
        keys = {name: store.keys.add(store.users.ensure(name).id)[1] for name in ("alice", "bob")}
    with Served(folder, "--host", "0.0.0.0", script=[{"thought": "Hm", "answer": "Come in."}]) as served:
        yield Users(served, keys)


def sign_out(page: Page) -> None:
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("Key")).to_be_visible()


def message_field(page: Page) -> Locator:
    return page.get_by_label("Message", exact=True)


@pytest.mark.parametrize("path", ["/api/conversations", "/say"])
def test_another_user_gets_neither_drafts_nor_messages(page: Page, users: Users, path: str) -> None:
    page.goto(users.served.url)
    users.sign_in(page, "alice")
    if path == "/say":
        ask(page, "first of alice")
        ended(page)
    send_without_an_answer(page, path, "sent by alice")
    message_field(page).fill("draft of alice")
    sign_out(page)
    users.sign_in(page, "bob")
    for place in ("", "#/"):
        page.goto(page.url if not place else users.served.url + place)
        expect(message_field(page)).to_have_value("")
        expect(page.get_by_text("of alice")).to_have_count(0)
        expect(page.get_by_text("sent by alice")).to_have_count(0)
    message_field(page).fill("draft of bob")
    page.reload()
    expect(message_field(page)).to_have_value("draft of bob")
    assert users.count("bob") == 0
    address = page.url
    sign_out(page)
    users.sign_in(page, "alice")
    if path == "/say":
        page.get_by_role("link", name="first of alice").first.click()
    expect(page.locator("article.user").last).to_have_text("sent by alice")
    ended(page)
    expect(message_field(page)).to_have_value("draft of alice")
    message_field(page).fill("")
    sign_out(page)
    users.sign_in(page, "bob")
    page.goto(address)
    expect(message_field(page)).to_have_value("draft of bob")
    message_field(page).fill("")
    assert users.count("bob") == 0


def test_another_user_gets_no_settings(page: Page, users: Users) -> None:
    page.goto(users.served.url)
    users.sign_in(page, "alice")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("You serve Alice.")
    page.get_by_role("button", name="Save", exact=True).click()
    compare = page.get_by_role("button", name="Compare replies")
    compare.click()
    page.get_by_role("button", name="Start comparing").click()
    expect(compare).to_have_attribute("aria-pressed", "true")
    sign_out(page)
    users.sign_in(page, "bob")
    expect(compare).to_have_attribute("aria-pressed", "false")
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("System prompt")).to_have_value("")
    page.keyboard.press("Escape")
    sign_out(page)
    users.sign_in(page, "alice")
    expect(compare).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("System prompt")).to_have_value("You serve Alice.")


def test_other_tabs_follow_a_sign_out_and_a_sign_in(page: Page, users: Users) -> None:
    page.goto(users.served.url)
    users.sign_in(page, "alice")
    ask(page, "seen by alice")
    ended(page)
    other = page.context.new_page()
    other.goto(users.served.url)
    message_field(other).fill("draft of alice")
    sign_out(page)
    expect(other.get_by_label("Key")).to_be_visible()
    users.sign_in(page, "bob")
    other.reload()
    expect(message_field(other)).to_have_value("")
    expect(other.get_by_text("seen by alice")).to_have_count(0)


def test_another_tab_follows_though_the_network_fails_just_then(page: Page, users: Users) -> None:
    """Else it would show what is Alice's, and send it as Bob."""
    page.goto(users.served.url)
    users.sign_in(page, "alice")
    other = page.context.new_page()
    other.goto(users.served.url)
    message_field(other).fill("draft of alice")
    failed: list[str] = []

    def fail(route: Route) -> None:
        failed.append(route.request.url)
        route.abort()

    other.route("**/api/session", fail)
    sign_out(page)
    users.sign_in(page, "bob")
    until(other, lambda: bool(failed))
    other.unroute("**/api/session")
    expect(message_field(other)).to_have_value("")
    expect(other.get_by_role("button", name="Sign out")).to_be_visible()
    assert users.count("bob") == 0


def test_a_page_whose_key_ended_shows_the_next_user_nothing(page: Page, users: Users) -> None:
    page.goto(users.served.url)
    users.sign_in(page, "alice")
    ask(page, "seen by alice")
    ended(page)
    page.context.clear_cookies()
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    users.sign_in(page, "bob")
    expect(page.get_by_text("not found").or_(page.get_by_text("doesn’t exist"))).to_be_visible()
    expect(page.get_by_text("seen by alice")).to_have_count(0)


@pytest.mark.parametrize("sends", [False, True])
def test_what_is_typed_before_the_session_is_known_is_kept(page: Page, quick: Served, sends: bool) -> None:
    page.goto(quick.url)
    if not sends:
        message_field(page).fill("written before")
    go_on = hold(page, "**/api/session", "GET")
    page.reload(wait_until="commit")
    if not sends:
        expect(message_field(page)).to_have_value("")
    message_field(page).fill("typed early")
    if sends:
        message_field(page).press("Enter")
    go_on()
    if sends:
        expect(page.locator("article.user")).to_have_text(["typed early"])
        ended(page)
        expect(message_field(page)).to_have_value("")
    else:
        expect(message_field(page)).to_have_value("written before\ntyped early")
        page.reload()
        expect(message_field(page)).to_have_value("written before\ntyped early")
        message_field(page).fill("")


def test_drafts_are_shown_while_the_server_is_away(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    message_field(page).fill("written before")
    page.route("**/api/**", lambda route: route.abort())
    page.reload()
    expect(message_field(page)).to_have_value("written before")
    message_field(page).fill("")
