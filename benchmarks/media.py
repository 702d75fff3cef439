"""Pictures: the second turn on a picture beside the first, and eight streams at once beside one after the other.

    python3 -m benchmarks.media

Runs models that see in their engine process, as a server does. Fresh: each picture is new, so that it is decoded,
processed, encoded and computed. Second turn: a question about a picture that was asked about before. Prints medians and
ranges of the time from the request to the first token.

A picture takes about 30 tokens of the embedded model. A small random model in the architecture of Qwen2.5-VL, for which
it takes 768, is measured too. Exits with 1 where a second turn is less than five times as quick, where a picture is
computed again, where a reply differs beside others, or where eight streams take as long at once as one by one.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from PIL import Image as Pixels

from palaver.chat.engine_choice import LoadOptions
from palaver.chat.model import Model
from palaver.chat.model_loader import ModelLoader
from palaver.chat.reply_stream import ReplyRequest
from palaver.generation import Prefilled, Step
from palaver.messages import Image, Message, Role, Text, assistant, user
from palaver.models.resolver import resolve_folder
from palaver.sampling import Sampling
from tests.engines.media_models import build

FASTER = 5.0
STREAMS = 8
TOKENS = 32
SAMPLING = Sampling(temperature=0.0, max_tokens=TOKENS, min_tokens=TOKENS)


def picture(number: int, size: tuple[int, int]) -> Image:
    blocks = np.random.default_rng(number).integers(0, 255, (12, 16, 3), dtype=np.uint8)
    file = io.BytesIO()
    Pixels.fromarray(blocks).resize(size, Pixels.Resampling.NEAREST).save(file, "JPEG", quality=90)
    return Image("image/jpeg", file.getvalue())


def first_turn(number: int, size: tuple[int, int]) -> tuple[Message, ...]:
    return (Message(Role.USER, (picture(number, size), Text("What do you see?"))),)


def request(messages: Sequence[Message]) -> ReplyRequest:
    return ReplyRequest(tuple(messages), SAMPLING)


async def first_token(model: Model, messages: Sequence[Message]) -> tuple[float, int, int]:
    """Seconds from the request to its first token, tokens of pictures that were computed, and tokens of the prompt."""
    began = time.perf_counter()
    prompt = await asyncio.to_thread(model.prompt, request(messages))
    cached = 0
    async with model.engine.generate(prompt, replace(SAMPLING, max_tokens=1, min_tokens=1)) as outputs:
        async for output in outputs:
            if isinstance(output, Prefilled):
                cached = output.cached_tokens
            if isinstance(output, Step):
                break
    seconds = time.perf_counter() - began
    return seconds, sum(max(0, span.stop - max(cached, span.start)) for span in prompt.media), len(prompt)


async def whole_reply(model: Model, messages: Sequence[Message]) -> list[int]:
    prompt = await asyncio.to_thread(model.prompt, request(messages))
    async with model.engine.generate(prompt, SAMPLING) as outputs:
        return [output.token_id async for output in outputs if isinstance(output, Step)]


def show(name: str, seconds: Sequence[float]) -> None:
    low, middle, high = (1000 * value for value in (min(seconds), median(seconds), max(seconds)))
    print(f"{name:28} median {middle:7.1f} ms, {low:.1f} to {high:.1f}")


async def measure_turns(model: Model, rounds: int, size: tuple[int, int]) -> bool:
    fresh, again, recomputed, tokens = [], [], 0, 0
    for number in range(rounds + 1):
        turn = first_turn(number, size)
        seconds, computed, tokens = await first_token(model, turn)
        assert computed > 0, "the picture was not new"
        more = (*turn, assistant("Coloured squares."), user("And how many?"))
        later, computed, _ = await first_token(model, more)
        recomputed += computed
        if number:  # the first one warms up
            fresh.append(seconds)
            again.append(later)
    show(f"fresh ({tokens} tokens)", fresh)
    show("second turn", again)
    ratio = median(fresh) / median(again)
    print(f"the second turn is {ratio:.1f} times as quick; {recomputed} tokens of pictures were computed again")
    return ratio >= FASTER and recomputed == 0


async def measure_streams(model: Model, size: tuple[int, int]) -> bool:
    """Fresh pictures, so that both runs do the same work."""
    turns = [first_turn(1000 + number, size) for number in range(2 * STREAMS)]
    began = time.perf_counter()
    alone = [await whole_reply(model, turn) for turn in turns[:STREAMS]]
    one_by_one = time.perf_counter() - began
    began = time.perf_counter()
    await asyncio.gather(*(whole_reply(model, turn) for turn in turns[STREAMS:]))
    together = time.perf_counter() - began
    same = await asyncio.gather(*(whole_reply(model, turn) for turn in turns[:STREAMS]))
    print(f"{STREAMS} replies of {TOKENS} tokens: {one_by_one:.2f} s one by one, {together:.2f} s at once")
    equal = sum(one == other for one, other in zip(alone, same, strict=True))
    print(f"{equal} of {STREAMS} are the same tokens as alone")
    return together < one_by_one and equal == STREAMS


def make_random(folder: Path) -> Path:
    """A model whose pictures take up to 1,024 tokens."""
    build("qwen2_5_vl", folder)
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    settings["size"] = {"shortest_edge": 32 * 32, "longest_edge": 1024 * 16 * 16}
    path.write_text(json.dumps(settings))
    return folder


async def run(folder: Path, rounds: int, size: tuple[int, int]) -> bool:
    model = await ModelLoader(LoadOptions()).load(str(folder), lambda *_: None)
    print(folder.name)
    try:
        results = [await measure_turns(model, rounds, size), await measure_streams(model, size)]
    finally:
        await model.engine.close()
        model.media.decoder.close()
    return all(results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", type=int, nargs=2, default=(512, 384), help="width and height of the pictures")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        random = make_random(Path(folder) / "random Qwen2.5-VL")
        subjects = (resolve_folder("sprout-omni"), random)
        good = [asyncio.run(run(model, given.rounds, tuple(given.size))) for model in subjects]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
