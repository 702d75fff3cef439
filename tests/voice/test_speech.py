"""Speech with espeak: it is sound, its pieces join to the sample, and it stops."""

from __future__ import annotations

import asyncio
import io
import sys
import wave

import numpy as np
import pytest

from palaver.errors import BadParameter
from palaver.voice.audio_format import FORMATS, audio_format, encode_audio, pcm, wav_header
from palaver.voice.base import SAMPLE_RATE, Samples, VoiceMissing, VoiceSettings
from palaver.voice.espeak import Espeak
from palaver.voice.speech import SpeakerCache, Speech, SpokenAudio, stream_speech

pytest.importorskip("espeakng_loader")

TEXT = "Hello there, this is a first clause. And this, with 42 apples, is a second!\n```\ncode\n```\n你好，世界。 Fine?"


@pytest.fixture(scope="module")
def espeak() -> Espeak:
    return Espeak()


def not_stopped() -> bool:
    return False


def say(espeak: Espeak, words: str, **voice: object) -> Samples:
    return espeak.synthesize(words, "en", VoiceSettings(**voice), not_stopped)  # type: ignore[arg-type]


async def collect(speech: Speech) -> list[SpokenAudio]:
    return [piece async for piece in speech]


def join_samples(pieces: list[SpokenAudio]) -> Samples:
    return np.concatenate([piece.samples for piece in pieces])


def loudness(samples: Samples) -> float:
    return float(np.sqrt(np.mean(samples**2)))


def test_espeak_makes_speech(espeak: Espeak) -> None:
    short, long = say(espeak, "Yes."), say(espeak, "Yes, and this is quite a lot longer than the other one was.")
    assert short.dtype == np.float32
    assert 0.2 < len(short) / SAMPLE_RATE < 1.0
    assert 2.5 < len(long) / SAMPLE_RATE < 5.0
    for sound in (short, long):
        assert loudness(sound) > 0.03
        assert float(np.abs(sound).max()) <= 1.0
        assert float(np.abs(np.diff(sound)).max()) < 0.9, "no clicks"


async def test_streamed_audio_equals_that_of_one_call(espeak: Espeak) -> None:
    whole = [piece async for piece in stream_speech(TEXT, espeak)]
    speech = Speech(espeak)
    collecting = asyncio.create_task(collect(speech))
    for character in TEXT:
        speech.feed(character)
        await asyncio.sleep(0)
    speech.end()
    pieces = await collecting
    assert "".join(piece.clause.text for piece in pieces) == TEXT
    assert [piece.clause for piece in pieces] == [piece.clause for piece in whole]
    assert np.array_equal(join_samples(pieces), join_samples(whole))
    alone = [
        espeak.synthesize(p.clause.words, p.clause.language, VoiceSettings(), not_stopped)
        for p in whole
        if p.clause.words
    ]
    assert [len(p.samples) > 0 for p in whole] == [bool(p.clause.words) for p in whole]
    for sound, piece in zip(alone, (p for p in whole if p.clause.words), strict=True):
        assert np.array_equal(piece.samples[: len(sound)], sound)
        assert not piece.samples[len(sound) :].any(), "a pause"


def test_audio_does_not_depend_on_earlier_clauses(espeak: Espeak) -> None:
    first = say(espeak, "Once more.")
    for other in ("Sss!", "Völlig anders?", "..."):
        espeak.synthesize(other, "de", VoiceSettings("de"), not_stopped)
        assert np.array_equal(say(espeak, "Once more."), first)


async def test_concurrent_speech(espeak: Espeak) -> None:
    async def one(text: str) -> Samples:
        return join_samples([piece async for piece in stream_speech(text, espeak)])

    texts = [f"Number {count} speaks. And ends." for count in range(12)]
    alone = [await one(text) for text in texts]
    together = await asyncio.gather(*map(one, texts))
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))


async def test_the_first_clause_does_not_wait_for_the_rest(espeak: Espeak) -> None:
    speech = Speech(espeak)
    sounds = aiter(speech)
    speech.feed("The first clause. And the second")
    piece = await anext(sounds)
    assert piece.clause.text == "The first clause."
    assert loudness(piece.samples) > 0.03
    await sounds.aclose()


async def test_stop_ends_the_audio(espeak: Espeak) -> None:
    speech = Speech(espeak)
    speech.feed("One. Two. Three. ")
    sounds = aiter(speech)
    await anext(sounds)
    speech.stop()
    speech.feed("Four. ")
    speech.end()
    assert [piece async for piece in sounds] == []
    waiting = Speech(espeak)
    collecting = asyncio.create_task(collect(waiting))
    await asyncio.sleep(0)
    waiting.stop()
    assert await collecting == []


def test_a_clause_is_cancelled(espeak: Espeak) -> None:
    words = "This is a clause that would go on and on for quite some time if nobody stopped it. " * 3
    calls = iter(range(1000))
    cut = espeak.synthesize(words, "en", VoiceSettings(), lambda: next(calls) >= 5)
    assert len(cut) < 0.1 * len(say(espeak, words))


def test_voices(espeak: Espeak) -> None:
    plain = say(espeak, "Hello there.")
    assert {"alloy", "nova", "en-gb", "de", "cmn"} <= set(espeak.voices)
    assert espeak.language(VoiceSettings("de")) == "de"
    for name in ("nova", "en-gb", "en-us+f3"):
        other = say(espeak, "Hello there.", name=name)
        assert not np.array_equal(other[: len(plain)], plain[: len(other)])
    assert len(say(espeak, "Hello there.", speed=2.0)) < 0.6 * len(plain)
    for wrong in ({"name": "nobody"}, {"name": "en-us+nobody"}, {"speed": 9.0}, {"reference": b"1234"}):
        with pytest.raises(BadParameter):
            say(espeak, "Hello.", **wrong)
    with pytest.raises(BadParameter):
        Speech(espeak, VoiceSettings("nobody"))


async def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    with pytest.raises(VoiceMissing, match=r"pip install 'palaver\[voice\]'"):
        await SpeakerCache().current()


@pytest.mark.parametrize("name", ["wav", "flac", "mp3", "opus"])
def test_formats_are_decodable(espeak: Espeak, name: str) -> None:
    soundfile = pytest.importorskip("soundfile")
    sound = say(espeak, "A short sentence.")
    read, rate = soundfile.read(io.BytesIO(encode_audio(sound, audio_format(name))), dtype="float32")
    assert rate == SAMPLE_RATE
    assert abs(len(read) - len(sound)) < 0.1 * SAMPLE_RATE
    assert 0.8 < loudness(read) / loudness(sound) < 1.25
    if name in ("wav", "flac"):
        assert float(np.abs(read - sound).max()) < 1e-4


def test_pcm_and_wav(espeak: Espeak) -> None:
    sound = say(espeak, "Yes.")
    data = encode_audio(sound, audio_format("pcm"))
    assert data == pcm(sound)
    assert len(data) == 2 * len(sound)
    with wave.open(io.BytesIO(encode_audio(sound, audio_format("wav")))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (SAMPLE_RATE, 1, 2)
        assert file.readframes(file.getnframes()) == data
    assert len(wav_header()) == len(wav_header(10)) == 44
    with pytest.raises(BadParameter, match="aac"):
        audio_format("aac")
    assert FORMATS["pcm"].streams
