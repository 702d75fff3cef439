"""Several models on the page: a conversation chooses its own, and whoever waits for a load sees how far it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.web.conftest import Served
from tests.web.screen import ask, ended, replies

SCRIPT = [{"thought": "Hm", "answer": "Here."}]


@pytest.fixture
def served(tmp_path: Path, built: None) -> Iterator[Served]:
    with Served(tmp_path / "models", "--second", script=SCRIPT) as served:
        yield served


def test_a_conversation_chooses_its_model_and_shows_its_load(page: Page, served: Served) -> None:
    page.goto(served.url)
    page.get_by_role("button", name="Model: scripted").click()
    page.get_by_role("listitem").filter(has_text="second").get_by_role("button", name="Use here").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_text("second is loaded with your first message.")).to_be_visible()
    ask(page, "Are you there?")
    expect(page.get_by_text("Loading second 30%…")).to_be_visible()
    (served.folder / "loaded").touch()
    ended(page)
    expect(replies(page)).to_contain_text("Here.")
    expect(page.get_by_role("button", name="Model: second")).to_be_visible()
    page.reload()
    expect(page.get_by_role("button", name="Model: second")).to_be_visible()
    page.get_by_role("button", name="Model: second").click()
    expect(page.get_by_role("dialog")).to_contain_text("used here")
    page.get_by_role("button", name="Back to the server’s model").click()
    expect(page.get_by_role("button", name="Model: scripted")).to_be_visible()
