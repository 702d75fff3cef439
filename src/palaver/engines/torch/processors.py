"""Loads transformers' processors without torchvision, and makes them all callable with one item alone.

- Video processors always need torchvision. A video reaches a model as pictures, so they are left out.
- Two image processors need it too (LFM2-VL, Phi-4 multimodal), and Pixtral's processor imports it: `image_functions`
  stands in for it.
- Voxtral's processor takes sound only in whole conversations: `SoundProcessor` takes one alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoImageProcessor, BatchFeature, ProcessorMixin
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import (
    PROCESSOR_MAPPING,
    PROCESSOR_MAPPING_NAMES,
    processor_class_from_name,
)
from transformers.models.voxtral.processing_voxtral import VoxtralProcessor, VoxtralProcessorKwargs

from palaver.engines.core.checkpoint import PROCESSOR_FILES
from palaver.engines.torch import image_functions
from palaver.engines.torch.loader import quiet
from palaver.errors import BrokenModel

FRAMES_PER_TOKEN = 8
"""Voxtral's sound: 100 frames and 12.5 tokens per second."""


class FrameSettings:
    """Stands for a video processor: other parts of a processor read its settings, which are those for pictures."""

    def __init__(self, images: Any) -> None:
        self._images = images

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._images, name)


def load_processor(folder: Path) -> Any | None:
    """The model's processor; None if transformers has none for it. Raises BrokenModel."""
    try:
        with quiet():
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            kind = _processor_class(folder, config)
            if kind is None:
                return None
            _register_image_processor(config)
            return _without_video(kind).from_pretrained(folder, local_files_only=True)
    except Exception as error:
        why = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
        raise BrokenModel(f"The processor of {folder.name!r} couldn't be loaded: {why}") from error


def _processor_class(folder: Path, config: Any) -> Any | None:
    """The class that the files name, else the one of the model's configuration."""
    found: Any = None
    for name in (*PROCESSOR_FILES, "tokenizer_config.json"):
        path = folder / name
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        found = found or processor_class_from_name(settings.get("processor_class") or "")
    if found is None and type(config) in PROCESSOR_MAPPING:
        found = PROCESSOR_MAPPING[type(config)]
    if getattr(found, "is_dummy", False):
        name = found.__name__
        types = (model_type for model_type, known in PROCESSOR_MAPPING_NAMES.items() if known == name)
        found = _import_class(types, "processing", name)
    return SoundProcessor if found is VoxtralProcessor else found


def _register_image_processor(config: Any) -> None:
    """Makes an image processor known to the library that it hides without torchvision."""
    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(config.model_type, {})
    if names.get("torchvision") is not None and names.get("pil") is None:
        found = _import_class([config.model_type], "image_processing", names["torchvision"])
        classes = {"pil": found, "torchvision": found}
        AutoImageProcessor.register(type(config), image_processor_classes=classes, exist_ok=True)


def _import_class(model_types: Iterable[str], prefix: str, name: str) -> Any:
    for model_type in model_types:
        package = model_type_to_module_name(model_type)
        module = f"transformers.models.{package}.{prefix}_{package}"
        if find_spec(module) is not None:
            return getattr(image_functions.import_module(module), name)
    raise ImportError(f"transformers has no module for {name}")


def _without_video(kind: type[ProcessorMixin]) -> Any:
    """The class, loaded without its video processor."""
    attributes = kind.get_attributes()
    if "video_processor" not in attributes:
        return kind
    place = attributes.index("video_processor")
    base: Any = kind

    class WithoutVideo(base):
        _loading = False

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in attributes if not (cls._loading and name == "video_processor")]

        @classmethod
        def _get_arguments_from_pretrained(cls, *args: Any, **kwargs: Any) -> list[Any]:
            cls._loading = True
            try:
                parts: list[Any] = super()._get_arguments_from_pretrained(*args, **kwargs)
            finally:
                cls._loading = False
            images = next((part for part in parts if hasattr(part, "image_processor_type")), None)
            images = parts[attributes.index("image_processor")] if images is None else images
            return [*parts[:place], FrameSettings(images), *parts[place:]]

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            if isinstance(argument, FrameSettings):
                return FrameSettings
            return super().check_argument_for_proper_class(name, argument)

        def __repr__(self) -> str:  # the library's own encodes all parts as JSON, for its log
            return kind.__name__

    WithoutVideo.__name__ = kind.__name__
    return WithoutVideo


class SoundProcessor(VoxtralProcessor):
    """Voxtral's processor, called with the text that stands for a sound."""

    def __call__(self, text: Any, audio: Sequence[Any] | None = None, **options: Any) -> BatchFeature:
        if audio is None:
            return super().__call__(text, **options)
        add_special_tokens = options.pop("add_special_tokens", True)
        settings = self._merge_kwargs(VoxtralProcessorKwargs, **options)["audio_kwargs"]
        frames = settings.pop("max_source_positions")
        for name in ("return_dict", "tokenize"):  # of the whole conversation
            settings.pop(name, None)
        features = self._retrieve_input_features(audio, frames, **settings)
        tokens = features.shape[0] * frames // FRAMES_PER_TOKEN
        expanded = [one.replace(self.audio_token, self.audio_token * tokens) for one in text]
        found = self.tokenizer(expanded, add_special_tokens=add_special_tokens, return_tensors="pt")
        return BatchFeature({**found, "input_features": features})
