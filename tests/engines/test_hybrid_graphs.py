"""Captured decode passes of hybrid models: one for each number of sequences gives the replies of any sequences.

A recorder stands in for CUDA, and torch's operations for the kernels of attention: they too find slots by a table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from palaver.engines.core.kv_cache import SlotAllocator, SlotPool
from palaver.engines.torch.attention import MaskRule
from palaver.engines.torch.attention_functions import AttentionParams
from palaver.engines.torch.batch import SequenceChunk, sequence_chunk
from palaver.engines.torch.cuda_graphs import Pass
from palaver.engines.torch.devices import TensorLayout, TensorMemory
from palaver.engines.torch.hybrid_decoder import HybridDecoder
from palaver.engines.torch.hybrid_graphs import NoAttention, RowPasses
from tests.engines.generate import continued, run
from tests.engines.test_cuda_graphs import RecordingCapture
from tests.engines.test_hybrid_runner import GREEDY, PROMPTS, Oracle, loaded, runner_of

FAMILIES = ("qwen3_5", "lfm2")
"""Without experts: on the CPU the host picks them, which no graph repeats."""
ROWS = 16


class PoolAttention:
    """Attention over the slots of one pool."""

    positions: Tensor

    def __init__(self) -> None:
        self._pool: SlotPool[Tensor] | None = None
        self._slots = torch.zeros(ROWS, dtype=torch.int64)
        self.loads = 0

    def load(self, chunks: Sequence[SequenceChunk]) -> bool:
        before, self._pool = self._pool, chunks[0].pool
        assert all(chunk.pool is self._pool for chunk in chunks)
        self._slots[: len(chunks)] = torch.tensor([chunk.index for chunk in chunks])
        self.loads += 1
        return self._pool is not before

    def make_room(self, tokens: int) -> bool:
        return False

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        assert self._pool is not None
        slots, positions = self._slots[: len(keys)], self.positions[: len(keys)]
        self._pool.keys[layer].transpose(1, 2).index_put_((slots, positions), keys)
        self._pool.values[layer].transpose(1, 2).index_put_((slots, positions), values)

    def attend(self, layer: int, queries: Tensor, rule: MaskRule, params: AttentionParams) -> Tensor:
        assert self._pool is not None
        assert rule.causal
        rows = len(queries)
        keys, values = (cache[layer][self._slots[:rows]] for cache in (self._pool.keys, self._pool.values))
        seen = torch.arange(keys.shape[2])[None, :] <= self.positions[:rows, None]
        mask = torch.zeros(rows, 1, 1, keys.shape[2]).masked_fill(~seen[:, None, None], -torch.inf)
        out = F.scaled_dot_product_attention(
            queries[:, :, None], keys, values, mask, scale=params.scale, enable_gqa=True
        )
        return out[:, :, 0]


class StateCapture(RecordingCapture):
    """Recording computes the pass, too: the states are put back then, as no capture on CUDA changes any."""

    def __init__(self, decoder: HybridDecoder) -> None:
        super().__init__()
        self._states = decoder.states

    def __call__(self, run: Pass) -> Pass:
        before = [tensor.clone() for tensor in self._states.tensors]
        try:
            return super().__call__(run)
        finally:
            for tensor, held in zip(self._states.tensors, before, strict=True):
                tensor.copy_(held)


def captured(engine: Any) -> tuple[HybridDecoder, PoolAttention, RecordingCapture]:
    decoder: Any = runner_of(engine)._forward
    attention, capture = PoolAttention(), StateCapture(decoder)
    decoder.use_graphs(capture, attention)
    return decoder, attention, capture


@pytest.mark.parametrize("family", FAMILIES)
async def test_replies_join_and_leave_captured_passes(family: str, folder_of: Callable[[str], Path]) -> None:
    engine, oracle = loaded(family, folder_of), Oracle(family)
    decoder, attention, capture = captured(engine)

    async def reply(number: int) -> None:
        length = 3 + number * 5 % 22
        out = await run(engine, PROMPTS[number], replace(GREEDY, max_tokens=length))
        assert oracle.agrees(PROMPTS[number], out.ids)
        again = await run(engine, continued(PROMPTS[number], out.ids), GREEDY)
        assert oracle.agrees(PROMPTS[number], out.ids + again.ids)

    for together in ((0, 1, 2, 3, 4), (5,), (6, 7, 5, 2)):
        await asyncio.gather(*(reply(number) for number in together))
    assert decoder.uses_graphs
    assert attention.loads > capture.captures, "other sequences have the same graph"
    assert capture.replays > 3 * capture.captures
    await engine.close()


async def test_a_pass_that_can_not_be_captured_is_computed(folder_of: Callable[[str], Path]) -> None:
    engine, oracle = loaded("lfm2", folder_of), Oracle("lfm2")
    decoder, _, capture = captured(engine)
    capture.max_captures = 0
    out = await run(engine, PROMPTS[3], GREEDY)
    assert oracle.agrees(PROMPTS[3], out.ids)
    assert not decoder.uses_graphs
    await engine.close()


@pytest.mark.usefixtures("interpreter")
@torch.inference_mode()
def test_the_kernels_attend_over_slots_anywhere() -> None:
    """Two slots of different pools, one of them with more than a tile of tokens; then others in the same rows."""
    pytest.importorskip("triton", reason="Triton is not installed: attention over slots is not tested")
    from palaver.engines.torch.slot_attention import SlotAttention

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(3)
    shape = (2, 32)
    layout = TensorLayout(((shape, shape), (shape, shape)), TensorMemory(torch.float32, device))
    slots = SlotAllocator(layout, 1 << 24)
    places = [(slots.allocate(200), 150), (slots.allocate(20), 7), (slots.allocate(20), 0)]
    for slot, _ in places:
        for buffer in slot.pool.buffers.values():
            buffer.normal_()
    attention = SlotAttention(layout)
    for rows in (places[:2], places[2:], places[::-1]):
        attention.positions = torch.tensor([at for _, at in rows], device=device)
        attention.load([sequence_chunk(slot, at, (0,)) for slot, at in rows])
        attention.make_room(151)
        for layer in range(2):
            queries, keys, values = (torch.randn(len(rows), heads, 32, device=device) for heads in (4, 2, 2))
            attention.write(layer, keys, values)
            out = attention.attend(layer, queries, MaskRule(), AttentionParams(0.2))
            for row, (slot, at) in enumerate(rows):
                held_keys, held_values = (
                    cache[layer][slot.index][:, : at + 1] for cache in (slot.pool.keys, slot.pool.values)
                )
                assert torch.equal(held_keys[:, at], keys[row])
                assert torch.equal(held_values[:, at], values[row])
                expected = F.scaled_dot_product_attention(
                    queries[row][:, None], held_keys, held_values, scale=0.2, enable_gqa=True
                )
                assert torch.allclose(out[row], expected[:, 0], atol=1e-5)


def test_graphs_are_captured_again_when_memory_moves() -> None:
    runs: list[str] = []

    def compute(ids: Tensor, positions: Tensor) -> Tensor:
        runs.append("computed")
        return ids + positions

    def capture(run: Pass) -> Pass:
        runs.append("captured")
        return lambda: (run(), runs.__setitem__(-1, "replayed"))[0]

    passes = RowPasses(compute, NoAttention(), capture)
    inputs = torch.tensor([[5, 7], [2, 2], [3, 1]])
    for _ in range(3):
        assert passes.run(inputs, 2).tolist() == [8, 8]
    assert runs == ["computed", "captured", "replayed", "replayed"]
    assert passes.run(inputs[:, :1], 2).tolist() == [8]
    passes.clear()
    runs.clear()
    for _ in range(2):
        passes.run(inputs, 2)
    assert runs == ["computed", "captured", "replayed"]
    assert passes.captured == 2
    assert passes.run(torch.cat([inputs] * 4, 1), 2).tolist() == [8] * 8, "more rows than ever"
