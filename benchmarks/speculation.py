"""Drafts from the text so far: what they gain and where, and whether replies stay the same.

python -m benchmarks.speculation                       tokens a second with drafts over those without, by kind of text
python -m benchmarks.speculation --shape 0.6B          the same with random weights in the shape of Qwen3-0.6B
python -m benchmarks.speculation --identical 1000      sampled replies with and without drafts, token for token

One stream, compiled steps, without a server; tokens a second from the first token to the last, each reply with and
without drafts in turn. Neither model can copy long texts by itself: where a reply edits a text of the prompt, a grammar
makes it write that text, and the time of the grammar, which drafts don't save, counts in both figures.
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

import palaver.models
from palaver.chat.model import Model
from palaver.chat.reply_stream import ReplyRequest
from palaver.constraints import Grammar, MarkerConstraint
from palaver.engines.compiled.engine import load
from palaver.engines.core.engine import LocalEngine
from palaver.engines.core.options import EngineOptions
from palaver.formats.base import RenderOptions
from palaver.formats.loader import load_format
from palaver.formats.tokenizer import load_tokenizer
from palaver.generation import Prompt, Step
from palaver.messages import user
from palaver.sampling import Sampling

SPROUT = Path(palaver.models.__file__).parent / "sprout"
TOKENIZER = load_tokenizer(SPROUT)
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
class Kind:
    name: str
    cases: tuple[tuple[str, Sampling], ...]


def edited(text: str, old: str, new: str) -> Sampling:
    """Makes a model write the text with this change, in the tokens that a model which knows how to copy would use."""
    assert old in text
    ids = TOKENIZER.encode([text.replace(old, new)])
    grammar = "start: " + " ".join(f"<[{token_id}]>" for token_id in ids)
    constraint = MarkerConstraint(Grammar.LARK, grammar, tuple(sorted(set(ids))))
    thought = TOKENIZER.vocabulary.index(b"<think>")  # the grammar begins behind thoughts, and there are none to copy
    return replace(STORED, max_tokens=700, constraint=constraint, banned_ids=(thought,))


KINDS = (
    Kind("a text with one change", ((f"Write it with a red ship:\n{TEXT}", edited(TEXT, "two ships", "a red ship")),)),
    Kind("an edit of code", ((f"Rename tax to rate:\n{CODE}", edited(CODE, "tax", "rate")),)),
    Kind("JSON with one change", ((f"Set the stock of item 5 to 0:\n{RECORDS}", edited(RECORDS, "15}", "0}")),)),
    Kind("Sprout's own replies", tuple((question, STORED) for question in QUESTIONS)),
    Kind("prose", tuple((q, replace(STORED, temperature=1.3, top_p=1.0, top_k=0)) for q in QUESTIONS[-3:])),
)


async def reply(engine: LocalEngine, prompt: Prompt, sampling: Sampling) -> list[Step]:
    async with engine.generate(prompt, sampling) as outputs:
        return [output async for output in outputs if isinstance(output, Step)]


@dataclass
class Measured:
    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0

    @property
    def pace(self) -> float:
        return self.tokens / self.seconds

    async def add(self, engine: LocalEngine, prompt: Prompt, sampling: Sampling) -> None:
        """Counts the tokens of a reply behind its first one."""
        before, began = engine.statistics, 0.0
        async with engine.generate(prompt, sampling) as outputs:
            async for output in outputs:
                if isinstance(output, Step):
                    self.tokens += bool(began)
                    began = began or time.perf_counter()
        self.seconds += time.perf_counter() - began
        self.drafted += engine.statistics.draft_tokens - before.draft_tokens
        self.accepted += engine.statistics.accepted_tokens - before.accepted_tokens


def rendered(model: Model, text: str) -> Prompt:
    options = RenderOptions(thinking=None if text in QUESTIONS else False)
    return model.prompt(ReplyRequest((user(text),), STORED, options=options))


async def compare_speed(model: Model, engines: Sequence[LocalEngine], rounds: int, max_tokens: int) -> None:
    for kind in KINDS:
        ratios, both = [], [Measured(), Measured()]
        for seed in range(rounds):
            now = [Measured(), Measured()]
            for text, sampling in kind.cases:
                sampling = replace(sampling, seed=seed, max_tokens=min(max_tokens, sampling.max_tokens or max_tokens))
                for measured, engine in zip(now, engines, strict=True):
                    await measured.add(engine, rendered(model, text), sampling)
            ratios.append(now[0].pace / now[1].pace)
            for total, measured in zip(both, now, strict=True):
                total.tokens, total.seconds = total.tokens + measured.tokens, total.seconds + measured.seconds
                total.drafted, total.accepted = total.drafted + measured.drafted, total.accepted + measured.accepted
        fast, plain = both
        share = 100 * fast.accepted / fast.drafted if fast.drafted else 0
        print(
            f"{kind.name}: {statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f}), "
            f"{fast.pace:.0f} and {plain.pace:.0f} tokens/s, {share:.0f}% of {fast.drafted} drafted tokens accepted",
            flush=True,
        )


async def compare_replies(model: Model, engines: Sequence[LocalEngine], count: int, seed: int) -> int:
    chance, different, tokens = random.Random(seed), 0, 0
    for number in range(count):
        text, sampling = chance.choice([case for kind in KINDS for case in kind.cases])
        sampling = replace(sampling, seed=number, temperature=chance.choice([0.0, 0.6, 1.0]), max_tokens=150)
        one, other = await asyncio.gather(*(reply(engine, rendered(model, text), sampling) for engine in engines))
        different += one != other
        tokens += len(one)
    print(f"{count} replies, {tokens} tokens: {different} differ; {engines[0].statistics.accepted_tokens} accepted")
    return different


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--identical", type=int, default=0, help="compare so many sampled replies instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shape", choices=("sprout", "0.6B"), default="sprout")
    parser.add_argument("--max-tokens", type=int, default=700, help="of each reply")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engines = load_pair(SPROUT if options.shape == "sprout" else random_model(Path(folder), options.shape))
    model = Model(engines[0], load_format(SPROUT, TOKENIZER))
    try:
        if options.identical:
            return int(await compare_replies(model, engines, options.identical, options.seed) > 0)
        await compare_speed(model, engines, options.rounds, options.max_tokens)
        return 0
    finally:
        for engine in engines:
            await engine.close()


def load_pair(folder: Path) -> list[LocalEngine]:
    """The engine with drafts and the one without."""
    options = [EngineOptions(speculate=drafts) for drafts in (True, False)]
    return [load(folder, vocabulary=TOKENIZER.vocabulary, options=one) for one in options]


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
