"""How soon the voice is heard, and whether what is heard is speech.

    PYTHONPATH=src python3 -m benchmarks.voice                 the first sound, with the embedded model and espeak
    PYTHONPATH=src python3 -m benchmarks.voice --round-trip    the sound against espeak's own rendering of the text

The second says of every text whether it is the same speech.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palaver.chat.model import Model
from palaver.chat.reply_stream import ReplyRequest
from palaver.engines.torch import load
from palaver.events import AnswerDelta, Finished
from palaver.formats.loader import load_format
from palaver.formats.tokenizer import load_tokenizer
from palaver.messages import user
from palaver.sampling import Sampling
from palaver.voice.base import SAMPLE_RATE, Samples, VoiceSettings
from palaver.voice.espeak import Espeak
from palaver.voice.speech import Narration, Speech, SpokenAudio, stream_speech

SPROUT = Path(__file__).parents[1] / "src" / "palaver" / "models" / "sprout"
QUESTIONS = ("Who are you?", "What is 12 + 30?", "Write a haiku about rain.", "Spell sprout backwards.")
BOUND = 0.3
TEXTS = (
    "The train leaves at 10:30. Please be there ten minutes early, because the doors close before it leaves!",
    "Rain fell on the roof all night. In the morning, the garden was green, and 12 birds sang in the old tree.",
    "Why do leaves fall? When days get short, trees save water; so they let go of what they can grow again.",
)
HOP, WINDOW, BANDS = 480, 1024, 32
Frames = NDArray[np.float64]


async def first_sounds(replies: int) -> None:
    """From the token that ends the first clause to the first sound, as the clause's words come from a real engine."""
    tokenizer = load_tokenizer(SPROUT)
    engine = load(SPROUT, vocabulary=tokenizer.vocabulary)
    model = Model(engine, load_format(SPROUT), "sprout", vocabulary=tokenizer.vocabulary)
    speaker = Espeak()
    try:
        await _first_sound(model, speaker, QUESTIONS[0], 0)  # the first one warms up
        for rate in (None, 30.0, 10.0):
            found = [
                await _first_sound(model, speaker, QUESTIONS[seed % len(QUESTIONS)], seed, rate)
                for seed in range(replies)
            ]
            pace = "as quick as sprout is" if rate is None else f"{rate:g} tokens a second"
            print(f"{pace}: from the first clause's last token to its sound, {replies} replies:", _ms(found))
            print(f"  {'held' if max(found) <= BOUND else 'MISSED'}: at most {1000 * BOUND:.0f} ms")
    finally:
        await engine.close()
    clause = "This is a clause of quite an ordinary length,"
    taken = [_timed(lambda: speaker.synthesize(clause, "en", VoiceSettings(), lambda: False)) for _ in range(50)]
    length = len(speaker.synthesize(clause, "en", VoiceSettings(), lambda: False)) / SAMPLE_RATE
    print(
        f"espeak, a clause of {length:.1f} s:",
        _ms(taken),
        f"(real-time factor {statistics.median(taken) / length:.4f})",
    )


async def _first_sound(model: Model, speaker: Espeak, question: str, seed: int, rate: float | None = None) -> float:
    speech = Speech(speaker)
    hearing = asyncio.create_task(_first(speech))
    said: list[tuple[int, float]] = []
    length = 0
    async for text in _answer(model, question, seed, rate):
        length += len(text)
        said.append((length, time.perf_counter()))
        speech.feed(text)
    speech.end()
    heard, piece = await hearing
    end = len(piece.clause.text.rstrip())
    return heard - next(at for length, at in said if length >= end)


async def _first(speech: Speech) -> tuple[float, SpokenAudio]:
    async for piece in speech:
        if len(piece.samples):
            at = time.perf_counter()
            speech.stop()
            return at, piece
    raise AssertionError("nothing was said")


async def _answer(model: Model, question: str, seed: int, rate: float | None) -> AsyncIterator[str]:
    request = ReplyRequest((user(question),), Sampling(temperature=0.6, seed=seed, max_tokens=400, spoken=True))
    async with model.stream_reply(request) as utterance:
        async for event in utterance:
            for one in event.tail if isinstance(event, Finished) else (event,):
                if isinstance(one, AnswerDelta):
                    if rate is not None:
                        await asyncio.sleep(1 / rate)
                    yield one.text


def _timed(act: Any) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def _ms(seconds: list[float]) -> str:
    ordered = sorted(1000 * one for one in seconds)
    late = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return f"median {statistics.median(ordered):.0f} ms, 95% {late:.0f} ms, most {ordered[-1]:.0f} ms"


async def round_trip() -> None:
    """What was made clause by clause is compared, frame by frame along the best alignment, with espeak's rendering of
    the same text in one go, and with its rendering of the other texts."""
    speaker = Espeak()
    ours = [await _joined(text, speaker) for text in TEXTS]
    theirs = [speaker.synthesize(_words(text), "en", VoiceSettings(), lambda: False) for text in TEXTS]
    for place, (sound, own) in enumerate(zip(ours, theirs, strict=True)):
        ratio = len(sound) / len(own)
        level = 20 * np.log10(_level(sound) / _level(own))
        distances = [_distance(_frames(sound), _frames(other)) for other in theirs]
        others = min(distance for other, distance in enumerate(distances) if other != place)
        nearest = distances[place] == min(distances)
        print(
            f"text {place + 1}: {len(sound) / SAMPLE_RATE:.2f} s against {len(own) / SAMPLE_RATE:.2f} s "
            f"(ratio {ratio:.3f}), "
            f"level {level:+.2f} dB, distance {distances[place]:.3f} against {others:.3f} to the nearest other text: "
            f"{'the same speech' if nearest and 0.9 < ratio < 1.1 and abs(level) < 1 else 'NOT THE SAME'}"
        )


async def _joined(text: str, speaker: Espeak) -> Samples:
    return np.concatenate([piece.samples async for piece in stream_speech(text, speaker)])


def _words(text: str) -> str:
    narration = Narration()
    return " ".join(clause.words for clause in [*narration.feed(text), *narration.close()])


def _level(samples: Samples) -> float:
    return float(np.sqrt(np.mean(samples**2)))


def _frames(samples: Samples) -> Frames:
    """The loudness of some bands, a frame for every 20 ms."""
    starts = range(0, len(samples) - WINDOW, HOP)
    spectra = np.abs(np.fft.rfft(np.stack([samples[at : at + WINDOW] for at in starts]) * np.hanning(WINDOW)))
    edges = np.unique(np.geomspace(3, WINDOW // 2, BANDS + 1).astype(int))
    bands = [spectra[:, low:high].mean(axis=1) for low, high in pairwise(edges)]
    return np.log(np.stack(bands, axis=1) + 1e-3)


def _distance(one: Frames, other: Frames) -> float:
    """Of two sounds along the best alignment of their frames, a frame."""
    costs = np.linalg.norm(one[:, None] - other[None], axis=2)
    best = np.full(costs.shape, np.inf)
    best[0, 0] = costs[0, 0]
    for row in range(costs.shape[0]):
        for column in range(costs.shape[1]):
            before = [
                best[row - 1, column] if row else np.inf,
                best[row, column - 1] if column else np.inf,
                best[row - 1, column - 1] if row and column else np.inf,
            ]
            if row or column:
                best[row, column] = costs[row, column] + min(before)
    return float(best[-1, -1] / sum(costs.shape))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--round-trip", action="store_true")
    parser.add_argument("--replies", type=int, default=20)
    asked = parser.parse_args()
    asyncio.run(round_trip() if asked.round_trip else first_sounds(asked.replies))


if __name__ == "__main__":
    main()
