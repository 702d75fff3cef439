"""Speech to text over HTTP, as OpenAI's clients ask for it."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile

from palaver.client.http_chat import HttpChat
from palaver.voice.transcription import MAX_SOUNDS, NoTranscriber, TranscribedSound, TranscriptionOptions
from tests import media_files
from tests.server.live_server import LiveServer
from tests.voice.tiny_models import make_whisper

RATE = 16_000
TRANSCRIPTIONS = "/v1/audio/transcriptions"


def noise(seconds: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (np.random.default_rng(1).normal(size=int(seconds * RATE)) * 0.1).astype(np.float32)


def wav(seconds: float) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, noise(seconds), RATE, format="WAV", subtype="FLOAT")
    return out.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[LiveServer]:
    with LiveServer(tmp_path_factory.mktemp("listening"), model=None, transcriber=str(folder)) as server:
        yield server


@pytest.fixture
def sdk(listening: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{listening.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def expected(listening: LiveServer) -> TranscribedSound:
    """What the model hears in 5 s, which are three windows."""

    async def transcribe() -> TranscribedSound:
        return await listening.service.transcriber.transcribe(noise(5.0), TranscriptionOptions("en"))

    heard: TranscribedSound = listening.run_in_loop(transcribe)
    return heard


def ask(server: LiveServer, path: str = TRANSCRIPTIONS, data: bytes | None = None, **fields: Any) -> httpx.Response:
    files = {"file": ("speech.wav", wav(5.0) if data is None else data)}
    fields = {"model": "whisper-1", **fields}
    return httpx.post(f"{server.url}{path}", files=files, data=fields, timeout=60)


def test_the_official_sdk(sdk: openai.OpenAI, expected: TranscribedSound) -> None:
    answer = sdk.audio.transcriptions.create(model="whisper-1", file=("speech.wav", wav(5.0)), language="en")
    assert answer.text == expected.text
    verbose = sdk.audio.transcriptions.create(
        model="whisper-1",
        file=io.BytesIO(wav(5.0)),
        language="en",
        response_format="verbose_json",
        timestamp_granularities=["segment"],
    )
    assert (verbose.language, verbose.duration) == ("en", 5.0)
    assert verbose.segments
    assert "".join(segment.text for segment in verbose.segments).strip() == verbose.text
    assert all(0 <= segment.start <= segment.end <= 5 for segment in verbose.segments)
    timed = sdk.audio.transcriptions.create(
        model="whisper-1",
        file=io.BytesIO(wav(5.0)),
        language="en",
        response_format="verbose_json",
        timestamp_granularities=["word"],
    )
    assert timed.segments is None
    assert timed.words
    assert "".join(word.word for word in timed.words) == "".join(timed.text.split())
    assert all(0 <= word.start <= word.end <= 5 for word in timed.words)
    text = sdk.audio.transcriptions.create(
        model="whisper-1", file=("speech.wav", wav(5.0)), language="en", response_format="text"
    )
    assert str(text).strip() == expected.text


def test_a_stream_of_the_official_sdk(sdk: openai.OpenAI, expected: TranscribedSound) -> None:
    stream = sdk.audio.transcriptions.create(
        model="gpt-4o-transcribe", file=("speech.wav", wav(5.0)), language="en", stream=True
    )
    events = list(stream)
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert len(deltas) == 3, "window by window"
    assert "".join(deltas) == expected.text
    assert (events[-1].type, getattr(events[-1], "text", "")) == ("transcript.text.done", expected.text)


@pytest.mark.parametrize(("form", "start"), [("srt", "1\n00:00:0"), ("vtt", "WEBVTT\n\n00:00:0")])
def test_subtitles(listening: LiveServer, form: str, start: str) -> None:
    answer = ask(listening, response_format=form, language="de")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text.startswith(start)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"language": "xx"}, "language"),
        ({"response_format": "ass"}, "response_format"),
        ({"response_format": "srt", "stream": "true"}, "response_format"),
        ({"temperature": "7"}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"timestamp_granularities[]": "letter"}, "timestamp_granularities[]"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities"),
        ({"include[]": "logprobs"}, "include[]"),
    ],
)
def test_what_can_not_be_done_is_refused_by_name(listening: LiveServer, fields: dict[str, Any], param: str) -> None:
    answer = ask(listening, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_translation_is_another_task(listening: LiveServer) -> None:
    translated = ask(listening, "/v1/audio/translations", response_format="verbose_json").json()
    assert translated["task"] == "translate"
    assert translated["text"] != ask(listening, response_format="verbose_json").json()["text"]
    answer = ask(listening, "/v1/audio/translations", language="de")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "language")


def test_a_form_without_a_file_is_refused(listening: LiveServer) -> None:
    url = f"{listening.url}{TRANSCRIPTIONS}"
    for answer in (
        httpx.post(url, data={"model": "whisper-1", "file": "/etc/passwd"}),
        httpx.post(url, json={"model": "whisper-1", "file": "/etc/passwd"}),
        httpx.post(url, content=b"--x", headers={"content-type": "multipart/form-data; boundary=x"}),
    ):
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_bad_files_and_other_models_are_refused(listening: LiveServer) -> None:
    assert ask(listening, model="another").status_code == 404
    for data, why in (
        (b"MZ and no sound", "is of a type that is not supported"),
        (media_files.picture(), "is not sound"),
        (b"", "is empty"),
    ):
        answer = ask(listening, data=data)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(f"speech.wav {why}")


def test_without_a_transcriber_it_says_how_to_get_one(live: LiveServer) -> None:
    answer = ask(live)
    assert answer.status_code == 400
    assert "--transcriber" in answer.json()["error"]["message"]
    with pytest.raises(NoTranscriber):
        asyncio.run(_transcribe(live, wav(1.0)))


def test_the_interface_of_conversations(listening: LiveServer, live: LiveServer, expected: TranscribedSound) -> None:
    assert asyncio.run(_transcribe(listening, wav(5.0))) == expected.text
    sessions = [httpx.get(f"{server.url}/api/session").json()["transcribes"] for server in (listening, live)]
    assert sessions == [True, False]


async def _transcribe(server: LiveServer, data: bytes) -> str:
    async with HttpChat(server.url) as chat:
        return await chat.transcribe(data, "speech.wav", "en")


def test_a_request_decodes_its_sound_when_there_is_a_place(listening: LiveServer) -> None:
    places = listening.service.transcriber.places

    async def take_all() -> None:
        for _ in range(MAX_SOUNDS):
            await places.acquire()

    async def give_back() -> None:
        assert len(places._waiters or ()) == 1
        for _ in range(MAX_SOUNDS):
            places.release()

    listening.run_in_loop(take_all)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(ask, listening, data=wav(1.0))
        until = time.monotonic() + 60
        while not places._waiters and time.monotonic() < until:
            time.sleep(0.01)
        assert not waiting.done()
        listening.run_in_loop(give_back)
        assert waiting.result().status_code == 200


def test_a_failure_in_a_stream_is_an_event(listening: LiveServer) -> None:
    """The process of the model is killed inside of a window."""
    transcriber = listening.service.transcriber
    fields = {"model": "whisper-1", "stream": "true"}
    files = {"file": ("speech.wav", wav(300.0))}
    with httpx.stream("POST", f"{listening.url}{TRANSCRIPTIONS}", files=files, data=fields, timeout=60) as answer:
        lines = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
        assert next(lines)["type"] == "transcript.text.delta"
        assert transcriber._model is not None
        process = transcriber._model.process
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.3)  # until the next window waits for it
        process.kill()
        last = list(lines)[-1]
    assert last["type"] == "error"
    assert "ended while it was working" in last["error"]["message"]
    assert ask(listening).status_code == 200
