"""Thoughts as they are seen: their lines, their clock, and what stopping in the middle of one leaves."""

from __future__ import annotations

import re
import time

import httpx
from playwright.sync_api import Page, expect

from tests.web.conftest import PATIENCE, Served
from tests.web.screen import ask, ended, last_reply, message_id

LINES = "The first line of it.\nThe second line of it."


def test_a_thought_keeps_its_lines(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    ask(page, "Well?")
    reply = ended(page)
    reply.get_by_role("button", name="Thought").click()
    first = reply.locator(".thinking p").first
    expect(first).to_be_visible()
    assert first.inner_text() == LINES


def test_a_reply_that_was_stopped_in_its_thought_shows_it(page: Page, endless: Served) -> None:
    page.goto(endless.url)
    ask(page, "Well?")
    expect(last_reply(page).locator(".thinking")).to_contain_text("Another paragraph.")
    page.get_by_role("button", name="Stop", exact=True).click()
    for _ in range(2):
        reply = ended(page, "stopped")
        expect(reply.get_by_text("Stopped while thinking")).to_be_visible()
        expect(reply.get_by_role("button", name="Thought")).to_have_attribute("aria-expanded", "true")
        expect(reply.locator(".thinking p").first).to_be_visible()
        expect(reply.get_by_role("button", name="Continue")).to_be_visible()
        page.reload()


def test_the_clock_of_a_thought_goes_on_where_it_was_stopped(page: Page, endless: Served) -> None:
    page.goto(endless.url)
    ask(page, "Well?")
    clock = last_reply(page).locator(".clock")
    expect(clock).to_have_text(re.compile(r"^([3-9]\.\d|\d\d+) s|min"))
    page.get_by_role("button", name="Stop", exact=True).click()
    reply = ended(page, "stopped")
    stored = httpx.get(f"{endless.url}/api/messages/{message_id(reply)}", timeout=PATIENCE).json()
    before = stored["reply"]["timings"]["thinking"]
    page.wait_for_timeout(6000)
    begun = time.monotonic()
    reply.get_by_role("button", name="Continue").click()
    expect(clock).to_have_text(re.compile(r"\d"))
    shown = seconds(clock.inner_text())
    assert before - 1 <= shown <= before + time.monotonic() - begun + 1
    page.get_by_role("button", name="Stop", exact=True).click()
    ended(page, "stopped")


def seconds(text: str) -> float:
    """Of "3.2 s" or "1 min 5 s"."""
    parts = [float(one) for one in re.findall(r"[\d.]+", text)]
    return parts[0] * 60 + parts[1] if "min" in text else parts[0]
