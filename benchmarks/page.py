"""How soon the page can be used: cold loads of a real Chromium from a server on this machine.

    python3 -m benchmarks.page [LOADS]

A browser that knows nothing of the page each time. Usable is when one can write and the page knows its model.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from tests.web.conftest import ROOT, Served, launched

LOADS = 15
WATCH = """
new MutationObserver((_, watch) => {
  if (!document.querySelector('#composer') || !document.querySelector('[aria-label^="Model: "]')) return
  watch.disconnect()
  requestAnimationFrame(() => { window.usable = performance.now() })
}).observe(document, { childList: true, subtree: true, attributes: true })
"""
BYTES = """() => [...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]
  .reduce((sum, entry) => sum + entry.encodedBodySize, 0)"""
PAINTED = "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"


def load(browser: Browser, url: str) -> tuple[float, float, int]:
    """Milliseconds to the first paint and until it is usable, and the bytes that came."""
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    context.add_init_script(WATCH)
    page = context.new_page()
    page.goto(url)
    usable = page.wait_for_function("() => window.usable").json_value()
    painted, size = page.evaluate(PAINTED), page.evaluate(BYTES)
    context.close()
    return painted, usable, size


def main() -> None:
    loads = int(sys.argv[1]) if sys.argv[1:] else LOADS
    assert (ROOT / "src" / "palaver" / "server" / "page" / "dist" / "index.html").is_file(), "build it: make page"
    with (
        tempfile.TemporaryDirectory() as folder,
        Served(Path(folder) / "page") as served,
        sync_playwright() as playwright,
    ):
        browser = launched(playwright)
        load(browser, served.url)  # the browser itself is slow the first time
        took = [load(browser, served.url) for _ in range(loads)]
        browser.close()
    for name, times in (("painted", [one[0] for one in took]), ("usable", [one[1] for one in took])):
        print(f"{name:8} median {statistics.median(times):5.0f} ms, slowest of {loads}: {max(times):5.0f} ms")
    print(f"first load: {max(one[2] for one in took):,} bytes compressed")


if __name__ == "__main__":
    main()
