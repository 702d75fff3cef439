"""The shape of the code: modules, their sizes and imports, and the path of one streaming chat completion.

    python -m benchmarks.structure                # the static figures and the traced request
    python -m benchmarks.structure --static       # without starting a server
    python -m benchmarks.structure --src DIR      # another checkout's `src`, to compare two versions

The request is traced in the server's process and in the engine's: which files of the package are called, how often
control passes from one file to another, and how many generator functions each token passes on its way out.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import psutil

SRC = Path(__file__).resolve().parent.parent / "src"
WARM_UP_S = 4.0
"""How long the engine's process warms up its grammars after loading, which is not part of a request."""
ROUNDS = 3
"""Requests that are traced. A file counts if it is called in each of them: timers run beside some of them."""
SAME_NAMES_ON_PURPOSE = ("formats.tool_calls.",)

TRACER = """
import inspect, json, os, signal, sys, threading
folder, root = os.environ["STRUCTURE_TRACE"], os.environ["STRUCTURE_ROOT"]
files, resumed, state = {}, {}, {"on": False, "last": None, "switches": 0}
GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
def profile(frame, event, arg):
    if event != "call" or not state["on"]:
        return
    code = frame.f_code
    name = code.co_filename
    if not name.startswith(root):
        return
    files[name] = files.get(name, 0) + 1
    if name != state["last"]:
        state["last"] = name
        state["switches"] += 1
    if code.co_flags & GENERATOR:
        key = f"{name}:{code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}"
        resumed[key] = resumed.get(key, 0) + 1
def start(number, frame):
    files.clear(); resumed.clear(); state.update(on=True, switches=0)
def stop(number, frame):
    state["on"] = False
    with open(os.path.join(folder, f"{os.getpid()}.json.part"), "w") as out:
        json.dump({"files": files, "resumed": resumed, "switches": state["switches"]}, out)
    os.rename(out.name, out.name.removesuffix(".part"))
signal.signal(signal.SIGUSR1, start)
signal.signal(signal.SIGUSR2, stop)
threading.setprofile(profile)
sys.setprofile(profile)
"""


def modules(src: Path) -> dict[str, Path]:
    found = {}
    for path in sorted((src / "palaver").rglob("*.py")):
        name = ".".join(path.relative_to(src).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def static_figures(src: Path) -> dict[str, object]:
    paths = modules(src)
    importers: dict[str, set[str]] = defaultdict(set)
    classes: dict[str, list[str]] = defaultdict(list)
    sizes = []
    for name, path in paths.items():
        text = path.read_text()
        tree = ast.parse(text)
        if path.name != "__init__.py":
            sizes.append(text.count("\n"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(name.removeprefix("palaver."))
            for target in _targets(node):
                if target in paths and target != name:
                    importers[target].add(name)
    twice = {
        name: where
        for name, where in classes.items()
        if len([w for w in where if not w.startswith(SAME_NAMES_ON_PURPOSE)]) > 1
    }
    leaves = [name for name, path in paths.items() if path.name != "__init__.py"]
    return {
        "files": len(paths),
        "lines": sum(path.read_text().count("\n") for path in paths.values()),
        "median module": int(statistics.median(sizes)),
        "modules imported by exactly one other": sum(len(importers[name]) == 1 for name in leaves),
        "class names used twice": len(twice),
        "which": ", ".join(sorted(twice)) or "none",
    }


def _targets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def traced_request(src: Path) -> dict[str, object]:
    """One streaming chat completion against a `palaver serve` of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(TRACER)
        traces = folder / "traces"
        traces.mkdir()
        environment = os.environ | {
            "PYTHONPATH": f"{folder}{os.pathsep}{src}",
            "STRUCTURE_TRACE": str(traces),
            "STRUCTURE_ROOT": str(src / "palaver"),
            "PALAVER_DATA": str(folder / "data"),
        }
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "palaver", "serve", "--port", str(port)]
        server = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            return _trace(server.pid, f"http://127.0.0.1:{port}", traces, src / "palaver")
        finally:
            server.terminate()
            server.wait(30)


def _trace(pid: int, url: str, traces: Path, root: Path) -> dict[str, object]:
    body = {
        "model": "sprout",
        "messages": [{"role": "user", "content": "What is 17 + 25?"}],
        "stream": True,
        "seed": 1,
    }
    deadline = time.monotonic() + 120
    with httpx.Client(base_url=url, timeout=60) as client:
        while time.monotonic() < deadline:
            try:
                if client.get("/health").json().get("status") in ("ok", "ready"):
                    break
            except (httpx.HTTPError, ValueError):
                pass
            time.sleep(0.1)
        _stream(client, body)  # what happens only once is not counted
        pids = [pid, *_descendants(pid)]
        time.sleep(WARM_UP_S)
        rounds = [_traced_round(client, body, pids, traces, deadline) for _ in range(ROUNDS)]
    chunks, results = rounds[0]
    for _, others in rounds[1:]:
        for each, result in results.items():
            result["files"] = {file: n for file, n in result["files"].items() if file in others[each]["files"]}
    server = results[pid]
    everything = set().union(*(set(result["files"]) for result in results.values()))
    passed = {key for key, n in server["resumed"].items() if n >= chunks / 2 and not key.endswith("<genexpr>")}
    return {
        "chunks": chunks,
        "files of the server": len(server["files"]),
        "files with the engine": len(everything),
        "server": _names(server["files"], root),
        "engine": _names(everything - set(server["files"]), root),
        "switches between files": sum(result["switches"] for result in results.values()),
        "generators a token passes": len(passed),
        "which ones": ", ".join(sorted(key.removeprefix(f"{root}/") for key in passed)),
    }


def _traced_round(
    client: httpx.Client, body: dict[str, object], pids: list[int], traces: Path, deadline: float
) -> tuple[int, dict[int, dict[str, Any]]]:
    """The chunks of one request, and what each process called meanwhile."""
    for each in pids:
        os.kill(each, signal.SIGUSR1)
    time.sleep(0.3)
    chunks = _stream(client, body)
    time.sleep(0.3)
    for each in pids:
        os.kill(each, signal.SIGUSR2)
    paths = {each: traces / f"{each}.json" for each in pids}
    while not all(path.exists() for path in paths.values()) and time.monotonic() < deadline:
        time.sleep(0.05)
    results = {each: json.loads(path.read_text()) for each, path in paths.items() if path.exists()}
    for path in paths.values():
        path.unlink(missing_ok=True)
    return chunks, results


def _names(files: Iterable[str], root: Path) -> str:
    return " ".join(sorted(file.removeprefix(f"{root}/").removesuffix(".py") for file in files))


def _stream(client: httpx.Client, body: dict[str, object]) -> int:
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        return sum(line.startswith("data: {") for line in answer.iter_lines())


def _descendants(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--src", type=Path, default=SRC)
    parser.add_argument("--static", action="store_true")
    chosen = parser.parse_args()
    src = chosen.src.resolve()
    figures = static_figures(src) | ({} if chosen.static else traced_request(src))
    for name, value in figures.items():
        print(f"{name:40} {value}")


if __name__ == "__main__":
    main()
