"""Speech recognition models of the transformers library, each in a process of its own; tiny random ones here."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palaver.errors import BadParameter, BrokenModel
from palaver.voice.base import Samples, VoiceFailed
from palaver.voice.transcription import (
    Segment,
    Transcriber,
    TranscriptionOptions,
    format_srt,
    format_vtt,
    split_sound,
)
from palaver.voice.transcription_child import load_parakeet_features
from tests.voice.tiny_models import make_moonshine, make_parakeet, make_whisper

RATE = 16_000
PLAIN = TranscriptionOptions()
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using the model-agnostic default"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*"),
]


def noise(seconds: float, seed: int = 0) -> Samples:
    samples = np.random.default_rng(seed).normal(size=int(seconds * RATE)) * 0.1
    return samples.astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def whisper(folder: Path) -> Iterator[Transcriber]:
    transcriber = Transcriber(str(folder))
    yield transcriber
    asyncio.run(transcriber.close())


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Any:
    from transformers import pipeline

    return pipeline("automatic-speech-recognition", str(folder))


@pytest.mark.parametrize("language", ["en", "de"])
async def test_whisper_writes_the_same_as_the_librarys_pipeline(
    whisper: Transcriber, pipeline: Any, language: str
) -> None:
    sound = noise(1.9)
    transcript = await whisper.transcribe(sound, TranscriptionOptions(language))
    greedy = {"language": language, "num_beams": 1, "max_length": 24, "max_new_tokens": None}
    expected = pipeline({"raw": sound, "sampling_rate": RATE}, generate_kwargs=greedy)["text"]
    assert transcript.segments[0].text == expected
    assert transcript.text == expected.strip()
    assert (transcript.language, transcript.seconds) == (language, 1.9)


async def test_whisper_detects_the_language_and_marks_times(whisper: Transcriber, pipeline: Any) -> None:
    sound = noise(1.9, seed=5)
    found = await whisper.transcribe(sound, TranscriptionOptions(timestamps=True))
    features = pipeline.feature_extractor(sound, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True)
    language = pipeline.tokenizer.decode(pipeline.model.detect_language(features["input_features"])).strip("<|>")
    assert found.language == language
    expected = pipeline.model.generate(**features, language=language, return_timestamps=True, return_segments=True)
    told = [(one["start"], one["tokens"].tolist()) for one in expected["segments"][0]]
    known = {(segment.start, segment.token_ids) for segment in found.segments}
    assert known
    assert known <= {(min(float(start), 1.9), tuple(ids)) for start, ids in told}
    assert all(segment.start <= segment.end <= 1.9 for segment in found.segments)


@pytest.mark.parametrize("seed", [5, 7])
async def test_words_have_the_times_of_the_librarys_pipeline(whisper: Transcriber, pipeline: Any, seed: int) -> None:
    """The pipeline joins words across segments."""
    sound = noise(1.9, seed=seed)
    found = await whisper.transcribe(sound, TranscriptionOptions("en", timestamps=True, words=True))
    pipeline.model.set_attn_implementation("eager")
    greedy = {"language": "en", "num_beams": 1, "max_length": 24, "max_new_tokens": None}
    given = {"raw": sound, "sampling_rate": RATE}
    expected = pipeline(given, return_timestamps="word", generate_kwargs=greedy)["chunks"]
    pipeline.model.set_attn_implementation("sdpa")
    words = [word for segment in found.segments for word in segment.words]
    assert words
    assert "".join(word.text for word in words) == "".join(one["text"] for one in expected)
    assert {one["timestamp"][0] for one in expected} <= {word.start for word in words}
    for segment in found.segments:
        assert "".join(word.text for word in segment.words) == segment.text
        assert all(word.start <= word.end <= 1.9 for word in segment.words)
    plain = await whisper.transcribe(sound, TranscriptionOptions("en", timestamps=True))
    assert plain.text == found.text


async def test_prompt_translation_and_temperature_have_an_effect(whisper: Transcriber) -> None:
    sound = noise(1.5)
    plain = await whisper.transcribe(sound, TranscriptionOptions("de"))
    for options in (
        TranscriptionOptions("de", prompt="Palaver, Palaver, " * 50),
        TranscriptionOptions("de", translate=True),
        TranscriptionOptions("de", temperature=0.9),
    ):
        other = await whisper.transcribe(sound, options)
        assert other.segments != plain.segments
        assert other == await whisper.transcribe(sound, options), "the same request gives the same text"


async def test_long_sound_is_divided_at_quiet_places(whisper: Transcriber) -> None:
    sound = noise(5.0)
    sound[int(1.7 * RATE) : int(1.9 * RATE)] = 0.0
    bounds = list(split_sound(sound, RATE, 2.0))
    assert 1.7 * RATE < bounds[0][1] < 1.9 * RATE
    assert [start for start, _ in bounds[1:]] == [end for _, end in bounds[:-1]]
    assert bounds[-1][1] == len(sound)
    assert all(end - start <= 2 * RATE for start, end in bounds)
    transcript = await whisper.transcribe(sound, TranscriptionOptions("en"))
    alone = [await whisper.transcribe(sound[start:end], TranscriptionOptions("en")) for start, end in bounds]
    assert [one.text for one in transcript.segments] == [one.segments[0].text for one in alone]
    assert [one.start for one in transcript.segments] == [start / RATE for start, _ in bounds]


async def test_requests_take_turns_and_a_closed_one_ends(whisper: Transcriber) -> None:
    long, ended = noise(9.0), list[str]()

    async def transcribe(name: str, samples: Samples) -> None:
        await whisper.transcribe(samples, PLAIN)
        ended.append(name)

    stream = whisper.windows(long, PLAIN)
    await anext(stream)
    await asyncio.gather(transcribe("long", long), transcribe("short", noise(1.0)))
    assert ended == ["short", "long"]
    await stream.aclose()


async def test_a_killed_process_fails_its_request_and_is_restarted(whisper: Transcriber) -> None:
    before = await whisper.transcribe(noise(1.0), PLAIN)
    assert whisper._model is not None
    stream = whisper.windows(noise(9.0), PLAIN)
    await anext(stream)
    process = whisper._model.process
    os.kill(process.pid, signal.SIGSTOP)
    pending = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(VoiceFailed):
        await pending
    assert await whisper.transcribe(noise(1.0), PLAIN) == before


async def test_what_a_model_can_not_do_is_refused_by_name(whisper: Transcriber, tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="language must be one of de, en, fr"):
        await whisper.transcribe(noise(1.0), TranscriptionOptions("xx"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(BrokenModel, match="llama"):
        await Transcriber(str(tmp_path)).info()


async def test_silence_and_a_few_samples_are_no_failure(whisper: Transcriber) -> None:
    assert (await whisper.transcribe(np.zeros(0, np.float32), PLAIN)).text == ""
    assert (await whisper.transcribe(noise(0.001), PLAIN)).segments


async def test_moonshine_writes_the_same_as_the_library(tmp_path: Path) -> None:
    from transformers import AutoProcessor, MoonshineForConditionalGeneration

    folder, sound = make_moonshine(tmp_path), noise(3.0)
    transcriber = Transcriber(str(folder))
    transcript = await transcriber.transcribe(sound, PLAIN)
    with pytest.raises(BadParameter, match="prompt"):
        await transcriber.transcribe(sound, TranscriptionOptions(prompt="Hello"))
    await transcriber.close()
    processor = AutoProcessor.from_pretrained(folder)
    model = MoonshineForConditionalGeneration.from_pretrained(folder).eval()
    ids = model.generate(**processor(sound, sampling_rate=RATE, return_tensors="pt"))[0]
    assert transcript.text == processor.decode(ids, skip_special_tokens=True)
    assert transcript.segments[0].token_ids == tuple(ids.tolist())


@pytest.mark.parametrize("decoder", ["ctc", "tdt"])
async def test_parakeet_writes_the_same_as_the_library(decoder: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, ParakeetForCTC, ParakeetForTDT, ParakeetProcessor

    folder, sound = make_parakeet(tmp_path, decoder), noise(3.0)
    transcriber = Transcriber(str(folder))
    transcript = await transcriber.transcribe(sound, PLAIN)
    await transcriber.close()
    model = {"ctc": ParakeetForCTC, "tdt": ParakeetForTDT}[decoder].from_pretrained(folder).eval()
    features = load_parakeet_features(folder)
    processor = ParakeetProcessor(features, AutoTokenizer.from_pretrained(folder), decoder_type=decoder)
    output = model.generate(**processor(sound, sampling_rate=RATE), return_dict_in_generate=True)
    assert transcript.text == processor.decode(output.sequences[0], skip_special_tokens=True).strip()
    assert transcript.segments[0].token_ids == tuple(output.sequences[0].tolist())


def test_subtitles() -> None:
    segments = (Segment(0.0, 2.5, " Hello\nthere."), Segment(3661.25, 3662.0, " a --> b"))
    assert format_srt(segments) == (
        "1\n00:00:00,000 --> 00:00:02,500\nHello there.\n\n2\n01:01:01,250 --> 01:01:02,000\na -> b\n"
    )
    assert format_vtt(segments).startswith("WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nHello there.\n\n01:01:01.250")
