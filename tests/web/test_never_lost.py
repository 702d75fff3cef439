"""Whatever happens to the network, the tab or the server: the page shows what was said, once and whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Dialog, FilePayload, Locator, Page, Route, expect

from tests.web.conftest import ENDLESS_THOUGHT, PATIENCE, Served, text_of
from tests.web.forked import HOLD
from tests.web.proxy import Wire
from tests.web.screen import answer, ask, conversation, ended, hold, last_reply, message_id, replies, thought, until

THOUGHT = " ".join(f"step {n}." for n in range(30))
HELD_AT = "step 12."
PARAGRAPHS = 8
CUTS = 16
ANSWER_MS = 1000
"""After which a tab that does not answer is taken to be closed, as in `tab.svelte.ts`."""
ANSWER = "\n\n".join(f"Paragraph {n} with **bold** words and `code` in it." for n in range(PARAGRAPHS))
SHOWN = ANSWER.replace("**", "").replace("`", "")


@pytest.fixture(scope="module")
def reciting(tmp_path_factory: pytest.TempPathFactory, built: None) -> Iterator[Served]:
    """Says one thing, which can be held in the middle of its thought."""
    script = [{"thought": THOUGHT.replace(HELD_AT, HELD_AT + HOLD), "answer": ANSWER}]
    with Served(tmp_path_factory.mktemp("reciting"), script=script) as served:
        yield served


@pytest.fixture
def served(reciting: Served) -> Iterator[Served]:
    """It runs and holds nothing, whatever the test before has left."""
    if not reciting.is_running:
        reciting.start()
    yield reciting
    reciting.go_on()


def ask_and_hold(page: Page, served: Served) -> None:
    """A reply that is in the middle of its thought until it may go on."""
    served.hold()
    ask(page, "Tell me")
    expect(last_reply(page).locator(".thinking")).to_contain_text(HELD_AT)


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


def test_a_thought_that_was_stopped_and_reloaded_goes_on_where_it_was(page: Page, served: Served) -> None:
    page.goto(served.url)
    ask_and_hold(page, served)
    page.get_by_role("button", name="Stop").click()
    ended(page, "stopped")
    served.go_on()
    page.reload()
    reply = ended(page, "stopped")
    assert reply.locator(".parts > .markdown").count() == 0
    reply.get_by_role("button", name="Continue").click()
    whole(served, page)


def test_answer_now_ends_the_thought(page: Page, endless: Served) -> None:
    page.goto(endless.url)
    ask(page, "Be quick")
    expect(last_reply(page).locator(".thinking")).to_contain_text("and so on")
    page.get_by_role("button", name="Answer now").click()
    expect(last_reply(page).locator(".parts > .markdown")).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    reply = ended(page, "stopped")
    reply.get_by_role("button", name="Thought").click()
    thought_letters, answer_letters = ("".join(text.split()) for text in (thought(reply), answer(reply)))
    assert answer_letters
    assert "".join(ENDLESS_THOUGHT.split()).startswith(thought_letters + answer_letters)  # all of it is in the thought


def test_reload_and_second_tab_show_the_same_running_reply(page: Page, served: Served) -> None:
    page.goto(served.url)
    ask_and_hold(page, served)
    page.reload()
    other = page.context.new_page()
    other.goto(page.url)
    for tab in (page, other):
        expect(last_reply(tab).locator(".thinking")).to_contain_text(HELD_AT)
    served.go_on()
    whole(served, page)
    whole(served, other)


def test_the_server_is_killed_and_started_again_in_the_middle(page: Page, served: Served) -> None:
    page.goto(served.url)
    ask_and_hold(page, served)
    served.kill()
    expect(away(page)).to_be_visible()
    served.go_on()
    served.start()
    whole(served, page)
    expect(away(page)).to_have_count(0)
    thought = last_reply(page).get_by_role("button", name="Thought")
    expect(thought).to_have_text(re.compile(r"Thought for [\d.]+ s"))  # stored with its tokens


def test_the_server_ends_in_order_and_is_started_again_in_the_middle(page: Page, served: Served) -> None:
    page.goto(served.url)
    ask_and_hold(page, served)
    served.end()
    served.go_on()
    served.start()
    whole(served, page)


def test_many_cuts_of_the_network_in_one_reply(page: Page, tmp_path: Path, built: None) -> None:
    """Some while the reply comes, and some while the page catches up."""
    script = [{"thought": THOUGHT, "answer": ANSWER}]
    served = Served(tmp_path / "cut", "--rate", "120", script=script)
    with served, Wire(served.port, cut_streams=CUTS, after=400) as wire:
        page.goto(wire.url)
        ask(page, "Tell me")
        ended(page)
        assert wire.cuts == CUTS
        whole(served, page)


def test_a_network_that_goes_and_comes_back(page: Page, served: Served) -> None:
    with Wire(served.port) as wire:
        page.goto(wire.url)
        ask_and_hold(page, served)
        wire.down = True
        wire.cut()
        expect(away(page)).to_be_visible()
        page.get_by_label("Message", exact=True).fill("typed while away")
        wire.down = False
        served.go_on()
        whole(served, page)
        expect(away(page)).to_have_count(0)
        expect(page.get_by_label("Message", exact=True)).to_have_value("typed while away")


def test_one_stream_for_a_tab_and_none_for_one_that_is_hidden(page: Page, served: Served) -> None:
    with Wire(served.port) as wire:
        page.goto(wire.url)
        ask_and_hold(page, served)
        until(page, lambda: wire.streams == 1)
        _see(page, "hidden")
        until(page, lambda: wire.streams == 0)
        _see(page, "visible")
        served.go_on()
        whole(served, page)
        assert wire.streams == 1


def test_a_draft_survives_a_reload(page: Page, served: Served) -> None:
    page.goto(served.url)
    page.get_by_label("Message", exact=True).fill("half a thou")
    page.reload()
    expect(page.get_by_label("Message", exact=True)).to_have_value("half a thou")
    page.keyboard.press("Enter")
    page.get_by_label("Message", exact=True).press("Enter")
    conversation(page)
    expect(page.get_by_label("Message", exact=True)).to_have_value("")


def test_drafts_of_two_tabs_survive_a_reload(page: Page, served: Served) -> None:
    page.goto(served.url)
    other = page.context.new_page()
    other.goto(served.url)
    fields = [tab.get_by_label("Message", exact=True) for tab in (page, other)]
    for field, text in zip(fields, ("in the first tab", "in the second tab"), strict=True):
        field.fill(text)
    for tab in (page, other):
        tab.reload()
    expect(fields[0]).to_have_value("in the first tab")
    expect(fields[1]).to_have_value("in the second tab")
    fields[0].press("Enter")
    ended(page)
    expect(fields[0]).to_have_value("")
    other.reload()
    expect(fields[1]).to_have_value("in the second tab")
    other.close()
    page.goto(served.url)
    expect(fields[0]).to_have_value("in the second tab")
    fields[0].fill("")


def test_a_draft_that_another_tab_sends_leaves_the_field(page: Page, served: Served) -> None:
    page.goto(served.url)
    other = page.context.new_page()
    fields = [tab.get_by_label("Message", exact=True) for tab in (page, other)]
    fields[0].fill("a draft")
    other.goto(served.url)
    expect(fields[1]).to_have_value("a draft")
    fields[0].press("Enter")
    ended(page)
    expect(fields[1]).to_have_value("")
    other.reload()
    expect(fields[1]).to_have_value("")


def test_a_copy_of_a_draft_that_was_sent_while_its_tab_slept_is_another_message(page: Page, served: Served) -> None:
    page.goto(served.url)
    ask(page, "first")
    ended(page)
    address = page.url
    other = page.context.new_page()
    fields = [tab.get_by_label("Message", exact=True) for tab in (page, other)]
    fields[0].fill("a draft")
    other.goto(address)
    expect(fields[1]).to_have_value("a draft")
    other.goto("about:blank")
    fields[0].press("Enter")
    expect(replies(page)).to_have_count(2)
    ended(page)
    other.goto(address)
    expect(replies(other)).to_have_count(2)
    expect(fields[1]).to_have_value("a draft")
    fields[1].press("Enter")
    expect(other.locator("article.user")).to_have_text(["first", "a draft", "a draft"])
    expect(other.get_by_role("alert")).to_have_count(0)
    whole(served, other)


def test_a_draft_of_a_closed_tab_is_kept_though_another_tab_has_sent_a_newer_one(page: Page, served: Served) -> None:
    closed = page.context.new_page()
    for tab, text in ((closed, "older"), (page, "newer")):
        tab.goto(served.url)
        tab.get_by_label("Message", exact=True).fill(text)
    field = page.get_by_label("Message", exact=True)
    field.press("Enter")
    ended(page)
    page.wait_for_function("() => localStorage.getItem('palaver.draft.new')?.includes('older')")
    closed.close()
    page.goto(served.url)
    expect(field).to_have_value("older")
    field.fill("")


def test_a_message_that_could_not_be_sent_stays_in_the_field(page: Page, served: Served) -> None:
    page.goto(served.url)
    refusal = '{"error": {"message": "No room.", "type": "x", "param": null, "code": null}}'
    page.route("**/say", lambda route: route.fulfill(status=507, content_type="application/json", body=refusal))
    ask(page, "please keep me")
    expect(page.get_by_role("alert")).to_contain_text("No room.")
    expect(page.get_by_label("Message", exact=True)).to_have_value("please keep me")


def test_a_browser_without_room_loses_no_text(page: Page, served: Served) -> None:
    page.add_init_script("Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError') }")
    page.goto(served.url)
    ask(page, "first")
    ended(page)
    field = page.get_by_label("Message", exact=True)
    held: list[Route] = []
    page.route("**/say", lambda route: held.append(route))
    with page.expect_request("**/say"):
        ask(page, "second")
    field.fill("typed meanwhile")
    held[0].fulfill(status=507)
    expect(page.get_by_role("alert")).to_be_visible()
    expect(field).to_have_value("second\ntyped meanwhile")
    page.evaluate("location.hash = ''")
    expect(field).to_have_value("")
    page.go_back()
    expect(field).to_have_value("second\ntyped meanwhile")


def test_a_browser_that_forbids_channels_between_tabs_shows_the_page(page: Page, served: Served) -> None:
    page.add_init_script("BroadcastChannel = class { constructor() { throw new DOMException('no', 'SecurityError') } }")
    page.goto(served.url)
    ask(page, "Tell me")
    whole(served, page)


def send_without_an_answer(page: Page, path: str, text: str) -> None:
    """The first request for this path is not sent. A request that is only held up is sent when its tab is closed."""
    page.evaluate(
        """path => {
          const send = fetch
          window.fetch = (url, options) => {
            if (!url.endsWith(path)) return send(url, options)
            window.fetch = send
            window.isLost = true
            return new Promise(() => undefined)
          }
        }""",
        path,
    )
    ask(page, text)
    page.wait_for_function("() => window.isLost")


def test_a_first_message_survives_a_reload_before_its_conversation_exists(page: Page, served: Served) -> None:
    page.goto(served.url)
    field = page.get_by_label("Message", exact=True)
    send_without_an_answer(page, "/api/conversations", "Tell me")
    field.fill("And then?")
    page.reload()
    whole(served, page)
    expect(page.locator("article.user")).to_have_text(["Tell me"])
    expect(field).to_have_value("And then?")


def test_a_reload_while_a_conversation_is_created_leaves_no_empty_one(page: Page, served: Served) -> None:
    def count() -> int:
        return len(httpx.get(f"{served.url}/api/conversations", timeout=PATIENCE).json())

    page.goto(served.url)
    before = count()
    page.evaluate("() => { const send = fetch; fetch = (...all) => send(...all).then(() => new Promise(() => {})) }")
    ask(page, "Tell me")
    until(page, lambda: count() == before + 1)
    page.reload()
    whole(served, page)
    assert count() == before + 1


def test_a_first_message_that_is_refused_can_be_sent_again(page: Page, served: Served) -> None:
    """Its conversation was deleted: it gets another one."""
    page.goto(served.url)
    page.route("**/say", lambda route: route.fulfill(status=507))
    ask(page, "Tell me")
    field = page.get_by_label("Message", exact=True)
    expect(page.get_by_role("alert")).to_be_visible()
    expect(field).to_have_value("Tell me")
    page.unroute("**/say")
    field.press("Enter")
    whole(served, page)


def test_a_first_message_of_a_closed_tab_can_be_sent_by_another(page: Page, served: Served) -> None:
    page.goto(served.url)
    closed = page.context.new_page()
    closed.goto(served.url)
    send_without_an_answer(closed, "/api/conversations", "Tell me")
    closed.get_by_label("Message", exact=True).fill("And then?")
    closed.close()
    page.reload()
    expect(page.get_by_text("Not sent, because its tab was closed")).to_be_visible()
    expect(page.get_by_label("Message", exact=True)).to_have_value("And then?")
    page.get_by_role("button", name="Send now").click()
    whole(served, page)
    expect(page.locator("article.user")).to_have_text(["Tell me"])


@pytest.mark.parametrize("reloads", [True, False])
def test_a_message_of_a_closed_tab_is_sent_by_another(page: Page, served: Served, reloads: bool) -> None:
    """Soon, not only after the time for which a tab that sends is waited for; also by one that was open throughout."""
    page.goto(served.url)
    ask(page, "first")
    ended(page)
    closed = page.context.new_page()
    closed.goto(page.url)
    ended(closed)
    send_without_an_answer(closed, "/say", "second")
    page.wait_for_timeout(ANSWER_MS + 500)
    expect(page.locator("article.user")).to_have_text(["first"])
    closed.close()
    if reloads:
        page.reload()
    expect(page.locator("article.user")).to_have_text(["first", "second"])
    whole(served, page)


def test_a_message_of_a_closed_tab_that_was_stored_on_another_branch_is_not_sent_again(
    page: Page, served: Served
) -> None:
    page.goto(served.url)
    ask(page, "first")
    ended(page)
    closed = page.context.new_page()
    closed.route("**/api/events", lambda route: route.abort())  # it does not see the branch of the other
    closed.goto(page.url)
    ended(closed)
    ask(page, "second")
    expect(replies(page)).to_have_count(2)
    whole(served, page)
    stored: list[str] = []
    closed.route("**/say", lambda route: stored.append(route.fetch().text()))
    ask(closed, "third")
    until(closed, lambda: bool(stored))
    closed.close()
    expect(page.get_by_text("Not sent, because it belongs to another branch")).to_be_visible()
    assert _roles(page, served) == ["user", "assistant"] * 3
    page.get_by_role("button", name="Send now").click()
    expect(page.locator("article.user .said")).to_have_text(["first", "second", "third"])
    whole(served, page)
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.get_by_label("Queued messages")).to_have_count(0)


def _retry_and_queue(page: Page, served: Served) -> list[str]:
    """A message behind the second reply, which is held. The roles of the messages that are stored then."""
    served.hold()
    last_reply(page).get_by_role("button", name="Retry").click()
    expect(last_reply(page).locator(".thinking")).to_contain_text(HELD_AT)
    ask(page, "queued")
    return ["user", "assistant", "assistant"]


def _roles(page: Page, served: Served) -> list[str]:
    nodes = httpx.get(f"{served.url}/api/conversations/{conversation(page)}/nodes", timeout=PATIENCE).json()
    return [node["role"] for node in nodes]


def test_a_queued_message_waits_for_the_reply_that_it_was_queued_behind(page: Page, served: Served) -> None:
    """Another reply to the same message is complete, in another tab and then in this one."""
    page.goto(served.url)
    ask(page, "first")
    ended(page)
    other = page.context.new_page()
    other.goto(page.url)
    ended(other)
    stored = _retry_and_queue(page, served)
    elsewhere = "Not sent, because it belongs to another branch"
    expect(other.get_by_text(elsewhere)).to_be_visible()
    page.get_by_role("button", name="Previous version").click()
    expect(page.get_by_text(elsewhere)).to_be_visible()
    assert _roles(page, served) == stored
    page.get_by_role("button", name="Next version").click()
    served.go_on()
    expect(page.locator("article.user")).to_have_text(["first", "queued"])
    whole(served, page)
    assert _roles(page, served) == [*stored, "user", "assistant"]


def test_a_duplicated_tab_is_another_one_and_sends_nothing_twice(page: Page, served: Served) -> None:
    page.goto(served.url)
    ask(page, "first")
    ended(page)
    name = page.evaluate("sessionStorage.getItem('palaver.tab')")
    held: list[Route] = []
    page.route("**/say", lambda route: held.append(route))
    with page.expect_request("**/say"):
        ask(page, "second")
    sent: list[str] = []
    page.context.on("request", lambda one: sent.append(one.url) if one.url.endswith("/say") else None)
    with page.expect_popup() as opened:
        page.evaluate("void open(location.href)")  # with a copy of the session's storage, as duplicated tabs have
    other = opened.value
    ended(other)
    other.wait_for_function("name => sessionStorage.getItem('palaver.tab') !== name", arg=name)
    assert page.evaluate("sessionStorage.getItem('palaver.tab')") == name
    held[0].continue_()
    for tab in (page, other):
        expect(replies(tab)).to_have_count(2)
        ended(tab)
    assert not sent
    nodes = httpx.get(f"{served.url}/api/conversations/{conversation(page)}/nodes", timeout=PATIENCE).json()
    assert [node["role"] for node in nodes] == ["user", "assistant"] * 2


def test_a_file_is_attached_although_the_network_fails_for_a_moment(page: Page, served: Served) -> None:
    """A recording or a picture of the camera is nowhere else."""
    failed: list[Route] = []

    def fail_once(route: Route) -> None:
        failed.append(route)
        (route.continue_ if len(failed) > 1 else route.abort)()

    page.route("**/api/documents*", fail_once)
    page.goto(served.url)
    file = FilePayload(name="notes.html", mimeType="text/html", buffer=b"<p>Buy milk</p>")
    page.locator("form.composer input[type=file]").set_input_files(file)
    page.get_by_role("button", name="Remove notes.html").click()
    assert len(failed) == 2


def test_an_edit_that_could_not_be_saved_stays_open_and_is_stored_once(page: Page, served: Served) -> None:
    page.goto(served.url)
    ask(page, "first")
    ended(page)
    refusal = '{"error": {"message": "No room.", "type": "x", "param": null, "code": null}}'
    page.route("**/replies", lambda one: one.fulfill(status=507, content_type="application/json", body=refusal))
    page.locator("article.user").get_by_role("button", name="Edit").click()
    field = page.locator("article.user textarea")
    field.fill("edited")
    field.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("No room.")
    expect(field).to_have_value("edited")
    asked: list[str] = []

    def leave(dialog: Dialog) -> None:
        asked.append(dialog.type)
        dialog.accept()

    page.on("dialog", leave)
    page.reload()
    assert asked == ["beforeunload"]
    expect(field).to_have_value("edited")
    field.fill("edited again")
    field.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("No room.")
    page.unroute("**/replies")
    field.press("Enter")
    expect(page.locator("article.user")).to_contain_text("edited again")
    expect(field).to_have_count(0)
    whole(served, page)
    nodes = httpx.get(f"{served.url}/api/conversations/{conversation(page)}/nodes", timeout=PATIENCE).json()
    assert [node["role"] for node in nodes].count("user") == 3, "the first, and each edit once"


def test_an_edit_stays_while_another_conversation_is_shown(page: Page, served: Served) -> None:
    page.goto(served.url)
    ask(page, "first")
    ended(page)
    message = page.locator("article.user")
    message.get_by_role("button", name="Edit").click()
    field = message.locator("textarea")
    field.fill("edited")
    page.get_by_role("link", name="New conversation").click()
    expect(message).to_have_count(0)
    page.go_back()
    expect(field).to_have_value("edited")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    hold_edit = hold(page, "**/edit", "POST")
    field.press("Enter")
    page.get_by_role("link", name="New conversation").click()
    page.go_back()
    expect(message).to_contain_text("first")
    expect(field).to_have_count(0)
    hold_edit()
    expect(message).to_contain_text("/2")
    if message.get_by_text("first").count():  # the conversation was open again before its cursor had moved
        message.get_by_role("button", name="Next version").click()
    expect(message).to_contain_text("edited")
    whole(served, page)
    page.get_by_role("button", name="Previous version").first.click()
    expect(message).to_contain_text("first")
    expect(field).to_have_count(0)
    message.get_by_role("button", name="Edit").click()
    expect(field).to_have_value("first")
    field.fill("second")
    page.get_by_role("button", name="Cancel").click()
    page.reload()
    expect(message).to_contain_text("first")
    expect(field).to_have_count(0)


@pytest.mark.parametrize("text", ["second", ""])
def test_a_message_whose_answer_is_lost_does_not_come_back_to_the_field(page: Page, served: Served, text: str) -> None:
    page.goto(served.url)
    ask(page, "first")
    ended(page)

    def lose_the_answer(route: Route) -> None:
        route.fetch()
        route.abort()

    page.route("**/say", lose_the_answer)
    file = FilePayload(name="notes.txt", mimeType="text/plain", buffer=b"Buy milk\n\n")
    page.locator("form.composer input[type=file]").set_input_files(file)
    remove = page.get_by_role("button", name="Remove notes.txt")
    expect(remove).to_be_visible()
    ask(page, text)
    expect(page.locator("article.user")).to_have_count(2)
    expect(remove).to_have_count(0)
    expect(page.get_by_label("Message", exact=True)).to_have_value("")
    whole(served, page)


def test_a_stale_tab_overwrites_nothing(page: Page, browser: Browser, served: Served) -> None:
    """Its stream is cut off, so it knows nothing of what the other one said."""
    page.goto(served.url)
    ask(page, "first")
    ended(page)
    with Wire(served.port) as wire:
        stale = browser.new_context(service_workers="block").new_page()
        stale.goto(page.url.replace(served.url, wire.url))
        ended(stale)
        stale.route("**/api/events", lambda route: route.abort())
        wire.cut()
        ask(page, "from the fresh tab")
        expect(replies(page)).to_have_count(2)
        ask(stale, "from the stale tab")
        expect(stale.get_by_text("from the stale tab")).to_be_visible()
        expect(replies(stale)).to_have_count(2)
        nodes = httpx.get(f"{served.url}/api/conversations/{conversation(page)}/nodes", timeout=PATIENCE).json()
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
