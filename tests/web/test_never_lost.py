"""Whatever happens to the network, the tab or the server: the page shows what was said, once and whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.web.conftest import PATIENCE, Served, text_of
from tests.web.proxy import Wire
from tests.web.screen import answer, ask, conversation, ended, last_reply, message_id, replies, thought

THOUGHT = " ".join(f"step {n}." for n in range(60))
PARAGRAPHS = 24
ANSWER = "\n\n".join(f"Paragraph {n} with **bold** words and `code` in it." for n in range(PARAGRAPHS))
SHOWN = ANSWER.replace("**", "").replace("`", "")


@pytest.fixture
def slow(tmp_path_factory: pytest.TempPathFactory, built: None) -> Iterator[Served]:
    """Says one thing, in some seconds."""
    script = [{"thought": THOUGHT, "answer": ANSWER}]
    with Served(tmp_path_factory.mktemp("slow"), "--rate", "250", script=script) as served:
        yield served


def away(page: Page) -> Locator:
    """The banner that says so; a write that fails just then says it once more, in passing."""
    return page.locator(".banner", has_text="Can’t reach the server")


def whole(served: Served, page: Page) -> None:
    """The last reply is all of the script, on the page and in the store."""
    reply = ended(page)
    kept = httpx.get(f"{served.url}/api/messages/{message_id(reply)}", timeout=PATIENCE).json()
    assert text_of(kept) == ANSWER
    assert text_of(kept, "thinking").strip() == THOUGHT
    expect(reply.locator(".parts > .markdown .block")).to_have_count(PARAGRAPHS)
    assert answer(reply).split() == SHOWN.split()
    reply.get_by_role("button", name="Thought").click()
    assert thought(reply).split() == THOUGHT.split()


def test_a_thought_that_was_stopped_and_reloaded_goes_on_where_it_was(page: Page, slow: Served) -> None:
    page.goto(slow.url)
    ask(page, "Go on")
    thinking = last_reply(page).locator(".thinking")
    expect(thinking).to_contain_text("step 10.")
    page.get_by_role("button", name="Stop").click()
    ended(page, "stopped")
    page.reload()
    reply = ended(page, "stopped")
    assert reply.locator(".parts > .markdown").count() == 0
    reply.get_by_role("button", name="Continue").click()
    whole(slow, page)


def test_answer_now_ends_the_thought(page: Page, slow: Served) -> None:
    page.goto(slow.url)
    ask(page, "Be quick")
    expect(last_reply(page).locator(".thinking")).to_contain_text("step 3.")
    page.get_by_role("button", name="Answer now").click()
    expect(last_reply(page).locator(".parts > .markdown")).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    reply = last_reply(page)
    expect(reply).not_to_have_attribute("data-status", "running")
    reply.get_by_role("button", name="Thought").click()
    assert "step 59." not in thought(reply)


def test_reload_and_second_tab_show_the_same_running_reply(page: Page, slow: Served) -> None:
    page.goto(slow.url)
    ask(page, "Tell me")
    expect(last_reply(page).locator(".thinking")).to_contain_text("step 5.")
    page.reload()
    other = page.context.new_page()
    other.goto(page.url)
    whole(slow, page)
    whole(slow, other)


def test_the_server_is_killed_and_started_again_in_the_middle(page: Page, slow: Served) -> None:
    page.goto(slow.url)
    ask(page, "Tell me")
    expect(last_reply(page).locator(".thinking")).to_contain_text("step 12.")
    slow.kill()
    expect(away(page)).to_be_visible()
    slow.start()
    whole(slow, page)
    expect(away(page)).to_have_count(0)
    thought = last_reply(page).get_by_role("button", name="Thought")
    expect(thought).to_have_text(re.compile(r"Thought for [\d.]+ s"))  # stored with its tokens


def test_the_server_ends_in_order_and_is_started_again_in_the_middle(page: Page, slow: Served) -> None:
    page.goto(slow.url)
    ask(page, "Tell me")
    expect(last_reply(page).locator(".thinking")).to_contain_text("step 12.")
    slow.end()
    slow.start()
    whole(slow, page)


def test_fifty_cuts_of_the_network_in_one_reply(page: Page, tmp_path: Path, built: None) -> None:
    script = [{"thought": THOUGHT, "answer": ANSWER}]
    served = Served(tmp_path / "cut", "--rate", "120", script=script)
    with served as slow, Wire(slow.port, cut_streams=50, after=400) as wire:
        page.goto(wire.url)
        ask(page, "Tell me")
        ended(page)
        assert wire.cuts == 50
        whole(slow, page)


def test_a_network_that_goes_and_comes_back(page: Page, slow: Served) -> None:
    with Wire(slow.port) as wire:
        page.goto(wire.url)
        ask(page, "Tell me")
        expect(last_reply(page).locator(".thinking")).to_contain_text("step 2.")
        wire.down = True
        wire.cut()
        expect(away(page)).to_be_visible()
        page.get_by_label("Message", exact=True).fill("typed while away")
        wire.down = False
        whole(slow, page)
        expect(away(page)).to_have_count(0)
        expect(page.get_by_label("Message", exact=True)).to_have_value("typed while away")


def test_one_stream_for_a_tab_and_none_for_one_that_is_hidden(page: Page, slow: Served) -> None:
    with Wire(slow.port) as wire:
        page.goto(wire.url)
        ask(page, "Tell me")
        expect(last_reply(page).locator(".thinking")).to_contain_text("step 2.")
        _until(page, lambda: wire.streams == 1)
        _see(page, "hidden")
        _until(page, lambda: wire.streams == 0)
        _see(page, "visible")
        whole(slow, page)
        assert wire.streams == 1


def test_a_draft_survives_a_reload(page: Page, slow: Served) -> None:
    page.goto(slow.url)
    page.get_by_label("Message", exact=True).fill("half a thou")
    page.reload()
    expect(page.get_by_label("Message", exact=True)).to_have_value("half a thou")
    page.keyboard.press("Enter")
    page.get_by_label("Message", exact=True).press("Enter")
    conversation(page)
    expect(page.get_by_label("Message", exact=True)).to_have_value("")


def test_a_message_that_could_not_be_sent_stays_in_the_field(page: Page, slow: Served) -> None:
    page.goto(slow.url)
    refusal = '{"error": {"message": "No room.", "type": "x", "param": null, "code": null}}'
    page.route("**/say", lambda route: route.fulfill(status=507, content_type="application/json", body=refusal))
    ask(page, "please keep me")
    expect(page.get_by_role("alert")).to_contain_text("No room.")
    expect(page.get_by_label("Message", exact=True)).to_have_value("please keep me")


def test_a_stale_tab_overwrites_nothing(page: Page, browser: Browser, slow: Served) -> None:
    """Its stream is cut off, so it knows nothing of what the other one said."""
    page.goto(slow.url)
    ask(page, "first")
    ended(page)
    with Wire(slow.port) as wire:
        stale = browser.new_context(service_workers="block").new_page()
        stale.goto(page.url.replace(slow.url, wire.url))
        ended(stale)
        stale.route("**/api/events", lambda route: route.abort())
        wire.cut()
        ask(page, "from the fresh tab")
        expect(replies(page)).to_have_count(2)
        ask(stale, "from the stale tab")
        expect(stale.get_by_text("from the stale tab")).to_be_visible()
        expect(replies(stale)).to_have_count(2)
        nodes = httpx.get(f"{slow.url}/api/conversations/{conversation(page)}/nodes", timeout=PATIENCE).json()
        assert len(nodes) == 6
        stale.context.close()


def _see(page: Page, state: str) -> None:
    """A browser without a screen never hides a tab: the page is told so."""
    page.evaluate(
        """state => {
          Object.defineProperty(document, 'visibilityState', { value: state, configurable: true })
          document.dispatchEvent(new Event('visibilitychange'))
        }""",
        state,
    )


def _until(page: Page, is_so) -> None:  # type: ignore[no-untyped-def]
    for _ in range(int(PATIENCE * 10)):
        if is_so():
            return
        page.wait_for_timeout(100)
    raise AssertionError("it never came to be so")
