"""The history file of the prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from palaver.repl import interactive


def test_history_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "history"
    history = interactive.open_history(path)
    history.append_string("a\nb")
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(interactive.open_history(path).load_history_strings()) == ["a\nb"]


def test_a_long_history_loses_its_oldest_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interactive, "MAX_HISTORY_BYTES", 1000)
    history = interactive.open_history(tmp_path / "history")
    for number in range(200):
        history.append_string(f"line {number}")
    lines = list(interactive.open_history(tmp_path / "history").load_history_strings())
    assert lines[0] == "line 199"
    assert 5 < len(lines) < 50


def test_a_folder_that_can_not_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    interactive.open_history(tmp_path / "file" / "history").append_string("kept in memory")
