"""Pocket TTS: small enough for a CPU, and it speaks with the voice of a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PocketTTSForConditionalGeneration, PocketTTSProcessor

from palaver.voice.base import RATE
from palaver.voice.model import About, Asked, Sound

_SEED = 0


class Pocket:
    """Its voices are the files in its folder `voices`: what a recording comes to for the model."""

    def __init__(self, folder: Path) -> None:
        self._model = PocketTTSForConditionalGeneration.from_pretrained(folder, use_safetensors=True).eval()
        self._processor = PocketTTSProcessor.from_pretrained(folder)
        self._voices = {path.stem: path for path in sorted((folder / "voices").glob("*.safetensors"))}
        self.about = About(voices=tuple(self._voices), follows=True)

    def say(self, asked: Asked) -> Sound:
        torch.manual_seed(_SEED)
        with torch.inference_mode():
            given = self._prompt(asked)
            made = self._model.generate(**given, return_dict_in_generate=True)
            wave = self._processor.decode(made.audio_latents, made.audio_latents_mask)[0]
        return Sound(wave.float().numpy(), int(self._processor.feature_extractor.sampling_rate))

    def _prompt(self, asked: Asked) -> Any:
        spoken = {"type": "text", "text": asked.words}
        follow: dict[str, Any] = {}
        if asked.reference is not None:
            follow = {"audio": [asked.reference], "sampling_rate": RATE}
        elif asked.voice or self._voices:
            follow = {"audio_prompt_latents": [self._latents(asked.voice or next(iter(self._voices)))]}
        content = [{"type": "audio"}, spoken] if follow else [spoken]
        text = self._processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        return self._processor(text=text, return_tensors="pt", **follow)

    def _latents(self, voice: str) -> torch.Tensor:
        latents = next(iter(load_file(self._voices[voice]).values()))
        return latents.reshape(-1, latents.shape[-1]).float()
