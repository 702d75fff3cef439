"""kill -9 of the program in the middle of loops of tool calls: no call runs twice unasked, no result is lost.

python -m benchmarks.tool_kills --kills 200
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tests.chat.tool_kills import Count, run

EVERY = 20
"""Kills between two reports."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    started = time.monotonic()

    def report(count: Count) -> None:
        if count.kills % EVERY == 0:
            print(f"{count.kills} kills after {time.monotonic() - started:.0f} s: {count}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        count = run(Path(folder), options.kills, options.seconds, after_each=report)
    print(f"{count.kills} kills in {time.monotonic() - started:.0f} s")
    print(f"  loops                         {count.loops}")
    print(f"  calls                         {count.calls}")
    print(f"  interrupted calls, asked about {count.interrupted}, run again {count.run_again}")
    print(f"  run twice unasked, lost or not at their end: {len(count.wrong)}")
    for line in count.wrong[:20]:
        print(f"    {line}")


if __name__ == "__main__":
    main()
