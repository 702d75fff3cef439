"""Recorded passes: what is played gives what would be computed, however sequences come, go and grow.

A recorder of ours stands for the accelerator's: it too does again what a pass did to memory, and runs no Python of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from palaver.engines.torch import EngineOptions, SchedulerLimits, TorchEngine, cuda_graphs
from palaver.engines.torch.batch import ForwardBatch, SequenceChunk, build_batch, sequence_chunk
from palaver.engines.torch.cuda_graphs import REACH, GraphDecoder, Pass, StepDecoder
from palaver.engines.torch.decoders.library import LibraryDecoder, UnsupportedModel, kv_layout
from palaver.engines.torch.decoders.plain import FusedDecoder, PlainDecoder
from palaver.engines.torch.kv_cache import KVLayout, SlotAllocator
from palaver.engines.torch.probe import ModelProbe
from palaver.generation import Prompt
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.reference import reference
from tests.engines.running import continued, run

LENGTH = 24
GREEDY = Sampling(temperature=0, max_tokens=LENGTH, banned_ids=(tiny.END,))
TEXTS = (b"Hi", b"A text that is a good deal longer than the others, by far", b"x", b"abc" * 9, b"some more")


class Tape:
    """Records by tracing; counts what it is asked for."""

    def __init__(self) -> None:
        self.recorded = 0
        self.played = 0
        self.room = 1000

    def __call__(self, run: Pass) -> Pass:
        if self.recorded == self.room:
            raise RuntimeError("out of memory")
        self.recorded += 1
        operations: Callable[[], Tensor] = make_fx(lambda: run())()

        def play() -> Tensor:
            self.played += 1
            return operations()

        return play


@pytest.fixture(params=["llama", "qwen2", "qwen3", "gemma3", "gpt_oss"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tape() -> Tape:
    return Tape()


@pytest.fixture
def engine(family: str, tape: Tape) -> Iterator[TorchEngine]:
    options = EngineOptions(cache_bytes=1 << 22, limits=SchedulerLimits(running=4, chunk=16))
    engine = TorchEngine(family, tiny.build(family), tiny.VOCABULARY, options)
    forward = engine._runner._forward
    assert isinstance(forward, FusedDecoder | LibraryDecoder)
    engine._runner._forward = GraphDecoder(forward, tape)
    engine._runner.closes = False  # as where steps are recorded
    engine._runner._cache.widens = True
    yield engine
    asyncio.run(engine.close())


async def test_says_what_the_model_says(engine: TorchEngine, family: str, tape: Tape) -> None:
    model = tiny.build(family)
    alone = [await run(engine, Prompt(tuple(text)), GREEDY) for text in TEXTS]
    assert 0 < tape.recorded < len(TEXTS), "in the same lanes it is the same recording"
    assert tape.played == len(TEXTS) * LENGTH - tape.recorded, "all steps but the first of those recorded"
    together = await asyncio.gather(*(run(engine, Prompt(tuple(text)), GREEDY) for text in TEXTS))
    for text, *outs in zip(TEXTS, alone, together, strict=True):
        expected = reference(model, Prompt(tuple(text)), GREEDY)
        assert all(expected.agrees(out.ids) for out in outs)


async def test_what_cannot_be_recorded_is_computed(engine: TorchEngine, family: str, tape: Tape) -> None:
    tape.room = 1
    model = tiny.build(family)
    together = await asyncio.gather(*(run(engine, Prompt(tuple(text)), GREEDY) for text in TEXTS))
    for text, out in zip(TEXTS, together, strict=True):
        assert reference(model, Prompt(tuple(text)), GREEDY).agrees(out.ids)
    assert tape.recorded == 1


async def test_a_recording_goes_with_its_lanes(engine: TorchEngine, family: str, tape: Tape) -> None:
    prompt = Prompt(tuple(b"Hi"), conversation="one")
    expected = reference(tiny.build(family), prompt, GREEDY)
    for times in (1, 2, 3):
        assert expected.agrees((await run(engine, prompt, GREEDY)).ids)
        await engine.forget("one")  # which gives the memory back
        assert tape.recorded == times


async def test_stopped_and_continued(engine: TorchEngine, family: str) -> None:
    model = tiny.build(family)
    for cut in (2, 11):
        prompts = [Prompt((*text, cut)) for text in TEXTS]
        begun = await asyncio.gather(*(run(engine, prompt, GREEDY, stop_after=cut) for prompt in prompts))
        rest = [run(engine, continued(prompt, out.ids), GREEDY) for prompt, out in zip(prompts, begun, strict=True)]
        for prompt, first, second in zip(prompts, begun, await asyncio.gather(*rest), strict=True):
            assert reference(model, prompt, GREEDY).agrees(first.ids + second.ids)


async def test_it_is_recorded_anew_where_it_reaches_no_further(
    engine: TorchEngine, family: str, tape: Tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "REACH", 64)
    prompt = Prompt(tuple(range(54)))
    out = await run(engine, prompt, GREEDY)
    assert reference(tiny.build(family), prompt, GREEDY).agrees(out.ids)
    assert tape.recorded == 2


async def test_prompts_in_between_leave_the_recording_alone(engine: TorchEngine, tape: Tape) -> None:
    """While a long prompt is computed in chunks, the reply beside it is still played."""
    sampling = Sampling(temperature=0, max_tokens=40, banned_ids=(tiny.END,))
    async with engine.generate(Prompt(tuple(b"Hi")), sampling) as outputs:
        for _ in range(4):
            await anext(outputs)
        other = asyncio.create_task(run(engine, Prompt(tuple(i % 251 for i in range(150))), GREEDY))
        async for _ in outputs:
            pass
        await other
    assert tape.recorded <= 3  # alone, with the other, and whoever is left


@torch.inference_mode()
def test_a_probe_finds_out_whether_it_works(family: str, tape: Tape) -> None:
    model = tiny.build(family)
    probe = ModelProbe(model, 256)
    layout = probe.layout()
    for room in (0, 1000):
        tape.room = room
        recorded = GraphDecoder(decoder_of(model), tape)
        probe.check(recorded, layout)
        assert bool(recorded.recordings) == bool(room)


@torch.inference_mode()
def test_bits_are_the_same_played_or_computed(family: str, tape: Tape) -> None:
    model = tiny.build(family)
    layout = kv_layout(model, torch.tensor([1, 2, 3]))
    decoder = decoder_of(model)
    played = steps(GraphDecoder(decoder, tape), layout)
    computed = steps(decoder, layout, lambda planned: planned.steady(REACH))
    assert tape.played == len(played) - 1
    for one, other in zip(played, computed, strict=True):
        assert torch.equal(one, other)


def decoder_of(model: Any) -> StepDecoder:
    try:
        return FusedDecoder(PlainDecoder(model, 256))
    except UnsupportedModel:
        own = LibraryDecoder(model)
        own.attach()
        return own


def steps(
    forward: Callable[[ForwardBatch], Tensor],
    layout: KVLayout,
    as_run: Callable[[ForwardBatch], ForwardBatch] = lambda planned: planned,
) -> list[Tensor]:
    """The logits of some steps of three sequences, with a lane between them that is not theirs."""
    lanes = SlotAllocator(layout, 1 << 24)
    places = [lanes.open(64) for _ in range(4)]
    texts = [tuple(b"A few words"), tuple(b"left out"), tuple(b"and some more of them"), tuple(b"!")]
    for lane, text in zip(places, texts, strict=True):
        forward(build_batch([sequence_chunk(lane, 0, text)], layout.device, asked=False))
    del places[1], texts[1]
    starts = [len(text) for text in texts]

    def runs(at: int) -> list[SequenceChunk]:
        return [sequence_chunk(lane, start + at, (at + 7,)) for lane, start in zip(places, starts, strict=True)]

    planned, out = build_batch(runs(0), layout.device), []
    for at in range(6):
        if at:
            planned.advance(runs(at))
        out.append(forward(as_run(planned)).clone())
    return out
