"""Every family that sees or hears says what the transformers library says, with the family's own processor.

Pictures and sounds go the whole way: as files through the decoder, the chat template and the engine. What can't be
compared is in `NOT_COMPARED`, and in docs/media.md.
"""

import asyncio
import io
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import soundfile
from PIL import Image as Pixels

from palaver.chat.media_expander import MediaExpander
from palaver.chat.model import Model
from palaver.engines.base import COMPILED
from palaver.engines.compiled.build import NO_COMPILER
from palaver.engines.torch import EngineOptions, SchedulerLimits, TorchEngine, load
from palaver.engines.torch.hybrid_runner import HybridRunner
from palaver.formats.base import RenderOptions
from palaver.formats.loader import load_format
from palaver.formats.tokenizer import load_tokenizer
from palaver.generation import Prompt
from palaver.media import MediaDecoder
from palaver.messages import Audio, Image, Message, Part, Role, Text, Video
from palaver.models.disk import read_facts
from palaver.models.resolver import ResolvedModel
from palaver.sampling import Sampling
from tests import media_files
from tests.engines.generate import continued, run
from tests.engines.media_models import FAMILIES, RATE, build
from tests.engines.media_reference import Library, Reply, picture, sound

COUNT = 8
FILM = media_files.video(seconds=2.0, audio_codec=None, frames_per_second=40)
"""A video without sound, of two seconds: another grey in each."""
Conversation = list[dict[str, Any]]

NOT_COMPARED = {
    "videos as videos": "The library's video processors need torchvision. Here a video is its frames, and "
    "compared with the library as these pictures.",
    "resizing of LFM2-VL and Phi-4 multimodal": "Their image processors need torchvision. Both sides use the stand-in "
    "of image_functions.py, which is compared with Pillow.",
    "sounds of different lengths in Qwen3-Omni and Phi-4 multimodal": "The library pads the sounds of a prompt to the "
    "longest before it computes features, so that they depend on each other. Here each is computed alone.",
    "a sound beside a picture in Phi-4 multimodal": "The library projects the sound in another way then, so that a "
    "picture in a later turn would change what was heard before. Here it is always projected as sound.",
    "several pictures given as one list in LLaVA-OneVision": "The library leaves out their details then. Here each "
    "picture is processed as if it were alone.",
}
SECONDS = {
    "qwen3_omni": (0.7,) * 3,
    "phi4_multimodal": (0.7,) * 3,
    "voxtral": (14.0, 12.0, 31.0),  # is padded to 30 or 60 s
}
SEPARATE = frozenset({"phi4_multimodal"})
"""Families whose pictures and sounds are compared in conversations of their own."""


PLAIN = frozenset(
    "qwen2_5_vl llava llava_onevision smolvlm pixtral mistral3 internvl qwen2_audio voxtral qwen2_5_omni".split()
)
"""Families whose text decoder is a plain one, and gets only embeddings and positions for media: with compiled steps."""
HYBRID = frozenset({"lfm2_vl", "minicpmv4_6"})
"""Families with recurrent or convolutional layers: their replies share passes, too."""


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def media(family: str, kind: str, seed: int) -> dict[str, Any]:
    """Media of another shape for each seed."""
    if kind == "image":
        width, height = ((44, 36), (72, 30), (30, 64))[seed % 3]
        return {"type": "image", "image": picture(seed, width, height)}
    return {"type": "audio", "audio": sound(seed, SECONDS.get(family, (0.7, 1.1, 0.5))[seed % 3])}


def turn(role: str, *parts: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def conversations(family: str) -> Iterator[Conversation]:
    """One item, another one in its place, several at once over several turns, and several kinds."""
    takes = FAMILIES[family].takes
    for kind in takes:
        yield [turn("user", media(family, kind, 0), words("What?"))]
        yield [turn("user", media(family, kind, 3), words("What?"))]
        yield [
            turn("user", words("First "), media(family, kind, 1), media(family, kind, 2), words(" then?")),
            turn("assistant", words("yes.")),
            turn("user", words("Or "), media(family, kind, 4)),
        ]
    if len(takes) > 1 and family not in SEPARATE:
        yield [
            turn("user", *(media(family, kind, 1) for kind in takes), words("And?")),
            turn("assistant", words("no")),
            turn("user", *(media(family, kind, 2) for kind in reversed(takes))),
        ]


def messages(conversation: Conversation) -> list[Message]:
    return [Message(Role(turn["role"]), tuple(map(as_part, turn["content"]))) for turn in conversation]


def as_part(part: Mapping[str, Any]) -> Part:
    file = io.BytesIO()
    match part["type"]:
        case "text":
            return Text(part["text"])
        case "image":
            part["image"].save(file, "PNG")
            return Image("image/png", file.getvalue())
        case _:
            soundfile.write(file, part["audio"], RATE, format="WAV", subtype="FLOAT")
            return Audio("audio/wav", file.getvalue())


@pytest.fixture(scope="module")
def expander() -> Iterator[MediaExpander]:
    decoder = MediaDecoder()
    yield MediaExpander(decoder)
    decoder.close()


@asynccontextmanager
async def open_model(folder: Path, expander: MediaExpander, compiled: bool | None = False) -> AsyncIterator[Model]:
    tokenizer = load_tokenizer(folder)
    options = EngineOptions(compiled=compiled, threads=1, limits=SchedulerLimits(chunk_tokens=24))
    engine = load(folder, vocabulary=tuple(tokenizer.vocabulary), options=options)
    try:
        yield Model(engine, load_format(folder, tokenizer), folder.name, media=expander)
    finally:
        await engine.close()


@pytest.mark.parametrize("family", FAMILIES)
async def test_says_what_the_library_says(family: str, tmp_path: Path, expander: MediaExpander) -> None:
    if FAMILIES[family].tekken:
        pytest.importorskip("mistral_common", reason="NOTHING IS SHOWN HERE: mistral-common is not installed")
    library = Library(family, build(family, tmp_path / family))
    spoken = list(conversations(family))
    expected = [library.generate(conversation, COUNT) for conversation in spoken]
    for place, kind in enumerate(FAMILIES[family].takes):
        one, other = expected[3 * place : 3 * place + 2]
        assert one.ids != other.ids, f"the model's tokens don't depend on the {kind}"
    asked = [messages(conversation) for conversation in spoken]
    if "image" in FAMILIES[family].takes:
        frames = [{"type": "image", "image": Pixels.fromarray(frame)} for frame in expander.decoder.video(FILM).frames]
        assert len(frames) == 2
        expected.append(library.generate([turn("user", *frames, words("What?"))], COUNT))
        asked.append([Message(Role.USER, (Video("video/mp4", FILM), Text("What?")))])
    greedy = Sampling(temperature=0, max_tokens=COUNT, banned_ids=library.control_ids)
    for compiled in (False, None):
        await check_replies(family, tmp_path / family, expander, compiled, asked, expected, greedy)


async def check_replies(
    family: str,
    folder: Path,
    expander: MediaExpander,
    compiled: bool | None,
    asked: Sequence[Sequence[Message]],
    expected: Sequence[Reply],
    greedy: Sampling,
) -> None:
    if compiled is None and family not in PLAIN:
        return
    async with open_model(folder, expander, compiled) as model:
        if compiled is None:
            assert model.engine.info.steps == COMPILED or model.engine.info.steps.endswith(NO_COMPILER)
        assert isinstance(model.engine, TorchEngine)
        assert isinstance(model.engine._runner, HybridRunner) == (family in HYBRID)
        info, facts = model.engine.info, read_facts(ResolvedModel(folder))
        assert set(FAMILIES[family].takes) <= set(info.media)
        assert (facts.media, facts.context_length) == (info.media, info.context_length), "the same before it is loaded"
        prompts = [await asyncio.to_thread(model.render, one) for one in asked]
        assert [prompt.context_ids for prompt in prompts] == [reply.prompt_ids for reply in expected]
        together = await asyncio.gather(*(run(model.engine, prompt, greedy) for prompt in prompts))
        for reply, out in zip(expected, together, strict=True):
            assert reply.agrees(out.ids), (reply.ids, out.ids)
        cut = continued(prompts[-1], together[-1].ids[:3])
        assert (await run(model.engine, cut, greedy)).ids == together[-1].ids[3:]
        await check_next_turn(model, prompts[0], together[0].ids, greedy)


async def test_options_of_a_processor_are_passed_on(tmp_path: Path, expander: MediaExpander) -> None:
    """MiniCPM cuts a picture into slices, and numbers pictures, unless it is told not to."""
    library = Library("minicpmv4_6", build("minicpmv4_6", tmp_path / "minicpm"))
    parts = [media("minicpmv4_6", "image", seed) for seed in (1, 4)]
    conversation = [turn("user", *parts, words("What?"))]
    expected = library.generate(conversation, COUNT, max_slice_nums=1, use_image_id=False)
    options = RenderOptions(media={"max_slice_nums": 1, "use_image_id": 0})
    greedy = Sampling(temperature=0, max_tokens=COUNT, banned_ids=library.control_ids)
    async with open_model(tmp_path / "minicpm", expander) as model:
        usual = await asyncio.to_thread(model.render, messages(conversation))
        prompt = await asyncio.to_thread(model.render, messages(conversation), (), options)
        assert prompt.context_ids == expected.prompt_ids
        assert len(prompt) < len(usual)
        assert expected.agrees((await run(model.engine, prompt, greedy)).ids)


def test_the_documents_name_what_is_compared_and_what_is_not() -> None:
    document = (Path(__file__).parents[2] / "docs" / "media.md").read_text(encoding="utf-8")
    for name in (*FAMILIES, *NOT_COMPARED):
        assert name in document, name


async def check_next_turn(model: Model, prompt: Prompt, reply: Sequence[int], greedy: Sampling) -> None:
    """No token of the picture is computed again."""
    longer = Prompt((*prompt.context_ids, *reply, *model.format.tokenizer.encode(["More?"])), media=prompt.media)
    out = await run(model.engine, longer, greedy)
    assert out.prefilled is not None
    assert out.prefilled.cached_tokens >= prompt.media[-1].stop
