"""Tool calls on the page: offered, approved by the keyboard, edited, stopped, continued, seen again after a kill."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.chat.tool_service import ANSWER
from tests.tools import misbehaving_server
from tests.tools.oauth_server import serve_oauth
from tests.web.conftest import PATIENCE, Served
from tests.web.screen import ask, keep_picture, last_reply
from tests.web.test_manners import axe_violations


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("tools"), "--calling") as server:
        yield server


@pytest.fixture
def talk(page: Page, served: Served) -> Page:
    """A conversation that offers the tools of a server."""
    open_conversation(page, served, {"tool_servers": ["bad"]})
    return page


def open_conversation(page: Page, served: Served, parameters: dict[str, Any]) -> None:
    with httpx.Client(base_url=served.url, timeout=PATIENCE) as api:
        id = api.post("/api/conversations", json={"title": "Tools", "parameters": parameters}).json()["id"]
    page.goto(f"{served.url}/#/c/{id}")
    expect(page.get_by_label("Message", exact=True)).to_be_enabled()


def calls(*rounds: list[Any]) -> str:
    return json.dumps([[[one, {}] if isinstance(one, str) else one for one in each] for each in rounds])


def approval(page: Page) -> Locator:
    return page.get_by_role("group", name="Run th")


def press_on(page: Page, button: Locator, key: str = "Shift+Tab") -> None:
    """Goes to the button by the Tab key alone, and presses Enter."""
    tab_to(page, button, key)
    page.keyboard.press("Enter")


def type_over(page: Page, field: Locator, text: str) -> None:
    """Goes to the field by the Tab key alone, unless it is there already, and types instead of what it has."""
    if not has_focus(field):
        tab_to(page, field)
    page.keyboard.press("Control+A")
    page.keyboard.type(text)


def tab_to(page: Page, element: Locator, key: str = "Shift+Tab") -> None:
    for _ in range(80):
        page.keyboard.press(key)
        if has_focus(element):
            return
    raise AssertionError("the element can't be reached by the keyboard")


def has_focus(element: Locator) -> bool:
    return bool(element.evaluate("element => element === document.activeElement"))


def test_one_press_of_a_key_runs_all_calls(talk: Page) -> None:
    ask(talk, calls(["bad__unchanged", "bad__injection"]))
    expect(approval(talk)).to_be_visible()
    expect(talk.get_by_label("Tool call: bad__unchanged")).to_contain_text("waiting for your approval")
    assert axe_violations(talk) == []
    press_on(talk, approval(talk).get_by_role("button", name="Run all"))
    expect(last_reply(talk)).to_contain_text(ANSWER)
    expect(talk.get_by_label("Tool call: bad__unchanged")).to_contain_text("as always")
    expect(talk.get_by_label("Tool call: bad__injection")).to_contain_text("IGNORE ALL PREVIOUS")
    assert axe_violations(talk) == []
    talk.reload()
    expect(last_reply(talk)).to_contain_text(ANSWER)
    expect(talk.get_by_label("Tool call: bad__unchanged")).to_contain_text("as always")


def test_a_sound_that_a_tool_returned_has_a_player(talk: Page) -> None:
    ask(talk, calls(["bad__sound"]))
    press_on(talk, approval(talk).get_by_role("button", name="Run", exact=True))
    expect(last_reply(talk)).to_contain_text(ANSWER)
    for _ in range(2):  # as it came, and as it was stored
        call = talk.get_by_label("Tool call: bad__sound")
        expect(call).to_contain_text("Listen.")
        player = call.locator("audio")
        expect(player).to_be_visible()
        expect(player).to_have_attribute("controls", "")
        expect(player).to_have_js_property("duration", 0.5)  # the browser has read it
        source = talk.request.get(str(player.evaluate("player => player.src")))
        assert (source.status, source.headers["content-type"]) == (200, "audio/wav")
        assert source.body().startswith(b"RIFF")
        assert axe_violations(talk) == []
        talk.reload()


def test_notices_about_tools_are_shown_once(talk: Page) -> None:
    notice = "The tool 'deep' is offered without its schema, which is nested more than 32 deep."
    ask(talk, calls(["bad__unchanged"]))
    press_on(talk, approval(talk).get_by_role("button", name="Run", exact=True))
    expect(last_reply(talk)).to_contain_text(ANSWER)
    expect(talk.locator("article .notice").get_by_text(f"bad: {notice}")).to_have_count(1)
    ask(talk, calls([]))
    expect(last_reply(talk)).to_contain_text(ANSWER)
    expect(talk.locator("article .notice").get_by_text(f"bad: {notice}")).to_have_count(1)
    talk.get_by_role("button", name="Settings").first.click()
    dialog = talk.locator("dialog")
    dialog.get_by_role("tab", name="Tools").click()
    expect(dialog.get_by_role("region", name="Tool servers").get_by_text(notice)).to_be_visible()
    assert axe_violations(talk) == []


def test_sprout_calls_two_tools_of_the_demo_and_reads_its_notes(page: Page, tmp_path: Path) -> None:
    with Served(tmp_path, "--demo") as served:
        open_conversation(page, served, {"tool_servers": ["demo"], "temperature": 0})
        page.get_by_label("Message", exact=True).focus()
        page.keyboard.type("What time is it, and what is 17 * 23?")
        page.keyboard.press("Enter")
        expect(approval(page)).to_be_visible(timeout=PATIENCE * 1000)
        expect(page.get_by_label("Tool call: ")).to_have_count(2)
        assert axe_violations(page) == []
        keep_picture(page, "tools")
        press_on(page, approval(page).get_by_role("button", name="Run all"))
        expect(last_reply(page)).to_contain_text(re.compile(r"\d\d:\d\d.*391"), timeout=PATIENCE * 1000)
        expect(page.get_by_label("Tool call: calculate")).to_contain_text("391")
        expect(page.get_by_label("Tool call: clock")).to_contain_text(re.compile(r"\d\d:\d\d"))
        assert axe_violations(page) == []
        attach_by_the_keyboard(page, served)


def attach_by_the_keyboard(page: Page, served: Served) -> None:
    """A resource of the demo, and a prompt with an argument, become files of the next message."""
    (served.folder / "notes").write_text("buy milk\n")
    files = page.get_by_role("list", name="Attached files")
    page.get_by_label("Message", exact=True).focus()
    press_on(page, page.get_by_role("button", name="Attach from a tool server"), key="Tab")
    dialog = page.get_by_role("dialog", name="Attach from a tool server")
    expect(dialog.get_by_role("region", name="demo")).to_contain_text("All notes.")
    assert axe_violations(page) == []
    press_on(page, dialog.get_by_role("button", name="Attach notes"), key="Tab")
    expect(dialog).to_have_count(0)
    expect(files.get_by_role("listitem")).to_contain_text(["all"])
    expect(page.get_by_role("button", name="Attach from a tool server")).to_be_focused()
    page.keyboard.press("Enter")
    dialog.get_by_label("text", exact=True).focus()
    page.keyboard.type("The build is green.")
    page.keyboard.press("Enter")
    expect(files.get_by_role("listitem")).to_contain_text(["all", "summarize"])
    ask(page, "Hello")
    sent = page.locator("article.user").last
    expect(sent.locator("details.file")).to_have_count(2)
    sent.locator("summary").first.click()
    expect(sent.locator("details.file").first).to_contain_text("buy milk")
    sent.locator("summary").last.click()
    expect(sent.locator("details.file").last).to_contain_text("Summarize this in one sentence: The build is green.")


def test_arguments_are_edited_and_a_call_is_denied(talk: Page) -> None:
    ask(talk, calls([["bad__unchanged", {"a": 1}]], ["bad__unchanged"]))
    run = approval(talk).get_by_role("button", name="Run", exact=True)
    expect(run).to_be_visible()
    press_on(talk, approval(talk).get_by_role("button", name="Edit arguments"))
    field = approval(talk).get_by_label("Arguments of bad__unchanged")
    expect(field).to_be_visible()
    type_over(talk, field, "nothing")
    expect(approval(talk).get_by_role("alert")).to_have_text("The arguments must be a JSON object.")
    expect(run).to_be_disabled()
    assert axe_violations(talk) == []
    type_over(talk, field, '{"a": 2}')
    expect(run).to_be_enabled()
    talk.route(
        "**/api/turns/*/tools", lambda route: route.abort() if route.request.method == "POST" else route.continue_()
    )
    press_on(talk, run, key="Tab")
    expect(talk.get_by_role("alert")).to_be_visible()
    expect(run).to_be_enabled()
    expect(field).to_have_value('{"a": 2}')
    talk.unroute("**/api/turns/*/tools")
    press_on(talk, run, key="Tab")
    first = talk.get_by_label("Tool call: bad__unchanged").first
    expect(first).to_contain_text('The user changed the arguments to {"a": 2}')
    expect(approval(talk)).to_be_visible()
    press_on(talk, approval(talk).get_by_role("button", name="Don’t run"))
    expect(last_reply(talk)).to_contain_text(ANSWER)
    expect(talk.get_by_label("Tool call: bad__unchanged").last).to_contain_text("The user did not allow this call.")


def test_a_slow_tool_is_stopped_continued_and_survives_a_kill(talk: Page, served: Served) -> None:
    ask(talk, calls(["bad__slow"]))
    approval(talk).get_by_role("button", name="Run", exact=True).click()
    expect(talk.get_by_label("Tool call: bad__slow")).to_contain_text("running…")
    talk.get_by_role("button", name="Stop").click()
    expect(talk.get_by_text("The tool calls were stopped.")).to_be_visible()
    last_reply(talk).get_by_role("button", name="Continue").click()
    expect(approval(talk)).to_contain_text("It is not known what it did.")
    assert axe_violations(talk) == []
    approval(talk).get_by_role("button", name="Run", exact=True).click()
    expect(talk.get_by_label("Tool call: bad__slow")).to_contain_text("running…")
    record = served.folder / "record"
    while record.read_text().count("call slow") < 2:  # a call counts as running before the tool has got it
        talk.wait_for_timeout(20)
    served.kill()
    served.start()
    expect(approval(talk)).to_contain_text("It is not known what it did.")
    assert record.read_text().count("call slow") == 2
    approval(talk).get_by_role("button", name="Don’t run").click()
    expect(last_reply(talk)).to_contain_text(ANSWER)


def test_servers_are_offered_and_added_in_the_settings(page: Page, served: Served, tmp_path: Path) -> None:
    page.goto(served.url)
    page.get_by_role("button", name="Settings").first.click()
    dialog = page.locator("dialog")
    dialog.get_by_role("tab", name="Tools").click()
    dialog.get_by_role("checkbox", name="bad").check()
    dialog.get_by_text("Add a tool server").click()
    dialog.get_by_label("Name of the server").fill("inside")
    dialog.get_by_label("URL").fill(f"{served.url}/mcp")
    assert axe_violations(page) == []
    dialog.get_by_role("button", name="Add", exact=True).click()
    expect(dialog.get_by_text("is at an address that is not public")).to_be_visible()
    dialog.get_by_role("button", name="Remove inside").click()
    expect(dialog.get_by_role("button", name="Remove inside")).to_have_count(0)
    dialog.get_by_role("button", name="Save", exact=True).click()
    ask(page, calls(["bad__unchanged"]))
    approval(page).get_by_label("Remember:").select_option("server")
    approval(page).get_by_role("button", name="Run", exact=True).click()
    expect(last_reply(page)).to_contain_text(ANSWER)
    page.get_by_role("button", name="Settings").first.click()
    dialog.get_by_role("tab", name="Tools").click()
    dialog.get_by_text("Remembered decisions (1)").click()
    expect(dialog.get_by_text("runs without asking, in all conversations")).to_be_visible()
    assert axe_violations(page) == []
    press_on(page, dialog.get_by_role("button", name="Ask again about bad"), key="Tab")
    expect(dialog.get_by_text("Remembered decisions")).to_have_count(0)
    page.keyboard.press("Escape")
    ask(page, calls(["bad__unchanged"]))
    expect(approval(page)).to_be_visible()


def test_tools_are_checked_when_they_are_saved(page: Page, served: Served) -> None:
    page.goto(served.url)
    page.get_by_role("button", name="Settings").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("tab", name="Tools").click()
    dialog.get_by_text("Tools whose results you give yourself").click()
    tools = dialog.get_by_role("textbox", name="Tools (JSON list)")
    for text, why in (
        ("[{", "aren’t valid JSON"),
        ('{"name": "add"}', "must be a JSON list"),
        ('[{"description": "no name"}]', "Tool 1 needs a name"),
        ('[{"name": "add", "parameters": []}]', "parameters of add"),
    ):
        tools.fill(text)
        dialog.get_by_role("button", name="Save", exact=True).click()
        expect(dialog.get_by_role("alert")).to_contain_text(why)
    tools.fill('[{"name": "add"}]')
    dialog.get_by_role("button", name="Save", exact=True).click()
    expect(dialog).to_have_count(0)


def test_a_user_is_led_to_the_sign_in_of_a_server(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misbehaving_server, "RECORD", os.devnull)
    with serve_oauth() as authorization, Served(tmp_path, "--calling", "--private") as served:
        page.goto(served.url)
        page.get_by_role("button", name="Settings").first.click()
        dialog = page.locator("dialog")
        dialog.get_by_role("tab", name="Tools").click()
        dialog.get_by_text("Add a tool server").click()
        dialog.get_by_label("Name of the server").fill("web")
        dialog.get_by_label("URL").fill(authorization.url)
        page.keyboard.press("Enter")
        expect(dialog.get_by_text("needs you to sign in")).to_be_visible()
        press_on(page, dialog.get_by_role("button", name="Sign in to web"))
        link = dialog.get_by_role("link", name="Continue at 127.0.0.1")
        expect(link).to_be_focused()
        assert axe_violations(page) == []
