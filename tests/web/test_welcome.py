"""The first minute: the page says what the model is, and every example on it works with the embedded one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.web.conftest import Served
from tests.web.screen import answer, ask, ended, keep_picture, last_reply, replies

GREEDY = "() => localStorage.setItem('palaver.fresh', JSON.stringify({ system: '', parameters: { temperature: 0 } }))"


def examples(page: Page) -> Locator:
    return page.get_by_role("group", name="Examples").get_by_role("button")


def check_sum(page: Page) -> None:
    reply = ended(page)
    assert "7825" in answer(reply)
    expect(reply.get_by_role("button", name="Thought")).to_be_visible()


def check_table(page: Page) -> None:
    expect(ended(page).locator("tbody tr")).to_have_count(6)


def check_tool(page: Page) -> None:
    ended(page)
    card = page.get_by_label("Tool call: get_weather")
    expect(card).to_contain_text("Oslo")
    card.get_by_label("Tool result").fill('{"sky": "sunny", "degrees": 21}')
    card.get_by_role("button", name="Submit").click()
    expect(replies(page)).to_have_count(2)
    assert "21" in answer(ended(page))


def check_stop(page: Page) -> None:
    """The model may be done before it can be stopped; what it says is the same."""
    expect(last_reply(page)).not_to_have_attribute("data-status", "running")
    if last_reply(page).get_attribute("data-status") == "stopped":
        last_reply(page).get_by_role("button", name="Continue").click()
    assert "73884" in answer(ended(page))


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("Do a sum", check_sum),
        ("Make a table", check_table),
        ("Call a tool", check_tool),
        ("Stop me mid-thought", check_stop),
    ],
)
def test_every_example_works_with_the_embedded_model(
    page: Page, sprout: Served, name: str, check: Callable[[Page], None]
) -> None:
    page.goto(sprout.url)
    page.evaluate(GREEDY)
    page.reload()
    expect(page.get_by_text("sprout is a tiny demo model. Try one of these:")).to_be_visible()
    expect(examples(page)).to_have_count(4)
    examples(page).filter(has_text=name).click()
    check(page)


def test_the_first_screen_shows_the_way_to_a_real_model(page: Page, sprout: Served) -> None:
    page.goto(sprout.url)
    expect(page.get_by_label("Message", exact=True)).to_have_attribute("placeholder", "Message sprout")
    page.get_by_role("button", name="Use a real model").click()
    dialog = page.get_by_role("dialog", name="Model")
    expect(dialog).to_contain_text("palaver serve Qwen/Qwen3-0.6B")
    expect(dialog).to_contain_text("sprout")


def test_the_example_is_stopped_in_its_thought_and_goes_on(page: Page, endless: Served) -> None:
    page.goto(endless.url)
    expect(page.get_by_text("scripted is ready. Try one of these:")).to_be_visible()
    page.get_by_role("button", name="Stop me mid-thought").click()
    reply = ended(page, "stopped")
    expect(reply).to_contain_text("Stopped while thinking")
    keep_picture(page, "stopped")
    reply.get_by_role("button", name="Continue").click()
    ended(page, "running")
    expect(reply.locator(".thinking")).to_contain_text("and so on and so on and so on and so on")
    expect(page.get_by_role("button", name="Stop", exact=True)).to_be_visible()
    page.get_by_role("button", name="Stop", exact=True).click()
    ended(page, "stopped")


def test_an_example_leaves_what_is_typed_alone(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    page.get_by_label("Message", exact=True).fill("half a sentence")
    examples(page).first.click()
    ended(page)
    expect(page.get_by_label("Message", exact=True)).to_have_value("half a sentence")
    ask(page, "And this too")
    expect(replies(page)).to_have_count(2)
