"""What the page says in passing: where it is seen, and that it covers nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Locator, Page, expect

from tests.web.conftest import Served
from tests.web.served import LOGIN
from tests.web.test_manners import axe_violations


def box(element: Locator) -> tuple[float, float]:
    """Its upper and its lower edge."""
    found = element.bounding_box()
    assert found is not None
    return found["y"], found["y"] + found["height"]


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    """Files that no message takes."""
    made = [tmp_path / "one.png", tmp_path / "two.png"]
    for path in made:
        path.write_bytes(b"\x89PNG\r\n")
    return made


def test_an_error_of_a_dialog_is_seen_in_it(page: Page, quick: Served) -> None:
    page.goto(f"{quick.url}/?login={LOGIN}")
    page.get_by_role("button", name="Model: scripted").click()
    dialog = page.get_by_role("dialog", name="Model")
    dialog.get_by_placeholder("Qwen/Qwen3-0.6B").fill("no/such-model")
    dialog.locator("form").get_by_role("button", name="Use by default").click()
    alert = dialog.get_by_role("alert")
    expect(alert).to_contain_text("no/such-model")
    assert axe_violations(page) == []
    assert alert.evaluate(
        """element => {
          const { x, y, width, height } = element.getBoundingClientRect()
          return element.contains(document.elementFromPoint(x + width / 2, y + height / 2))
        }"""
    )
    alert.get_by_role("button", name="Dismiss").click()
    expect(alert).to_have_count(0)


def test_a_notice_covers_neither_messages_nor_the_banner(
    page: Page, context: BrowserContext, quick: Served, pictures: list[Path]
) -> None:
    page.goto(quick.url)
    expect(page.locator(".model .dot.ready")).to_be_visible()
    page.locator("form input[type=file]").set_input_files(pictures[:1])
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("one.png")
    expect(page.locator(".banner")).to_have_count(0)
    context.set_offline(True)
    banner = page.locator(".banner")
    expect(banner).to_be_visible()
    assert axe_violations(page) == []
    header, messages = box(page.locator("main > header")), box(page.locator(".scroller"))
    told, notice = box(banner), box(alert)
    assert header[1] <= told[0] + 1
    assert told[1] <= notice[0] + 1
    assert notice[1] <= messages[0] + 1


def test_errors_do_not_pile_up(page: Page, quick: Served, pictures: list[Path]) -> None:
    page.goto(quick.url)
    picker = page.locator("form input[type=file]")
    picker.set_input_files(pictures)
    alert = page.get_by_role("alert")
    expect(alert).to_have_count(1)
    expect(alert).to_contain_text("two.png")


def test_the_model_s_dot_follows_the_connection(page: Page, context: BrowserContext, quick: Served) -> None:
    with page.expect_response("**/api/events"):  # a stream that opens after the cut would count as a connection
        page.goto(quick.url)
    expect(page.locator(".model .dot.ready")).to_be_visible()
    context.set_offline(True)
    expect(page.locator(".model .dot.offline")).to_be_visible()
    expect(page.get_by_role("button", name="Model: scripted (offline)")).to_be_visible()
    context.set_offline(False)
    expect(page.locator(".model .dot.ready")).to_be_visible()


def test_a_part_of_the_page_that_can_not_be_loaded_says_so(page: Page, quick: Served) -> None:
    page.route("**/assets/Settings-*.js", lambda route: route.abort())
    page.goto(quick.url)
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_role("alert")).to_contain_text("This part of the page couldn’t be loaded.")
    page.unroute("**/assets/Settings-*.js")
    page.reload()
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_role("dialog", name="Settings for new conversations")).to_be_visible()
