"""Cores that a process may use, and those that are idle: from files of Linux, which are made up here."""

import os
from pathlib import Path

import pytest

import palaver.memory
from palaver.engines import machine as machine_module
from palaver.engines.compiled.decoder import IdleCores
from palaver.engines.machine import all_cores, usable_cores


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with eight cores, without limits. Returns the folder of its control groups."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(machine_module, "ONLINE", tmp_path / "online")
    monkeypatch.setattr(palaver.memory, "CONTROL_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(palaver.memory, "MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "groups" / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "membership").write_text("0::/outer/inner\n")
    return tmp_path / "groups"


def load_file(folder: Path, running: str) -> Path:
    path = folder / "loadavg"
    path.write_text(f"0.71 0.60 0.37 {running}/82 8372\n")
    return path


@pytest.mark.usefixtures("machine")
def test_all_cores_of_the_affinity_are_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores() == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 5}, raising=False)
    assert usable_cores() == 2


@pytest.mark.parametrize(
    ("group", "limit", "usable"),
    [
        ("outer/inner", "300000 100000", 3),
        ("outer", "250000 100000", 2),
        (".", "50000 100000", 1),
        ("outer/inner", "max 100000", 8),
        ("outer/inner", "9900000 100000", 8),
        ("outer/inner", "nonsense", 8),
    ],
)
def test_a_control_group_limits_them(machine: Path, group: str, limit: str, usable: int) -> None:
    (machine / group / "cpu.max").write_text(f"{limit}\n")
    assert usable_cores() == usable


@pytest.mark.usefixtures("machine")
def test_without_control_groups_there_is_no_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(palaver.memory, "MEMBERSHIP", tmp_path / "missing")
    assert usable_cores() == 8


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("online", "cores"), [("0-3,8-11", 8), ("0", 1), ("0,2,4-5", 4), ("", 8), ("all", 8)])
def test_cores_that_the_process_may_not_use_count_too(online: str, cores: int, tmp_path: Path) -> None:
    (tmp_path / "online").write_text(f"{online}\n")
    assert all_cores() == cores


@pytest.mark.usefixtures("machine")
def test_cores_without_a_task_are_idle(tmp_path: Path) -> None:
    idle = IdleCores(load_file(tmp_path, "1"))
    for running, expected in (("1", 7), ("3", 5), ("8", 0), ("30", 0)):
        load_file(tmp_path, running)
        assert idle.count() == expected


def test_no_more_are_idle_than_may_be_used(machine: Path, tmp_path: Path) -> None:
    (machine / "cpu.max").write_text("300000 100000\n")
    assert IdleCores(load_file(tmp_path, "1")).count() == 2


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("text", ["", "0.00 0.00 0.00 0/0 0", "0.1 0.1", "a b c d e"])
def test_what_can_not_be_read_is_unknown(text: str, tmp_path: Path) -> None:
    path = tmp_path / "loadavg"
    path.write_text(text)
    assert IdleCores(path).count() is None
    assert IdleCores(tmp_path / "missing").count() is None


@pytest.mark.usefixtures("machine")
def test_on_some_of_the_cores_it_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tasks that run may be on the other ones."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # musl counts the usable ones
    (tmp_path / "online").write_text("0-7\n")
    assert IdleCores(load_file(tmp_path, "1")).count() is None
