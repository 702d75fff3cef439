"""The Triton kernels draw what the host draws. Without a GPU they run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="Triton is not installed: the sampling kernels are not tested")

from palaver.engines.core.dry import DryPenalty  # noqa: E402
from palaver.engines.core.generation import PendingStep  # noqa: E402
from palaver.engines.core.logits_processor import LogitsProcessor  # noqa: E402
from palaver.engines.core.reply_state import ReplyState  # noqa: E402
from palaver.engines.core.sampler import HostLogits  # noqa: E402
from palaver.engines.core.token_masks import BannedStrings, VocabularyIndex  # noqa: E402
from palaver.engines.torch import device_filters  # noqa: E402
from palaver.engines.torch.cuda_graphs import CudaGraphCapture  # noqa: E402
from palaver.engines.torch.device_changes import TooManyEdits  # noqa: E402
from palaver.engines.torch.device_sampler import DeviceSampler  # noqa: E402
from palaver.engines.torch.kernel_sampler import KernelSampler  # noqa: E402
from palaver.engines.torch.sampling_kernels import BlockLists  # noqa: E402
from palaver.errors import EngineError, RequestError  # noqa: E402
from palaver.generation import Prompt, Step  # noqa: E402
from palaver.sampling import Sampling  # noqa: E402
from tests.engines.interpreter import EVERY_CASE  # noqa: E402
from tests.engines.sampling_reference import ReferenceDraw  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's, of infinities
]
SIZE = 3000
"""Several blocks, the last of them not full."""
END = 2
BOUNDARY = 1e-6
"""A uniform number this near to a boundary between two tokens may fall on either side: sums are rounded."""


def processor(sampling: Sampling, choice: int = 0, size: int = SIZE, ends: bool = False) -> LogitsProcessor:
    prompt = Prompt((1, 2, 3))
    vocabulary = [b"%d" % i for i in range(size)]
    index = VocabularyIndex(vocabulary)
    dry = DryPenalty(sampling, index, size) if sampling.dry_multiplier else None
    banned = BannedStrings(sampling.banned_strings, index, frozenset()) if sampling.banned_strings else None
    reply = ReplyState(prompt, sampling, vocabulary, frozenset({END}) if ends else frozenset(), 4096)
    return LogitsProcessor(prompt, sampling, choice, reply, size, banned, dry=dry)


def sampled(logits: torch.Tensor, processors: Sequence[LogitsProcessor]) -> list[Step | Exception]:
    sampler = DeviceSampler(torch.device(DEVICE), on_device=True)
    sampler.kernels = KernelSampler(torch.device(DEVICE))
    steps = sampler.logits(logits.to(DEVICE)).sample(processors)
    return [step.build() if isinstance(step, PendingStep) else step for step in steps]


def is_at_boundary(logits: torch.Tensor, one: LogitsProcessor) -> bool:
    scores = logits.numpy().copy()
    one.changes().apply(scores)
    return ReferenceDraw(scores, one.sampling, one.xtc_uniform(), BOUNDARY).draw(one.uniform())[1]


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 0.6, 1.0, 2.0]),
    dynatemp_range=st.sampled_from([0.0, 0.0, 0.0, 0.5, 2.0]),
    dynatemp_exponent=st.sampled_from([0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 5, 20, 31, 32, 300]),
    typical_p=st.sampled_from([1.0, 1.0, 0.9, 0.3]),
    top_p=st.sampled_from([1.0, 0.95, 0.5]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    top_a=st.sampled_from([0.0, 0.0, 0.2]),
    xtc_probability=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.02, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    presence_penalty=st.sampled_from([0.0, -0.5]),
    logit_bias=st.sampled_from([(), ((5, 2.5), (9, -1.0))]),
    banned_ids=st.sampled_from([(), (66, 67)]),
    seed=st.integers(0, 2**63 - 1),
    logprobs=st.sampled_from([0, 5, 20]),
)


@settings(max_examples=60 if EVERY_CASE else 12, deadline=None, derandomize=True)
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


def test_replies_whose_options_change_from_token_to_token() -> None:
    """As the runner of steps does; with a GPU each call is a graph."""
    size, device = 200, torch.device(DEVICE)
    sampler = KernelSampler(device, 4, CudaGraphCapture(device) if DEVICE == "cuda" else None)
    rows = [
        processor(Sampling(repetition_penalty=1.3, frequency_penalty=0.7, top_k=20, seed=1, logprobs=5), size=size),
        processor(Sampling(temperature=0, presence_penalty=2.0), size=size),
        processor(Sampling(dry_multiplier=2.0, dry_allowed_length=1, min_tokens=2, seed=3), size=size),
        processor(Sampling(logit_bias=((5, 2.0),), banned_ids=tuple(range(20, 90)), top_p=0.9, seed=4), size=size),
        processor(Sampling(end_penalty=3.0, min_p=0.02, seed=5), size=size, ends=True),
        processor(Sampling(banned_strings=("1",), min_tokens=3, seed=6), size=size, ends=True),
        processor(Sampling(banned_strings=("5", "71"), temperature=0), size=size),
    ]
    count = len(rows)
    logits, lists, passed = torch.zeros(count + 1, size, device=device), BlockLists(count + 1, size, device), []
    for step in range(3):
        own = torch.randn(count + 1, size, generator=torch.Generator().manual_seed(step)) * 2
        own[4, END] = own[5, END] = 6.0
        own[5:, 150] = own[6, 171] = 7.0
        logits.copy_(own)
        lists.compute(logits, torch.zeros(count + 1, 7, dtype=torch.float64, device=device))
        results = sampler.replay(logits, lists, [*rows, None], lambda found: passed.append(found.shape)).cpu()
        on_host = HostLogits(own[:count].numpy()).sample(rows)
        expected = [found.token_id for found in on_host if isinstance(found, Step)]
        assert results[:count, device_filters.TOKEN].tolist() == expected
        for one, token_id in zip(rows, expected, strict=True):
            one.append_token(token_id)
    assert passed


def test_a_row_that_can_not_be_sampled_by_kernels_leaves_the_others_counts_alone() -> None:
    size = 200
    sampler = KernelSampler(torch.device(DEVICE), 4)
    penalised = processor(Sampling(temperature=0, presence_penalty=100.0), size=size)
    repeated = processor(Sampling(dry_multiplier=2.0, dry_allowed_length=1), size=size)
    logits = torch.arange(size, dtype=torch.float32, device=DEVICE).repeat(2, 1)
    for token_id in (0, *(one for number in range(80) for one in (number + 1, 0))):
        repeated.append_token(token_id)
    for best in (size - 1, size - 2):
        with pytest.raises(TooManyEdits):
            sampler.sample(logits, [penalised, repeated])
        assert sampler.sample(logits[:1], [penalised])[0, device_filters.TOKEN] == best
        penalised.append_token(best)
