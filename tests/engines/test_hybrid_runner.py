"""Hybrid models, with recurrent or convolutional layers: the replies of a batch are those of the library alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from palaver.engines.base import BY_BATCH
from palaver.engines.core.kv_cache import Slot, SlotPool
from palaver.engines.torch import EngineOptions, SchedulerLimits, TorchEngine, load
from palaver.engines.torch.devices import TensorLayout, TensorMemory
from palaver.engines.torch.hybrid_decoder import HybridDecoder, StateRows, StateTensor
from palaver.engines.torch.hybrid_runner import HybridRunner
from palaver.engines.torch.snapshot_runner import SnapshotRunner
from palaver.errors import CacheFull
from palaver.generation import Prompt
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.generate import continued, run
from tests.engines.reference import reference

HYBRID = ("qwen3_next", "qwen3_5", "lfm2")
OTHERS = ("bamba", "falcon_h1", "granite_hybrid", "jamba", "mamba2", "mamba")
TOKENS = 24
GREEDY = Sampling(temperature=0, max_tokens=TOKENS, banned_ids=(tiny.END,))
PROMPTS = [Prompt(tuple((7 * i * i + (13 + k) * i) % 256 for i in range(1 + 9 * k))) for k in range(8)]


def loaded(family: str, folder_of: Callable[[str], Path], **options: Any) -> TorchEngine:
    return load(folder_of(family), vocabulary=tiny.VOCABULARY, options=EngineOptions(compiled=False, **options))


def runner_of(engine: TorchEngine) -> HybridRunner:
    runner = engine._runner
    assert isinstance(runner, HybridRunner)
    return runner


class Oracle:
    """Replies of the transformers library, one by one."""

    def __init__(self, family: str) -> None:
        self._model = tiny.build(family)
        self._replies: dict[Prompt, list[int]] = {}

    def agrees(self, prompt: Prompt, ids: list[int]) -> bool:
        """Whether the library says so too, up to a token at which rounding may have decided."""
        if prompt not in self._replies:
            self._replies[prompt] = self._generate(prompt)
        sampling = replace(GREEDY, max_tokens=len(ids))
        return ids == self._replies[prompt][: len(ids)] or reference(self._model, prompt, sampling).agrees(ids)

    def _generate(self, prompt: Prompt) -> list[int]:
        ids = torch.tensor([prompt.context_ids])
        options: dict[str, Any] = {"suppress_tokens": [tiny.END], "pad_token_id": 0, "eos_token_id": None}
        options |= {"attention_mask": torch.ones_like(ids)}  # else tokens with the id 0 count as padding
        with torch.inference_mode():
            out = self._model.generate(ids, max_new_tokens=TOKENS, do_sample=False, **options)
        reply: list[int] = out[0, ids.shape[1] :].tolist()
        return reply


OracleOf = Callable[[str], Oracle]


@pytest.fixture(scope="module")
def oracle_of() -> OracleOf:
    """The library replies once to each prompt."""
    return cache(Oracle)


class ModelCalls:
    """The shapes of the ids that the model was called with."""

    def __init__(self, engine: TorchEngine) -> None:
        self.shapes: list[tuple[int, ...]] = []
        model: Any = runner_of(engine)._forward
        model._model.register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(self, _: Any, __: Any, kwargs: dict[str, Any]) -> None:
        self.shapes.append(tuple(kwargs["input_ids"].shape))


def wait_for_requests(engine: TorchEngine, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step comes when so many requests are there."""
    scheduler = engine._scheduler
    step, started = scheduler.step, False

    def step_with_all() -> None:
        nonlocal started
        started = started or sum(scheduler.counts) == count
        if started:
            step()

    monkeypatch.setattr(scheduler, "step", step_with_all)


@pytest.mark.parametrize("family", [*HYBRID, *OTHERS])
async def test_eight_replies_at_once_are_those_of_the_library(
    family: str, folder_of: Callable[[str], Path], oracle_of: OracleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, oracle = loaded(family, folder_of), oracle_of(family)
    wait_for_requests(engine, len(PROMPTS), monkeypatch)
    assert engine.info.exactness == BY_BATCH
    assert engine.info.reuse == "snapshots"
    calls = ModelCalls(engine)
    together = await asyncio.gather(*(run(engine, prompt, GREEDY) for prompt in PROMPTS))
    for prompt, out in zip(PROMPTS, together, strict=True):
        assert oracle.agrees(prompt, out.ids)
    assert max(shape[0] for shape in calls.shapes) == 8
    await engine.close()


@pytest.mark.parametrize("family", HYBRID)
async def test_replies_share_their_passes(family: str, folder_of: Callable[[str], Path]) -> None:
    engine = loaded(family, folder_of)
    await asyncio.gather(*(run(engine, prompt, replace(GREEDY, max_tokens=1)) for prompt in PROMPTS))
    calls = ModelCalls(engine)
    await asyncio.gather(*(run(engine, prompt, GREEDY) for prompt in PROMPTS))
    assert len(calls.shapes) <= TOKENS + len(PROMPTS), "some may join later than others"
    assert calls.shapes.count((8, 1)) >= TOKENS - len(PROMPTS)
    await engine.close()


@pytest.mark.parametrize("family", HYBRID)
async def test_replies_join_and_leave_at_any_time(
    family: str, folder_of: Callable[[str], Path], oracle_of: OracleOf
) -> None:
    engine, oracle = loaded(family, folder_of, limits=SchedulerLimits(chunk_tokens=16)), oracle_of(family)

    async def reply(number: int, prompt: Prompt) -> None:
        await asyncio.sleep(0.02 * (number * 5 % 7))
        length = 3 + number * 5 % 22
        out = await run(engine, prompt, replace(GREEDY, max_tokens=length))
        assert len(out.ids) == length
        assert oracle.agrees(prompt, out.ids)
        again = await run(engine, continued(prompt, out.ids), GREEDY)
        assert oracle.agrees(prompt, out.ids + again.ids)

    await asyncio.gather(*(reply(number, prompt) for number, prompt in enumerate(PROMPTS)))
    await engine.close()


@pytest.mark.parametrize("family", HYBRID)
async def test_stopped_replies_continue_beside_others(
    family: str, folder_of: Callable[[str], Path], oracle_of: OracleOf
) -> None:
    engine, oracle = loaded(family, folder_of), oracle_of(family)
    others = [asyncio.create_task(run(engine, prompt, GREEDY)) for prompt in PROMPTS[4:]]
    for prompt in PROMPTS[1:4]:
        cut = await run(engine, prompt, GREEDY, stop_after=5)
        rest = await run(engine, continued(prompt, cut.ids), GREEDY)
        assert len(cut.ids + rest.ids) == TOKENS
        assert oracle.agrees(prompt, cut.ids + rest.ids)
    for prompt, other in zip(PROMPTS[4:], others, strict=True):
        assert oracle.agrees(prompt, (await other).ids)
    await engine.close()


async def test_many_stops_and_continues_at_a_time(folder_of: Callable[[str], Path], oracle_of: OracleOf) -> None:
    """Sequences often get the slots of others, in which the last batch could go on."""
    engine, oracle = loaded("lfm2", folder_of), oracle_of("lfm2")

    async def reply(number: int, prompt: Prompt) -> None:
        ids: list[int] = []
        while len(ids) < TOKENS:
            cut = 1 + (7 * number + 5 * len(ids)) % 6
            ids += (await run(engine, continued(prompt, ids), GREEDY, stop_after=cut)).ids
        assert oracle.agrees(prompt, ids)

    await asyncio.gather(*(reply(number, prompt) for number, prompt in enumerate(PROMPTS * 2)))
    await engine.close()


@pytest.mark.parametrize("family", HYBRID)
async def test_snapshots_of_prompts_and_replies_are_reused(
    family: str, folder_of: Callable[[str], Path], oracle_of: OracleOf
) -> None:
    engine, oracle = loaded(family, folder_of), oracle_of(family)
    first = await asyncio.gather(*(run(engine, prompt, GREEDY) for prompt in PROMPTS))
    calls = ModelCalls(engine)
    again = await asyncio.gather(*(run(engine, prompt, GREEDY) for prompt in PROMPTS))
    assert all(rows == 8 or count == 1 for rows, count in calls.shapes), "no prompt is computed again"
    turns = [Prompt((*prompt.context_ids, *out.ids, 1, 2, 3)) for prompt, out in zip(PROMPTS, again, strict=True)]
    next_turns = await asyncio.gather(*(run(engine, turn, replace(GREEDY, max_tokens=4)) for turn in turns))
    for prompt, before, out, turn, then in zip(PROMPTS, first, again, turns, next_turns, strict=True):
        assert oracle.agrees(prompt, out.ids)
        assert before.prefilled is not None
        assert out.prefilled is not None
        assert then.prefilled is not None
        assert out.prefilled.cached_tokens == len(prompt)
        assert then.prefilled.cached_tokens == len(prompt) + len(out.ids) - 1
        assert oracle.agrees(turn, then.ids)
    await engine.close()


async def test_a_forgotten_conversation_is_computed_again(folder_of: Callable[[str], Path]) -> None:
    engine = loaded("qwen3_5", folder_of)
    mine, other = (Prompt(PROMPTS[5].context_ids, owner=name, conversation=name) for name in ("mine", "other"))
    for prompt in (mine, other):
        await run(engine, prompt, GREEDY)
    await engine.forget("mine")
    runs = [await run(engine, prompt, GREEDY) for prompt in (mine, other)]
    assert [out.prefilled and out.prefilled.cached_tokens for out in runs] == [0, len(other)]
    await engine.close()


@pytest.mark.parametrize("family", HYBRID)
async def test_memory_is_bounded_and_what_does_not_fit_waits(
    family: str, folder_of: Callable[[str], Path], oracle_of: OracleOf
) -> None:
    """Room for three sequences at once, and for few snapshots."""
    limit, oracle = 3 * await sequence_bytes(family, folder_of) + 1000, oracle_of(family)
    engine = loaded(family, folder_of, cache_bytes=limit)
    calls, used = ModelCalls(engine), []
    runner_of(engine)._forward._model.register_forward_hook(  # type: ignore[attr-defined]
        lambda *_: used.append(engine.statistics.cache.used_bytes)
    )
    for _ in range(2):
        together = await asyncio.gather(*(run(engine, prompt, GREEDY) for prompt in PROMPTS))
        for prompt, out in zip(PROMPTS, together, strict=True):
            assert oracle.agrees(prompt, out.ids)
    assert max(used) <= limit
    assert 1 < max(rows for rows, _ in calls.shapes) <= 3
    await engine.close()


async def sequence_bytes(family: str, folder_of: Callable[[str], Path]) -> int:
    """What a sequence of up to 128 tokens takes."""
    engine = loaded(family, folder_of)
    layout = runner_of(engine)._cache.states.row_bytes, runner_of(engine)._cache._layout.bytes_per_token
    await engine.close()
    return layout[0] + 128 * layout[1]


@pytest.mark.parametrize("family", HYBRID)
async def test_what_never_fits_is_refused(family: str, folder_of: Callable[[str], Path], oracle_of: OracleOf) -> None:
    engine = loaded(family, folder_of, cache_bytes=await sequence_bytes(family, folder_of))
    with pytest.raises(CacheFull, match="room for 128"):
        await run(engine, Prompt((1, 2, 3) * 50), GREEDY)
    out = await run(engine, PROMPTS[4], GREEDY)
    assert oracle_of(family).agrees(PROMPTS[4], out.ids)
    await engine.close()


@pytest.mark.parametrize("family", HYBRID)
async def test_a_failed_pass_leaves_no_wrong_states(
    family: str, folder_of: Callable[[str], Path], oracle_of: OracleOf
) -> None:
    """A pass that fails in its last layer has changed the states of others."""
    engine, oracle = loaded(family, folder_of), oracle_of(family)
    model: Any = runner_of(engine)._forward._model  # type: ignore[attr-defined]
    passes: list[int] = []

    def fail(_: Any, args: tuple[Any, ...]) -> None:
        passes.append(args[0].shape[0])
        if passes.count(8) in (3, 4) and passes[-1] == 8:
            raise RuntimeError("once")

    model.model.layers[-1].register_forward_pre_hook(fail)
    together = await asyncio.gather(*(run(engine, prompt, GREEDY) for prompt in PROMPTS))
    assert passes.count(8) > 4
    for prompt, out in zip(PROMPTS, together, strict=True):
        assert len(out.ids) == TOKENS
        assert oracle.agrees(prompt, out.ids)
    await engine.close()


async def test_replies_come_one_by_one_where_batches_give_other_results(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, oracle_of: OracleOf
) -> None:
    decode = HybridDecoder._decode
    monkeypatch.setattr(HybridDecoder, "_decode", lambda self, batch: decode(self, batch) + 0.1)
    engine = loaded("lfm2", folder_of)
    assert isinstance(engine._runner, SnapshotRunner)
    assert "one reply at a time: its results with a cache differ" in engine.info.steps
    out = await run(engine, PROMPTS[3], GREEDY)
    assert oracle_of("lfm2").agrees(PROMPTS[3], out.ids)
    await engine.close()


async def test_the_exact_mode_computes_one_sequence_in_a_pass(folder_of: Callable[[str], Path]) -> None:
    engine = loaded("lfm2", folder_of, exact=True)
    assert isinstance(engine._runner, SnapshotRunner)
    assert "one reply" not in engine.info.steps
    await engine.close()


LAYOUT = TensorLayout((((1, 1), (1, 1)),), TensorMemory(torch.float32, torch.device("cpu")))


def filled_rows(count: int) -> tuple[StateRows, list[Slot[Tensor]]]:
    states = StateRows([StateTensor(0, "conv_states", 0, (2, 3), torch.float32)], torch.device("cpu"))
    pool = SlotPool(LAYOUT, 1, count)
    slots = [Slot(pool, index) for index in range(count)]
    states.resize(count)
    for number, slot in enumerate(slots):
        states.add(slot)
        states.tensors[0][number] = number
    return states, slots


def held(states: StateRows, slot: Slot[Tensor]) -> float:
    return float(states.snapshot(slot).tensors[0][0, 0])


def test_the_last_row_takes_the_place_of_one_that_leaves() -> None:
    states, slots = filled_rows(4)
    states.remove(slots[1])
    assert states.select([slots[0], slots[3], slots[2]]) == [0, 1, 2]
    assert [held(states, slots[i]) for i in (0, 2, 3)] == [0, 2, 3]
    states.trim()
    assert states.capacity == 4
    states.remove(slots[0])
    states.trim()
    assert states.capacity == 3
    assert [held(states, slots[i]) for i in (2, 3)] == [2, 3]


def test_the_rows_of_a_pass_are_the_first_ones() -> None:
    states, slots = filled_rows(5)
    assert sorted(states.select([slots[4], slots[1], slots[3]])) == [0, 1, 2]
    assert [held(states, slot) for slot in slots] == [0, 1, 2, 3, 4]
    (row,) = states.select([slots[2]], move=False)
    assert row >= 3, "it stays where it is"
    assert states.select([slots[2]]) == [0]
    assert [held(states, slot) for slot in slots] == [0, 1, 2, 3, 4]


def test_a_new_sequence_starts_from_zeros_or_from_a_snapshot() -> None:
    states, slots = filled_rows(3)
    snapshot = states.snapshot(slots[2])
    states.remove(slots[2])
    states.remove(slots[1])
    states.add(slots[1])
    states.add(slots[2], snapshot)
    assert [held(states, slot) for slot in slots] == [0, 0, 2]


def test_the_version_changes_with_the_sequences() -> None:
    """A batch may go on in the same slot with another sequence."""
    states, slots = filled_rows(3)
    versions = [states.version]
    states.remove(slots[2])
    versions.append(states.version)
    states.add(Slot(slots[2].pool, slots[2].index))
    versions.append(states.version)
    assert len(set(versions)) == 3
