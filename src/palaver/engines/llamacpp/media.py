"""GGUF models that see and hear: pictures and sounds through the projector, an `mmproj` file, by llama.cpp's mtmd.

mtmd divides an item into pieces: tokens of text, such as those around a picture or between its slices, and pieces that
stand for media. These are encoded once, apart from the engine's thread, and then computed like tokens. A piece is
computed as a whole: where positions have several dimensions, a sequence can't be cut inside of it.
"""

from __future__ import annotations

import ctypes as c
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from palaver.engines.core.media import MediaCache, MissingMedia, find_media
from palaver.engines.core.request import SequenceState
from palaver.engines.llamacpp.context import MAX_BATCH, EncodedPiece, LoadedModel
from palaver.engines.llamacpp.library import FLASH_ATTENTION, MediaText
from palaver.errors import BrokenModel, EngineError, UnsupportedContent
from palaver.generation import MediaContent, MediaExpansion, MediaItem, MediaSpan
from palaver.gguf import GGUFHeader, TokenKind, read_gguf

_TEXT = 0
"""The type of mtmd's chunks that are text."""


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """What mtmd makes of a part of an item."""

    chunk: int
    tokens: int
    ids: tuple[int, ...] = ()
    """Of text; empty for media."""


@dataclass(eq=False)
class LlamaMedia:
    """An item as mtmd divides it, and its embeddings once it is encoded."""

    expansion: MediaExpansion
    pieces: tuple[_Piece, ...]
    content_bytes: int
    embeddings: dict[int, EncodedPiece] = field(default_factory=dict)
    """Of each piece that is no text, by its number."""

    @property
    def nbytes(self) -> int:
        encoded = sum(piece.embeddings.nbytes for piece in self.embeddings.values())
        return self.content_bytes + encoded

    @property
    def is_encoded(self) -> bool:
        return len(self.embeddings) == sum(not piece.ids for piece in self.pieces)

    def places(self, span: MediaSpan) -> Iterator[tuple[int, EncodedPiece]]:
        """The place in the prompt of each piece that is no text. `span`: the item's place in the prompt."""
        at = span.start - self.expansion.lead
        for number, piece in enumerate(self.pieces):
            if not piece.ids:
                yield at, self.embeddings[number]
            at += piece.tokens


class Projector:
    """The encoders of a model, from its `mmproj` file. `process` and `encode` are thread-safe."""

    numbers: Mapping[str, str] = {}
    options: tuple[str, ...] = ()
    max_sound_samples = 0

    def __init__(
        self, file: Path, model: LoadedModel, header: GGUFHeader, threads: int, gpu: bool, exact: bool
    ) -> None:
        """`header`: of the model. Raises BrokenModel for a file that is not a projector of this model."""
        self._library = library = model.library
        self.header = read_projector(file)
        params = library.mtmd_context_params_default()
        params.use_gpu, params.n_threads, params.print_timings = gpu, threads, False
        if exact:
            params.flash_attn_type = FLASH_ATTENTION[False]
        library.last_error = ""
        self.pointer = library.mtmd_init_from_file(os.fsencode(file), model.pointer, params)
        if not self.pointer:
            why = library.last_error or "no reason was given"
            raise BrokenModel(f"llama.cpp can't use {file.name} with this model ({why}).")
        self._width: int = library.llama_model_n_embd_inp(model.pointer)
        self._marker: bytes = library.mtmd_default_marker()
        self._control = {
            piece: token_id
            for token_id, piece in enumerate(header.pieces)
            if header.token_kinds[token_id] == TokenKind.CONTROL
        }
        supported = {"image": library.mtmd_support_vision, "audio": library.mtmd_support_audio}
        kinds = [kind for kind, is_supported in supported.items() if is_supported(self.pointer)]
        self.placeholders = dict.fromkeys(kinds, self._marker.decode())
        self.sample_rate = max(0, library.mtmd_get_audio_sample_rate(self.pointer)) if "audio" in kinds else 0
        self._encoding = threading.Lock()
        self.cache = MediaCache(self)

    def process(self, item: MediaItem, content: MediaContent) -> LlamaMedia:
        chunks = self._tokenize(item, content)
        pieces = tuple(self._read_chunks(chunks))
        ids = [piece.ids or (self._pad_id(item, pieces),) * piece.tokens for piece in pieces]
        media = LlamaMedia(self._expansion(ids), pieces, len(content.data))
        weakref.finalize(media, self._library.mtmd_input_chunks_free, chunks)
        for piece in pieces:
            if not piece.ids:
                self._check_size(item, piece)
        return media

    def _tokenize(self, item: MediaItem, content: MediaContent) -> int:
        """The library's list of chunks. Raises UnsupportedContent."""
        library = self._library
        if item.kind == "image":
            height, width, _ = content.shape
            bitmap = library.mtmd_bitmap_init(width, height, content.data)
        else:
            bitmap = library.mtmd_bitmap_init_from_audio(content.shape[0], content.data)
        chunks: int = library.mtmd_input_chunks_init()
        text = MediaText(self._marker, len(self._marker), False, True)
        try:
            if library.mtmd_tokenize(self.pointer, chunks, c.byref(text), (c.c_void_p * 1)(bitmap), 1):
                library.mtmd_input_chunks_free(chunks)
                raise UnsupportedContent(f"The model's projector can't take this {item.kind}.")
        finally:
            library.mtmd_bitmap_free(bitmap)
        return chunks

    def _read_chunks(self, chunks: int) -> Iterator[_Piece]:
        library = self._library
        for number in range(library.mtmd_input_chunks_size(chunks)):
            chunk, count = library.mtmd_input_chunks_get(chunks, number), c.c_size_t()
            if library.mtmd_input_chunk_get_type(chunk) == _TEXT:
                ids = library.mtmd_input_chunk_get_tokens_text(chunk, c.byref(count))
                if count.value:
                    yield _Piece(chunk, count.value, tuple(ids[: count.value]))
            else:
                yield _Piece(chunk, library.mtmd_input_chunk_get_n_tokens(chunk))

    def _check_size(self, item: MediaItem, piece: _Piece) -> None:
        """llama.cpp ends the process where tokens that see each other don't fit one pass."""
        if piece.tokens > MAX_BATCH and self._library.mtmd_decode_use_non_causal(self.pointer, piece.chunk):
            raise UnsupportedContent(
                f"This {item.kind} has {piece.tokens} tokens that see each other; at most {MAX_BATCH} are possible."
            )

    def _pad_id(self, item: MediaItem, pieces: Sequence[_Piece]) -> int:
        """The token that stands for embeddings in a prompt: the one that the chat template writes, if there is one that
        is not among the text around them. Its embedding is never used."""
        around = {token_id for piece in pieces for token_id in piece.ids}
        written = [token_id for text, token_id in self._control.items() if text and text in item.placeholder]
        others = [*written, *self._control.values()]
        if not others:
            raise UnsupportedContent("The model's vocabulary has no token that could stand for media.")
        return next((token_id for token_id in others if token_id not in around), others[0])

    def _expansion(self, ids: Sequence[tuple[int, ...]]) -> MediaExpansion:
        token_ids = tuple(token_id for piece in ids for token_id in piece)
        control = set(self._control.values())
        places = [place for place, token_id in enumerate(token_ids) if token_id in control]
        if not places:
            raise UnsupportedContent("The model's projector writes nothing for it.")
        return MediaExpansion(token_ids, places[0], len(token_ids) - 1 - places[-1])

    def encode(self, media: LlamaMedia) -> None:
        """Computes the embeddings, unless they are there. Blocks; not for the engine's thread."""
        with self._encoding:
            for number, piece in enumerate(media.pieces):
                if not piece.ids and number not in media.embeddings:
                    media.embeddings[number] = self._encode(piece)
            media.content_bytes = 0

    def _encode(self, piece: _Piece) -> EncodedPiece:
        if not self.pointer or self._library.mtmd_encode_chunk(self.pointer, piece.chunk):
            raise EngineError("llama.cpp failed to encode a picture or a sound.")
        found = self._library.mtmd_get_output_embd(self.pointer)
        rows = np.ctypeslib.as_array(found, (piece.tokens, self._width)).copy()
        return EncodedPiece(piece.chunk, piece.tokens, rows)

    def attach(self, sequence: SequenceState) -> dict[int, EncodedPiece]:
        """The pieces that are to be computed, by their places. The sequence's computed tokens are known. Raises
        MissingMedia for items that are not encoded."""
        spans = [span for span in sequence.generation.prompt.media if span.stop > sequence.computed_tokens]
        held = {**sequence.generation.media, **sequence.media}
        sequence.media = find_media([span.item.key for span in spans], held, self.cache)
        encoded: dict[str, LlamaMedia] = {}
        for key, media in sequence.media.items():
            assert isinstance(media, LlamaMedia)
            encoded[key] = media
        missing = [key for key, media in encoded.items() if not media.is_encoded]
        if missing:
            raise MissingMedia(missing)
        pieces: dict[int, EncodedPiece] = {}
        for span in spans:
            media = encoded[span.item.key]
            if span.length != len(media.expansion.token_ids) - media.expansion.lead - media.expansion.tail:
                raise UnsupportedContent("The prompt has another number of tokens for an item than its projector.")
            pieces |= dict(media.places(span))
        if pieces and max(start + piece.tokens for start, piece in pieces.items()) >= len(sequence.token_ids):
            raise UnsupportedContent("A picture or a sound can't be the end of a prompt.")
        sequence.unsplit = tuple((start, start + piece.tokens) for start, piece in sorted(pieces.items()))
        return {start: piece for start, piece in pieces.items() if start >= sequence.computed_tokens}

    def close(self) -> None:
        with self._encoding:
            if self.pointer:
                self._library.mtmd_free(self.pointer)
                self.pointer = None


def read_projector(file: Path) -> GGUFHeader:
    """Raises BrokenModel for a file that is not a projector."""
    header = read_gguf(file)
    if header.architecture != "clip":
        raise BrokenModel(f"{file.name} is not a projector for pictures or sound (an mmproj file).")
    return header
