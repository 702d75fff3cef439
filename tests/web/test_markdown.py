"""Markdown as it is seen: tables, lists and quotes, from left to right and from right to left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.web.conftest import PATIENCE, Served
from tests.web.screen import ask, ended

TABLE = (
    "| name | price | longer header | another one |\n| --- | ---: | :---: | --- |\n| pear | 3 | a few words | more |\n"
)
ARABIC = "`print(x)` تطبع قيمة\n\n- `len` تعيد الطول\n\n| `a` | القيمة `b` |\n| --- | --- |\n| 1 | 2 |\n"
HEBREW = "> ציטוט\n\n- אחד\n- two\n\n| שם | ערך |\n| --- | --- |\n| א | 1 |\n\n```js\nlet x = 1\n```\n"


@pytest.fixture
def phone(browser: Browser) -> Iterator[Page]:
    """The smallest that must do. Nothing on it is refused by the policy."""
    context = browser.new_context(viewport={"width": 360, "height": 700}, service_workers="block")
    context.set_default_timeout(PATIENCE * 1000)
    page = context.new_page()
    refused: list[str] = []
    page.on("console", lambda told: refused.append(told.text) if "Security Policy" in told.text else None)
    yield page
    context.close()
    assert refused == []


def side(element: Locator, name: str) -> float:
    found: float = element.evaluate(f"element => element.getBoundingClientRect().{name}")
    return found


@contextmanager
def said(page: Page, folder: Path, answer: str) -> Iterator[Locator]:
    """The reply of a model that says just this."""
    with Served(folder, script=[{"thought": "t", "answer": answer}]) as served:
        page.goto(served.url)
        ask(page, "Well?")
        yield ended(page)


def test_columns_have_their_sides_and_words_stay_whole(phone: Page, tmp_path: Path) -> None:
    with said(phone, tmp_path, TABLE) as reply:
        _check_columns(phone, reply)


def _check_columns(phone: Page, reply: Locator) -> None:
    cells = reply.locator("tbody td")
    for index, where in enumerate(("start", "right", "center", "start")):
        expect(cells.nth(index)).to_have_css("text-align", where)
    heads = reply.locator("th")
    line = float(heads.first.evaluate("head => parseFloat(getComputedStyle(head).lineHeight)"))
    assert side(heads.first, "height") < 2 * line + 15
    assert side(reply.locator(".wide"), "right") <= 360
    assert not phone.evaluate("document.documentElement.scrollWidth > innerWidth")


def test_lists_quotes_and_tables_begin_where_their_lines_do(phone: Page, tmp_path: Path) -> None:
    with said(phone, tmp_path, HEBREW) as reply:
        _check_sides(reply)


def _check_sides(reply: Locator) -> None:
    for name in ("ul", "blockquote", "table"):
        expect(reply.locator(name)).to_have_css("direction", "rtl")
    listed, item = reply.locator("ul"), reply.locator("li").first
    assert side(listed, "right") - side(item, "right") > 10, "there is room for its mark"
    expect(reply.locator("figure.code")).to_have_css("direction", "ltr")
    expect(reply.locator(".wide")).to_have_css("direction", "rtl")
    assert side(reply.locator("th").first, "left") > side(reply.locator("th").last, "left")


def test_an_environment_is_a_formula(phone: Page, tmp_path: Path) -> None:
    lines = "\\begin{align*}\nx &= 1 \\\\\ny &= 2\n\\end{align*}\n"
    solved = f"So:\n{lines}\n{lines}\n\\begin{{gather}} z \\end{{gather}}\n\n"
    with said(phone, tmp_path, f"{solved}Not one: `\\begin{{align}}` and \\begin{{nothing}}.") as reply:
        expect(reply.locator("div.math .katex-display")).to_have_count(3)
        expect(reply.locator(".katex-error")).to_have_count(0)
        expect(reply.locator(".eqn-num")).to_have_count(1)
        expect(reply.locator(".eqn-num")).to_be_hidden()  # each would be number 1
        expect(reply).to_contain_text("Not one: \\begin{align} and \\begin{nothing}.")


def test_task_lists_have_boxes(phone: Page, tmp_path: Path) -> None:
    tasks = "- [ ] buy *pears*\n- [x] wash them\n- [y] not a task\n- `[ ]` code\n\n1. [X] Loose\n\n2. items\n"
    with said(phone, tmp_path, tasks) as reply:
        boxes = reply.get_by_role("img")
        expect(boxes).to_have_count(3)
        for index, name in enumerate(("not done", "done", "done")):
            expect(boxes.nth(index)).to_have_accessible_name(name)
        items = reply.get_by_role("listitem")
        expect(items.nth(0)).to_have_text("buy pears")
        expect(items.nth(0)).to_have_css("list-style-type", "none")
        expect(items.nth(2)).to_have_text("[y] not a task")
        expect(items.nth(3)).to_have_text("[ ] code")
        expect(items.nth(4)).to_have_text("Loose")
        expect(items.nth(5)).to_have_text("items")


def test_code_at_its_beginning_does_not_turn_a_line_round(phone: Page, tmp_path: Path) -> None:
    with said(phone, tmp_path, ARABIC) as reply:
        for name in ("p", "ul", "table", "th:nth-child(2)"):
            expect(reply.locator(f".parts > .markdown {name}").first).to_have_css("direction", "rtl")
        code, words = reply.locator(".parts > .markdown p code"), reply.locator(".parts > .markdown p")
        expect(code).to_have_css("direction", "ltr")
        assert side(words, "right") - side(code, "right") < 10, "the line begins with it, on the right"
