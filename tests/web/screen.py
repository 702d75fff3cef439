"""What a person does on the page and sees there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Locator, Page, Route, expect

from tests.web.conftest import PATIENCE


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def replies(page: Page) -> Locator:
    return page.locator("article.assistant")


def last_reply(page: Page) -> Locator:
    return replies(page).last


def ended(page: Page, status: str = "done") -> Locator:
    """The last reply, once it has ended so."""
    reply = last_reply(page)
    expect(reply).to_have_attribute("data-status", status)
    return reply


def tab_to(page: Page, element: Locator, key: str = "Tab") -> None:
    """Moves the focus to the element by the Tab key alone."""
    expect(element).to_be_visible()
    for _ in range(120):
        if element.evaluate("element => element === document.activeElement"):
            return
        page.keyboard.press(key)
    raise AssertionError("the element can't be reached by the keyboard")


def act(message: Locator, action: str) -> None:
    """One of the actions in the menu of a message."""
    message.get_by_role("button", name="More actions").click()
    message.get_by_role("button", name=re.compile(rf"^{action}\b")).click()


def conversation(page: Page) -> str:
    page.wait_for_url(re.compile(r"#/c/"))
    return page.url.rpartition("/")[2]


def message_id(message: Locator) -> str:
    found = message.get_attribute("data-id")
    assert found
    return found


def answer(reply: Locator) -> str:
    return _words(reply.locator(".parts > .markdown"))


def thought(reply: Locator) -> str:
    return _words(reply.locator(".thinking .markdown"))


def _words(markdown: Locator) -> str:
    """Also of what is out of sight, which a browser doesn't lay out."""
    found: str = markdown.evaluate(
        "element => [...element.querySelectorAll('.chunk > *')].map(one => one.textContent).join(' ')"
    )
    return found


def keep_picture(page: Page, name: str) -> None:
    """Where `PALAVER_SCREENS` names a folder."""
    if folder := os.environ.get("PALAVER_SCREENS"):
        page.screenshot(path=Path(folder) / f"{name}.png", animations="disabled")


def hold(page: Page, url: str, method: str) -> Callable[[], None]:
    """Keeps such requests waiting until the returned function is called."""
    held: list[Route] = []
    holding = True

    def handle(route: Route) -> None:
        if holding and route.request.method == method:
            held.append(route)
        else:
            route.continue_()

    def go_on() -> None:
        nonlocal holding
        holding = False
        for route in held:
            route.continue_()

    page.route(url, handle)
    return go_on


def until(page: Page, is_so: Callable[[], bool]) -> None:
    """Waits for what no element of the page shows."""
    for _ in range(int(PATIENCE * 50)):
        if is_so():
            return
        page.wait_for_timeout(20)
    raise AssertionError("it never came to be so")
