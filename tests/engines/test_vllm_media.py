"""vLLM with models that see: the tokens of the transformers library, and nothing computed twice.

The models are tiny and random. Media go the whole way: as files through the decoder, the chat template, the engine
process and vLLM's multi-modal inputs. Runs where $PALAVER_VLLM_PYTHON names a Python with vLLM and torchvision."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from palaver.chat.media_expander import MediaExpander
from palaver.chat.model import Model
from palaver.engines.base import Capability
from palaver.engines.host.frames import EngineSpec
from palaver.engines.host.supervisor import HostedEngine
from palaver.formats.loader import load_format
from palaver.formats.tokenizer import load_tokenizer
from palaver.generation import Prompt
from palaver.media import MediaDecoder
from palaver.sampling import Sampling
from tests.engines.engine_cases import VLLM_VARIABLE, missing
from tests.engines.generate import Run, continued, run
from tests.engines.media_models import build
from tests.engines.media_reference import Library, Reply, picture
from tests.engines.test_media_families import Conversation, messages, turn, words

if reason := missing("vllm"):
    pytest.skip(reason, allow_module_level=True)

HEAD_DIM = 32
"""The narrowest heads of vLLM's attention on CPUs."""
SEEDS = {"qwen2_5_vl": 0, "qwen3_vl": 3, "llava": 0}
"""The families, and seeds of weights with which what they say depends on what they see."""
COUNT = 12
BLOCK = 32
SAMPLED = Sampling(temperature=1.0, max_tokens=COUNT, min_tokens=COUNT, seed=7)
SIZES = ((48, 32), (64, 48), (32, 64))
"""No processor resizes these: Pillow and torchvision, which vLLM's environment has, round differently."""


def media(family: str, seed: int) -> dict[str, Any]:
    width, height = (32, 32) if family == "llava" else SIZES[seed % 3]
    return {"type": "image", "image": picture(seed, width, height)}


def conversations(family: str) -> Iterator[Conversation]:
    """One picture, another one in its place, and several over several turns."""
    yield [turn("user", media(family, 0), words("What?"))]
    yield [turn("user", media(family, 3), words("What?"))]
    yield [
        turn("user", words("First "), media(family, 1), media(family, 2), words(" then?")),
        turn("assistant", words("yes.")),
        turn("user", words("Or "), media(family, 4)),
    ]
    yield [turn("user", words("Only words this time."))]


def build_for_vllm(family: str, folder: Path) -> Path:
    """A tiny model of the family, with the names of tensors as in the folders that are published."""
    build(family, folder, HEAD_DIM, SEEDS[family])
    if family == "llava":
        weights = load_file(folder / "model.safetensors")
        named = {name.replace("vision_tower.", "vision_tower.vision_model."): one for name, one in weights.items()}
        save_file(named, folder / "model.safetensors", {"format": "pt"})
    return folder


@asynccontextmanager
async def open_model(folder: Path, expander: MediaExpander, **options: Any) -> AsyncIterator[Model]:
    tokenizer = load_tokenizer(folder)
    python = Path(os.environ[VLLM_VARIABLE])
    spec = EngineSpec("vllm", folder, tuple(tokenizer.vocabulary), dtype="float32", compiled=False, python=python)
    async with HostedEngine(replace(spec, context=512, max_running=8, **options)) as engine:
        if reason := engine.info.lacks.get(Capability.MEDIA):
            pytest.skip(f"NOTHING IS SHOWN HERE: {reason}")
        yield Model(engine, load_format(folder, tokenizer), folder.name, media=expander)


@pytest.fixture(scope="module")
def expander() -> Iterator[MediaExpander]:
    decoder = MediaDecoder()
    yield MediaExpander(decoder)
    decoder.close()


async def render(model: Model, conversation: Conversation) -> Prompt:
    return await asyncio.to_thread(model.render, messages(conversation))


def cached(out: Run) -> int:
    assert out.prefilled is not None
    return out.prefilled.cached_tokens


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", SEEDS)
async def test_says_what_the_library_says(family: str, tmp_path: Path, expander: MediaExpander) -> None:
    """Alone, in company, stopped and continued; greedy and sampled."""
    library = Library(family, build_for_vllm(family, tmp_path / family))
    spoken = list(conversations(family))
    expected = [library.generate(conversation, COUNT) for conversation in spoken]
    assert expected[0].ids != expected[1].ids, "the model's tokens don't depend on the picture"
    greedy = Sampling(temperature=0, max_tokens=COUNT, banned_ids=library.control_ids)
    async with open_model(tmp_path / family, expander) as model:
        prompts = [await render(model, conversation) for conversation in spoken]
        assert [prompt.context_ids for prompt in prompts] == [reply.prompt_ids for reply in expected]
        together = await asyncio.gather(*(run(model.engine, prompt, greedy) for prompt in prompts))
        for reply, out in zip(expected, together, strict=True):
            assert reply.agrees(out.ids), (reply.ids, out.ids, reply.margins)
        await check_cuts(model, prompts[2], greedy, expected[2])
        await check_cuts(model, prompts[2], SAMPLED, None)
        await check_cache(model, prompts, together[2].ids, greedy)


async def check_cuts(model: Model, prompt: Prompt, sampling: Sampling, reply: Reply | None) -> None:
    """From the cache and, as after a restart, without it."""
    whole = await run(model.engine, prompt, sampling)
    for cut in (1, 5, COUNT - 1):
        for owner in ("", f"lost {cut}"):
            part = await run(model.engine, continued(replace(prompt, owner=owner), whole.ids[:cut]), sampling)
            together = [*whole.ids[:cut], *part.ids]
            assert together == list(whole.ids) or (reply is not None and reply.agrees(together))


async def check_cache(model: Model, prompts: list[Prompt], said: list[int], greedy: Sampling) -> None:
    """By content, in whole blocks: a following turn computes no item again, another picture is another prefix."""
    prompt = prompts[2]
    more = model.format.tokenizer.encode(["More?"])
    longer = Prompt((*prompt.context_ids, *said, *more), media=prompt.media)
    assert cached(await run(model.engine, longer, greedy)) >= (len(prompt) + len(said)) // BLOCK * BLOCK - BLOCK
    one, other = prompts[0], prompts[1]
    if one.context_ids == other.context_ids:
        await run(model.engine, one, greedy)
        fresh = await run(model.engine, replace(other, owner="fresh"), greedy)
        assert (await run(model.engine, other, greedy)).ids == fresh.ids
        assert cached(fresh) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)  # vLLM starts twice
async def test_a_reply_about_pictures_goes_on_when_its_process_is_killed(
    tmp_path: Path, expander: MediaExpander
) -> None:
    """The new process asks for the pictures again."""
    family = "qwen2_5_vl"
    async with open_model(build_for_vllm(family, tmp_path / family), expander) as model:
        engine = model.engine
        assert isinstance(engine, HostedEngine)
        prompt = await render(model, list(conversations(family))[2])
        whole, process, out = await run(engine, prompt, SAMPLED), engine.process_id, Run()
        assert process is not None
        async with engine.generate(prompt, SAMPLED) as outputs:
            async for output in outputs:
                out.add(output)
                if len(out.ids) == 3 and engine.process_id == process:
                    os.kill(process, signal.SIGKILL)
        assert engine.process_id != process
        assert out.ids == whole.ids
