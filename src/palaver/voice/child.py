"""A text-to-speech model in a process of its own: `python -m palaver.voice.child MODEL`, spoken to by `hosted`.

So torch stays out of the server's process, and a model that crashes takes nothing down."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import PocketTTSForConditionalGeneration, PocketTTSProcessor, VitsModel, VitsTokenizer

from palaver.voice.audio_format import resample
from palaver.voice.base import RATE, Samples, SpeechChunk, SpeechModel, SpeechModelInfo, SpeechRequestFrame, silence
from palaver.voice.hosted import read_frame, write_frame

KNOWN = ("vits", "pocket_tts")


def load(name: str) -> SpeechModel:
    folder = _folder(name)
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    match kind:
        case "vits":
            return Vits(folder)
        case "pocket_tts":
            return Pocket(folder)
        case _:
            raise ValueError(f"it is of the kind {kind!r}, and known are {', '.join(KNOWN)}")


def _folder(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, ignore_patterns=["*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack"]))


def serve(name: str, asking: BinaryIO, answering: BinaryIO) -> None:
    """Answers until nobody asks any more."""
    try:
        model = load(name)
    except Exception as error:
        write_frame(answering, {"error": _sentence(error)})
        return
    write_frame(answering, {"about": asdict(model.about)})
    while (asked := read_frame(asking)) is not None:
        value, reference = asked
        try:
            sound = model.say(_asked(value, reference))
            samples = resample(np.clip(sound.samples, -1.0, 1.0).astype(np.float32), sound.rate, RATE)
            write_frame(answering, {"id": value["id"]}, samples.tobytes())
        except Exception as error:
            write_frame(answering, {"id": value["id"], "error": _sentence(error)})


def _asked(value: dict[str, object], reference: bytes) -> SpeechRequestFrame:
    recorded = np.frombuffer(reference, dtype=np.float32) if reference else None
    return SpeechRequestFrame(str(value["words"]), str(value["voice"]), float(str(value["speed"])), recorded)


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"


def main() -> None:
    """What libraries print goes to the log, not between the frames."""
    answering = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin.buffer, answering)


if __name__ == "__main__":
    main()

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
        self.about = SpeechModelInfo(voices=voices, language=_LANGUAGES.get(language, language), speeds=True)

    def say(self, asked: SpeechRequestFrame) -> SpeechChunk:
        given = self._tokenizer(asked.words, return_tensors="pt")
        if given["input_ids"].shape[1] < 2:  # nothing that it knows a sound for
            return SpeechChunk(silence(), self._rate)
        speaker = int(asked.voice or 0) if self._speakers > 1 else None
        self._model.speaking_rate = self._model.config.speaking_rate * asked.speed
        torch.manual_seed(_SEED)
        with torch.inference_mode():
            wave: Samples = self._model(**given, speaker_id=speaker).waveform[0].float().numpy()
        return SpeechChunk(wave, self._rate)

    @property
    def _rate(self) -> int:
        return int(self._model.config.sampling_rate)


class Pocket:
    """Its voices are the files in its folder `voices`: what a recording comes to for the model."""

    def __init__(self, folder: Path) -> None:
        self._model = PocketTTSForConditionalGeneration.from_pretrained(folder, use_safetensors=True).eval()
        self._processor = PocketTTSProcessor.from_pretrained(folder)
        self._voices = {path.stem: path for path in sorted((folder / "voices").glob("*.safetensors"))}
        self.about = SpeechModelInfo(voices=tuple(self._voices), follows=True)

    def say(self, asked: SpeechRequestFrame) -> SpeechChunk:
        torch.manual_seed(_SEED)
        with torch.inference_mode():
            given = self._prompt(asked)
            made = self._model.generate(**given, return_dict_in_generate=True)
            wave = self._processor.decode(made.audio_latents, made.audio_latents_mask)[0]
        return SpeechChunk(wave.float().numpy(), int(self._processor.feature_extractor.sampling_rate))

    def _prompt(self, asked: SpeechRequestFrame) -> Any:
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
