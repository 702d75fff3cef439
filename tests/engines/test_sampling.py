import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palaver.engines.reply import Reply
from palaver.engines.torch.banned import BannedText, Spelling
from palaver.engines.torch.chooser import Chooser
from palaver.engines.torch.dice import uniform
from palaver.engines.torch.drawing import _draw_from_afar, draw
from palaver.engines.torch.sampling import choose
from palaver.errors import BadParameter, EngineError, RequestError
from palaver.generation import Prompt, Step
from palaver.sampling import Sampling
from tests.engines import reference
from tests.engines.tiny import END, SIZE, VOCABULARY

SPELLING = Spelling(VOCABULARY)


def chooser(
    sampling: Sampling, context: Sequence[int] = (1, 2, 3), said: Sequence[int] = (), choice: int = 0
) -> Chooser:
    prompt = Prompt(tuple(context), tuple(said))
    reply = Reply(prompt, sampling, VOCABULARY, frozenset({END}), 4096)
    banned = BannedText(sampling.banned_strings, SPELLING, frozenset({END})) if sampling.banned_strings else None
    return Chooser(prompt, sampling, choice, reply, SIZE, banned)


def step(logits: torch.Tensor, sampling: Sampling, context: Sequence[int] = (1, 2, 3)) -> Step:
    (out,) = choose(logits[None], [chooser(sampling, context)])
    assert isinstance(out, Step)
    return out


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
    choosers = [chooser(sampling, said=said) for sampling, said in rows]
    for row, (out, (sampling, said)) in enumerate(zip(choose(logits, choosers), rows, strict=True)):
        scores = reference._adjust(logits[row].tolist(), [1, 2, 3], choosers[row].reply, sampling)
        expected, close = reference._choose(scores, sampling, uniform(sampling.seed, 0, len(said)))
        assert isinstance(out, Step)
        assert close or out.token_id == expected
        assert out.logprob == pytest.approx(float(logits[row].log_softmax(-1)[out.token_id]), abs=1e-5)


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
    wide = Chooser(prompt, sampling, 0, Reply(prompt, sampling, VOCABULARY), size)
    (out,) = choose(logits[None], [wide])
    assert isinstance(out, Step)
    assert out.token_id == int(uniform(3, 0, 0) * size)


def test_alternatives_are_the_likeliest_with_the_models_own_logprobs() -> None:
    logits = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    out = step(logits, Sampling(temperature=0, logprobs=3, repetition_penalty=3.0), context=[int(logits.argmax())])
    best = logits.log_softmax(-1).topk(3)
    assert [a.token_id for a in out.alternatives] == best.indices.tolist()
    assert [a.logprob for a in out.alternatives] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_what_it_was_drawn_from_is_told_beside_the_models_own() -> None:
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
    good, bad, greedy = choose(logits, [chooser(sampling) for sampling in options])
    assert isinstance(bad, EngineError)
    assert isinstance(good, Step)
    assert isinstance(greedy, Step)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_to_choose_is_an_error_of_the_request(temperature: float) -> None:
    sampling = Sampling(temperature=temperature, banned_ids=tuple(range(SIZE)))
    (out,) = choose(torch.randn(1, SIZE), [chooser(sampling)])
    assert isinstance(out, RequestError)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(samplings, st.integers(0, 1000))
def test_the_likeliest_alone_give_the_same_draw(sampling: Sampling, seed: int) -> None:
    """What an accelerator sends over instead of whole rows."""
    sampling = replace(sampling, temperature=sampling.temperature or 1.0)
    logits = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(seed)).round(decimals=1)
    uniforms = [uniform(seed, row, 0) for row in range(3)]
    assert _draw_from_afar(logits, [sampling] * 3, uniforms) == draw(logits, [sampling] * 3, uniforms)


def test_token_ids_out_of_the_vocabulary_are_refused() -> None:
    for sampling in (Sampling(logit_bias=((SIZE, 1.0),)), Sampling(banned_ids=(-1,))):
        with pytest.raises(BadParameter, match="token ids here go from 0"):
            chooser(sampling)


def test_banned_text_is_never_completed_by_longer_tokens_either() -> None:
    vocabulary = (b"a", b"b", b"abc", b"bc", b"c", b"<x>", b"cab")
    banned = BannedText(["bc"], Spelling(vocabulary), frozenset({5}))
    assert banned.ids([0]) == [2, 3]
    assert banned.ids([0, 1]) == [2, 3, 4, 6]
    assert banned.ids([1, 5]) == [2, 3]
