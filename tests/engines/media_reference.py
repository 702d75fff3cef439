"""What the transformers library says: its own processors and `generate`, for the models of `media_models`.

Video processors need torchvision, which Palaver does without: the processors are loaded without them.
"""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import soundfile
import torch
import transformers
from PIL import Image, ImageDraw

from palaver.engines.torch import image_functions
from palaver.engines.torch.loader import quiet
from tests.engines.media_models import FAMILIES, RATE, Family

MARGIN = 1e-4
"""How close two scores are where rounding may decide."""


def picture(seed: int, width: int = 44, height: int = 36) -> Image.Image:
    """Coloured blocks, others for each seed."""
    numbers = np.random.default_rng(seed)
    image = Image.new("RGB", (width, height), tuple(int(x) for x in numbers.integers(0, 256, 3)))
    draw = ImageDraw.Draw(image)
    for _ in range(6):
        left, top = int(numbers.integers(0, width - 8)), int(numbers.integers(0, height - 8))
        colour = tuple(int(x) for x in numbers.integers(0, 256, 3))
        draw.rectangle((left, top, left + int(numbers.integers(6, 24)), top + int(numbers.integers(6, 24))), colour)
    return image


def sound(seed: int, seconds: float = 0.7) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Two tones and some noise, others for each seed."""
    numbers = np.random.default_rng(seed)
    time = np.arange(int(seconds * RATE)) / RATE
    low, high = numbers.uniform(100, 900), numbers.uniform(1000, 4000)
    tones = 0.4 * np.sin(2 * np.pi * low * time) + 0.3 * np.sin(2 * np.pi * high * time * (1 + time))
    samples: np.ndarray[Any, np.dtype[np.float32]] = (tones + 0.05 * numbers.standard_normal(len(time))).astype("f4")
    return samples


@dataclass(frozen=True)
class Reply:
    """What the library says: the ids of its prompt, its tokens, and how sure each choice was."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    margins: tuple[float, ...]

    def agrees(self, ids: Sequence[int]) -> bool:
        """Whether these are the same tokens, up to the first at which rounding may have decided."""
        pairs = zip(ids, self.ids, strict=False)
        first = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        return len(ids) == len(self.ids) and (first is None or self.margins[first] < MARGIN)


@dataclass(frozen=True)
class Library:
    """A model of a family in transformers alone, with the library's processor."""

    family: str
    folder: Path

    @property
    def about(self) -> Family:
        return FAMILIES[self.family]

    @cached_property
    def tokenizer(self) -> Any:
        with quiet():
            return transformers.AutoTokenizer.from_pretrained(self.folder)

    @cached_property
    def model(self) -> Any:
        with quiet():
            found = transformers.AutoModelForMultimodalLM.from_pretrained(self.folder, dtype=torch.float32)
        return found.thinker.eval() if self.about.whole else found.eval()

    @cached_property
    def processor(self) -> Any:
        about = self.about
        base = _load(about.processor)

        class Processor(base):  # type: ignore[misc, valid-type]
            """Accepts a stand-in for what needs torchvision."""

            def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
                if isinstance(argument, SimpleNamespace):
                    return None
                return super().check_argument_for_proper_class(argument_name, argument)

        missing = SimpleNamespace(
            merge_size=2, temporal_patch_size=2, slice_mode=True, downsample_mode="16x", num_frames=None, fps=None
        )
        parts: dict[str, Any] = {"tokenizer": self.tokenizer}
        for name in Processor.get_attributes():
            if name == "image_processor":
                parts[name] = _load(about.image_processor)(**about.images) if about.images is not None else missing
            elif name == "video_processor":
                parts[name] = missing
            elif name != "tokenizer":
                assert about.sounds is not None
                parts[name] = _load(about.sound_processor)(**about.sounds)
        with quiet():
            if not self.about.tekken:
                parts |= {"chat_template": about.template}
            return Processor(**parts, **about.options)

    def inputs(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """What the processor makes of a conversation with parts of type text, image and audio."""
        if self.about.tekken:
            return self._mistral_inputs(messages)
        text = self.processor.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        found: dict[str, list[Any]] = {"image": [], "audio": []}
        for message in messages:
            for part in message["content"] if isinstance(message["content"], list) else ():
                if part["type"] != "text":
                    found[part["type"]].append(part[part["type"]])
        given = {name: found[kind] for kind, name in (("image", "images"), ("audio", "audio")) if found[kind]}
        return self.processor(text=[text], return_tensors="pt", **given, **options)

    def _mistral_inputs(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """By mistral-common, as the library's tokenizer for Voxtral does it (that one wants a later version)."""
        from mistral_common.protocol.instruct.request import ChatCompletionRequest
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

        tokenizer = MistralTokenizer.from_file(str(self.folder / "tekken.json"))
        request = ChatCompletionRequest.from_openai(messages=_for_mistral(messages))
        encoded = tokenizer.encode_chat_completion(request)
        options = dict(_load("voxtral.processing_voxtral.VoxtralProcessorKwargs")._defaults["audio_kwargs"])
        frames = options.pop("max_source_positions")
        sounds = [found.audio_array for found in encoded.audios]
        features = self.processor._retrieve_input_features(sounds, frames, return_tensors="pt", **options)
        ids = torch.tensor([encoded.tokens])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "input_features": features}

    @torch.inference_mode()
    def generate(self, messages: Sequence[Mapping[str, Any]], count: int, **options: Any) -> Reply:
        """Greedily, with these options of the processor. Control tokens are never chosen."""
        inputs = self.inputs(messages, **options)
        prompt_ids = inputs["input_ids"][0].tolist()
        out = self.model.generate(
            **inputs,
            max_new_tokens=count,
            do_sample=False,
            suppress_tokens=list(self.control_ids),
            eos_token_id=None,
            return_dict_in_generate=True,
            output_scores=True,
        )
        best = [scores[0].topk(2).values.tolist() for scores in out.scores]
        ids = out.sequences[0, len(prompt_ids) :].tolist()
        return Reply(tuple(prompt_ids), tuple(ids), tuple(first - second for first, second in best))

    @cached_property
    def control_ids(self) -> tuple[int, ...]:
        return tuple(self.tokenizer.added_tokens_decoder)


def _load(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    if module.split(".")[0] in ("lfm2_vl", "phi4_multimodal") and "image_processing" in module:
        return getattr(image_functions.import_module(f"transformers.models.{module}"), name)
    if module == "pixtral.processing_pixtral":  # imports a function from beside the processor that needs torchvision
        plain = import_module("transformers.models.pixtral.image_processing_pil_pixtral")
        sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", plain)
    return getattr(import_module(f"transformers.models.{module}"), name)


def _for_mistral(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The sounds as WAV files in base64, which is how mistral-common takes them."""
    out = []
    for message in messages:
        parts: list[dict[str, Any]] = []
        for part in message["content"]:
            if part["type"] == "audio":
                file = io.BytesIO()
                soundfile.write(file, part["audio"], RATE, format="WAV", subtype="FLOAT")
                data = base64.b64encode(file.getvalue()).decode()
                parts.append({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
            else:
                parts.append(part)
        out.append({"role": message["role"], "content": parts})
    return out
