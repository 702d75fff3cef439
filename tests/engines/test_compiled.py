"""Compiled steps give the model's own tokens, and their bits depend on the text alone. Errors name what is missing."""

import asyncio
import gc
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from palaver.engines.base import BY_TEXT
from palaver.engines.compiled import build
from palaver.engines.compiled.build import load_compiled_library
from palaver.engines.compiled.decoder import MAX_ROWS, CompiledDecoder, CompiledRunner, RowChunk, Rows
from palaver.engines.compiled.engine import load as load_alone
from palaver.engines.compiled.engine import load_decoder, open_decoder
from palaver.engines.core.engine import LocalEngine
from palaver.engines.core.kv_cache import HostArray, SlotAllocator
from palaver.engines.core.runner import ThreadCounts, UnsupportedModel
from palaver.engines.torch import EngineOptions, SchedulerLimits, devices, load
from palaver.engines.torch.devices import CPU, fit
from palaver.engines.torch.engine import NO_COMPILER_HINT
from palaver.engines.torch.loader import open_checkpoint, quiet
from palaver.engines.torch.plain_decoder import PlainDecoder, compile_decoder
from palaver.errors import BrokenModel, CantCompile, DoesNotFit
from palaver.generation import Prompt
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.compiler import needs_a_compiler
from tests.engines.generate import run
from tests.engines.reference import reference
from tests.engines.test_decoder_config import ROPES

pytestmark = needs_a_compiler

GREEDY = Sampling(temperature=0, max_tokens=24, banned_ids=(tiny.END,))
TEXTS = (b"Hi", b"A text that is a good deal longer than the others, by far", b"x", b"abc" * 9, b"some more")
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "biases": ("qwen2", {}),
    "norms of queries and keys": ("qwen3", {}),
    "sizes that fill no panel": ("llama", {"hidden_size": 80, "intermediate_size": 72, "head_dim": 32}),
    "many queries a key": ("qwen3", {"num_attention_heads": 11, "num_key_value_heads": 1}),
    "a key for each query": ("llama", {"num_key_value_heads": 4}),
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 72}),
    "longer turns": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "without a window": ("mistral", {"sliding_window": None}),
}
COMPILED = EngineOptions(compiled=True)
Load = Callable[..., LocalEngine]
TOKENS = 300


def rounded(model: Any, dtype: torch.dtype) -> Any:
    """With weights that this type holds without loss."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("load", [load, load_alone], ids=["by torch", "alone"])
async def test_says_what_the_model_says(load: Load, shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Weights are stored in the narrowest dtype that holds them without loss."""
    family, overrides = SHAPES[shape]
    model = rounded(tiny.build(family, **overrides), dtype)
    with quiet():
        model.save_pretrained(tmp_path)
    if load is load_alone:
        store_as(tmp_path, dtype)
    engine = load(tmp_path, vocabulary=tiny.VOCABULARY, options=COMPILED)
    try:
        assert engine.info.steps == "compiled"
        together = await asyncio.gather(*(run(engine, Prompt(tuple(text)), GREEDY) for text in TEXTS))
        for text, out in zip(TEXTS, together, strict=True):
            assert reference(model, Prompt(tuple(text)), GREEDY).agrees(out.ids)
    finally:
        await engine.close()


def store_as(folder: Path, dtype: torch.dtype) -> None:
    """Stores the weights in this type, which holds them without loss."""
    path = folder / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path, {"format": "pt"})


@pytest.fixture(params=["a key for two queries", "many queries a key"])
def model(request: pytest.FixtureRequest) -> Any:
    overrides = {"num_attention_heads": 11, "num_key_value_heads": 1} if "many" in request.param else {}
    return rounded(tiny.build("qwen3", **overrides), torch.bfloat16)


@torch.inference_mode()
def logits_by(model: Any, chunk_sizes: Sequence[Sequence[int]], *threads: int) -> HostArray:
    """The logits at the end of several texts in one batch, each computed in chunks of these sizes: by so many threads,
    in turn."""
    decoder = compile_decoder(PlainDecoder.from_model(model, 512), load_compiled_library(), max(threads))
    allocator = SlotAllocator(decoder.layout, 1 << 24)
    slots = [allocator.allocate(TOKENS) for _ in chunk_sizes]
    at, out = [0] * len(chunk_sizes), np.zeros((len(chunk_sizes), tiny.SIZE), np.float32)
    for step in range(max(map(len, chunk_sizes))):
        here = [i for i, sizes in enumerate(chunk_sizes) if step < len(sizes)]
        chunks = [RowChunk(slots[i], at[i], text(i)[at[i] : at[i] + chunk_sizes[i][step]]) for i in here]
        count = threads[step % len(threads)]
        for i, row in zip(here, decoder.run(Rows(chunks, need_logits=True), count), strict=True):
            at[i] += chunk_sizes[i][step]
            out[i] = row
    return out


def text(number: int) -> list[int]:
    return [(7 * i * i + 5 * i + 11 * number) % 256 for i in range(TOKENS)]


def random_chunks(rng: random.Random, length: int) -> list[int]:
    """Chunks of all sizes, many of them single tokens."""
    sizes: list[int] = []
    while sum(sizes) < length:
        sizes.append(min(rng.choice([1, 1, 2, 5, 16, 60, 150]), length - sum(sizes)))
    return sizes


@pytest.mark.parametrize("seed", range(6))
def test_bits_depend_on_the_text_alone(seed: int, model: Any) -> None:
    """They depend neither on the chunk size, nor on the batch, nor on the threads."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, TOKENS) for _ in range(rng.randint(1, 9))]
    alone = [logits_by(model, [[]] * i + [[length]], 1)[i] for i, length in enumerate(lengths)]
    threads = [rng.choice([1, 2, 3, 5]) for _ in range(4)]
    together = logits_by(model, [random_chunks(rng, length) for length in lengths], *threads)
    assert all(np.array_equal(row, one) for row, one in zip(together, alone, strict=True))


FORKED = """
import os, sys
from pathlib import Path
from palaver.engines.compiled.build import load_compiled_library
from palaver.engines.compiled.decoder import RowChunk, Rows
from palaver.engines.compiled.engine import load_decoder, open_decoder
from palaver.engines.core.kv_cache import SlotAllocator

decoder = load_decoder(*open_decoder(Path(sys.argv[1])), load_compiled_library(), 4)
rows = Rows([RowChunk(SlotAllocator(decoder.layout, 1 << 24).allocate(200), 0, range(200))], need_logits=True)
expected = decoder.run(rows, 4).tobytes()
child = os.fork()
if not child:
    same = decoder.run(rows, 4).tobytes() == expected
    del decoder
    os._exit(0 if same else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_pass_does_not_wait_for_threads_that_never_come(folder_of: Callable[[str], Path]) -> None:
    """A fork of a process has one thread."""
    subprocess.run([sys.executable, "-c", FORKED, str(folder_of("qwen3"))], check=True, timeout=60)


class CountingDecoder:
    """Notes the threads of each pass, by its number of rows."""

    def __init__(self, decoder: CompiledDecoder) -> None:
        self._decoder = decoder
        self.passes: list[tuple[int, int]] = []

    def run(self, rows: Rows, threads: int, memory: HostArray | None = None) -> HostArray:
        self.passes.append((len(rows.array), threads))
        return self._decoder.run(rows, threads, memory)


class StubCores:
    def __init__(self, *counts: int | None) -> None:
        self._counts = cycle(counts)

    def count(self) -> int | None:
        return next(self._counts)


def with_idle_cores(engine: LocalEngine, *counts: int | None) -> CountingDecoder:
    """The engine of a small model on a machine with four cores, so many of them idle, in turn."""
    runner = engine._runner
    assert isinstance(runner, CompiledRunner)
    decoder = CountingDecoder(runner._decoder)
    runner._decoder, runner._idle_cores = decoder, StubCores(*counts)  # type: ignore[assignment]
    runner._threads = ThreadCounts(1, 4)
    return decoder


@pytest.mark.parametrize(("idle", "threads"), [(0, 1), (1, 2), (3, 4), (7, 4), (None, 1)])
async def test_prompts_get_idle_cores_and_single_tokens_do_not(
    idle: int | None, threads: int, folder_of: Callable[[str], Path]
) -> None:
    engine = load_alone(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=EngineOptions(drafts=False))
    decoder = with_idle_cores(engine, idle)
    await run(engine, Prompt(tuple(b"A prompt of some tokens.")), GREEDY)
    await engine.close()
    assert decoder.passes[0] == (24, threads)
    assert set(decoder.passes[1:]) == {(1, 1)}


async def test_threads_that_change_within_a_reply_change_no_token(folder_of: Callable[[str], Path]) -> None:
    """With drafts, whose passes share the idle cores, too."""
    sampling = Sampling(temperature=0.3, seed=3, max_tokens=80, banned_ids=(tiny.END,), logprobs=5)
    prompt, replies = Prompt(tuple(b"abc abd abc abd abc abd abc")), []
    for counts in ((0,), (3, 0, 1, None, 2)):
        engine = load_alone(folder_of("qwen3"), vocabulary=tiny.VOCABULARY)
        with_idle_cores(engine, *counts)
        replies.append(await run(engine, prompt, sampling))
        await engine.close()
    assert replies[0].steps == replies[1].steps


@torch.inference_mode()
def test_it_holds_no_pools(model: Any) -> None:
    decoder = compile_decoder(PlainDecoder.from_model(model, 512), load_compiled_library(), 1)
    slot = SlotAllocator(decoder.layout, 1 << 24).allocate(TOKENS)
    pool = weakref.ref(slot.pool)
    decoder.run(Rows([RowChunk(slot, 0, text(0))], need_logits=True), 1)
    del slot
    gc.collect()
    assert pool() is None


EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64}
WIDE_HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
SPECIAL_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral with a window": ("mistral", {}),
    "experts": ("qwen3_moe", EXPERTS),
    "experts with shares of all": ("qwen3_moe", EXPERTS | {"norm_topk_prob": False}),
    "one expert of many": ("qwen3_moe", EXPERTS | {"num_experts": 32, "num_experts_per_tok": 1}),
    "all experts": ("qwen3_moe", EXPERTS | {"num_experts_per_tok": 4}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {}),
    "gemma3 with wide heads": ("gemma3", WIDE_HEADS | {"query_pre_attn_scalar": 64, "sliding_window": 130}),
    "gemma3 with a cap of scores": ("gemma3", {"attn_logit_softcapping": 2.0}),
    "gemma3 with a cap": ("gemma3", {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 50}),
}


@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_are_those_of_the_library_at_every_position(family: str, rope: str, tmp_path: Path) -> None:
    """Without a probe at load: what the configuration says is trusted (`core/decoder_config.py`)."""
    overrides: dict[str, Any] = {"sliding_window": None} if family == "mistral" else {}
    compare_with_the_library(tmp_path, family, 4096, **overrides, **ROPES[rope])


@pytest.mark.parametrize("name", SPECIAL_MODELS)
def test_logits_of_special_layers_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    family, overrides = SPECIAL_MODELS[name]
    compare_with_the_library(tmp_path, family, 1024, **overrides)


@torch.inference_mode()
def compare_with_the_library(folder: Path, family: str, length: int, **overrides: Any) -> None:
    model = tiny.build(family, max_position_embeddings=length, **overrides)
    with quiet():
        model.save_pretrained(folder)
    decoder = load_decoder(*open_decoder(folder), load_compiled_library(), 1)
    slot = SlotAllocator(decoder.layout, 1 << 24).allocate(length)
    ids = [(7 * i * i + 5 * i) % 256 for i in range(length)]
    expected = model(input_ids=torch.tensor([ids])).logits[0].numpy()
    for start in range(0, length, 256):
        (row,) = decoder.run(Rows([RowChunk(slot, start, ids[start : start + 256])], need_logits=True), 1)
        assert np.abs(row - expected[start + 255]).max() < 1e-3


@pytest.mark.parametrize("name", SPECIAL_MODELS)
def test_bits_of_special_layers_are_the_same_in_every_pass(name: str, tmp_path: Path) -> None:
    """Windows begin within blocks of keys and within groups of rows; rows share experts, or have them alone."""
    family, overrides = SPECIAL_MODELS[name]
    folder = tiny.make(family, tmp_path, **overrides)
    decoder = load_decoder(*open_decoder(folder), load_compiled_library(), 3)
    ids = [(7 * i * i + 5 * i) % 256 for i in range(400)]

    def logits(sizes: Sequence[int], threads: int) -> HostArray:
        slot, start, out = SlotAllocator(decoder.layout, 1 << 24).allocate(len(ids)), 0, []
        for size in sizes:
            part = ids[start : start + size]
            rows = Rows([RowChunk(slot, start, part)], need_logits=True, drafts=[part[1:]])
            out.append(decoder.run(rows, threads))
            start += size
        return np.concatenate(out)

    expected = logits([1] * 400, 1)
    for sizes in ([400], [3] * 133 + [1], [17] * 23 + [9], [128, 1, 1, 70, 200]):
        for threads in (1, 3):
            assert np.array_equal(logits(sizes, threads), expected), (sizes[0], threads)


async def test_several_replies_of_experts_share_passes(tmp_path: Path) -> None:
    folder = tiny.make("qwen3_moe", tmp_path, **EXPERTS)
    model = tiny.build("qwen3_moe", **EXPERTS)
    engine = load_alone(folder, vocabulary=tiny.VOCABULARY)
    prompts = [Prompt(tuple(b"number " + str(number).encode())) for number in range(12)]
    short = Sampling(temperature=0, max_tokens=30, banned_ids=(tiny.END,))
    outs = await asyncio.gather(*(run(engine, prompt, short) for prompt in prompts))
    await engine.close()
    assert (engine.info.steps, engine.info.exactness) == ("compiled", BY_TEXT)
    assert all(reference(model, prompt, short).agrees(out.ids) for prompt, out in zip(prompts, outs, strict=True))


def test_of_experts_with_equal_scores_the_first_are_chosen(tmp_path: Path) -> None:
    """Where scores are no numbers, no logits are."""
    for case, score in (("equal", 1.0), ("none", float("nan"))):
        folder = tiny.make("qwen3_moe", tmp_path / case, **EXPERTS)
        path = folder / "model.safetensors"
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith("mlp.gate.weight"):
                tensor.fill_(score)
        rows = []
        for spoils in (False, True):
            for name, tensor in tensors.items():
                if spoils and (".experts.2." in name or ".experts.3." in name):
                    tensor.fill_(1e9)
            save_file(tensors, path, {"format": "pt"})
            decoder = load_decoder(*open_decoder(folder), load_compiled_library(), 1)
            slot = SlotAllocator(decoder.layout, 1 << 24).allocate(TOKENS)
            rows.append(decoder.run(Rows([RowChunk(slot, 0, text(0))], need_logits=True), 1))
        assert np.isnan(rows).all() if case == "none" else np.isfinite(rows).all()
        assert np.array_equal(rows[0], rows[1], equal_nan=True), case


@pytest.mark.parametrize("module", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_no_weight_that_is_no_number_is_hidden(family: str, module: str, tmp_path: Path) -> None:
    """By the softmax of scores or by caps: the engine then ends the reply with an error."""
    folder = tiny.make(family, tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[f"model.layers.1.{module}.weight"][3, 5] = float("nan")
    save_file(tensors, path, {"format": "pt"})
    decoder = load_decoder(*open_decoder(folder), load_compiled_library(), 1)
    slot = SlotAllocator(decoder.layout, 1 << 24).allocate(TOKENS)
    assert np.isnan(decoder.run(Rows([RowChunk(slot, 0, text(0))], need_logits=True), 1)).all()


def test_a_tensor_that_is_not_as_long_as_its_header_says(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folder_of("qwen3"), folder)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["model.layers.1.mlp.up_proj.weight"]["dtype"] = "F16"
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + size :])
    with pytest.raises(BrokenModel, match="not as long as its header says"):
        load_decoder(*open_decoder(folder), load_compiled_library(), 1)


def test_experts_of_sizes_it_is_not_written_for(folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedModel, match="experts with sizes that are multiples of 64"):
        open_decoder(folder_of("qwen3_moe"))


async def test_either_way_of_loading_gives_the_same_bits(folder_of: Callable[[str], Path]) -> None:
    sampling = Sampling(temperature=1.0, seed=3, max_tokens=40, banned_ids=(tiny.END,), logprobs=5)
    prompt = Prompt(tuple(b"Say something long."))
    engines = [load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY) for load in (load, load_alone)]
    replies = [await run(engine, prompt, sampling) for engine in engines]
    assert engines[0].info == engines[1].info
    assert replies[0].steps == replies[1].steps
    for engine in engines:
        await engine.close()


async def test_many_at_once(folder_of: Callable[[str], Path]) -> None:
    model = tiny.build("qwen3")
    options = EngineOptions(compiled=True, limits=SchedulerLimits(max_running=MAX_ROWS + 8))
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=options)
    prompts = [Prompt(tuple(b"number " + str(number).encode())) for number in range(MAX_ROWS + 3)]
    short = Sampling(temperature=0, max_tokens=4, banned_ids=(tiny.END,))
    outs = await asyncio.gather(*(run(engine, prompt, short) for prompt in prompts))
    await engine.close()
    assert all(reference(model, prompt, short).agrees(out.ids) for prompt, out in zip(prompts, outs, strict=True))


async def test_to_the_end_of_the_context(folder_of: Callable[[str], Path]) -> None:
    engine = load(folder_of("llama"), vocabulary=tiny.VOCABULARY, options=EngineOptions(compiled=True, context=100))
    sampling = Sampling(temperature=0, max_tokens=500, banned_ids=(tiny.END,))
    out = await run(engine, Prompt(tuple(b"a" * 70)), sampling)
    await engine.close()
    assert len(out.ids) == 30
    assert reference(tiny.build("llama"), Prompt(tuple(b"a" * 70)), Sampling(**vars_of(sampling, 30))).agrees(out.ids)


def vars_of(sampling: Sampling, tokens: int) -> dict[str, Any]:
    return {"temperature": sampling.temperature, "banned_ids": sampling.banned_ids, "max_tokens": tokens}


OTHER_KINDS = [
    ("gpt_oss", "it has a window of attention"),
    ("mamba", ""),
    ("gpt2", ""),
]


@pytest.mark.parametrize(("family", "why"), OTHER_KINDS)
async def test_another_kind_of_model_runs_without_it_and_says_why(
    family: str, why: str, folder_of: Callable[[str], Path]
) -> None:
    engine = load(folder_of(family), vocabulary=tiny.VOCABULARY)
    prompt = Prompt(tuple(b"Hello"))
    out = await run(engine, prompt, GREEDY)
    await engine.close()
    assert engine.info.steps.startswith(f"the model's own code, not compiled: {why}")
    assert engine.info.hint == ""
    assert reference(tiny.build(family), prompt, GREEDY).agrees(out.ids)


@pytest.mark.parametrize(("family", "why"), OTHER_KINDS)
def test_required_for_another_kind_of_model_it_is_an_error(
    family: str, why: str, folder_of: Callable[[str], Path]
) -> None:
    with pytest.raises(CantCompile, match=f"can't be used: {why}.*Leave out --compile"):
        load(folder_of(family), vocabulary=tiny.VOCABULARY, options=COMPILED)


async def test_sizes_it_is_not_written_for(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path, hidden_size=72, head_dim=16)
    engine = load(folder, vocabulary=tiny.VOCABULARY)
    await engine.close()
    expected = "few operations, not compiled: compiled steps need sizes that are multiples of 16"
    assert engine.info.steps == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (EngineOptions(), "compiled"),
        (EngineOptions(compiled=False), "few operations"),
        (EngineOptions(exact=True), "compiled"),
    ],
    ids=str,
)
async def test_used_by_itself_unless_turned_off(
    options: EngineOptions, expected: str, folder_of: Callable[[str], Path]
) -> None:
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=options)
    await engine.close()
    assert engine.info.steps == expected


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    """And no earlier build."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)


@pytest.mark.usefixtures("no_compiler")
async def test_without_a_compiler_it_runs_and_says_how_to_get_the_speed(folder_of: Callable[[str], Path]) -> None:
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY)
    prompt = Prompt(tuple(b"Hello"))
    out = await run(engine, prompt, GREEDY)
    await engine.close()
    assert engine.info.steps == "few operations, not compiled: no C compiler was found; install gcc or clang"
    assert engine.info.hint == NO_COMPILER_HINT
    assert reference(tiny.build("qwen3"), prompt, GREEDY).agrees(out.ids)


@pytest.mark.usefixtures("no_compiler")
def test_required_without_a_compiler_it_is_an_error(folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(CantCompile, match=r"no C compiler was found; install gcc or clang\. Leave out --compile"):
        load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=COMPILED)


async def test_another_type_than_float32(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("qwen3")
    engine = load(folder, vocabulary=tiny.VOCABULARY, dtype="bfloat16")
    await engine.close()
    assert engine.info.steps.endswith("not compiled: they are for float32 on the CPU")
    with pytest.raises(CantCompile, match="they are for float32 on the CPU"):
        load(folder, vocabulary=tiny.VOCABULARY, dtype="bfloat16", options=COMPILED)


async def test_where_memory_is_short_the_weights_stay_in_one_form(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("llama")
    once = fit(open_checkpoint(folder), CPU, torch.float32).needed_bytes
    monkeypatch.setattr(devices, "free_bytes", lambda device: once + once // 2)
    engine = load(folder, vocabulary=tiny.VOCABULARY, options=EngineOptions(cache_bytes=1 << 22))
    await engine.close()
    assert engine.info.steps.startswith("few operations, not compiled: loading them needs about ")
    with pytest.raises(DoesNotFit):
        load(folder, vocabulary=tiny.VOCABULARY, options=COMPILED)


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", script(tmp_path / "cc", 'echo "cc: out of order" >&2\nexit 1'))
    with pytest.raises(CantCompile, match="cc: out of order"):
        load_compiled_library()


def test_a_compiler_variable_that_is_no_command_is_an_error(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("CC", "gcc '-O2")
    with pytest.raises(CantCompile, match="CC can't be read as a command: No closing quotation"):
        load_compiled_library()
    assert not build.can_build()


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def built_in(cache: Path) -> list[Path]:
    return list((cache / "palaver" / "compiled").glob("*.so"))


CC = "cc -O0"
"""For tests that are about files: it compiles five times as fast."""


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", CC)
    return tmp_path / "cache"


def test_it_is_built_once(cache: Path) -> None:
    load_compiled_library()
    (built,) = built_in(cache)
    os.utime(built, (1, 1))
    load_compiled_library()
    assert built.stat().st_mtime == 1


BUILD = "import palaver.engines.compiled.build as b; b.load_compiled_library()"


@pytest.fixture(scope="module")
def earlier_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that another process has built with the compiler of `cache`: one of this process is never unloaded."""
    folder = tmp_path_factory.mktemp("earlier")
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder), "CC": CC}
    subprocess.run([sys.executable, "-c", BUILD], check=True, env=environment)
    (built,) = built_in(folder)
    return built


@pytest.mark.parametrize("damage", ["empty", "cut", "another program's", "crashes"])
def test_a_damaged_library_is_built_anew(damage: str, cache: Path, earlier_build: Path, tmp_path: Path) -> None:
    """It is tried in another process: loading a file that was cut, or code of another processor, ends a process."""
    shutil.copytree(earlier_build.parent, cache / "palaver" / "compiled")
    (built,) = built_in(cache)
    library = built.read_bytes()
    source = tmp_path / "crash.c"
    source.write_text("int palaver_check(void) { __builtin_trap(); }")
    crashing = tmp_path / "crash.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(crashing)], check=True)
    damaged = {
        "empty": b"",
        "cut": library[: len(library) // 2],
        "another program's": b"#!/bin/sh\n",
        "crashes": crashing.read_bytes(),
    }
    built.write_bytes(damaged[damage])
    load_compiled_library()
    assert built_in(cache) == [built]
    assert built.stat().st_size > len(library) // 2
    assert build.passes_self_check(built)


def test_without_a_compiler_an_earlier_build_is_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = load_compiled_library().build
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert load_compiled_library().build == built


def test_a_library_is_tried_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_compiled_library()
    monkeypatch.setattr(build, "passes_self_check", lambda path: pytest.fail("it passed before"))
    load_compiled_library()


def test_a_cache_that_can_not_be_written(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    assert load_compiled_library().functions.palaver_check() == 0


def test_built_by_many_at_once(cache: Path) -> None:
    running = [subprocess.Popen([sys.executable, "-c", BUILD]) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert len(built_in(cache)) == 1


def test_another_processor_has_another_library(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    here = load_compiled_library().build
    monkeypatch.setattr(build, "_processor_features", lambda: "flags: of another machine")
    assert load_compiled_library().build != here


def test_the_compiler_may_have_flags(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Such as those of another processor: they make another library."""
    plain = load_compiled_library().build
    monkeypatch.setenv("CC", "cc -O1")
    assert load_compiled_library().build != plain
    assert len(built_in(cache)) == 2


def test_the_copy_of_the_weights_counts(folder_of: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(folder_of("llama"))
    without, with_copy = (fit(checkpoint, CPU, torch.float32, compiled) for compiled in (False, True))
    assert with_copy.weights_bytes == 2 * without.weights_bytes  # these are float32 in their files
