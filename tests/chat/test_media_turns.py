"""Turns about pictures, sounds and videos, with the embedded model that sees and hears."""

from __future__ import annotations

import asyncio
import io
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pixels
from PIL import ImageDraw

from palaver.chat.attachments import NOT_SEEN
from palaver.chat.continuation import replay
from palaver.chat.interface import Chat
from palaver.chat.media_expander import MediaExpander
from palaver.chat.model import Model, build_model
from palaver.chat.model_pool import ModelPool
from palaver.chat.reply_request import fit_prompt
from palaver.chat.reply_stream import ReplyRequest
from palaver.chat.service import Service
from palaver.engines.host.supervisor import ReportProgress
from palaver.errors import ContextOverflow, UnsupportedContent
from palaver.events import Started
from palaver.formats.base import RenderOptions
from palaver.formats.loader import load_format
from palaver.formats.tokenizer import load_tokenizer
from palaver.generation import MediaItem
from palaver.messages import Audio, Image, Message, Part, Role, Text, Video, assistant
from palaver.models.resolver import resolve_folder
from palaver.sampling import Sampling
from palaver.store import NotFound, ReplyStatus, open_store
from palaver.tools.toolbox import OperatorServers, Toolbox
from tests.chat.tool_service import ANSWER, approve, misbehaving, next_reply, open_tools, send, wait_for_round
from tests.media_files import sound, video

PARAMETERS = {"thinking": False, "temperature": 0.0, "max_tokens": 24}
COLOURS = {"red": (220, 30, 30), "blue": (30, 60, 220), "green": (30, 160, 60)}
QUESTION = "What colour is the shape?"
LONGER: Any = {"data": bytes(4 * 480_001), "shape": (480_001,)}
_CONTEXT = multiprocessing.get_context("spawn")


def picture(colour: str) -> Image:
    image = Pixels.new("RGB", (160, 120), "white")
    ImageDraw.Draw(image).ellipse((50, 30, 110, 90), fill=COLOURS[colour])
    file = io.BytesIO()
    image.save(file, "PNG")
    return Image("image/png", file.getvalue())


def ask(*parts: Part | str) -> Message:
    return Message(Role.USER, tuple(Text(part) if isinstance(part, str) else part for part in parts))


def load_omni() -> Model:
    """In this process and in the exact mode."""
    from palaver.engines.core.options import EngineOptions
    from palaver.engines.torch.engine import load

    folder = resolve_folder("sprout-omni")
    tokenizer = load_tokenizer(folder)
    options = EngineOptions(exact=True, threads=1, context=1024)
    engine = load(folder, vocabulary=tokenizer.vocabulary, device="cpu", options=options)
    return build_model("sprout-omni", engine, load_format(folder, tokenizer), tokenizer)


@pytest.fixture(scope="module")
def omni() -> Iterator[Model]:
    model = load_omni()
    yield model
    asyncio.run(model.engine.close())
    model.media.decoder.close()


@asynccontextmanager
async def open_chat(
    folder: Path, model: Model, resume: bool = False, toolbox: Toolbox | None = None
) -> AsyncIterator[tuple[Chat, Service]]:
    """The model stays loaded."""

    async def load(name: str, report: ReportProgress) -> Model:
        return model

    store = await asyncio.to_thread(open_store, folder)
    models = ModelPool(load)
    await models.use(model)
    try:
        async with Service(store, models, resume=resume, toolbox=toolbox) as service:
            model.media.use(service.media)
            try:
                yield service.chat(store.users.ensure().id), service
            finally:
                await service.turns.park()
                models._models, models._default = {}, ""
                model.media.use(MediaExpander().decoder)
    finally:
        await asyncio.to_thread(store.close)


async def follow(chat: Chat, reply_id: str) -> tuple[str, Started]:
    """The answer, and how much of the prompt was cached."""
    started: list[Started] = []
    async with chat.events(reply_id) as entries:
        async for entry in entries:
            if isinstance(entry.event, Started):
                started.append(entry.event)
    return (await chat.message(reply_id)).text, started[0]


async def test_later_turns_retries_and_branches_compute_no_picture_again(omni: Model, tmp_path: Path) -> None:
    async with open_chat(tmp_path, omni) as (chat, _):
        talk = await chat.create_conversation(parameters=PARAMETERS)
        sent = await chat.send_message(talk.id, None, ask(picture("red"), QUESTION))
        answer, first = await follow(chat, sent.reply.id)
        assert "red" in answer
        (span,) = omni.prompt(request(ask(picture("red"), QUESTION))).media
        seen = span.stop
        assert first.cached_tokens <= span.start < seen < first.prompt_tokens
        later = await chat.send_message(talk.id, sent.reply.id, ask("What shape is it?"))
        answer, second = await follow(chat, later.reply.id)
        assert "circle" in answer
        assert second.cached_tokens >= seen
        retried = await chat.start_reply(talk.id, sent.message.id)
        assert (await follow(chat, retried.id))[1].cached_tokens == first.prompt_tokens
        branch = await chat.edit_message(sent.message.id, (picture("red"), Text("Which shape do you see?")))
        reply = await chat.start_reply(talk.id, branch.id)
        assert (await follow(chat, reply.id))[1].cached_tokens >= seen
        other = await chat.send_message(talk.id, None, ask(picture("blue"), QUESTION))
        answer, fresh = await follow(chat, other.reply.id)
        assert "blue" in answer
        assert fresh.cached_tokens <= span.start


async def test_the_model_sees_a_picture_that_a_tool_returned(omni: Model, tmp_path: Path) -> None:
    shown = picture("red")
    (tmp_path / "picture.png").write_bytes(shown.data)
    toolbox = Toolbox(OperatorServers((misbehaving(tmp_path / "record"),)))
    async with open_chat(tmp_path, omni, toolbox=toolbox) as (chat, service):
        tools = {"tool_servers": ["bad"], "tool_policies": {"bad": {"allowed_tools": ["picture"]}}}
        talk = await chat.create_conversation(parameters={**PARAMETERS, **tools, "max_tokens": 60})
        sent = await chat.send_message(talk.id, None, ask(QUESTION), parameters={"must_call": ["picture"]})
        round = await wait_for_round(chat, sent.reply.id)
        await chat.decide_calls(sent.reply.id, approve(round))
        following = await next_reply(chat, round)
        done = await chat.tool_round(sent.reply.id)
        assert done is not None
        (call,) = done.calls
        (blob,) = call.media
        assert (blob.kind, blob.media_type, blob.width, blob.height) == ("image", "image/png", 160, 120)
        assert await chat.blob(blob.digest) == shown.data
        assert call.result is not None
        assert call.result.startswith("Here it is.\n[")  # and a line about the file that is no picture
        *_, result, _ = await chat.path(following.id)
        assert result.parts[1:] == (blob,)
        request = service.requests.rebuild(omni, following, service.store.users.ensure().id)
        (span,) = (await asyncio.to_thread(omni.prompt, request)).media  # the model was given it
        assert (span.item.kind, span.item.digest) == ("image", blob.digest)
        assert (await replay(service.store, omni, following.id)).same


async def test_a_model_that_sees_nothing_reads_that_the_user_sees_a_picture(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(picture("red").data)
    async with open_tools(tmp_path) as service:
        chat = service.chat(service.store.users.ensure().id)
        reply = await send(chat, ["bad__picture"])
        round = await wait_for_round(chat, reply.id)
        await chat.decide_calls(reply.id, approve(round))
        following = await next_reply(chat, round)
        assert following.text == ANSWER
        stranger = service.chat(service.store.users.ensure("stranger").id)
        (blob,) = (await chat.tool_round(reply.id)).calls[0].media  # type: ignore[union-attr]
        with pytest.raises(NotFound):
            await stranger.blob(blob.digest)
        path = await chat.path(following.id)
        model = await service.models.for_reply("calling")
        messages = await asyncio.to_thread(service.store.messages.load_path, path[:-1])
        prompt = await asyncio.to_thread(model.render, messages)
        text = b"".join(model.vocabulary[id] for id in prompt.context_ids).decode()
        assert "Here it is." in text
        assert NOT_SEEN.format(media="[image/png, 160 × 120]") in text


async def test_a_stopped_reply_to_a_picture_continues_as_the_uncut_one(omni: Model, tmp_path: Path) -> None:
    async with open_chat(tmp_path, omni) as (chat, service):
        long = {"temperature": 1.0, "min_tokens": 200, "max_tokens": 200}  # it must not end before it is stopped
        talk = await chat.create_conversation(parameters=PARAMETERS | long)
        sent = await chat.send_message(talk.id, None, ask(picture("green"), QUESTION))
        while len(await chat.tokens(sent.reply.id)) < 2:
            await asyncio.sleep(0.001)
        await chat.stop_reply(sent.reply.id)
        await follow(chat, sent.reply.id)
        await omni.engine.forget(talk.id)
        continued = await chat.continue_reply(sent.reply.id)
        await follow(chat, continued.id)
        assert len(await chat.tokens(continued.id)) == 200
        assert (await replay(service.store, omni, continued.id)).same


def start_and_die(folder: Path) -> None:
    """Runs in a process of its own: is killed when the reply has a few tokens."""

    async def run() -> None:
        async with open_chat(folder, load_omni()) as (chat, _):
            talk = await chat.create_conversation(parameters=PARAMETERS | {"temperature": 1.0, "min_tokens": 20})
            sent = await chat.send_message(talk.id, None, ask(picture("blue"), QUESTION))
            while len(await chat.tokens(sent.reply.id)) < 3:
                await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(run())


@pytest.mark.slow  # a process that imports torch
async def test_a_turn_about_a_picture_goes_on_after_a_kill(omni: Model, tmp_path: Path) -> None:
    child = _CONTEXT.Process(target=start_and_die, args=(tmp_path,))
    child.start()
    await asyncio.to_thread(child.join)
    assert child.exitcode == -signal.SIGKILL
    async with open_chat(tmp_path, omni, resume=True) as (chat, service):
        await service.recovered.wait()
        (talk,) = await chat.conversations()
        leaf = await chat.newest_leaf(talk.id)
        assert leaf is not None
        await follow(chat, leaf)
        question, reply = await chat.path(leaf)
        assert reply.reply is not None
        assert reply.reply.status in (ReplyStatus.DONE, ReplyStatus.LENGTH)
        assert len(await chat.tokens(reply.id)) >= 20
        message = await asyncio.to_thread(service.store.messages.load, question)
        assert [part.data for part in message.parts if isinstance(part, Image)] == [picture("blue").data]
        assert (await replay(service.store, omni, reply.id)).same


def request(*messages: Message, **media: int) -> ReplyRequest:
    options = RenderOptions(thinking=False, media=media)
    return ReplyRequest(messages, Sampling(temperature=0, max_tokens=10), options=options)


async def test_sound_is_heard_at_the_rate_of_the_model(omni: Model) -> None:
    prompts = [
        omni.prompt(request(ask(Audio("audio/wav", sound(seconds=1.0, rate=rate)), "What do you hear?")))
        for rate in (16_000, 48_000)
    ]
    assert len(prompts[0]) == len(prompts[1])
    content = [prompt.media[0].item.load() for prompt in prompts if prompt.media[0].item.load is not None]
    assert [(one.rate, one.shape) for one in content] == [(16_000, (16_000,))] * 2
    assert len((await omni.reply(request(ask(Audio("audio/wav", sound()), "What is it?")))).token_ids) > 0


def test_long_sound_is_heard_in_pieces(omni: Model) -> None:
    """The feature extractor would drop what is beyond thirty seconds."""
    most = omni.engine.info.max_sound_samples
    assert most == 30 * 16_000
    part = Audio("audio/flac", sound("FLAC", seconds=61.0), seconds=61.0)
    spans = omni.render([ask(part, "What?")]).media
    contents = [span.item.load() for span in spans if span.item.load is not None]
    assert [one.shape[0] for one in contents] == [most, most, 16_000]
    assert spans[0].length == spans[1].length > spans[2].length
    whole = Audio("audio/flac", sound("FLAC", seconds=30.0), seconds=30.0)
    assert len(omni.render([ask(whole, "What?")]).media) == 1
    too_long = MediaItem("audio", "0", spans[0].item.placeholder, load=lambda: replace(contents[0], **LONGER))
    with pytest.raises(UnsupportedContent, match="at most 30 seconds"):
        omni.engine.expand_media(too_long)


def test_a_video_is_its_frames_with_their_sound(omni: Model) -> None:
    film = Video("video/mp4", video(seconds=3.0), seconds=3.0)
    prompt = omni.prompt(request(ask(film, "What happens?")))
    items = [span.item for span in prompt.media]
    assert [item.kind for item in items] == ["image", "audio"] * 3
    contents = [item.load() for item in items if item.load is not None]
    greys = [np.frombuffer(one.data, np.uint8).mean() for one in contents[::2]]
    assert greys == sorted(greys)
    assert sum(one.shape[0] for one in contents[1::2]) == pytest.approx(48_000, abs=2_000)
    still = Pixels.fromarray(np.frombuffer(contents[0].data, np.uint8).reshape(contents[0].shape))
    file = io.BytesIO()
    still.save(file, "PNG")
    alone = omni.prompt(request(ask(Image("image/png", file.getvalue()), "What?")))
    assert prompt.media[0].length == alone.media[0].length, "a frame is processed as a picture"


def test_videos_may_have_more_frames_or_fewer(omni: Model) -> None:
    film = ask(Video("video/mp4", video(seconds=3.0), seconds=3.0), "What happens?")

    def kinds(**media: int) -> list[str]:
        return [span.item.kind for span in omni.prompt(request(film, **media)).media if span.item.kind == "image"]

    assert len(kinds(frames_per_second=2)) == 6
    assert len(kinds(max_frames=2)) == 2
    stacked = omni.prompt(request(film, stack_frames=5)).media
    assert [span.item.kind for span in stacked] == ["image", "audio", "image"] * 3
    frame, _, others = (span.item.load() for span in stacked[:3] if span.item.load is not None)
    assert others.shape == (2 * frame.shape[0], 2 * frame.shape[1], 3)


def test_token_counts_and_trimming_include_media(omni: Model) -> None:
    text, seen = request(ask(QUESTION)), request(ask(picture("red"), QUESTION))
    size = omni.prompt(seen).media[0].length
    assert len(omni.prompt(seen)) == len(omni.prompt(text)) + size
    exchange = [ask(*[picture("red")] * 8, "Look."), assistant("I see.")]
    long = request(*exchange * (1024 // (8 * size) + 1), ask(QUESTION))
    with pytest.raises(ContextOverflow):
        fit_prompt(omni, long, "refuse")
    dropped, prompt = fit_prompt(omni, long, "shorten")
    assert dropped > 0
    assert 0 < len(prompt) < 1024
