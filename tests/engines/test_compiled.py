"""Compiled steps give the model's own tokens; a row's bits depend on nothing but itself; what can't be had is said."""

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from palaver.engines.torch import Options, load
from palaver.engines.torch.attention import plan, run_of
from palaver.engines.torch.checkpoint import open_checkpoint
from palaver.engines.torch.compiled.building import load_library
from palaver.engines.torch.compiled.decoder import ROWS, CompiledDecoder
from palaver.engines.torch.lanes import Lane, Lanes
from palaver.engines.torch.loading import quiet
from palaver.engines.torch.memory import CPU, fit
from palaver.engines.torch.plain import PlainDecoder
from palaver.engines.torch.probing import Probe
from palaver.errors import CantCompile
from palaver.generation import Prompt
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.compiling import needs_a_compiler
from tests.engines.reference import reference
from tests.engines.running import run

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
}
COMPILED = Options(compiled=True)


def rounded(model: Any, dtype: torch.dtype) -> Any:
    """With weights that this type holds without loss."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
async def test_says_what_the_model_says(shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Weights that another type holds without loss are kept in it."""
    family, overrides = SHAPES[shape]
    model = rounded(tiny.build(family, **overrides), dtype)
    with quiet():
        model.save_pretrained(tmp_path)
    engine = load(tmp_path, vocabulary=tiny.VOCABULARY, options=COMPILED)
    try:
        assert engine.info.steps == "compiled"
        together = await asyncio.gather(*(run(engine, Prompt(tuple(text)), GREEDY) for text in TEXTS))
        for text, out in zip(TEXTS, together, strict=True):
            assert reference(model, Prompt(tuple(text)), GREEDY).agrees(out.ids)
    finally:
        await engine.close()


@pytest.mark.parametrize("threads", [1, 2, 3])
@torch.inference_mode()
def test_a_rows_bits_depend_on_nothing_but_itself(threads: int) -> None:
    model = rounded(tiny.build("qwen3"), torch.bfloat16)
    probe = Probe(model, tiny.SIZE)
    layout = probe.layout()
    decoders = [CompiledDecoder(PlainDecoder(model, 512), layout, load_library(), n) for n in (1, threads)]
    lanes = Lanes(layout, 1 << 24)
    opened: list[tuple[Lane, int]] = []
    for number in range(ROWS):
        lane, length = lanes.open(64)[0], 1 + 7 * number % 50
        decoders[0](plan([run_of(lane, 0, [(5 * i + number) % 256 for i in range(length)])], CPU))
        opened.append((lane, length))
    alone = [decoders[0](plan([run_of(lane, length, [65])], CPU))[0].clone() for lane, length in opened]
    for count in range(1, ROWS + 1):
        rows = decoders[1](plan([run_of(lane, length, [65]) for lane, length in opened[:count]], CPU))
        assert all(torch.equal(row, one) for row, one in zip(rows, alone[:count], strict=True))


async def test_more_rows_than_it_is_made_for_are_computed_as_without_it(folder_of: Callable[[str], Path]) -> None:
    model = tiny.build("qwen3")
    engine = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=COMPILED)
    prompts = [Prompt(tuple(b"number " + str(number).encode())) for number in range(ROWS + 3)]
    short = Sampling(temperature=0, max_tokens=6, banned_ids=(tiny.END,))
    outs = await asyncio.gather(*(run(engine, prompt, short) for prompt in prompts))
    await engine.close()
    assert all(reference(model, prompt, short).agrees(out.ids) for prompt, out in zip(prompts, outs, strict=True))


async def test_to_the_end_of_the_context(folder_of: Callable[[str], Path]) -> None:
    engine = load(folder_of("llama"), vocabulary=tiny.VOCABULARY, options=Options(compiled=True, context=100))
    said = Sampling(temperature=0, max_tokens=500, banned_ids=(tiny.END,))
    out = await run(engine, Prompt(tuple(b"a" * 70)), said)
    await engine.close()
    assert len(out.ids) == 30
    assert reference(tiny.build("llama"), Prompt(tuple(b"a" * 70)), Sampling(**vars_of(said, 30))).agrees(out.ids)


def vars_of(sampling: Sampling, tokens: int) -> dict[str, Any]:
    return {"temperature": sampling.temperature, "banned_ids": sampling.banned_ids, "max_tokens": tokens}


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("gemma3", "the model's own code, not compiled: it has a window of attention"),
        ("mamba", "the model's own code, not compiled: "),
        ("gpt2", "the model's own code, not compiled: "),
    ],
)
async def test_another_kind_of_model_runs_as_without_it_and_says_so(
    family: str, why: str, folder_of: Callable[[str], Path]
) -> None:
    engine = load(folder_of(family), vocabulary=tiny.VOCABULARY, options=COMPILED)
    prompt = Prompt(tuple(b"Hello"))
    out = await run(engine, prompt, GREEDY)
    await engine.close()
    assert engine.info.steps.startswith(why)
    assert reference(tiny.build(family), prompt, GREEDY).agrees(out.ids)


async def test_sizes_it_is_not_written_for(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path, hidden_size=72, head_dim=16)
    engine = load(folder, vocabulary=tiny.VOCABULARY, options=COMPILED)
    await engine.close()
    expected = "few operations, not compiled: compiled steps want sizes that are multiples of 16"
    assert engine.info.steps == expected


def test_without_a_compiler(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CantCompile, match="no C compiler here; install gcc or clang; or leave out --compile"):
        load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=COMPILED)


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_text('#!/bin/sh\necho "cc: out of order" >&2\nexit 1\n')
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(CantCompile, match="cc: out of order"):
        load_library()


def test_it_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_library()
    (built,) = (tmp_path / "palaver" / "compiled").iterdir()
    os.utime(built, (1, 1))
    load_library()
    assert built.stat().st_mtime == 1


def test_the_copy_of_the_weights_counts(folder_of: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(folder_of("llama"))
    without, with_copy = (fit(checkpoint, CPU, torch.float32, compiled) for compiled in (False, True))
    assert with_copy.weights_bytes == 2 * without.weights_bytes  # these are float32 in their files
