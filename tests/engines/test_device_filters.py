"""The filters of a batch on a device draw what the host draws. They run on any device; here on the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from palaver.engines.core.logits_processor import LogitsProcessor
from palaver.engines.core.reply_state import ReplyState
from palaver.engines.core.sampler import HostLogits
from palaver.engines.torch.device_filters import DECIDED, NONE_LEFT, sample_rows
from palaver.generation import Prompt, Step
from palaver.phases import Phase, Phases, State
from palaver.sampling import Sampling
from tests.engines.sampling_reference import ReferenceDraw

SIZE, REPORTED = 300, 20
BOUNDARY = 1e-6
TOKEN, LOGPROB, DRAWN_LOGPROB, STATUS, LISTS = range(5)

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    dynatemp_range=st.sampled_from([0.0, 0.0, 0.5, 2.0]),
    dynatemp_exponent=st.sampled_from([0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 40, 299, 300]),
    typical_p=st.sampled_from([1.0, 1.0, 0.9, 0.3]),
    top_p=st.sampled_from([1.0, 0.95, 0.5]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    top_a=st.sampled_from([0.0, 0.2]),
    xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.02, 0.2]),
    seed=st.integers(0, 2**63 - 1),
    logprobs=st.just(5),
)


def processor(sampling: Sampling, choice: int = 0, prompt: Prompt | None = None) -> LogitsProcessor:
    prompt = prompt or Prompt((1, 2, 3))
    return LogitsProcessor(prompt, sampling, choice, ReplyState(prompt, sampling, [b"x"] * SIZE), SIZE)


def random_logits(rows: int, seed: int, spread: float = 4.0) -> torch.Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed)) * spread


def sampled(logits: torch.Tensor, processors: Sequence[LogitsProcessor]) -> NDArray[Any]:
    table = sample_rows(logits, logits, processors, REPORTED)
    assert table.shape == (len(processors), LISTS + 4 * REPORTED + 1)
    return table.numpy()


def is_at_boundary(logits: torch.Tensor, one: LogitsProcessor) -> bool:
    return ReferenceDraw(logits.numpy().copy(), one.sampling, one.xtc_uniform(), BOUNDARY).draw(one.uniform())[1]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(samplings, min_size=1, max_size=6), st.sampled_from([0.5, 4.0, 10.0]), st.booleans(), st.integers(0, 99)
)
def test_the_same_tokens_as_on_the_host(rows: list[Sampling], spread: float, ties: bool, seed: int) -> None:
    logits = random_logits(len(rows), seed, spread)
    logits = logits.round() if ties else logits
    processors = [processor(sampling, choice) for choice, sampling in enumerate(rows)]
    on_host = HostLogits(logits.numpy()).sample(processors)
    for row, other, made_by, own in zip(sampled(logits, processors), on_host, processors, logits, strict=True):
        assert isinstance(other, Step)
        if row[TOKEN] != other.token_id:
            assert is_at_boundary(own, made_by)
            continue
        assert row[STATUS] == DECIDED
        assert row[LOGPROB] == pytest.approx(other.logprob, abs=1e-4)
        assert row[DRAWN_LOGPROB] == pytest.approx(other.drawn_logprob, abs=1e-4)
        raw_ids, raw, own_ids, after = row[LISTS:-1].reshape(4, REPORTED)[:, :5].tolist()
        assert raw == pytest.approx([one.logprob for one in other.alternatives], abs=1e-4)
        assert after == pytest.approx([one.logprob for one in other.drawn_from], abs=1e-4)
        if not ties:
            assert raw_ids == [one.token_id for one in other.alternatives]
            assert own_ids == [one.token_id for one in other.drawn_from]


def test_a_row_does_not_depend_on_its_company() -> None:
    logits = random_logits(3, 0)
    given = [Sampling(xtc_probability=1.0, seed=1), Sampling(typical_p=0.4, seed=2), Sampling(temperature=0)]
    together = sampled(logits, [processor(sampling) for sampling in given])
    alone = [sampled(logits[row : row + 1], [processor(sampling)])[0] for row, sampling in enumerate(given)]
    assert together[:, TOKEN].tolist() == [row[TOKEN] for row in alone]
    np.testing.assert_allclose(together, np.stack(alone), rtol=1e-12)


def test_what_can_not_be_sampled() -> None:
    logits = random_logits(3, 0)
    logits[1, 5] = math.nan
    logits[2] = -math.inf
    settings = Sampling(typical_p=0.9, seed=1)
    table = sampled(logits, [processor(settings) for _ in range(3)])
    assert table[0, STATUS] == DECIDED
    assert math.isnan(table[1, LOGPROB])
    assert table[2, STATUS] == NONE_LEFT or math.isnan(table[2, LOGPROB])


def test_a_token_that_is_forced() -> None:
    """The closing of a thought whose budget is spent comes whatever the logits are."""
    phases = Phases((State(Phase.THINKING, closing=(7, 8)), State(Phase.ANSWER)))
    sampling = Sampling(thinking_budget=0, xtc_probability=1.0, seed=1)
    logits = random_logits(1, 0)
    logits[0, 7] = -math.inf
    made_by = processor(sampling, prompt=Prompt((1, 2, 3), phases=phases))
    assert made_by.reply.forced_id == 7
    (row,) = sampled(logits, [made_by])
    assert row[[TOKEN, STATUS]].tolist() == [7, DECIDED]


def test_more_alternatives_than_tokens() -> None:
    table = sample_rows(torch.zeros(1, 4), torch.zeros(1, 4), [processor(Sampling(min_p=0.1, seed=1))], REPORTED)
    assert table.shape == (1, LISTS + 4 * REPORTED + 1)
