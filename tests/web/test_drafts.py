"""A reply of a diffusion model on the page: its block comes into focus, settles, and can be looked at step by step."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.web.conftest import Served
from tests.web.forked import HOLD
from tests.web.screen import act, answer, ask, ended, last_reply
from tests.web.test_manners import axe_violations

THOUGHT = "Sure."
ANSWER = "Light falls on the leaf, and the leaf grows towards the light, a little more each day."
HELD_AT = "and the leaf"


@pytest.fixture(scope="module")
def drafting_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that can hold a reply after each letter of its thought, and in the middle of a block of its answer."""
    marked_thought = "".join(letter + HOLD for letter in THOUGHT)
    script = [{"thought": marked_thought, "answer": ANSWER.replace(HELD_AT, HELD_AT + HOLD)}]
    with Served(tmp_path_factory.mktemp("drafting"), "--blocks", "16", script=script) as served:
        yield served


@pytest.fixture
def drafting(drafting_server: Served) -> Iterator[Served]:
    """It holds nothing, whatever the test before has left."""
    yield drafting_server
    drafting_server.go_on()


def test_a_draft_forms_settles_and_can_be_scrubbed(page: Page, drafting: Served) -> None:
    page.goto(drafting.url)
    drafting.hold()
    ask(page, "Well?")
    draft = last_reply(page).locator(".draft")
    for mark, letter in enumerate(THOUGHT):
        drafting.hold(mark)
        expect(draft.locator(".shown").last).to_have_text(letter)
    drafting.hold(len(THOUGHT))
    expect(last_reply(page).locator(".parts > .markdown")).to_contain_text("Light")
    expect(draft.locator(".masked").first).to_be_visible()
    expect(draft.locator(".shown").first).to_be_visible()
    drafting.go_on()
    reply = ended(page)
    expect(draft).to_have_count(0)
    assert answer(reply).strip() == ANSWER
    act(reply, "Steps")
    slider = reply.get_by_role("slider", name="Step")
    expect(reply.get_by_text(re.compile(r"^Step \d+ of \d+, after"))).to_be_visible()
    assert int(slider.get_attribute("max") or 0) > 4
    slider.fill("0")
    expect(reply.get_by_text(re.compile(r"^Step 1 of \d+, after 0 tokens"))).to_be_visible()
    expect(draft.locator(".masked").first).to_be_visible()
    assert axe_violations(page) == []
    page.reload()
    act(ended(page), "Steps")  # the tab keeps them
    expect(reply.get_by_role("slider", name="Step")).to_be_visible()


def test_a_stopped_reply_shows_its_unfinished_block_and_goes_on(page: Page, drafting: Served) -> None:
    page.goto(drafting.url)
    drafting.hold(len(THOUGHT))
    ask(page, "Again?")
    expect(last_reply(page).locator(".parts > .markdown")).to_contain_text("Light")
    draft = last_reply(page).locator(".draft")
    expect(draft.locator(".shown").first).to_be_visible()
    page.get_by_role("button", name="Stop", exact=True).click()
    reply = ended(page, "stopped")
    expect(draft.locator(".masked").first).to_be_visible()
    assert axe_violations(page) == []
    kept = answer(reply).strip()
    assert ANSWER.startswith(kept)
    assert kept != ANSWER
    drafting.go_on()
    reply.get_by_role("button", name="Continue").click()
    assert answer(ended(page)).strip() == ANSWER
    expect(last_reply(page).locator(".draft")).to_have_count(0)
