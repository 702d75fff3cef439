"""kill -9 of the program in the middle of loops of tool calls: no call runs twice unasked, no result is lost. And stops
in the middle of slow tools: how soon everything is free.

python -m benchmarks.tool_kills --kills 200
python -m benchmarks.tool_kills --kills 0 --stops 50

Exits with 1 if a call ran twice, was lost or did not come to its end, or if a stop took longer than 100 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.chat.tool_kills import Count, run
from tests.chat.tool_stops import measure_stops

EVERY = 20
"""Kills between two reports."""


STOP_SECONDS = 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--stops", type=int, default=0, help="stops of a slow tool, over stdio and over HTTP each")
    options = parser.parse_args()
    results = [_kill(options.kills, options.seconds)] if options.kills else []
    results += [_stop(options.stops, over_http) for over_http in (False, True) if options.stops]
    return 0 if all(results) else 1


def _stop(stops: int, over_http: bool) -> bool:
    """Whether each stop freed everything in time."""
    with tempfile.TemporaryDirectory() as folder:
        measured = asyncio.run(measure_stops(Path(folder), stops, over_http))
    print(f"{stops} stops of a slow tool over {'HTTP' if over_http else 'stdio'}, median and longest in ms")
    longest = 0.0
    for name, times in {
        "the round is stopped": [one.answered for one in measured],
        "the task is gone": [one.free for one in measured],
        "the tool is told": [one.cancelled for one in measured],
    }.items():
        longest = max(longest, *times)
        print(f"  {name:<22} {1000 * median(times):6.1f} {1000 * max(times):6.1f}")
    return longest <= STOP_SECONDS


def _kill(kills: int, seconds: float) -> bool:
    """Whether nothing was lost and nothing ran twice."""
    started = time.monotonic()

    def report(count: Count) -> None:
        if count.kills % EVERY == 0:
            print(f"{count.kills} kills after {time.monotonic() - started:.0f} s: {count}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        count = run(Path(folder), kills, seconds, after_each=report)
    print(f"{count.kills} kills in {time.monotonic() - started:.0f} s")
    print(f"  loops                         {count.loops}")
    print(f"  calls                         {count.calls}")
    print(f"  interrupted calls, asked about {count.interrupted}, run again {count.run_again}")
    print(f"  run twice unasked, lost or not at their end: {len(count.wrong)}")
    for line in count.wrong[:20]:
        print(f"    {line}")
    return not count.wrong


if __name__ == "__main__":
    sys.exit(main())
