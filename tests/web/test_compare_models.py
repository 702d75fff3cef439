"""Comparing two models on the page."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page, expect

from tests import media_files
from tests.web.conftest import Served
from tests.web.screen import ask, conversation, last_reply, replies
from tests.web.test_compare import columns, compared

SCRIPT = [{"thought": "Hm", "answer": "Here."}]


def compare_models(page: Page) -> None:
    page.get_by_role("button", name="Compare replies").click()
    dialog = page.get_by_role("dialog", name="Compare replies")
    for number, name in enumerate(("scripted", "second")):
        dialog.get_by_label("Model").nth(number).select_option(name)
    dialog.get_by_role("button", name="Start comparing").click()


def test_a_message_is_answered_by_two_models(page: Page, tmp_path: Path, built: None) -> None:
    with Served(tmp_path / "models", "--second", script=SCRIPT) as served:
        (served.folder / "loaded").touch()
        page.goto(served.url)
        compare_models(page)
        ask(page, "Who are you?")
        expect(columns(page)).to_have_count(2)
        for number, name in enumerate(("scripted", "second")):
            expect(columns(page).nth(number)).to_contain_text(name)
            expect(replies(page).nth(number)).to_have_attribute("data-status", "done")
            expect(columns(page).nth(number)).to_contain_text("Here.")
        columns(page).nth(1).get_by_role("button", name="Choose second").click()
        expect(compared(page)).to_have_count(0)
        expect(last_reply(page)).to_contain_text("Here.")


def test_a_comparison_belongs_to_its_conversation(page: Page, tmp_path: Path, built: None) -> None:
    with Served(tmp_path / "models", "--second", script=SCRIPT) as served:
        (served.folder / "loaded").touch()
        page.goto(served.url)
        compare_models(page)
        compare = page.get_by_role("button", name="Compare replies")
        expect(compare).to_contain_text("2 replies")
        ask(page, "Who are you?")
        here = conversation(page)
        columns(page).nth(0).get_by_role("button", name="Choose").click()
        expect(compare).to_contain_text("2 replies")
        page.reload()
        expect(compare).to_contain_text("2 replies")
        page.get_by_role("link", name="New conversation").click()
        expect(compare).not_to_contain_text("2 replies")
        ask(page, "Alone?")
        expect(replies(page)).to_have_count(1)
        expect(last_reply(page)).to_have_attribute("data-status", "done")
        page.goto(f"{served.url}/#/c/{here}")
        expect(compare).to_contain_text("2 replies")
        compare.click()
        page.get_by_role("dialog").get_by_role("button", name="Stop comparing").click()
        expect(compare).not_to_contain_text("2 replies")


def test_a_compared_model_that_can_not_read_a_picture_is_named(page: Page, tmp_path: Path, built: None) -> None:
    picture = tmp_path / "red.png"
    picture.write_bytes(media_files.picture(size=(40, 30)))
    with Served(tmp_path / "models", "--second", "--media", "image", script=SCRIPT) as served:
        (served.folder / "loaded").touch()
        page.goto(served.url)
        compare_models(page)
        page.locator("form input[type=file]").set_input_files([picture])
        expect(page.get_by_label("Attached files").get_by_role("img")).to_be_visible()
        ask(page, "What is it?")
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text("second is one of the compared models and can’t read pictures.")
        expect(page.get_by_label("Message", exact=True)).to_have_value("What is it?")
        alert.get_by_role("button", name="Stop comparing").click()
        expect(page.get_by_role("button", name="Compare replies")).not_to_contain_text("2 replies")
        with page.expect_request("**/say"):
            page.get_by_role("button", name="Send").click()
