"""How long a command takes to answer: `palaver --help`, and an import of Python alone for comparison."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

RUNS = 11


def median_seconds(command: Sequence[str]) -> float:
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    bare = median_seconds([sys.executable, "-c", "pass"])
    help_ = median_seconds([sys.executable, "-m", "palaver", "--help"])
    print(f"python alone     {bare * 1000:6.0f} ms")
    print(f"palaver --help   {help_ * 1000:6.0f} ms   {help_ / bare:.1f} times python alone")


if __name__ == "__main__":
    main()
