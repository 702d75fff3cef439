"""The draws of the samplers against a plain reference, and each filter by itself."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palaver.engines.core.dry import DryPenalty
from palaver.engines.core.generation import PendingStep
from palaver.engines.core.logits_processor import LogitsProcessor
from palaver.engines.core.reply_state import ReplyState
from palaver.engines.core.rng import XTC_STREAM, uniform
from palaver.engines.core.sampler import HostLogits
from palaver.engines.core.token_masks import VocabularyIndex
from palaver.engines.torch.device_changes import DeviceChanges
from palaver.engines.torch.device_sampler import DeviceSampler
from palaver.generation import Prompt, Step
from palaver.sampling import Sampling
from tests.engines.sampling_reference import ReferenceDraw, dry_penalties

MARGIN = 1e-6
"""Draws and filters this near to a boundary may fall on either side of it."""


def processor(sampling: Sampling, size: int, choice: int = 0) -> LogitsProcessor:
    prompt = Prompt((1, 2, 3))
    return LogitsProcessor(prompt, sampling, choice, ReplyState(prompt, sampling, [b"x"] * size), size)


def random_sampling(rng: random.Random) -> Sampling:
    """Two or three settings away from the plain distribution."""
    options: dict[str, list[Any]] = {
        "temperature": [0.3, 0.6, 1.5],
        "top_k": [1, 2, 20, 40, 1500],
        "top_p": [0.95, 0.5, 0.0],
        "min_p": [0.02, 0.3, 1e-7],
        "typical_p": [0.9, 0.3],
        "top_a": [0.1, 0.9, 1e-9],
        "xtc_probability": [0.5, 1.0],
        "xtc_threshold": [0.05, 0.2],
        "dynatemp_range": [0.3, 1.0],
        "dynatemp_exponent": [0.5, 2.0],
    }
    chosen = rng.sample(sorted(options), rng.choice([1, 2, 2, 3, 4]))
    values = {name: rng.choice(options[name]) for name in chosen}
    return replace(Sampling(seed=rng.randrange(2**63)), **values)


def random_rows(rng: random.Random, count: int) -> list[np.ndarray[tuple[int], np.dtype[np.float32]]]:
    """Rows of one size: flat, peaked and with a few likely tokens."""
    size = rng.choice([200, 3000, 20_000])
    numbers = np.random.default_rng(rng.randrange(2**32))
    spread = rng.choice([1.0, 3.0, 6.0])
    return [(numbers.standard_normal(size) * spread).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("seed", range(6))
def test_the_same_draws_as_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    differing = 0
    for _ in range(40):
        rows, sampling = random_rows(rng, 2), random_sampling(rng)
        processors = [processor(sampling, len(row), choice) for choice, row in enumerate(rows)]
        for row, one, step in zip(rows, processors, HostLogits(np.stack(rows)).sample(processors), strict=True):
            assert isinstance(step, Step)
            reference = ReferenceDraw(row, sampling, one.xtc_uniform(), MARGIN)
            expected, close = reference.draw(one.uniform())
            assert close or step.token_id == expected
            differing += step.token_id != expected
    assert differing <= 1


@pytest.mark.parametrize("seed", range(3))
def test_the_same_draws_on_the_device(seed: int) -> None:
    """With torch's operations, which a device uses for the rarer filters."""
    rng = random.Random(100 + seed)
    for _ in range(30):
        rows, sampling = random_rows(rng, 2), replace(random_sampling(rng), logprobs=rng.choice([0, 5]))
        processors = [processor(sampling, len(row), choice) for choice, row in enumerate(rows)]
        logits = np.stack(rows)
        steps = DeviceSampler(torch.device("cpu"), on_device=True).logits(torch.from_numpy(logits)).sample(processors)
        for row, one, mine, host in zip(rows, processors, steps, HostLogits(logits).sample(processors), strict=True):
            mine = mine.build() if isinstance(mine, PendingStep) else mine
            assert isinstance(mine, Step)
            assert isinstance(host, Step)
            close = ReferenceDraw(row, sampling, one.xtc_uniform(), MARGIN).draw(one.uniform())[1]
            assert close or mine.token_id == host.token_id
            if not close:
                assert mine.drawn_logprob == pytest.approx(host.drawn_logprob, abs=1e-4)
                assert [a.logprob for a in mine.drawn_from] == pytest.approx(
                    [a.logprob for a in host.drawn_from], abs=1e-4
                )


def drawn(logits: Sequence[float], sampling: Sampling) -> dict[int, float]:
    """The probabilities from which a token is drawn, as they are reported."""
    row = np.array([logits], dtype=np.float32)
    (step,) = HostLogits(row).sample([processor(replace(sampling, logprobs=len(logits)), len(logits))])
    assert isinstance(step, Step)
    return {a.token_id: math.exp(a.logprob) for a in step.drawn_from if a.logprob > -math.inf}


LOGITS = [math.log(p) for p in (0.5, 0.25, 0.15, 0.06, 0.04)]


def test_each_filter_by_itself() -> None:
    assert set(drawn(LOGITS, Sampling(top_a=0.3))) == {0, 1, 2}, "at least 0.3 * 0.5 * 0.5 = 0.075"
    assert set(drawn(LOGITS, Sampling(xtc_probability=1.0, xtc_threshold=0.1))) == {2, 3, 4}, "0.15 is the last choice"
    assert set(drawn(LOGITS, Sampling(xtc_probability=1.0, xtc_threshold=0.3))) == {0, 1, 2, 3, 4}, "one choice stays"
    entropy = -sum(math.exp(x) * x for x in LOGITS)
    assert abs(math.log(4) - entropy) < abs(math.log(2) - entropy), "the second token is the most typical one"
    assert set(drawn(LOGITS, Sampling(typical_p=0.2))) == {1}
    assert set(drawn(LOGITS, Sampling(typical_p=0.6))) == {0, 1}


def test_a_dynamic_temperature_follows_the_entropy() -> None:
    entropy = -sum(math.exp(x) * x for x in LOGITS) / math.log(len(LOGITS))
    temperature = 0.5 + 1.0 * entropy**2
    weights = [math.exp(x / temperature) for x in LOGITS]
    expected = {i: weight / sum(weights) for i, weight in enumerate(weights)}
    assert drawn(LOGITS, Sampling(dynatemp_range=0.5, dynatemp_exponent=2.0)) == pytest.approx(expected, abs=1e-5)
    assert drawn([1.0] * 4, Sampling(dynatemp_range=0.9)) == pytest.approx(dict.fromkeys(range(4), 0.25))
    assert drawn([60.0, 0.0, 0.0], Sampling(temperature=0.5, dynatemp_range=2.0)) == pytest.approx({0: 1.0})


def test_xtc_applies_as_often_as_it_says() -> None:
    numbers = [uniform(seed, 0, 0, XTC_STREAM) for seed in range(2000)]
    assert sum(number < 0.3 for number in numbers) / len(numbers) == pytest.approx(0.3, abs=0.04)
    own = [uniform(seed, 0, 0) for seed in range(2000)]
    assert abs(float(np.corrcoef(numbers, own)[0, 1])) < 0.1, "independent of the number that draws the token"


VOCABULARY = [b"a", b"b", b"c", b"ab", b"\n", b"x:", b"<", b">", b" *", b"d"]
DRY = Sampling(dry_multiplier=0.8, dry_sequence_breakers=("\n", ":", "*", "<>"))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([0, 0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9]), min_size=1, max_size=40),
    st.integers(0, 40),
    st.sampled_from([-1, -1, 0, 1, 5, 12]),
    st.integers(1, 3),
)
def test_dry_against_every_place_compared(ids: list[int], at: int, last_n: int, allowed: int) -> None:
    """And however many of the tokens come one after the other: a continued reply has the penalties of an uncut one."""
    sampling = replace(DRY, dry_penalty_last_n=last_n, dry_allowed_length=allowed)
    dry = DryPenalty(sampling, VocabularyIndex(VOCABULARY), len(VOCABULARY))
    dry.extend(ids[:at])
    for token_id in ids[at:]:
        dry.append(token_id)
    found, values = dry.penalties()
    expected = dry_penalties(ids, VOCABULARY, sampling)
    assert dict(zip(found.tolist(), (-values).tolist(), strict=True)) == pytest.approx(expected, rel=1e-5)


def test_dry_makes_a_repetition_less_likely() -> None:
    prompt = Prompt((0, 1, 2, 9, 0, 1))
    reply = ReplyState(prompt, DRY, VOCABULARY)
    dry = DryPenalty(DRY, VocabularyIndex(VOCABULARY), len(VOCABULARY))
    one = LogitsProcessor(prompt, DRY, 0, reply, len(VOCABULARY), dry=dry)
    scores = np.zeros(len(VOCABULARY), dtype=np.float32)
    one.changes().apply(scores)
    assert scores.tolist() == pytest.approx([0, 0, -0.8, 0, 0, 0, 0, 0, 0, 0])
    one.append_token(2)
    scores[:] = 0
    one.changes().apply(scores)
    assert scores[9] == pytest.approx(-0.8 * 1.75)
    on_device = DeviceChanges(torch.device("cpu")).apply(torch.zeros(1, len(VOCABULARY)), [one.changes()])
    assert torch.equal(on_device[0], torch.from_numpy(scores))


def test_a_long_repetition_takes_a_bounded_penalty() -> None:
    dry = DryPenalty(replace(DRY, dry_base=10.0), VocabularyIndex(VOCABULARY), len(VOCABULARY))
    dry.extend([0] * 3000)
    for _ in range(5):
        dry.append(0)
    ids, values = dry.penalties()
    assert ids.tolist() == [0]
    assert np.isfinite(values).all()
