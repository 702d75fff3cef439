"""What the page looks like where that is a promise: actions, menus, settings, the map, the sidebar, touch and zoom."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect
from pypdf import PdfReader

from tests.web.conftest import PATIENCE, Served
from tests.web.screen import act, ask, conversation, ended, hold, keep_picture, last_reply, until
from tests.web.test_manners import axe_violations
from tests.web.test_tools import approval, calls, open_conversation, press_on

TOUCH = 44
COMPRESSED = 150_000


@pytest.fixture
def client(quick: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=quick.url, timeout=PATIENCE) as client:
        yield client


def opacity(element: Locator) -> float:
    return float(element.evaluate("element => getComputedStyle(element).opacity"))


def small_targets(page: Page) -> list[str]:
    """What a finger can press in an open view, and misses: smaller than 44 by 44 pixels. Links within text may be."""
    found: list[str] = page.evaluate(
        """size => [...document.querySelectorAll('button, select, summary, nav a, [role=tab], input:not([hidden])')]
          .filter(e => e.checkVisibility({ visibilityProperty: true }) && !e.closest('p'))
          .map(e => [e, (e.type === 'checkbox' ? e.closest('label') : e).getBoundingClientRect()])
          .filter(([e, box]) => box.height < size - 0.5 || box.width < size - 0.5)
          .map(([e, box]) => `${box.width}x${box.height} ${e.outerHTML.slice(0, 100)}`)""",
        TOUCH,
    )
    return found


def rows_of_buttons(page: Page) -> int:
    """How many rows the buttons of the message field have."""
    found: int = page.locator("form.composer .controls").evaluate(
        """controls => new Set([...controls.querySelectorAll('button, select')].filter(e => e.checkVisibility())
          .map(e => e.getBoundingClientRect()).map(box => Math.round(box.top + box.height / 2))).size"""
    )
    return found


def too_wide(page: Page) -> list[str]:
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll('body *')]
          .filter(e => !e.closest('aside, [role=tablist], pre, .wide'))
          .filter(e => e.checkVisibility({ visibilityProperty: true }))
          .filter(e => { const box = e.getBoundingClientRect(); return box.right > innerWidth + 1 || box.left < -1 })
          .map(e => e.outerHTML.slice(0, 120))"""
    )
    return found


def test_actions_are_under_the_last_reply_and_elsewhere_on_hover(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    for words in ("One", "Two"):
        ask(page, words)
        expect(page.locator("article.user").last).to_contain_text(words)
        ended(page)
    first, last = page.locator("article.assistant").first, last_reply(page)
    page.get_by_label("Message", exact=True).hover()
    assert opacity(last.locator(".tools")) == 1
    assert opacity(first.locator(".tools")) == 0
    first.hover()
    assert opacity(first.locator(".tools")) == 1
    page.get_by_label("Message", exact=True).hover()
    first.get_by_role("button", name="Copy").focus()
    assert opacity(first.locator(".tools")) == 1
    names = [one.get_attribute("aria-label") for one in last.locator(".tools > button").all()]
    assert names == ["Copy", "Edit", "Retry", "More actions"]
    last.get_by_role("button", name="Copy").click()
    expect(last.get_by_text("Copied", exact=True)).to_be_attached()  # on the button: nothing moves for it
    expect(page.get_by_role("log").locator(".notice")).to_have_count(0)


def test_a_menu_has_words_and_is_walked_with_arrows(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    ask(page, "Well?")
    reply = ended(page)
    reply.get_by_role("button", name="More actions").press("Enter")
    menu = page.locator("[popover]:popover-open")
    expect(menu.get_by_role("button", name="Read aloud")).to_be_focused()
    assert axe_violations(page) == []
    page.keyboard.press("ArrowDown")
    expect(menu.get_by_role("button", name=re.compile("^Tokens"))).to_be_focused()
    page.keyboard.press("End")
    expect(menu.get_by_role("button", name=re.compile("^Statistics"))).to_be_focused()
    page.keyboard.press("Enter")
    expect(menu).to_have_count(0)
    expect(reply.get_by_text("tokens/s")).to_be_visible()
    reply.get_by_role("button", name="Show the text").click()
    expect(reply.get_by_text("tokens/s")).to_have_count(0)


def test_the_exports_are_a_menu_in_the_menu_and_delete_is_red(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    ask(page, "Well?")
    ended(page)
    page.get_by_role("button", name="More", exact=True).press("Enter")
    export = page.get_by_role("button", name="Export", exact=True)
    expect(page.locator("[popover]:popover-open").get_by_role("button").first).to_be_focused()
    export.focus()
    delete = page.get_by_role("button", name="Delete conversation")
    assert delete.evaluate("e => getComputedStyle(e).color") != export.evaluate("e => getComputedStyle(e).color")
    assert page.locator("[popover]:popover-open hr").count() >= 2
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("link", name="Markdown", exact=True)).to_be_focused()
    assert axe_violations(page) == []
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("link", name="Markdown", exact=True)).to_have_count(0)
    expect(delete).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("[popover]:popover-open")).to_have_count(0)


def test_edits_of_the_settings_are_not_dropped_unasked(page: Page, quick: Served, client: httpx.Client) -> None:
    page.goto(quick.url)
    ask(page, "Well?")
    ended(page)
    page.get_by_role("button", name="Settings").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("tab", name="General")).to_be_focused()
    page.keyboard.press("ArrowRight")
    save = dialog.get_by_role("button", name="Save", exact=True)
    expect(save).to_be_in_viewport(ratio=1)
    slider = dialog.get_by_role("slider", name="Temperature", exact=True)
    slider.focus()
    page.keyboard.press("End")
    expect(dialog.get_by_role("textbox", name="Temperature", exact=True)).to_have_value("2")
    dialog.get_by_text("More", exact=True).click()
    dialog.get_by_role("textbox", name="Seed").scroll_into_view_if_needed()
    expect(save).to_be_in_viewport(ratio=1)
    for leave in ("Escape", "Escape"):
        page.keyboard.press(leave)
        expect(dialog.get_by_role("button", name="Keep editing")).to_be_focused()
    assert axe_violations(page) == []
    page.keyboard.press("Alt+n")
    expect(dialog).to_be_visible()
    page.keyboard.press("Enter")
    save.click()
    expect(dialog).to_have_count(0)
    about = client.get(f"/api/conversations/{conversation(page)}").json()
    assert about["parameters"]["temperature"] == 2
    page.get_by_role("button", name="Settings").click()
    dialog.get_by_role("tab", name="Sampling").click()
    dialog.get_by_role("button", name="Reset Temperature").click()
    dialog.get_by_role("button", name="Close").click()
    dialog.get_by_role("button", name="Discard").click()
    expect(dialog).to_have_count(0)
    about = client.get(f"/api/conversations/{conversation(page)}").json()
    assert about["parameters"]["temperature"] == 2


@pytest.mark.parametrize("height", [720, 1000])
def test_the_settings_have_one_height(page: Page, quick: Served, height: int) -> None:
    page.set_viewport_size({"width": 1280, "height": height})
    page.goto(quick.url)
    page.get_by_role("button", name="Settings").click()
    dialog = page.get_by_role("dialog")
    heights = set()
    for name in ("General", "Sampling", "Presets", "Browser"):
        dialog.get_by_role("tab", name=name).click()
        expect(dialog.get_by_role("button", name="Save", exact=True)).to_be_in_viewport(ratio=1)
        keep_picture(page, f"settings-{name}-{height}")
        heights.add(dialog.evaluate("element => element.getBoundingClientRect().height"))
    assert len(heights) == 1


def test_a_wrong_number_is_shown_where_it_is(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    page.get_by_role("button", name="Settings").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("tab", name="Sampling").click()
    dialog.get_by_role("textbox", name="Temperature", exact=True).fill("warm")
    dialog.get_by_role("tab", name="General").click()
    dialog.get_by_role("button", name="Save", exact=True).click()
    expect(dialog.get_by_role("textbox", name="Temperature", exact=True)).to_be_focused()
    expect(dialog.get_by_role("alert")).to_contain_text("Temperature must be a number")


def test_the_map_says_what_is_in_each_branch(page: Page, quick: Served, client: httpx.Client) -> None:
    page.goto(quick.url)
    ask(page, "First words of it")
    ended(page)
    last_reply(page).get_by_role("button", name="Retry").click()
    expect(last_reply(page).get_by_label("Version 2 of 2")).to_be_visible()
    ended(page)
    page.keyboard.press("Alt+m")
    dialog = page.get_by_role("dialog", name="Map of the conversation")
    expect(dialog.get_by_role("list", name="Legend").get_by_role("listitem")).to_have_count(4)
    nodes = dialog.get_by_role("group", name="Messages").get_by_role("button")
    expect(nodes).to_have_count(3)
    expect(nodes.nth(0)).to_have_accessible_name("Your message: First words of it")
    expect(nodes.nth(2)).to_have_accessible_name("Reply: Yes.")
    expect(nodes.nth(2)).to_be_focused()
    assert axe_violations(page) == []
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    expect(dialog).to_have_count(0)
    expect(last_reply(page).get_by_label("Version 1 of 2")).to_be_visible()


def test_the_map_of_a_long_conversation_opens_where_one_is(page: Page, quick: Served, client: httpx.Client) -> None:
    said = [{"role": role, "content": f"{role} {n}"} for n in range(60) for role in ("user", "assistant")]
    made = client.post("/api/import", content=json.dumps({"messages": said})).json()[0]["id"]
    page.goto(f"{quick.url}/#/c/{made}")
    expect(last_reply(page)).to_contain_text("assistant 59")
    page.keyboard.press("Alt+m")
    here = page.get_by_role("group", name="Messages").get_by_role("button").last
    expect(here).to_be_focused()
    expect(here).to_be_in_viewport()


def test_keys_do_nothing_behind_a_dialog(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    ask(page, "Once")
    ended(page)
    page.keyboard.press("Alt+m")
    expect(page.get_by_role("dialog", name="Map of the conversation")).to_be_visible()
    for key in ("Alt+r", "Alt+f", "Alt+n"):
        page.keyboard.press(key)
    page.keyboard.press("Alt+p")
    settings = page.get_by_role("dialog", name="Conversation settings")
    expect(settings).to_be_visible()
    page.keyboard.press("Escape")
    expect(settings).to_have_count(0)
    expect(page.get_by_role("search", name="Find in conversation")).to_have_count(0)
    expect(last_reply(page)).to_contain_text("Yes.")
    expect(page.get_by_label("Version 2 of 2")).to_have_count(0)


def test_the_sidebar_renames_pins_and_selects(page: Page, quick: Served, client: httpx.Client) -> None:
    made = [client.post("/api/conversations", json={"title": f"Sidebar {n}"}).json()["id"] for n in range(4)]
    page.goto(quick.url)
    nav = page.get_by_role("navigation", name="Conversations")
    today = nav.get_by_role("list", name="Today")
    expect(today.get_by_role("link", name="Sidebar 3")).to_be_visible()

    def do(title: str, action: str) -> None:
        nav.get_by_role("button", name=f"Actions for {title}").focus()
        page.keyboard.press("Enter")
        expect(nav.get_by_role("button", name="Rename", exact=True)).to_be_focused()  # a menu takes the focus late
        nav.get_by_role("button", name=action, exact=True).press("Enter")

    do("Sidebar 3", "Rename")
    field = nav.get_by_label("New title for Sidebar 3")
    expect(field).to_be_focused()
    field.fill("Sidebar three")
    field.press("Enter")
    expect(today.get_by_role("link", name="Sidebar three")).to_be_visible()
    do("Sidebar three", "Rename")
    nav.get_by_label("New title for Sidebar three").fill("something else")
    page.keyboard.press("Escape")
    expect(today.get_by_role("link", name="Sidebar three")).to_be_visible()

    do("Sidebar 0", "Pin")
    expect(nav.get_by_role("list", name="Pinned").get_by_role("link")).to_have_text(["Sidebar 0"])
    assert client.get(f"/api/conversations/{made[0]}").json()["pinned"] is True
    assert axe_violations(page) == []

    do("Sidebar three", "Select")
    nav.get_by_role("checkbox", name="Sidebar 1").click(modifiers=["Shift"])  # and the one between them
    expect(nav.get_by_role("status")).to_have_text("3 selected")
    expect(nav.get_by_role("checkbox", name="Sidebar 2")).to_be_checked()
    nav.get_by_role("checkbox", name="Sidebar three").uncheck()
    expect(nav.get_by_role("status")).to_have_text("2 selected")
    assert axe_violations(page) == []
    nav.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_role("log")).to_contain_text("Deleted 2 conversations.")
    expect(nav.get_by_role("link", name=re.compile("^Sidebar [12]$"))).to_have_count(0)
    page.get_by_role("log").get_by_role("button", name="Restore").click()
    expect(nav.get_by_role("link", name=re.compile("^Sidebar [12]$"))).to_have_count(2)
    expect(page.get_by_role("log")).not_to_contain_text("Deleted")
    do("Sidebar 0", "Unpin")
    expect(nav.get_by_role("list", name="Pinned")).to_have_count(0)


def test_enter_opens_what_the_search_finds_first(page: Page, quick: Served, client: httpx.Client) -> None:
    said = [{"role": "user", "content": "Where do quokkas live?"}]
    imported = client.post("/api/import", content=json.dumps({"messages": said})).json()[0]["id"]
    titled = client.post("/api/conversations", json={"title": "Wombats of Tasmania"}).json()["id"]
    page.goto(quick.url)
    search = page.get_by_label("Search conversations")
    search.fill("wombats")
    search.press("Enter")
    page.wait_for_url(f"**/c/{titled}")
    client.patch(f"/api/conversations/{imported}", json={"title": "Animals"})
    search.fill("quokkas")
    search.press("Enter")
    page.wait_for_url(f"**/c/{imported}")
    expect(page.locator("article.user")).to_contain_text("Where do quokkas live?")
    search.fill("neither this nor that")
    search.press("Enter")
    expect(page.get_by_text("Nothing found")).to_be_visible()
    assert page.url.endswith(imported)


def test_enter_opens_nothing_else_while_the_list_is_loaded_again(
    page: Page, quick: Served, client: httpx.Client
) -> None:
    titled = client.post("/api/conversations", json={"title": "Numbats of Dryandra"}).json()["id"]
    client.post("/api/conversations", json={"title": "The newest of all"})
    page.goto(quick.url)
    expect(page.get_by_role("link", name="The newest of all")).to_be_visible()
    lists = "**/api/conversations?*title=*"
    search = page.get_by_label("Search conversations")
    page.route(lists, lambda route: route.abort())
    with page.expect_event("requestfailed"):
        search.fill("numbats")
        search.press("Enter")
    page.wait_for_timeout(500)
    assert "/c/" not in page.url
    held: list[Route] = []
    page.route(lists, lambda route: held.append(route))
    search.press("Enter")
    until(page, lambda: len(held) == 2)  # pinned ones and others
    client.post("/api/conversations", json={"title": "Newer still"})
    until(page, lambda: len(held) == 4)
    for route in held[:2]:
        route.continue_()
    page.wait_for_timeout(500)
    assert "/c/" not in page.url
    for route in held[2:]:
        route.continue_()
    page.wait_for_url(f"**/c/{titled}")


def test_show_more_counts_once(page: Page, tmp_path: Path, built: None) -> None:
    with Served(tmp_path / "many", script=[{"thought": "Hm", "answer": "Yes."}]) as served:
        with httpx.Client(base_url=served.url, timeout=PATIENCE) as api:
            for number in range(60):
                api.post("/api/conversations", json={"title": f"Number {number}"}).raise_for_status()
        page.goto(served.url)
        more = page.get_by_role("button", name="Show more")
        page.route("**/api/conversations?*before=*", lambda route: route.abort())
        with page.expect_event("requestfailed"):
            more.click()
        page.unroute("**/api/conversations?*before=*")
        go_on = hold(page, "**/api/conversations?*before=*", "GET")
        more.dblclick()
        go_on()
        titles = page.locator("nav .list .title")
        expect(titles).to_have_count(60)
        expect(more).to_have_count(0)
        page.wait_for_timeout(500)
        expect(titles).to_have_count(60)


def test_a_long_title_has_the_width_of_the_sidebar(page: Page, quick: Served, client: httpx.Client) -> None:
    client.post("/api/conversations", json={"title": "A title that is far too long " * 5})
    page.goto(quick.url)
    entry = page.get_by_role("listitem").filter(has_text="A title that is far too long").first
    title, whole = entry.locator(".title").bounding_box(), entry.bounding_box()
    assert title is not None
    assert whole is not None
    assert title["width"] > 0.9 * whole["width"]


def test_all_of_a_conversation_is_printed(browser: Browser, quick: Served, client: httpx.Client) -> None:
    roles = ("user", "assistant")
    said = [{"role": role, "content": f"{role} {n} " + "and more. " * 60} for n in range(12) for role in roles]
    made = client.post("/api/import", content=json.dumps({"messages": said})).json()[0]["id"]
    context = browser.new_context(viewport={"width": 1200, "height": 800}, color_scheme="dark", service_workers="block")
    context.set_default_timeout(PATIENCE * 1000)
    page = context.new_page()
    page.goto(f"{quick.url}/#/c/{made}")
    expect(last_reply(page)).to_contain_text("assistant 11")
    pages = PdfReader(BytesIO(page.pdf(format="A4"))).pages
    words = "\n".join(one.extract_text() for one in pages)
    assert [line for n in range(12) for line in (f"user {n} and", f"assistant {n} and") if line not in words] == []
    assert all(one.extract_text().strip() for one in pages), "empty pages"
    assert "New conversation" not in words
    assert "Message scripted" not in words
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(34, 38, 42)"
    context.close()


def test_the_ring_says_how_full_the_context_is(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    ask(page, "Well?")
    ended(page)
    ring = page.get_by_role("button", name=re.compile(r"^Context: (< )?\d+(\.\d)?% used$"))
    page.get_by_label("Message", exact=True).focus()
    press_on(page, ring, key="Tab")
    numbers = page.locator("[popover]:popover-open")
    expect(numbers).to_contain_text(re.compile(r"[\d,]+ of 200,000 tokens"))
    expect(numbers).to_contain_text(re.compile(r"[\d,]+ tokens left"))
    assert axe_violations(page) == []
    page.keyboard.press("Escape")
    expect(numbers).to_have_count(0)


def test_scrollbars_are_thin(page: Page, quick: Served) -> None:
    page.goto(quick.url)
    page.get_by_role("button", name="Settings").click()
    for element in (page.locator(".scroller"), page.get_by_role("dialog")):
        assert element.evaluate("e => getComputedStyle(e).scrollbarWidth") == "thin"


def test_conversations_are_grouped_by_their_date(page: Page, quick: Served, client: httpx.Client) -> None:
    client.post("/api/conversations", json={"title": "Of another day"})
    page.clock.install()
    page.clock.fast_forward("24:00:00")
    page.goto(quick.url)
    nav = page.get_by_role("navigation", name="Conversations")
    expect(nav.get_by_role("list", name="Yesterday").get_by_role("link", name="Of another day")).to_be_visible()


CODE = "Like this:\n\n```html\n<b>bold</b>\n```\n\n```python\nprint(1)\n```"


@pytest.fixture
def phone(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(
        viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True, service_workers="block"
    )
    context.set_default_timeout(PATIENCE * 1000)
    yield context.new_page()
    context.close()


def test_everything_can_be_pressed_with_a_finger(phone: Page, tmp_path: Path, built: None) -> None:
    with Served(tmp_path, script=[{"thought": "So.", "answer": CODE}]) as served:
        phone.goto(served.url)
        ask(phone, "Well?")
        phone.get_by_role("button", name="Send").tap()
        ended(phone)
        expect(last_reply(phone).locator("figure.code button")).to_have_count(3)  # two copies, a preview
        assert small_targets(phone) == []
        assert too_wide(phone) == []
        last_reply(phone).get_by_role("button", name="More actions").tap()
        expect(phone.locator("[popover]:popover-open")).to_be_visible()
        assert small_targets(phone) == []
        phone.keyboard.press("Escape")
        dialog = phone.get_by_role("dialog")
        for menu, name in (("More", "Map"), ("Attach and more", "Compare replies")):
            phone.get_by_role("button", name=menu, exact=True).tap()
            assert small_targets(phone) == []
            phone.get_by_role("button", name=name).last.tap()
            expect(dialog).to_be_visible()
            assert small_targets(phone) == []
            assert too_wide(phone) == []
            dialog.get_by_role("button", name="Close").tap()
            expect(dialog).to_have_count(0)
        phone.get_by_role("button", name="Settings").tap()
        for name in ("Sampling", "Presets", "Browser"):
            phone.get_by_role("tab", name=name).tap()
            assert small_targets(phone) == []
            assert too_wide(phone) == []
        phone.get_by_role("button", name="Close").tap()
        phone.get_by_role("button", name="Conversations", exact=True).tap()
        expect(phone.get_by_label("Search conversations")).to_be_in_viewport()
        assert small_targets(phone) == []


def test_the_buttons_of_a_running_reply_have_one_row_on_a_phone(phone: Page, endless: Served) -> None:
    phone.goto(endless.url)
    ask(phone, "Well?")
    phone.get_by_role("button", name="Send").tap()
    phone.get_by_label("Message", exact=True).fill("And then?")
    for name in ("Answer now", "Queue", "Stop"):
        expect(phone.get_by_role("button", name=name, exact=True)).to_be_visible()
    assert rows_of_buttons(phone) == 1
    assert too_wide(phone) == []
    assert small_targets(phone) == []
    keep_picture(phone, "phone-running")
    phone.get_by_role("button", name="Stop", exact=True).tap()
    expect(last_reply(phone)).to_have_attribute("data-status", "stopped")


def test_the_list_of_a_phone_closes_when_the_address_changes(phone: Page, quick: Served, client: httpx.Client) -> None:
    id = client.post("/api/conversations", json={"title": "Linked"}).json()["id"]
    phone.goto(quick.url)
    menu = phone.get_by_role("button", name="Conversations", exact=True)
    menu.tap()
    expect(menu).to_have_attribute("aria-expanded", "true")
    phone.evaluate("id => { location.hash = `#/c/${id}` }", id)
    expect(phone.get_by_role("heading", level=1)).to_have_text("Linked")
    phone.get_by_role("button", name="Settings").tap()
    phone.get_by_role("dialog").get_by_role("button", name="Close").tap()
    menu.tap()
    expect(menu).to_have_attribute("aria-expanded", "true")
    phone.go_back()
    expect(menu).to_have_attribute("aria-expanded", "false")


def test_an_approval_can_be_pressed_with_a_finger(phone: Page, tmp_path: Path, built: None) -> None:
    with Served(tmp_path, "--calling") as served:
        open_conversation(phone, served, {"tool_servers": ["bad"]})
        ask(phone, calls(["bad__unchanged"]))
        phone.get_by_role("button", name="Send").tap()
        expect(approval(phone)).to_be_visible()
        assert small_targets(phone) == []
        assert too_wide(phone) == []


@pytest.mark.parametrize("direction", ["ltr", "rtl"])
def test_nothing_is_cut_off_at_twice_the_size(browser: Browser, quick: Served, direction: str) -> None:
    """A window of 1200 by 780 pixels at 200%, in both directions of writing."""
    context = browser.new_context(
        viewport={"width": 600, "height": 390}, device_scale_factor=2, reduced_motion="reduce", service_workers="block"
    )
    context.set_default_timeout(PATIENCE * 1000)
    page = context.new_page()
    page.goto(quick.url)
    page.evaluate("direction => (document.documentElement.dir = direction)", direction)
    expect(page.get_by_role("group", name="Examples")).to_be_visible()
    assert too_wide(page) == []
    ask(page, "Well?")
    reply = ended(page)
    act(reply, "Statistics")
    assert too_wide(page) == []
    assert axe_violations(page) == []
    for name in ("Map", "Settings", "Model: scripted", "Compare replies"):
        page.get_by_role("button", name=name).first.click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_be_visible()
        assert too_wide(page) == []
        assert axe_violations(page) == []
        if name == "Settings":
            expect(dialog.get_by_role("button", name="Save", exact=True)).to_be_in_viewport(ratio=1)
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
    context.close()


def test_the_first_load_is_at_most_150_kb_compressed(browser: Browser, quick: Served) -> None:
    context = browser.new_context(service_workers="block")
    page = context.new_page()
    page.goto(quick.url)
    expect(page.get_by_role("group", name="Examples")).to_be_visible()
    size = page.evaluate(
        """() => [...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]
          .filter(entry => !entry.name.includes('/api/conversations'))
          .reduce((sum, entry) => sum + entry.encodedBodySize, 0)"""
    )
    assert 0 < size <= COMPRESSED
    context.close()


NO_CLIPBOARD = "navigator.clipboard.writeText = () => Promise.reject(new Error()); document.execCommand = () => false"


def test_notices_are_told_once_together_and_in_the_dialog(page: Page, quick: Served) -> None:
    page.add_init_script(NO_CLIPBOARD)
    page.goto(quick.url)
    ask(page, "Well?")
    reply = ended(page)
    for _ in range(3):
        reply.get_by_role("button", name="Copy").click()
    log = page.get_by_role("log")
    expect(log.locator(".notice")).to_have_count(1)
    expect(log).to_contain_text("×3")
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_role("dialog").get_by_role("log")).to_contain_text("×3")
    expect(page.get_by_role("log")).to_have_count(1)
