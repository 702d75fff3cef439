"""Recorded replies in published formats are read as the recorded message; continuations are byte-exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from palaver.commands.format_trials import CaseReplay, Roundtrip, load_cases
from tests.formats.expected_failures import CONTINUATIONS, RECORDED_CASES, expected

FOLDER = Path(__file__).parents[3] / "shared" / "formats"
TEMPLATES = sorted((FOLDER / "templates").glob("*.jinja"))
CASES = load_cases(FOLDER / "cases.jsonl") if TEMPLATES else []
FAILING = {f"{template}-{number}" for template, numbers in RECORDED_CASES.items() for number in numbers}
REPLAY = CaseReplay(FOLDER / "templates")

pytestmark = pytest.mark.skipif(not TEMPLATES, reason="NOTHING IS SHOWN HERE: the published templates are not at hand")


@pytest.mark.parametrize(
    "numbered",
    [expected((number, case), f"{case['template']}-{number}", FAILING) for number, case in enumerate(CASES)],
)
def test_a_recorded_reply_means_its_message(numbered: tuple[int, dict[str, Any]]) -> None:
    number, case = numbered
    assert [result for result in REPLAY.results(case, number) if result.error] == []


@pytest.mark.parametrize("path", [expected(path, path.stem, CONTINUATIONS) for path in TEMPLATES])
def test_continuations_are_byte_exact(path: Path) -> None:
    trials = [trial for tokens in (True, False) for trial in Roundtrip(path, tokens).trials()]
    assert [trial for trial in trials if trial.expressed and trial.exact < trial.count] == []


@pytest.mark.parametrize("known", [FAILING, CONTINUATIONS], ids=["cases", "continuations"])
def test_expected_failures_name_what_exists(known: set[str]) -> None:
    names = {path.stem for path in TEMPLATES} | {f"{case['template']}-{i}" for i, case in enumerate(CASES)}
    assert set(known) <= names
