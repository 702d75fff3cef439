import gc
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from palaver.engines.core.generation import PendingStep
from palaver.engines.core.logits_changes import LogitsChanges, TokenCounts, TokenMask
from palaver.engines.core.logits_processor import LogitsProcessor
from palaver.engines.core.reply_state import ReplyState
from palaver.engines.core.rng import uniform
from palaver.engines.core.sampler import BATCH_ROWS, BLOCK, HostLogits, _Row
from palaver.engines.core.token_masks import BannedStrings, VocabularyIndex
from palaver.engines.torch.device_changes import MANY_IDS, CountTable, DeviceChanges
from palaver.engines.torch.device_sampler import DeviceSampler
from palaver.errors import BadParameter, EngineError, PalaverError, RequestError
from palaver.generation import Prompt, Step
from palaver.sampling import MAX_BIASES, MAX_STRING, MAX_STRINGS, MAX_TOKENS, Sampling, apply_settings, check_sampling
from tests.engines import reference
from tests.engines.tiny import END, SIZE, VOCABULARY

INDEX = VocabularyIndex(VOCABULARY)


def processor(
    sampling: Sampling, context: Sequence[int] = (1, 2, 3), reply_ids: Sequence[int] = (), choice: int = 0
) -> LogitsProcessor:
    prompt = Prompt(tuple(context), tuple(reply_ids))
    reply = ReplyState(prompt, sampling, VOCABULARY, frozenset({END}), 4096)
    banned = BannedStrings(sampling.banned_strings, INDEX, frozenset({END})) if sampling.banned_strings else None
    return LogitsProcessor(prompt, sampling, choice, reply, SIZE, banned)


def sample(logits: torch.Tensor, processors: Sequence[LogitsProcessor]) -> list[Step | PalaverError]:
    return HostLogits(logits.numpy()).sample(processors)


def step(logits: torch.Tensor, sampling: Sampling, context: Sequence[int] = (1, 2, 3)) -> Step:
    (out,) = sample(logits[None], [processor(sampling, context)])
    assert isinstance(out, Step)
    return out


def assert_same_steps(steps: Sequence[object], expected: Sequence[object]) -> None:
    """The same tokens; log-probabilities but for rounding; alternatives but for their order among equals."""
    for one, other in zip(steps, expected, strict=True):
        assert isinstance(one, Step)
        assert isinstance(other, Step)
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.drawn_logprob == pytest.approx(other.drawn_logprob, abs=1e-4)
        for mine, theirs in ((one.alternatives, other.alternatives), (one.drawn_from, other.drawn_from)):
            assert [a.logprob for a in mine] == pytest.approx([a.logprob for a in theirs], abs=1e-4)


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 300]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.2]),
    end_penalty=st.sampled_from([1.0, 2.0]),
    logit_bias=st.sampled_from([(), ((65, 3.0), (END, -1.0))]),
    banned_ids=st.sampled_from([(), (66, 67)]),
    banned_strings=st.sampled_from([(), ("ab", "b")]),
    min_tokens=st.sampled_from([0, 8]),
    seed=st.integers(0, 2**63 - 1),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(samplings, st.lists(st.integers(90, 105), max_size=6)), min_size=1, max_size=5))
def test_a_batch_of_anything_agrees_with_the_oracle(rows: list[tuple[Sampling, list[int]]]) -> None:
    torch.manual_seed(len(rows))
    logits = torch.randn(len(rows), SIZE) * 3
    processors = [processor(sampling, reply_ids=reply_ids) for sampling, reply_ids in rows]
    for row, (out, (sampling, reply_ids)) in enumerate(zip(sample(logits, processors), rows, strict=True)):
        scores = reference._adjust(logits[row].tolist(), [1, 2, 3], processors[row].reply, sampling)
        expected, margin = reference.choose(scores, sampling, uniform(sampling.seed, 0, len(reply_ids)))
        assert isinstance(out, Step)
        assert margin < reference.MARGIN or out.token_id == expected
        assert out.logprob == pytest.approx(float(logits[row].log_softmax(-1)[out.token_id]), abs=1e-5)


drawn_alike = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 0.6, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 20, 300]),
    top_p=st.sampled_from([1.0, 0.95, 0.3]),
    min_p=st.sampled_from([0.0, 0.05]),
    logprobs=st.sampled_from([0, 1, 5]),
    seed=st.integers(0, 2**63 - 1),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    drawn_alike,
    st.sampled_from([7, 200, 300, 4096, 5001]),
    st.sampled_from([0, 1, 7]),
    st.integers(1, 9),
    st.sampled_from([0, 1, 3, 40, 10**6]),
)
def test_rows_that_are_sampled_together_have_the_bits_of_single_ones(
    sampling: Sampling, size: int, decimals: int, count: int, possible: int
) -> None:
    """A batch of replies, and rows of one reply. Rounded rows have ties, and some rows have few possible tokens."""
    rng = np.random.default_rng(size + count + possible)
    logits = (rng.normal(size=(count, size)) * 3).round(decimals).astype(np.float32)
    for row in logits[::2]:
        row[rng.permutation(size)[possible:]] = -np.inf
    prompt = Prompt((1, 2))

    def reply(choice: int, reply_ids: Sequence[int] = ()) -> LogitsProcessor:
        state = ReplyState(replace(prompt, reply_ids=tuple(reply_ids)), sampling, [b"x"] * size)
        return LogitsProcessor(prompt, sampling, choice, state, size)

    replies = [reply(choice) for choice in range(count)]
    alone = [HostLogits(logits[row : row + 1]).sample([one])[0] for row, one in enumerate(replies)]
    assert list(map(repr, HostLogits(logits).sample(replies))) == list(map(repr, alone))
    ahead = HostLogits(logits).sample_ahead(0, count, reply(0))
    for row, step in enumerate(ahead):
        (expected,) = HostLogits(logits[row : row + 1]).sample([reply(0, [3] * row)])
        assert step is None or repr(step) == repr(expected)


def test_rows_ahead_are_sampled_for_replies_that_draw_freely() -> None:
    logits = HostLogits(np.random.default_rng(0).normal(size=(8, SIZE)).astype(np.float32))
    free = Sampling(temperature=0.6, top_k=20, top_p=0.95, logprobs=5)
    for sampling in (free, replace(free, logprobs=0), Sampling(), Sampling(temperature=0)):
        assert None not in logits.sample_ahead(0, 8, processor(sampling))
        assert len(logits.sample_ahead(1, 7, processor(sampling))) == 7
    for sampling in (replace(free, repetition_penalty=1.1), replace(free, min_tokens=3), replace(free, typical_p=0.5)):
        assert not logits.sample_ahead(0, 8, processor(sampling))


def test_few_rows_ahead_are_sampled_one_by_one() -> None:
    logits = HostLogits(np.random.default_rng(0).normal(size=(BATCH_ROWS, SIZE)).astype(np.float32))
    assert not logits.sample_ahead(0, BATCH_ROWS, processor(Sampling(temperature=0.6, logprobs=5)))
    assert len(logits.sample_ahead(0, BATCH_ROWS, processor(Sampling(temperature=0)))) == BATCH_ROWS


def test_draws_follow_the_distribution() -> None:
    logits = torch.full((SIZE,), -math.inf)
    logits[[10, 20, 30]] = torch.tensor([0.6, 0.3, 0.1]).log()
    draws = [step(logits, Sampling(seed=seed)).token_id for seed in range(3000)]
    shares = [draws.count(token_id) / len(draws) for token_id in (10, 20, 30)]
    assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.03)


def test_top_p_beyond_the_shortlist_looks_at_everything() -> None:
    size = 5000
    logits = torch.zeros(size)
    prompt = Prompt((1,))
    sampling = Sampling(top_p=0.9, seed=3)
    wide = LogitsProcessor(prompt, sampling, 0, ReplyState(prompt, sampling, VOCABULARY), size)
    (out,) = sample(logits[None], [wide])
    assert isinstance(out, Step)
    assert out.token_id == int(uniform(3, 0, 0) * size)


def test_alternatives_are_the_likeliest_with_the_models_own_logprobs() -> None:
    logits = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    out = step(logits, Sampling(temperature=0, logprobs=3, repetition_penalty=3.0), context=[int(logits.argmax())])
    best = logits.log_softmax(-1).topk(3)
    assert [a.token_id for a in out.alternatives] == best.indices.tolist()
    assert [a.logprob for a in out.alternatives] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_what_it_was_drawn_from_is_reported_beside_the_models_own() -> None:
    logits = torch.full((SIZE,), -20.0)
    logits[[10, 20, 30]] = torch.tensor([0.6, 0.3, 0.1]).log()
    out = step(logits, Sampling(top_k=2, seed=1, logprobs=3))
    assert [a.token_id for a in out.alternatives] == [10, 20, 30]
    shares = {a.token_id: math.exp(a.logprob) for a in out.drawn_from}
    assert shares[10] == pytest.approx(2 / 3, abs=1e-5)
    assert shares[20] == pytest.approx(1 / 3, abs=1e-5)
    assert out.drawn_logprob == pytest.approx(math.log(shares[out.token_id]))
    greedy = step(logits, Sampling(temperature=0, banned_ids=(10,), logprobs=1))
    assert greedy.drawn_logprob == pytest.approx(math.log(0.75), abs=1e-4)
    assert greedy.logprob == pytest.approx(math.log(0.3), abs=1e-4)
    assert step(logits, Sampling()).drawn_logprob is None


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=3, top_p=0.5, min_p=0.1), Sampling(temperature=0)])
def test_not_a_number_fails_its_row_alone(sampling: Sampling) -> None:
    logits = torch.randn(3, SIZE)
    logits[1, 5] = math.nan
    options = [Sampling(), sampling, Sampling(temperature=0)]
    good, bad, greedy = sample(logits, [processor(sampling) for sampling in options])
    assert isinstance(bad, EngineError)
    assert isinstance(good, Step)
    assert isinstance(greedy, Step)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_to_choose_is_an_error_of_the_request(temperature: float) -> None:
    sampling = Sampling(temperature=temperature, banned_ids=tuple(range(SIZE)))
    (out,) = sample(torch.randn(1, SIZE), [processor(sampling)])
    assert isinstance(out, RequestError)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(samplings, st.integers(0, 1000), st.integers(0, 5))
def test_torch_operations_draw_the_same(sampling: Sampling, seed: int, count: int) -> None:
    """What a device without Triton computes. Rounded logits have ties."""
    logits = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(seed)).round(decimals=1)
    sampling = replace(sampling, logprobs=count)
    processors = [processor(sampling, choice=choice) for choice in range(3)]
    expected = sample(logits, processors)
    found = DeviceSampler(torch.device("cpu"), on_device=True).logits(logits).sample(processors)
    assert_same_steps([step.build() if isinstance(step, PendingStep) else step for step in found], expected)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(samplings, min_size=1, max_size=5), st.integers(0, 1000))
def test_a_batch_is_changed_on_the_device_as_each_row_on_the_host(rows: list[Sampling], seed: int) -> None:
    """Over several tokens: the device keeps the counts of a reply, whose company changes."""
    generator = torch.Generator().manual_seed(seed)
    changes = DeviceChanges(torch.device("cpu"))
    processors = [processor(sampling, reply_ids=(90, 91, 90)) for sampling in rows]
    for step in range(4):
        logits = torch.randn(len(processors), SIZE, generator=generator) * 3
        expected = logits.clone()
        for row, one in enumerate(processors):
            one.changes().apply(expected[row].numpy())
        assert torch.equal(changes.apply(logits, [one.changes() for one in processors]), expected)
        for one in processors:
            one.append_token(90 + step)
        if step == 1:
            processors = [processor(rows[0], reply_ids=(95,)), *processors[1:]]


def test_masks_and_long_lists_are_applied_on_the_device_too() -> None:
    size, rng = 1003, np.random.default_rng(0)
    banned = rng.permutation(size)[: MANY_IDS + 1].copy()
    rows = [LogitsChanges(size, banned=[banned]), None, LogitsChanges(size), LogitsChanges(size, banned=[banned])]
    for one in rows[2:]:
        assert one is not None
        one.allow_only(TokenMask.of(rng.random(size) < 0.5))
        one.allow_only(TokenMask.of(rng.random(size) < 0.9))
    logits = torch.randn(len(rows), size, generator=torch.Generator().manual_seed(0))
    expected = logits.clone()
    for row, one in zip(expected, rows, strict=True):
        if one is not None:
            one.apply(row.numpy())
    changes = DeviceChanges(torch.device("cpu"))
    for _ in range(2):
        assert torch.equal(changes.apply(logits, rows), expected)
    assert len(changes._banned._copies) == 1
    del banned, rows, one
    gc.collect()
    assert not changes._banned._copies, "freed with the request"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 20 * BLOCK), st.integers(1, 40), st.sampled_from([0, 1, 3]))
def test_the_likeliest_tokens_are_found_in_order(seed: int, size: int, count: int, decimals: int) -> None:
    """Rounded scores have ties, of which the lower id comes first; banned tokens are minus infinity."""
    scores = np.random.default_rng(seed).normal(size=size).round(decimals).astype(np.float32)
    scores[:: 1 + seed % 5] = -np.inf
    order = sorted(range(size), key=lambda i: (-scores[i], i))
    assert _Row(scores).likeliest(count).tolist() == order[:count]


@pytest.mark.parametrize("allowed", [1, 2, 10, 300])
def test_where_few_tokens_are_allowed_nothing_is_selected_among_all(
    allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numpy's selection takes ten to a hundred times as long where most numbers are equal."""
    size, sampling = 20_000, Sampling(temperature=0.6, top_k=20, top_p=0.95, logprobs=5, seed=1)
    logits = np.full((1, size), -np.inf, dtype=np.float32)
    logits[0, np.random.default_rng(0).permutation(size)[:allowed]] = 1.0
    prompt, sizes, partition = Prompt((1,)), [0], np.partition
    one = LogitsProcessor(prompt, sampling, 0, ReplyState(prompt, sampling, [b"x"] * size), size)

    def recorded(array: Any, *arguments: Any) -> Any:
        sizes.append(len(array))
        return partition(array, *arguments)

    monkeypatch.setattr(np, "partition", recorded)
    (step,) = HostLogits(logits).sample([one])
    assert isinstance(step, Step)
    assert logits[0, step.token_id] == 1.0
    assert len(step.drawn_from) == 5
    assert max(sizes) <= 2 * BLOCK


def test_token_ids_out_of_the_vocabulary_are_refused() -> None:
    for sampling in (Sampling(logit_bias=((SIZE, 1.0),)), Sampling(banned_ids=(-1,))):
        with pytest.raises(BadParameter, match="token ids go from 0"):
            processor(sampling)


def test_banned_text_is_never_completed_by_longer_tokens_either() -> None:
    vocabulary = (b"a", b"b", b"abc", b"bc", b"c", b"<x>", b"cab")
    banned = BannedStrings(["bc"], VocabularyIndex(vocabulary), frozenset({5}))
    assert banned.banned_ids([0]).tolist() == [2, 3]
    assert banned.banned_ids([0, 1]).tolist() == [2, 3, 4, 6]
    assert banned.banned_ids([0, 1, 5]).tolist() == [2, 3]


pieces = st.text("ab\u00e9", min_size=1, max_size=6).map(str.encode)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(
        st.one_of(pieces, st.sampled_from([b"", b"\xff", b"\xc3", b"\xa9", b"aaaaaaaa"])), min_size=1, max_size=20
    ),
    st.lists(st.text("ab\u00e9", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 19), max_size=12),
)
def test_banned_text_against_every_token_tried(
    vocabulary: list[bytes], strings: list[str], reply_ids: list[int]
) -> None:
    reply_ids = [token_id % len(vocabulary) for token_id in reply_ids]
    control = frozenset({0})
    index = VocabularyIndex(vocabulary)
    growing = BannedStrings(strings, index, control)
    for length in range(len(reply_ids) + 1):
        prefix = reply_ids[:length]
        since = b"".join(vocabulary[i] for i in prefix[length - prefix[::-1].index(0) if 0 in prefix else 0 :])
        expected = [
            token_id
            for token_id, text in enumerate(vocabulary)
            if token_id not in control and any(completes(since, text, string.encode()) for string in strings)
        ]
        assert growing.banned_ids(prefix).tolist() == expected
        assert BannedStrings(strings, index, control).banned_ids(prefix).tolist() == expected


def completes(before: bytes, token: bytes, banned: bytes) -> bool:
    """Whether the token writes the last byte of the banned text somewhere."""
    text = before + token
    return any(text[: len(before) + size].endswith(banned) for size in range(1, len(token) + 1))


class Operations(TorchDispatchMode):
    """Counts the tensor operations inside of it."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def count_calls(function: Callable[[], object]) -> int:
    """How many functions are called, of Python and of C, and tensor operations: what it costs on every machine."""
    called = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal called
        called += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    with Operations() as operations:
        function()
    return called + operations.count


GREATEST: dict[str, Sampling] = {
    "logit_bias": Sampling(logit_bias=tuple((i, 0.5) for i in range(MAX_BIASES))),
    "banned_ids": Sampling(banned_ids=tuple(range(MAX_BIASES))),
    "banned_strings": Sampling(
        banned_strings=tuple(f"{'ab' * (MAX_STRING // 2 - 2)}{i:03}" for i in range(MAX_STRINGS))
    ),
    "stop": Sampling(stop=tuple(f"{'ab' * (MAX_STRING // 2 - 2)}{i:03}" for i in range(MAX_STRINGS))),
    "stop_ids": Sampling(stop_ids=tuple(range(MAX_BIASES)), min_tokens=MAX_TOKENS, end_penalty=2.0),
    "penalties": Sampling(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5, min_tokens=MAX_TOKENS),
    "filters": Sampling(top_k=50, top_p=0.9, min_p=0.01, logprobs=20),
}


@pytest.mark.parametrize("name", GREATEST)
def test_the_greatest_inputs_cost_little_at_each_token(name: str) -> None:
    """The engine has one thread: what one request asks for must not keep the others waiting."""
    vocabulary = tuple(f"{i % 50:x}{i:x}".encode() for i in range(5000))
    sampling = check_sampling(GREATEST[name])
    prompt = Prompt(tuple(range(4000)))
    index = VocabularyIndex(vocabulary)
    reply = ReplyState(prompt, sampling, vocabulary, frozenset({1}))
    banned = BannedStrings(sampling.banned_strings, index, frozenset({1})) if sampling.banned_strings else None
    one = LogitsProcessor(prompt, sampling, 0, reply, len(vocabulary), banned)
    logits = torch.randn(1, len(vocabulary), generator=torch.Generator().manual_seed(0))

    def say(token_id: int) -> None:
        sample(logits, [one])
        one.append_token(token_id)

    say(4000)
    counts = [count_calls(lambda: say(token_id)) for token_id in range(2000, 2008)]  # noqa: B023
    assert max(counts) < 500


def test_long_stop_strings_cost_little_to_look_for() -> None:
    assert count_calls(lambda: ReplyState(Prompt((1,)), GREATEST["stop"], VOCABULARY)) < 1000


@pytest.mark.parametrize("name", ["stop", "banned_strings"])
def test_strings_are_bounded(name: str) -> None:
    for strings in (("a" * (MAX_STRING + 1),), ("a",) * (MAX_STRINGS + 1)):
        with pytest.raises(BadParameter, match=f"{name}.*at most"):
            apply_settings(Sampling(), {name: strings})


@pytest.mark.parametrize("name", ["banned_ids", "stop_ids"])
def test_lists_of_ids_are_bounded(name: str) -> None:
    with pytest.raises(BadParameter, match=f"{name}.*at most {MAX_BIASES}"):
        apply_settings(Sampling(), {name: (1,) * (MAX_BIASES + 1)})


def test_a_token_that_was_not_counted_is_counted_later() -> None:
    """Another row of the batch has failed before anything was computed."""
    table, reply_ids = CountTable(torch.device("cpu"), 2), [7, 7]
    counts = TokenCounts([1, 7], reply_ids, 10)
    expected = torch.tensor([0, 1, 0, 0, 0, 0, 0, 5, 0, 0], dtype=torch.int32)
    assert torch.equal(table.rows([counts], 10)[0], expected)
    reply_ids.append(3)
    assert table.find(counts)[1] == 3
    table.clear()
    reply_ids.append(4)
    expected[[3, 4]] = 2
    assert torch.equal(table.rows([counts], 10)[0], expected)
