"""How long `palaver ask` takes to its first token, against `python -c 'import torch'` in the same run.

Both are started in turn, several times; the medians and their ratio are printed. Processor time is printed too: it
changes less where other programs run. Palaver's bytecode is written first, as pip does for what it installs: an
environment with PYTHONDONTWRITEBYTECODE would otherwise compile every changed module at every start."""

from __future__ import annotations

import argparse
import compileall
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import palaver
from palaver.models.resolver import resolve_folder
from tests.gguf_files import convert_qwen3

RUNS = 7
QUESTION = "What is the capital of France?"
ASK = (sys.executable, "-m", "palaver", "ask", QUESTION, "--device", "cpu")
COMMANDS = {
    "import torch": (sys.executable, "-c", "import torch; print()"),
    "ask, compiled": (*ASK, "--compile"),
    "ask, torch": (*ASK, "--no-compile"),
}
GGUF, LLAMACPP = "ask, gguf", "ask, llama.cpp"
BARS = {"ask, compiled": 0.5, GGUF: 0.5, LLAMACPP: 0.5, "ask, torch": 1.5}
"""The most times of `import torch` that a command may take."""


@dataclass(frozen=True)
class Start:
    seconds: float
    """To the first byte that is written."""
    processor_seconds: float
    """To the end of the process."""


def measure(command: Sequence[str]) -> Start:
    """The first byte may be of a thought, which goes to stderr."""
    read, write = os.pipe()
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=write, stderr=write, stdin=subprocess.DEVNULL)
    os.close(write)
    first = os.read(read, 1)
    seconds = time.perf_counter() - began
    with os.fdopen(read, "rb") as rest:
        rest.read()
    _, status, usage = os.wait4(process.pid, 0)
    assert first
    assert status == 0, f"{command} failed"
    return Start(seconds, usage.ru_utime + usage.ru_stime)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    runs = parser.parse_args().runs
    compileall.compile_dir(Path(palaver.__file__).parent, quiet=1)
    with tempfile.TemporaryDirectory() as folder:
        file = convert_qwen3(resolve_folder("sprout"), Path(folder) / "sprout.gguf", "f16")
        ask = (*ASK, "--model", str(file))
        compare({**COMMANDS, GGUF: ask, LLAMACPP: (*ask, "--engine", "llamacpp")}, runs)


def compare(commands: Mapping[str, Sequence[str]], runs: int) -> None:
    for command in commands.values():  # builds the compiled code, and reads all files once
        measure(command)
    starts: dict[str, list[Start]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, command in commands.items():
            starts[name].append(measure(command))
    first, processor = (
        {name: statistics.median(getattr(start, field) for start in found) for name, found in starts.items()}
        for field in ("seconds", "processor_seconds")
    )
    print(f"{'':16}{'first token':>12}{'ratio':>8}{'bar':>6}   {'processor':>10}{'ratio':>8}")
    for name in commands:
        ratios = [figures[name] / figures["import torch"] for figures in (first, processor)]
        bar = BARS.get(name)
        print(
            f"{name:16}{first[name]:10.2f} s{ratios[0]:8.2f}{'' if bar is None else bar:>6}   "
            f"{processor[name]:8.2f} s{ratios[1]:8.2f}"
        )


if __name__ == "__main__":
    main()
