"""Pictures and sounds for vLLM: its own processor of the model, with one item at a time, and its multi-modal inputs.

vLLM knows an item by the hash of its content: its prefix cache and its cache of encoded items go by that."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from palaver.engines.core.media import MediaCache
from palaver.engines.core.media_processor import (
    added_token_ids,
    check_sound_length,
    describe_expansion,
    find_numbers,
    find_options,
    find_placeholders,
    option_values,
    processing_failed,
)
from palaver.engines.core.token_stream import TokenRequest
from palaver.errors import UnsupportedContent
from palaver.generation import MediaContent, MediaExpansion, MediaItem

ARGUMENTS = {"image": "images", "audio": "audio"}
"""The names of a processor's parameters in the transformers library."""
PROBE_PIXELS = (56, 84, 3)
PROBE_SECONDS = 0.6


@dataclass(frozen=True, slots=True, eq=False)
class VllmMedia:
    """An item as vLLM's processor made it."""

    expansion: MediaExpansion
    modality: str
    """vLLM's name of the kind."""
    inputs: Any
    """What the model's encoder takes: vLLM's `MultiModalKwargsItem`."""
    place: Any
    """Which tokens of the expansion's core stand for it: vLLM's `PlaceholderRange`."""

    @property
    def nbytes(self) -> int:
        tensors = (getattr(field, "data", None) for field in self.inputs.values())
        return sum(int(getattr(tensor, "nbytes", 0)) for tensor in tensors)


class VllmMediaProcessor:
    """Processes items. Thread-safe. Raises UnsupportedContent for a model whose media vLLM treats differently."""

    def __init__(self, processor: Any) -> None:
        """`processor`: vLLM's multi-modal processor of the model."""
        self._processor = processor
        self._lock = threading.Lock()
        self._library: Any = processor.info.get_hf_processor()
        self._added_ids = added_token_ids(self._library.tokenizer)
        taken = [kind for kind, limit in processor.info.get_supported_mm_limits().items() if limit != 0]
        known = find_placeholders(self._library)
        self.placeholders = {kind: text for kind, text in known.items() if kind in taken}
        if not self.placeholders:
            raise UnsupportedContent("its processor names no token for them")
        self.numbers: dict[str, str] = {}
        if find_numbers(self._library):
            raise UnsupportedContent("vLLM numbers them itself")
        self.options = find_options(self._library)
        sounds = getattr(self._library, "feature_extractor", getattr(self._library, "audio_processor", None))
        hears = "audio" in self.placeholders
        self.sample_rate = int(getattr(sounds, "sampling_rate", 16_000)) if hears else 0
        self.max_sound_samples = int(getattr(sounds, "n_samples", 0)) if hears else 0
        for kind in list(self.placeholders):
            self._probe(kind)

    def process(self, item: MediaItem, content: MediaContent) -> VllmMedia:
        from vllm.multimodal.processing import ProcessorInputs, TimingContext

        if item.kind == "audio":
            check_sound_length(content, self.max_sound_samples)
        media: Any = _media(item.kind, content)
        data = {item.kind: [media if item.kind == "image" else (media, content.rate)]}
        ids = self._library.tokenizer.encode(item.placeholder, add_special_tokens=False)
        try:
            with self._lock:
                items = self._processor.info.parse_mm_data(data)
                options = option_values(item)
                inputs = ProcessorInputs(ids, items, hf_processor_mm_kwargs=options)
                found = self._processor.apply(inputs, TimingContext(enabled=False))
            ((modality, (kwargs,)),) = found["mm_kwargs"].items()
            (place,) = found["mm_placeholders"][modality]
        except Exception as error:
            raise processing_failed(item.kind, error) from error
        expansion = describe_expansion(found["prompt_token_ids"], self._added_ids)
        return VllmMedia(expansion, modality, kwargs, _moved(place, -expansion.lead))

    def _probe(self, kind: str) -> None:
        """A prompt must have the tokens that the model's own processor writes, as with every other engine."""
        drawn = np.random.default_rng(0)
        if kind == "image":
            pixels = drawn.integers(0, 256, PROBE_PIXELS, dtype=np.uint8)
            content = MediaContent(pixels.tobytes(), pixels.shape, pixels.dtype.name)
            options: dict[str, Any] = {}
        else:
            samples = drawn.normal(0, 0.1, int(PROBE_SECONDS * self.sample_rate)).astype(np.float32)
            content = MediaContent(samples.tobytes(), samples.shape, samples.dtype.name, self.sample_rate)
            options = {"sampling_rate": self.sample_rate}
        placeholder = self.placeholders[kind]
        given = {ARGUMENTS[kind]: [_media(kind, content)]}
        own = self.process(MediaItem("image" if kind == "image" else "audio", "probe", placeholder), content)
        written = self._library(text=[placeholder], add_special_tokens=False, return_tensors="pt", **given, **options)
        if tuple(written["input_ids"][0].tolist()) != own.expansion.token_ids:
            raise UnsupportedContent("vLLM writes other tokens for them than the model's own processor")


def _media(kind: str, content: MediaContent) -> Any:
    array = np.frombuffer(content.data, dtype=content.dtype).reshape(content.shape)
    return Image.fromarray(array) if kind == "image" else array


def _moved(place: Any, by: int) -> Any:
    from vllm.multimodal.inputs import PlaceholderRange

    return PlaceholderRange(offset=place.offset + by, length=place.length, is_embed=place.is_embed)


def open_media(renderer: Any) -> MediaCache | str:
    """The media that vLLM takes for a model that sees or hears; or why it takes none, in one sentence."""
    if renderer.mm_processor is None:
        return "vLLM runs this model with text only"
    try:
        return MediaCache(VllmMediaProcessor(renderer.mm_processor))
    except UnsupportedContent as error:
        return str(error).rstrip(".")
    except Exception as error:
        why = next((line for line in str(error).splitlines() if line.strip()), "")
        return f"vLLM's processor failed ({type(error).__name__}: {why[:200].rstrip('.')})"


def engine_input(request: TokenRequest) -> Any:
    """vLLM's input for a prompt with media."""
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems

    kwargs: dict[str, list[Any]] = {}
    hashes: dict[str, list[str]] = {}
    places: dict[str, list[Any]] = {}
    for span in request.prompt.media:
        found = request.media[span.item.key]
        assert isinstance(found, VllmMedia)
        expansion = found.expansion
        if span.length != len(expansion.token_ids) - expansion.lead - expansion.tail:
            raise UnsupportedContent("The prompt has another number of tokens for an item than its processor.")
        kwargs.setdefault(found.modality, []).append(found.inputs)
        hashes.setdefault(found.modality, []).append(span.item.key)
        places.setdefault(found.modality, []).append(_moved(found.place, span.start))
    return mm_input(request.token_ids, MultiModalKwargsItems(kwargs), hashes, places, cache_salt=request.salt)
