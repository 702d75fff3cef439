"""espeak-ng, a small voice for every machine: many languages, no weights, no network.

The library keeps state from one clause to the next (even its noise goes on where it was), so that a clause would sound
a little different each time. It is therefore loaded afresh for each clause, which takes about a millisecond.
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
from palaver.voice.base import OPENAI_VOICES, RATE, Samples, Stopped, VoiceFailed, VoiceMissing, VoiceSettings, silence

WORDS_A_MINUTE = 175
SLOWEST, FASTEST = 0.5, 4.0
_SYNCHRONOUS, _DONT_EXIT, _UTF8, _FROM_START, _SPEED, _SEED = 2, 0x8000, 1, 1, 1, 1
_FULL_SCALE = 32768.0
_DEFAULT = "en-us"
_THEIRS = (
    *("en-us", "en-us+m2", "en-gb+m7", "en-us+m4", "en-us+f2", "en-us+m3", "en-gb"),
    *("en-us+f5", "en-us+f4", "en-us+m1", "en-us+f1", "en-us+f3", "en-gb+m5"),
)
_OPENAI = dict(zip(OPENAI_VOICES, _THEIRS, strict=True))

_LANGUAGE = re.compile(r"^\s*language\s+(\S+)", re.MULTILINE)
_DICTIONARY = re.compile(r"^\s*dictionary\s+(\S+)", re.MULTILINE)
_Heard = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


class Espeak:
    """A voice is named by its language, as in `de` or `en-gb`, with a variant where one is wished: `en-us+f3`."""

    name = "espeak"
    follows = False

    def __init__(self) -> None:
        try:
            import espeakng_loader
        except ImportError:
            raise VoiceMissing("The voice espeak", "espeakng-loader") from None
        self._library = espeakng_loader.get_library_path()
        self._data = Path(espeakng_loader.get_data_path())
        self.thread = ThreadPoolExecutor(1, "espeak")
        self._one_at_a_time = threading.Lock()

    @cached_property
    def voices(self) -> tuple[str, ...]:
        return (*sorted(_OPENAI), *sorted(self._languages))

    @cached_property
    def _languages(self) -> dict[str, str]:
        """The file of each language; what several of them speak is the first one's."""
        folder = self._data / "lang"
        found = {"en": "gmw/en-US"}
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            text = path.read_text(encoding="utf-8", errors="replace")
            for language in _LANGUAGE.findall(text) if self._has_dictionary(text) else ():
                found.setdefault(language.lower(), path.relative_to(folder).as_posix())
        return found

    def _has_dictionary(self, text: str) -> bool:
        """Some languages are listed whose words did not come with the package."""
        named = _DICTIONARY.search(text) or _LANGUAGE.search(text)
        return named is not None and (self._data / f"{named[1].partition('-')[0]}_dict").is_file()

    @cached_property
    def _variants(self) -> frozenset[str]:
        return frozenset(path.name for path in (self._data / "voices" / "!v").iterdir())

    def language(self, voice: VoiceSettings) -> str:
        return self._named(voice)[0]

    def say(self, words: str, language: str, voice: VoiceSettings, stopped: Stopped) -> Samples:
        if voice.reference:
            raise BadParameter("reference", "a recording", "espeak can't follow another voice")
        if not SLOWEST <= voice.speed <= FASTEST:
            raise BadParameter(
                "speed", voice.speed, f"espeak speaks from {SLOWEST:g} to {FASTEST:g} times its own pace"
            )
        own, variant = self._named(voice)
        spoken = own if language.partition("-")[0] == own.partition("-")[0] else language
        if spoken not in self._languages:
            spoken = own
        with self._one_at_a_time:
            if stopped():
                return silence()
            said = self._rendered(words, self._languages[spoken] + variant, voice.speed, stopped)
            return resample(said, self._rate, RATE)

    def close(self) -> None:
        """It holds nothing between two clauses but its thread."""
        self.thread.shutdown(wait=False)

    def _named(self, voice: VoiceSettings) -> tuple[str, str]:
        """Language and variant."""
        name = _OPENAI.get(voice.name.lower(), voice.name) or _DEFAULT
        language, plus, variant = name.partition("+")
        if language.lower() not in self._languages or (plus and variant not in self._variants):
            raise BadParameter("voice", voice.name, f"there is no such voice; known are {', '.join(self.voices)}")
        return language.lower(), plus + variant

    def _rendered(self, words: str, name: str, speed: float, stopped: Stopped) -> Samples:
        heard: list[Samples] = []

        def hear(wave: ctypes._Pointer[ctypes.c_short], count: int, _: int) -> int:
            if wave and count > 0:
                heard.append(np.ctypeslib.as_array(wave, (count,)).astype(np.float32) / _FULL_SCALE)
            return int(stopped())

        with self._loaded() as library:
            heard_by = _Heard(hear)
            library.espeak_SetSynthCallback(heard_by)
            library.espeak_ng_SetRandSeed(ctypes.c_long(_SEED))
            if library.espeak_SetVoiceByName(name.encode()) != 0:
                raise VoiceFailed(f"espeak has no voice {name!r}.")
            library.espeak_SetParameter(_SPEED, round(WORDS_A_MINUTE * speed), 0)
            text = words.encode() + b"\0"
            library.espeak_Synth(text, ctypes.c_size_t(len(text)), 0, _FROM_START, 0, _UTF8, None, None)
            library.espeak_Synchronize()
        return np.concatenate(heard) if heard else silence()

    @contextmanager
    def _loaded(self) -> Iterator[ctypes.CDLL]:
        library = ctypes.CDLL(self._library)
        try:
            self._rate = library.espeak_Initialize(_SYNCHRONOUS, 0, str(self._data).encode(), _DONT_EXIT)
            if self._rate <= 0:
                raise VoiceFailed(f"espeak could not start with its data in {str(self._data)!r}.")
            yield library
        finally:
            library.espeak_Terminate()
            _ctypes.dlclose(library._handle)
