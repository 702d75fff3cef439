"""Text-to-speech models of the transformers library, each in a process of its own; tiny random ones here."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from palaver.errors import BadParameter, BrokenModel
from palaver.voice.base import SAMPLE_RATE, Samples, VoiceSettings
from palaver.voice.model_process import ModelSpeaker
from palaver.voice.speech import SpeakerCache, load_speaker, stream_speech
from tests.voice.tiny_models import make_omni, make_pocket, make_qwen3_omni, make_vits

pytest.importorskip("soxr")


def not_stopped() -> bool:
    return False


def say(speaker: ModelSpeaker, words: str = "hello there", **voice: object) -> Samples:
    return speaker.synthesize(words, "en", VoiceSettings(**voice), not_stopped)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def vits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelSpeaker]:
    speaker = load_speaker(str(make_vits(tmp_path_factory.mktemp("vits"), speakers=3)))
    assert isinstance(speaker, ModelSpeaker)
    yield speaker
    speaker.close()


@pytest.fixture(scope="module")
def pocket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelSpeaker]:
    speaker = ModelSpeaker(str(make_pocket(tmp_path_factory.mktemp("pocket"), ("anna", "bert"))))
    yield speaker
    speaker.close()


async def test_vits_speaks_clause_by_clause(vits: ModelSpeaker) -> None:
    pieces = [piece async for piece in stream_speech("Hello there. And 2 more words!", vits)]
    assert [piece.clause.words for piece in pieces] == ["Hello there.", "And two more words!"]
    again = [piece async for piece in stream_speech("Hello there. And 2 more words!", vits)]
    for piece, same in zip(pieces, again, strict=True):
        assert piece.samples.dtype == np.float32
        assert np.array_equal(piece.samples, same.samples)
        assert len(piece.samples) > 0.2 * SAMPLE_RATE
        assert float(np.abs(piece.samples).max()) <= 1


def test_vits_voices_and_speed(vits: ModelSpeaker) -> None:
    assert {"0", "1", "2", "alloy"} <= set(vits.voices)
    assert not np.array_equal(say(vits, name="0"), say(vits, name="1"))
    assert np.array_equal(say(vits, name="alloy"), say(vits, name="0"))
    assert len(say(vits, speed=2.0)) < 0.7 * len(say(vits))
    assert len(say(vits, "???")) == 0
    for wrong in ({"name": "nobody"}, {"reference": b"1234"}):
        with pytest.raises(BadParameter):
            say(vits, **wrong)


def test_pocket_clones_a_recording(pocket: ModelSpeaker) -> None:
    assert pocket.can_clone
    assert {"anna", "bert"} <= set(pocket.voices)
    recording = (0.1 * np.sin(np.arange(SAMPLE_RATE) / 20)).astype(np.float32).tobytes()
    said = [say(pocket, name="anna"), say(pocket, name="bert"), say(pocket, reference=recording)]
    assert all(len(sound) > 0.1 * SAMPLE_RATE for sound in said)
    assert not np.array_equal(said[0], said[1])
    assert not np.array_equal(said[0], said[2])
    assert np.array_equal(say(pocket, reference=recording), said[2])
    with pytest.raises(BadParameter, match="speed"):
        say(pocket, speed=2.0)


def test_the_talker_of_an_omni_model_speaks(tmp_path: Path) -> None:
    speaker = ModelSpeaker(str(make_omni(tmp_path)))
    try:
        assert {"Chelsie", "Ethan", "alloy"} <= set(speaker.voices)
        said = say(speaker, name="Ethan")
        assert len(said) > 0
        assert np.array_equal(say(speaker, name="Ethan"), said)
        assert not np.array_equal(say(speaker, name="Chelsie"), said)
        assert np.array_equal(say(speaker, name="Chelsie"), say(speaker, name="alloy"))
        other = say(speaker, "quite other words", name="Ethan")
        assert not np.array_equal(other, said)
    finally:
        speaker.close()


def test_the_talker_of_qwen3_omni_speaks(tmp_path: Path) -> None:
    speaker = ModelSpeaker(str(make_qwen3_omni(tmp_path)))
    try:
        assert {"chelsie", "ethan", "alloy"} <= set(speaker.voices)
        said = say(speaker, name="ethan")
        assert len(said) > 0
        assert np.array_equal(say(speaker, name="ethan"), said)
        assert not np.array_equal(say(speaker, name="chelsie"), said)
        assert not np.array_equal(say(speaker, "quite other words", name="ethan"), said)
    finally:
        speaker.close()


def test_the_talker_is_given_the_words(tmp_path: Path) -> None:
    """The reply that the library's own code speaks is the clause, whatever the model would have written."""
    import torch
    from transformers import LogitsProcessorList, Qwen2_5OmniForConditionalGeneration

    from palaver.voice.speech_child import ForcedReply

    model = Qwen2_5OmniForConditionalGeneration.from_pretrained(make_omni(tmp_path)).eval()
    prompt, words = torch.tensor([[3, 4, 5]]), [9, 8, 7, 6]
    forced = LogitsProcessorList([ForcedReply(3, words)])
    written = model.thinker.generate(prompt, logits_processor=forced, max_new_tokens=4, do_sample=False)
    assert written[0].tolist() == [3, 4, 5, *words]


def test_stop_does_not_wait_for_the_model(vits: ModelSpeaker) -> None:
    calls = iter((False, True))
    assert len(vits.synthesize("hello " * 200, "en", VoiceSettings(), lambda: next(calls, True))) == 0
    first = say(vits)
    assert np.array_equal(say(vits), first), "the response of the stopped request is discarded"


def test_a_killed_process_is_restarted(vits: ModelSpeaker) -> None:
    before = say(vits)
    process = vits._model.process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert np.array_equal(say(vits), before)


async def test_a_model_that_cannot_be_loaded_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(BrokenModel, match="llama"):
        await SpeakerCache(str(tmp_path)).current()


async def test_the_cached_speaker_is_closed(tmp_path: Path) -> None:
    speakers = SpeakerCache(str(make_vits(tmp_path / "one")))
    speaker = await speakers.current()
    assert isinstance(speaker, ModelSpeaker)
    assert await speakers.current() is speaker
    process = speaker._model.process
    await speakers.close()
    assert process.poll() is not None
    await speakers.close()


def test_the_child_process_ends_when_its_input_is_closed(vits: ModelSpeaker) -> None:
    """As when this program is killed: its end of the pipe is closed."""
    say(vits)
    assert vits._model.process.stdin is not None
    vits._model.process.stdin.close()
    assert vits._model.process.wait(timeout=120) == 0
