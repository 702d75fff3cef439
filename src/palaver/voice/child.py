"""The child process of `hosted.HostedSpeaker`: `python -m palaver.voice.child MODEL` runs a text-to-speech model.

It reads requests from stdin and writes audio to stdout. So torch stays out of the server's process, and a model that
crashes does not take the server down."""

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
from palaver.voice.base import (
    SAMPLE_RATE,
    Samples,
    SpeechChunk,
    SpeechModel,
    SpeechModelInfo,
    SpeechRequestFrame,
    silence,
)
from palaver.voice.hosted import read_frame, write_frame

MODEL_TYPES = ("vits", "pocket_tts")
_LANGUAGES = {"eng": "en", "deu": "de", "fra": "fr", "spa": "es", "por": "pt", "ita": "it", "nld": "nl", "rus": "ru"}
_SEED = 0


class Vits:
    """A VITS model. Its voices are the speakers it was trained with, by number."""

    def __init__(self, folder: Path) -> None:
        self._model = VitsModel.from_pretrained(folder, use_safetensors=True).eval()
        self._tokenizer = VitsTokenizer.from_pretrained(folder)
        self._speakers = self._model.config.num_speakers
        language = self._tokenizer.language or "eng"
        voices = tuple(map(str, range(self._speakers))) if self._speakers > 1 else ()
        self.info = SpeechModelInfo(voices=voices, language=_LANGUAGES.get(language, language), variable_speed=True)

    def synthesize(self, request: SpeechRequestFrame) -> SpeechChunk:
        inputs = self._tokenizer(request.words, return_tensors="pt")
        if inputs["input_ids"].shape[1] < 2:  # no character is in its vocabulary
            return SpeechChunk(silence(), self._rate)
        speaker = int(request.voice or 0) if self._speakers > 1 else None
        self._model.speaking_rate = self._model.config.speaking_rate * request.speed
        torch.manual_seed(_SEED)
        with torch.inference_mode():
            wave: Samples = self._model(**inputs, speaker_id=speaker).waveform[0].float().numpy()
        return SpeechChunk(wave, self._rate)

    @property
    def _rate(self) -> int:
        return int(self._model.config.sampling_rate)


class Pocket:
    """A Pocket TTS model. Its voices are the files in its folder `voices`: latents of recordings."""

    def __init__(self, folder: Path) -> None:
        self._model = PocketTTSForConditionalGeneration.from_pretrained(folder, use_safetensors=True).eval()
        self._processor = PocketTTSProcessor.from_pretrained(folder)
        self._voices = {path.stem: path for path in sorted((folder / "voices").glob("*.safetensors"))}
        self.info = SpeechModelInfo(voices=tuple(self._voices), can_clone=True)

    def synthesize(self, request: SpeechRequestFrame) -> SpeechChunk:
        torch.manual_seed(_SEED)
        with torch.inference_mode():
            inputs = self._prompt(request)
            output = self._model.generate(**inputs, return_dict_in_generate=True)
            wave = self._processor.decode(output.audio_latents, output.audio_latents_mask)[0]
        return SpeechChunk(wave.float().numpy(), int(self._processor.feature_extractor.sampling_rate))

    def _prompt(self, request: SpeechRequestFrame) -> Any:
        text_part = {"type": "text", "text": request.words}
        voice_prompt: dict[str, Any] = {}
        if request.reference is not None:
            voice_prompt = {"audio": [request.reference], "sampling_rate": SAMPLE_RATE}
        elif request.voice or self._voices:
            voice_prompt = {"audio_prompt_latents": [self._latents(request.voice or next(iter(self._voices)))]}
        content = [{"type": "audio"}, text_part] if voice_prompt else [text_part]
        text = self._processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        return self._processor(text=text, return_tensors="pt", **voice_prompt)

    def _latents(self, voice: str) -> torch.Tensor:
        latents = next(iter(load_file(self._voices[voice]).values()))
        return latents.reshape(-1, latents.shape[-1]).float()


def load(name: str) -> SpeechModel:
    folder = _folder(name)
    model_type = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    match model_type:
        case "vits":
            return Vits(folder)
        case "pocket_tts":
            return Pocket(folder)
        case _:
            raise ValueError(f"its model type is {model_type!r}; supported: {', '.join(MODEL_TYPES)}")


def _folder(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, ignore_patterns=["*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack"]))


def serve(name: str, requests: BinaryIO, responses: BinaryIO) -> None:
    """Answers requests until the input ends."""
    try:
        model = load(name)
    except Exception as error:
        write_frame(responses, {"error": _sentence(error)})
        return
    write_frame(responses, {"info": asdict(model.info)})
    while (request := read_frame(requests)) is not None:
        value, reference = request
        try:
            chunk = model.synthesize(_parse_request(value, reference))
            samples = resample(np.clip(chunk.samples, -1.0, 1.0).astype(np.float32), chunk.rate, SAMPLE_RATE)
            write_frame(responses, {"id": value["id"]}, samples.tobytes())
        except Exception as error:
            write_frame(responses, {"id": value["id"], "error": _sentence(error)})


def _parse_request(value: dict[str, object], reference: bytes) -> SpeechRequestFrame:
    recording = np.frombuffer(reference, dtype=np.float32) if reference else None
    return SpeechRequestFrame(str(value["words"]), str(value["voice"]), float(str(value["speed"])), recording)


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"


def main() -> None:
    """Redirects the prints of libraries to stderr: stdout carries frames only."""
    responses = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin.buffer, responses)


if __name__ == "__main__":
    main()
