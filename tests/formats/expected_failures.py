"""Known failures among the published templates and recorded cases, by name.

Tests mark these strictly: one that passes is reported as a failure, so that its entry is deleted.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

RECORDED_CASES: dict[str, tuple[int, ...]] = {}
"""Lines of `cases.jsonl`, counted from 0 as `palaver formats check` does, whose message is not read as expected."""
CONTINUATIONS: tuple[str, ...] = ()
"""Templates with continuations that are not byte-exact."""
PARTIAL_ANSWERS: tuple[str, ...] = ()
"""Formats in which a partial answer is not read back as it was given."""
FORCED_CALLS: tuple[str, ...] = ()
"""Formats in which a forced call is not read back as that call."""


def expected(value: Any, name: str, failures: Collection[str]) -> Any:
    """The test parameter under its name, marked where its failure is expected."""
    marks = [pytest.mark.xfail(strict=True, reason="listed as an expected failure")] if name in failures else []
    return pytest.param(value, id=name, marks=marks)
