"""A very long reply costs no more a token at its end than at its beginning, and never holds the page up."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Browser, CDPSession, expect

from tests.chat.scripted_service import TOKENIZER
from tests.web.conftest import Served
from tests.web.screen import ask, ended, last_reply

TOKENS = 20_000
RATE = 800.0
LONGEST = 0.100
PARTS = 4
PIECE = """## Part {n}

Some words with **bold** ones, `code`, a [link](https://example.org/{n}) and a formula $x_{n}$ between them.

- one thing
- another thing
  - inside of it

```python
def part_{n}(value: int) -> int:
    return value + {n}
```

| name | value |
| - | - |
| part | {n} |

"""


def long_text() -> str:
    pieces: list[str] = []
    count = 0
    while count < TOKENS:
        pieces.append(PIECE.replace("{n}", str(len(pieces))))
        count += len(TOKENIZER.encode([pieces[-1]]))
    return "".join(pieces)


def spent(session: CDPSession) -> float:
    """Seconds of the processor that the page's thread has used for scripts, styles and layout."""
    found = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    return float(sum(found[f"{name}Duration"] for name in ("Script", "Layout", "RecalcStyle")))


def longest_task(trace: Path) -> float:
    """Seconds of the processor, as a busy machine makes any task take long."""
    events = json.loads(trace.read_text())["traceEvents"]
    main = {(one["pid"], one["tid"]) for one in events if one.get("args", {}).get("name") == "CrRendererMain"}
    tasks = (one for one in events if one["name"] == "RunTask" and (one["pid"], one["tid"]) in main)
    return max(one.get("tdur", one.get("dur", 0)) for one in tasks) / 1e6


@pytest.mark.slow
def test_twenty_thousand_tokens(browser: Browser, tmp_path: Path, built: None) -> None:
    text = long_text()
    tokens = len(TOKENIZER.encode([text]))
    with Served(tmp_path / "long", "--rate", str(RATE), script=[{"thought": "Now.", "answer": text}]) as served:
        context = browser.new_context(viewport={"width": 1200, "height": 800})
        page = context.new_page()
        session = context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        page.goto(served.url)
        expect(page.get_by_label("Message", exact=True)).to_be_visible()
        trace = tmp_path / "trace.json"
        ask(page, "Tell me everything")
        expect(last_reply(page).locator("h2").first).to_be_attached()
        costs = [spent(session)]
        for part in range(PARTS):  # the rate is fixed, and nothing on the page is asked meanwhile
            if part == PARTS - 1:  # a trace of everything would take longer to read than all the rest
                browser.start_tracing(page=page, path=trace, categories=["disabled-by-default-devtools.timeline"])
            page.wait_for_timeout(1000 * tokens / RATE / PARTS)
            costs.append(spent(session))
        browser.stop_tracing()
        ended(page)
        each = [1e6 * (later - sooner) / tokens * PARTS for sooner, later in pairwise(costs)]
        longest = longest_task(trace)
        print(f"microseconds a token by quarters: {[round(one) for one in each]}, longest task {longest * 1000:.0f} ms")
        assert last_reply(page).locator("h2").count() == text.count("## Part")
        assert max(each[1:]) < 2 * each[0] + 50
        assert longest < LONGEST
        context.close()
