"""Captured graphs: a replay gives what the pass would compute, however sequences come, go and grow.

A recorder stands in for CUDA: it too repeats what a pass did to memory, without running its Python.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from palaver.engines.core.kv_cache import SlotAllocator
from palaver.engines.core.runner import UnsupportedModel
from palaver.engines.torch import EngineOptions, SchedulerLimits, TorchEngine, cuda_graphs
from palaver.engines.torch.batch import ForwardBatch, SequenceChunk, build_batch, sequence_chunk
from palaver.engines.torch.cuda_graphs import LENGTH_MULTIPLE, GraphDecoder, Pass, StepDecoder
from palaver.engines.torch.devices import TensorLayout
from palaver.engines.torch.library_decoder import LibraryDecoder, kv_layout
from palaver.engines.torch.library_engine import ModelProbe, model_engine
from palaver.engines.torch.plain_decoder import FusedDecoder, PlainDecoder
from palaver.generation import Prompt
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.generate import continued, run
from tests.engines.reference import reference

LENGTH = 14
GREEDY = Sampling(temperature=0, max_tokens=LENGTH, banned_ids=(tiny.END,))
TEXTS = (b"Hi", b"A text that is a good deal longer than the others, by far", b"x", b"abc" * 9, b"some more")


class Recorder(TorchDispatchMode):
    """Records the operations of a pass, to run them again on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, list[Any], TreeSpec, list[Any]]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses to read a value, which a captured graph cannot do either."""
        assert operation is not torch.ops.aten._local_scalar_dense.default, "a captured pass reads no values"
        inputs, structure = tree_flatten((args, kwargs or {}))
        output = operation(*args, **(kwargs or {}))
        self._operations.append((operation, inputs, structure, tree_flatten(output)[0]))
        return output

    def replay(self, output: Tensor) -> Tensor:
        """Computes what was recorded as `output` anew."""
        computed: dict[int, Any] = {}
        for operation, inputs, structure, outputs in self._operations:
            args, kwargs = tree_unflatten([computed.get(id(value), value) for value in inputs], structure)
            again = tree_flatten(operation(*args, **kwargs))[0]
            pairs = zip(outputs, again, strict=True)
            computed.update((id(first), value) for first, value in pairs if isinstance(first, Tensor))
        found: Tensor = computed[id(output)]
        return found


class RecordingCapture:
    """Captures by recording; counts captures and replays."""

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0
        self.max_captures = 1000

    def __call__(self, run: Pass) -> Pass:
        if self.captures == self.max_captures:
            raise RuntimeError("out of memory")
        self.captures += 1
        with Recorder() as recorder:
            output = run()

        def replay() -> Tensor:
            self.replays += 1
            return recorder.replay(output)

        return replay


@pytest.fixture(params=["llama", "qwen2", "qwen3", "gemma3", "gpt_oss"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def capture() -> RecordingCapture:
    return RecordingCapture()


@pytest.fixture
def engine(family: str, capture: RecordingCapture) -> Iterator[TorchEngine]:
    options = EngineOptions(cache_bytes=1 << 22, limits=SchedulerLimits(max_running=4, chunk_tokens=16))
    engine = model_engine(family, tiny.build(family), tiny.VOCABULARY, options)
    runner: Any = engine._runner
    forward = runner._forward
    assert isinstance(forward, FusedDecoder | LibraryDecoder)
    runner._forward = GraphDecoder(forward, capture)
    runner.prefills_last_token = False  # as on CUDA
    runner._cache.widens_pools = True
    yield engine
    asyncio.run(engine.close())


async def test_says_what_the_model_says(engine: TorchEngine, family: str, capture: RecordingCapture) -> None:
    model = tiny.build(family)
    alone = [await run(engine, Prompt(tuple(text)), GREEDY) for text in TEXTS]
    assert 0 < capture.captures < len(TEXTS), "the same slots share a graph"
    assert capture.replays == len(TEXTS) * LENGTH - capture.captures, (
        "all decode passes but the first of each captured batch"
    )
    together = await asyncio.gather(*(run(engine, Prompt(tuple(text)), GREEDY) for text in TEXTS))
    for text, *outs in zip(TEXTS, alone, together, strict=True):
        expected = reference(model, Prompt(tuple(text)), GREEDY)
        assert all(expected.agrees(out.ids) for out in outs)


async def test_a_pass_that_cannot_be_captured_is_computed(
    engine: TorchEngine, family: str, capture: RecordingCapture
) -> None:
    capture.max_captures = 1
    model = tiny.build(family)
    together = await asyncio.gather(*(run(engine, Prompt(tuple(text)), GREEDY) for text in TEXTS))
    for text, out in zip(TEXTS, together, strict=True):
        assert reference(model, Prompt(tuple(text)), GREEDY).agrees(out.ids)
    assert capture.captures == 1


async def test_a_graph_is_dropped_with_its_slots(engine: TorchEngine, family: str, capture: RecordingCapture) -> None:
    prompt = Prompt(tuple(b"Hi"), conversation="one")
    expected = reference(tiny.build(family), prompt, GREEDY)
    for times in (1, 2, 3):
        assert expected.agrees((await run(engine, prompt, GREEDY)).ids)
        await engine.forget("one")  # which frees the memory
        assert capture.captures == times


async def test_stopped_and_continued(engine: TorchEngine, family: str) -> None:
    model = tiny.build(family)
    for cut in (2, 11):
        prompts = [Prompt((*text, cut)) for text in TEXTS]
        partial = await asyncio.gather(*(run(engine, prompt, GREEDY, stop_after=cut) for prompt in prompts))
        rest = [run(engine, continued(prompt, out.ids), GREEDY) for prompt, out in zip(prompts, partial, strict=True)]
        for prompt, first, second in zip(prompts, partial, await asyncio.gather(*rest), strict=True):
            assert reference(model, prompt, GREEDY).agrees(first.ids + second.ids)


async def test_a_longer_sequence_is_captured_again(
    engine: TorchEngine, family: str, capture: RecordingCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "LENGTH_MULTIPLE", 64)
    prompt = Prompt(tuple(range(54)))
    out = await run(engine, prompt, GREEDY)
    assert reference(tiny.build(family), prompt, GREEDY).agrees(out.ids)
    assert capture.captures == 2


async def test_prefills_in_between_keep_the_graph(engine: TorchEngine, capture: RecordingCapture) -> None:
    """While a long prompt is computed in chunks, the other reply is still replayed."""
    sampling = Sampling(temperature=0, max_tokens=40, banned_ids=(tiny.END,))
    async with engine.generate(Prompt(tuple(b"Hi")), sampling) as outputs:
        for _ in range(4):
            await anext(outputs)
        other = asyncio.create_task(run(engine, Prompt(tuple(i % 251 for i in range(150))), GREEDY))
        async for _ in outputs:
            pass
        await other
    assert capture.captures <= 3  # alone, with the other, and the one that remains


@torch.inference_mode()
def test_a_probe_finds_out_whether_it_works(family: str, capture: RecordingCapture) -> None:
    model = tiny.build(family)
    probe = ModelProbe(model, 256)
    layout = probe.layout()
    for max_captures in (0, 1000):
        capture.max_captures = max_captures
        decoder = GraphDecoder(decoder_of(model), capture)
        probe.check(decoder, layout)
        assert bool(decoder.num_graphs) == bool(max_captures)


@torch.inference_mode()
def test_bits_are_the_same_replayed_or_computed(family: str, capture: RecordingCapture) -> None:
    model = tiny.build(family)
    layout = kv_layout(model, torch.tensor([1, 2, 3]))
    decoder = decoder_of(model)
    replayed = decode(GraphDecoder(decoder, capture), layout)
    computed = decode(decoder, layout, lambda batch: batch.padded_to(LENGTH_MULTIPLE))
    assert capture.replays == len(replayed) - 1
    for one, other in zip(replayed, computed, strict=True):
        assert torch.equal(one, other)


def decoder_of(model: Any) -> StepDecoder:
    try:
        return FusedDecoder(PlainDecoder.from_model(model, 256))
    except UnsupportedModel:
        own = LibraryDecoder(model)
        own.attach()
        return own


def decode(
    forward: Callable[[ForwardBatch], Tensor],
    layout: TensorLayout,
    transform: Callable[[ForwardBatch], ForwardBatch] = lambda batch: batch,
) -> list[Tensor]:
    """The logits of some decode passes of three sequences, with an unrelated slot between them."""
    allocator = SlotAllocator(layout, 1 << 24)
    slots = [allocator.allocate(64) for _ in range(4)]
    texts = [tuple(b"A few words"), tuple(b"left out"), tuple(b"and some more of them"), tuple(b"!")]
    for slot, text in zip(slots, texts, strict=True):
        forward(build_batch([sequence_chunk(slot, 0, text)], layout.device, need_logits=False))
    del slots[1], texts[1]
    starts = [len(text) for text in texts]

    def chunks(at: int) -> list[SequenceChunk]:
        return [sequence_chunk(slot, start + at, (at + 7,)) for slot, start in zip(slots, starts, strict=True)]

    batch, out = build_batch(chunks(0), layout.device), []
    for at in range(6):
        if at:
            batch.advance(chunks(at))
        out.append(forward(transform(batch)).clone())
    return out
