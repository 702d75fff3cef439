"""The child process of `ModelSpeaker`: `python -m palaver.voice.speech_child MODEL` runs a text-to-speech model.

It reads requests from stdin and writes audio to stdout. So torch stays out of the server's process, and a model that
crashes does not take the server down."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    PocketTTSForConditionalGeneration,
    PocketTTSProcessor,
    VitsModel,
    VitsTokenizer,
)

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
from palaver.voice.model_process import Frame, Handler, serve_requests

MODEL_TYPES = ("vits", "pocket_tts", "qwen2_5_omni", "qwen3_omni_moe")
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


class QwenOmni:
    """The talker of a Qwen2.5-Omni model, which speaks what the model writes: the model is made to write the words. Its
    voices are the speakers of its file `spk_dict.pt`."""

    _SYSTEM = (
        "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and "
        "visual inputs, as well as generating text and speech."
    )
    """The prompt with which the model was trained to speak."""
    _RATE = 24_000
    _CODES_PER_TOKEN, _MORE_CODES = 40, 100
    """The most codes that the talker may generate: it has 50 for a second, in which about three tokens are spoken."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = self._load(folder)
        self._model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self.info = SpeechModelInfo(voices=tuple(sorted(self._speakers())))

    def _load(self, folder: Path) -> Any:
        from transformers import Qwen2_5OmniForConditionalGeneration

        return Qwen2_5OmniForConditionalGeneration.from_pretrained(folder, use_safetensors=True, dtype="auto")

    def _speakers(self) -> Iterable[str]:
        speakers: Iterable[str] = self._model.speaker_map
        return speakers

    def _ends(self) -> dict[str, Any]:
        """The settings that end the speech."""
        codec = self._model.config.talker_config
        return {"talker_eos_token_id": [codec.tts_codec_pad_token_id, codec.tts_codec_end_token_id]}

    def synthesize(self, request: SpeechRequestFrame) -> SpeechChunk:
        prompt = [{"role": "user", "content": f"Read this aloud: {request.words}"}]
        if self._SYSTEM:
            prompt.insert(0, {"role": "system", "content": self._SYSTEM})
        text = self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        prompt_ids = self._tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids.to(
            self._model.device
        )
        reply_ids = [*self._tokenizer(request.words, add_special_tokens=False).input_ids, self._tokenizer.eos_token_id]
        torch.manual_seed(_SEED)
        with torch.inference_mode():
            _, wave = self._model.generate(
                input_ids=prompt_ids,
                attention_mask=torch.ones_like(prompt_ids),
                speaker=request.voice or self.info.voices[0],
                thinker_do_sample=False,
                thinker_max_new_tokens=len(reply_ids),
                thinker_logits_processor=LogitsProcessorList([ForcedReply(prompt_ids.shape[1], reply_ids)]),
                talker_max_new_tokens=self._CODES_PER_TOKEN * len(reply_ids) + self._MORE_CODES,
                **self._ends(),
            )
        return SpeechChunk(wave.float().cpu().reshape(-1).numpy(), self._RATE)


class Qwen3Omni(QwenOmni):
    """The talker of a Qwen3-Omni model. Its voices are the speakers of its configuration."""

    _SYSTEM = ""
    _CODES_PER_TOKEN, _MORE_CODES = 12, 50
    """Its talker has 12.5 codes for a second."""

    def _load(self, folder: Path) -> Any:
        from transformers import Qwen3OmniMoeForConditionalGeneration

        return Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, use_safetensors=True, dtype="auto")

    def _speakers(self) -> Iterable[str]:
        if not self._model.has_talker:
            raise ValueError("it was saved without its talker")
        return self._model.config.talker_config.speaker_id or ()

    def _ends(self) -> dict[str, Any]:
        return {"thinker_eos_token_id": self._tokenizer.eos_token_id}


class ForcedReply(LogitsProcessor):
    """Makes a model write these tokens."""

    def __init__(self, start: int, token_ids: Sequence[int]) -> None:
        self._start = start
        self._token_ids = token_ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._token_ids[input_ids.shape[1] - self._start]] = 0.0
        return forced


def load(folder: Path) -> tuple[dict[str, Any], Handler]:
    model_type = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    model: SpeechModel
    match model_type:
        case "vits":
            model = Vits(folder)
        case "pocket_tts":
            model = Pocket(folder)
        case "qwen2_5_omni":
            model = QwenOmni(folder)
        case "qwen3_omni_moe":
            model = Qwen3Omni(folder)
        case _:
            raise ValueError(f"its model type is {model_type!r}; supported: {', '.join(MODEL_TYPES)}")

    def synthesize(value: dict[str, Any], reference: bytes) -> Frame:
        chunk = model.synthesize(_parse_request(value, reference))
        samples = resample(np.clip(chunk.samples, -1.0, 1.0).astype(np.float32), chunk.rate, SAMPLE_RATE)
        return {}, samples.tobytes()

    return asdict(model.info), synthesize


def _parse_request(value: dict[str, Any], reference: bytes) -> SpeechRequestFrame:
    recording = np.frombuffer(reference, dtype=np.float32) if reference else None
    return SpeechRequestFrame(str(value["words"]), str(value["voice"]), float(value["speed"]), recording)


if __name__ == "__main__":
    serve_requests(load)
