"""The Triton kernels draw what the host draws. Without a GPU they run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="Triton is not installed: the sampling kernels are not tested")

from palaver.engines.core.generation import PendingStep  # noqa: E402
from palaver.engines.core.logits_processor import LogitsProcessor  # noqa: E402
from palaver.engines.core.reply_state import ReplyState  # noqa: E402
from palaver.engines.core.sampler import HostLogits  # noqa: E402
from palaver.engines.torch import sampling_kernels as kernels  # noqa: E402
from palaver.engines.torch.device_changes import DeviceChanges  # noqa: E402
from palaver.engines.torch.device_sampler import sample_on_device  # noqa: E402
from palaver.errors import EngineError, RequestError  # noqa: E402
from palaver.generation import Prompt, Step  # noqa: E402
from palaver.sampling import Sampling  # noqa: E402
from tests.engines.sampling_reference import ReferenceDraw  # noqa: E402

SIZE = 3000
"""Several blocks, the last of them not full."""
BOUNDARY = 1e-6
"""A uniform number this near to a boundary between two tokens may fall on either side: sums are rounded."""


def processor(sampling: Sampling, choice: int = 0) -> LogitsProcessor:
    prompt = Prompt((1, 2, 3))
    vocabulary = [b"x"] * SIZE
    return LogitsProcessor(prompt, sampling, choice, ReplyState(prompt, sampling, vocabulary), SIZE)


def sampled(logits: torch.Tensor, processors: Sequence[LogitsProcessor]) -> list[Step | Exception]:
    changes = DeviceChanges(torch.device(DEVICE))
    steps = sample_on_device(logits.to(DEVICE), processors, changes, kernels)
    return [step.build() if isinstance(step, PendingStep) else step for step in steps]


def is_at_boundary(logits: torch.Tensor, one: LogitsProcessor) -> bool:
    scores = logits.numpy().copy()
    one.changes().apply(scores)
    return ReferenceDraw(scores, one.sampling, one.xtc_uniform(), BOUNDARY).draw(one.uniform())[1]


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 0.6, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 20, 31, 32, 300]),
    top_p=st.sampled_from([1.0, 0.95, 0.5]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    banned_ids=st.sampled_from([(), (66, 67)]),
    seed=st.integers(0, 2**63 - 1),
    logprobs=st.sampled_from([0, 5, 20]),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(samplings, min_size=1, max_size=4), st.sampled_from([1.0, 4.0, 10.0]), st.booleans(), st.integers(0, 99)
)
def test_the_same_tokens_as_on_the_host(rows: list[Sampling], spread: float, ties: bool, seed: int) -> None:
    logits = torch.randn(len(rows), SIZE, generator=torch.Generator().manual_seed(seed)) * spread
    if ties:
        logits = logits.round()
    processors = [processor(sampling, choice) for choice, sampling in enumerate(rows)]
    on_host = HostLogits(logits.numpy()).sample(processors)
    steps = zip(sampled(logits, processors), on_host, processors, logits, strict=True)
    for one, other, made_by, row in steps:
        assert isinstance(one, Step)
        assert isinstance(other, Step)
        if one.token_id != other.token_id:
            assert is_at_boundary(row, made_by)
            continue
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.drawn_logprob == pytest.approx(other.drawn_logprob, abs=1e-4)
        for mine, theirs in ((one.alternatives, other.alternatives), (one.drawn_from, other.drawn_from)):
            assert [a.logprob for a in mine] == pytest.approx([a.logprob for a in theirs], abs=1e-4)
            if not ties:
                assert [a.token_id for a in mine] == [a.token_id for a in theirs]


def test_a_row_does_not_depend_on_its_company() -> None:
    logits = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(0))
    made_by = [processor(Sampling(top_k=k, top_p=0.95, temperature=0.6, seed=k, logprobs=5)) for k in (0, 7, 20)]
    together = sampled(logits, made_by)
    alone = [step for row in range(3) for step in sampled(logits[row : row + 1], [made_by[row]])]
    assert together == alone


def test_what_can_not_be_sampled() -> None:
    logits = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(0))
    logits[1, 5] = torch.nan
    everything = Sampling(logit_bias=((3, 1.0),), banned_ids=())
    made_by = [processor(Sampling()), processor(Sampling(top_k=5)), processor(everything)]
    good, bad, other = sampled(logits, made_by)
    assert isinstance(good, Step)
    assert isinstance(bad, EngineError)
    assert isinstance(other, Step)
    (none,) = sampled(logits[:1], [processor(Sampling(banned_ids=tuple(range(SIZE))))])
    assert isinstance(none, RequestError)
