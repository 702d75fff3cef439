"""Pictures, sound and video to a model that sees and hears, as clients of each API send them."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import anthropic
import httpx
import openai
import PIL.Image
import pytest
import soundfile
from openai.types.conversations import Message as ConversationMessage
from openai.types.responses import ResponseInputMessageItem

from palaver.chat.model import Model
from palaver.chat.reply_stream import ReplyRequest
from palaver.events import ThinkingDelta
from palaver.messages import Image, Message, Role, Text
from palaver.models.resolver import resolve_folder
from palaver.sampling import Sampling
from palaver.server.settings import ServerLimits, ServerSettings
from palaver.voice.base import SAMPLE_RATE, VoiceSettings
from palaver.voice.espeak import Espeak
from tests import media_files
from tests.server.live_server import LiveServer
from tests.server.live_server import sprout as load_model
from tests.server.socket.client import GREEDY, connect_client
from tests.server.socket.test_reference import check, read_like_the_demo

PICTURE, SOUND = media_files.picture(size=(64, 64)), media_files.sound()
VIDEO, PDF = media_files.video(), media_files.pdf("Page one")
WHAT = "What colour is it?"
REFUSAL = "The model 'sprout' does not accept {}: {} is needed for that."


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(tmp_path_factory.mktemp("omni"), model="sprout-omni") as server:
        yield server


@pytest.fixture
def sdk(omni: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{omni.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def image_url(data: bytes = PICTURE) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(data)}", "detail": "auto"}}


INPUT_AUDIO = {"type": "input_audio", "input_audio": {"data": encoded(SOUND), "format": "wav"}}


def spoken(words: str) -> dict[str, Any]:
    """The words, said by espeak-ng."""
    file = io.BytesIO()
    samples = Espeak().synthesize(words, "en", VoiceSettings(), lambda: False)
    soundfile.write(file, samples, SAMPLE_RATE, format="WAV")
    return {"type": "input_audio", "input_audio": {"data": encoded(file.getvalue()), "format": "wav"}}


def test_openais_sdk_sends_pictures_and_sound(sdk: openai.OpenAI) -> None:
    def ask(*parts: Any, **fields: Any) -> Any:
        messages: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": WHAT}]}]
        return sdk.chat.completions.create(model="sprout-omni", messages=messages, temperature=0, **fields)

    words = ask().usage.prompt_tokens
    seen = ask(image_url())
    assert "red" in seen.choices[0].message.content
    assert seen.usage.prompt_tokens > words
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(image_url(), stream=True) if chunk.choices)
    assert streamed == seen.choices[0].message.content
    again = ask(image_url())
    assert again.usage.prompt_tokens_details.cached_tokens >= again.usage.prompt_tokens - 1
    heard = ask(INPUT_AUDIO)
    assert heard.usage.prompt_tokens > words
    number: Any = [{"role": "user", "content": [spoken("forty two"), {"type": "text", "text": "Which number is it?"}]}]
    reply = sdk.chat.completions.create(model="sprout-omni", messages=number, temperature=0)
    assert "42" in (reply.choices[0].message.content or "")
    file = {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{encoded(PDF)}", "filename": "a.pdf"}}
    both = ask(image_url(), INPUT_AUDIO, file)
    assert both.usage.prompt_tokens > seen.usage.prompt_tokens + heard.usage.prompt_tokens - words
    other = ask(image_url(media_files.picture(size=(64, 64), colour=(0, 0, 255))))
    assert "blue" in other.choices[0].message.content


def test_openais_sdk_sends_them_to_responses(sdk: openai.OpenAI) -> None:
    url = f"data:image/png;base64,{encoded(PICTURE)}"
    parts: Any = [
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_text", "text": WHAT},
    ]
    answer = sdk.responses.create(model="sprout-omni", input=[{"role": "user", "content": parts}], temperature=0)
    assert "red" in answer.output_text
    follow: Any = [{"type": "input_text", "text": WHAT}]
    again = sdk.responses.create(
        model="sprout-omni",
        input=[{"role": "user", "content": follow}],
        previous_response_id=answer.id,
        temperature=0,
    )
    assert "red" in again.output_text, "the picture is part of the conversation"
    file = {"type": "input_file", "filename": "a.pdf", "file_data": f"data:application/pdf;base64,{encoded(PDF)}"}
    both: Any = [INPUT_AUDIO, file, *parts[1:]]
    heard = sdk.responses.create(model="sprout-omni", input=[{"role": "user", "content": both}])
    assert heard.status == "completed"


def test_media_of_items_are_limited(tmp_path: Path) -> None:
    """By what a body may have: a page ends early, and references in one request don't load any number of files."""
    limits = ServerLimits(body_bytes=40_000)
    noise = Random(1).randbytes(3 * 64 * 64)  # 12 kB that can't be compressed
    file = io.BytesIO()
    PIL.Image.frombytes("RGB", (64, 64), noise).save(file, "PNG")
    part = {"type": "input_image", "image_url": f"data:image/png;base64,{encoded(file.getvalue())}"}
    item: Any = {"type": "message", "role": "user", "content": [part]}
    with (
        LiveServer(tmp_path, ServerSettings(limits=limits), model="sprout-omni") as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
    ):
        made = client.conversations.create()
        for _ in range(8):
            client.conversations.items.create(made.id, items=[item])
        page = client.conversations.items.list(made.id, order="asc")
        assert (len(page.data), page.has_more, page.last_id) == (3, True, page.data[-1].id)
        assert len(list(page)) == 8, "over all pages"
        references: Any = [{"type": "item_reference", "id": page.data[0].id}] * 4
        with pytest.raises(openai.BadRequestError, match="too large together") as refused:
            client.conversations.items.create(made.id, items=references)
        assert refused.value.param == "items[3].id"
        with pytest.raises(openai.BadRequestError, match="too large together"):
            client.responses.create(model="sprout-omni", input=references)
        assert len(client.conversations.items.create(made.id, items=references[:3]).data) == 3


def test_a_whole_history_with_a_picture_is_stored_once(omni: LiveServer, sdk: openai.OpenAI) -> None:
    """The history was stored again as another branch with each message."""

    def send(messages: Any, conversation: str) -> Any:
        return sdk.chat.completions.create(
            model="sprout-omni", messages=messages, max_tokens=8, metadata={"conversation": conversation}
        )

    said: list[Any] = [{"role": "user", "content": [image_url(), {"type": "text", "text": WHAT}]}]
    first = send(said, "new")
    said += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Are you sure?"}]
    conversation = first.metadata["conversation"]
    assert send(said, conversation).metadata["conversation"] == conversation
    nodes = httpx.get(f"{omni.url}/api/conversations/{conversation}/nodes").json()
    assert [node["role"] for node in nodes] == ["user", "assistant"] * 2
    said[0] = {"role": "user", "content": [image_url(media_files.picture(size=(32, 32))), *said[0]["content"][1:]]}
    send(said, conversation)
    nodes = httpx.get(f"{omni.url}/api/conversations/{conversation}/nodes").json()
    assert sum(node["parent_id"] is None for node in nodes) == 2, "another picture is another message"


def test_items_have_their_media_and_are_sent_back(sdk: openai.OpenAI) -> None:
    url = f"data:image/png;base64,{encoded(PICTURE)}"
    parts: Any = [
        {"type": "input_image", "image_url": url, "detail": "auto"},
        INPUT_AUDIO,
        {"type": "input_file", "file_data": f"data:video/mp4;base64,{encoded(VIDEO)}", "filename": "a.mp4"},
        {"type": "input_text", "text": WHAT},
    ]
    said: Any = [{"type": "message", "role": "user", "content": parts}]
    answer = sdk.responses.create(model="sprout-omni", input=said, temperature=0, max_output_tokens=16)
    made = sdk.conversations.create(items=said)
    added = sdk.conversations.items.create(made.id, items=said)
    kept = sdk.conversations.items.list(made.id).data[0]
    for item in (
        sdk.responses.input_items.list(answer.id).data[0],
        added.data[0],
        kept,
        sdk.conversations.items.retrieve(kept.id or "", conversation_id=made.id),
    ):
        assert isinstance(item, ResponseInputMessageItem | ConversationMessage)
        content: Any = [part.to_dict() for part in item.content]
        assert [part["type"] for part in content] == ["input_image", "input_file", "input_file", "input_text"]
        assert content[0]["image_url"] == url
        assert content[1]["file_data"].endswith(encoded(SOUND))
        assert content[2]["file_data"].endswith(encoded(VIDEO))
        forms: Any = ({"role": "user", "content": content}, {"type": "item_reference", "id": item.id})
        for form in forms:
            counted = sdk.responses.input_tokens.count(model="sprout-omni", input=[form])
            assert answer.usage is not None
            assert counted.input_tokens == answer.usage.input_tokens


def test_anthropics_sdk_sends_pictures_and_documents(omni: LiveServer, live: LiveServer) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(PICTURE)}}
    document = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": encoded(PDF)}}
    text = {"type": "text", "text": WHAT}

    def ask(server: LiveServer, *blocks: Any) -> anthropic.types.Message:
        messages: Any = [{"role": "user", "content": list(blocks)}]
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120) as client:
            name = server.service.models.current().name
            return client.messages.create(model=name, max_tokens=200, messages=messages, extra_body=GREEDY)

    def tokens(message: anthropic.types.Message) -> int:
        return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)

    seen = ask(omni, image, text)
    assert "red" in "".join(block.text for block in seen.content if block.type == "text")
    both = ask(omni, image, document, text)
    assert tokens(both) > tokens(seen)
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(live, image, text)
    assert REFUSAL.format("pictures", "a vision model") in str(caught.value)


@pytest.mark.parametrize(
    ("part", "refusal"),
    [
        (image_url(), REFUSAL.format("pictures", "a vision model")),
        (INPUT_AUDIO, REFUSAL.format("sound", "an audio model")),
    ],
)
def test_a_text_model_refuses_them_in_one_sentence(client: openai.OpenAI, part: Any, refusal: str) -> None:
    messages: Any = [{"role": "user", "content": [part]}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="sprout", messages=messages)
    assert refusal in str(caught.value)
    item: Any = {"type": "input_image", "image_url": part["image_url"]["url"]} if "image_url" in part else part
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="sprout", input=[{"role": "user", "content": [item]}])
    assert refusal in str(caught.value)


def test_answers_about_a_picture_follow_a_schema(sdk: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": [image_url(), {"type": "text", "text": WHAT}]}]
    colour = {"type": "string", "enum": ["blue", "green", "red"]}
    schema = {"type": "object", "properties": {"colour": colour}, "required": ["colour"], "additionalProperties": False}
    format: Any = {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema}}
    reply = sdk.chat.completions.create(model="sprout-omni", messages=messages, temperature=0, response_format=format)
    assert json.loads(reply.choices[0].message.content or "") == {"colour": "red"}


def test_a_tool_is_called_about_a_picture(sdk: openai.OpenAI) -> None:
    colour = {"type": "string", "enum": ["blue", "green", "red"]}
    parameters = {"type": "object", "properties": {"colour": colour}, "required": ["colour"]}
    paint = {"name": "paint", "description": "Paints.", "parameters": parameters}
    tools: Any = [{"type": "function", "function": paint}]
    messages: list[Any] = [{"role": "user", "content": [image_url(), {"type": "text", "text": WHAT}]}]
    asked = {"model": "sprout-omni", "tools": tools, "temperature": 0}
    reply = sdk.chat.completions.create(messages=messages, tool_choice="required", **asked)
    (call,) = reply.choices[0].message.tool_calls or [None]
    assert call is not None
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("paint", {"colour": "red"})
    messages += [reply.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "Painted."}]
    after = sdk.chat.completions.create(messages=messages, **asked)
    assert after.choices[0].message.content
    assert after.usage is not None
    assert after.usage.prompt_tokens_details is not None
    assert (after.usage.prompt_tokens_details.cached_tokens or 0) > reply.usage.prompt_tokens


async def check_cuts(model: Model, cuts: Sequence[int]) -> None:
    """A reply about a picture that is stopped while it thinks goes on as the uncut one. It is long, so that it still
    runs when the stop comes."""
    asked = Message(Role.USER, (Image("image/png", PICTURE), Text(WHAT)))
    request = ReplyRequest((asked,), Sampling(temperature=0.8, seed=3, min_tokens=300, max_tokens=400))
    async with await asyncio.to_thread(model.stream_reply, request) as stream:
        async for _ in stream:
            pass
        uncut = stream.reply()
    assert "red" in uncut.message.thinking
    assert "red" in uncut.message.text
    assert "<think>" not in uncut.message.text
    for cut in cuts:
        count = 0
        async with await asyncio.to_thread(model.stream_reply, request) as stream:
            async for event in stream:
                count += isinstance(event, ThinkingDelta)
                if count == cut:
                    stream.stop()
            stopped = stream.reply()
        assert stopped.message.thinking
        assert len(stopped.token_ids) < len(uncut.token_ids)
        async with await asyncio.to_thread(model.continue_reply, stopped) as stream:
            async for _ in stream:
                pass
            assert stream.reply().token_ids == uncut.token_ids, cut


def test_a_thought_about_a_picture_goes_on_as_uncut(omni: LiveServer) -> None:
    omni.run_in_loop(lambda: check_cuts(omni.service.models.current(), (1, 4)))


async def test_a_template_may_open_the_thought(tmp_path: Path) -> None:
    """A copy of the model whose prompt ends inside of the thought."""
    for file in resolve_folder("sprout-omni").iterdir():
        (tmp_path / file.name).symlink_to(file)
    template = tmp_path / "chat_template.jinja"
    text = template.read_text()
    template.unlink()
    opening = "{%- if add_generation_prompt and enable_thinking is not false %}{{- '<think>\\n' -}}{%- endif -%}"
    template.write_text(text + opening)
    model = await load_model(str(tmp_path), lambda *_: None)
    try:
        await check_cuts(model, (2,))
    finally:
        await model.engine.close()
        model.media.decoder.close()


DATA_VIDEO = f"data:video/mp4;base64,{encoded(VIDEO)}"


@pytest.mark.parametrize("door", ["chat", "responses", "anthropic"])
def test_every_api_takes_the_parameters_of_media(omni: LiveServer, door: str) -> None:
    """Fewer frames of a video are fewer tokens; what is out of bounds or unknown is named."""
    text = {"chat": {"type": "text", "text": WHAT}, "responses": {"type": "input_text", "text": WHAT}}
    file = {"type": "input_file", "filename": "a.mp4", "file_data": DATA_VIDEO}
    source = {"type": "base64", "media_type": "video/mp4", "data": encoded(VIDEO)}
    path, body = {
        "chat": (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "video_url", "video_url": {"url": DATA_VIDEO}}, text["chat"]]}
                ],
                "max_tokens": 2,
            },
        ),
        "responses": (
            "/v1/responses",
            {
                "input": [{"role": "user", "content": [file, text["responses"]]}],
                "max_output_tokens": 16,
                "store": False,
            },
        ),
        "anthropic": (
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": [{"type": "document", "source": source}, text["chat"]]}],
                "max_tokens": 2,
            },
        ),
    }[door]

    def ask(media: dict[str, Any] | None) -> httpx.Response:
        return httpx.post(omni.url + path, json={**body, "media": media}, timeout=120)

    def tokens(media: dict[str, Any] | None) -> int:
        usage = ask(media).json()["usage"]
        counted = ("prompt_tokens",) if door == "chat" else ("input_tokens", "cache_read_input_tokens")
        return sum(usage.get(name) or 0 for name in counted)

    assert tokens({"max_frames": 1}) < tokens(None) < tokens({"frames_per_second": 2})
    for wrong, name in (({"max_frames": 0}, "media.max_frames"), ({"frames": 1}, "media.frames")):
        refused = ask(wrong)
        assert refused.status_code == 400
        assert name in refused.text


def test_a_tool_result_may_have_a_picture(omni: LiveServer) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": encoded(PICTURE)}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image", "source": source}]}
    tool = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}

    def ask(server: LiveServer) -> httpx.Response:
        messages = [
            {"role": "user", "content": "Look at the picture."},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result, {"type": "text", "text": WHAT}]},
        ]
        body = {"max_tokens": 200, "temperature": 0, "tools": [tool], "messages": messages}
        return httpx.post(f"{server.url}/v1/messages", json=body, timeout=120)

    reply = ask(omni).json()
    assert "red" in "".join(block["text"] for block in reply["content"] if block["type"] == "text"), reply


@pytest.mark.parametrize("store", [True, False])
def test_results_of_calls_may_have_pictures_in_responses(sdk: openai.OpenAI, store: bool) -> None:
    url = f"data:image/png;base64,{encoded(PICTURE)}"
    picture = {"type": "input_image", "image_url": url, "detail": "auto"}
    calls = [{"type": "function_call", "call_id": id, "name": "look", "arguments": "{}"} for id in ("c1", "c2")]
    outputs = ([picture], [{"type": "input_text", "text": "Done."}])
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": output}
        for call, output in zip(calls, outputs, strict=True)
    ]
    look, what = ({"role": "user", "content": text} for text in ("Look at the picture.", WHAT))
    asked: Any = [look, *calls, *results, what]
    tools: Any = [{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}]
    answer = sdk.responses.create(model="sprout-omni", input=asked, tools=tools, temperature=0, store=store)
    assert "red" in answer.output_text


RAW = media_files.tone(1.0).tobytes()
RECORDED: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello!"},
    ],
    "generation": {"max_new_tokens": 64, "temperature": 0.7, "top_p": 0.8, "length_penalty": 1.1, "min_new_tokens": 1},
    "tts": {"enabled": False, "mode": "text_only", "language": "en"},
    "image": {"max_slice_nums": None, "use_image_id": True},
    "omni_mode": False,
    "enable_thinking": False,
}
"""The request of a page for that protocol, up to the message that is sent."""
ITEMS: dict[str, list[dict[str, Any]]] = {
    "image": [{"type": "image", "data": encoded(PICTURE)}],
    "audio": [{"type": "audio", "data": encoded(RAW), "sample_rate": 16_000}],
    "video": [{"type": "video", "data": encoded(VIDEO), "stack_frames": 1}],
    "several": [{"type": "image", "data": encoded(PICTURE)}, {"type": "audio", "data": encoded(RAW), "duration": 1.0}],
}


def recorded(items: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    said = {"role": "user", "content": [{"type": "text", "text": WHAT}, *items]}
    return {**RECORDED, "messages": [*RECORDED["messages"], said], **fields}


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("kind", ITEMS)
async def test_a_recorded_client_of_the_socket_works_unchanged(omni: LiveServer, kind: str, streaming: bool) -> None:
    async with connect_client(omni.url) as client:
        assert await read_like_the_demo(client, recorded(ITEMS[kind], streaming=streaming))
        received = await client.request(**recorded(ITEMS[kind], streaming=streaming, generation={"do_sample": False}))
        check(received)
        assert received[-1]["text"]
        plain = await client.request(**recorded([]))
        assert received[0]["input_tokens"] > plain[0]["input_tokens"]


async def test_the_socket_takes_stacked_frames(omni: LiveServer) -> None:
    tokens = []
    async with connect_client(omni.url) as client:
        for stack in (1, 3):
            items = [{"type": "video", "data": encoded(VIDEO), "stack_frames": stack}]
            received = await client.request(**recorded(items, omni_mode=True, generation={"do_sample": False}))
            assert received[-1]["type"] == "done", received[-1]
            tokens.append(received[0]["input_tokens"])
    assert tokens[1] > tokens[0]


def test_a_models_card_says_what_it_takes(omni: LiveServer) -> None:
    model = httpx.get(f"{omni.url}/v1/models/sprout-omni").json()
    assert model["input_modalities"] == ["text", "image", "audio", "video"]
