"""Drafts from the text so far: what they gain and where, and whether replies stay the same.

python -m benchmarks.speculation                       tokens a second with drafts over those without, by kind of text
python -m benchmarks.speculation --shape 0.6B          the same with random weights in the shape of Qwen3-0.6B
python -m benchmarks.speculation --identical 1000      sampled replies with and without drafts, token for token
python -m benchmarks.speculation --draft-model         Sprout drafts for the shape of Qwen3-0.6B; texts repeat nothing
python -m benchmarks.speculation --llamacpp q4_k --shape 0.6B    a GGUF file by llama.cpp's library, with --drafts

One stream, compiled steps by default, without a server; from the first token of a reply to its last, each reply with
and without drafts in turn: processor time, which holds on a busy machine, and wall time. Both are of one engine, whose
drafts are switched: two engines with the same weights differ by up to 8%, by where these lie in memory. Neither model
can copy long texts by itself: where a reply edits a text of the prompt, the tokens of that text are made certain in the
logits, as they are of a model that can. One kind has a grammar that allows these tokens alone, in place of that. A
draft model is made to expect them, but for a share of others.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

import palaver.models
from palaver.chat.model import Model
from palaver.chat.reply_stream import ReplyRequest
from palaver.constraints import Grammar, MarkerConstraint
from palaver.engines.compiled.decoder import CompiledDecoder, CompiledRunner, Rows
from palaver.engines.compiled.engine import load
from palaver.engines.core.engine import LocalEngine
from palaver.engines.core.generation import LocalGeneration
from palaver.engines.core.options import EngineOptions
from palaver.engines.core.runner import VerifyDrafts
from palaver.formats.base import RenderOptions
from palaver.formats.loader import load_format
from palaver.formats.tokenizer import load_tokenizer
from palaver.generation import Step
from palaver.messages import user
from palaver.sampling import Sampling

SPROUT = Path(palaver.models.__file__).parent / "sprout"
TOKENIZER = load_tokenizer(SPROUT)
CERTAIN = np.float32(60)
"""What the logit of a token is raised by that is certain."""
STORED = Sampling(temperature=0.6, top_k=20, top_p=0.95, logprobs=5, max_tokens=400)
"""The settings of a stored turn."""
TEXT = (
    "The lighthouse keeper wrote down the weather every morning: wind from the west, a calm sea, two ships on the "
    "horizon. In the evening he lit the lamp, wound the clock and read the letters that the boat had brought. "
    "Nobody came in winter, and he did not mind, since the lamp needed him more than anyone in the village did."
)
CODE = """def total(prices, tax):
    result = 0
    for price in prices:
        if price < 0:
            raise ValueError("a price is negative")
        result += price * (1 + tax)
    return round(result, 2)
"""
RECORDS = "[" + ", ".join(f'{{"name": "item {n}", "price": {n * 7}, "stock": {n * 3}}}' for n in range(1, 9)) + "]"
QUESTIONS = (
    "What is 786 * 94?",
    "Make a table of the squares from 1 to 6.",
    "Reverse the word palaver.",
    "What is 4857 + 2968?",
    "Who are you?",
    "Count from 3 to 17.",
    "Tell me something about yourself.",
)


@dataclass(frozen=True, slots=True)
class Case:
    text: str
    """Of the user."""
    sampling: Sampling
    written: tuple[int, ...] = ()
    """The tokens that the model is made to write, if any."""


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    cases: tuple[Case, ...]


def edit(request: str, text: str, old: str, new: str) -> Case:
    """The model writes the text with this change, in the tokens that a model which knows how to copy would use."""
    assert old in text
    end = TOKENIZER.vocabulary.index(b"<|im_end|>")
    written = (*TOKENIZER.encode([text.replace(old, new)]), end)
    return Case(f"{request}:\n{text}", replace(STORED, max_tokens=700), written)


def held(case: Case) -> Case:
    """The same tokens, held by a grammar."""
    ids = case.written[:-1]
    grammar = "start: " + " ".join(f"<[{token_id}]>" for token_id in ids)
    constraint = MarkerConstraint(Grammar.LARK, grammar, tuple(sorted(set(ids))))
    thought = TOKENIZER.vocabulary.index(b"<think>")  # the grammar begins behind thoughts, and there are none to copy
    return Case(case.text, replace(case.sampling, constraint=constraint, banned_ids=(thought,)))


JSON = edit("Set the stock of item 5 to 0", RECORDS, "15}", "0}")
KINDS = (
    Kind("a text with one change", (edit("Write it with a red ship", TEXT, "two ships", "a red ship"),)),
    Kind("an edit of code", (edit("Rename tax to rate", CODE, "tax", "rate"),)),
    Kind("JSON with one change", (JSON,)),
    Kind("the same in a grammar", (held(JSON),)),
    Kind("Sprout's own replies", tuple(Case(question, STORED) for question in QUESTIONS)),
    Kind("prose", tuple(Case(q, replace(STORED, temperature=1.3, top_p=1.0, top_k=0)) for q in QUESTIONS[-3:])),
)


AGREEMENTS = (0.4, 0.6, 0.8, 0.95)
"""Shares of tokens that a draft model expects."""


class CopyingDecoder:
    """A decoder that is certain of given tokens at given positions."""

    def __init__(self, decoder: CompiledDecoder) -> None:
        self._decoder = decoder
        self.written: dict[int, int] = {}

    def run(self, rows: Rows, threads: int, memory: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        logits = self._decoder.run(rows, threads, memory)
        if self.written:
            for row, position in enumerate(rows.array[rows.array[:, 5] != 0, 4].tolist()):
                if position + 1 in self.written:
                    logits[row, self.written[position + 1]] += CERTAIN
        return logits


class CopyingContexts:
    """The same for all contexts of llama.cpp."""

    def __init__(self) -> None:
        from palaver.engines.llamacpp.context import Context

        self.written: dict[int, int] = {}
        of_chunks, of_rows = Context.decode, Context.decode_rows

        def decode(context: Context, chunks: Any, *options: Any, **named: Any) -> NDArray[np.float32]:
            logits = of_chunks(context, chunks, *options, **named)
            self._add(logits, [start + len(ids) - 1 for _, start, ids in chunks])
            return logits

        def decode_rows(context: Context, chunks: Any, logits: NDArray[np.float32]) -> None:
            of_rows(context, chunks, logits)
            self._add(logits, [start + place for _, start, ids in chunks for place in range(len(ids))])

        Context.decode, Context.decode_rows = decode, decode_rows  # type: ignore[method-assign, assignment]

    def _add(self, logits: NDArray[np.float32], positions: Sequence[int]) -> None:
        for row, position in zip(logits, positions, strict=False):
            if position + 1 in self.written:
                row[self.written[position + 1]] += CERTAIN


@dataclass(frozen=True, slots=True)
class Bench:
    """An engine over a decoder that copies."""

    engine: LocalEngine
    decoder: CopyingDecoder | CopyingContexts

    @classmethod
    def of(cls, engine: LocalEngine) -> Self:
        runner = engine._runner
        if not isinstance(runner, CompiledRunner):
            return cls(engine, CopyingContexts())
        decoder = CopyingDecoder(runner._decoder)
        runner._decoder = decoder  # type: ignore[assignment]
        return cls(engine, decoder)

    def switch(self, drafts: VerifyDrafts | None) -> None:
        """Between two replies."""
        self.engine._runner.verify_drafts = drafts  # type: ignore[misc]

    def generate(self, model: Model, case: Case, sampling: Sampling) -> LocalGeneration:
        options = RenderOptions(thinking=None if case.text in QUESTIONS else False)
        prompt = model.prompt(ReplyRequest((user(case.text),), STORED, options=options))
        self.decoder.written = {len(prompt) + place: token_id for place, token_id in enumerate(case.written)}
        return self.engine.generate(prompt, sampling)


@dataclass
class Measured:
    tokens: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0

    async def add(self, bench: Bench, model: Model, case: Case, sampling: Sampling) -> None:
        """Counts the tokens of a reply behind its first one."""
        before, began, cpu_began = bench.engine.statistics, 0.0, 0.0
        async with bench.generate(model, case, sampling) as outputs:
            async for output in outputs:
                if isinstance(output, Step):
                    self.tokens += bool(began)
                    if not began:
                        began, cpu_began = time.perf_counter(), time.process_time()
        self.seconds += time.perf_counter() - began
        self.cpu_seconds += time.process_time() - cpu_began
        self.drafted += bench.engine.statistics.draft_tokens - before.draft_tokens
        self.accepted += bench.engine.statistics.accepted_tokens - before.accepted_tokens


async def compare_speed(model: Model, bench: Bench, kind: Kind, rounds: int, max_tokens: int) -> None:
    wall, cpu, both = [], [], [Measured(), Measured()]
    ways = [bench.engine._runner.verify_drafts, None]
    for seed in range(-1, rounds):  # the first round warms up
        now = [Measured(), Measured()]
        for case in kind.cases:
            limit = min(max_tokens, case.sampling.max_tokens or max_tokens)
            turns = list(zip(now, ways, strict=True))
            for measured, drafts in turns if seed % 2 else turns[::-1]:
                bench.switch(drafts)
                await measured.add(bench, model, case, replace(case.sampling, seed=seed + 1, max_tokens=limit))
        if seed < 0:
            continue
        bench.switch(ways[0])
        wall.append(now[1].seconds / now[0].seconds)
        cpu.append(now[1].cpu_seconds / now[0].cpu_seconds)
        for total, measured in zip(both, now, strict=True):
            for name in vars(total):
                setattr(total, name, getattr(total, name) + getattr(measured, name))
    fast, plain = both
    share = 100 * fast.accepted / fast.drafted if fast.drafted else 0
    print(
        f"{kind.name}: {in_short(cpu)} of processor time, {in_short(wall)} of wall time, "
        f"{fast.tokens / fast.seconds:.0f} and {plain.tokens / plain.seconds:.0f} tokens/s, "
        f"{1e3 * fast.cpu_seconds / fast.tokens:.3f} and {1e3 * plain.cpu_seconds / plain.tokens:.3f} ms a token, "
        f"{share:.0f}% of {fast.drafted} drafted tokens accepted",
        flush=True,
    )


def in_short(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})"


async def compare_draft_model(folder: Path, rounds: int, max_tokens: int) -> None:
    options = EngineOptions(draft_model=SPROUT)
    bench = Bench.of(load(folder, vocabulary=TOKENIZER.vocabulary, options=options))
    model, chance = Model(bench.engine, load_format(SPROUT, TOKENIZER)), random.Random(1)
    runner: Any = bench.engine._runner
    drafter = runner.draft_model
    drafter._runner._decoder = expected = CopyingDecoder(drafter._runner._decoder)
    sampling = replace(STORED, max_tokens=max_tokens, temperature=0.6)
    texts = [token_id for token_id, piece in enumerate(TOKENIZER.vocabulary) if piece.isalpha()]
    for agreement in AGREEMENTS:
        walls, cpus, drafted, accepted = [], [], 0, 0
        for seed in range(-1, rounds):  # the first round warms up
            case = Case("Tell me more.", sampling, tuple(chance.sample(texts, max_tokens)))
            both = [Measured(), Measured()]
            turns = list(zip(both, (drafter, None), strict=True))
            for measured, draft_model in turns if seed % 2 else turns[::-1]:
                runner.draft_model = draft_model
                options_of_prompt = RenderOptions(thinking=False)
                start = len(model.prompt(ReplyRequest((user(case.text),), STORED, options=options_of_prompt)))
                expected.written = {
                    start + place: token_id if chance.random() < agreement else chance.choice(texts)
                    for place, token_id in enumerate(case.written)
                }
                await measured.add(bench, model, case, replace(sampling, seed=seed + 1))
            if seed >= 0:
                walls.append(both[1].seconds / both[0].seconds)
                cpus.append(both[1].cpu_seconds / both[0].cpu_seconds)
                drafted, accepted = drafted + both[0].drafted, accepted + both[0].accepted
        print(
            f"agrees in {agreement:.0%}: {in_short(walls)} of wall time, {in_short(cpus)} of processor time, "
            f"{accepted} of {drafted} drafted tokens accepted",
            flush=True,
        )
    await bench.engine.close()


async def reply(bench: Bench, model: Model, case: Case, sampling: Sampling) -> list[Step]:
    async with bench.generate(model, case, sampling) as outputs:
        return [output async for output in outputs if isinstance(output, Step)]


async def compare_replies(model: Model, benches: Sequence[Bench], count: int, seed: int) -> int:
    chance, different, tokens = random.Random(seed), 0, 0
    for number in range(count):
        case = chance.choice([case for kind in KINDS for case in kind.cases])
        sampling = replace(case.sampling, seed=number, temperature=chance.choice([0.0, 0.6, 1.0]), max_tokens=150)
        one, other = await asyncio.gather(*(reply(bench, model, case, sampling) for bench in benches))
        different += one != other
        tokens += len(one)
    accepted = benches[0].engine.statistics.accepted_tokens
    print(f"{count} replies, {tokens} tokens: {different} differ; {accepted} accepted")
    return different


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--identical", type=int, default=0, help="compare so many sampled replies instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shape", choices=("sprout", "0.6B"), default="sprout")
    parser.add_argument("--draft-model", action="store_true", help="drafts of a model, not from the text")
    parser.add_argument("--llamacpp", metavar="TYPE", help="by llama.cpp, with weights of this type, such as q4_k")
    parser.add_argument("--kind", type=int, help="only this kind of text, from 0 on")
    parser.add_argument("--max-tokens", type=int, default=700, help="of each reply")
    options = parser.parse_args()
    if options.draft_model:
        with tempfile.TemporaryDirectory() as folder:
            await compare_draft_model(random_model(Path(folder), "0.6B"), options.rounds, min(200, options.max_tokens))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        if options.llamacpp:
            benches = [Bench.of(load_llamacpp(Path(folder), options.shape, options.llamacpp))]
        else:
            benches = load_pair(SPROUT if options.shape == "sprout" else random_model(Path(folder), options.shape))
    model = Model(benches[0].engine, load_format(SPROUT, TOKENIZER))
    try:
        if options.identical:
            return int(await compare_replies(model, benches, options.identical, options.seed) > 0)
        for kind in KINDS if options.kind is None else [KINDS[options.kind]]:
            await compare_speed(model, benches[0], kind, options.rounds, options.max_tokens)
        return 0
    finally:
        for bench in benches:
            await bench.engine.close()


def load_pair(folder: Path) -> list[Bench]:
    """The engine with drafts and the one without."""
    options = [EngineOptions(drafts=drafts) for drafts in (True, False)]
    return [Bench.of(load(folder, vocabulary=TOKENIZER.vocabulary, options=one)) for one in options]


def load_llamacpp(folder: Path, shape: str, kind: str) -> LocalEngine:
    from benchmarks.peers import gguf_file, prepare
    from palaver.engines.llamacpp.engine import load as load_gguf
    from palaver.formats.gguf_tokenizer import load_gguf_tokenizer
    from palaver.gguf import read_gguf

    prepare(folder, endless=False, shape=shape)
    file = gguf_file(folder, kind)
    vocabulary = load_gguf_tokenizer(read_gguf(file)).vocabulary
    return load_gguf(file, vocabulary=tuple(vocabulary), options=EngineOptions(drafts=True, context=2048))


def random_model(folder: Path, shape: str) -> Path:
    """Weights in bfloat16, as models are published."""
    from safetensors.torch import load_file, save_file

    from benchmarks.peers import prepare

    prepare(folder, shape=shape)
    path = folder / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    return folder


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
