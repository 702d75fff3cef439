"""The child process of `transcription.Transcriber`: `python -m palaver.voice.transcription_child MODEL` runs a speech
recognition model of the transformers library: Whisper, Moonshine or Parakeet.

Each request is one window of sound. So torch stays out of the server's process, and a model that crashes does not take
the server down."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AutoProcessor, AutoTokenizer
from transformers.models.whisper.tokenization_whisper import LANGUAGES, _combine_tokens_into_words
from transformers.utils import is_librosa_available

from palaver.voice.base import Samples
from palaver.voice.model_process import Frame, Handler, serve_requests
from palaver.voice.transcription import Segment, TranscriberInfo, TranscriptionOptions, Window, Word

MODEL_TYPES = ("whisper", "moonshine", "parakeet_ctc", "parakeet_rnnt", "parakeet_tdt")
_MIN_SECONDS = 0.2
"""A shorter window is filled up with silence: models fail on a few samples."""
_MAX_PROMPT = 0.5
"""The share of the decoder's positions that a prompt may take, its end counting most."""
_SEED = 0


class RecognitionModel(Protocol):
    @property
    def info(self) -> TranscriberInfo: ...

    def transcribe(self, samples: Samples, options: TranscriptionOptions) -> Window:
        """Deterministic, independent of earlier windows."""
        ...


class Whisper:
    def __init__(self, folder: Path) -> None:
        from transformers import WhisperForConditionalGeneration, WhisperProcessor

        self._model = _on_device(WhisperForConditionalGeneration.from_pretrained(folder, **_loading()))
        self._processor = WhisperProcessor.from_pretrained(folder)
        config = self._model.generation_config
        self._multilingual = bool(getattr(config, "is_multilingual", False))
        languages = {id: mark.strip("<|>") for mark, id in sorted((getattr(config, "lang_to_id", None) or {}).items())}
        self._languages = languages if self._multilingual else {}
        features = self._processor.feature_extractor
        self.info = TranscriberInfo(
            features.sampling_rate,
            float(features.chunk_length),
            tuple(self._languages.values()) if self._multilingual else ("en",),
            can_translate=self._multilingual,
            takes_prompt=True,
            samples=True,
            times_words=bool(getattr(config, "alignment_heads", None)),
        )

    def transcribe(self, samples: Samples, options: TranscriptionOptions) -> Window:
        inputs = self._processor.feature_extractor(
            samples, sampling_rate=self.info.sample_rate, return_tensors="pt", return_attention_mask=True
        ).to(self._model.device, self._model.dtype)
        language = options.language or self._detect_language(inputs["input_features"])
        arguments: dict[str, Any] = _sampling(options.temperature)
        if self._multilingual:
            arguments |= {"language": language, "task": "translate" if options.translate else "transcribe"}
        if options.prompt:
            arguments["prompt_ids"] = self._prompt_ids(options.prompt)
        if not options.timestamps:
            token_ids = self._model.generate(**inputs, **arguments)[0].tolist()
            return Window(
                (Segment(0.0, len(samples) / self.info.sample_rate, self._text(token_ids), token_ids),), language
            )
        arguments |= {"return_timestamps": True, "return_segments": True}
        if options.words:
            with _eager_attention(self._model):  # others don't return what times follow from
                found = self._model.generate(**inputs, **arguments, return_token_timestamps=True)
        else:
            found = self._model.generate(**inputs, **arguments)
        segments = (self._segment(one, language, options.words) for one in found["segments"][0])
        return Window(tuple(one for one in segments if one.text.strip()), language)

    def _segment(self, value: dict[str, Any], language: str, with_words: bool) -> Segment:
        token_ids, start, end = value["tokens"].tolist(), float(value["start"]), float(value["end"])
        words = tuple(self._words(token_ids, value["token_timestamps"].tolist(), end, language)) if with_words else ()
        return Segment(start, end, self._text(token_ids), token_ids, words)

    def _words(self, token_ids: list[int], times: list[float], end: float, language: str) -> Iterator[Word]:
        """As the library's pipeline: a token lasts until the next one begins."""
        first_mark = min(self._processor.tokenizer.all_special_ids)  # times and other marks follow the text's tokens
        ends = [*times[1:], max(end, *times)] if times else []
        text = [place for place, token_id in enumerate(token_ids) if token_id < first_mark]
        words, _, groups = _combine_tokens_into_words(
            self._processor.tokenizer, [token_ids[place] for place in text], LANGUAGES.get(language, language)
        )
        for word, group in zip(words, groups, strict=True):
            yield Word(round(times[text[group[0]]], 2), round(ends[text[group[-1]]], 2), word)

    def _text(self, token_ids: list[int]) -> str:
        return str(self._processor.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _detect_language(self, features: torch.Tensor) -> str:
        return self._languages[int(self._model.detect_language(features)[0])] if self._multilingual else "en"

    def _prompt_ids(self, prompt: str) -> torch.Tensor:
        start, *words = self._processor.get_prompt_ids(prompt).tolist()
        limit = int(self._model.config.max_target_positions * _MAX_PROMPT) - 1
        return torch.tensor([start, *words[-limit:]], device=self._model.device)


class Moonshine:
    def __init__(self, folder: Path) -> None:
        from transformers import MoonshineForConditionalGeneration

        self._model = _on_device(MoonshineForConditionalGeneration.from_pretrained(folder, **_loading()))
        self._processor = AutoProcessor.from_pretrained(folder)
        self.info = TranscriberInfo(self._processor.feature_extractor.sampling_rate, samples=True)

    def transcribe(self, samples: Samples, options: TranscriptionOptions) -> Window:
        inputs = self._processor(samples, sampling_rate=self.info.sample_rate, return_tensors="pt")
        inputs = inputs.to(self._model.device, self._model.dtype)
        token_ids = self._model.generate(**inputs, **_sampling(options.temperature))[0].tolist()
        return _window(self._processor.decode(token_ids, skip_special_tokens=True), token_ids, samples, self.info)


class Parakeet:
    def __init__(self, folder: Path, model_type: str) -> None:
        from transformers import ParakeetForCTC, ParakeetForRNNT, ParakeetForTDT, ParakeetProcessor

        kinds = {"parakeet_ctc": ParakeetForCTC, "parakeet_rnnt": ParakeetForRNNT, "parakeet_tdt": ParakeetForTDT}
        self._model = _on_device(kinds[model_type].from_pretrained(folder, **_loading()))
        decoder_type = model_type.removeprefix("parakeet_")
        features, tokenizer = load_parakeet_features(folder), AutoTokenizer.from_pretrained(folder)
        self._processor = ParakeetProcessor(features, tokenizer, decoder_type=decoder_type)
        self.info = TranscriberInfo(features.sampling_rate)

    def transcribe(self, samples: Samples, options: TranscriptionOptions) -> Window:
        inputs = self._processor(samples, sampling_rate=self.info.sample_rate)
        inputs = inputs.to(self._model.device, self._model.dtype)
        output = self._model.generate(**inputs, return_dict_in_generate=True)
        token_ids = output.sequences[0].tolist()
        return _window(self._processor.decode(token_ids, skip_special_tokens=True), token_ids, samples, self.info)


@contextmanager
def _eager_attention(model: Any) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def load_parakeet_features(folder: Path) -> Any:
    """The feature extractor. It takes one function from librosa, which transformers has under another name."""
    library: Any = importlib.import_module("transformers.models.parakeet.feature_extraction_parakeet")
    if not is_librosa_available():
        library.librosa = SimpleNamespace(filters=SimpleNamespace(mel=_mel_filters))
    return library.ParakeetFeatureExtractor.from_pretrained(folder)


def _mel_filters(*, sr: int, n_fft: int, n_mels: int, fmin: float, fmax: float, norm: str) -> Any:
    from transformers.audio_utils import mel_filter_bank

    filters = mel_filter_bank(n_fft // 2 + 1, n_mels, fmin, fmax, sr, norm=norm, mel_scale="slaney")
    return np.ascontiguousarray(filters.T, dtype=np.float32)


def _window(text: str, token_ids: list[int], samples: Samples, info: TranscriberInfo) -> Window:
    """One segment. Its text begins with a space, so that windows can be joined."""
    return Window((Segment(0.0, len(samples) / info.sample_rate, f" {text.strip()}", tuple(token_ids)),))


def _loading() -> dict[str, Any]:
    return {"use_safetensors": True, "dtype": "auto" if torch.cuda.is_available() else torch.float32}


def _on_device(model: Any) -> Any:
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _sampling(temperature: float) -> dict[str, Any]:
    return {"do_sample": True, "temperature": temperature} if temperature else {}


def load(folder: Path) -> tuple[dict[str, Any], Handler]:
    model_type = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    model: RecognitionModel
    match model_type:
        case "whisper":
            model = Whisper(folder)
        case "moonshine":
            model = Moonshine(folder)
        case "parakeet_ctc" | "parakeet_rnnt" | "parakeet_tdt":
            model = Parakeet(folder, model_type)
        case _:
            raise ValueError(f"its model type is {model_type!r}; supported: {', '.join(MODEL_TYPES)}")

    def transcribe(value: dict[str, Any], data: bytes) -> Frame:
        samples = np.frombuffer(data, dtype=np.float32)
        missing = max(0, int(_MIN_SECONDS * model.info.sample_rate) - len(samples))
        samples = np.pad(samples, (0, missing))
        torch.manual_seed(_SEED)
        options = TranscriptionOptions(**{name: value[name] for name in TranscriptionOptions.__slots__})
        with torch.inference_mode():
            return asdict(model.transcribe(samples, options)), b""

    return asdict(model.info), transcribe


if __name__ == "__main__":
    serve_requests(load)
