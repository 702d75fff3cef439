"""Files that clients attach, by every API: documents become text, media are checked, a text model refuses them."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any

import anthropic as anthropic_sdk
import httpx
import openai as openai_sdk
import pytest

from palaver.chat.attachments import AttachmentReader
from palaver.errors import BadParameter, UnsupportedContent
from palaver.media import BadMedia, MediaDecoder
from palaver.messages import Audio, Image, Message, Text, Video
from palaver.server.anthropic.request import parse_turns
from palaver.server.anthropic.schemas import CountRequest
from palaver.server.openai.request import parse_messages
from palaver.server.openai.schemas import ChatMessage
from palaver.server.responses.request import convert_input
from palaver.server.responses.schemas import InputItem
from palaver.server.socket.request import media_options, parse_history
from palaver.server.socket.schemas import TurnRequest
from tests import media_files
from tests.server.live_server import LiveServer

PICTURE, SOUND, VIDEO, PDF = (
    media_files.picture(),
    media_files.sound(),
    media_files.video(),
    media_files.pdf("Page one"),
)
DOCUMENT = "\n\nFile a.pdf:\n\nPage one\n\n"


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, media_type: str = "application/octet-stream") -> str:
    return f"data:{media_type};base64,{encoded(data)}"


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    decoder = MediaDecoder()
    yield decoder
    decoder.close()


@pytest.fixture
def attachments(decoder: MediaDecoder) -> AttachmentReader:
    """Of a model that accepts all media."""
    return AttachmentReader(decoder, "omni", ("image", "audio", "video"))


def openai(parts: Any, attachments: AttachmentReader) -> Message:
    return parse_messages([ChatMessage.model_validate({"role": "user", "content": parts})], attachments)[0]


def responses(parts: Any, attachments: AttachmentReader) -> Message:
    item = InputItem.model_validate({"role": "user", "content": parts})
    return parse_messages(convert_input([item]).messages, attachments)[0]


def anthropic(parts: Any, attachments: AttachmentReader) -> Message:
    request = CountRequest.model_validate({"messages": [{"role": "user", "content": parts}]})
    return parse_turns(request, "fp", 100, attachments)[0].message


def socket(parts: Any, attachments: AttachmentReader) -> Message:
    request = TurnRequest.model_validate({"messages": [{"role": "user", "content": parts}]})
    return parse_history(request, 100, attachments)[0]


IMAGE = Image("image/png", PICTURE, "", 8, 6)
AUDIO = Audio("audio/wav", SOUND, seconds=0.5)
CLIP = Video("video/mp4", VIDEO, "", 64, 48, 3.0)
SEE = {"type": "text", "text": "See:"}


def test_openai_chat_completions(attachments: AttachmentReader) -> None:
    parts = [
        SEE,
        {"type": "image_url", "image_url": {"url": data_url(PICTURE, "image/jpeg"), "detail": "low"}},
        {"type": "input_audio", "input_audio": {"data": encoded(SOUND), "format": "mp3"}},
        {"type": "video_url", "video_url": {"url": data_url(VIDEO, "video/mp4")}},
        {"type": "file", "file": {"file_data": data_url(PDF, "application/pdf"), "filename": "a.pdf"}},
        {"type": "file", "file": {"file_data": encoded(PICTURE), "filename": "a.pdf"}},
    ]
    expected = (Text("See:"), IMAGE, AUDIO, CLIP, Text(DOCUMENT), Image("image/png", PICTURE, "a.pdf", 8, 6))
    assert openai(parts, attachments).parts == expected


def test_openai_responses(attachments: AttachmentReader) -> None:
    parts = [
        {"type": "input_text", "text": "See:"},
        {"type": "input_image", "image_url": data_url(PICTURE), "detail": "auto"},
        {"type": "input_audio", "input_audio": {"data": encoded(SOUND), "format": "wav"}},
        {"type": "input_file", "file_data": data_url(PDF), "filename": "a.pdf"},
    ]
    assert responses(parts, attachments).parts == (Text("See:"), IMAGE, AUDIO, Text(DOCUMENT))


def test_anthropic(attachments: AttachmentReader) -> None:
    parts = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(PICTURE)}},
        SEE,
        {
            "type": "document",
            "title": "a.pdf",
            "context": "Read it.",
            "source": {"type": "base64", "media_type": "application/pdf", "data": encoded(PDF)},
        },
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Plain"}},
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Block"}]}},
    ]
    image, text = anthropic(parts, attachments).parts
    assert image == IMAGE
    documents = f"Read it.\n\n{DOCUMENT}\n\nFile document:\n\nPlain\n\n\n\nFile document:\n\nBlock\n\n"
    assert text == Text("See:" + documents)


def test_socket(attachments: AttachmentReader) -> None:
    raw = media_files.tone().tobytes()
    parts = [
        {"type": "image", "data": encoded(PICTURE), "name": "red.png"},
        {"type": "audio", "data": encoded(SOUND)},
        {"type": "audio", "data": encoded(raw), "sample_rate": 8000},
        {"type": "video", "data": encoded(VIDEO), "stack_frames": 1},
        SEE,
    ]
    image, sound, samples, video, text = socket(parts, attachments).parts
    assert (image, sound, video, text) == (Image("image/png", PICTURE, "red.png", 8, 6), AUDIO, CLIP, Text("See:"))
    assert isinstance(samples, Audio)
    assert (samples.media_type, samples.seconds) == ("audio/wav", 1.0)
    assert samples.data.endswith(raw)
    for wrong in ({"sample_rate": 0}, {"sample_rate": True}, {"data": None}, {"name": 1}, {"stack_frames": 2}):
        with pytest.raises(BadParameter):
            socket([{"type": "audio", "data": encoded(raw), **wrong}], attachments)


def test_the_sockets_options_for_media() -> None:
    def options(stacked: Sequence[Any], **fields: Any) -> Any:
        videos = [{"type": "video", "data": "", "stack_frames": one} for one in stacked]
        body = {"messages": [{"role": "user", "content": [SEE, *videos]}], **fields}
        return media_options(TurnRequest.model_validate(body))

    assert options(()) is None
    assert options((), image={"max_slice_nums": None, "use_image_id": True}) == {"use_image_id": 1}
    assert options((), image={"max_slice_nums": 9}, omni_mode=True) == {"max_slice_nums": 9}
    assert options((None,)) == options((1,)) == {"max_slice_nums": 1, "stack_frames": 1}
    assert options((3, 3)) == {"max_slice_nums": 1, "stack_frames": 3}
    for wrong in ((0,), (17,), (True,), ("2",), (1, 2)):
        with pytest.raises(BadParameter, match=r"messages\[0\].content\[\d\].stack_frames"):
            options(wrong)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (data_url(SOUND, "image/png"), "messages[0] is not a picture."),
        (data_url(b"MZ", "image/png"), "messages[0] is of a type that is not supported"),
        (data_url(b"<svg></svg>", "image/svg+xml"), "messages[0] is of a type that is not supported"),
        ("data:image/png;base64,%%%", "messages[0] is not valid base64."),
        ("data:image/png", "messages[0] has a data URL without data."),
        ("https://example.org/a.png", "messages[0] is at another address, which this server does not download"),
        ("file:///etc/passwd", "messages[0] is at another address, which this server does not download"),
    ],
)
def test_a_url_that_is_no_picture_is_refused(attachments: AttachmentReader, url: str, why: str) -> None:
    with pytest.raises(BadMedia) as caught:
        openai([{"type": "image_url", "image_url": {"url": url}}], attachments)
    assert str(caught.value).startswith(why)


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ({"type": "image_url", "image_url": {"url": data_url(PICTURE)}}, "pictures: a vision model"),
        ({"type": "input_audio", "input_audio": {"data": encoded(SOUND), "format": "wav"}}, "sound: an audio model"),
        ({"type": "video_url", "video_url": {"url": data_url(VIDEO)}}, "videos: a video model"),
    ],
)
def test_a_text_model_refuses_media_before_it_is_decoded(part: Any, what: str) -> None:
    decoder = MediaDecoder()
    with pytest.raises(UnsupportedContent, match=f"^The model 'sprout' does not accept {what} is needed for that\\.$"):
        openai([SEE, part], AttachmentReader(decoder, "sprout", ()))
    assert decoder._sandbox._forks.process is None


def test_a_tool_result_holds_no_media(attachments: AttachmentReader) -> None:
    content = [{"type": "image_url", "image_url": {"url": data_url(PICTURE)}}]
    message = ChatMessage.model_validate({"role": "tool", "tool_call_id": "1", "content": content})
    with pytest.raises(BadParameter, match="a tool result holds text"):
        parse_messages([message], attachments)


REFUSED = "The model 'sprout' does not accept pictures: a vision model is needed for that."


@pytest.mark.parametrize(
    ("path", "messages", "part"),
    [
        ("/v1/chat/completions", "messages", {"type": "image_url", "image_url": {"url": data_url(PICTURE)}}),
        ("/v1/responses", "input", {"type": "input_image", "image_url": data_url(PICTURE)}),
        ("/v1/messages", "messages", {"type": "image", "source": {"type": "base64", "data": encoded(PICTURE)}}),
    ],
)
def test_every_api_refuses_in_one_sentence(http: httpx.Client, path: str, messages: str, part: Any) -> None:
    limit = {"max_tokens": 5} if path == "/v1/messages" else {}
    answer = http.post(path, json={"model": "sprout", messages: [{"role": "user", "content": [part]}], **limit})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == REFUSED


def test_the_model_reads_the_text_of_a_document(http: httpx.Client) -> None:
    file = {"type": "file", "file": {"file_data": data_url(PDF), "filename": "a.pdf"}}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Sum up:"}, file]}]}
    prompt = http.post("/v1/apply-template", json=body).json()["prompt"]
    assert f"Sum up:{DOCUMENT}".rstrip() in prompt


def test_models_say_what_they_accept(http: httpx.Client) -> None:
    (model, *_) = http.get("/v1/models").json()["data"]
    assert model["input_modalities"] == ["text"]


def test_the_sdks_send_documents_unchanged(live: LiveServer, client: openai_sdk.OpenAI) -> None:
    file: Any = {"type": "file", "file": {"file_data": data_url(PDF, "application/pdf"), "filename": "a.pdf"}}
    bare = client.chat.completions.create(model="sprout", messages=[{"role": "user", "content": "Hi"}], max_tokens=1)
    reply = client.chat.completions.create(
        model="sprout", messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}, file]}], max_tokens=1
    )
    assert reply.usage is not None
    assert bare.usage is not None
    assert reply.usage.prompt_tokens > bare.usage.prompt_tokens
    content: Any = [
        {"type": "input_text", "text": "Hi"},
        {"type": "input_file", "file_data": data_url(PDF, "application/pdf"), "filename": "a.pdf"},
    ]
    response = client.responses.create(
        model="sprout", input=[{"role": "user", "content": content}], max_output_tokens=16, store=False
    )
    assert response.usage is not None
    assert response.usage.input_tokens == reply.usage.prompt_tokens
    source: Any = {"type": "base64", "media_type": "application/pdf", "data": encoded(PDF)}
    blocks: Any = [{"type": "text", "text": "Hi"}, {"type": "document", "title": "a.pdf", "source": source}]
    with anthropic_sdk.Anthropic(base_url=live.url, api_key="none", max_retries=0) as messages:
        count = messages.messages.count_tokens(model="sprout", messages=[{"role": "user", "content": blocks}])
    assert count.input_tokens == reply.usage.prompt_tokens
