"""What the tests of engines that verify drafts up to rounding have in common."""

from __future__ import annotations

import pytest

from palaver.engines.core.speculation import PassCosts
from tests.engines.generate import Run


def make_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts wherever there is a match, and of a draft model, however busy the machine is."""
    monkeypatch.setattr(PassCosts, "extra", lambda *_: 0.0)
    monkeypatch.setattr(PassCosts, "sampling", lambda *_: 0.0)
    monkeypatch.setattr(PassCosts, "drafting", lambda *_: 0.01)
    monkeypatch.setattr(PassCosts, "record_drafting", lambda *_: None)


def is_same(one: Run, other: Run, rounding: float) -> bool:
    """Whether both have the same tokens. Up to the first one that rounding decided, log-probabilities are the same."""
    for mine, theirs in zip(one.steps, other.steps, strict=False):
        if mine.token_id != theirs.token_id:
            return False
        assert mine.logprob == pytest.approx(theirs.logprob, abs=rounding)
    assert len(one.ids) == len(other.ids)
    return True


def count_same(ones: list[Run], others: list[Run], rounding: float) -> int:
    return sum(is_same(one, other, rounding) for one, other in zip(ones, others, strict=True))
