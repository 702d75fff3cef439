"""Turns with audio: text and sound, clause by clause, and only the answer is spoken."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import io
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palaver.engines.core.token_masks import unspeakable_characters
from palaver.media import BadMedia, MediaDecoder
from palaver.server.socket.request import decode_recording
from palaver.voice import speech
from palaver.voice.base import SAMPLE_RATE, IsStopped, Samples, VoiceFailed, VoiceSettings
from palaver.voice.espeak import Espeak
from palaver.voice.speech import stream_speech
from tests.chat.scripted_service import CONTROL, TOKENIZER
from tests.scripted_engine import HoldScript, Script
from tests.server.live_server import LiveServer
from tests.server.socket.client import SUM, connect_client, scripted_server, texts
from tests.server.socket.test_reference import RECORDED, check, read_like_the_demo

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("espeakng_loader") is None, reason="!!! NOT TESTED: the extra `voice` is not installed"
)
SPOKEN = {"tts": {"enabled": True, "mode": "audio_assistant"}, "use_tts_template": True}
"""The additional fields of the demo's page for a turn with audio."""
USER = [{"role": "user", "content": "Speak!"}]


def decode_audio(data: str) -> Samples:
    return np.frombuffer(base64.b64decode(data), dtype="<f4")


def join_audio(received: Sequence[dict[str, Any]]) -> Samples:
    return np.concatenate([decode_audio(message["audio_data"]) for message in received if "audio_data" in message])


async def speak(text: str) -> Samples:
    """The audio of the whole text by espeak."""
    return np.concatenate([piece.samples async for piece in stream_speech(text, Espeak())])


def answering(*clauses: Sequence[int | HoldScript]) -> Script:
    return [item for clause in clauses for item in clause] + [CONTROL["<|im_end|>"]]


def clause(text: str) -> list[int]:
    return TOKENIZER.encode([text])


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_recorded_client_with_a_voice_works_unchanged(live: LiveServer, streaming: bool) -> None:
    async with connect_client(live.url) as client:
        assert "42" in await read_like_the_demo(client, {**RECORDED, **SPOKEN, "streaming": streaming})


async def test_the_sound_is_that_of_the_whole_text(live: LiveServer) -> None:
    request = {**RECORDED, **SPOKEN, "generation": {"do_sample": False}}
    async with connect_client(live.url) as client:
        streamed = await client.request(**request)
        check(streamed)
        whole = await client.request(**{**request, "streaming": False})
        check(whole)
        assert [message["type"] for message in whole] == ["prefill_done", "done"]
        text = whole[-1]["text"]
        assert text == streamed[-1]["text"] == texts(streamed)
        assert "audio_data" not in streamed[-1]
        expected = await speak(text)
        assert len(expected) > SAMPLE_RATE / 2
        np.testing.assert_array_equal(join_audio(streamed), expected)
        np.testing.assert_array_equal(decode_audio(whole[-1]["audio_data"]), expected)


async def test_thinking_is_never_spoken(live: LiveServer) -> None:
    async with connect_client(live.url) as client:
        received = await client.request(**{**RECORDED, **SPOKEN}, enable_thinking=True)
        assert received[-1]["thinking"]
        np.testing.assert_array_equal(join_audio(received), await speak(received[-1]["text"]))


async def test_the_first_clause_sounds_while_the_text_goes_on(tmp_path: Path) -> None:
    gate = asyncio.Event()
    script = answering(clause("One is said. Two"), [HoldScript(gate)], clause(" comes later."))
    async with scripted_server(tmp_path, [script]) as it, connect_client(it.url) as client:
        await client.send(messages=USER, tts={"enabled": True})
        received = [await client.receive()]
        while "audio_data" not in received[-1]:
            received.append(await client.receive())
        np.testing.assert_array_equal(join_audio(received), await speak("One is said."))
        gate.set()
        received += await client.receive_turn()
        np.testing.assert_array_equal(join_audio(received), await speak("One is said. Two comes later."))


async def test_a_stop_stops_the_sound(tmp_path: Path) -> None:
    script = answering(clause("One is said. Two"), [HoldScript(asyncio.Event())], clause(" comes never."))
    async with scripted_server(tmp_path, [script]) as it, connect_client(it.url) as client:
        await client.send(messages=USER, tts={"enabled": True})
        while "audio_data" not in await client.receive():
            pass
        await client.send(type="stop")
        rest = await client.receive_turn()
        assert rest[-1]["finish_reason"] == "stopped"
        assert not any("audio_data" in message for message in rest), "a clause that was started is not finished"


async def test_a_cut_socket_comes_back_to_the_same_sound(tmp_path: Path) -> None:
    script = answering(clause("One is said. Two is said, too. Three as well."))
    async with scripted_server(tmp_path, [script]) as it, connect_client(it.url) as client:
        received = await client.request(messages=USER, tts={"enabled": True})
        for after in range(len(received)):
            again = await client.request(type="resume", turn_id=received[0]["turn_id"], after=after)
            assert again == received[after:]


async def test_what_is_unfit_for_speech_is_not_said(live: LiveServer) -> None:
    question = [{"role": "user", "content": "Write a list in Markdown with **bold** words."}]
    async with connect_client(live.url) as client:
        for seed in range(8):
            wishes = {"seed": seed, "temperature": 1.5, "max_new_tokens": 60}
            for request in ({"tts": {"enabled": True}}, {"use_tts_template": True}):
                done = (await client.request(messages=question, generation=wishes, streaming=False, **request))[-1]
                assert unspeakable_characters().isdisjoint(done["text"]), done["text"]


async def test_a_grammar_does_not_go_with_a_voice(live: LiveServer) -> None:
    async with connect_client(live.url) as client:
        grammar = {"constraint": {"grammar": "regex", "text": "[*]+"}}
        assert (await client.expect_error(messages=SUM, generation=grammar, **SPOKEN)).startswith(
            "generation.constraint"
        )


class Parrot:
    """A speaker that follows any voice: it says the recording itself."""

    name = "parrot"
    voices = ("parrot",)
    can_clone = True

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1)

    def close(self) -> None:
        self.executor.shutdown()

    def language(self, voice: VoiceSettings) -> str:
        return "en"

    def synthesize(self, words: str, language: str, voice: VoiceSettings, is_stopped: IsStopped) -> Samples:
        if "hush" in words:
            raise VoiceFailed("The parrot does not say that.")
        return np.frombuffer(voice.reference, dtype=np.float32)


def tone(rate: int, seconds: float = 0.5) -> Samples:
    return (0.5 * np.sin(2 * np.pi * 440 * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


def as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def file_of(samples: Samples, rate: int, kind: str) -> bytes:
    import soundfile

    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=kind)
    return out.getvalue()


async def test_a_voice_that_follows_gets_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech, "load_speaker", lambda name: Parrot())
    async with scripted_server(tmp_path, [answering(clause("Hello there"))]) as it, connect_client(it.url) as client:
        options = {"enabled": True, "ref_audio_data": as_base64(tone(16_000).tobytes())}
        received = await client.request(messages=USER, tts=options)
        np.testing.assert_allclose(join_audio(received), tone(SAMPLE_RATE), atol=0.02)


async def test_a_voice_that_fails_takes_no_word_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech, "load_speaker", lambda name: Parrot())
    async with (
        scripted_server(tmp_path, [answering(clause("Now hush. Please."))]) as it,
        connect_client(it.url) as client,
    ):
        done = (await client.request(messages=USER, tts={"enabled": True}))[-1]
        assert (done["text"], done["notices"]) == (
            "Now hush. Please.",
            ["The reply is not spoken: The parrot does not say that."],
        )


async def test_without_a_voice_the_text_comes_with_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    async with scripted_server(tmp_path) as it, connect_client(it.url) as client:
        received = await client.request(messages=USER, tts={"enabled": True})
        assert received[-1]["text"] == texts(received) != ""
        (notice,) = received[-1]["notices"]
        assert notice.startswith("The reply is not spoken: ")
        assert "palaver[voice]" in notice


async def test_a_voice_that_can_not_follow_says_so(live: LiveServer) -> None:
    async with connect_client(live.url) as client:
        options = {"enabled": True, "ref_audio_data": as_base64(tone(16_000).tobytes())}
        received = await client.request(**{**RECORDED, "tts": options})
        assert received[-1]["notices"] == ["The voice 'espeak' can't imitate a recording: it speaks as usual."]
        assert len(join_audio(received)) > SAMPLE_RATE / 2


async def test_the_language_of_the_voice(live: LiveServer) -> None:
    request = {**RECORDED, "generation": {"do_sample": False}}
    async with connect_client(live.url) as client:
        plain, german, unknown = [
            await client.request(**request, tts={"enabled": True, "language": language})
            for language in ("", "de", "tlh")
        ]
        assert not np.array_equal(join_audio(plain), join_audio(german))
        assert "notices" not in german[-1]
        np.testing.assert_array_equal(join_audio(plain), join_audio(unknown))
        assert unknown[-1]["notices"] == ["The voice 'espeak' does not speak 'tlh': it speaks 'en-us'."]


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    decoder = MediaDecoder()
    yield decoder
    decoder.close()


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_recordings_may_be_files(decoder: MediaDecoder, kind: str) -> None:
    data = as_base64(file_of(tone(44_100), 44_100, kind))
    found = np.frombuffer(decode_recording(data, decoder), dtype=np.float32)
    assert abs(len(found) - SAMPLE_RATE / 2) < SAMPLE_RATE / 10
    assert 0.3 < np.abs(found).max() < 0.7


WRONG = [
    "not base64!",
    as_base64(b"abc"),
    as_base64(np.array([np.nan, 0], np.float32).tobytes()),
    as_base64(np.zeros(16_000 * 61, np.float32).tobytes()),
    as_base64(b"RIFF" + bytes(4) + b"WAVE" + b"nonsense" * 10),
    as_base64(b"fLaC"),
]


@pytest.mark.parametrize("data", WRONG, ids=range(len(WRONG)))
async def test_hostile_17_recordings_that_are_none(live: LiveServer, data: str) -> None:
    async with connect_client(live.url) as client:
        received = await client.expect_error(messages=SUM, tts={"enabled": True, "ref_audio_data": data})
        assert received.startswith("tts.ref_audio_data"), received
        assert len(json.dumps(received)) < 300


def test_hostile_17_a_long_sound_in_a_small_file_is_refused_by_its_header(decoder: MediaDecoder) -> None:
    silent = file_of(np.zeros(8_000 * 3600, np.float32), 8_000, "FLAC")
    assert len(silent) < 1 << 20
    with pytest.raises(BadMedia, match="longer than 60 s"):
        decode_recording(as_base64(silent), decoder)
