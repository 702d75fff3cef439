"""Thoughts as they are seen: their lines, their clock, and what stopping in the middle of one leaves."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect
from sqlalchemy import Table, update

from palaver.store import open_store
from palaver.store.schema import replies, running
from tests.web.conftest import PATIENCE, Served
from tests.web.screen import ask, ended, last_reply, message_id
from tests.web.test_manners import axe_violations

LINES = "The first line of it.\nThe second line of it."


def test_a_thought_keeps_its_lines(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    ask(page, "Well?")
    reply = ended(page)
    reply.get_by_role("button", name="Thought").click()
    first = reply.locator(".thinking p").first
    expect(first).to_be_visible()
    expect(first).to_have_text(re.compile(f"^{re.escape(LINES)}$"), use_inner_text=True)  # empty until it is painted


def test_a_reply_that_was_stopped_in_its_thought_shows_it(page: Page, endless: Served) -> None:
    page.goto(endless.url)
    ask(page, "Well?")
    expect(last_reply(page).locator(".thinking")).to_contain_text("Another paragraph.")
    assert axe_violations(page) == []
    page.get_by_role("button", name="Stop", exact=True).click()
    for _ in range(2):
        reply = ended(page, "stopped")
        assert axe_violations(page) == []
        expect(reply.get_by_text("Stopped while thinking")).to_be_visible()
        expect(reply.get_by_role("button", name="Stopped while thinking")).to_have_attribute("aria-expanded", "true")
        expect(reply.locator(".thinking p").first).to_be_visible()
        expect(reply.get_by_role("button", name="Continue")).to_be_visible()
        page.reload()


EARLIER = 1000.0
"""The time of earlier runs, in seconds: too long to be measured by a test, so that it can only come from the server."""


def set_thinking_seconds(served: Served, table: Table, id: str) -> None:
    """Makes the stored time of the thought `EARLIER`."""
    with open_store(served.folder) as store, store.database.write_transaction() as connection:
        timings = {"thinking": EARLIER, "seconds": EARLIER}
        connection.execute(update(table).where(table.c.message_id == id).values(timings=timings))


def check_clock(page: Page) -> None:
    """Checks that the clock shows the time of the earlier runs and what was watched since."""
    clock = last_reply(page).locator(".clock")
    expect(clock).to_have_text(re.compile(r"^1[67] min"))
    assert EARLIER <= seconds(clock.inner_text()) < EARLIER + PATIENCE


def test_the_clock_of_a_continued_thought_goes_on_from_the_servers_time(page: Page, endless: Served) -> None:
    page.goto(endless.url)
    ask(page, "Well?")
    expect(last_reply(page).locator(".clock")).to_have_text(re.compile(r"\d s"))
    page.get_by_role("button", name="Stop", exact=True).click()
    reply = ended(page, "stopped")
    set_thinking_seconds(endless, replies, message_id(reply))
    reply.get_by_role("button", name="Continue").click()
    check_clock(page)
    page.reload()
    check_clock(page)
    page.get_by_role("button", name="Stop", exact=True).click()
    ended(page, "stopped")


def test_the_clock_of_a_thought_outlives_the_server_and_the_page(page: Page, endless: Served) -> None:
    page.goto(endless.url)
    ask(page, "Well?")
    expect(last_reply(page).locator(".thinking")).to_contain_text("and so on")
    id = message_id(last_reply(page))
    endless.kill()
    set_thinking_seconds(endless, running, id)
    endless.start()
    page.reload()
    check_clock(page)
    page.get_by_role("button", name="Stop", exact=True).click()
    reply = ended(page, "stopped")
    expect(reply.get_by_role("button", name=re.compile("^Stopped while thinking, after 1[67] min"))).to_be_visible()


def seconds(text: str) -> float:
    """Of "3.2 s" or "1 min 5 s"."""
    parts = [float(one) for one in re.findall(r"[\d.]+", text)]
    return parts[0] * 60 + parts[1] if "min" in text else parts[0]
