"""Turns with a voice: text and sound, clause by clause, and nothing said that nobody answered."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import io
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palaver.engines.core.logits_processors import unspeakable_characters
from palaver.errors import BadParameter
from palaver.server.socket.request import decode_recording
from palaver.voice import loader
from palaver.voice.base import RATE, Samples, Stopped, VoiceFailed, VoiceSettings
from palaver.voice.espeak import Espeak
from palaver.voice.speech import synthesize
from tests.chat.making import CONTROL, TOKENIZER
from tests.scripted_engine import HoldScript, Script
from tests.server.live import Live
from tests.server.socket.talk import SUM, scene, talking, texts
from tests.server.socket.test_reference import RECORDED, as_the_page_does, check

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("espeakng_loader") is None, reason="!!! NOT TESTED: the extra `voice` is not installed"
)
SPOKEN = {"tts": {"enabled": True, "mode": "audio_assistant"}, "use_tts_template": True}
"""What the page of the demo sends besides, for a turn with sound."""
USER = [{"role": "user", "content": "Speak!"}]


def heard(data: str) -> Samples:
    return np.frombuffer(base64.b64decode(data), dtype="<f4")


def joined(told: Sequence[dict[str, Any]]) -> Samples:
    return np.concatenate([heard(message["audio_data"]) for message in told if "audio_data" in message])


async def said(text: str) -> Samples:
    """What espeak makes of the text at once."""
    return np.concatenate([piece.samples async for piece in synthesize(text, Espeak())])


def answering(*clauses: Sequence[int | HoldScript]) -> Script:
    return [item for clause in clauses for item in clause] + [CONTROL["<|im_end|>"]]


def clause(text: str) -> list[int]:
    return TOKENIZER.encode([text])


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_recorded_client_with_a_voice_works_unchanged(live: Live, streaming: bool) -> None:
    async with talking(live.url) as talk:
        assert "42" in await as_the_page_does(talk, {**RECORDED, **SPOKEN, "streaming": streaming})


async def test_the_sound_is_that_of_the_whole_text(live: Live) -> None:
    asked = {**RECORDED, **SPOKEN, "generation": {"do_sample": False}}
    async with talking(live.url) as talk:
        streamed = await talk.ask(**asked)
        check(streamed)
        whole = await talk.ask(**{**asked, "streaming": False})
        check(whole)
        assert [message["type"] for message in whole] == ["prefill_done", "done"]
        text = whole[-1]["text"]
        assert text == streamed[-1]["text"] == texts(streamed)
        assert "audio_data" not in streamed[-1]
        expected = await said(text)
        assert len(expected) > RATE / 2
        np.testing.assert_array_equal(joined(streamed), expected)
        np.testing.assert_array_equal(heard(whole[-1]["audio_data"]), expected)


async def test_thinking_is_never_spoken(live: Live) -> None:
    async with talking(live.url) as talk:
        told = await talk.ask(**{**RECORDED, **SPOKEN}, enable_thinking=True)
        assert told[-1]["thinking"]
        np.testing.assert_array_equal(joined(told), await said(told[-1]["text"]))


async def test_the_first_clause_sounds_while_the_text_goes_on(tmp_path: Path) -> None:
    gate = asyncio.Event()
    script = answering(clause("One is said. Two"), [HoldScript(gate)], clause(" comes later."))
    async with scene(tmp_path, [script]) as it, talking(it.url) as talk:
        await talk.send(messages=USER, tts={"enabled": True})
        told = [await talk.next()]
        while "audio_data" not in told[-1]:
            told.append(await talk.next())
        np.testing.assert_array_equal(joined(told), await said("One is said."))
        gate.set()
        told += await talk.rest()
        np.testing.assert_array_equal(joined(told), await said("One is said. Two comes later."))


async def test_a_stop_stops_the_sound(tmp_path: Path) -> None:
    script = answering(clause("One is said. Two"), [HoldScript(asyncio.Event())], clause(" comes never."))
    async with scene(tmp_path, [script]) as it, talking(it.url) as talk:
        await talk.send(messages=USER, tts={"enabled": True})
        while "audio_data" not in await talk.next():
            pass
        await talk.send(type="stop")
        rest = await talk.rest()
        assert rest[-1]["finish_reason"] == "stopped"
        assert not any("audio_data" in message for message in rest), "what was begun is not said to its end"


async def test_a_cut_socket_comes_back_to_the_same_sound(tmp_path: Path) -> None:
    script = answering(clause("One is said. Two is said, too. Three as well."))
    async with scene(tmp_path, [script]) as it, talking(it.url) as talk:
        told = await talk.ask(messages=USER, tts={"enabled": True})
        for after in range(len(told)):
            again = await talk.ask(type="resume", turn_id=told[0]["turn_id"], after=after)
            assert again == told[after:]


async def test_what_is_unfit_for_speech_is_not_said(live: Live) -> None:
    question = [{"role": "user", "content": "Write a list in Markdown with **bold** words."}]
    async with talking(live.url) as talk:
        for seed in range(8):
            wishes = {"seed": seed, "temperature": 1.5, "max_new_tokens": 60}
            for asked in ({"tts": {"enabled": True}}, {"use_tts_template": True}):
                done = (await talk.ask(messages=question, generation=wishes, streaming=False, **asked))[-1]
                assert unspeakable_characters().isdisjoint(done["text"]), done["text"]


async def test_a_grammar_does_not_go_with_a_voice(live: Live) -> None:
    async with talking(live.url) as talk:
        grammar = {"constraint": {"grammar": "regex", "text": "[*]+"}}
        assert (await talk.refused(messages=SUM, generation=grammar, **SPOKEN)).startswith("generation.constraint")


class Parrot:
    """A speaker that follows any voice: it says the recording itself."""

    name = "parrot"
    voices = ("parrot",)
    follows = True

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1)

    def close(self) -> None:
        self.thread.shutdown()

    def language(self, voice: VoiceSettings) -> str:
        return "en"

    def say(self, words: str, language: str, voice: VoiceSettings, stopped: Stopped) -> Samples:
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
    monkeypatch.setattr(loader, "load_speaker", lambda name: Parrot())
    async with scene(tmp_path, [answering(clause("Hello there"))]) as it, talking(it.url) as talk:
        wish = {"enabled": True, "ref_audio_data": as_base64(tone(16_000).tobytes())}
        told = await talk.ask(messages=USER, tts=wish)
        np.testing.assert_allclose(joined(told), tone(RATE), atol=0.02)


async def test_a_voice_that_fails_takes_no_word_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "load_speaker", lambda name: Parrot())
    async with scene(tmp_path, [answering(clause("Now hush. Please."))]) as it, talking(it.url) as talk:
        done = (await talk.ask(messages=USER, tts={"enabled": True}))[-1]
        assert (done["text"], done["notices"]) == ("Now hush. Please.", ["The parrot does not say that."])


async def test_where_there_is_no_voice_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    async with scene(tmp_path) as it, talking(it.url) as talk:
        assert "palaver[voice]" in await talk.refused(messages=USER, tts={"enabled": True})


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_recordings_may_be_files(kind: str) -> None:
    found = np.frombuffer(decode_recording(as_base64(file_of(tone(44_100), 44_100, kind))), dtype=np.float32)
    assert abs(len(found) - RATE / 2) < RATE / 10
    assert 0.3 < np.abs(found).max() < 0.7


WRONG = [
    "not base64!",
    as_base64(b"abc"),
    as_base64(np.array([np.nan, 0], np.float32).tobytes()),
    as_base64(np.zeros(16_000 * 61, np.float32).tobytes()),
    as_base64(b"RIFF" + b"nonsense" * 10),
    as_base64(b"fLaC"),
]


@pytest.mark.parametrize("data", WRONG, ids=range(len(WRONG)))
async def test_hostile_17_recordings_that_are_none(live: Live, data: str) -> None:
    async with talking(live.url) as talk:
        told = await talk.refused(messages=SUM, tts={"enabled": True, "ref_audio_data": data})
        assert told.startswith("tts.ref_audio_data"), told
        assert len(json.dumps(told)) < 300


def test_hostile_17_a_long_sound_in_a_small_file_is_refused_by_its_header() -> None:
    silent = file_of(np.zeros(8_000 * 3600, np.float32), 8_000, "FLAC")
    assert len(silent) < 1 << 20
    with pytest.raises(BadParameter, match="longer than 60 s"):
        decode_recording(as_base64(silent))
