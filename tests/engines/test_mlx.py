"""The MLX engine beside what all engines do (test_conformance.py): against torch, families, its cache, failures."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from palaver.engines.mlx.loader import is_installed, is_mlx_folder

if not is_installed():
    pytest.skip("NOTHING IS SHOWN HERE: mlx and mlx-lm are not installed", allow_module_level=True)

from palaver.engines.base import BY_BATCH, BY_CACHE, BY_TEXT, EngineState
from palaver.engines.core.checkpoint import open_checkpoint
from palaver.engines.core.engine import LocalEngine
from palaver.engines.core.options import EngineOptions
from palaver.engines.core.scheduler import SchedulerLimits
from palaver.engines.mlx import loader
from palaver.engines.mlx.engine import load
from palaver.engines.mlx.loader import config_changes, import_mlx
from palaver.engines.torch import load as load_torch
from palaver.errors import BadParameter, BrokenModel, CacheFull, EngineError, PalaverError
from palaver.generation import Prompt
from palaver.models.resolver import resolve_folder
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.generate import Run, continued, run
from tests.mlx_files import convert_sprout

TEXT = tuple(b"You are a helpful assistant who answers every question as briefly as it can be done. ")
GREEDY = Sampling(temperature=0, max_tokens=12, banned_ids=(tiny.END,))
SAMPLED = Sampling(
    temperature=0.9, top_k=80, top_p=0.97, seed=7, max_tokens=12, repetition_penalty=1.2, frequency_penalty=0.3,
    logprobs=3, banned_ids=(tiny.END,),
)  # fmt: skip
WINDOWS: dict[str, Any] = {"layer_types": [*["sliding_attention"] * 5, "full_attention"], "num_hidden_layers": 6}
"""mlx-lm knows Gemma's layers only in this order."""


@pytest.fixture(scope="session")
def folder_for(folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The files of a family's tiny model, in a shape that mlx-lm knows."""
    windowed = tiny.make("gemma3", tmp_path_factory.mktemp("windowed"), **WINDOWS)
    return lambda family: windowed if family == "gemma3" else folder_of(family)


@pytest.fixture
async def start(folder_for: Callable[[str], Path]) -> AsyncIterator[Callable[..., LocalEngine]]:
    """Loads the engine of a family's tiny model."""
    engines: list[LocalEngine] = []

    def load_family(family: str = "qwen3", **options: Any) -> LocalEngine:
        engines.append(load(folder_for(family), vocabulary=tiny.VOCABULARY, options=EngineOptions(**options)))
        return engines[-1]

    yield load_family
    for engine in engines:
        await engine.close()


def cached(out: Run) -> int:
    assert out.prefilled is not None
    return out.prefilled.cached_tokens


def prompts(count: int) -> list[Prompt]:
    """Prompts of different lengths, with nothing in common."""
    return [Prompt(tuple(f"{number}: {'what is it? ' * (1 + 2 * number)}".encode())) for number in range(count)]


# against torch


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "phi", "qwen3_moe", "gemma3", "qwen3_next", "mamba"])
async def test_a_reply_is_the_one_of_torch(
    family: str, folder_for: Callable[[str], Path], start: Callable[..., LocalEngine]
) -> None:
    reference = load_torch(folder_for(family), vocabulary=tiny.VOCABULARY, options=EngineOptions(compiled=False))
    for sampling in (GREEDY, SAMPLED):
        ours, theirs = [await run(engine, Prompt(TEXT), sampling) for engine in (start(family), reference)]
        assert ours.ids == theirs.ids
        for one, two in zip(ours.steps, theirs.steps, strict=True):
            assert one.logprob == pytest.approx(two.logprob, abs=1e-3)
            assert [a.token_id for a in one.alternatives] == [a.token_id for a in two.alternatives]
    await reference.close()


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """The embedded model as mlx-lm converts it, once as it is and once quantised to 8 bits."""
    made: dict[bool, Path] = {}

    def folder(quantized: bool) -> Path:
        if quantized not in made:
            made[quantized] = convert_sprout(tmp_path_factory.mktemp("mlx") / "sprout", quantized)
        return made[quantized]

    return folder


def all_logits(
    folder: Path, ids: Sequence[int], dtype: str | None, adapter: Path | None = None
) -> np.ndarray[Any, np.dtype[np.float32]]:
    import_mlx()
    from palaver.engines.mlx.model import MLXModel

    model = MLXModel(loader.load_module(open_checkpoint(folder), dtype, adapter))
    return model.logits(model.new_state(), ids)


def test_the_logits_of_sprout_are_those_of_torch(converted: Callable[[bool], Path]) -> None:
    ids = [7 + place * 13 % 4000 for place in range(60)]
    model = transformers.AutoModelForCausalLM.from_pretrained(resolve_folder("sprout"), dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(all_logits(converted(False), ids, "float32") - expected).max() <= 1e-4
    quantized = all_logits(converted(True), ids, "float32")
    assert 1e-4 < np.abs(quantized - expected).max() < 0.1 * np.abs(expected).max()


# adapters


@pytest.fixture
def write_adapter(tmp_path: Path) -> Callable[..., Path]:
    """A LoRA adapter of two of the embedded model's layers, as peft or mlx-lm writes it."""
    numbers = torch.Generator().manual_seed(3)
    shapes = {"model.layers.1.self_attn.q_proj": (256, 256), "model.layers.6.mlp.down_proj": (256, 832)}
    matrices = {
        path: (torch.randn(4, fan_in, generator=numbers) / 10, torch.randn(fan_out, 4, generator=numbers) / 10)
        for path, (fan_out, fan_in) in shapes.items()
    }

    def write(kind: str, **changes: Any) -> Path:
        if kind == "peft":
            config = {
                "peft_type": "LORA",
                "r": 4,
                "lora_alpha": 8,
                "target_modules": ["q_proj", "down_proj"],
                **changes,
            }
            named = {
                f"base_model.model.{path}.lora_{part}.weight": m
                for path, two in matrices.items()
                for part, m in zip("AB", two, strict=True)
            }
            save_file(named, tmp_path / "adapter_model.safetensors")
        else:
            keys = [path.split(".", 3)[3] for path in matrices]
            config = {"num_layers": 8, "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": keys}}
            named = {
                f"{path}.lora_{part}": m.T.contiguous()
                for path, two in matrices.items()
                for part, m in zip("ab", two, strict=True)
            }
            save_file(named, tmp_path / "adapters.safetensors")
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        return tmp_path

    return write


@pytest.mark.parametrize("kind", ["peft", "mlx-lm"])
def test_an_adapter_is_added_to_the_weights(
    kind: str, converted: Callable[[bool], Path], write_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    ids = [7 + place * 13 % 4000 for place in range(60)]
    model = transformers.AutoModelForCausalLM.from_pretrained(resolve_folder("sprout"), dtype=torch.float32)
    adapter = write_adapter("peft")
    for name, a in load_file(adapter / "adapter_model.safetensors").items():
        if ".lora_A." in name:
            b = load_file(adapter / "adapter_model.safetensors")[name.replace("lora_A", "lora_B")]
            model.get_submodule(name.removeprefix("base_model.model.").split(".lora_")[0]).weight.data += 2 * b @ a
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    if kind == "mlx-lm":
        (adapter / "adapter_model.safetensors").unlink()
        write_adapter("mlx-lm")
    plain = all_logits(converted(False), ids, "float32")
    assert np.abs(plain - expected).max() > 1, "the adapter changes much"
    assert np.abs(all_logits(converted(False), ids, "float32", adapter) - expected).max() <= 2e-4
    quantized = all_logits(converted(True), ids, "float32", adapter)
    assert 1e-4 < np.abs(quantized - expected).max() < 0.1 * np.abs(expected).max()


async def test_a_reply_with_an_adapter_continues(converted: Callable[[bool], Path], write_adapter: Any) -> None:
    vocabulary = [bytes([number % 256]) for number in range(4096)]
    engine = load(converted(True), vocabulary=vocabulary, adapter=write_adapter("peft"))
    prompt, sampling = Prompt(tuple(range(300, 330))), replace(SAMPLED, banned_ids=(0, 2), max_tokens=8)
    uncut = await run(engine, prompt, sampling)
    rest = await run(engine, continued(prompt, uncut.ids[:3]), sampling)
    assert uncut.ids[:3] + rest.ids == uncut.ids
    await engine.close()


def test_an_adapter_that_does_not_fit_is_a_sentence(
    converted: Callable[[bool], Path], write_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    def refusal() -> str:
        with pytest.raises(PalaverError) as caught:
            loader.load_module(open_checkpoint(converted(False)), None, tmp_path)
        return str(caught.value)

    import_mlx()
    assert "contains no adapter (adapter_model.safetensors or adapters.safetensors)" in refusal()
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    assert "adapter_model.bin" in refusal()
    write_adapter("peft", use_dora=True)
    assert "MLX doesn't compute 'use_dora' of an adapter. --engine torch may." in refusal()
    write_adapter("peft")
    file = tmp_path / "adapter_model.safetensors"
    fitting = load_file(file)
    name = next(iter(fitting))
    save_file({**fitting, name.replace("lora_A", "lora_magnitude_vector"): fitting[name].clone()}, file)
    assert "MLX doesn't compute 'base_model.model." in refusal()
    save_file({key.replace("layers.1.", "layers.99."): value for key, value in fitting.items()}, file)
    assert "does not fit the model: there is no layer 'model.layers.99.self_attn.q_proj'." in refusal()
    save_file({key: value[:, :3].clone() if "_A" in key else value for key, value in fitting.items()}, file)
    assert "has another size." in refusal()
    file.write_bytes(b"no safetensors")
    assert refusal().startswith(f"The adapter in {str(tmp_path)!r} does not fit the model: ")


# continued replies


@pytest.mark.parametrize("quantized", [False, True], ids=["converted", "quantized"])
async def test_a_reply_of_an_mlx_folder_continues(quantized: bool, converted: Callable[[bool], Path]) -> None:
    engine = load(converted(quantized), vocabulary=[bytes([number % 256]) for number in range(4096)])
    assert engine.info.end_ids == {0, 2}
    assert (engine.info.defaults.temperature, engine.info.defaults.top_k) == (0.6, 20)
    assert engine.info.context_length == 8192
    assert engine.info.dtype == ("float32, 8-bit" if quantized else "float32")
    assert engine.info.fingerprint.startswith("mlx/")
    prompt = Prompt(tuple(range(5, 25)))
    sampling = replace(engine.info.defaults, seed=1, max_tokens=6, banned_ids=(0, 2))
    whole = await run(engine, prompt, sampling)
    await engine.close()
    engine = load(converted(quantized), vocabulary=[bytes([number % 256]) for number in range(4096)])
    for cut in (1, 5):
        assert (await run(engine, continued(prompt, whole.ids[:cut]), sampling)).ids == whole.ids[cut:]
    await engine.close()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma3", "qwen3_next", "mamba"])
async def test_replies_are_the_same_together_and_alone(family: str, start: Callable[..., LocalEngine]) -> None:
    """They begin and end at different steps, so that rows join and leave the batch; the longest prompts come first."""
    engine, other = start(family, limits=SchedulerLimits(chunk_tokens=8)), start(family)
    asked = prompts(5)[::-1]
    sampled = [replace(SAMPLED, max_tokens=6 + 3 * number) for number in range(5)]
    together = await asyncio.gather(*(run(engine, p, s) for p, s in zip(asked, sampled, strict=True)))
    for prompt, sampling, out in zip(asked, sampled, together, strict=True):
        assert (await run(other, prompt, sampling)).ids == out.ids
        assert (await run(engine, continued(prompt, out.ids[:3]), sampling)).ids == out.ids[3:]


async def test_stops_and_continues_in_a_cache_that_is_too_small(start: Callable[..., LocalEngine]) -> None:
    """Ten readers stop and continue replies of a model whose state can't be cut."""
    family = "qwen3_next"
    engine = start(family, cache_bytes=1_500_000, max_running=6, limits=SchedulerLimits(chunk_tokens=32))
    reference = start(family)
    asked = [replace(prompt, conversation=str(number % 3)) for number, prompt in enumerate(prompts(6))]
    sampled = [replace(SAMPLED, seed=number, max_tokens=20 + 5 * number) for number in range(6)]
    whole = [(await run(reference, p, s)).ids for p, s in zip(asked, sampled, strict=True)]

    async def stop_and_continue(reader: int) -> None:
        draw = random.Random(reader)
        for _ in range(5):
            number, stop_after = draw.randrange(6), draw.choice([None, draw.randrange(1, 12)])
            cut = draw.randrange(len(whole[number]))
            prompt = continued(asked[number], whole[number][:cut])
            out = await run(engine, prompt, sampled[number], stop_after=stop_after)
            assert out.ids == whole[number][cut:][:stop_after]
            if draw.random() < 0.1:
                await engine.forget(str(draw.randrange(3)))

    await asyncio.gather(*map(stop_and_continue, range(10)))
    assert engine.statistics.cache.evictions > 0
    assert engine.statistics.cache.hit_tokens > 0


# the prefix cache


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
async def test_a_prefix_is_reused_to_the_token(family: str, start: Callable[..., LocalEngine]) -> None:
    engine, fresh = start(family), start(family)
    assert engine.info.reuse == "to the token"
    first = await run(engine, Prompt(TEXT), GREEDY)
    assert cached(first) == 0
    for common in (len(TEXT), 71, 5):
        branch = Prompt((*TEXT[:common], *b"Another question?"))
        out = await run(engine, branch, GREEDY)
        assert cached(out) == common
        assert out.ids == (await run(fresh, branch, GREEDY)).ids
    assert cached(await run(engine, Prompt(TEXT), GREEDY)) == len(TEXT), "with its logits"
    turn = Prompt((*TEXT, *first.ids, *b"And then?"))
    assert cached(await run(engine, turn, GREEDY)) == len(TEXT) + len(first.ids) - 1


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next", "mamba"])
async def test_a_state_that_cannot_be_cut_is_reused_whole(family: str, start: Callable[..., LocalEngine]) -> None:
    engine = start(family)
    assert engine.info.reuse == "snapshots"
    first = await run(engine, Prompt(TEXT), GREEDY)
    turn = Prompt((*TEXT, *first.ids[:-1], *b"And then?"))
    assert cached(await run(engine, turn, GREEDY)) == len(TEXT) + len(first.ids) - 1
    assert cached(await run(engine, Prompt((*TEXT, *b"Another question?")), GREEDY)) == len(TEXT)
    assert cached(await run(engine, Prompt((*TEXT[:50], *b"Another question?")), GREEDY)) == 0


async def test_a_prefix_of_a_running_reply_is_reused(start: Callable[..., LocalEngine]) -> None:
    engine, fresh = start(), start()
    long = replace(GREEDY, max_tokens=200)
    async with engine.generate(Prompt(TEXT), long) as one, engine.generate(Prompt(TEXT[:40]), long) as two:
        for outputs in (one, two):
            async for output in outputs:
                if type(output).__name__ == "Step":
                    break
        branch = Prompt((*TEXT[:60], *b"Another question?"))
        out = await run(engine, branch, GREEDY)
        assert cached(out) == 60
        assert out.ids == (await run(fresh, branch, GREEDY)).ids


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
async def test_forgetting_frees_what_one_conversation_alone_used(
    family: str, start: Callable[..., LocalEngine]
) -> None:
    engine = start(family)
    ann = Prompt((*TEXT, *b"Ann's own question, which is a longer one."), conversation="Ann")
    bob = Prompt((*TEXT, *b"What Bob asks is something else."), conversation="Bob")
    for prompt in (ann, bob):
        await run(engine, prompt, GREEDY)
    await engine.forget("nobody")  # by then all that ended is cached
    before = engine.statistics.cache.kept_bytes
    await engine.forget("Ann")
    assert 0 < engine.statistics.cache.kept_bytes < before
    assert cached(await run(engine, bob, GREEDY)) == len(bob)
    await engine.forget("Bob")
    assert engine.statistics.cache.kept_bytes == 0
    assert engine.statistics.cache.evictions == 0


async def test_the_cache_stays_within_its_limit(start: Callable[..., LocalEngine]) -> None:
    """A running state takes 197 kB for each 256 tokens begun, a cached one 768 bytes a token: not all six fit."""
    limit = 210_000
    engine = start(cache_bytes=limit)
    for prompt in prompts(6):
        await run(engine, prompt, GREEDY)
        assert engine.statistics.cache.used_bytes <= limit
    assert engine.statistics.cache.evictions > 0
    again = await run(engine, prompts(6)[-1], GREEDY)
    assert cached(again) == len(prompts(6)[-1]), "what is reused isn't evicted to make room for it"
    outs = await asyncio.gather(*(run(engine, prompt, GREEDY) for prompt in prompts(6)))
    fresh = start()
    assert [out.ids for out in outs] == [(await run(fresh, prompt, GREEDY)).ids for prompt in prompts(6)]


async def test_replies_that_outgrow_the_cache_wait_for_each_other(start: Callable[..., LocalEngine]) -> None:
    """Three fit with up to 256 tokens, which they pass while they are generated."""
    engine, fresh = start(cache_bytes=620_000), start()
    asked = [Prompt(tuple(f"{number}{'.' * 245}".encode())) for number in range(3)]
    sampling = replace(SAMPLED, max_tokens=24)
    outs = await asyncio.gather(*(run(engine, prompt, sampling) for prompt in asked))
    for prompt, out in zip(asked, outs, strict=True):
        assert out.ids == (await run(fresh, prompt, sampling)).ids
    assert engine.statistics.cache.prompt_tokens > sum(map(len, asked)), "one was preempted and started again"


async def test_a_prompt_that_never_fits_fails_at_once(start: Callable[..., LocalEngine]) -> None:
    engine = start(cache_bytes=30_000)
    with pytest.raises(CacheFull):
        await run(engine, Prompt(TEXT * 2), GREEDY)
    with pytest.raises(BadParameter, match="are free"):
        start(cache_bytes=1 << 60)


# cancelling and failing


class FailsAt:
    """A model that can't compute one token."""

    def __init__(self, module: Any, token_id: int) -> None:
        self._module = module
        self._token_id = token_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, tokens: Any, **options: Any) -> Any:
        if self._token_id in np.array(tokens):
            raise RuntimeError("out of memory")
        return self._module(tokens, **options)


async def test_a_failing_pass_fails_only_its_request(start: Callable[..., LocalEngine]) -> None:
    """The token is generated in the middle of the reply. The states of the whole pass are lost and computed again."""
    engine, fresh = start(), start()
    asked = prompts(3)
    expected = [(await run(fresh, prompt, GREEDY)).ids for prompt in asked]
    poison = next(t for t in expected[1][3:] if t not in {*expected[0], *expected[2], *expected[1][:3]})
    model: Any = engine._runner
    model = model._model
    model._module = FailsAt(model._module, poison)
    outs: list[Any] = await asyncio.gather(*(run(engine, p, GREEDY) for p in asked), return_exceptions=True)
    assert [outs[0].ids, outs[2].ids] == [expected[0], expected[2]]
    assert isinstance(outs[1], EngineError)
    assert (await run(engine, asked[0], GREEDY)).ids == expected[0]
    assert engine.status.state == EngineState.READY


async def test_the_others_go_on_if_an_ended_state_cannot_be_taken_out(
    start: Callable[..., LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where there is no memory for the copy: the merged states are dropped and computed again."""
    engine, fresh = start(), start()
    from palaver.engines.mlx.model import MergedStates

    asked = prompts(3)

    def fail(states: MergedStates, row: int) -> None:
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr(MergedStates, "extract", fail)
    short = replace(GREEDY, max_tokens=6)
    sampled = (short, GREEDY, GREEDY)
    outs = await asyncio.gather(*(run(engine, p, s) for p, s in zip(asked, sampled, strict=True)))
    assert MergedStates.extract.__name__ == "extract", "it has failed once"
    for prompt, sampling, out in zip(asked, sampled, outs, strict=True):
        assert out.ids == (await run(fresh, prompt, sampling)).ids
        assert (await run(engine, prompt, sampling)).ids == out.ids


# what the engine says of itself


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_next"])
async def test_what_exactness_promises_holds(
    family: str, start: Callable[..., LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In passes as on a GPU; `test_conformance.py` has those of the CPU."""
    import_mlx()
    from palaver.engines.mlx import runner

    monkeypatch.setitem(runner.EXACT_ROWS, "cpu", runner.EXACT_ROWS["gpu"])
    assert start(family).info.exactness == BY_BATCH
    engine, alone = start(family, exact=True), start(family, exact=True)
    promised = engine.info.exactness
    assert promised in ((BY_TEXT, BY_CACHE, BY_BATCH) if family == "qwen3" else (BY_CACHE, BY_BATCH))
    assert engine.info.fingerprint.split("/")[4] in ("exact", "exact-with-cache", "batched")
    if promised == BY_BATCH:
        pytest.skip("this machine promises nothing")
    together = await asyncio.gather(*(run(engine, prompt, SAMPLED) for prompt in prompts(3)))
    for prompt, out in zip(prompts(3), together, strict=True):
        assert (await run(alone, prompt, SAMPLED)).steps == out.steps, "to the last bit"
        if promised == BY_TEXT:
            rest = await run(start(family, exact=True), continued(prompt, out.ids[:9]), SAMPLED)
            assert rest.steps == out.steps[9:]


async def test_limits_and_options_are_used(start: Callable[..., LocalEngine]) -> None:
    engine = start(context=120, limits=SchedulerLimits(chunk_tokens=16), max_running=1)
    assert engine.info.context_length == 120
    out = await run(engine, Prompt(TEXT), replace(GREEDY, max_tokens=None))
    assert len(TEXT) + len(out.ids) == 120


def test_what_can_not_be_loaded_is_a_sentence(
    folder_for: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(folder: Path | None = None, **options: Any) -> str:
        with pytest.raises(PalaverError) as caught:
            load(folder or folder_for("qwen3"), vocabulary=tiny.VOCABULARY, **options)
        return str(caught.value)

    assert "MLX runs on cpu or gpu" in refused(device="cuda")
    assert "must be one of float32" in refused(dtype="int8")
    assert "there is no such folder" in refused(tmp_path / "none")
    assert "couldn't be loaded by mlx-lm" in refused(folder_for("gpt2")), "transformers 5 writes other names"
    monkeypatch.setattr(loader, "is_installed", lambda: False)
    assert "pip install 'palaver[mlx]'" in refused()
    with pytest.raises(BrokenModel):
        import_mlx()


# folders


def test_folders_of_mlx_are_recognised(
    converted: Callable[[bool], Path], folder_for: Callable[[str], Path], tmp_path: Path
) -> None:
    assert is_mlx_folder(converted(True))
    assert is_mlx_folder(converted(False))
    assert not is_mlx_folder(resolve_folder("sprout"))
    assert not is_mlx_folder(folder_for("qwen3"))
    assert not is_mlx_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert not is_mlx_folder(tmp_path)


def test_settings_of_transformers_5_get_the_names_that_mlx_reads() -> None:
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}}
    assert config_changes(plain) == {"rope_theta": 5e5, "partial_rotary_factor": 0.5}
    assert config_changes(plain | {"rope_theta": 1e4, "partial_rotary_factor": 1.0}) == {}
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
    assert config_changes({"rope_parameters": yarn}) == {"rope_theta": 1e6, "rope_scaling": yarn}
    by_layer = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert config_changes({"rope_parameters": by_layer}) == {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
    assert config_changes({"num_local_experts": 8}) == {"num_experts": 8}
    assert config_changes({"rope_parameters": None}) == {}


def test_importing_mlx_leaves_the_limit_of_open_files() -> None:
    code = (
        "import resource; before = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "from palaver.engines.mlx.loader import import_mlx; import_mlx()\n"
        "import mlx_lm.utils\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == before\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, before)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
