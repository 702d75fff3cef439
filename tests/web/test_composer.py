"""Writing and sending: files that are dropped, sends that are slow or fail, and what Enter and Esc mean."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, FilePayload, Page, Route, expect

from tests.web.conftest import PATIENCE, Served, stored
from tests.web.screen import ask, conversation, ended, hold, keep_picture, last_reply, replies
from tests.web.test_manners import axe_violations

REFUSAL = json.dumps({"error": {"type": "server_error", "message": "No room.", "param": None, "code": None}})
DROP = """(element) => {
  const dataTransfer = new DataTransfer()
  dataTransfer.items.add(new File(['Some notes.'], 'notes.txt', { type: 'text/plain' }))
  const init = { bubbles: true, cancelable: true, dataTransfer }
  return ['dragover', 'drop'].map((name) => !element.dispatchEvent(new DragEvent(name, init)))
}"""


PASTE = """(element) => {
  const clipboardData = new DataTransfer()
  clipboardData.items.add(new File(['Pasted.'], 'pasted.txt', { type: 'text/plain' }))
  element.dispatchEvent(new ClipboardEvent('paste', { clipboardData, bubbles: true, cancelable: true }))
}"""


COPY = """async (element, texts) => {
  const picture = await new Promise((done) => document.createElement('canvas').toBlob(done))
  const kinds = Object.entries(texts).map(([kind, text]) => [kind, new Blob([text], { type: kind })])
  await navigator.clipboard.write([new ClipboardItem({ 'image/png': picture, ...Object.fromEntries(kinds) })])
}"""
"""Copies a picture, and the texts beside it."""


@pytest.fixture
def client(quick: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=quick.url, timeout=PATIENCE) as client:
        yield client


@pytest.mark.parametrize("place", [".scroller", "nav", "main > header"])
def test_a_file_may_be_dropped_anywhere(page: Page, quick: Served, place: str) -> None:
    page.goto(quick.url)
    taken = page.locator(place).evaluate(DROP)
    assert taken == [True, True], "the browser would leave the page for the file"
    expect(page.get_by_label("Attached files")).to_contain_text("notes.txt")


def test_cells_of_a_spreadsheet_are_pasted_as_text(page: Page, context: BrowserContext, quick: Served) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(quick.url)
    field = page.get_by_label("Message", exact=True)
    field.evaluate(COPY, {"text/plain": "pear\t3", "text/html": "<table><tr><td>pear<td>3</table>"})
    field.press("Control+v")
    expect(field).to_have_value("pear\t3")
    expect(page.get_by_role("alert")).to_have_count(0)
    field.evaluate(COPY, {"text/html": "<img src=x>"})
    field.press("Control+v")
    expect(page.get_by_role("alert")).to_contain_text("can’t read pictures")
    expect(field).to_have_value("pear\t3")


def test_a_message_waits_for_the_file_that_is_attached_to_it(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    go_on = hold(page, "**/api/documents*", "POST")
    note = {"name": "plan.html", "mimeType": "text/html", "buffer": b"<p>The plan.</p>"}
    page.locator("form input[type=file]").set_input_files(note)  # type: ignore[arg-type]
    expect(page.get_by_text("Attaching plan.html…")).to_be_visible()
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    ask(page, "What is planned?")
    go_on()
    ended(page)
    said = page.locator("article.user")
    expect(said).to_contain_text("What is planned?")
    expect(said.locator("summary")).to_have_text("plan.html")
    expect(page.get_by_label("Attached files")).to_have_count(0)


def test_a_message_looks_the_same_while_it_is_sent(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    note = {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"A line of many."}
    page.locator("form input[type=file]").set_input_files(note)  # type: ignore[arg-type]
    expect(page.get_by_label("Attached files")).to_contain_text("notes.txt")
    go_on = hold(page, "**/say", "POST")
    ask(page, "What do my notes say?")
    sending = page.locator("article.pending")
    expect(sending.locator("summary")).to_have_text("notes.txt")
    expect(sending.get_by_text("A line of many.")).to_be_hidden()
    listed = page.get_by_role("navigation", name="Conversations").get_by_role("listitem").first
    expect(listed).to_contain_text("What do my notes say?")
    go_on()
    ended(page)
    expect(page.locator("article.user summary")).to_have_text("notes.txt")


def test_the_focus_goes_where_the_next_key_belongs(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    field = page.get_by_label("Message", exact=True)
    ask(page, "Hello")
    ended(page)
    edit = page.locator("article.user").get_by_role("button", name="Edit")
    edit.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    expect(edit).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.type("!")
    page.keyboard.press("Enter")
    expect(field).to_be_focused()
    expect(page.locator("article.user")).to_contain_text("Hello!")
    expect(page.locator("article.user").get_by_label("Version 2 of 2")).to_be_visible()
    ended(page)
    page.locator("article.assistant").get_by_role("button", name="Retry").focus()
    page.keyboard.press("Enter")
    expect(field).to_be_focused()
    expect(last_reply(page).get_by_label("Version 2 of 2")).to_be_visible()
    page.keyboard.press("Control+/")
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()


def test_text_that_is_dragged_is_the_browser_s_to_move(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    assert page.locator(".scroller").evaluate(
        """(element) => {
          const dataTransfer = new DataTransfer()
          dataTransfer.setData('text/plain', 'words')
          return element.dispatchEvent(new DragEvent('dragover', { bubbles: true, cancelable: true, dataTransfer }))
        }"""
    )


def test_a_slow_send_holds_up_no_other_conversation(page: Page, quick: Served, client: httpx.Client) -> None:
    slow, other = (client.post("/api/conversations", json={"title": one}).json()["id"] for one in ("Slow", "Other"))
    held: list[Route] = []
    page.route(f"**/conversations/{slow}/say", lambda route: held.append(route))
    page.goto(f"{quick.url}/#/c/{slow}")
    expect(page.get_by_role("heading", name="Slow", exact=True)).to_be_visible()
    with page.expect_request("**/say"):
        ask(page, "Said slowly")
    page.goto(f"{quick.url}/#/c/{other}")
    expect(page.get_by_role("heading", name="Other", exact=True)).to_be_visible()
    ask(page, "Said at once")
    ended(page)
    page.goto(f"{quick.url}/#/c/{slow}")
    expect(page.get_by_role("heading", name="Slow", exact=True)).to_be_visible()
    expect(page.get_by_label("Message", exact=True)).to_have_value("")
    held[0].continue_()
    ended(page)
    expect(page.locator("article.user")).to_contain_text("Said slowly")
    expect(page.get_by_label("Message", exact=True)).to_have_value("")


def test_who_goes_elsewhere_while_a_conversation_is_made_stays_there(
    page: Page, quick: Served, client: httpx.Client
) -> None:
    other = client.post("/api/conversations", json={"title": "Elsewhere"}).json()["id"]
    page.goto(quick.url)
    go_on = hold(page, "**/api/conversations", "POST")
    with page.expect_request("**/api/conversations"):
        ask(page, "Said before leaving")
    page.goto(f"{quick.url}/#/c/{other}")
    expect(page.get_by_role("heading", name="Elsewhere", exact=True)).to_be_visible()
    go_on()
    made = page.get_by_role("navigation").get_by_role("link", name="Said before leaving")
    expect(made).to_be_visible()
    assert conversation(page) == other
    made.click()
    ended(page)


def test_a_first_message_that_is_refused_leaves_no_conversation(
    page: Page, quick: Served, client: httpx.Client
) -> None:
    page.goto(quick.url)
    page.route("**/say", lambda route: route.fulfill(status=507, content_type="application/json", body=REFUSAL))
    ask(page, "Keep me")
    expect(page.get_by_role("alert")).to_contain_text("No room.")
    expect(page.get_by_label("Message", exact=True)).to_have_value("Keep me")
    expect(page.get_by_text("Welcome to Palaver")).to_be_visible()
    nav = page.get_by_role("navigation")
    expect(nav.get_by_text("Untitled")).to_have_count(0)
    known = client.get("/api/conversations", params={"limit": 1000}).json()
    assert [one for one in known if one["title"] == ""] == []
    nav.get_by_role("button", name="Deleted").click()
    expect(nav.get_by_text("No deleted conversations.")).to_be_visible()
    nav.get_by_role("button", name="Back").click()
    page.unroute("**/say")
    page.get_by_label("Message", exact=True).press("Enter")
    ended(page)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_enter_means_the_same_in_the_editor(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    ask(page, "Before")
    ended(page)
    page.locator("article.user").get_by_role("button", name="Edit").click()
    words = page.get_by_role("textbox", name="Your message")
    words.fill("After")
    words.press("Shift+Enter")
    words.press_sequentially("two lines")
    words.press("Enter")
    expect(page.locator("article.user").get_by_label("Version 2 of 2")).to_be_visible()
    assert page.locator("article.user p").inner_text() == "After\ntwo lines"
    ended(page)


def test_ctrl_enter_sends_where_that_is_chosen(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    page.get_by_role("button", name="Settings").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("tab", name="Browser").click()
    dialog.get_by_role("switch", name="Send with Ctrl+Enter").click()
    keep_picture(page, "browser-settings")
    assert axe_violations(page) == []
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)  # there is nothing to save
    page.reload()
    field = page.get_by_label("Message", exact=True)
    field.press_sequentially("One")
    field.press("Enter")
    field.press_sequentially("two")
    expect(field).to_have_value("One\ntwo")
    page.keyboard.press("Control+/")
    expect(dialog.get_by_role("definition").first).to_have_text("Send the message, or save the edit")
    expect(dialog.get_by_role("term").first).to_have_text("Ctrl Enter")
    page.keyboard.press("Escape")
    field.press("Control+Enter")
    ended(page)
    page.locator("article.user").get_by_role("button", name="Edit").click()
    edited = page.get_by_label("Your message")
    edited.press("End")
    edited.press("Enter")
    expect(edited).to_have_value("One\ntwo\n")
    edited.press("Control+Enter")
    expect(page.get_by_label("Version 2 of 2")).to_be_visible()


def test_the_focus_stays_where_a_file_was_removed(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    file = FilePayload(name="notes.txt", mimeType="text/plain", buffer=b"Buy milk")
    remove = page.get_by_role("button", name="Remove notes.txt")
    page.locator("form.composer input[type=file]").set_input_files(file)
    remove.press("Enter")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    ask(page, "Look")
    ended(page)
    page.locator("article.user").get_by_role("button", name="Edit").click()
    editor = page.locator("form.edit")
    editor.locator("input[type=file]").set_input_files(file)
    remove.press("Enter")
    expect(editor.get_by_role("button", name="Attach files")).to_be_focused()
    page.keyboard.press("Escape")
    expect(editor).to_have_count(0)


def test_a_file_of_an_edit_is_attached_while_another_conversation_is_shown(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    ask(page, "Look")
    ended(page)
    edit = page.locator("article.user").get_by_role("button", name="Edit")
    remove = page.get_by_role("button", name="Remove notes.html")
    file = FilePayload(name="notes.html", mimeType="text/html", buffer=b"<p>Buy milk</p>")
    for cancels in (False, True):
        edit.click()
        go_on = hold(page, "**/api/documents*", "POST")
        with page.expect_request("**/api/documents*"):
            page.locator("form.edit input[type=file]").set_input_files(file)
        if cancels:
            page.get_by_role("button", name="Cancel").click()
        page.get_by_role("link", name="New conversation").click()
        expect(page.locator("article.user")).to_have_count(0)
        with page.expect_response("**/api/documents*"):
            go_on()
        page.wait_for_timeout(200)
        page.go_back()
        expect(page.locator("article.user")).to_have_count(1)
        expect(remove).to_have_count(0 if cancels else 1)
        expect(edit).to_have_count(1 if cancels else 0)
        if not cancels:
            page.get_by_role("button", name="Cancel").click()


def test_files_are_added_to_a_message_in_its_editor(
    page: Page, quick: Served, client: httpx.Client, tmp_path: Path
) -> None:
    page.goto(quick.url)
    ask(page, "Read this.")
    ended(page)
    page.locator("article.user").get_by_role("button", name="Edit").click()
    editor = page.locator("form.edit")
    files = editor.get_by_label("Attached files")
    (tmp_path / "chosen.txt").write_text("Chosen.")
    with page.expect_file_chooser() as chooser:
        editor.get_by_role("button", name="Attach files").click()
    chooser.value.set_files([tmp_path / "chosen.txt"])
    expect(files).to_contain_text("chosen.txt")
    field = editor.get_by_label("Your message")
    assert field.evaluate(DROP)[1]
    expect(files).to_contain_text("notes.txt")
    field.evaluate(PASTE)
    expect(files.get_by_role("listitem")).to_have_count(3)
    expect(page.get_by_label("Attached files")).to_have_count(1)  # the message field has none
    keep_picture(page, "editor")
    files.get_by_role("button", name="Remove notes.txt").click()
    editor.get_by_role("button", name="Send").click()
    expect(page.get_by_label("Version 2 of 2")).to_be_visible()
    ended(page)
    parts = stored(client, conversation(page))[0]["parts"]
    assert [part["text"] for part in parts] == [
        "Read this.",
        "\n\nFile chosen.txt:\n\nChosen.",
        "\n\nFile pasted.txt:\n\nPasted.",
    ]


def test_esc_closes_what_is_open_before_it_stops_a_reply(page: Page, endless: Served) -> None:
    stops: list[str] = []
    page.on("request", lambda request: stops.append(request.url) if request.url.endswith("/stop") else None)
    page.goto(endless.url)
    ask(page, "Well?")
    expect(last_reply(page).locator(".thinking")).to_contain_text("Another paragraph.")
    menu = page.locator("[popover]:popover-open")
    page.get_by_role("button", name="More", exact=True).click()
    expect(menu).to_be_visible()
    page.keyboard.press("Escape")
    expect(menu).to_have_count(0)
    page.locator("article.user").get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="Your message").press("Escape")
    expect(page.locator("form.edit")).to_have_count(0)
    search = page.get_by_label("Search conversations")
    search.fill("some words")
    search.press("Escape")
    expect(search).to_have_value("")
    page.get_by_role("button", name="Settings").click()
    expect(page.locator("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_have_count(0)
    assert stops == []
    page.keyboard.press("Escape")
    ended(page, "stopped")
    assert len(stops) == 1


def test_esc_closes_the_list_of_a_phone_before_it_stops_a_reply(browser: Browser, endless: Served) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 740}, service_workers="block")
    context.set_default_timeout(PATIENCE * 1000)
    page = context.new_page()
    page.goto(endless.url)
    ask(page, "Well?")
    expect(last_reply(page).locator(".thinking")).to_contain_text("Another paragraph.")
    page.get_by_role("button", name="Conversations", exact=True).click()
    expect(page.locator(".page.drawer")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".page.drawer")).to_have_count(0)
    expect(last_reply(page)).to_have_attribute("data-status", "running")
    page.keyboard.press("Escape")
    ended(page, "stopped")
    context.close()


def test_only_what_was_cut_short_or_edited_can_be_continued(page: Page, quick: Served, client: httpx.Client) -> None:
    said = [{"role": role, "content": f"{role} {n}"} for n in range(2) for role in ("user", "assistant")]
    made = client.post("/api/import", content=json.dumps({"messages": said})).json()[0]["id"]
    page.goto(f"{quick.url}/#/c/{made}")
    expect(replies(page)).to_have_count(2)
    going_on = page.get_by_role("button", name="Continue")
    expect(going_on).to_have_count(0)
    page.keyboard.press("Alt+c")
    last_reply(page).get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="The reply").fill("Half a")
    page.locator("form.edit").get_by_role("button", name="Save").click()
    expect(last_reply(page).get_by_label("Version 2 of 2")).to_be_visible()
    expect(going_on).to_have_count(1)
    expect(page.get_by_role("alert")).to_have_count(0)
