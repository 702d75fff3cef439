"""Keyboard, screen reader, sizes, colours, prefixes, keys: the page behaves well."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from palaver.store import open_store
from tests.web.conftest import PATIENCE, ROOT, Served, stored
from tests.web.screen import act, ask, conversation, ended, last_reply, replies
from tests.web.served import LOGIN

AXE = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"
FIRST_LOAD = 300_000


def axe_violations(page: Page) -> list[str]:
    """What axe finds, of any impact."""
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(AXE.read_text())
    violations = page.evaluate(
        "() => axe.run(document, { resultTypes: ['violations'] }).then(found => found.violations)"
    )
    return [
        f"{one['id']}: {node['html'][:200]} {node.get('failureSummary', '')[:300]}"
        for one in violations
        for node in one["nodes"]
    ]


@pytest.fixture(scope="module")
def talk(sprout: Served) -> str:
    """The address of a conversation with two versions of a reply."""
    with httpx.Client(base_url=sprout.url, timeout=PATIENCE) as api:
        made = api.post("/api/conversations", json={"title": "Two versions", "tags": ["tests"]}).json()["id"]
        message = {"role": "user", "parts": [{"type": "text", "text": "Write a list of animals."}]}
        said = api.post(f"/api/conversations/{made}/say", json={"parent": None, "message": message}).json()
        other = api.post(f"/api/conversations/{made}/replies", json={"parent": said["message"]["id"]}).json()
        for turn in (said["reply"]["id"], other["id"]):
            api.get(f"/api/turns/{turn}/events")
    return f"{sprout.url}/#/c/{made}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_grave(browser: Browser, talk: str, scheme: str) -> None:
    context = browser.new_context(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(talk)
    reply = ended(page)
    assert axe_violations(page) == []
    reply.get_by_role("button", name="Thought").click()
    act(reply, "Tokens")
    reply.locator(".text .token").nth(3).click()
    assert axe_violations(page) == []
    for name in ("Map", "Settings", "Model"):
        page.get_by_role("button", name=name).first.click()
        expect(page.locator("dialog")).to_be_visible()
        assert axe_violations(page) == []
        page.keyboard.press("Escape")
        expect(page.locator("dialog")).to_have_count(0)
    context.close()


def test_a_dialog_stays_though_the_closing_of_the_one_before_is_told_late(page: Page, talk: str) -> None:
    """A browser tells of a closing some time after it: here after the next dialog was asked for."""
    page.goto(talk)
    ended(page)
    page.keyboard.press("Alt+m")
    expect(page.get_by_role("dialog", name="Map of the conversation")).to_be_visible()
    page.evaluate(
        """() => new Promise(done => {
            const map = document.querySelector('dialog')
            map.addEventListener('close', () => setTimeout(done))
            map.close()
            window.dispatchEvent(new KeyboardEvent('keydown', { key: '?' }))
        })"""
    )
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()


def test_everything_can_be_done_with_keys(page: Page, talk: str, sprout: Served, api: httpx.Client) -> None:
    page.goto(sprout.url)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.type("Hello keys")
    page.keyboard.press("Enter")
    ended(page)
    page.keyboard.press("Alt+r")
    expect(last_reply(page).get_by_label("Version 2 of 2")).to_be_visible()
    ended(page)
    page.keyboard.press("Alt+BracketLeft")
    expect(last_reply(page).get_by_label("Version 1 of 2")).to_be_visible()
    page.keyboard.press("Alt+u")
    expect(last_reply(page).get_by_label("Version 2 of 2")).to_be_visible()
    page.keyboard.press("Alt+Shift+u")
    expect(last_reply(page).get_by_label("Version 1 of 2")).to_be_visible()
    page.keyboard.press("Alt+t")
    tokens = page.get_by_role("application")
    tokens.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token.chosen")).to_have_count(1)
    page.keyboard.press("Alt+m")
    expect(page.get_by_role("dialog", name="Map of the conversation")).to_be_visible()
    page.keyboard.press("Escape")
    page.get_by_role("region", name="Conversation", exact=True).focus()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_contain_text("Retry the reply")
    assert axe_violations(page) == []
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+s")
    expect(page.get_by_label("Search conversations")).to_be_focused()
    page.keyboard.press("Alt+n")
    expect(page.get_by_text("Welcome to Palaver")).to_be_visible()


@pytest.mark.parametrize("width", [360, 768, 1920])
def test_nothing_is_cut_off_at_any_width(browser: Browser, talk: str, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 740})
    page = context.new_page()
    page.goto(talk)
    ended(page)
    wider = page.evaluate(
        """() => [...document.querySelectorAll('body *')]
          .filter(e => !e.closest('aside') && e.getBoundingClientRect().right > innerWidth + 1 && e.checkVisibility())
          .map(e => e.outerHTML.slice(0, 120))"""
    )
    assert wider == []
    if width < 800:
        page.get_by_role("button", name="Conversations").click()
        expect(page.get_by_label("Search conversations")).to_be_in_viewport()
        page.get_by_role("link", name="Two versions").click()
        expect(page.get_by_label("Search conversations")).not_to_be_in_viewport()
    context.close()


def test_words_from_right_to_left_stand_there(page: Page, sprout: Served) -> None:
    page.goto(sprout.url)
    ask(page, "שלום עולם")
    said = page.locator("article.user p")
    expect(said).to_have_css("direction", "rtl")
    ended(page)


def test_the_first_load_is_small_and_from_this_server_alone(browser: Browser, sprout: Served) -> None:
    context = browser.new_context()
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(sprout.url)
    expect(page.get_by_label("Message", exact=True)).to_be_visible()
    size = page.evaluate(
        """() => [...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]
          .reduce((sum, entry) => sum + entry.encodedBodySize, 0)"""
    )
    assert 0 < size < FIRST_LOAD
    assert all(url.startswith(sprout.url) for url in asked)
    context.close()


def test_it_can_be_installed_and_opened_without_the_server(browser: Browser, tmp_path: Path, built: None) -> None:
    with Served(tmp_path / "gone", script=[{"thought": "x", "answer": "y"}]) as served:
        context = browser.new_context()
        page = context.new_page()
        page.goto(served.url)
        manifest = json.loads(httpx.get(f"{served.url}/manifest.webmanifest").text)
        assert manifest["display"] == "standalone"
        for icon in manifest["icons"]:
            assert httpx.get(f"{served.url}/{icon['src']}").status_code == 200
        page.evaluate("() => navigator.serviceWorker.ready.then(() => true)")
        page.reload()
        expect(page.get_by_text("Welcome to Palaver")).to_be_visible()
        page.reload()
        expect(page.get_by_text("Welcome to Palaver")).to_be_visible()
        served.kill()
        page.reload()
        expect(page.get_by_text("Can’t reach the server")).to_be_visible()
        kept = page.evaluate(
            "async () => (await Promise.all((await caches.keys()).map(async k => (await (await caches.open(k)).keys())"
            ".map(r => r.url)))).flat()"
        )
        assert kept
        assert not any("/api/" in url for url in kept)
        context.close()


def test_it_works_under_a_prefix(browser: Browser, tmp_path: Path, built: None) -> None:
    script = [{"thought": "Hm", "answer": "Under a prefix."}]
    with Served(tmp_path / "prefixed", "--prefix", "/chat", script=script) as served:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{served.url}/chat")
        assert page.url.rstrip("#/").endswith("/chat")
        ask(page, "Where are you?")
        ended(page)
        expect(last_reply(page)).to_contain_text("Under a prefix.")
        page.reload()
        expect(last_reply(page)).to_contain_text("Under a prefix.")
        context.close()


def test_a_key_is_given_once_and_no_script_can_read_it(browser: Browser, tmp_path: Path, built: None) -> None:
    folder = tmp_path / "locked"
    with open_store(folder) as store:
        user = store.users.ensure()
        _, key = store.keys.add(user.id, admin=True)
    with Served(folder, "--host", "0.0.0.0", script=[{"thought": "Hm", "answer": "Come in."}]) as served:
        context = browser.new_context()
        page = context.new_page()
        page.goto(served.url)
        page.get_by_label("Key").fill("wrong")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_contain_text("isn’t valid")
        assert axe_violations(page) == []
        page.get_by_label("Key").fill(key)
        page.get_by_role("button", name="Sign in").click()
        ask(page, "May I?")
        ended(page)
        page.reload()
        expect(last_reply(page)).to_contain_text("Come in.")
        assert key not in page.evaluate("() => document.cookie + JSON.stringify({...localStorage, ...sessionStorage})")
        cookie = next(one for one in context.cookies() if one["value"] == key)
        assert cookie["httpOnly"]
        assert cookie["sameSite"] == "Strict"
        assert httpx.get(f"{served.url}/api/conversations").status_code == 401
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("Key")).to_be_visible()
        context.close()


def test_search_tags_titles_delete_and_restore(page: Page, talk: str, sprout: Served, api: httpx.Client) -> None:
    page.goto(talk)
    ended(page)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Title", exact=True).fill("Animals of all kinds")
    page.get_by_label("Tags (comma-separated)").fill("zoo, tests")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_role("heading", name="Animals of all kinds")).to_be_visible()
    nav = page.get_by_role("navigation", name="Conversations")
    nav.get_by_role("button", name="zoo").click()
    expect(nav.get_by_role("link", name="Animals of all kinds")).to_be_visible()
    nav.get_by_role("button", name="zoo").click()
    page.get_by_label("Search conversations").fill("list of animals")
    expect(nav.get_by_text("In messages")).to_be_visible()
    nav.locator(".hits a").first.click()
    expect(page.locator("article.user")).to_contain_text("Write a list of animals.")
    page.get_by_label("Search conversations").fill("")
    nav.get_by_role("listitem").filter(has_text="Animals of all kinds").hover()
    nav.get_by_role("button", name="Actions for Animals of all kinds").click()
    nav.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_text("Welcome to Palaver")).to_be_visible()
    nav.get_by_role("button", name="Deleted").click()
    restore = nav.get_by_role("button", name="Restore Animals of all kinds")
    expect(restore).to_be_visible()
    assert axe_violations(page) == []
    restore.click()
    nav.get_by_role("button", name="Back").click()
    nav.get_by_role("link", name="Animals of all kinds").click()
    ended(page)


def test_a_deleted_conversation_is_restored_where_it_is_open(page: Page, sprout: Served, api: httpx.Client) -> None:
    said = [{"role": role, "content": f"{role} speaks"} for role in ("user", "assistant")]
    made = api.post("/api/import", content=json.dumps({"messages": said})).json()[0]["id"]
    page.goto(f"{sprout.url}/#/c/{made}")
    expect(last_reply(page)).to_contain_text("assistant speaks")
    api.delete(f"/api/conversations/{made}")
    deleted = page.get_by_text("This conversation was deleted.")
    expect(deleted).to_be_visible()
    assert axe_violations(page) == []
    page.get_by_role("button", name="Restore", exact=True).click()
    expect(deleted).to_have_count(0)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    api.delete(f"/api/conversations/{made}")
    expect(deleted).to_be_visible()
    page.reload()
    expect(deleted).to_be_visible()
    api.post(f"/api/conversations/{made}/undelete")
    expect(last_reply(page)).to_contain_text("assistant speaks")
    expect(deleted).to_have_count(0)
    for id in ("nowhere", "%"):
        page.goto(f"{sprout.url}/#/c/{id}")
        page.reload()
        expect(page.get_by_text("This conversation doesn’t exist.")).to_be_visible()
    expect(page.get_by_role("button", name="Restore", exact=True)).to_have_count(0)


def test_a_message_to_a_deleted_conversation_is_kept_and_says_why(
    page: Page, sprout: Served, api: httpx.Client
) -> None:
    id = api.post("/api/conversations", json={"title": "Short-lived"}).json()["id"]
    page.goto(f"{sprout.url}/#/c/{id}")
    expect(page.get_by_role("heading", level=1)).to_have_text("Short-lived")
    api.delete(f"/api/conversations/{id}")
    ask(page, "What is 2 + 2?")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("This conversation was deleted. Restore it to go on with it.")
    expect(page.get_by_label("Message", exact=True)).to_have_value("What is 2 + 2?")
    alert.get_by_role("button", name="Restore").click()
    expect(page.get_by_role("button", name="Restore")).to_have_count(0)
    page.get_by_role("button", name="Send").click()
    ended(page)


def test_what_is_exported_can_be_imported(page: Page, sprout: Served, api: httpx.Client, tmp_path: Path) -> None:
    page.goto(sprout.url)
    ask(page, "Export me")
    ended(page)
    page.get_by_role("button", name="More", exact=True).click()
    page.get_by_role("button", name="Export", exact=True).click()
    with page.expect_download() as download:
        page.get_by_role("link", name="All branches (JSON)").click()
    kept = tmp_path / "kept.json"
    download.value.save_as(kept)
    other = json.loads(kept.read_text().replace("Export me", "Imported as new"))
    kept.write_text(json.dumps(other))
    page.locator("nav input[type=file]").set_input_files([kept])
    expect(page.get_by_role("log")).to_contain_text("Imported 1 conversation")
    expect(page.locator("article.user")).to_contain_text("Imported as new")


def test_system_prompt_settings_and_presets_are_kept(page: Page, sprout: Served, api: httpx.Client) -> None:
    page.goto(sprout.url)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_role("tab", name="Sampling").click()
    temperature = page.get_by_role("textbox", name="Temperature", exact=True)
    temperature.fill("99")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("Temperature must be between 0 and 5")
    temperature.fill("0.3")
    page.get_by_role("tab", name="Presets").click()
    page.get_by_label("Preset name").fill("brief")
    page.get_by_role("button", name="Save as preset").click()
    expect(page.get_by_role("button", name="Delete preset brief")).to_be_visible()
    assert {"name": "brief", "system": "Be brief.", "parameters": {"temperature": 0.3}} in api.get(
        "/api/presets"
    ).json()
    page.get_by_role("button", name="Save", exact=True).click()
    ask(page, "Hi")
    ended(page)
    about = api.get(f"/api/conversations/{conversation(page)}").json()
    assert about["system"] == "Be brief."
    assert about["parameters"]["temperature"] == 0.3
    assert stored(api, about["id"])[-1]["reply"]["settings"]["sampling"]["temperature"] == 0.3
    page.reload()
    ended(page)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("")
    page.get_by_role("tab", name="Presets").click()
    page.get_by_role("button", name="brief", exact=True).click()
    page.get_by_role("tab", name="General").click()
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
    page.get_by_role("tab", name="Presets").click()
    page.get_by_role("button", name="Delete preset brief").click()
    expect(page.get_by_role("button", name="Delete preset brief")).to_have_count(0)
    assert all(one["name"] != "brief" for one in api.get("/api/presets").json())


def test_the_model_is_shown_while_it_loads_and_can_be_changed(page: Page, tmp_path: Path, built: None) -> None:
    with Served(tmp_path / "models", script=[{"thought": "Hm", "answer": "Here."}]) as served:
        page.goto(f"{served.url}/?login={LOGIN}")
        page.get_by_role("button", name="Model: scripted").click()
        page.get_by_role("button", name="Unload").click()
        expect(page.get_by_text("No model is loaded.")).to_be_visible()
        page.get_by_role("button", name="Use by default").first.click()
        expect(page.locator("dialog")).to_contain_text("Context of")
        page.keyboard.press("Escape")
        ask(page, "Are you there?")
        ended(page)
        expect(replies(page)).to_have_count(1)
