"""Compiled steps for models that take media: the library's encoders, and the plain decoder in compiled code.

What the decoder gets at the tokens of an item, embeddings and rotary positions, is put into the rows of `step.c`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palaver.engines.compiled.decoder import CompiledDecoder, CompiledRunner, RowChunk, Rows
from palaver.engines.core.kv_cache import HostArray, Slot, SlotAllocator
from palaver.engines.core.request import SequenceState
from palaver.engines.core.runner import ThreadCounts, UnsupportedModel
from palaver.engines.torch.batch import build_batch, sequence_chunk
from palaver.engines.torch.devices import TensorLayout
from palaver.engines.torch.forward_probe import LENGTH, PROBE_BYTES, ForwardProbe
from palaver.engines.torch.media import EncodedMedia, MediaEncoder, SequenceMedia, find_decoder
from palaver.engines.torch.model_runner import Forward
from palaver.generation import MediaContent, MediaItem, MediaSpan

START, STOP = 6, 18
"""The tokens of the probe's text that stand for media."""
DIMENSIONS = 3
PICTURE = (64, 96, 3)
SOUND_S = 0.5


class MediaRotations:
    """The rotations of tokens whose rotary positions have several dimensions: each pair of a head turns with one."""

    def __init__(self, decoder: CompiledDecoder, config: Any) -> None:
        """Raises UnsupportedModel where it isn't known which pair turns with which dimension. The probe finds out where
        that is known wrongly."""
        self._rotary = decoder.rotary
        self.pairs = self._rotary.up_to(0).shape[1]
        rope = getattr(config, "rope_parameters", None) or {}
        sections = rope.get("mrope_section")
        self.dimensions = 1 if sections is None else DIMENSIONS
        if sections is not None and (len(sections) != DIMENSIONS or sum(sections) != self.pairs):
            raise UnsupportedModel("its positions have other dimensions")
        self._of_pair = np.repeat(np.arange(self.dimensions), sections or [self.pairs])

    def at(self, positions: Tensor) -> HostArray:
        """[dimensions, tokens] to [tokens, pairs, 2]."""
        each = np.broadcast_to(positions.numpy(), (self.dimensions, positions.shape[1]))[self._of_pair].T
        table = self._rotary.up_to(int(positions.max()))
        return np.ascontiguousarray(table[each, np.arange(self.pairs)])


def media_chunk(
    slot: Slot[HostArray], start: int, ids: Sequence[int], media: SequenceMedia | None, rotations: MediaRotations
) -> RowChunk:
    """The next tokens of a sequence with media."""
    if media is None:
        return RowChunk(slot, start, ids)
    if start >= media.end:
        return RowChunk(slot, start, ids, media.shift)
    positions = torch.empty((rotations.dimensions, len(ids)), dtype=torch.long)
    media.write_positions(start, positions)
    embeddings = [
        (first, np.ascontiguousarray(encoded.embeddings[part].numpy()))
        for first, encoded, part in media.rows(start, start + len(ids))
    ]
    return RowChunk(slot, start, ids, 0, rotations.at(positions), embeddings)


class CompiledMediaRunner(CompiledRunner):
    def __init__(
        self,
        decoder: CompiledDecoder,
        encoder: MediaEncoder,
        rotations: MediaRotations,
        cache_bytes: int,
        context_length: int,
        threads: ThreadCounts,
        speculate: bool = True,
    ) -> None:
        super().__init__(decoder, cache_bytes, context_length, threads, speculate)
        self._encoder = encoder
        self._rotations = rotations
        self._media: dict[SequenceState, SequenceMedia] = {}
        """The sequences with pictures or sounds."""

    def allocate(self, sequence: SequenceState) -> None:
        super().allocate(sequence)
        if sequence.generation.prompt.media:
            try:
                self._media[sequence] = self._encoder.attach(sequence)
            except BaseException:
                self.release(sequence)
                raise

    def release(self, sequence: SequenceState) -> None:
        try:
            super().release(sequence)
        finally:
            self._media.pop(sequence, None)

    def _chunk(self, sequence: SequenceState, ids: Sequence[int]) -> RowChunk:
        media = self._media.get(sequence)
        return media_chunk(self._slots[sequence], sequence.computed_tokens, ids, media, self._rotations)


def check_compiled_media(
    probe: ForwardProbe,
    compiled: CompiledDecoder,
    library: Forward,
    layout: TensorLayout,
    encoder: MediaEncoder,
    embeddings: Tensor,
) -> MediaRotations:
    """Raises UnsupportedModel unless compiled steps give the library's logits for a text with media in it."""
    rotations = MediaRotations(compiled, find_decoder(encoder.model).config)
    for kind in encoder.placeholders:
        _check_kind(encoder, kind)
    before, encoder.dimensions = encoder.dimensions, rotations.dimensions
    try:
        _compare(probe, compiled, library, layout, rotations, embeddings)
    finally:
        encoder.dimensions = before
    return rotations


def _check_kind(encoder: MediaEncoder, kind: str) -> None:
    """Raises unless embeddings and rotary positions are all that the decoder gets for an item of this kind."""
    if kind == "image":
        pixels = (np.arange(np.prod(PICTURE)) * 7919 % 251).astype(np.uint8)
        content = MediaContent(pixels.tobytes(), PICTURE, "uint8")
    else:
        samples = np.sin(np.arange(int(SOUND_S * encoder.sample_rate)) / 20).astype(np.float32)
        content = MediaContent(samples.tobytes(), samples.shape, "float32", encoder.sample_rate)
    item = MediaItem("image" if kind == "image" else "audio", "probe", encoder.placeholders[kind])
    encoded = encoder.encode(item.key, encoder.process(item, content))
    if encoded.added or encoded.per_token or encoded.blocks is not None:
        raise UnsupportedModel(f"its {kind}s change more than embeddings")


def _compare(
    probe: ForwardProbe,
    compiled: CompiledDecoder,
    library: Forward,
    layout: TensorLayout,
    rotations: MediaRotations,
    embeddings: Tensor,
) -> None:
    """In two chunks, the first of which ends inside of the item, and by token, beside a sequence of text."""
    media = _sequence_media(probe.ids, rotations.dimensions, embeddings)
    first, second = (SlotAllocator(layout, PROBE_BYTES).allocate(LENGTH) for _ in range(2))
    own, other = (SlotAllocator(compiled.layout, PROBE_BYTES).allocate(LENGTH) for _ in range(2))
    ends = [0, (START + STOP) // 2, STOP + 4, STOP + 5, STOP + 6]
    for at, (start, stop) in enumerate(itertools.pairwise(ends)):
        ids = probe.ids[start:stop]
        after = start >= media.end
        with_media = sequence_chunk(first, start, ids, media=None if after else media, rotary_shift=after * media.shift)
        beside = sequence_chunk(second, at, probe.ids[at : at + 1])
        expected = torch.cat([library(build_batch([chunk], layout.device)) for chunk in (with_media, beside)])
        rows = Rows([media_chunk(own, start, ids, media, rotations), RowChunk(other, at, beside.ids)], need_logits=True)
        for row, wanted in zip(compiled.run(rows, 1), expected, strict=True):
            probe.compare_with(torch.from_numpy(row), wanted)


def _sequence_media(ids: Sequence[int], dimensions: int, embeddings: Tensor) -> SequenceMedia:
    """An item of 3 by 4 tokens, with the embeddings of other tokens than those in the text."""
    length = STOP - START
    item = MediaItem("image", "probe", "")
    rows = embeddings[torch.tensor(ids[-length:], device=embeddings.device)]
    places = torch.arange(length, device=embeddings.device)
    positions = torch.stack([places * 0, places // 4, places % 4]) if dimensions > 1 else None
    advance = length if positions is None else int(positions.max()) + 1
    encoded = EncodedMedia(rows, positions, advance, {}, {}, "", None)
    return SequenceMedia([MediaSpan(item, START, length)], {item.key: encoded}, {item.key: advance})
