"""Replicas on Ray Serve: the parts that need no Ray, and `cluster_cases.py` in a network namespace of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from palaver.engines.cluster.affinity import LoadTracker, replica_order, routing_key
from palaver.engines.cluster.autoscaler import desired_replicas
from palaver.engines.host.frames import decode_frames, encode_frame
from palaver.generation import MediaContent, Prompt

ROOT = Path(__file__).resolve().parents[2]
NAMES = [f"replica-{number}" for number in range(8)]
AS_ROOT = [] if os.getuid() == 0 else ["--map-root-user"]
LOOPBACK_ONLY = ["unshare", *AS_ROOT, "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
"""Runs a command in a network namespace."""
SECONDS = 560
"""Ray's processes take a few seconds to start on a free machine, and minutes on a busy one."""


def missing() -> str:
    if find_spec("ray") is None:
        return "Ray is not installed (pip install 'palaver[cluster]')"
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return "unshare and ip are not installed"
    if subprocess.run([*LOOPBACK_ONLY, "true"], capture_output=True).returncode:
        return "network namespaces can't be made here"
    return ""


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 20)
def test_replicas_on_a_ray_cluster(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(f"REPLICAS ON RAY ARE NOT SHOWN: {why}")
    variables = os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--timeout={SECONDS}"]
    command += ["-W", "ignore", "tests/engines/cluster_cases.py"]
    done = subprocess.run(
        [*LOOPBACK_ONLY, *command], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]


def test_conversations_are_spread_and_only_those_of_a_dead_replica_move() -> None:
    idle = [0.0] * len(NAMES)
    homes = {key: NAMES[replica_order(NAMES, key, idle, 8)[0]] for key in range(4_000)}
    counts = Counter(homes.values())
    assert set(counts) == set(NAMES)
    assert max(counts.values()) < 1.3 * min(counts.values())
    left = NAMES[:3] + NAMES[4:]
    moved = {key for key, home in homes.items() if left[replica_order(left, key, idle[1:], 8)[0]] != home}
    assert moved == {key for key, home in homes.items() if home == NAMES[3]}


def test_a_full_replica_is_passed_over_until_it_has_room() -> None:
    idle = [0.0] * len(NAMES)
    order = replica_order(NAMES, 5, idle, 8)
    loads = [8.0 if place == order[0] else 0.0 for place in range(len(NAMES))]
    assert replica_order(NAMES, 5, loads, 8)[0] == order[1]
    assert replica_order(NAMES, 5, loads, 9)[0] == order[0]
    full = [20.0 + place for place in range(len(NAMES))]
    assert replica_order(NAMES, 5, full, 8)[-1] == len(NAMES) - 1  # above the bound of 1.25 times the mean


def test_the_load_is_the_last_report_and_what_happened_since() -> None:
    loads = LoadTracker()
    for number in range(20):  # one after another: they are no load
        loads.start(f"request {number}", "a")
        assert loads.load("a") == 1
        loads.end(f"request {number}")
    assert loads.load("a") == 0
    loads.start("long", "a")
    loads.report("a", 1, 5.0)  # with those of other fronts
    loads.start("new", "a")
    assert loads.load("a") == 6
    loads.end("long")
    loads.report("a", 1, 5.0)
    assert loads.load("a") == 5
    loads.report("a", 2, 0.0)  # older than the request that runs
    assert loads.load("a") == 1
    loads.keep(["b"])
    loads.end("new")
    assert loads.load("a") <= 0


def test_a_prompt_without_a_conversation_is_known_by_its_beginning() -> None:
    long = tuple(range(200))
    assert routing_key(Prompt(long, owner="a")) == routing_key(Prompt((*long, 7), owner="a"))
    assert routing_key(Prompt(long, owner="a")) != routing_key(Prompt(long, owner="b"))
    assert routing_key(Prompt(long, conversation="c")) == routing_key(Prompt((1,), conversation="c"))


@pytest.mark.parametrize(
    ("requests", "running", "pressures", "wanted"),
    [(0, 2, [], 0), (17, 2, [0.1, 0.1], 3), (4, 2, [0.95, 0.9], 3), (4, 2, [0.69, 0.1], 1), (400, 2, [1.0, 1.0], 50)],
)
def test_replicas_by_queue_and_by_cache(requests: int, running: int, pressures: list[float], wanted: int) -> None:
    assert desired_replicas(requests, 8, running, pressures) == wanted


def test_frames_one_after_another() -> None:
    content = MediaContent(b"\x00\x01", (2,), "uint8")
    frames = decode_frames(
        encode_frame({"do": "content", "number": 0, "key": "a", "content": content})
        + encode_frame({"do": "forget", "number": 1, "conversation": "c"})
    )
    assert [frame["do"] for frame in frames] == ["content", "forget"]
    assert frames[0]["content"] == content
