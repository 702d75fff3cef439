"""A conversation with the embedded model, as a person has it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect

from tests.web.conftest import PATIENCE, Served, stored, text_of
from tests.web.screen import act, answer, ask, conversation, ended, hold, last_reply, message_id, replies, until
from tests.web.test_manners import axe_violations


def test_a_reply_shows_its_thought_and_its_answer(page: Page, sprout: Served, api: httpx.Client) -> None:
    page.goto(sprout.url)
    ask(page, "What is 12 + 30?")
    reply = ended(page)
    thought = reply.get_by_role("button", name=re.compile("^Thought (for|briefly)"))
    expect(thought).to_have_attribute("aria-expanded", "false")
    kept = stored(api, conversation(page))[-1]
    assert answer(reply).strip() == text_of(kept).strip()
    thought.click()
    expect(reply.locator(".thinking .markdown")).to_contain_text(text_of(kept, "thinking").strip()[:20])
    page.get_by_role("button", name=re.compile(r"^Context: .*% used$")).click()
    expect(page.get_by_text("of 8,192 tokens")).to_be_visible()


def test_sprout_tells_the_ways_of_the_page_and_no_command(page: Page, sprout: Served, api: httpx.Client) -> None:
    made = api.post("/api/conversations", json={"title": "Ways", "parameters": {"temperature": 0}}).json()["id"]
    page.goto(f"{sprout.url}/#/c/{made}")
    ways = {
        "How do I stop a reply?": "Stop",
        "How do I continue a stopped reply?": "Continue",
        "How do I start a new conversation?": "New conversation",
    }
    for number, (question, way) in enumerate(ways.items(), 1):
        ask(page, question)
        expect(replies(page)).to_have_count(number)
        told = answer(ended(page))
        assert way in told
        assert not re.search(r"(^|\s)/[a-z]+|Ctrl\+C", told), told


def test_statistics_raw_text_and_tokens_can_be_seen(page: Page, sprout: Served, api: httpx.Client) -> None:
    page.goto(sprout.url)
    ask(page, "What is 7 + 8?")
    reply = ended(page)
    act(reply, "Statistics")
    expect(reply.get_by_text("tokens/s")).to_be_visible()
    act(reply, "Raw")
    raw = api.get(f"/api/turns/{message_id(reply)}/raw").json()["text"]
    expect(reply.locator("pre.raw")).to_have_text(raw)
    assert "</think>" in raw
    assert axe_violations(page) == []
    act(reply, "Tokens")
    tokens = api.get(f"/api/turns/{message_id(reply)}/tokens").json()
    expect(reply.locator(".text .token")).to_have_count(len(tokens))


def test_another_token_begins_a_branch_of_its_own(page: Page, sprout: Served, api: httpx.Client) -> None:
    page.goto(sprout.url)
    ask(page, "What is 20 + 22?")
    first = ended(page)
    old = message_id(first)
    tokens = api.get(f"/api/turns/{old}/tokens").json()
    place = len(tokens) // 2
    act(first, "Tokens")
    first.locator(".text .token").nth(place).click()
    others = [one for one in tokens[place]["alternatives"] if one["token_id"] != tokens[place]["token_id"]]
    first.get_by_role("button", name="Use this instead").first.click()
    expect(last_reply(page)).not_to_have_attribute("data-id", old)
    expect(last_reply(page)).not_to_have_attribute("data-status", "running")
    forked = api.get(f"/api/turns/{message_id(last_reply(page))}/tokens").json()
    assert [one["token_id"] for one in forked[:place]] == [one["token_id"] for one in tokens[:place]]
    assert forked[place]["token_id"] == others[0]["token_id"]
    expect(last_reply(page).get_by_label("Version 2 of 2")).to_be_visible()


def test_retry_edit_and_arrows_walk_the_tree(page: Page, sprout: Served, api: httpx.Client) -> None:
    page.goto(sprout.url)
    ask(page, "Hello!")
    first = message_id(ended(page))
    last_reply(page).get_by_role("button", name="Retry").click()
    expect(last_reply(page).get_by_label("Version 2 of 2")).to_be_visible()
    ended(page)
    last_reply(page).get_by_role("button", name="Previous version").click()
    expect(last_reply(page)).to_have_attribute("data-id", first)
    page.locator("article.user").get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="Your message").fill("What is 2 + 2?")
    assert axe_violations(page) == []
    page.locator("form.edit").get_by_role("button", name="Send").click()
    expect(page.locator("article.user").get_by_label("Version 2 of 2")).to_be_visible()
    ended(page)
    expect(page.locator("article.user")).to_contain_text("What is 2 + 2?")
    assert len(api.get(f"/api/conversations/{conversation(page)}/nodes").json()) == 5

    page.get_by_role("button", name="Map").click()
    dots = page.locator("dialog .map button")
    expect(dots).to_have_count(5)
    expect(page.get_by_role("button", name="Your message: What is 2 + 2?")).to_be_visible()
    page.get_by_role("button", name="Your message: Hello!").focus()
    page.keyboard.press("Enter")
    expect(page.locator("dialog")).to_have_count(0)
    expect(page.locator("article.user")).to_contain_text("Hello!")


def test_undo_and_redo_go_back_and_forth(page: Page, sprout: Served) -> None:
    page.goto(sprout.url)
    ask(page, "Hi")
    ended(page)
    ask(page, "What is 1 + 1?")
    expect(replies(page)).to_have_count(2)
    ended(page)
    page.get_by_role("button", name="Undo").click()
    expect(replies(page)).to_have_count(1)
    page.reload()
    expect(replies(page)).to_have_count(1)
    page.get_by_role("button", name="Redo").click()
    expect(replies(page)).to_have_count(2)


def test_an_edited_reply_can_be_continued(page: Page, sprout: Served, api: httpx.Client) -> None:
    page.goto(sprout.url)
    ask(page, "Name a few colours.")
    ended(page)
    last_reply(page).get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="The reply").fill("Here are three:")
    page.locator("form.edit").get_by_role("button", name="Save").click()
    expect(last_reply(page)).to_contain_text("Here are three:")
    last_reply(page).get_by_role("button", name="Continue").click()
    expect(last_reply(page).get_by_label("Version 3 of 3")).to_be_visible()
    expect(last_reply(page)).not_to_have_attribute("data-status", "running")
    assert text_of(stored(api, conversation(page))[-1]).startswith("Here are three:")


def test_stop_reload_continue_is_the_reply_that_was_not_stopped(page: Page, sprout: Served, api: httpx.Client) -> None:
    """With a seed, so that the uncut reply can be had beside it; long, so that nobody is too late to stop it."""
    question = "Write a list of animals."
    parameters = {"seed": 11, "min_tokens": 800, "max_tokens": 800}
    made = api.post("/api/conversations", json={"parameters": parameters}).json()["id"]
    message = {"role": "user", "parts": [{"type": "text", "text": question}]}
    said = api.post(f"/api/conversations/{made}/say", json={"parent": None, "message": message}).json()
    with api.stream("GET", f"/api/turns/{said['reply']['id']}/events") as events:
        events.read()
    uncut = api.get(f"/api/messages/{said['reply']['id']}").json()

    other = api.post("/api/conversations", json={"parameters": parameters}).json()["id"]
    page.goto(f"{sprout.url}/#/c/{other}")
    ask(page, question)
    page.get_by_role("button", name="Stop").click()
    ended(page, "stopped")
    page.reload()
    reply = ended(page, "stopped")
    reply.get_by_role("button", name="Continue").click()
    ended(page, "length")
    again = api.get(f"/api/messages/{message_id(last_reply(page))}").json()
    assert again["parts"] == uncut["parts"]
    shown = answer(last_reply(page))
    page.goto(f"{sprout.url}/#/c/{made}")
    expect(last_reply(page)).to_have_attribute("data-id", said["reply"]["id"])
    assert answer(last_reply(page)) == shown


def test_thinking_is_switched_as_the_model_has_it(page: Page, sprout: Served, api: httpx.Client) -> None:
    page.goto(sprout.url)
    switch = page.get_by_role("switch", name="Thinking")
    expect(switch).to_have_attribute("aria-checked", "true")
    switch.click()
    expect(switch).to_have_attribute("aria-checked", "false")
    ask(page, "What is 3 + 4?")
    ended(page)
    expect(last_reply(page).get_by_role("button", name="Thought")).to_have_count(0)
    assert api.get(f"/api/conversations/{conversation(page)}").json()["parameters"]["thinking"] is False
    switch.click()
    expect(switch).to_have_attribute("aria-checked", "true")
    ask(page, "What is 5 + 4?")
    expect(replies(page)).to_have_count(2)
    ended(page)
    expect(last_reply(page).get_by_role("button", name="Thought")).to_be_visible()


def test_what_another_client_says_is_followed(
    page: Page, context: BrowserContext, sprout: Served, api: httpx.Client
) -> None:
    page.goto(sprout.url)
    ask(page, "Hi there")
    ended(page)
    id = conversation(page)
    leaf = stored(api, id)[-1]["id"]
    message = {"role": "user", "parts": [{"type": "text", "text": "said elsewhere"}]}
    api.post(f"/api/conversations/{id}/say", json={"parent": leaf, "message": message})
    expect(page.get_by_text("said elsewhere")).to_be_visible()
    expect(replies(page)).to_have_count(2)
    ended(page)


def test_a_message_is_shown_on_its_branch_though_another_is_chosen_while_it_is_sent(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    ask(page, "First")
    ended(page)
    last_reply(page).get_by_role("button", name="Retry").click()
    expect(last_reply(page).get_by_label("Version 2 of 2")).to_be_visible()
    second = message_id(ended(page))
    go_on = hold(page, "**/say", "POST")
    with page.expect_request("**/say"):
        ask(page, "More")
    page.get_by_role("button", name="Previous version").click()
    expect(last_reply(page).get_by_label("Version 1 of 2")).to_be_visible()
    go_on()
    expect(page.locator("article.user")).to_have_text(["First", "More"])
    ended(page)
    assert message_id(replies(page).first) == second


def test_a_branch_that_grows_does_not_come_back_when_another_is_chosen(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    ask(page, "First")
    ended(page)
    last_reply(page).get_by_role("button", name="Retry").click()
    expect(last_reply(page).get_by_label("Version 2 of 2")).to_be_visible()
    leaf = message_id(ended(page))
    held: list[Route] = []
    page.route("**/path", lambda route: route.continue_() if held else held.append(route))
    message = {"role": "user", "parts": [{"type": "text", "text": "said elsewhere"}]}
    say = f"{quick.url}/api/conversations/{conversation(page)}/say"
    httpx.post(say, json={"parent": leaf, "message": message}, timeout=PATIENCE).raise_for_status()
    until(page, lambda: bool(held))
    version = last_reply(page).get_by_label("Version 1 of 2")
    page.get_by_role("button", name="Previous version").click()
    expect(version).to_be_visible()
    with page.expect_response("**/path"):
        held[0].continue_()
    page.wait_for_timeout(500)
    expect(page.locator("article.user")).to_have_text(["First"])
    page.reload()
    expect(version).to_be_visible()


def test_what_is_said_while_a_conversation_is_opened_is_shown(page: Page, endless: Served) -> None:
    page.goto(endless.url)
    ask(page, "First")
    page.get_by_role("button", name="Stop", exact=True).click()
    ended(page, "stopped")
    other = page.context.new_page()
    go_on = hold(other, "**/path", "GET")
    with other.expect_request("**/path"):
        other.goto(page.url)
    with other.expect_response("**/api/conversations?*"):  # as it hears of a change, it loads the list
        ask(page, "Second")
        ended(page, "running")
    go_on()
    expect(other.locator("article.user")).to_have_text(["First", "Second"])
    ended(other, "running")
    page.get_by_role("button", name="Stop", exact=True).click()
    ended(other, "stopped")


def test_two_tabs_that_edit_make_two_branches(
    page: Page, context: BrowserContext, sprout: Served, api: httpx.Client
) -> None:
    page.goto(sprout.url)
    ask(page, "Hello tabs")
    ended(page)
    other = context.new_page()
    other.goto(page.url)
    ended(other)
    for tab, words in ((page, "What is 1 + 2?"), (other, "What is 3 + 5?")):
        tab.locator("article.user").get_by_role("button", name="Edit").click()
        tab.get_by_role("textbox", name="Your message").fill(words)
    for tab in (page, other):
        tab.locator("form.edit").get_by_role("button", name="Send").click()
    for tab, words in ((page, "What is 1 + 2?"), (other, "What is 3 + 5?")):
        expect(tab.locator("article.user").get_by_label("of 3")).to_be_visible()
        expect(tab.locator("article.user")).to_contain_text(words)
        ended(tab)
    nodes = api.get(f"/api/conversations/{conversation(page)}/nodes").json()
    assert sum(node["role"] == "user" for node in nodes) == 3


def test_a_double_send_is_said_once(page: Page, sprout: Served, api: httpx.Client) -> None:
    """The answer to the first is lost on its way; the page sends again under the same key."""
    lost: list[str] = []

    def lose(route) -> None:  # type: ignore[no-untyped-def]
        if lost:
            route.continue_()
            return
        lost.append(route.request.url)
        route.fetch()
        route.abort("connectionreset")

    page.goto(sprout.url)
    page.route("**/say", lose)
    ask(page, "Only once, please")
    ended(page)
    assert lost
    nodes = api.get(f"/api/conversations/{conversation(page)}/nodes").json()
    assert [node["role"] for node in nodes] == ["user", "assistant"]


def test_what_is_sent_while_the_message_before_is_still_being_taken_is_said_next(
    page: Page, sprout: Served, api: httpx.Client
) -> None:
    """A reply may be there before the page has heard all about it: Enter counts all the same."""
    page.goto(sprout.url)
    go_on = hold(page, "**/cursor", "PUT")
    ask(page, "What is 2 + 3?")
    ended(page)
    ask(page, "What is 3 + 4?")
    expect(page.locator("article.user")).to_have_count(1)
    go_on()
    expect(page.locator("article.user")).to_have_count(2)
    ended(page)
    nodes = api.get(f"/api/conversations/{conversation(page)}/nodes").json()
    assert [node["role"] for node in nodes] == ["user", "assistant"] * 2


def test_what_is_written_while_the_first_message_is_sent_stays(page: Page, sprout: Served) -> None:
    field = page.get_by_label("Message", exact=True)
    page.goto(sprout.url)
    go_on = hold(page, "**/api/conversations", "POST")
    with page.expect_request("**/api/conversations"):
        ask(page, "What is 4 + 5?")
    field.fill("And what then?")
    go_on()
    ended(page)
    expect(field).to_have_value("And what then?")
    page.reload()
    ended(page)
    expect(field).to_have_value("And what then?")


@pytest.mark.parametrize("reaches_the_server", [True, False])
def test_a_message_whose_request_was_cut_by_a_reload_is_sent_once(
    page: Page, sprout: Served, reaches_the_server: bool
) -> None:
    """What was written meanwhile stays in the field."""
    field, said = page.get_by_label("Message", exact=True), page.locator("article.user")
    page.goto(sprout.url)
    ask(page, "What is 4 + 5?")
    ended(page)
    held: list[Route] = []

    def hold_response(route: Route) -> None:
        held.append(route)
        if reaches_the_server:
            route.fetch()

    page.route("**/say", hold_response)
    with page.expect_request("**/say"):
        ask(page, "What is 2 + 3?")
    field.fill("And what then?")
    page.unroute("**/say")
    page.reload()
    expect(said).to_have_count(2)
    ended(page)
    expect(field).to_have_value("And what then?")


def test_a_first_message_whose_request_was_cut_by_a_reload_is_sent(page: Page, sprout: Served) -> None:
    page.goto(sprout.url)
    page.route("**/say", lambda route: None)
    with page.expect_request("**/say"):
        ask(page, "What is 4 + 5?")
    page.unroute("**/say")
    page.reload()
    ended(page)
    expect(page.locator("article.user")).to_have_count(1)
    expect(page.get_by_label("Message", exact=True)).to_have_value("")


def test_a_message_that_one_tab_sends_is_not_sent_by_another(
    page: Page, context: BrowserContext, sprout: Served, api: httpx.Client
) -> None:
    page.goto(sprout.url)
    ask(page, "What is 4 + 5?")
    ended(page)
    other = context.new_page()
    other.goto(page.url)
    ended(other)
    sent: list[str] = []
    other.on("request", lambda request: sent.append(request.url) if request.url.endswith("/say") else None)
    held: list[Route] = []
    page.route("**/say", lambda route: held.append(route))
    with page.expect_request("**/say"):
        ask(page, "What is 21 + 33?")
    assert "What is 21 + 33?" in page.evaluate("() => JSON.stringify(localStorage)")
    other.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    expect(other.get_by_text("What is 21 + 33?")).to_have_count(0)
    held[0].continue_()
    expect(other.locator("article.user")).to_have_count(2)
    ended(page)
    assert not sent
    nodes = api.get(f"/api/conversations/{conversation(page)}/nodes").json()
    assert [node["role"] for node in nodes] == ["user", "assistant"] * 2


def test_a_message_that_could_not_be_sent_comes_back_before_what_was_written_since(page: Page, sprout: Served) -> None:
    held: list[Route] = []
    field = page.get_by_label("Message", exact=True)
    page.goto(sprout.url)
    page.route("**/say", lambda route: held.append(route))
    with page.expect_request("**/say"):
        ask(page, "First")
    field.fill("Second")
    refusal = json.dumps({"error": {"type": "storage_full", "message": "The disk is full."}})
    held[0].fulfill(status=507, content_type="application/json", body=refusal)
    expect(field).to_have_value("First\nSecond")


def test_a_message_that_could_not_be_sent_stays_in_its_conversation(
    page: Page, sprout: Served, api: httpx.Client
) -> None:
    here, there = (api.post("/api/conversations", json={"title": title}).json()["id"] for title in ("Here", "There"))
    field = page.get_by_label("Message", exact=True)
    page.goto(f"{sprout.url}/#/c/{here}")
    expect(page.get_by_role("heading", name="Here", exact=True)).to_be_visible()
    held: list[Route] = []
    page.route("**/say", lambda route: held.append(route))
    with page.expect_request("**/say"):
        ask(page, "Said here")
    page.goto(f"{sprout.url}/#/c/{there}")
    expect(page.get_by_role("heading", name="There", exact=True)).to_be_visible()
    field.fill("Written there")
    refusal = json.dumps({"error": {"type": "storage_full", "message": "The disk is full."}})
    held[0].fulfill(status=507, content_type="application/json", body=refusal)
    expect(page.get_by_role("alert")).to_contain_text("The disk is full.")
    expect(field).to_have_value("Written there")
    page.goto(f"{sprout.url}/#/c/{here}")
    expect(field).to_have_value("Said here")


def test_files_of_text_go_into_the_message_and_pictures_say_why_not(
    page: Page, sprout: Served, api: httpx.Client, tmp_path: Path
) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("# Notes\n\nA line <script>alert(1)</script>\n")
    picture = tmp_path / "dot.png"
    picture.write_bytes(b"\x89PNG\r\n")
    page.goto(sprout.url)
    expect(page.get_by_role("group", name="Examples")).to_be_visible()  # what it can't read is known then
    picker = page.locator("form input[type=file]")
    picker.set_input_files([picture])
    expect(page.get_by_role("alert")).to_contain_text("can’t read pictures. A vision model is needed")
    picker.set_input_files([notes])
    expect(page.get_by_label("Attached files")).to_contain_text("notes.md")
    ask(page, "What does it say?")
    ended(page)
    page.get_by_text("notes.md").click()
    expect(page.locator("details.file pre")).to_contain_text("<script>alert(1)</script>")
    parts = stored(api, conversation(page))[0]["parts"]
    assert parts[1]["text"] == f"\n\nFile notes.md:\n\n{notes.read_text()}"
    page.locator("article.user").get_by_role("button", name="Edit").click()
    words = page.get_by_role("textbox", name="Your message")
    expect(words).to_have_value("What does it say?")
    expect(page.locator("form.edit").get_by_label("Attached files")).to_contain_text("notes.md")
    words.fill("And now?")
    page.locator("form.edit").get_by_role("button", name="Send").click()
    expect(page.locator("article.user")).to_contain_text("And now?")
    ended(page)
    assert stored(api, conversation(page))[0]["parts"][1:] == parts[1:]
    page.locator("article.user").get_by_role("button", name="Edit").click()
    page.get_by_role("button", name="Remove notes.md").click()
    page.locator("form.edit").get_by_role("button", name="Send").click()
    expect(page.get_by_label("Version 3 of 3")).to_be_visible()
    ended(page)
    assert stored(api, conversation(page))[0]["parts"] == [{"type": "text", "text": "And now?"}]


def test_a_tool_call_is_a_card_that_takes_a_result(page: Page, sprout: Served, api: httpx.Client) -> None:
    tool = {
        "name": "get_weather",
        "description": "Weather at a place.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
    made = api.post("/api/conversations", json={"parameters": {"tools": [tool], "temperature": 0}}).json()["id"]
    page.goto(f"{sprout.url}/#/c/{made}")
    ask(page, "What's the weather in Oslo?")
    ended(page)
    card = page.get_by_label("Tool call: get_weather")
    expect(card).to_contain_text("Oslo")
    card.get_by_label("Tool result").fill('{"sky": "snow", "degrees": -3}')
    card.get_by_role("button", name="Submit").click()
    expect(replies(page)).to_have_count(2)
    ended(page)
    expect(page.get_by_label("Tool call: get_weather")).to_contain_text("snow")


def test_a_full_context_is_a_choice(page: Page, tmp_path: Path, built: None) -> None:
    with Served(tmp_path / "small", "--context", "300", script=[{"thought": "Hm", "answer": "Yes."}]) as served:
        page.goto(served.url)
        ask(page, "a" * 120)
        ended(page)
        ask(page, "b" * 150)
        dialog = page.get_by_role("dialog", name="The context is full")
        expect(dialog).to_contain_text("300")
        assert axe_violations(page) == []
        dialog.get_by_role("button", name="Back to my message").click()
        field = page.get_by_label("Message", exact=True)
        expect(field).to_have_value("b" * 150)
        field.press("Enter")
        expect(dialog).to_be_visible()
        page.evaluate("location.hash = ''")  # as the browser's own buttons do
        expect(page.locator("article.user")).to_have_count(0)
        expect(dialog).to_have_count(0)
        page.go_back()
        expect(field).to_have_value("b" * 150)
        field.press("Enter")
        dialog.get_by_role("button", name="Drop the oldest messages").click()
        expect(replies(page)).to_have_count(2)
        ended(page)
        expect(page.locator("article.user")).to_have_count(2)
