"""Pictures and sounds in the torch engine, with the embedded model that sees and hears."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from palaver.engines.base import BY_BATCH, COMPILED, Engine
from palaver.engines.compiled.build import NO_COMPILER
from palaver.engines.core.kv_cache import SlotAllocator
from palaver.engines.core.media import MediaCache
from palaver.engines.core.options import EngineOptions
from palaver.engines.core.scheduler import SchedulerLimits
from palaver.engines.host.frames import EngineSpec
from palaver.engines.host.supervisor import HostedEngine
from palaver.engines.torch.batch import SequenceChunk, build_batch, sequence_chunk
from palaver.engines.torch.devices import TensorLayout, TensorMemory
from palaver.engines.torch.engine import TorchEngine, load
from palaver.engines.torch.loader import load_model, open_checkpoint
from palaver.engines.torch.processors import load_processor
from palaver.errors import BadParameter, UnsupportedContent
from palaver.formats.tokenizer import FastTokenizer, load_tokenizer
from palaver.generation import MediaContent, MediaItem, MediaSpan, Prompt
from palaver.models.resolver import resolve_folder
from palaver.sampling import Sampling
from tests.engines.generate import Run, continued, run
from tests.media_files import tone

GREEDY = Sampling(temperature=0, max_tokens=10)
SAMPLED = Sampling(temperature=1.5, max_tokens=12, min_tokens=12, seed=7)
PICTURE = "<|vision_bos|><|IMAGE|><|vision_eos|>"
SOUND = "<|audio_bos|><|AUDIO|><|audio_eos|>"
Part = str | MediaItem
Array = np.ndarray[Any, np.dtype[Any]]


class Content:
    """The content of an item, and how often it was loaded."""

    def __init__(self, array: Array, rate: int = 0) -> None:
        self.array, self.rate, self.loads = array, rate, 0

    def __call__(self) -> MediaContent:
        self.loads += 1
        return MediaContent(self.array.tobytes(), self.array.shape, self.array.dtype.name, self.rate)

    @property
    def item(self) -> MediaItem:
        digest = hashlib.sha256(self.array.tobytes()).hexdigest()
        text, kind = (SOUND, "audio") if self.rate else (PICTURE, "image")
        return MediaItem(kind, digest, text, load=self)  # type: ignore[arg-type]


def picture(number: int, size: tuple[int, int] = (140, 168)) -> Content:
    """A picture of blocks of random colours: other numbers give other pictures."""
    blocks = np.random.default_rng(number).integers(0, 255, (4, 4, 3), dtype=np.uint8)
    return Content(np.asarray(Image.fromarray(blocks).resize(size[::-1], Image.Resampling.NEAREST)))


def sound(hertz: float = 440.0, seconds: float = 0.8) -> Content:
    return Content(tone(seconds, hertz=hertz), 16_000)


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_folder("sprout-omni")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> FastTokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module", params=["compiled", "exact"])
def engine(request: pytest.FixtureRequest, folder: Path, tokenizer: FastTokenizer) -> Iterator[TorchEngine]:
    """By compiled steps, and by the library's code in the exact mode: what is computed in a batch, in chunks or from
    the cache is the same to the bit."""
    compiled = None if request.param == "compiled" else False
    options = EngineOptions(exact=True, threads=1, context=1024, max_running=8, compiled=compiled)
    loaded = load(folder, vocabulary=tokenizer.vocabulary, device="cpu", options=options)
    yield loaded
    asyncio.run(loaded.close())


def test_steps_are_compiled_where_there_is_a_compiler(engine: TorchEngine, request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["engine"] == "compiled":
        assert engine.info.steps == COMPILED or engine.info.steps.endswith(NO_COMPILER)
        assert f"torch-{torch.__version__}" in engine.info.fingerprint, "torch encodes the media"
    else:
        assert engine.info.steps == "the model's own code"


def make_prompt(engine: Engine, tokenizer: FastTokenizer, *parts: Part) -> Prompt:
    ids: list[int] = []
    spans = []
    for part in parts:
        if isinstance(part, str):
            ids += tokenizer.encode([part])
        else:
            expansion = engine.expand_media(part)
            assert (expansion.lead, expansion.tail) == (0, 0)
            spans.append(MediaSpan(part, len(ids), len(expansion.token_ids)))
            ids += expansion.token_ids
    return Prompt(tuple(ids), media=tuple(spans))


@pytest.fixture(scope="module")
def prompt(engine: TorchEngine, tokenizer: FastTokenizer) -> partial[Prompt]:
    return partial(make_prompt, engine, tokenizer)


def test_the_engine_says_what_the_model_takes(engine: TorchEngine) -> None:
    assert engine.info.media == ("image", "audio", "video")
    assert engine.info.placeholders == {"image": "<|IMAGE|>", "audio": "<|AUDIO|>"}
    assert engine.info.sample_rate == 16_000
    assert engine.info.exactness != BY_BATCH


async def test_tokens_are_those_of_the_library(
    folder: Path, engine: TorchEngine, prompt: partial[Prompt], tokenizer: FastTokenizer
) -> None:
    """Several pictures and a sound, expanded, placed and computed as the library's own processor and `generate` do."""
    first, second, heard = picture(1), picture(2, (200, 100)), sound()
    ours = prompt("user: ", first.item, " and ", second.item, ", then ", heard.item, " What?")
    out = await run(engine, ours, GREEDY)
    processor: Any = load_processor(folder)
    model = load_model(open_checkpoint(folder), torch.device("cpu"), torch.float32)
    inputs = processor(
        text=[f"user: {PICTURE} and {PICTURE}, then {SOUND} What?"],
        images=[Image.fromarray(first.array), Image.fromarray(second.array)],
        audio=[heard.array],
        return_tensors="pt",
    )
    assert inputs["input_ids"][0].tolist() == list(ours.context_ids)
    ended = list(engine.info.end_ids)
    theirs = model.generate(**inputs, max_new_tokens=10, do_sample=False, eos_token_id=ended)
    assert out.ids == theirs[0, len(ours) :].tolist()
    other = await run(
        engine, prompt("user: ", second.item, " and ", first.item, ", then ", heard.item, " What?"), GREEDY
    )
    assert other.steps[0].logprob != out.steps[0].logprob, "the order of the pictures makes no difference"


async def test_another_turn_computes_no_picture_again(
    engine: TorchEngine, prompt: partial[Prompt], tokenizer: FastTokenizer
) -> None:
    seen = picture(3)
    first = prompt("user: ", seen.item, " What is it?")
    reply = await run(engine, first, GREEDY)
    assert reply.prefilled is not None
    assert reply.prefilled.cached_tokens < first.media[0].stop
    turn = Prompt((*first.context_ids, *reply.ids, *tokenizer.encode([" And this?"])), media=first.media)
    retried, second = await run(engine, first, SAMPLED), await run(engine, turn, GREEDY)
    assert retried.prefilled is not None
    assert retried.prefilled.cached_tokens == len(first), "a retry computes nothing"
    assert second.prefilled is not None
    assert second.prefilled.cached_tokens >= len(first) + len(reply.ids) - 1
    assert seen.loads == 1


async def test_pictures_are_not_confused(engine: TorchEngine, prompt: partial[Prompt]) -> None:
    """Two pictures have the same tokens: the cache tells them apart by their content."""
    one, other = picture(4), picture(5)
    prompts = [prompt("user: ", one.item, " or ", other.item, "?"), prompt("user: ", other.item, " or ", one.item, "?")]
    assert prompts[0].context_ids == prompts[1].context_ids
    first, second = [await run(engine, one_prompt, GREEDY) for one_prompt in prompts]
    assert second.prefilled is not None
    assert second.prefilled.cached_tokens == prompts[1].media[0].start
    assert first.steps[0].logprob != second.steps[0].logprob
    again = await run(engine, prompts[0], GREEDY)
    assert [(step.token_id, step.logprob) for step in again.steps] == [(s.token_id, s.logprob) for s in first.steps]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_a_reply_continues_at_every_token(
    engine: TorchEngine, prompt: partial[Prompt], sampling: Sampling
) -> None:
    asked = prompt("user: ", picture(6).item, " and ", sound(660.0).item, " What?")
    whole = await run(engine, asked, sampling)
    for start in range(len(whole.ids)):
        rest = await run(engine, continued(asked, whole.ids[:start]), sampling)
        assert rest.ids == whole.ids[start:], f"continued after {start} tokens"
    elsewhere = replace(continued(asked, whole.ids[:4]), owner=f"shares no cache, {sampling.temperature}")
    computed = await run(engine, elsewhere, sampling)
    assert computed.prefilled is not None
    assert computed.prefilled.cached_tokens == 0
    assert computed.ids == whole.ids[4:]


async def test_eight_at_once_are_as_alone_and_not_one_after_the_other(
    engine: TorchEngine, prompt: partial[Prompt]
) -> None:
    prompts = [prompt("user: ", picture(10 + number).item, f" What about {number}?") for number in range(8)]
    order: list[tuple[str, int]] = []

    async def follow(number: int) -> Run:
        out = Run()
        async with engine.generate(prompts[number], SAMPLED) as outputs:
            async for output in outputs:
                before = len(out.ids)
                out.add(output)
                if before == 0 and out.ids:
                    order.append(("first", number))
        order.append(("last", number))
        return out

    together = await asyncio.gather(*map(follow, range(8)))
    assert [event for event, _ in order[:8]] == ["first"] * 8, "a reply ended before another one began"
    fresh = prompt("user: ", picture(99).item, " What about 0?")
    await run(engine, fresh, GREEDY)
    for number, out in enumerate(together):
        alone = await run(engine, prompts[number], SAMPLED)
        assert [(s.token_id, s.logprob) for s in alone.steps] == [(s.token_id, s.logprob) for s in out.steps]


async def test_evicted_items_are_loaded_again(
    engine: TorchEngine, prompt: partial[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = engine._media
    assert isinstance(cache, MediaCache)
    monkeypatch.setattr(cache, "_limit_bytes", 1)
    seen, other = picture(20), picture(21)
    asked = prompt("user: ", seen.item, " then ", other.item, " What?")
    assert (seen.loads, other.loads) == (1, 1)
    out = await run(engine, asked, GREEDY)
    assert seen.loads == 2, "the second item has evicted the first"
    assert out.ids
    assert out.prefilled is not None
    again = await run(engine, continued(asked, out.ids[:3]), GREEDY)
    assert again.ids == out.ids[3:]
    assert seen.loads == 2, "its keys and values are cached: it is not needed"


async def test_text_alone_is_computed_as_ever(engine: TorchEngine, tokenizer: FastTokenizer, folder: Path) -> None:
    text = Prompt(tuple(tokenizer.encode(["user: What is 2+3?"])))
    out = await run(engine, text, GREEDY)
    model = load_model(open_checkpoint(folder), torch.device("cpu"), torch.float32)
    ids = torch.tensor([text.context_ids])
    expected = model.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=list(engine.info.end_ids))
    assert out.ids == expected[0, len(text) :].tolist()


async def test_text_takes_few_operations_over_the_slots_of_the_library(
    folder: Path, engine: TorchEngine, prompt: partial[Prompt], tokenizer: FastTokenizer
) -> None:
    """Outside of the exact mode: the library's code computes the picture, our own the text before and after it."""
    limits = SchedulerLimits(chunk_tokens=16)
    options = EngineOptions(threads=1, context=1024, max_running=4, limits=limits, compiled=False)
    mixed = load(folder, vocabulary=tokenizer.vocabulary, device="cpu", options=options)
    assert mixed.info.steps == "few operations"
    asked = prompt("A longer text stands before the picture, in a pass of its own. user: ", picture(5).item, " What?")
    texts = [prompt("user: What is 2+3?"), prompt("user: Count to ten, please. " * 4)]
    together = await asyncio.gather(*(run(mixed, one, GREEDY) for one in (asked, *texts)))
    for one, out in zip((asked, *texts), together, strict=True):
        exact = await run(engine, one, GREEDY)
        assert out.ids == exact.ids
        differences = [abs(a.logprob - b.logprob) for a, b in zip(out.steps, exact.steps, strict=True)]
        assert max(differences) < 1e-3
    await mixed.close()


def test_rotary_positions_go_on_after_media_in_decode_passes() -> None:
    """So that captured passes serve sequences with and without media."""
    layout = TensorLayout((((1, 4), (1, 4)),), TensorMemory(torch.float32, torch.device("cpu")))
    slots = SlotAllocator(layout, 1 << 20)
    seen, plain = slots.allocate(64), slots.allocate(64)

    def chunks(place: int, shift: int = -20) -> list[SequenceChunk]:
        return [
            sequence_chunk(seen, 40 + place, [1], rotary_shift=shift),
            sequence_chunk(plain, 7 + place, [2]),
        ]

    batch = build_batch(chunks(0), layout.device)
    assert batch.inputs.rotary_positions.tolist() == [20, 7]
    assert batch.positions.tolist() == [40, 7]
    assert not batch.has_media
    assert not batch.can_advance_to(chunks(1, shift=0)), "another sequence may have got the slot"
    assert batch.can_advance_to(chunks(1))
    batch.advance(chunks(1))
    assert batch.inputs.rotary_positions.tolist() == [21, 8]
    assert batch.positions.tolist() == [41, 8]


async def test_what_cannot_be_taken_is_refused(
    engine: TorchEngine, prompt: partial[Prompt], tokenizer: FastTokenizer
) -> None:
    with pytest.raises(UnsupportedContent, match="video"):
        engine.expand_media(MediaItem("video", "0", "<|VIDEO|>"))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedContent, match="processor"):
        engine.expand_media(Content(np.zeros((1, 900, 3), np.uint8)).item)
    asked = prompt("user: ", picture(30).item, " What?")
    beyond = Prompt(asked.context_ids, media=(MediaSpan(asked.media[0].item, len(asked) - 1, 20),))
    with pytest.raises(BadParameter, match="media"):
        await run(engine, beyond, GREEDY)
    shorter = Prompt(asked.context_ids, media=(MediaSpan(asked.media[0].item, asked.media[0].start, 3),))
    with pytest.raises(UnsupportedContent, match="another number of tokens"):
        await run(engine, shorter, GREEDY)
    assert (await run(engine, asked, GREEDY)).ids, "others are not affected"


@pytest.mark.slow  # the process imports torch, twice
async def test_a_reply_to_a_picture_goes_on_when_its_process_is_killed(
    engine: TorchEngine, folder: Path, tokenizer: FastTokenizer
) -> None:
    """The new process gets the picture again, and so do items that are expanded meanwhile."""
    seen = picture(40)
    compiled = None if engine.info.steps == COMPILED else False
    vocabulary = tuple(tokenizer.vocabulary)
    spec = EngineSpec("torch", folder, vocabulary, device="cpu", exact=True, compiled=compiled, context=1024)
    async with HostedEngine(spec) as hosted:
        assert hosted.info.media == engine.info.media
        asked = await asyncio.to_thread(make_prompt, hosted, tokenizer, "user: ", seen.item, " What?")
        expected = await run(engine, make_prompt(engine, tokenizer, "user: ", seen.item, " What?"), SAMPLED)
        process, out = hosted.process_id, Run()
        expanding = None
        async with hosted.generate(asked, SAMPLED) as outputs:
            async for output in outputs:
                out.add(output)
                if len(out.ids) == 3 and hosted.process_id == process:
                    assert process is not None
                    os.kill(process, signal.SIGKILL)
                    await asyncio.sleep(0.05)
                    expanding = asyncio.create_task(asyncio.to_thread(hosted.expand_media, picture(41).item))
        assert hosted.process_id != process
        assert out.ids == expected.ids
        assert expanding is not None
        assert await expanding == engine.expand_media(picture(41).item)

        many = [asyncio.to_thread(hosted.expand_media, picture(50 + number).item) for number in range(40)]
        await asyncio.wait_for(asyncio.gather(*many), 60)  # more than the event loop has threads

        def fail() -> MediaContent:
            raise UnsupportedContent("The file is damaged.")

        damaged = MediaItem("image", "damaged", PICTURE, load=fail)
        with pytest.raises(UnsupportedContent, match="damaged"):
            await asyncio.to_thread(hosted.expand_media, damaged)
        assert len((await run(hosted, asked, GREEDY)).ids) > 0
