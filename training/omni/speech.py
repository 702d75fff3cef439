"""Words spoken by espeak-ng, in many voices, speeds and pitches, as recordings that are never quite clean."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from functools import cache

import numpy as np
from numpy.typing import NDArray

from training.omni import assets
from training.omni.features import RATE, Wave
from training.phrasings import Draw, Split

ACCENTS = ("gmw/en-US", "gmw/en", "gmw/en-US", "gmw/en-GB-x-rp", "gmw/en-GB-scotland", "gmw/en-US-nyc", "gmw/en-029")
VARIANTS = (
    *("", "", "m1", "m2", "m3", "m5", "m6", "m7", "m8", "f1", "f2", "f4", "f5", "Andy", "Annie", "Alex", "Alicia"),
    *("Gene", "Hugo", "Lee", "Michael", "Mike", "Reed", "adam", "anika", "belinda", "benjamin", "david", "ed", "ian"),
    *("john", "linda", "max", "michel", "miguel", "paul", "rob", "robert", "steph", "victor", "zac", "klatt"),
)
UNSEEN_VARIANTS = ("f3", "m4", "edward2")
"""Voices that training never hears, in any accent."""
_SYNCHRONOUS, _DONT_EXIT, _UTF8, _FROM_START = 2, 0x8000, 1, 1
_SPEED, _PITCH, _RANGE = 1, 3, 4
_SynthCallback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


class Voice:
    """The library, loaded once a process; a lock is not needed in a process of one thread."""

    def __init__(self) -> None:
        library, data = assets.espeak()
        with tempfile.TemporaryDirectory() as folder:  # an instance of its own: the library has one state a process
            self._library = ctypes.CDLL(shutil.copy(library, folder))
        self.rate = self._library.espeak_Initialize(_SYNCHRONOUS, 0, str(data.parent).encode(), _DONT_EXIT)
        if self.rate <= 0:
            raise RuntimeError(f"espeak-ng does not start with the data in {data}")
        self._parts: list[NDArray[np.int16]] = []
        self._callback = _SynthCallback(self._on_samples)
        self._library.espeak_SetSynthCallback(self._callback)

    def _on_samples(self, wave: ctypes._Pointer[ctypes.c_short], count: int, _: int) -> int:
        if wave and count > 0:
            self._parts.append(np.ctypeslib.as_array(wave, (count,)).copy())
        return 0

    def say(self, words: str, name: str, speed: int = 175, pitch: int = 50, pitch_range: int = 50) -> Wave:
        """The words at the library's own rate, without silence around them."""
        self._parts.clear()
        if self._library.espeak_SetVoiceByName(name.encode()) != 0:
            raise RuntimeError(f"espeak-ng has no voice {name}")
        for parameter, value in ((_SPEED, speed), (_PITCH, pitch), (_RANGE, pitch_range)):
            self._library.espeak_SetParameter(parameter, value, 0)
        self._library.espeak_ng_SetRandSeed(ctypes.c_long(1))
        text = words.encode() + b"\0"
        self._library.espeak_Synth(text, ctypes.c_size_t(len(text)), 0, _FROM_START, 0, _UTF8, None, None)
        self._library.espeak_Synchronize()
        wave: Wave = np.concatenate(self._parts).astype(np.float32) / np.float32(32768)
        loud = np.flatnonzero(np.abs(wave) > 0.005)
        return wave[loud[0] : loud[-1] + 1] if len(loud) else wave


@cache
def voice() -> Voice:
    return Voice()


def spoken(draw: Draw, words: str) -> Wave:
    """The words in a voice of this draw's half, at 16 kHz."""
    variant = draw.pick(UNSEEN_VARIANTS if draw.split is Split.HELD_OUT else VARIANTS)
    name = draw.pick(ACCENTS) + (f"+{variant}" if variant else "")
    wave = voice().say(words, name, draw.between(120, 230), draw.between(25, 75), draw.between(30, 70))
    faster = 1 + draw.between(-8, 8) / 100 if draw.chance(0.4) else 1.0
    return resampled(wave, voice().rate * faster)


def resampled(wave: Wave, rate: float) -> Wave:
    """At 16 kHz, by cutting the spectrum."""
    padded = np.concatenate([wave, np.zeros(-len(wave) % 441, np.float32)])
    count = round(len(padded) * RATE / rate)
    spectrum = np.fft.rfft(padded)[: count // 2 + 1]
    spectrum = np.concatenate([spectrum, np.zeros(count // 2 + 1 - len(spectrum))])
    return (np.fft.irfft(spectrum, count) * (count / len(padded))).astype(np.float32)


def recorded(draw: Draw, wave: Wave) -> Wave:
    """The wave with silence around it, at another level, with noise."""
    generator = np.random.default_rng(draw.between(0, 2**31))
    before, after = draw.between(0, RATE // 3), draw.between(0, RATE // 3)
    found = np.concatenate([np.zeros(before, np.float32), wave, np.zeros(after, np.float32)])
    if draw.chance(0.7):
        level = float(np.sqrt(np.mean(wave**2))) * 10 ** (-draw.between(15, 50) / 20)
        found += generator.normal(0, level, len(found)).astype(np.float32)
    return (found * 10 ** (-draw.between(0, 26) / 20)).astype(np.float32)
