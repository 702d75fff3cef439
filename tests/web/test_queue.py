"""Messages that wait for a reply, long texts that are pasted, and what a message costs before it is sent."""

from __future__ import annotations

import json

import httpx
from playwright.sync_api import Page, expect

from tests.web.conftest import PATIENCE, Served, stored, text_of
from tests.web.screen import ask, conversation, ended, hold, last_reply
from tests.web.test_manners import axe_violations

PASTE = """([selector, text]) => {
  const clipboardData = new DataTransfer()
  clipboardData.setData('text/plain', text)
  const event = new ClipboardEvent('paste', { bubbles: true, cancelable: true, clipboardData })
  return !document.querySelector(selector).dispatchEvent(event)
}"""


def test_queued_messages_are_sent_one_by_one_as_replies_end(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    go_on = hold(page, "**/api/events", "POST")  # so that the page doesn't hear of the end
    ask(page, "First")
    expect(last_reply(page)).to_have_attribute("data-status", "running")
    ask(page, "Second")
    ask(page, "Third")
    waiting = page.get_by_label("Queued messages").get_by_role("listitem")
    expect(waiting).to_have_text(["Second", "Third"])
    expect(page.get_by_label("Message", exact=True)).to_have_value("")
    assert axe_violations(page) == []
    go_on()
    expect(page.locator("article.user")).to_have_text(["First", "Second", "Third"])
    ended(page)
    expect(waiting).to_have_count(0)
    with httpx.Client(base_url=quick.url, timeout=PATIENCE) as api:
        path = stored(api, conversation(page))
    assert [text_of(one) for one in path if one["role"] == "user"] == ["First", "Second", "Third"]


def test_two_tabs_send_a_queue_in_its_order(page: Page, quick: Served) -> None:
    """One waits while the other sends a message, and until it shows that message."""
    page.goto(quick.url)
    go_on = hold(page, "**/api/events", "POST")
    ask(page, "First")
    expect(last_reply(page)).to_have_attribute("data-status", "running")
    ask(page, "Second")
    ask(page, "Third")
    other = page.context.new_page()
    send = hold(other, "**/say", "POST")
    with other.expect_request("**/say"):
        other.goto(page.url)
    refresh = hold(page, "**/nodes", "GET")
    sent: list[str] = []
    page.on("request", lambda one: sent.append(one.url) if one.url.endswith("/say") else None)
    go_on()
    ended(page)
    page.wait_for_timeout(500)
    assert not sent
    hear = hold(other, "**/api/events", "POST")
    send()
    expect(other.locator("article.user")).to_have_text(["First", "Second"])
    page.wait_for_function("() => !JSON.stringify(localStorage).includes('Second')")
    page.wait_for_timeout(500)
    assert not sent
    refresh()
    hear()
    for tab in (page, other):
        expect(tab.locator("article.user")).to_have_text(["First", "Second", "Third"])
        ended(tab)


def test_a_queue_survives_a_reload_and_waits_where_a_reply_was_stopped(page: Page, endless: Served) -> None:
    page.goto(endless.url)
    ask(page, "Well?")
    expect(last_reply(page).locator(".thinking")).to_contain_text("The first line")
    field = page.get_by_label("Message", exact=True)
    for text in ("Keep me", "Change me", "Remove me"):
        ask(page, text)
    go_on = hold(page, "**/nodes*", "GET")
    page.reload()
    waiting = page.get_by_label("Queued messages").get_by_role("listitem")
    expect(waiting).to_have_text(["Keep me", "Change me", "Remove me"])
    expect(page.get_by_role("button", name="Send now")).to_have_count(0)  # whether the reply runs is not known yet
    go_on()
    ended(page, "running")
    page.get_by_role("button", name="Remove: Remove me").click()
    field.press("ArrowUp")  # the last one comes back
    expect(field).to_have_value("Change me")
    field.fill("Changed")
    page.get_by_role("button", name="Queue").click()
    expect(waiting).to_have_text(["Keep me", "Changed"])
    page.get_by_role("button", name="Stop", exact=True).click()
    ended(page, "stopped")
    expect(page.get_by_text("Not sent, because the reply didn’t finish")).to_be_visible()
    expect(page.locator("article.user")).to_have_text(["Well?"])
    page.get_by_role("button", name="Send now").click()
    expect(page.locator("article.user")).to_have_text(["Well?", "Keep me"])
    expect(waiting).to_have_text(["Changed"])
    page.get_by_role("button", name="Stop", exact=True).click()
    ended(page, "stopped")


def test_nothing_is_sent_before_the_branch_is_known(page: Page, endless: Served) -> None:
    """It would be another first message."""
    page.goto(endless.url)
    ask(page, "Well?")
    expect(last_reply(page).locator(".thinking")).to_contain_text("The first line")
    ask(page, "Queued")
    page.get_by_role("button", name="Stop", exact=True).click()
    ended(page, "stopped")
    go_on = hold(page, "**/nodes", "GET")
    page.reload()
    expect(page.get_by_label("Queued messages").get_by_role("listitem")).to_have_text(["Queued"])
    send_now = page.get_by_role("button", name="Send now")
    expect(send_now).to_have_count(0)
    ask(page, "Typed while it loads")
    go_on()
    expect(page.locator("article.user")).to_have_text(["Well?", "Typed while it loads"])
    page.get_by_role("button", name="Stop", exact=True).click()
    ended(page, "stopped")
    send_now.click()
    expect(page.locator("article.user")).to_have_text(["Well?", "Typed while it loads", "Queued"])
    page.get_by_role("button", name="Stop", exact=True).click()
    ended(page, "stopped")


def test_a_long_paste_is_attached_and_counted(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    field = page.get_by_label("Message", exact=True)
    field.focus()
    assert not page.evaluate(PASTE, ["#composer", "short"]), "the browser pastes short texts itself"
    text = "a line of text\n" * 300
    assert page.evaluate(PASTE, ["#composer", text])
    files = page.get_by_label("Attached files").get_by_role("listitem")
    expect(files).to_contain_text("Pasted text.txt")
    with httpx.Client(base_url=quick.url, timeout=PATIENCE) as api:
        tokens = api.post("/api/tokens", json={"text": text}).json()["tokens"]
        assert api.post("/api/tokens", json={"text": "a" * 2_000_000}).status_code == 400
    expect(files).to_contain_text(f"{tokens:,} tokens")
    expect(page.locator(".count")).to_contain_text(f"{tokens:,} tokens")
    page.reload()
    expect(files).to_contain_text("Pasted text.txt")
    page.get_by_role("button", name="Put Pasted text.txt into the message").click()
    expect(files).to_have_count(0)
    assert field.input_value().strip() == text.strip()
    field.fill("")


def test_what_is_unsent_in_a_purged_conversation_does_not_stay_for_ever(page: Page, quick: Served) -> None:
    """In a deleted one it does, which can be restored."""
    with httpx.Client(base_url=quick.url, timeout=PATIENCE) as api:
        kept, deleted = (
            api.post("/api/conversations", json={"title": name}).json()["id"] for name in ("kept", "deleted")
        )
        api.delete(f"/api/conversations/{deleted}").raise_for_status()
    ids = [kept, deleted, "purged"]
    page.goto(quick.url)
    page.evaluate(
        """ids => ids.forEach(id => {
          localStorage.setItem(`palaver.draft.${id}`, JSON.stringify({ text: 'draft', files: [], key: id }))
          localStorage.setItem(`palaver.queue.${id}`, JSON.stringify([{ text: 'queued', files: [], key: id }]))
        })""",
        ids,
    )
    page.reload()
    page.wait_for_function("() => localStorage.getItem('palaver.unknown')")
    unknown = page.evaluate("JSON.parse(localStorage.getItem('palaver.unknown'))")
    assert list(unknown) == ["purged"]
    stored = "ids => ids.filter(id => ['draft', 'queue'].some(kind => localStorage.getItem(`palaver.${kind}.${id}`)))"
    assert page.evaluate(stored, ids) == ids
    month = 31 * 24 * 3_600_000
    page.evaluate(
        "([key, value]) => localStorage.setItem(key, value)",
        ["palaver.unknown", json.dumps({"purged": unknown["purged"] - month})],
    )
    page.reload()
    page.wait_for_function("() => !localStorage.getItem('palaver.unknown')")
    assert page.evaluate(stored, ids) == ids[:2]
