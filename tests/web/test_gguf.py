"""The page with a GGUF model: its scenarios on another engine, and a server that is killed.

`PALAVER_PAGE_MODEL=q8_0 pytest tests/web` runs all tests of the embedded model so; these are the ones of every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect
from tokenizers import Tokenizer

pytest.importorskip("xllamacpp", reason="NOTHING IS SHOWN HERE: xllamacpp is not installed")

from palaver.models.resolver import resolve_folder
from tests.web.conftest import Served, gguf_sprout
from tests.web.screen import answer, ask, ended, last_reply, message_id, thought
from tests.web.test_chat import (
    test_another_token_begins_a_branch_of_its_own,
    test_retry_edit_and_arrows_walk_the_tree,
    test_two_tabs_that_edit_make_two_branches,
)

__all__ = [
    "test_another_token_begins_a_branch_of_its_own",
    "test_retry_edit_and_arrows_walk_the_tree",
    "test_two_tabs_that_edit_make_two_branches",
]
"""They run here with the fixture of this module."""
QUESTION = "What is 4857 + 2968?"


@pytest.fixture(scope="module")
def sprout(tmp_path_factory: pytest.TempPathFactory, built: None) -> Iterator[Served]:
    """A server with the embedded model as a GGUF file."""
    folder = tmp_path_factory.mktemp("gguf")
    with Served(folder, "--gguf", str(gguf_sprout(folder, "q8_0"))) as served:
        yield served


def open_thinker(page: Page, served: Served, api: httpx.Client, tokens: int) -> None:
    """A conversation whose replies think until their tokens are used up: nobody is too late to stop them."""
    end = Tokenizer.from_file(str(resolve_folder("sprout") / "tokenizer.json")).token_to_id("</think>")
    parameters = {"seed": 4, "banned_ids": [end], "min_tokens": tokens, "max_tokens": tokens}
    made = api.post("/api/conversations", json={"parameters": parameters}).json()["id"]
    page.goto(f"{served.url}/#/c/{made}")


def parts(page: Page, api: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.get(f"/api/messages/{message_id(last_reply(page))}").json()["parts"]
    return found


def test_a_reply_that_was_stopped_in_its_thought_goes_on_as_the_uncut_one(
    page: Page, sprout: Served, api: httpx.Client
) -> None:
    replies = []
    for stops in (False, True):
        open_thinker(page, sprout, api, 4000)
        ask(page, QUESTION)
        if stops:
            page.get_by_role("button", name="Stop", exact=True).click()
            ended(page, "stopped")
            page.reload()
            reply = ended(page, "stopped")
            expect(reply.get_by_role("button", name="Stopped while thinking")).to_be_visible()
            reply.get_by_role("button", name="Continue").click()
        ended(page, "length")
        replies.append(parts(page, api))
    assert replies[0] == replies[1]
    assert [part["type"] for part in replies[0]] == ["thinking"]


def test_answer_now_ends_a_thought(page: Page, sprout: Served, api: httpx.Client) -> None:
    open_thinker(page, sprout, api, 4000)
    ask(page, QUESTION)
    page.get_by_role("button", name="Answer now").click()
    expect(last_reply(page).locator(".parts > .markdown")).to_be_visible()
    page.get_by_role("button", name="Stop", exact=True).click()
    reply = ended(page, "stopped")
    assert answer(reply).strip()
    assert [part["type"] for part in parts(page, api)] == ["thinking", "text"]


def test_a_reload_and_a_second_tab_show_the_same_running_reply(page: Page, sprout: Served, api: httpx.Client) -> None:
    open_thinker(page, sprout, api, 4000)
    ask(page, QUESTION)
    expect(last_reply(page).locator(".thinking")).to_be_visible()
    page.reload()
    other = page.context.new_page()
    other.goto(page.url)
    for tab in (page, other):
        expect(last_reply(tab)).to_have_attribute("data-status", "running")
        expect(last_reply(tab).locator(".thinking .chunk").first).to_be_visible()
    other.get_by_role("button", name="Stop", exact=True).click()
    for tab in (page, other):
        ended(tab, "stopped")
    assert thought(last_reply(page)) == thought(last_reply(other)) != ""


def test_a_reply_goes_on_after_the_server_was_killed(page: Page, sprout: Served, api: httpx.Client) -> None:
    replies = []
    for kills in (False, True):
        open_thinker(page, sprout, api, 4000)
        ask(page, "Write a list of birds.")
        if kills:
            page.get_by_role("button", name="Stop", exact=True).wait_for()
            sprout.kill()
            sprout.start()
        ended(page, "length")
        replies.append(parts(page, api))
    assert replies[0] == replies[1]
