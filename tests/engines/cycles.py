"""Stop and continue under load, compared with the uncut reply. Used by the conformance suite and by
`benchmarks/engine_cycles.py`.

A reply that differs is excused only if, at its first token that differs, the choice was within twice the engine's
rounding of another one. The rounding is measured: the same texts alone, beside others, and computed in other pieces.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from palaver.constraints import Constraint, Grammar
from palaver.engines.base import BY_TEXT, NATIVE_SAMPLER, Capability, Engine, Fingerprint
from palaver.engines.core.engine import LocalEngine
from palaver.engines.core.rng import uniform
from palaver.engines.core.sampler import HostLogits
from palaver.engines.vllm.sampling_params import SUPPORTED
from palaver.generation import Prompt
from palaver.sampling import Sampling
from tests.engines.engine_cases import EngineCases
from tests.engines.generate import Run, continued, run
from tests.engines.reference import choose

Row = np.ndarray[Any, np.dtype[np.float32]]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Bern", "Paris"]}, "people": {"type": "integer", "maximum": 999}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
SETTINGS = {
    "greedy": Sampling(temperature=0, max_tokens=10),
    "sampled": Sampling(
        temperature=0.9,
        top_k=40,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        min_tokens=10,
        max_tokens=10,
        seed=5,
    ),
    "budget": Sampling(temperature=0.8, thinking_budget=4, min_tokens=12, max_tokens=12, seed=3),
    "stop": Sampling(temperature=1.0, min_tokens=8, max_tokens=40, stop=("a", "e", "i"), seed=7),
    "schema": Sampling(
        temperature=1.0,
        max_tokens=60,
        constraint=Constraint(Grammar.JSON_SCHEMA, json.dumps(SCHEMA)),
        banned_strings=("\n", "\r", "\t", "  "),
        seed=3,
    ),
}
"""Every kind of state that a continued reply must restore."""
FILTERS = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea, please, and mention a lighthouse in it.",
    "How many days are there in two weeks?",
    "Tell me a story.",
    "Why is the sky blue?",
    "Hi!",
)
MOST_EXCUSED = 0.005
"""The part of the replies that may differ within the rounding."""


def lacking_filters(engine: Engine) -> tuple[str, ...]:
    """The filters and penalties that the engine refuses. vLLM's own sampler has some of them."""
    if Capability.FILTERS not in engine.info.lacks:
        return ()
    fingerprint = Fingerprint.parse(engine.info.fingerprint)
    is_native = fingerprint is not None and fingerprint.sampler == NATIVE_SAMPLER
    return tuple(name for name in FILTERS if not (is_native and name in SUPPORTED))


def setting_for(engine: Engine, name: str) -> Sampling:
    """The setting, without filters and penalties where the engine declares that it lacks them."""
    neutral: dict[str, Any] = {parameter: getattr(Sampling(), parameter) for parameter in lacking_filters(engine)}
    return replace(SETTINGS[name], **neutral)


def continues_samples(engine: Engine) -> bool:
    """Whether a sampled reply goes on as the uncut one. Every engine does so with greedy replies."""
    return Capability.EXACT_CONTINUATION not in engine.info.lacks


def continuable(engine: Engine, sampling: Sampling) -> Sampling:
    """The same, but greedy where the engine declares that it can't continue sampled replies exactly."""
    return sampling if continues_samples(engine) else replace(sampling, temperature=0)


def prompt_for(cases: EngineCases, number: int, setting: str) -> Prompt:
    """A reply with a budget thinks from its first token on, one with a schema never."""
    thinking = False if setting == "schema" else None
    prompt = cases.prompt(f"{number}. {QUESTIONS[number % len(QUESTIONS)]}", thinking)
    if setting != "budget":
        return prompt
    think = cases.format.tokenizer.control["<think>"]
    return replace(prompt, reply_ids=(think,))


class LogitsRecorder:
    """The logits of every pass of an engine, by the tokens before them, and the scores after all options."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, ...], Row] = {}
        self.rounding = 0.0
        """The largest difference between two rows after the same tokens."""
        self.scores: dict[tuple[str, int], Row] = {}
        """The latest scores by owner and number of tokens before them."""

    def add(self, sequence: Any, row: Row) -> None:
        scores, forced = row.copy(), sequence.processor.reply.forced_id
        if sequence.processor.is_active:
            sequence.processor.changes().apply(scores)
        if forced is not None:
            scores[np.arange(len(scores)) != forced] = -np.inf
        self.scores[sequence.owner, len(sequence.token_ids)] = scores
        first = self.rows.setdefault(tuple(sequence.token_ids), row.copy())
        self.rounding = max(self.rounding, float(np.abs(first - row).max()))


@contextmanager
def recorded(engine: LocalEngine) -> Iterator[LogitsRecorder]:
    recorder, runner = LogitsRecorder(), engine._runner
    compute = runner.run

    def record(sequences: Sequence[Any], counts: Sequence[int], need_logits: bool = True) -> Any:
        logits = compute(sequences, counts, need_logits)
        if need_logits:
            for sequence, row in zip(sequences, _to_host(logits), strict=True):
                if not sequence.pending_tokens:  # others are tokens of a reply that are computed again
                    recorder.add(sequence, row)
        return logits

    runner.run = record  # type: ignore[method-assign]
    try:
        yield recorder
    finally:
        runner.run = compute  # type: ignore[method-assign]


def _to_host(logits: Any) -> Row:
    return logits.array if isinstance(logits, HostLogits) else logits.tensor.float().cpu().numpy()


async def measure_rounding(engine: Engine, cases: EngineCases) -> float:
    """The largest difference of logits after the same tokens: alone, beside others, and computed in other pieces."""
    if not isinstance(engine, LocalEngine):
        return 0.0
    sampling = replace(SETTINGS["sampled"], min_tokens=12, max_tokens=12)
    prompts = [prompt_for(cases, number, "sampled") for number in range(4)]
    with recorded(engine) as recorder:
        alone = [await run(engine, replace(prompt, owner="alone"), sampling) for prompt in prompts]
        await asyncio.gather(*(run(engine, replace(prompt, owner="together"), sampling) for prompt in prompts))
        replies = list(zip(prompts, alone, strict=True))
        pieces = [continued(prompt, out.ids[:cut]) for prompt, out in replies for cut in (2, 5, 8, 11)]
        await asyncio.gather(
            *(
                run(engine, replace(prompt, owner=f"piece {i}"), sampling, stop_after=3)
                for i, prompt in enumerate(pieces)
            )
        )
    return recorder.rounding


async def measure_margin(engine: LocalEngine, prompt: Prompt, sampling: Sampling, choice: int = 0) -> float:
    """The distance of the next token's choice to another one. The logits are computed anew."""
    owner = "margin"
    with recorded(engine) as recorder:
        await run(engine, replace(prompt, owner=owner, conversation=owner), sampling, choice, stop_after=1)
    await engine.forget(owner)
    random_number = uniform(sampling.seed, choice, len(prompt.reply_ids))
    return choose([float(x) for x in recorder.scores[owner, len(prompt)]], sampling, random_number)[1]


@dataclass(frozen=True, slots=True)
class Difference:
    """A continued reply that is not the uncut one."""

    setting: str
    number: int
    position: int
    margin: float
    """How near the choice of the first token that differs was to another one; infinite if no logits decided."""


@dataclass
class Tally:
    rounding: float
    replies: int = 0
    cycles: int = 0
    recomputed: int = 0
    """Prompt tokens that were computed again, beyond the last one, though they were cached."""
    differences: list[Difference] = field(default_factory=list)

    @property
    def excused(self) -> list[Difference]:
        return [one for one in self.differences if one.margin <= 2 * self.rounding]

    def failures(self, exactness: str) -> list[str]:
        """What the engine must not do, in sentences."""
        wrong = [one for one in self.differences if one.margin > 2 * self.rounding or exactness == BY_TEXT]
        found = [f"differs beyond the rounding of {self.rounding:.2g}: {one}" for one in wrong]
        if len(self.excused) > max(1, int(MOST_EXCUSED * self.replies)):
            found.append(f"{len(self.excused)} of {self.replies} replies differ within the rounding")
        return found

    def __str__(self) -> str:
        margins = ", ".join(f"{one.margin:.2g}" for one in self.differences)
        return (
            f"{self.cycles} stops and continues of {self.replies} replies: {len(self.differences)} differ,"
            f" {len(self.excused)} of them within twice the rounding of {self.rounding:.2g}"
            f"{f' (margins: {margins})' if margins else ''}; {self.recomputed} cached tokens computed again"
        )


async def find_difference(
    engine: Engine, prompt: Prompt, sampling: Sampling, one: Sequence[int], other: Sequence[int], choice: int = 0
) -> tuple[int, float]:
    """The position of the first token that differs, and the margin of its choice."""
    pairs = zip(one, other, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    if not isinstance(engine, LocalEngine) or position == min(len(one), len(other)):
        return position, math.inf
    return position, await measure_margin(engine, continued(prompt, list(one[:position])), sampling, choice)


@dataclass
class Cycles:
    """Stops and continues replies of one engine, several at a time."""

    engine: Engine
    cases: EngineCases
    tally: Tally

    @property
    def settings(self) -> list[str]:
        """All that the engine can do."""
        lacks = Capability.CONSTRAINTS in self.engine.info.lacks
        return [name for name, sampling in SETTINGS.items() if sampling.constraint is None or not lacks]

    async def run(self, count: int, together: int = 8) -> Tally:
        """At least so many stops and continues, of `together` replies at a time."""
        while self.tally.cycles < count:
            numbers = range(self.tally.replies, self.tally.replies + together)
            uncut = [await run(self.engine, *self._request(number, "uncut")) for number in numbers]
            replies = await asyncio.gather(*map(self._stop_and_continue, numbers))
            for number, whole, reply in zip(numbers, uncut, replies, strict=True):
                if (reply.ids, reply.ended) != (whole.ids, whole.ended):
                    await self._record_difference(number, reply.ids, whole.ids)
            for owner in ("uncut", *map(str, numbers)):
                await self.engine.forget(owner)
            self.tally.replies += together
        return self.tally

    def _request(self, number: int, owner: str) -> tuple[Prompt, Sampling]:
        setting = self.settings[number % len(self.settings)]
        prompt = replace(prompt_for(self.cases, number, setting), owner=owner, conversation=owner)
        return prompt, replace(continuable(self.engine, setting_for(self.engine, setting)), seed=number)

    async def _stop_and_continue(self, number: int) -> Run:
        """The whole reply. Some continues find nothing of it in the cache: all is computed again, in other pieces."""
        rng = random.Random(number)
        prompt, sampling = self._request(number, str(number))
        reply = Run()
        while reply.ended is None:
            lost = bool(reply.ids) and rng.random() < 0.2
            if lost:
                await self.engine.forget(str(number))
            out = await run(self.engine, continued(prompt, reply.ids), sampling, stop_after=rng.randint(1, 6))
            if reply.ids:
                self.tally.cycles += 1
                self.tally.recomputed += 0 if lost else recomputed_tokens(self.engine, out)
            reply.ids += out.ids
            reply.ended = out.ended
        return reply

    async def _record_difference(self, number: int, reply: list[int], whole: list[int]) -> None:
        prompt, sampling = self._request(number, "")
        position, margin = await find_difference(self.engine, prompt, sampling, reply, whole)
        setting = self.settings[number % len(self.settings)]
        self.tally.differences.append(Difference(setting, number, position, margin))


def recomputed_tokens(engine: Engine, out: Run) -> int:
    """The tokens of a continued reply that were computed again, beyond the last one, which was never computed."""
    if out.prefilled is None or engine.info.reuse != "to the token":
        return 0
    return max(0, out.prefilled.prompt_tokens - out.prefilled.cached_tokens - 1)
