"""Speech over HTTP: a text, a chat reply, a message of a conversation."""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from palaver.engines.core.token_masks import unspeakable_characters
from palaver.voice import speech
from palaver.voice.base import IsStopped, Samples, Speaker, VoiceFailed, VoiceMissing, VoiceSettings
from tests.server.chat_client import SUM, WEATHER, complete, delta_text, post_error, stream
from tests.server.live_server import LiveServer

pytest.importorskip("espeakng_loader")
soundfile = pytest.importorskip("soundfile")

SPEECH = "/v1/audio/speech"
TEXT = "Hello there. This is **Palaver**, with 2 sentences!\n```\nnever this\n```\nAnd a third."
SPOKEN: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}
STREAMED: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "pcm16"}}


def speak(http: httpx.Client, **fields: Any) -> httpx.Response:
    answer = http.post(SPEECH, json={"input": TEXT, "voice": "alloy", "model": "tts-1", **fields})
    assert answer.status_code == 200, answer.text
    return answer


def heard(data: bytes) -> tuple[np.ndarray[Any, Any], int]:
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    return samples, rate


def is_speech(samples: np.ndarray[Any, Any]) -> bool:
    return len(samples) > 0.4 * 24_000 and float(np.sqrt(np.mean(samples**2))) > 0.02


@pytest.mark.parametrize("form", ["wav", "flac", "mp3", "opus"])
def test_a_text_as_sound(http: httpx.Client, form: str) -> None:
    answer = speak(http, response_format=form)
    samples, rate = heard(answer.content)
    assert rate == 24_000
    assert is_speech(samples)
    assert answer.headers["content-type"].startswith("audio/")


def test_the_sound_is_the_same_whole_and_streamed(http: httpx.Client) -> None:
    whole = speak(http, response_format="wav").content
    pcm = speak(http, response_format="pcm").content
    assert whole[44:] == pcm
    assert speak(http, response_format="pcm", stream=True).content == pcm
    assert speak(http, response_format="wav", stream=True).content[44:] == pcm
    lines = speak(http, response_format="pcm", stream_format="sse").text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert [event["type"] for event in events[-2:]] == ["speech.audio.delta", "speech.audio.done"]
    assert b"".join(base64.b64decode(event["audio"]) for event in events[:-1]) == pcm
    assert len(events) > 3, "clause by clause"


def test_code_is_not_spoken_and_speed_counts(http: httpx.Client) -> None:
    with_code, without = (
        speak(http, input=text, response_format="pcm").content
        for text in (TEXT, TEXT.replace("```\nnever this\n```\n", ""))
    )
    assert with_code == without
    assert len(speak(http, response_format="pcm", speed=2).content) < 0.6 * len(without)


def test_the_official_sdk(client: openai.OpenAI, tmp_path: Path) -> None:
    answer = client.audio.speech.create(model="tts-1", voice="nova", input="Hello from the SDK.", response_format="wav")
    assert is_speech(heard(answer.content)[0])
    path = tmp_path / "out.mp3"
    asked = client.audio.speech.with_streaming_response.create(model="tts-1", voice="echo", input="Hello again.")
    with asked as streamed:
        streamed.stream_to_file(path)
    assert is_speech(heard(path.read_bytes())[0])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": "x" * 30_000}, "input"),
        ({"voice": "nobody"}, "voice"),
        ({"response_format": "aac"}, "response_format"),
        ({"response_format": "mp3", "stream": True}, "response_format"),
        ({"speed": 99.0}, "speed"),
        ({"instructions": "Whisper."}, "instructions"),
        ({"sing": True}, "sing"),
    ],
)
def test_what_can_not_be_said_is_refused_by_name(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    status, error = post_error(http, SPEECH, **{"input": "Hello.", "voice": "alloy", **fields})
    assert (status, error["param"]) == (400, param)


def test_voices_are_listed_and_other_models_refused(http: httpx.Client) -> None:
    told = http.get("/v1/audio/voices").json()
    assert told["model"] == "espeak"
    assert {"alloy", "de"} <= set(told["voices"])
    assert post_error(http, SPEECH, input="Hello.", model="some-other-voice")[0] == 404


def test_a_spoken_reply(http: httpx.Client) -> None:
    message = complete(http, **SPOKEN)["choices"][0]["message"]
    audio = message["audio"]
    assert message["content"] is None
    assert "42" in audio["transcript"]
    assert message["reasoning_content"]
    samples, _ = heard(base64.b64decode(audio["data"]))
    assert is_speech(samples)
    assert len(samples) < 10 * 24_000, "its thinking is not spoken"
    assert not set(audio["transcript"]) & unspeakable_characters()


def test_a_spoken_reply_as_a_stream(http: httpx.Client) -> None:
    whole = complete(http, **SPOKEN)["choices"][0]["message"]["audio"]
    events = stream(http, **STREAMED)
    pieces = [event["choices"][0]["delta"].get("audio") or {} for event in events if event["choices"]]
    assert "".join(piece.get("transcript", "") for piece in pieces) == whole["transcript"]
    data = b"".join(base64.b64decode(piece["data"]) for piece in pieces if "data" in piece)
    assert data == base64.b64decode(whole["data"])[44:]
    assert [piece["id"] for piece in pieces if "id" in piece] == [pieces[0]["id"]]
    assert [piece["expires_at"] for piece in pieces if "expires_at" in piece]
    assert delta_text(events, "content") == ""
    assert delta_text(events, "reasoning_content")
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_recording_can_be_named_instead_of_its_words(http: httpx.Client) -> None:
    first = complete(http, messages=[{"role": "user", "content": "My name is Mira."}], **SPOKEN)
    id = first["choices"][0]["message"]["audio"]["id"]
    messages: list[Any] = [
        {"role": "user", "content": "My name is Mira."},
        {"role": "assistant", "audio": {"id": id}},
        {"role": "user", "content": "What is my name?"},
    ]
    assert "Mira" in complete(http, messages=messages)["choices"][0]["message"]["content"]
    messages[1] = {"role": "assistant", "audio": {"id": "audio_none"}}
    status, error = post_error(http, messages=messages)
    assert (status, error["param"]) == (400, "messages[1].audio.id")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"modalities": ["text"], "audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ({**SPOKEN, "n": 2}, "n"),
        ({**SPOKEN, "stream": True}, "audio.format"),
        ({**SPOKEN, "response_format": {"type": "json_object"}}, "response_format"),
        ({**SPOKEN, "audio": {"voice": "nobody", "format": "wav"}}, "voice"),
        ({**SPOKEN, "audio": {"voice": "alloy", "format": "aac"}}, "audio.format"),
    ],
)
def test_a_spoken_reply_that_can_not_be(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    status, error = post_error(http, **fields)
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize("wanted", ["auto", "required"])
def test_a_call_is_told_and_not_spoken(http: httpx.Client, wanted: str) -> None:
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice = complete(http, messages=asked, tools=[WEATHER], tool_choice=wanted, **SPOKEN)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    assert "audio" not in choice["message"]


def test_the_sdk_reads_a_spoken_reply(client: openai.OpenAI) -> None:
    messages: list[Any] = SUM
    reply = client.chat.completions.create(
        model="sprout",
        messages=messages,
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "wav"},
        temperature=0,
    )
    audio = reply.choices[0].message.audio
    assert audio is not None
    assert "42" in audio.transcript
    assert is_speech(heard(base64.b64decode(audio.data))[0])


def test_a_spoken_reply_in_a_conversation(http: httpx.Client) -> None:
    value = complete(http, **SPOKEN, metadata={"conversation": "new"})
    assert is_speech(heard(base64.b64decode(value["choices"][0]["message"]["audio"]["data"]))[0])
    stored = http.get(f"/api/messages/{value['metadata']['reply']}").json()
    assert stored["reply"]["settings"]["sampling"]["spoken"] is True


class Hoarse:
    """A speaker that fails."""

    name = "hoarse"
    voices = ("alloy",)
    can_clone = False

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1)

    def language(self, voice: VoiceSettings) -> str:
        return "en"

    def synthesize(self, words: str, language: str, voice: VoiceSettings, is_stopped: IsStopped) -> Samples:
        raise VoiceFailed("The voice is hoarse.")

    def close(self) -> None:
        self.executor.shutdown()


@contextmanager
def speaking(live: LiveServer, load: Callable[[str], Speaker]) -> Iterator[None]:
    """Inside, the server has another speaker."""
    with pytest.MonkeyPatch.context() as patch:
        live.run_in_loop(live.server.state.speakers.close)
        patch.setattr(speech, "load_speaker", load)
        yield
        live.run_in_loop(live.server.state.speakers.close)


def missing(name: str) -> Speaker:
    raise VoiceMissing("Speech by espeak", "espeakng-loader")


@pytest.mark.parametrize("stored", [{}, {"metadata": {"conversation": "new"}}])
def test_without_a_voice_the_text_comes_with_a_notice(
    live: LiveServer, http: httpx.Client, stored: dict[str, Any]
) -> None:
    with speaking(live, missing):
        choice = complete(http, **SPOKEN, **stored)["choices"][0]
        events = stream(http, **STREAMED, **stored)
        assert post_error(http, SPEECH, input="Hello.", voice="alloy")[0] == 400, "there is no text to give instead"
    assert "42" in choice["message"]["content"]
    assert "audio" not in choice["message"]
    assert choice["notices"][0].startswith("The reply is not spoken: ")
    assert "palaver[voice]" in choice["notices"][0]
    assert delta_text(events, "content") == choice["message"]["content"]
    assert events[-1]["choices"][0]["notices"] == choice["notices"]


def test_a_voice_that_fails_takes_nothing_from_the_text(live: LiveServer, http: httpx.Client) -> None:
    with speaking(live, lambda name: Hoarse()):
        choice = complete(http, **SPOKEN)["choices"][0]
        events = stream(http, **STREAMED)
    notices = ["The reply is not spoken: The voice is hoarse."]
    assert "42" in choice["message"]["audio"]["transcript"]
    assert choice["notices"] == events[-1]["choices"][0]["notices"] == notices
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_message_of_a_conversation_read_aloud(live: LiveServer) -> None:
    with httpx.Client(base_url=live.url, timeout=60) as http:
        conversation = http.post("/api/conversations", json={}).json()["id"]
        message = {"role": "user", "parts": [{"type": "text", "text": "Who are you?"}]}
        said = http.post(
            f"/api/conversations/{conversation}/say",
            json={"parent": None, "message": message, "parameters": {"temperature": 0, "spoken": True}},
        ).json()
        running = http.get(f"/api/messages/{said['reply']['id']}/speech").content
        ended = http.get(f"/api/messages/{said['reply']['id']}/speech").content
        asked = http.get(f"/api/messages/{said['message']['id']}/speech?voice=de&speed=1.5").content
        assert http.get(f"/api/messages/{said['message']['id']}/speech?voice=nobody").status_code == 400
        assert http.get("/api/messages/none/speech").status_code == 404
    assert running == ended
    assert is_speech(heard(ended)[0])
    assert is_speech(heard(asked)[0])


def test_a_listener_who_leaves_ends_the_speech(live: LiveServer) -> None:
    """What nobody hears is not said to its end: the voice is free for the next one."""
    with httpx.Client(base_url=live.url, timeout=60) as http:
        body = {"input": "One more sentence of very many. " * 500, "response_format": "pcm", "stream": True}
        with http.stream("POST", SPEECH, json=body) as answer:
            assert next(answer.iter_bytes())
    until = time.monotonic() + 60
    while len(live.server.state.limiter) and time.monotonic() < until:
        time.sleep(0.01)
    assert len(live.server.state.limiter) == 0
