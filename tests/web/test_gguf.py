"""The page with a GGUF model: scenarios of `test_chat.py` on another engine, and a server that is killed."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Page

pytest.importorskip("xllamacpp", reason="NOTHING IS SHOWN HERE: xllamacpp is not installed")

from palaver.models.resolver import resolve_folder
from tests.gguf_files import convert_qwen3
from tests.web.conftest import Served
from tests.web.screen import ask, ended, last_reply, message_id
from tests.web.test_chat import (
    test_another_token_begins_a_branch_of_its_own,
    test_retry_edit_and_arrows_walk_the_tree,
    test_statistics_raw_text_and_tokens_can_be_seen,
    test_stop_reload_continue_is_the_reply_that_was_not_stopped,
)

__all__ = [
    "test_another_token_begins_a_branch_of_its_own",
    "test_retry_edit_and_arrows_walk_the_tree",
    "test_statistics_raw_text_and_tokens_can_be_seen",
    "test_stop_reload_continue_is_the_reply_that_was_not_stopped",
]
"""They run here with the fixture of this module."""


@pytest.fixture(scope="module")
def sprout(tmp_path_factory: pytest.TempPathFactory, built: None) -> Iterator[Served]:
    """A server with the embedded model as a GGUF file."""
    folder = tmp_path_factory.mktemp("gguf")
    file = convert_qwen3(resolve_folder("sprout"), folder / "sprout.gguf", "q8_0")
    with Served(folder, "--gguf", str(file)) as served:
        yield served


def test_a_reply_goes_on_after_the_server_was_killed(page: Page, sprout: Served, api: httpx.Client) -> None:
    parameters = {"seed": 4, "min_tokens": 700, "max_tokens": 700}
    parts = []
    for kills in (False, True):
        made = api.post("/api/conversations", json={"parameters": parameters}).json()["id"]
        page.goto(f"{sprout.url}/#/c/{made}")
        ask(page, "Write a list of birds.")
        if kills:
            page.get_by_role("button", name="Stop").wait_for()
            sprout.kill()
            sprout.start()
        ended(page, "length")
        parts.append(api.get(f"/api/messages/{message_id(last_reply(page))}").json()["parts"])
    assert parts[0] == parts[1]
