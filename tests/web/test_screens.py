"""Pictures of the main screens. `PALAVER_SCREENS=docs/screens` keeps them; else they are only made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.web.conftest import PATIENCE, ROOT, Served
from tests.web.forked import HOLD
from tests.web.screen import act, ask, ended, last_reply

LARGEST = 150_000
THOUGHT = """The question is how to draw a circle of points. I could place them one by one, but an angle that grows
by the same step each time is simpler.

The step is a full turn divided by the number of points, so for n points it is 2π / n. Then x is the cosine and y
the sine.

Let me check with four points: the angles are 0, a quarter, a half and three quarters of a turn. That gives a square
on its corner, which is right.

I should also say what happens for n = 0."""
HELD_AT = "Let me check with four points"
ANSWER = """A circle of *n* points is one angle, said *n* times:

$$x_k = r\\cos\\frac{2\\pi k}{n}, \\qquad y_k = r\\sin\\frac{2\\pi k}{n}$$

```python
from math import cos, pi, sin

def circle(n: int, radius: float = 1.0) -> list[tuple[float, float]]:
    # no points make no circle
    return [(radius * cos(2 * pi * k / n), radius * sin(2 * pi * k / n)) for k in range(n)]
```

| points | shape |
| --- | --- |
| 3 | triangle |
| 4 | square |
| 100 | circle, nearly |
"""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wanted = os.environ.get("PALAVER_SCREENS")
    folder = ROOT / wanted if wanted else tmp_path_factory.mktemp("screens")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def drawing(tmp_path_factory: pytest.TempPathFactory, built: None) -> Iterator[Served]:
    """A server that can hold a reply in the middle of its thought."""
    script = [{"thought": THOUGHT.replace(HELD_AT, HELD_AT + HOLD), "answer": ANSWER}]
    with Served(tmp_path_factory.mktemp("drawing"), script=script) as served:
        yield served


def seen(page: Page, name: str, pictures: Path) -> None:
    target = pictures / f"{name}.png"
    page.screenshot(path=target, animations="disabled")
    assert 0 < target.stat().st_size <= LARGEST


def opened(browser: Browser, url: str, *, scheme: str = "light", width: int = 1200, height: int = 780) -> Page:
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,  # type: ignore[arg-type]
        reduced_motion="reduce",
    )
    context.set_default_timeout(PATIENCE * 1000)
    page = context.new_page()
    page.goto(url)
    return page


def test_the_first_screen(browser: Browser, sprout: Served, pictures: Path) -> None:
    light = opened(browser, sprout.url)
    dark = opened(browser, sprout.url, scheme="dark")
    phone = opened(browser, sprout.url, width=360, height=740)
    for page, name in ((light, "first-light"), (dark, "first-dark"), (phone, "first-phone")):
        expect(page.get_by_role("group", name="Examples").get_by_role("button")).to_have_count(4)
        expect(page.get_by_text("sprout is a tiny demo model")).to_be_in_viewport()
        expect(page.get_by_role("button", name="Use a real model")).to_be_in_viewport()
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
        seen(page, name, pictures)
    phone.get_by_role("textbox", name="Message").fill("5f" * 32)
    assert not phone.evaluate("document.documentElement.scrollWidth > innerWidth"), "a long word widens the page"
    for page in (light, dark, phone):
        page.context.close()


def test_thinking_and_the_answer(browser: Browser, drawing: Served, pictures: Path) -> None:
    page = opened(browser, drawing.url)
    drawing.hold()
    ask(page, "How do I draw a circle of points?")
    expect(page.locator(".thinking.live")).to_contain_text(HELD_AT)
    seen(page, "thinking", pictures)
    drawing.go_on()
    ended(page)
    expect(page.locator(".katex").first).to_be_visible()
    expect(page.locator(".hljs-keyword").first).to_be_visible()
    expect(page.get_by_text("circle, nearly")).to_be_visible()
    seen(page, "light", pictures)
    dark = opened(browser, page.url, scheme="dark")
    ended(dark)
    expect(dark.locator(".katex").first).to_be_visible()
    expect(dark.locator(".hljs-keyword").first).to_be_visible()
    seen(dark, "dark", pictures)
    phone = opened(browser, page.url, width=360, height=740)
    ended(phone)
    expect(phone.locator(".katex").first).to_be_visible()
    seen(phone, "phone", pictures)
    for one in (page, dark, phone):
        one.context.close()


def test_tokens_and_the_tree(browser: Browser, sprout: Served, pictures: Path) -> None:
    with httpx.Client(base_url=sprout.url, timeout=PATIENCE) as api:
        made = api.post(
            "/api/conversations", json={"title": "A list of animals", "parameters": {"temperature": 1.4}}
        ).json()["id"]
        parent = None
        for words in ("Write a list of animals.", "Hello!"):
            message = {"role": "user", "parts": [{"type": "text", "text": words}]}
            said = api.post(f"/api/conversations/{made}/say", json={"parent": parent, "message": message}).json()
            parent = said["reply"]["id"]
            api.get(f"/api/turns/{parent}/events")
            for _ in range(2):
                other = api.post(f"/api/conversations/{made}/replies", json={"parent": said["message"]["id"]}).json()
                api.get(f"/api/turns/{other['id']}/events")
    page = opened(browser, f"{sprout.url}/#/c/{made}?at={parent}")
    reply = last_reply(page)
    act(reply, "Tokens")
    expect(reply.locator(".text .token").first).to_be_visible()
    open = reply.locator(".text .token:not(.s0)")
    (open.first if open.count() else reply.locator(".text .token").first).click()
    expect(reply.locator(".detail li").first).to_be_visible()
    seen(page, "tokens", pictures)
    page.get_by_role("button", name="Map").click()
    expect(page.locator("dialog .map button")).to_have_count(8)
    seen(page, "tree", pictures)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("System prompt")).to_be_visible()
    seen(page, "settings", pictures)
    page.context.close()
