"""Pictures and sounds for transformers' models: the model's own processor and encoders, and what their results change
in the passes of its decoder.

No family is known by name. The model's own forward is run on one item alone, up to the decoder inside of it: what the
decoder would be called with is what stands for the item in every prompt. That is the embedding and the rotary position
of each token, which tokens see each other, and what is added to later layers (Qwen3-VL's deepstack). It doesn't depend
on the text around the item, except that positions are counted from its start."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from cachetools import LRUCache
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from palaver.engines.core.media import MAX_EXPANSIONS, MediaCache, find_media
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
from palaver.engines.core.request import SequenceState
from palaver.engines.torch.attention import MaskRule, TokenBlocks
from palaver.engines.torch.batch import ForwardBatch
from palaver.engines.torch.loader import quiet
from palaver.errors import UnsupportedContent
from palaver.generation import MediaContent, MediaExpansion, MediaItem, MediaSpan

_ARGUMENTS = {"image": "images", "audio": "audio"}
"""The names of a processor's parameters."""
_OWN_ARGUMENTS = frozenset("input_ids inputs_embeds position_ids attention_mask past_key_values use_cache".split())
"""Arguments of a decoder that have a meaning of their own here."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedMedia:
    """What the decoder is called with at the tokens of an item."""

    embeddings: Tensor
    """[tokens, size]."""
    positions: Tensor | None
    """Rotary positions in several dimensions, counted from the item's start: [dimensions, tokens]. None: one each."""
    advance: int
    """How far the position after the item is from its start."""
    per_token: dict[str, Tensor]
    """More arguments of the decoder with a row for each token."""
    added: dict[str, list[Tensor]]
    """Arguments with rows for some of the tokens, those of `added_mask`: here they have rows for all of them."""
    added_mask: str
    blocks: TokenBlocks | None
    """Tokens that see each other; None if there are none."""

    @property
    def nbytes(self) -> int:
        lists = [tensor for tensors in self.added.values() for tensor in tensors]
        return sum(tensor.nbytes for tensor in (self.embeddings, *self.per_token.values(), *lists))


@dataclass(slots=True, eq=False)
class TorchMedia:
    """An item, processed and, once it was needed, encoded."""

    expansion: MediaExpansion
    inputs: dict[str, Any]
    """The arguments that the model's forward takes for it; empty once it is encoded."""
    encoded: EncodedMedia | None = None

    @property
    def nbytes(self) -> int:
        inputs = sum(value.nbytes for value in self.inputs.values() if isinstance(value, Tensor))
        return inputs + (0 if self.encoded is None else self.encoded.nbytes)


class SequenceMedia:
    """The media of one running sequence."""

    def __init__(
        self, spans: Sequence[MediaSpan], encoded: Mapping[str, EncodedMedia], advances: Mapping[str, int]
    ) -> None:
        """`encoded` has the items that are not computed yet, `advances` all of them."""
        self._spans = spans
        self._encoded = encoded
        self.unsplit = tuple(_unsplit(spans, encoded))
        """Starts and ends of tokens that see each other."""
        self._starts: list[int] = []
        """The rotary position of each span's first token."""
        shift = 0
        for span in spans:
            self._starts.append(span.start + shift)
            shift += advances[span.item.key] - span.length
        self.shift = shift
        """The rotary position of tokens after all media, less their position."""
        self._end = spans[-1].stop

    @property
    def end(self) -> int:
        return self._end

    def rows(self, start: int, stop: int) -> Iterator[tuple[int, EncodedMedia, slice]]:
        """The items among these tokens: the first of their tokens, counted from `start`, and which they are."""
        for span in self._spans:
            first, last = max(start, span.start), min(stop, span.stop)
            if first < last:
                yield first - start, self._encoded[span.item.key], slice(first - span.start, last - span.start)

    def write_positions(self, start: int, positions: Tensor) -> None:
        """Writes the rotary positions of the tokens from `start` on: [dimensions, tokens]."""
        stop = start + positions.shape[1]
        shift, at = 0, start
        for span, rope_start in zip(self._spans, self._starts, strict=True):
            if span.start >= stop:
                break
            if span.start > at:
                self._count(positions[:, at - start : span.start - start], at + shift)
            first, last = max(at, span.start), min(stop, span.stop)
            if first < last:
                place, rows = slice(first - span.start, last - span.start), positions[:, first - start : last - start]
                found = self._encoded[span.item.key].positions
                if found is None:
                    self._count(rows, rope_start + place.start)
                else:
                    rows.copy_(found[:, place] + rope_start)
            at = max(at, min(stop, span.stop))
            shift = self._shift_after(span)
        if at < stop:
            self._count(positions[:, at - start :], at + shift)

    def _shift_after(self, span: MediaSpan) -> int:
        index = self._spans.index(span)
        if index + 1 < len(self._spans):
            return self._starts[index + 1] - self._spans[index + 1].start
        return self.shift

    @staticmethod
    def _count(positions: Tensor, first: int) -> None:
        positions.copy_(torch.arange(first, first + positions.shape[1], device=positions.device).expand_as(positions))

    def blocks(self, start: int, stop: int) -> TokenBlocks | None:
        """The block of each token up to `stop`, if any of those from `start` on has one."""
        found: TokenBlocks | None = None
        for number, span in enumerate(self._spans):
            encoded = self._encoded.get(span.item.key) if start < span.stop and span.start < stop else None
            if encoded is None or encoded.blocks is None:
                continue
            if found is None:
                found = replace(encoded.blocks, numbers=encoded.blocks.numbers.new_full((stop,), -1))
            part = encoded.blocks.numbers[: stop - span.start]
            found.numbers[span.start : span.start + part.shape[0]] = torch.where(part < 0, -1, part + (number << 32))
        return found


class _DecoderReached(Exception):
    """The model has called its decoder, with these arguments."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments


class MediaEncoder:
    """Processes items with the model's processor, encodes them with the model's encoders, and puts the results into
    passes of its decoder."""

    def __init__(self, model: PreTrainedModel, processor: Any) -> None:
        self.model = model
        self._processor = processor
        self._lock = threading.Lock()
        self.placeholders = find_placeholders(processor)
        self.numbers = find_numbers(processor)
        sounds = getattr(processor, "feature_extractor", getattr(processor, "audio_processor", None))
        self.sample_rate = int(getattr(sounds, "sampling_rate", 16_000)) if "audio" in self.placeholders else 0
        splits_sound = hasattr(processor, "_retrieve_input_features")  # into pieces, as Voxtral's does
        self.max_sound_samples = 0 if splits_sound else int(getattr(sounds, "n_samples", 0))
        self.options = find_options(processor)
        self._added_ids = added_token_ids(processor.tokenizer)
        self.cache = MediaCache(self)
        self._advances: LRUCache[str, int] = LRUCache(MAX_EXPANSIONS)
        """How far each item advances rotary positions; kept when the item itself is evicted."""
        self._forward_arguments = frozenset(inspect.signature(model.forward).parameters)
        self.dimensions = 1
        """Of rotary positions, as the items encoded so far have them."""
        self._capturing = False
        self._injected: list[tuple[int, EncodedMedia, slice]] = []
        decoder: Any = find_decoder(model)
        decoder.register_forward_pre_hook(self._before_decoder, with_kwargs=True)
        if getattr(decoder, "layers", None):
            decoder.layers[0].register_forward_pre_hook(self._before_first_layer)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def process(self, item: MediaItem, content: MediaContent) -> TorchMedia:
        array = np.frombuffer(content.data, dtype=content.dtype).reshape(content.shape)
        media: Any = Image.fromarray(array) if item.kind == "image" else array
        options: dict[str, Any] = {"add_special_tokens": False, "return_tensors": "pt", **option_values(item)}
        if item.kind == "audio":
            check_sound_length(content, self.max_sound_samples)
            options["sampling_rate"] = content.rate
        if item.kind in self.numbers:
            options["use_image_id"] = False  # the placeholder has the number
        try:
            with self._lock, quiet():
                found = self._processor(text=[item.placeholder], **{_ARGUMENTS[item.kind]: [media]}, **options)
        except Exception as error:
            raise processing_failed(item.kind, error) from error
        inputs = dict(found)
        ids = tuple(int(token_id) for token_id in inputs.pop("input_ids")[0])
        inputs.pop("attention_mask", None)
        return TorchMedia(describe_expansion(ids, self._added_ids), inputs)

    def attach(self, sequence: SequenceState) -> SequenceMedia:
        """The media of a sequence, whose computed tokens are known: items that are not computed are encoded. Raises
        MissingMedia."""
        spans = sequence.generation.prompt.media
        needed = [
            span.item.key
            for span in spans
            if span.stop > sequence.computed_tokens or span.item.key not in self._advances
        ]
        held = {**sequence.generation.media, **sequence.media}
        sequence.media = find_media(needed, held, self.cache)
        encoded: dict[str, EncodedMedia] = {}
        for span in spans:
            processed = sequence.media.get(span.item.key)
            if processed is not None:
                assert isinstance(processed, TorchMedia)
                encoded[span.item.key] = self.encode(span.item.key, processed)
                if span.length != encoded[span.item.key].embeddings.shape[0]:
                    raise UnsupportedContent("The prompt has another number of tokens for an item than its processor.")
        media = SequenceMedia(spans, encoded, self._advances)
        sequence.unsplit = media.unsplit
        start = sequence.computed_tokens
        for first, end in sequence.unsplit:
            if first < start < end:  # the cached prefix ends inside of tokens that see each other
                sequence.computed_tokens = sequence.cached_tokens = first
        return media

    @torch.inference_mode()
    def encode(self, key: str, media: TorchMedia) -> EncodedMedia:
        """In the engine's thread: it uses the device."""
        if media.encoded is None:
            ids = torch.tensor([media.expansion.token_ids], device=self.model.device)
            arguments = self._decoder_arguments(ids, media.inputs)
            last = ids.shape[1] - media.expansion.tail
            media.encoded = _encoded(arguments, slice(media.expansion.lead, last))
            media.inputs = {}
            self._advances[key] = media.encoded.advance
            if media.encoded.positions is not None:
                self.dimensions = media.encoded.positions.shape[0]
        return media.encoded

    def _decoder_arguments(self, ids: Tensor, inputs: Mapping[str, Any]) -> dict[str, Any]:
        device, dtype = self.model.device, self.model.dtype
        moved = {
            name: value.to(device, dtype) if value.is_floating_point() else value.to(device)
            for name, value in inputs.items()
            if isinstance(value, Tensor)
        }
        others = {name: value for name, value in inputs.items() if not isinstance(value, Tensor)}
        others = {name: value for name, value in others.items() if name in self._forward_arguments}
        self._capturing = True
        try:
            with quiet():
                self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **moved, **others)
        except _DecoderReached as reached:
            return reached.arguments
        finally:
            self._capturing = False
        raise UnsupportedContent("The model's decoder isn't called for media.")

    def free_decoder(self) -> None:
        """Frees the weights of the decoder's layers, which compiled steps have copied: encoding ends before them."""
        layers: Any = find_decoder(self.model)
        for parameter in layers.layers.parameters():
            parameter.data = parameter.data.new_empty(0)

    @contextmanager
    def injected(self, rows: list[tuple[int, EncodedMedia, slice]]) -> Iterator[None]:
        """In a pass inside of it, the decoder gets these items at these rows."""
        self._injected = rows
        try:
            yield
        finally:
            self._injected = []

    def _before_decoder(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._capturing:
            names = inspect.signature(module.forward).parameters
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            if given.get("inputs_embeds") is None:  # a decoder that encodes media itself, as in Phi-4 multimodal
                return None
            raise _DecoderReached(given)
        if not self._injected:
            return None
        embeddings = kwargs.get("inputs_embeds")
        if embeddings is None:
            embeddings = self.model.get_input_embeddings()(kwargs.pop("input_ids"))
        return args, {**kwargs, **_arguments_with(embeddings, kwargs, self._injected)}

    def _before_first_layer(self, _: Any, args: tuple[Any, ...]) -> None:
        if self._capturing:
            raise _DecoderReached({"inputs_embeds": args[0]})


def find_decoder(model: PreTrainedModel) -> torch.nn.Module:
    """The text decoder inside of the model: what its forward calls after it has encoded media."""
    decoder: Any = model.get_decoder()
    while getattr(decoder, "language_model", None) is not None:
        decoder = decoder.language_model
    return decoder if isinstance(decoder, torch.nn.Module) else model


def _encoded(arguments: Mapping[str, Any], core: slice) -> EncodedMedia:
    """From the arguments of the decoder for an item alone. `core`: its tokens without plain text at both ends."""
    embeddings: Tensor = arguments["inputs_embeds"]
    length = embeddings.shape[1]
    positions = arguments.get("position_ids")
    positions = positions[-3:, 0, core] if isinstance(positions, Tensor) and positions.ndim == 3 else None
    if positions is not None:
        positions = positions - positions[0, 0]
    rows = {
        name: value
        for name, value in arguments.items()
        if name not in _OWN_ARGUMENTS and isinstance(value, Tensor) and value.shape[:2] == (1, length)
    }
    added_mask = next((name for name, value in rows.items() if value.dtype == torch.bool), "")
    added: dict[str, list[Tensor]] = {}
    for name, value in arguments.items():
        if added_mask and isinstance(value, list | tuple) and value and all(isinstance(one, Tensor) for one in value):
            added[name] = [_spread(one, rows[added_mask][0])[core].clone() for one in value]
    return EncodedMedia(
        embeddings[0, core].clone(),
        positions,
        (core.stop - core.start) if positions is None else int(positions.max()) + 1,
        {name: value[0, core].clone() for name, value in rows.items()},
        added,
        added_mask,
        _blocks(arguments.get("attention_mask"), length, core, embeddings.device),
    )


def _spread(rows: Tensor, mask: Tensor) -> Tensor:
    """A row for every token, 0 where the mask is False."""
    out = rows.new_zeros((mask.shape[0], *rows.shape[1:]))
    out[mask] = rows
    return out


def _blocks(mask: Any, length: int, core: slice, device: torch.device) -> TokenBlocks | None:
    """The runs of tokens that see the next one, from the masks that the model made: one for each kind of layers."""
    masks = list(mask.values()) if isinstance(mask, dict) else [mask]
    visible = [_visible(one, length, device) for one in masks]
    looking = [one for one in visible if one is not None and bool(one.diagonal(1).any())]
    if not looking:
        return None
    ahead = looking[0].diagonal(1)
    joins = torch.nn.functional.pad(ahead, (1, 0))
    in_block = joins | torch.nn.functional.pad(ahead, (0, 1))
    numbers = torch.where(in_block, (~joins).cumsum(0), -1)
    together = (numbers[:, None] == numbers) & in_block
    beyond_window = all(bool((one | ~together).all()) for one in looking)
    return TokenBlocks(numbers[core], len(looking) == len(masks), beyond_window)


def _visible(mask: Any, length: int, device: torch.device) -> Tensor | None:
    """Which tokens see which others, [tokens, tokens]; None for plain causal attention."""
    if isinstance(mask, MaskRule):
        return mask.visible(length, device)
    if isinstance(mask, Tensor) and mask.ndim == 4:
        found = mask[0, 0, :length, :length]
        return found if found.dtype == torch.bool else found >= 0
    return None


def _unsplit(spans: Sequence[MediaSpan], encoded: Mapping[str, EncodedMedia]) -> Iterator[tuple[int, int]]:
    """The places of tokens that see each other."""
    for span in spans:
        found = encoded.get(span.item.key)
        if found is None or found.blocks is None:
            continue
        numbers = found.blocks.numbers.tolist()
        for number in dict.fromkeys(one for one in numbers if one >= 0):
            first = numbers.index(number)
            yield span.start + first, span.start + first + numbers.count(number)


@dataclass(slots=True)
class MediaRows:
    """The media of a pass: the items at its rows, and the rotary positions of all rows where they have several
    dimensions."""

    items: list[tuple[int, EncodedMedia, slice]] = field(default_factory=list)
    positions: Tensor | None = None


def media_rows(batch: ForwardBatch, dimensions: int) -> MediaRows:
    """`dimensions`: of rotary positions; 1 for those of most models."""
    found = MediaRows()
    if dimensions > 1:
        found.positions = batch.inputs.rotary_positions.expand(dimensions, -1).clone()
    row = batch.first_row
    for chunk in batch.chunks:
        count = len(chunk.ids)
        if chunk.media is not None:
            rows = chunk.media.rows(chunk.start, chunk.start + count)
            found.items += [(row + first, encoded, part) for first, encoded, part in rows]
            if found.positions is not None:
                chunk.media.write_positions(chunk.start, found.positions[:, row : row + count])
        row += count
    return found


def _arguments_with(
    embeddings: Tensor, kwargs: Mapping[str, Any], injected: Sequence[tuple[int, EncodedMedia, slice]]
) -> dict[str, Any]:
    """The arguments of the decoder that differ with these items at these rows."""
    embeddings = embeddings.clone()
    count = embeddings.shape[1]
    changed: dict[str, Any] = {"inputs_embeds": embeddings}
    added: dict[str, list[list[Tensor]]] = {}
    for row, encoded, part in injected:
        rows = slice(row, row + part.stop - part.start)
        embeddings[0, rows] = encoded.embeddings[part]
        for name, values in encoded.per_token.items():
            if name not in changed:
                given = kwargs.get(name)
                if isinstance(given, Tensor) and given.shape[:2] == (1, count):
                    changed[name] = given.clone()
                else:
                    changed[name] = values.new_zeros((1, count, *values.shape[1:]))
            changed[name][0, rows] = values[part]
        for name, layers in encoded.added.items():
            mask = encoded.per_token[encoded.added_mask][part]
            found = added.setdefault(name, [[] for _ in layers])
            for layer, values in zip(found, layers, strict=True):
                layer.append(values[part][mask])
    return changed | {name: [torch.cat(layer) for layer in layers] for name, layers in added.items()}


@contextmanager
def inject_media(
    encoder: MediaEncoder | None, media: SequenceMedia | None, start: int, count: int
) -> Iterator[dict[str, Tensor]]:
    """For a pass over the next tokens of one sequence alone: the arguments of the model's forward that say where they
    are. Without them a model may use the positions of the item that was encoded last."""
    if encoder is None:
        yield {}
        return
    positions = torch.arange(start, start + count, device=encoder.device)
    if media is None:
        yield {"position_ids": positions[None]}
        return
    if encoder.dimensions > 1:
        positions = positions.expand(encoder.dimensions, -1).clone()
        media.write_positions(start, positions)
    else:
        positions = positions[None]
    with encoder.injected(list(media.rows(start, start + count))):
        yield {"position_ids": positions[:, None] if encoder.dimensions > 1 else positions}
