"""Pictures and sounds for MLX models: mlx-vlm's processors, encoders and decoders, under Palaver's own runner.

No family is known by name. mlx-vlm computes the inputs of its decoder for one item alone; what they hold at the item's
tokens stands for it in every prompt: embeddings, rotary positions counted from its start, and what is added to later
layers (Qwen3-VL). A probe (`runner.py`) compares the result with mlx-vlm's own pass over a whole prompt.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from cachetools import LRUCache
from mlx_vlm.models import cache as caches
from mlx_vlm.utils import process_inputs
from numpy.typing import NDArray
from PIL import Image

from palaver.engines.core.media import MAX_EXPANSIONS, MediaCache, find_media
from palaver.engines.core.media_processor import (
    added_token_ids,
    check_sound_length,
    describe_expansion,
    processing_failed,
)
from palaver.engines.core.request import SequenceState
from palaver.errors import EngineError, UnsupportedContent
from palaver.generation import MediaContent, MediaExpansion, MediaItem, MediaSpan

Positions = NDArray[np.int32]
DIMENSIONS = 3
"""Of rotary positions, where they have several."""
_USED = frozenset(
    "inputs_embeds position_ids rope_deltas visual_pos_masks deepstack_visual_embeds per_layer_inputs "
    "attention_mask_4d".split()
)
"""What mlx-vlm computes for a prompt and is understood here. It passes on `attention_mask_4d` without using it."""

_PER_TOKEN = ("per_layer_inputs", "deepstack_visual_embeds")
"""Inputs of layers that have a row for each token, also of text: [rows, tokens, ...]. In some models the second is a
list instead, with rows for visual tokens only."""

PROBE_SIZE = 56
PROBE_SECONDS = 0.5
PROBE_TEXT = (3, 1, 2)
"""Tokens before and after the item of the probe."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaLayout:
    """The rotary positions of an item's tokens."""

    positions: Positions | None
    """In several dimensions, counted from the item's start: [dimensions, tokens]. None: one each."""
    advance: int
    """How far the position after the item is from its start."""


@dataclass(frozen=True, slots=True, eq=False)
class MlxEncodedMedia:
    """What the decoder is called with at the tokens of an item. All arrays are evaluated."""

    embeddings: mx.array
    """[tokens, size]."""
    layout: MediaLayout
    is_visual: NDArray[np.bool_]
    """Which tokens `added` has rows for."""
    added: tuple[mx.array, ...] = ()
    """What is added to the outputs of the first layers: [visual tokens, size] each."""
    per_token: Mapping[str, mx.array] = field(default_factory=dict)
    """More inputs of layers, by name: [tokens, ...]."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.embeddings, *self.added, *self.per_token.values()))


@dataclass(slots=True, eq=False)
class MlxMedia:
    """An item, processed and, once it was needed, encoded."""

    expansion: MediaExpansion
    inputs: dict[str, Any]
    """Arrays of numpy that the encoder takes; empty once it is encoded."""
    encoded: MlxEncodedMedia | None = None

    @property
    def nbytes(self) -> int:
        inputs = sum(value.nbytes for value in self.inputs.values() if isinstance(value, np.ndarray))
        return inputs + (0 if self.encoded is None else self.encoded.nbytes)


@dataclass(frozen=True, slots=True)
class MlxSequenceMedia:
    """The media of one running sequence."""

    spans: tuple[MediaSpan, ...]
    encoded: Mapping[str, MlxEncodedMedia]
    """By key. Items that were computed before may be missing."""
    layouts: Mapping[str, MediaLayout]

    def rows(self, start: int, stop: int) -> Iterator[tuple[int, MlxEncodedMedia, slice]]:
        """The items among these tokens: the first of their tokens, counted from `start`, and which they are."""
        for span in self.spans:
            first, last = max(start, span.start), min(stop, span.stop)
            if first < last:
                if span.item.key not in self.encoded:
                    raise EngineError("The media of this conversation have to be encoded again: send it once more.")
                yield first - start, self.encoded[span.item.key], slice(first - span.start, last - span.start)

    def positions(self, start: int, stop: int) -> Positions:
        """The rotary positions of these tokens: [dimensions, tokens]."""
        found = np.tile(np.arange(start, stop, dtype=np.int32), (DIMENSIONS, 1))
        shift = 0
        for span in self.spans:
            layout = self.layouts[span.item.key]
            first, last = max(start, span.start), min(stop, span.stop)
            if first < last and layout.positions is not None:
                part = layout.positions[:, first - span.start : last - span.start]
                found[:, first - start : last - start] = part + (span.start + shift)
            elif first < last:
                found[:, first - start : last - start] += shift
            after = layout.advance - span.length
            shift += after
            if span.stop < stop:
                found[:, max(0, span.stop - start) :] += after
        return found


class VisionDecoder:
    """The decoder of an mlx-vlm model: tokens and media in, logits out. For the engine's thread."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._decoder = module.language_model
        self._has_positions = hasattr(self._decoder, "get_rope_index")

    def new_cache(self) -> list[Any]:
        return list(caches.make_prompt_cache(self._decoder))

    def __call__(
        self, ids: mx.array, layers: list[Any], places: Sequence[tuple[int, MlxSequenceMedia | None]]
    ) -> mx.array:
        """The logits of each token: [rows, tokens, vocabulary]. `places`: as in `MLXModel`."""
        count = ids.shape[1]
        items = [
            (row, *found)
            for row, (start, media) in enumerate(places)
            if media is not None
            for found in media.rows(start, start + count)
        ]
        arguments = self._with_media(ids, items) if items else {}
        if self._has_positions:  # otherwise mlx-vlm takes those of the prompt that it saw last
            arguments["position_ids"] = mx.array(np.stack([_positions(*place, count) for place in places], axis=1))
        return self._decoder(ids, cache=layers, **arguments).logits

    def _with_media(self, ids: mx.array, media: Sequence[tuple[int, int, MlxEncodedMedia, slice]]) -> dict[str, Any]:
        """The decoder's arguments with these items: row, first token in the row, and which of the item's tokens."""
        text = self._module.get_input_embeddings(ids).to_dict()
        arguments = {name: text[name] for name in ("inputs_embeds", *_PER_TOKEN) if isinstance(text[name], mx.array)}
        visual = np.zeros(ids.shape, bool)
        added: list[list[mx.array]] = []
        for row, first, encoded, part in media:
            last = first + part.stop - part.start
            arguments["inputs_embeds"][row, first:last] = encoded.embeddings[part]
            for name, values in encoded.per_token.items():
                arguments[name][row, first:last] = values[part]
            if encoded.added:
                visual[row, first:last] = encoded.is_visual[part]
                before = int(encoded.is_visual[: part.start].sum())
                rows = slice(before, before + int(encoded.is_visual[part].sum()))
                added.append([layer[rows] for layer in encoded.added])
        if visual.any():
            arguments["visual_pos_masks"] = mx.array(visual)
            arguments["deepstack_visual_embeds"] = [mx.concatenate(list(layer)) for layer in zip(*added, strict=True)]
        return arguments

    def encode(self, media: MlxMedia) -> MlxEncodedMedia:
        """Computes what stands for the item, unless it is there."""
        if media.encoded is None:
            ids = media.expansion.token_ids
            features = self.features(ids, media.inputs)
            core = slice(media.expansion.lead, len(ids) - media.expansion.tail)
            media.encoded = self._encoded(features, core)
            media.inputs = {}
        return media.encoded

    def features(self, ids: Sequence[int], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """What mlx-vlm computes from a prompt and the inputs for its media, for the decoder."""
        tokens = mx.array([list(ids)])
        given = {name: mx.array(value) if isinstance(value, np.ndarray) else value for name, value in inputs.items()}
        pixels = given.pop("pixel_values", None)
        found = self._module.get_input_embeddings(tokens, pixels, mask=mx.ones_like(tokens), **given).to_dict()
        features = {name: value for name, value in found.items() if value is not None}
        unknown = sorted(set(features) - _USED)
        if unknown:
            raise UnsupportedContent(f"This model's media need {unknown[0]!r}, which is not supported for MLX.")
        return features

    def _encoded(self, features: Mapping[str, Any], core: slice) -> MlxEncodedMedia:
        embeddings = features["inputs_embeds"][0, core]
        layout = MediaLayout(None, core.stop - core.start)
        if self._has_positions:
            positions = features.get("position_ids")
            if positions is None:
                raise UnsupportedContent("mlx-vlm doesn't say where the tokens of this model's media are.")
            rows = positions if positions.ndim == DIMENSIONS else positions[None]  # a sound's are the same in all
            found = np.tile(np.array(rows[:, 0, core], dtype=np.int32), (DIMENSIONS // rows.shape[0], 1))
            found -= found[0, 0]
            layout = MediaLayout(found, int(found.max()) + 1)
        mask, added = features.get("visual_pos_masks"), features.get("deepstack_visual_embeds")
        visual = np.zeros(core.stop - core.start, bool) if mask is None else np.array(mask[0, core], dtype=bool)
        per_token = {name: features[name] for name in _PER_TOKEN if isinstance(features.get(name), mx.array)}
        encoded = MlxEncodedMedia(
            mx.contiguous(embeddings),
            layout,
            visual,
            tuple(mx.contiguous(layer) for layer in added) if isinstance(added, list | tuple) else (),
            {name: mx.contiguous(value[0, core]) for name, value in per_token.items()},
        )
        mx.eval(encoded.embeddings, encoded.added, list(encoded.per_token.values()))
        return encoded

    def reference_logits(self, ids: Sequence[int], inputs: Mapping[str, Any]) -> NDArray[np.float32]:
        """The logits after a prompt with an item, by mlx-vlm's own pass over all of it."""
        features = self.features(ids, inputs)
        embeddings = features.pop("inputs_embeds")
        logits = self._decoder(
            mx.array([list(ids)]), inputs_embeds=embeddings, cache=self.new_cache(), **features
        ).logits[:, -1].astype(mx.float32)  # fmt: skip
        return np.array(logits)


def _positions(start: int, media: MlxSequenceMedia | None, count: int) -> Positions:
    if media is not None:
        return media.positions(start, start + count)
    return np.tile(np.arange(start, start + count, dtype=np.int32), (DIMENSIONS, 1))


@dataclass(eq=False)
class MlxMediaEncoder:
    """Processes items with mlx-vlm's processor. `process` is thread-safe; `attach` is for the engine's thread."""

    decoder: VisionDecoder
    processor: Any
    numbers: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        tokenizer = self.processor.tokenizer
        tokens = [getattr(self.processor, name, None) for name in ("image_token", "boi_token")]
        known = [str(token) for token in tokens if token is not None]
        if not known:
            raise UnsupportedContent("The model's processor names no token for pictures.")
        template = str(getattr(self.processor, "chat_template", None) or tokenizer.chat_template)
        self.placeholders = {"image": next((token for token in known if token in template), known[0])}
        sounds, heard = getattr(self.processor, "feature_extractor", None), getattr(self.processor, "audio_token", None)
        hears = sounds is not None and heard is not None
        if hears:
            self.placeholders["audio"] = str(heard)
        self.sample_rate = int(getattr(sounds, "sampling_rate", 16_000)) if hears else 0
        self.max_sound_samples = int(getattr(sounds, "n_samples", 0)) if hears else 0
        self._added_ids = added_token_ids(tokenizer)
        self._lock = threading.Lock()
        self.cache = MediaCache(self)
        self._layouts: LRUCache[str, MediaLayout] = LRUCache(MAX_EXPANSIONS)
        """Kept when the item itself is evicted."""

    def process(self, item: MediaItem, content: MediaContent) -> MlxMedia:
        array = np.frombuffer(content.data, dtype=content.dtype).reshape(content.shape)
        given = {"images": [Image.fromarray(array)]} if item.kind == "image" else {"audio": [array]}
        if item.kind == "audio":
            check_sound_length(content, self.max_sound_samples)
        try:
            with self._lock, mx.stream(mx.cpu):
                found = process_inputs(self.processor, prompts=[item.placeholder], **given)
                inputs = {
                    name: np.array(value) if isinstance(value, mx.array) else value for name, value in found.items()
                }
        except Exception as error:
            raise processing_failed(item.kind, error) from error
        if "images" in inputs:
            inputs["pixel_values"] = inputs.pop("images")
        inputs.pop("attention_mask", None)
        ids = [int(token_id) for token_id in np.asarray(inputs.pop("input_ids")).reshape(-1)]
        return MlxMedia(describe_expansion(self._without_bos(ids, item.placeholder), self._added_ids), inputs)

    def _without_bos(self, ids: list[int], placeholder: str) -> tuple[int, ...]:
        """Some processors begin every text with the token that begins a prompt."""
        tokenizer = self.processor.tokenizer
        bos = getattr(tokenizer, "bos_token_id", None)
        if bos is not None and ids[:1] == [bos] and not placeholder.startswith(tokenizer.bos_token):
            return tuple(ids[1:])
        return tuple(ids)

    def attach(self, sequence: SequenceState) -> MlxSequenceMedia:
        """The media of a sequence, whose computed tokens are known: items that are not computed are encoded. Raises
        MissingMedia."""
        spans = sequence.generation.prompt.media
        needed = {
            span.item.key
            for span in spans
            if span.stop > sequence.computed_tokens or span.item.key not in self._layouts
        }
        held = {**sequence.generation.media, **sequence.media}
        sequence.media = find_media(needed, held, self.cache)
        encoded: dict[str, MlxEncodedMedia] = {}
        for span in spans:
            media = sequence.media.get(span.item.key) or self.cache.get(span.item.key)
            if media is None:
                continue
            assert isinstance(media, MlxMedia)
            found = encoded[span.item.key] = self.decoder.encode(media)
            self._layouts[span.item.key] = found.layout
            if span.length != found.embeddings.shape[0]:
                raise UnsupportedContent("The prompt has another number of tokens for an item than its processor.")
        return MlxSequenceMedia(spans, encoded, {span.item.key: self._layouts[span.item.key] for span in spans})

    def probe_prompt(self, kind: str) -> tuple[tuple[int, ...], dict[str, Any], MlxSequenceMedia]:
        """A prompt with a small item between texts; the inputs of mlx-vlm's own pass for it, and its media."""
        drawn = np.random.default_rng(0)
        if kind == "image":
            pixels = drawn.integers(0, 256, (PROBE_SIZE, PROBE_SIZE, 3), dtype=np.uint8)
            content = MediaContent(pixels.tobytes(), pixels.shape, pixels.dtype.name)
            item = MediaItem("image", "probe", self.placeholders[kind])
        else:
            samples = drawn.normal(0, 0.1, int(PROBE_SECONDS * self.sample_rate)).astype(np.float32)
            content = MediaContent(samples.tobytes(), samples.shape, samples.dtype.name, self.sample_rate)
            item = MediaItem("audio", "probe", self.placeholders[kind])
        media = self.process(item, content)
        inputs, expansion = media.inputs, media.expansion
        length = len(expansion.token_ids) - expansion.lead - expansion.tail
        span = MediaSpan(item, len(PROBE_TEXT) + expansion.lead, length)
        encoded = self.decoder.encode(media)
        ids = (*PROBE_TEXT, *expansion.token_ids, *PROBE_TEXT)
        return ids, inputs, MlxSequenceMedia((span,), {item.key: encoded}, {item.key: encoded.layout})
