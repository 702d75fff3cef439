"""VITS models, MMS among them: one pass of the network for each clause."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import VitsModel, VitsTokenizer

from palaver.voice.base import Samples, silence
from palaver.voice.model import About, Asked, Sound

_LANGUAGES = {"eng": "en", "deu": "de", "fra": "fr", "spa": "es", "por": "pt", "ita": "it", "nld": "nl", "rus": "ru"}
_SEED = 0


class Vits:
    """Its voices are the speakers it was trained with, by number."""

    def __init__(self, folder: Path) -> None:
        self._model = VitsModel.from_pretrained(folder, use_safetensors=True).eval()
        self._tokenizer = VitsTokenizer.from_pretrained(folder)
        self._speakers = self._model.config.num_speakers
        language = self._tokenizer.language or "eng"
        voices = tuple(map(str, range(self._speakers))) if self._speakers > 1 else ()
        self.about = About(voices=voices, language=_LANGUAGES.get(language, language), speeds=True)

    def say(self, asked: Asked) -> Sound:
        given = self._tokenizer(asked.words, return_tensors="pt")
        if given["input_ids"].shape[1] < 2:  # nothing that it knows a sound for
            return Sound(silence(), self._rate)
        speaker = int(asked.voice or 0) if self._speakers > 1 else None
        self._model.speaking_rate = self._model.config.speaking_rate * asked.speed
        torch.manual_seed(_SEED)
        with torch.inference_mode():
            wave: Samples = self._model(**given, speaker_id=speaker).waveform[0].float().numpy()
        return Sound(wave, self._rate)

    @property
    def _rate(self) -> int:
        return int(self._model.config.sampling_rate)
