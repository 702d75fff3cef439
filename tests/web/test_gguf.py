"""The page with a GGUF model: its scenarios on another engine, and a server that is killed.

`PALAVER_PAGE_MODEL=q8_0 pytest tests/web` runs all tests of the embedded model so; these are the ones of every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import psutil
import pytest
from playwright.sync_api import Locator, Page, TimeoutError, expect
from tokenizers import Tokenizer

pytest.importorskip("xllamacpp", reason="NOTHING IS SHOWN HERE: xllamacpp is not installed")

from palaver.models.resolver import resolve_folder
from tests.web.conftest import PATIENCE, Served, gguf_sprout
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
SOME = 1500
"""The tokens of a reply that is heard to its end."""
MANY = 8000
"""The tokens of a reply that is stopped, nearly all that the context has."""
SLICE = 50
"""The milliseconds for which an engine runs between two looks at the page."""


@pytest.fixture(scope="module")
def sprout(tmp_path_factory: pytest.TempPathFactory, built: None) -> Iterator[Served]:
    """A server with the embedded model as a GGUF file."""
    folder = tmp_path_factory.mktemp("gguf")
    with Served(folder, "--gguf", str(gguf_sprout(folder, "q8_0"))) as served:
        yield served


class EngineClock:
    """Lets the processes of the engine run only until the page shows something: no page is too slow to press a button
    before the reply is over."""

    def __init__(self, served: Served) -> None:
        self._processes = served.engine_processes()

    def __enter__(self) -> EngineClock:
        for process in self._processes:
            process.suspend()
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()

    def run_until_visible(self, element: Locator) -> None:
        is_visible = False
        while not is_visible:
            self.resume()
            with suppress(TimeoutError):
                element.wait_for(timeout=SLICE)
                is_visible = True
            for process in self._processes:
                process.suspend()

    def resume(self) -> None:
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def make_thinker(api: httpx.Client, tokens: int) -> str:
    """A conversation whose replies think until their tokens are used up."""
    end = Tokenizer.from_file(str(resolve_folder("sprout") / "tokenizer.json")).token_to_id("</think>")
    parameters = {"seed": 4, "banned_ids": [end], "min_tokens": tokens, "max_tokens": tokens}
    id: str = api.post("/api/conversations", json={"parameters": parameters}).json()["id"]
    return id


@pytest.fixture(scope="module")
def uncut(sprout: Served) -> list[dict[str, Any]]:
    """The parts of the reply that nothing interrupts."""
    with httpx.Client(base_url=sprout.url, timeout=PATIENCE) as api:
        message = {"role": "user", "parts": [{"type": "text", "text": QUESTION}]}
        say = f"/api/conversations/{make_thinker(api, SOME)}/say"
        reply = api.post(say, json={"parent": None, "message": message}).json()["reply"]["id"]
        with api.stream("GET", f"/api/turns/{reply}/events") as events:
            events.read()
        return parts_of(api, reply)


@contextmanager
def thinking(page: Page, served: Served, api: httpx.Client, tokens: int) -> Iterator[EngineClock]:
    """A reply that has begun to think, and whose engine runs only when it is told to."""
    page.goto(f"{served.url}/#/c/{make_thinker(api, tokens)}")
    expect(page.get_by_label("Message", exact=True)).to_be_enabled()
    with EngineClock(served) as clock:
        ask(page, QUESTION)
        clock.run_until_visible(last_reply(page).locator(".thinking .chunk").first)
        yield clock


def parts_of(api: httpx.Client, reply: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.get(f"/api/messages/{reply}").json()["parts"]
    return found


def parts(page: Page, api: httpx.Client) -> list[dict[str, Any]]:
    return parts_of(api, message_id(last_reply(page)))


def test_a_reply_that_was_stopped_in_its_thought_goes_on_as_the_uncut_one(
    page: Page, sprout: Served, api: httpx.Client, uncut: list[dict[str, Any]]
) -> None:
    with thinking(page, sprout, api, SOME):
        page.get_by_role("button", name="Stop", exact=True).click()
    ended(page, "stopped")
    page.reload()
    reply = ended(page, "stopped")
    expect(reply.get_by_role("button", name="Stopped while thinking")).to_be_visible()
    reply.get_by_role("button", name="Continue").click()
    ended(page, "length")
    assert parts(page, api) == uncut
    assert [part["type"] for part in uncut] == ["thinking"]


def test_answer_now_ends_a_thought(page: Page, sprout: Served, api: httpx.Client) -> None:
    with thinking(page, sprout, api, MANY) as clock:
        with page.expect_response("**/answer-now"):
            page.get_by_role("button", name="Answer now").click()
        clock.run_until_visible(last_reply(page).locator(".parts > .markdown"))
        page.get_by_role("button", name="Stop", exact=True).click()
    reply = ended(page, "stopped")
    assert answer(reply).strip()
    assert [part["type"] for part in parts(page, api)] == ["thinking", "text"]


def test_a_reload_and_a_second_tab_show_the_same_running_reply(page: Page, sprout: Served, api: httpx.Client) -> None:
    with thinking(page, sprout, api, MANY):
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


def test_a_reply_goes_on_after_the_server_was_killed(
    page: Page, sprout: Served, api: httpx.Client, uncut: list[dict[str, Any]]
) -> None:
    with thinking(page, sprout, api, SOME):
        sprout.kill()
    sprout.start()
    ended(page, "length")
    assert parts(page, api) == uncut
