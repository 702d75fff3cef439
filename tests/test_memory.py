"""What is available, by files of control groups that are made up here, and what a process frees."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import palaver.memory
from palaver.memory import available_bytes, total_bytes
from palaver.models.gguf import find_in_folder
from palaver.models.machine_fit import machine_fit

GIB = 1 << 30
THREADS, BLOCK_MB = 4, 26
SCRIPT = f"""
import threading
import psutil
from palaver.memory import give_back_unused, return_large_blocks

def memory_mb():
    return psutil.Process().memory_info().rss >> 20

def use_much(freed, done):
    for _ in range(3):
        block = bytearray({BLOCK_MB} << 20)
        del block
    freed.release()
    done.wait()

return_large_blocks()
freed, done, before = threading.Semaphore(0), threading.Event(), memory_mb()
threads = [threading.Thread(target=use_much, args=(freed, done)) for _ in range({THREADS})]
for thread in threads:
    thread.start()
for thread in threads:
    freed.acquire()
give_back_unused()
print(memory_mb() - before)
done.set()
"""


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with 64 GiB, all of it available, without limits. Returns the folder of its control groups."""
    machine = type("Memory", (), {"available": 64 * GIB, "total": 64 * GIB})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    monkeypatch.setattr(palaver.memory, "CONTROL_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(palaver.memory, "MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "groups" / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "membership").write_text("0::/outer/inner\n")
    return tmp_path / "groups"


def write_group(folder: Path, limit: str, used: int, cache: int = 0, mapped: int = 0) -> None:
    """`cache`: bytes of files that were not used lately; `mapped`: of files that were, such as mapped weights."""
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    files = f"file {cache + mapped}\ninactive_file {cache}\nactive_file {mapped}\n"
    (folder / "memory.stat").write_text(f"anon {used - cache - mapped}\n{files}")


@pytest.mark.usefixtures("groups")
def test_without_a_limit_the_memory_of_the_machine_is_available(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert available_bytes() == 64 * GIB
    monkeypatch.setattr(palaver.memory, "MEMBERSHIP", tmp_path / "missing")
    assert available_bytes() == 64 * GIB


@pytest.mark.parametrize("group", ["outer/inner", "outer", "."])
@pytest.mark.parametrize(
    ("limit", "used", "cache", "available"),
    [
        (str(8 * GIB), 3 * GIB, 0, 5 * GIB),
        (str(8 * GIB), 8 * GIB, 2 * GIB, 2 * GIB),
        (str(GIB), 2 * GIB, 0, 0),
        (str(500 * GIB), 2 * GIB, 0, 64 * GIB),
        ("max", 2 * GIB, 0, 64 * GIB),
        ("nonsense", 2 * GIB, 0, 64 * GIB),
    ],
)
def test_a_control_group_limits_what_is_available(
    groups: Path, group: str, limit: str, used: int, cache: int, available: int
) -> None:
    write_group(groups / group, limit, used, cache)
    assert available_bytes() == available


def test_the_mapped_weights_of_an_evicted_model_are_available(groups: Path) -> None:
    write_group(groups / "outer", str(8 * GIB), used=7 * GIB, cache=GIB, mapped=5 * GIB)
    assert available_bytes() == 7 * GIB


def test_the_tightest_control_group_counts(groups: Path) -> None:
    write_group(groups / "outer", str(16 * GIB), 12 * GIB)
    write_group(groups / "outer" / "inner", str(8 * GIB), GIB)
    assert available_bytes() == 4 * GIB


@pytest.mark.parametrize(
    ("outer", "inner", "total"),
    [("max", "max", 64), (16 * GIB, "max", 16), (16 * GIB, 8 * GIB, 8), (500 * GIB, "max", 64)],
)
def test_a_container_is_as_large_as_its_tightest_limit(
    groups: Path, outer: int | str, inner: int | str, total: int
) -> None:
    write_group(groups / "outer", str(outer), used=7 * GIB)
    write_group(groups / "outer" / "inner", str(inner), used=GIB)
    assert total_bytes() == total * GIB


def test_models_are_chosen_for_the_container(groups: Path, tmp_path: Path) -> None:
    for name, size in (("a-Q4_K_M.gguf", 5 * GIB), ("a-Q2_K.gguf", 3 * GIB)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    assert find_in_folder(tmp_path, "a").name == "a-Q4_K_M.gguf"
    assert machine_fit(5 * GIB).fits
    write_group(groups / "outer", str(4 * GIB), used=GIB)
    assert find_in_folder(tmp_path, "a").name == "a-Q2_K.gguf"
    assert not machine_fit(5 * GIB).fits
    assert machine_fit(3 * GIB).fits


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of glibc")
def test_large_blocks_go_back_to_the_system_when_they_are_freed() -> None:
    assert _growth_mb() < BLOCK_MB


def _growth_mb() -> int:
    command = [sys.executable, "-c", SCRIPT]
    return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
