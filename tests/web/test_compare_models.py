"""Comparing two models on the page."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page, expect

from tests.web.conftest import Served
from tests.web.screen import ask, last_reply, replies
from tests.web.test_compare import columns, compared

SCRIPT = [{"thought": "Hm", "answer": "Here."}]


def test_a_message_is_answered_by_two_models(page: Page, tmp_path: Path, built: None) -> None:
    with Served(tmp_path / "models", "--second", script=SCRIPT) as served:
        (served.folder / "loaded").touch()
        page.goto(served.url)
        page.get_by_role("button", name="Compare replies").click()
        dialog = page.get_by_role("dialog", name="Compare replies")
        for number, name in enumerate(("scripted", "second")):
            dialog.get_by_label("Model").nth(number).select_option(name)
        dialog.get_by_role("button", name="Start comparing").click()
        ask(page, "Who are you?")
        expect(columns(page)).to_have_count(2)
        for number, name in enumerate(("scripted", "second")):
            expect(columns(page).nth(number)).to_contain_text(name)
            expect(replies(page).nth(number)).to_have_attribute("data-status", "done")
            expect(columns(page).nth(number)).to_contain_text("Here.")
        columns(page).nth(1).get_by_role("button", name="Choose second").click()
        expect(compared(page)).to_have_count(0)
        expect(last_reply(page)).to_contain_text("Here.")
