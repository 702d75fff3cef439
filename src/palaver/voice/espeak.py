"""A speaker that uses espeak-ng: many languages, no weights, no network.

The library keeps state between clauses (even the state of its noise generator), so that a clause would sound slightly
different each time. It is therefore loaded again for each clause, which takes about a millisecond.
"""

from __future__ import annotations

import _ctypes
import ctypes
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np

from palaver.errors import BadParameter
from palaver.voice.audio_format import resample
from palaver.voice.base import (
    OPENAI_VOICES,
    SAMPLE_RATE,
    IsStopped,
    Samples,
    VoiceFailed,
    VoiceMissing,
    VoiceSettings,
    silence,
)

WORDS_PER_MINUTE = 175
MIN_SPEED, MAX_SPEED = 0.5, 4.0
_SYNCHRONOUS, _DONT_EXIT, _UTF8, _FROM_START, _SPEED, _SEED = 2, 0x8000, 1, 1, 1, 1
_FULL_SCALE = 32768.0
_DEFAULT_VOICE = "en-us"
_OPENAI_EQUIVALENTS = (
    *("en-us", "en-us+m2", "en-gb+m7", "en-us+m4", "en-us+f2", "en-us+m3", "en-gb"),
    *("en-us+f5", "en-us+f4", "en-us+m1", "en-us+f1", "en-us+f3", "en-gb+m5"),
)
_OPENAI_NAMES = dict(zip(OPENAI_VOICES, _OPENAI_EQUIVALENTS, strict=True))

_LANGUAGE = re.compile(r"^\s*language\s+(\S+)", re.MULTILINE)
_DICTIONARY = re.compile(r"^\s*dictionary\s+(\S+)", re.MULTILINE)
_SynthCallback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


class Espeak:
    """Voices are named by language, such as `de` or `en-gb`, with an optional variant: `en-us+f3`."""

    name = "espeak"
    can_clone = False

    def __init__(self) -> None:
        try:
            import espeakng_loader
        except ImportError:
            raise VoiceMissing("The voice espeak", "espeakng-loader") from None
        self._library = espeakng_loader.get_library_path()
        self._data = Path(espeakng_loader.get_data_path())
        self.executor = ThreadPoolExecutor(1, "espeak")
        self._lock = threading.Lock()

    @cached_property
    def voices(self) -> tuple[str, ...]:
        return (*sorted(_OPENAI_NAMES), *sorted(self._languages))

    @cached_property
    def _languages(self) -> dict[str, str]:
        """The file of each language; the first file wins."""
        folder = self._data / "lang"
        found = {"en": "gmw/en-US"}
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            text = path.read_text(encoding="utf-8", errors="replace")
            for language in _LANGUAGE.findall(text) if self._has_dictionary(text) else ():
                found.setdefault(language.lower(), path.relative_to(folder).as_posix())
        return found

    def _has_dictionary(self, text: str) -> bool:
        """Some languages are listed whose dictionary is not in the package."""
        named = _DICTIONARY.search(text) or _LANGUAGE.search(text)
        return named is not None and (self._data / f"{named[1].partition('-')[0]}_dict").is_file()

    @cached_property
    def _variants(self) -> frozenset[str]:
        return frozenset(path.name for path in (self._data / "voices" / "!v").iterdir())

    def language(self, voice: VoiceSettings) -> str:
        return self._resolve_voice(voice)[0]

    def synthesize(self, words: str, language: str, voice: VoiceSettings, is_stopped: IsStopped) -> Samples:
        if voice.reference:
            raise BadParameter("reference", "a recording", "espeak can't clone the voice of a recording")
        if not MIN_SPEED <= voice.speed <= MAX_SPEED:
            raise BadParameter(
                "speed", voice.speed, f"espeak speaks from {MIN_SPEED:g} to {MAX_SPEED:g} times its own pace"
            )
        own_language, variant = self._resolve_voice(voice)
        clause_language = own_language if language.partition("-")[0] == own_language.partition("-")[0] else language
        if clause_language not in self._languages:
            clause_language = own_language
        with self._lock:
            if is_stopped():
                return silence()
            samples = self._render(words, self._languages[clause_language] + variant, voice.speed, is_stopped)
            return resample(samples, self._rate, SAMPLE_RATE)

    def close(self) -> None:
        """Stops the thread; the library is only loaded during a clause."""
        self.executor.shutdown(wait=False)

    def _resolve_voice(self, voice: VoiceSettings) -> tuple[str, str]:
        """Language and variant."""
        name = _OPENAI_NAMES.get(voice.name.lower(), voice.name) or _DEFAULT_VOICE
        language, plus, variant = name.partition("+")
        if language.lower() not in self._languages or (plus and variant not in self._variants):
            raise BadParameter("voice", voice.name, f"there is no such voice; available: {', '.join(self.voices)}")
        return language.lower(), plus + variant

    def _render(self, words: str, name: str, speed: float, is_stopped: IsStopped) -> Samples:
        chunks: list[Samples] = []

        def on_samples(wave: ctypes._Pointer[ctypes.c_short], count: int, _: int) -> int:
            if wave and count > 0:
                chunks.append(np.ctypeslib.as_array(wave, (count,)).astype(np.float32) / _FULL_SCALE)
            return int(is_stopped())

        with self._loaded_library() as library:
            callback = _SynthCallback(on_samples)
            library.espeak_SetSynthCallback(callback)
            library.espeak_ng_SetRandSeed(ctypes.c_long(_SEED))
            if library.espeak_SetVoiceByName(name.encode()) != 0:
                raise VoiceFailed(f"espeak has no voice {name!r}.")
            library.espeak_SetParameter(_SPEED, round(WORDS_PER_MINUTE * speed), 0)
            text = words.encode() + b"\0"
            library.espeak_Synth(text, ctypes.c_size_t(len(text)), 0, _FROM_START, 0, _UTF8, None, None)
            library.espeak_Synchronize()
        return np.concatenate(chunks) if chunks else silence()

    @contextmanager
    def _loaded_library(self) -> Iterator[ctypes.CDLL]:
        library = ctypes.CDLL(self._library)
        try:
            self._rate = library.espeak_Initialize(_SYNCHRONOUS, 0, str(self._data).encode(), _DONT_EXIT)
            if self._rate <= 0:
                raise VoiceFailed(f"espeak could not start with the data in {str(self._data)!r}.")
            yield library
        finally:
            library.espeak_Terminate()
            _ctypes.dlclose(library._handle)
