"""Pictures, sound and video to a model that sees and hears, as clients of each API send them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests import media_files
from tests.server.live_server import LiveServer
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
