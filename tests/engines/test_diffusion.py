"""The diffusion engine gives the tokens of a plain, slow reference: for any steps, blocks and seeds, cut anywhere."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.cache_utils import DynamicCache

from palaver.engines.core.options import EngineOptions
from palaver.engines.core.rng import uniform
from palaver.engines.diffusion.block import STREAM
from palaver.engines.diffusion.config import find_diffusion, read_diffusion_config
from palaver.engines.diffusion.engine import DiffusionEngine, load, model_engine
from palaver.engines.diffusion.model import PassSegment
from palaver.errors import BadParameter, BrokenModel, ContextOverflow
from palaver.generation import Draft, Ended, Finish, Output, Prefilled, Prompt, Step
from palaver.phases import Phase, Phases, State, Trigger
from palaver.sampling import Sampling

SIZE, END, MASK, THINK_END = 96, 95, 94, 93
VOCABULARY = tuple(bytes([32 + id]) for id in range(SIZE))
PROMPT = Prompt(tuple(range(3, 60)))
GREEDY = Sampling(temperature=0.0, max_tokens=40)
DRAWN = Sampling(temperature=0.9, max_tokens=40, seed=11)
CAUSAL = {"mask_token_id": MASK, "attention": "block_causal", "block_length": 8, "steps": 8}
FULL = {"mask_token_id": MASK, "tokens": 24, "steps": 12}


def make_folder(folder: Path, diffusion: dict[str, Any] | None, kind: type = Qwen3ForCausalLM, seed: int = 0) -> Path:
    """A small random model. Its weights are large enough that what it sees decides the tokens."""
    torch.manual_seed(seed)
    common: dict[str, Any] = {
        "vocab_size": SIZE, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 512,
        "eos_token_id": END, "bos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    config = Qwen3Config(**common) if kind is Qwen3ForCausalLM else LlamaConfig(**common)
    model = kind(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=1.6 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    if diffusion is not None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"diffusion": diffusion}))
    return folder


def load_double(folder: Path) -> Any:
    """In 64 bits: the engine and its reference add in other orders, and no rounding shall decide a token."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").eval()


class Reference:
    """Denoises the slow way: every step computes the whole text again, with a mask written out."""

    def __init__(self, folder: Path) -> None:
        self.model = load_double(folder)
        settings = find_diffusion(folder)
        assert settings is not None
        self.config = read_diffusion_config(folder, settings, SIZE)

    @torch.no_grad()
    def logits(self, ids: Sequence[int], context: int) -> torch.Tensor:
        """Row i has the logits of token `context` + i."""
        length = len(ids)
        seen = torch.ones(length, length, dtype=torch.bool)
        if self.config.attention == "block_causal":
            seen = seen.tril()
            seen[context:, context:] = True
        out = self.model(input_ids=torch.tensor([ids]), attention_mask=seen[None, None])
        shift = int(self.config.shift)
        return out.logits[0, context - shift : length - shift].float()

    def reply(self, prompt: Prompt, sampling: Sampling) -> list[int]:
        context, reply = list(prompt.context_ids), list[int]()
        full = self.config.attention == "bidirectional"
        room = (sampling.max_tokens or self.config.tokens) if full else 512 - len(context)
        size = min(sampling.block_length or self.config.block_length or room, room)
        while len(reply) < (sampling.max_tokens or room) and END not in reply:
            count = min(size, room - len(reply))
            behind = room - len(reply) - count if full else 0
            reply += self.block(context + reply, count, behind, len(reply), sampling)
        reply = reply[: reply.index(END) + 1] if END in reply else reply
        return reply[: sampling.max_tokens]

    def block(self, before: list[int], count: int, behind: int, start: int, sampling: Sampling) -> list[int]:
        tokens: list[int | None] = [None] * count
        steps = min(sampling.steps or self.config.steps, count)
        for step in range(steps):
            masked = [at for at in range(count) if tokens[at] is None]
            if not masked:
                break
            ids = before + [MASK if token is None else token for token in tokens] + [MASK] * behind
            shares, chosen = {}, {}
            logits = self.logits(ids, len(before))
            logits[:, MASK] = -torch.inf
            for at in masked:
                row = logits[at].softmax(-1)
                if sampling.temperature == 0:
                    chosen[at] = int(row.argmax())
                else:
                    warm = (logits[at].double() / sampling.temperature).softmax(-1)
                    number = uniform(sampling.seed, 0, start + at, STREAM + step)
                    chosen[at] = int((warm.cumsum(-1) <= number).sum())
                entropy = -float((row[row > 0] * row[row > 0].log()).sum())
                shares[at] = float(row[chosen[at]]) if sampling.remasking == "confidence" else -entropy
            order = sorted(masked, key=lambda at: (-shares[at], at))
            for at in order[: max(1, len(masked) // (steps - step))]:
                tokens[at] = chosen[at]
        return [token for token in tokens if token is not None]


class ApproximateReference(Reference):
    """The same with the library's cache: the first step of a block fills it, the others keep the text before."""

    kept: DynamicCache | None = None

    @torch.no_grad()
    def logits(self, ids: Sequence[int], context: int) -> torch.Tensor:
        shift, length = int(self.config.shift), len(ids)
        cache = DynamicCache() if self.kept is None else copy.deepcopy(self.kept)
        start = cache.get_seq_length()
        out = self.model(
            input_ids=torch.tensor([ids[start:]]),
            position_ids=torch.arange(start, length)[None],
            attention_mask=torch.ones(1, 1, length - start, length, dtype=torch.bool),
            past_key_values=cache,
        )
        if self.kept is None:
            self.kept = DynamicCache()
            for layer, one in enumerate(cache.layers):
                self.kept.update(one.keys[:, :, : context - shift], one.values[:, :, : context - shift], layer)
        return out.logits[0, context - shift - start : length - shift - start].float()

    def block(self, before: list[int], count: int, behind: int, start: int, sampling: Sampling) -> list[int]:
        self.kept = None
        return super().block(before, count, behind, start, sampling)


@dataclass
class Loaded:
    engine: DiffusionEngine
    reference: Reference

    def run(self, prompt: Prompt, sampling: Sampling, stop_after: int | None = None) -> list[Output]:
        return asyncio.run(collect(self.engine, prompt, sampling, stop_after))

    def tokens(self, prompt: Prompt, sampling: Sampling) -> list[int]:
        return tokens_of(self.run(prompt, sampling))


async def collect(
    engine: DiffusionEngine, prompt: Prompt, sampling: Sampling, stop_after: int | None = None
) -> list[Output]:
    """All outputs; stopped after so many drafts."""
    outputs: list[Output] = []
    async with engine.generate(prompt, sampling) as generation:
        async for output in generation:
            outputs.append(output)
            if stop_after is not None and sum(isinstance(one, Draft) for one in outputs) == stop_after:
                stop_after = None
                generation.stop()
    return outputs


def tokens_of(outputs: Sequence[Output]) -> list[int]:
    return [output.token_id for output in outputs if isinstance(output, Step)]


def load_folder(folder: Path, approximate: bool = False) -> Loaded:
    reference = ApproximateReference(folder) if approximate else Reference(folder)
    options = EngineOptions(threads=1, approximate_cache=approximate)
    engine = model_engine(folder.name, load_double(folder), reference.config, VOCABULARY, options)
    return Loaded(engine, reference)


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    loaded = load_folder(make_folder(tmp_path_factory.mktemp("causal"), CAUSAL))
    yield loaded
    asyncio.run(loaded.engine.close())


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    loaded = load_folder(make_folder(tmp_path_factory.mktemp("full"), FULL))
    yield loaded
    asyncio.run(loaded.engine.close())


@pytest.fixture(scope="module")
def approximate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    loaded = load_folder(make_folder(tmp_path_factory.mktemp("approximate"), FULL), approximate=True)
    yield loaded
    asyncio.run(loaded.engine.close())


KINDS = ["causal", "full", "approximate"]
SETTINGS = [
    GREEDY,
    DRAWN,
    replace(DRAWN, steps=1),
    replace(DRAWN, steps=3, seed=5),
    replace(DRAWN, block_length=13, steps=5),
    replace(DRAWN, remasking="entropy", seed=2),
    replace(GREEDY, steps=10_000, block_length=5),
    replace(GREEDY, block_length=64),
]


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_gives_the_same_tokens(kind: str, sampling: Sampling, request: pytest.FixtureRequest) -> None:
    loaded: Loaded = request.getfixturevalue(kind)
    expected = loaded.reference.reply(PROMPT, sampling)
    outputs = loaded.run(PROMPT, sampling)
    assert tokens_of(outputs) == expected
    ended = outputs[-1]
    assert isinstance(ended, Ended)
    assert ended.finish is (Finish.END if expected[-1] == END else Finish.LENGTH)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize(("settings", "approximate"), [(CAUSAL, False), (FULL, False), (FULL, True)])
def test_random_models_agree_with_the_reference(
    tmp_path: Path, settings: dict[str, Any], approximate: bool, shift: bool, seed: int
) -> None:
    kind = LlamaForCausalLM if seed % 2 else Qwen3ForCausalLM
    loaded = load_folder(make_folder(tmp_path, settings | {"shift": shift}, kind, seed), approximate)
    prompt = Prompt(tuple(torch.randint(0, 90, (1 + 67 * seed,)).tolist()))
    sampling = replace(DRAWN, seed=seed, steps=1 + 3 * seed, max_tokens=30)
    assert loaded.tokens(prompt, sampling) == loaded.reference.reply(prompt, sampling)
    asyncio.run(loaded.engine.close())


@pytest.mark.parametrize("kind", KINDS)
def test_random_settings_agree_with_the_reference(kind: str, request: pytest.FixtureRequest) -> None:
    loaded: Loaded = request.getfixturevalue(kind)
    draw = random.Random(kind)
    for block_length in (1, 2, 5, 8, 13, 40):
        sampling = Sampling(
            temperature=draw.choice((0.0, 0.4, 1.3)),
            seed=draw.randrange(2**40),
            max_tokens=draw.randrange(1, 33),
            block_length=block_length,
            steps=draw.randrange(1, 25),
            remasking=draw.choice(("confidence", "entropy")),
        )
        prompt = Prompt(tuple(draw.randrange(90) for _ in range(draw.randrange(1, 200))))
        assert loaded.tokens(prompt, sampling) == loaded.reference.reply(prompt, sampling), sampling


@pytest.mark.parametrize("sampling", [GREEDY, replace(DRAWN, steps=3)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_cut_at_any_token_goes_on_as_uncut(
    kind: str, sampling: Sampling, request: pytest.FixtureRequest
) -> None:
    loaded: Loaded = request.getfixturevalue(kind)
    sampling = replace(sampling, block_length=8, max_tokens=24)
    uncut = loaded.tokens(PROMPT, sampling)
    for cut in range(len(uncut)):
        prompt = replace(PROMPT, reply_ids=tuple(uncut[:cut]))
        assert loaded.tokens(prompt, sampling) == uncut[cut:], cut


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_stopped_at_any_step_keeps_whole_blocks_and_goes_on_as_uncut(
    kind: str, request: pytest.FixtureRequest
) -> None:
    loaded: Loaded = request.getfixturevalue(kind)
    sampling = replace(DRAWN, block_length=8, max_tokens=24)
    uncut = loaded.run(PROMPT, sampling)
    drafts = sum(isinstance(output, Draft) for output in uncut)
    for step in range(1, drafts + 1):
        outputs = loaded.run(PROMPT, sampling, stop_after=step)
        tokens = tokens_of(outputs)
        assert outputs[-1] in (Ended(Finish.STOPPED), uncut[-1])
        assert len(tokens) % 8 == 0 or tokens == tokens_of(uncut)
        rest = loaded.tokens(replace(PROMPT, reply_ids=tuple(tokens)), sampling)
        assert tokens + rest == tokens_of(uncut), step


def test_the_approximate_cache_is_off_unless_it_is_chosen(full: Loaded, approximate: Loaded) -> None:
    plain, chosen = full.engine.info, approximate.engine.info
    assert plain.reuse == "none: every token sees the whole text"
    assert chosen.reuse.startswith("approximate: ")
    assert plain.fingerprint.startswith("diffusion/")
    assert chosen.fingerprint == plain.fingerprint.replace("diffusion/", "diffusion-approximate/")
    sampling = replace(GREEDY, block_length=8)
    assert approximate.tokens(PROMPT, sampling) != full.tokens(PROMPT, sampling)
    one_step = replace(sampling, steps=1)
    assert approximate.tokens(PROMPT, one_step) == full.tokens(PROMPT, one_step), "the first step is exact"


def test_the_approximate_cache_is_refused_where_reuse_is_exact(tmp_path: Path) -> None:
    folder, options = make_folder(tmp_path, CAUSAL), EngineOptions(approximate_cache=True)
    with pytest.raises(BadParameter, match=r"--approximate-cache .*: the blocks of this model see nothing behind them"):
        load(folder, vocabulary=VOCABULARY, device="cpu", options=options)


def test_given_tokens_that_the_model_would_not_write_are_kept(causal: Loaded) -> None:
    given = (7, 8, 9)
    reply = causal.tokens(replace(PROMPT, reply_ids=given), GREEDY)
    uncut = causal.tokens(PROMPT, GREEDY)
    assert uncut[:3] != list(given)
    assert reply != uncut[3:]
    again = causal.tokens(replace(PROMPT, reply_ids=(*given, *reply[:2])), GREEDY)
    assert len(again) == len(reply) - 2


def test_drafts_show_the_block_settle(causal: Loaded) -> None:
    outputs = causal.run(PROMPT, DRAWN)
    tokens = tokens_of(outputs)
    assert isinstance(outputs[0], Prefilled)
    for position in range(0, len(tokens) // 8 * 8, 8):
        drafts = [output for output in outputs if isinstance(output, Draft) and output.position == position]
        assert [draft.token_ids.count(None) for draft in drafts] == list(range(7, -1, -1))
        assert all(0 <= value <= 1 for draft in drafts for value in draft.confidence)
        shown: dict[int, int] = {}
        for draft in drafts:
            for at, token in enumerate(draft.token_ids):
                assert shown.get(at, token) == token, "a token that was shown changed"
                if token is not None:
                    shown[at] = token
        assert [shown[at] for at in range(8)] == tokens[position : position + 8]


@pytest.mark.parametrize("kind", KINDS)
def test_replies_are_the_same_alone_and_together(kind: str, request: pytest.FixtureRequest) -> None:
    loaded: Loaded = request.getfixturevalue(kind)
    prompts = [Prompt(tuple(id % 90 for id in range(2, 9 + 31 * at))) for at in range(3)]
    cases = [(prompt, replace(DRAWN, seed=seed)) for prompt in prompts for seed in range(3)]
    alone = [loaded.tokens(*case) for case in cases]

    async def together() -> list[list[Output]]:
        return await asyncio.gather(*(collect(loaded.engine, *case) for case in cases))

    assert [tokens_of(outputs) for outputs in asyncio.run(together())] == alone
    assert len({tuple(tokens) for tokens in alone}) == len(cases)


@pytest.mark.parametrize("rounds_differently", [False, True])
def test_blocks_share_a_pass_where_that_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds_differently: bool
) -> None:
    loaded = load_folder(make_folder(tmp_path, CAUSAL))
    model, shared = loaded.engine._scheduler._model, list[int]()
    assert model is not None
    run = model.run

    def counted(segments: Sequence[PassSegment]) -> list[torch.Tensor]:
        shared.append(len(segments))
        rounding = 1e-3 if rounds_differently and len(segments) > 1 else 0.0
        return [logits + rounding for segment in segments for logits in run([segment])]

    monkeypatch.setattr(model, "run", counted)
    cases = [(Prompt(PROMPT.context_ids[at:]), replace(DRAWN, seed=at, banned_ids=(END,))) for at in range(3)]
    alone = [loaded.run(*case) for case in cases]
    assert set(shared) == {1}

    async def together() -> list[list[Output]]:
        return await asyncio.gather(*(collect(loaded.engine, *case) for case in cases))

    steps = [[o for o in outputs if isinstance(o, Step)] for outputs in asyncio.run(together())]
    assert steps == [[o for o in outputs if isinstance(o, Step)] for outputs in alone]
    assert max(shared) == 3
    assert (shared.count(3) == 1) is rounds_differently, "tried once and then left, or used"
    asyncio.run(loaded.engine.close())


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_share_a_pass_give_the_same_tokens(kind: str, request: pytest.FixtureRequest) -> None:
    loaded: Loaded = request.getfixturevalue(kind)
    cases = [
        (Prompt(tuple(id % 90 for id in range(2, 9 + 40 * at))), replace(DRAWN, seed=at, block_length=8))
        for at in range(4)
    ]
    alone = [loaded.tokens(*case) for case in cases]

    async def together() -> list[list[Output]]:
        return await asyncio.gather(*(collect(loaded.engine, *case) for case in cases))

    loaded.engine._scheduler._batched = True
    try:
        assert [tokens_of(outputs) for outputs in asyncio.run(together())] == alone
    finally:
        loaded.engine._scheduler._batched = False


def test_the_context_is_computed_once(causal: Loaded) -> None:
    prompt = Prompt(tuple(at % 90 for at in range(300)), conversation="c")
    first = causal.run(prompt, GREEDY)
    again = causal.run(prompt, GREEDY)
    longer = causal.run(Prompt((*prompt.context_ids, 5, 6, 7)), GREEDY)
    cached = [
        output.cached_tokens
        for outputs in (first, again, longer)
        for output in outputs
        if isinstance(output, Prefilled)
    ]
    assert cached == [0, 300, 256]
    assert tokens_of(again) == tokens_of(first)
    assert [o for o in again if isinstance(o, Step)] == [o for o in first if isinstance(o, Step)]
    other = causal.run(replace(prompt, owner="someone"), GREEDY)
    assert next(output.cached_tokens for output in other if isinstance(output, Prefilled)) == 0
    asyncio.run(causal.engine.forget("c"))
    assert next(o.cached_tokens for o in causal.run(prompt, GREEDY) if isinstance(o, Prefilled)) == 256


def thinking_prompt() -> Prompt:
    thought = State(Phase.THINKING, (Trigger(THINK_END, 1),), closing=(90, THINK_END, 91))
    return replace(PROMPT, phases=Phases((thought, State(Phase.ANSWER)), 0))


def test_a_thinking_budget_closes_the_thought_and_holds_at_every_cut(causal: Loaded) -> None:
    sampling = replace(DRAWN, thinking_budget=5, banned_ids=(THINK_END, END), max_tokens=32)
    uncut = causal.tokens(thinking_prompt(), sampling)
    assert uncut[5:8] == [90, THINK_END, 91]
    for cut in range(len(uncut)):
        prompt = replace(thinking_prompt(), reply_ids=tuple(uncut[:cut]))
        assert causal.tokens(prompt, sampling) == uncut[cut:], cut


def test_parameters_change_the_tokens(causal: Loaded) -> None:
    uncut = causal.tokens(PROMPT, GREEDY)
    banned = causal.tokens(PROMPT, replace(GREEDY, banned_ids=(uncut[0],)))
    assert uncut[0] not in banned
    assert END not in causal.tokens(PROMPT, replace(GREEDY, logit_bias=((END, 100.0),), min_tokens=12))[:12]
    assert causal.tokens(PROMPT, replace(GREEDY, logit_bias=((END, 1000.0),))) == [END]
    unlikely = replace(GREEDY, logit_bias=((END, 1000.0),), end_penalty=1e6)
    with pytest.raises(BadParameter, match="end_penalty must be between"):
        causal.tokens(PROMPT, unlikely)
    assert END not in causal.tokens(PROMPT, replace(unlikely, end_penalty=100.0, logit_bias=((END, 20.0),)))
    steps = [o for o in causal.run(PROMPT, replace(GREEDY, logprobs=3)) if isinstance(o, Step)]
    assert all(len(step.alternatives) == 3 and step.alternatives[0].logprob >= step.logprob for step in steps)
    stopped = causal.run(PROMPT, replace(GREEDY, stop=((VOCABULARY[uncut[2]] + VOCABULARY[uncut[3]]).decode(),)))
    assert tokens_of(stopped) == uncut[:4]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"top_p": 0.9}, "top_p 0.9: is not for diffusion models"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"steps": 0}, "steps must be between 1 and 10,000"),
        ({"steps": 10_001}, "steps must be between 1 and 10,000"),
        ({"block_length": 0}, "block_length must be between 1 and 100,000"),
        ({"remasking": "luck"}, "remasking must be confidence or entropy"),
        ({"temperature": 6.0}, "temperature must be between 0 and 5"),
    ],
)
def test_bad_parameters_are_named(causal: Loaded, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadParameter, match=sentence):
        causal.engine.generate(PROMPT, replace(GREEDY, **change))


def test_models_without_a_mask_token_are_refused(tmp_path: Path) -> None:
    plain = make_folder(tmp_path / "plain", None)
    with pytest.raises(BrokenModel, match="names no mask token"):
        load(plain, vocabulary=VOCABULARY, device="cpu")
    with pytest.raises(BrokenModel, match="names no mask token"):
        load(plain, vocabulary=VOCABULARY, device="cpu", trained={"num_diffusion_steps": 64})
    with pytest.raises(BrokenModel, match=f"the mask token {SIZE} is not in the model's 96 tokens"):
        load(plain, vocabulary=VOCABULARY, device="cpu", trained={"mask_token_id": SIZE})
    with pytest.raises(BrokenModel, match="steps must be a whole number from 1 to 10,000"):
        load(plain, vocabulary=VOCABULARY, device="cpu", trained={"mask_token_id": MASK, "steps": 20_000})


def test_a_text_is_no_longer_than_the_sliding_window(tmp_path: Path) -> None:
    """Inside the window every token sees every other one, so the tokens are those of a model without a window."""
    plain, sliding = make_folder(tmp_path / "plain", CAUSAL), make_folder(tmp_path / "sliding", CAUSAL)
    path = sliding / "config.json"
    layers = {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | layers))
    engine, other = load_folder(sliding), load_folder(plain)
    assert engine.engine.info.context_length == 64
    assert other.engine.info.context_length == 512
    short = Prompt(PROMPT.context_ids[:30])
    sampling = replace(DRAWN, max_tokens=32, banned_ids=(END,))
    assert engine.tokens(short, sampling) == other.tokens(short, sampling)
    with pytest.raises(ContextOverflow):
        engine.tokens(Prompt(tuple(range(3, 80))), DRAWN)
    for loaded in (engine, other):
        asyncio.run(loaded.engine.close())


def test_unknown_kinds_of_attention_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, CAUSAL)
    model = load_double(folder)
    model.config.layer_types = ["full_attention", "chunked_attention"]
    settings = read_diffusion_config(folder, CAUSAL, SIZE)
    with pytest.raises(BrokenModel, match="can't be run as a diffusion model: it has layers of the kind chunked"):
        model_engine(folder.name, model, settings, VOCABULARY, EngineOptions(threads=1))


def test_the_settings_of_axolotl_are_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 7, "content": "<|mask|>"}]}))
    trained = {"num_diffusion_steps": 64, "generation_temperature": 0.5, "mask_token_str": "<|mask|>"}
    config = read_diffusion_config(tmp_path, trained, SIZE)
    assert (config.mask_id, config.steps, config.temperature, config.tokens) == (7, 64, 0.5, 256)
    assert (config.attention, config.shift, config.block_length) == ("bidirectional", True, None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"mask_token": {"content": "<|mask|>"}}))
    assert read_diffusion_config(tmp_path, {}, SIZE).mask_id == 7


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_with_masks_is_filled_in_around_its_tokens(kind: str, request: pytest.FixtureRequest) -> None:
    loaded: Loaded = request.getfixturevalue(kind)
    canvas = (None, None, 7, 8, None, 9, None, None, None, 10)
    prompt = replace(PROMPT, canvas=canvas)
    sampling = Sampling(temperature=0.7, seed=4, steps=3)
    outputs = loaded.run(prompt, sampling)
    found = tokens_of(outputs)
    assert outputs[-1] == Ended(Finish.LENGTH)
    assert len(found) == len(canvas)
    assert all(given in (None, token) for given, token in zip(canvas, found, strict=True))
    assert not {END, MASK} & set(found)
    other = replace(PROMPT, canvas=(*canvas[:-1], 11))
    assert tokens_of(loaded.run(other, sampling))[:9] != found[:9], "what comes behind a mask is not seen"
    for cut in (1, 4, 9):
        assert loaded.tokens(replace(prompt, reply_ids=tuple(found[:cut])), sampling) == found[cut:]


def test_a_canvas_is_checked(causal: Loaded) -> None:
    with pytest.raises(BadParameter, match="max_tokens 5: is not for texts with masks"):
        causal.engine.generate(replace(PROMPT, canvas=(None,)), Sampling(temperature=0.0, max_tokens=5))
    with pytest.raises(BadParameter, match="must have at least one"):
        causal.engine.generate(replace(PROMPT, canvas=(5,)), Sampling(temperature=0.0))
    with pytest.raises(ContextOverflow):
        causal.engine.generate(replace(PROMPT, canvas=(None,) * 600), Sampling(temperature=0.0))
