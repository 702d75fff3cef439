"""A very long reply in a real Chromium: costs no more a token at its end than at its beginning, never blocks the page.

    python3 -m benchmarks.long_reply

Prints the processor time a token by quarters of the reply and the longest task; exits with 1 where one is too long.
"""

from __future__ import annotations

import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from playwright.sync_api import Browser, CDPSession, expect, sync_playwright

from tests.chat.scripted_service import TOKENIZER
from tests.web.conftest import ROOT, Served, launched
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


def measure(browser: Browser, folder: Path) -> bool:
    """Prints the figures. Returns whether they are good."""
    text = long_text()
    tokens = len(TOKENIZER.encode([text]))
    with Served(folder / "long", "--rate", str(RATE), script=[{"thought": "Now.", "answer": text}]) as served:
        context = browser.new_context(viewport={"width": 1200, "height": 800})
        page = context.new_page()
        session = context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        page.goto(served.url)
        expect(page.get_by_label("Message", exact=True)).to_be_visible()
        trace = folder / "trace.json"
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
        complete = last_reply(page).locator("h2").count() == text.count("## Part")
        context.close()
    print(f"{tokens:,} tokens, {'complete' if complete else 'NOT complete'}")
    print(f"microseconds a token by quarters: {[round(one) for one in each]}, longest task {longest * 1000:.0f} ms")
    return complete and max(each[1:]) < 2 * each[0] + 50 and longest < LONGEST


def main() -> int:
    assert (ROOT / "src" / "palaver" / "server" / "page" / "dist" / "index.html").is_file(), "build it: make page"
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = launched(playwright)
        good = measure(browser, Path(folder))
        browser.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
