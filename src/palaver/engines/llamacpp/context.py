"""A loaded GGUF model and its context in llama.cpp: batches of tokens in, logits out, sequences copied and cut.

llama.cpp aborts the process where its own assumptions fail, so ids and lengths are checked here before they are passed.
"""

from __future__ import annotations

import ctypes as c
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from palaver.engines.llamacpp.library import (
    ABORTED,
    F16,
    F32,
    FLASH_ATTENTION,
    MAX_SEQUENCES,
    NO_ROOM,
    PROGRESS_CALLBACK,
    Batch,
    LlamaLibrary,
    load_library,
)
from palaver.errors import BrokenModel, EngineError, ModelError

MAX_BATCH = 512
"""Tokens of one pass."""
LONE_BATCH = 128
"""Tokens of one pass where each sequence has a context of its own, and so memory for its passes."""
ROW_GROUP = 4
"""Rows that the kernels for quantised weights compute together. The rows that are left over are computed one by one."""
PROMPT_ROWS = 24
"""Tokens of one sequence in a pass from which on it gets the threads for prompts. The number of threads must not depend
on other sequences, because some kernels round by it."""
_SHIFT_BYTES = 8
CELLS_MULTIPLE = 256
"""llama.cpp rounds the length of a context up to this."""
Floats = np.ndarray[Any, np.dtype[np.float32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class NoRoom(Exception):
    """The cache has no room for a batch. Nothing was computed."""


class Aborted(Exception):
    """`Context.abort` or `interrupt` ended a pass. Some of its tokens may be in the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPiece:
    """A part of an item, as mtmd divides it: one picture of several slices, or some seconds of sound."""

    chunk: int
    """The library's object, which says the positions of the tokens."""
    tokens: int
    embeddings: Floats


class LoadedModel:
    """The weights of a model, and what llama.cpp says of it."""

    def __init__(
        self,
        files: Sequence[Path],
        gpu_layers: int | None = None,
        report: Callable[[float], None] | None = None,
        library: LlamaLibrary | None = None,
    ) -> None:
        """`gpu_layers`: how many layers a GPU computes; None: as many as llama.cpp decides. Raises BrokenModel."""
        self.library = library or load_library()
        params = self.library.llama_model_default_params()
        if gpu_layers is not None:
            params.n_gpu_layers = gpu_layers
        self._report = PROGRESS_CALLBACK(lambda fraction, _: bool(report is None or report(fraction) or True))
        params.progress_callback = self._report
        paths = (c.c_char_p * len(files))(*[os.fsencode(file) for file in files])
        self.library.last_error = ""
        self.pointer = self.library.llama_model_load_from_splits(paths, len(files), params)
        if not self.pointer:
            why = self.library.last_error or "no reason was given"
            raise BrokenModel(f"llama.cpp can't load {files[0].name} ({why}).")
        vocabulary = self.library.llama_model_get_vocab(self.pointer)
        self.vocabulary_size: int = self.library.llama_vocab_n_tokens(vocabulary)
        self._check_kind(files[0].name)

    def _check_kind(self, name: str) -> None:
        """Raises ModelError for models that don't write one token after the other."""
        library, pointer = self.library, self.pointer
        wrong = library.llama_model_is_diffusion(pointer) or library.llama_model_has_encoder(pointer)
        if wrong or not library.llama_model_has_decoder(pointer):
            self.close()
            raise ModelError(f"{name} is not a model that replies token by token, so it can't chat.")

    def close(self) -> None:
        if self.pointer:
            self.library.llama_model_free(self.pointer)
            self.pointer = None


@dataclass(frozen=True, slots=True)
class ContextSettings:
    cells: int
    """Tokens in the cache, over all sequences."""
    sequences: int
    unified: bool = False
    """Whether all sequences share the cells. Otherwise each has its part of them."""
    separate: bool = False
    """Whether each sequence has a llama.cpp context of its own. Each pass is then of one sequence, and llama.cpp need
    not build its graph anew because the pass before was of another one."""
    max_batch: int = MAX_BATCH
    """Tokens of one pass."""
    float32: bool = False
    """Whether keys and values are stored in f32 rather than f16."""
    flash_attention: bool | None = None
    """None: llama.cpp decides."""
    threads: int = 1
    draft_rows: int = 0
    """Tokens of one pass that may all have logits, to verify drafts."""
    prompt_threads: int = 1
    """Of passes with many tokens of a sequence, whose threads don't wait for each other for most of the time."""


class Context:
    """Sequences of tokens in llama.cpp's memory. Used by one thread, except for `abort` and `interrupt`."""

    def __init__(self, model: LoadedModel, settings: ContextSettings, adapter: Path | None = None) -> None:
        """`adapter`: a LoRA adapter in a GGUF file. Raises ModelError where llama.cpp can't make the context."""
        assert 0 < settings.sequences <= MAX_SEQUENCES
        self.settings = settings
        self._library = model.library
        self.vocabulary_size = model.vocabulary_size
        self._abort_flag = c.create_string_buffer(2)
        self.closing = False
        self._model = model
        self._adapter = None if adapter is None else self._load_adapter(adapter)
        self._places: list[_NativeContext | None] = [None] * (settings.sequences if settings.separate else 1)
        """The llama.cpp contexts, once they are used."""
        self._arrays = _BatchArrays(settings.sequences)
        self._window: int = self._library.llama_model_n_swa(model.pointer)
        """How many of the last tokens some layers see; 0: all layers see all."""
        self._shifts: dict[int, list[tuple[int, int]]] = {}
        """For sequences with media whose positions differ from the places of their tokens: the place behind each item,
        and what is added to a place from there on."""
        self.max_tokens: int = self._library.llama_n_ctx_seq(self._open(0).pointer)
        """Tokens that one sequence has room for."""

    def open_next(self) -> bool:
        """Opens one more llama.cpp context before it is needed, which takes some time. Returns False if all are."""
        closed = next((number for number, place in enumerate(self._places) if place is None), None)
        if closed is not None:
            self._open(closed)
        return closed is not None

    def _open(self, number: int) -> _NativeContext:
        place = self._places[number]
        if place is None:
            pointer = self._init_pointer()
            place = _NativeContext(pointer, self._library.llama_get_memory(pointer), self.settings.threads)
            self._places[number] = place
        return place

    def _init_pointer(self) -> Any:
        settings = self.settings
        sequences = 1 if settings.separate else settings.sequences
        cells = settings.cells * sequences // settings.sequences
        params = self._library.llama_context_default_params()
        params.n_ctx = -(-cells // CELLS_MULTIPLE) * CELLS_MULTIPLE
        params.n_batch = params.n_ubatch = settings.max_batch
        params.n_seq_max = sequences
        params.n_outputs_max = max(sequences * ROW_GROUP, settings.draft_rows)
        params.n_threads = params.n_threads_batch = settings.threads
        params.flash_attn_type = FLASH_ATTENTION[settings.flash_attention]
        params.type_k = params.type_v = F32 if settings.float32 else F16
        params.kv_unified = settings.unified
        params.abort_callback = c.cast(c.CDLL(None).strlen, c.c_void_p)  # no Python between the layers of a pass
        params.abort_callback_data = c.addressof(self._abort_flag)
        self._library.last_error = ""
        pointer = self._library.llama_init_from_model(self._model.pointer, params)
        if not pointer:
            why = self._library.last_error or "no reason was given"
            raise ModelError(f"llama.cpp can't run the model with a cache of {cells:,} tokens ({why}).")
        if self._adapter is not None:
            adapters, scales = (c.c_void_p * 1)(self._adapter), (c.c_float * 1)(1.0)
            if self._library.llama_set_adapters_lora(pointer, adapters, 1, scales):
                self._library.llama_free(pointer)
                raise BrokenModel(f"llama.cpp can't apply the adapter ({self._library.last_error}).")
        return pointer

    def _load_adapter(self, adapter: Path) -> Any:
        if adapter.is_dir():
            raise BrokenModel(
                f"A GGUF file takes an adapter in a GGUF file, and {str(adapter)!r} is a folder: convert it with"
                " convert_lora_to_gguf.py of llama.cpp."
            )
        self._library.last_error = ""
        loaded = self._library.llama_adapter_lora_init(self._model.pointer, os.fsencode(adapter))
        if not loaded:
            raise BrokenModel(f"llama.cpp can't load the adapter {adapter.name} ({self._library.last_error}).")
        return loaded

    def abort(self) -> None:
        """Ends the pass that runs now, and every later one. For a context that is to be closed; from any thread."""
        self.closing = True
        self.interrupt()

    def interrupt(self) -> None:
        """Ends the pass that runs now, and later ones until `allow_passes`. From any thread.

        llama.cpp calls strlen with this text between operations: a text that is not empty aborts the pass.
        """
        self._abort_flag.raw = b"\1\0"

    def allow_passes(self) -> None:
        if not self.closing:
            self._abort_flag.raw = b"\0\0"

    def decode(
        self,
        chunks: Sequence[tuple[int, int, Sequence[int]]],
        need_logits: bool = True,
        outputs: int | None = None,
        output_group: int = 1,
    ) -> Floats:
        """Computes tokens: for each chunk a sequence, the position of its first token, and the token ids.

        Returns a row of logits for each of the first `outputs` chunks (None: for all), after its last token; no rows
        without `need_logits`. So many rows are computed of each sequence (`output_group`), if it has as many tokens in
        this pass; the others are not returned. Raises NoRoom, Aborted or EngineError.
        """
        wanted = 0 if not need_logits else len(chunks) if outputs is None else outputs
        place, ends = self._compute(chunks, wanted, output_group)
        return self._read_logits(place, ends[:wanted], np.empty((wanted, self.vocabulary_size), np.float32))

    def decode_rows(self, chunks: Sequence[tuple[int, int, Sequence[int]]], logits: Floats) -> None:
        """As `decode`, but writes a row of logits for each token, at most `draft_rows`."""
        place, _ = self._compute(chunks, len(chunks), MAX_BATCH)
        self._read_logits(place, range(self._arrays.batch.n_tokens), logits)

    def _compute(
        self, chunks: Sequence[tuple[int, int, Sequence[int]]], wanted: int, output_group: int
    ) -> tuple[_NativeContext, list[int]]:
        """Returns the context of the pass, and the index of the last token of each chunk."""
        sequence = chunks[0][0]
        place, _ = self._locate(sequence)
        if self._shifts:
            chunks = [(number, self._position(number, start), ids) for number, start, ids in chunks]
        if self.settings.separate:
            assert all(number == sequence for number, _, _ in chunks)
            chunks = [(0, start, ids) for _, start, ids in chunks]
        ends = self._arrays.fill(chunks, wanted, output_group)
        assert self._arrays.batch.n_tokens <= self.settings.max_batch
        self._set_threads(place, max(len(ids) for _, _, ids in chunks))
        code = self._library.llama_decode(place.pointer, self._arrays.batch)
        if code:
            raise _decode_error(code)
        return place, ends

    def _read_logits(self, place: _NativeContext, indexes: Sequence[int], logits: Floats) -> Floats:
        """Copies the rows of these tokens into `logits`."""
        address, size = logits.ctypes.data, logits.itemsize * self.vocabulary_size
        for row, index in enumerate(indexes):
            source = self._library.llama_get_logits_ith(place.pointer, index)
            if not source:
                raise EngineError("llama.cpp returned no logits.")
            c.memmove(address + row * size, source, size)
        return logits

    def decode_media(self, sequence: int, start: int, projector: int, piece: EncodedPiece) -> None:
        """Computes the tokens of an encoded item, whose first is at the place `start`. `projector`: the mtmd context.
        Raises NoRoom, Aborted or EngineError; some of the tokens may be in the cache then."""
        place, number = self._locate(sequence)
        position, end, batch = self._position(sequence, start), c.c_int32(), self.settings.max_batch
        embeddings = c.c_void_p(piece.embeddings.ctypes.data)
        self._set_threads(place, piece.tokens)
        code = self._library.mtmd_helper_decode_image_chunk(
            projector, place.pointer, piece.chunk, embeddings, position, number, batch, c.byref(end), None, None
        )
        if code:
            raise _decode_error(code)
        behind = start + piece.tokens
        if end.value - behind != position - start:
            self._shifts.setdefault(sequence, []).append((behind, end.value - behind))

    def _set_threads(self, place: _NativeContext, rows: int) -> None:
        """For a pass with so many tokens of a sequence."""
        threads = self.settings.prompt_threads if rows >= PROMPT_ROWS else self.settings.threads
        if place.threads != threads:
            place.threads = threads
            self._library.llama_set_n_threads(place.pointer, threads, threads)

    def _position(self, sequence: int, place: int) -> int:
        """The position of the token at this place. They differ behind media with positions in several dimensions."""
        shifts = self._shifts.get(sequence, ())
        return place + next((shift for end, shift in reversed(shifts) if end <= place), 0)

    def truncate(self, sequence: int, tokens: int) -> bool:
        """Removes all tokens after the first `tokens`. Returns False where the model's state can't be cut."""
        if not self._is_open(sequence):
            return True
        place, number = self._locate(sequence)
        position = self._position(sequence, tokens)
        cut = bool(self._library.llama_memory_seq_rm(place.memory, number, position if tokens else -1, -1))
        if cut and sequence in self._shifts:
            self._set_shifts(sequence, [pair for pair in self._shifts[sequence] if pair[0] <= tokens])
        return cut

    def can_truncate(self, sequence: int, tokens: int, copied: bool = False) -> bool:
        """Whether a sequence, or a copy of it, still has all that layers with a window see behind the first `tokens`:
        llama.cpp gives the cells of tokens that are out of sight to others."""
        if not self._window or not self._is_open(sequence):
            return True
        if copied and self.settings.separate:
            length = self.length(sequence)
            return tokens == length or self.saves_all(length)
        place, number = self._locate(sequence)
        first = int(self._library.llama_memory_seq_pos_min(place.memory, number))
        return first <= max(0, self._position(sequence, tokens) - self._window + 1)

    def saves_all(self, tokens: int) -> bool:
        """Whether the saved state of so many tokens can be cut: of layers with a window it has what is in sight."""
        return not self._window or tokens <= self._window

    def copy(self, source: int, target: int) -> None:
        """Copies a whole sequence to an empty one: parts of a sequence can't be copied everywhere."""
        if self.settings.separate:
            self.restore(target, self.save(source))
            return
        place, number = self._locate(source)
        self._library.llama_memory_seq_cp(place.memory, number, self._locate(target)[1], -1, -1)
        self._set_shifts(target, self._shifts.get(source, []))

    def length(self, sequence: int) -> int:
        """How many tokens a sequence has. While it ends inside of media, any number between their start and end."""
        if not self._is_open(sequence):
            return 0
        place, number = self._locate(sequence)
        positions = int(self._library.llama_memory_seq_pos_max(place.memory, number)) + 1
        shifts = reversed(self._shifts.get(sequence, ()))
        return positions - next((shift for end, shift in shifts if end + shift <= positions), 0)

    def save(self, sequence: int) -> Bytes:
        """The state of a sequence, as bytes for `restore`: the library's, the shifts, and how many these are."""
        place, number = self._locate(sequence)
        shifts = self._shifts.get(sequence, [])
        trailer = np.array([*sum(shifts, ()), len(shifts)], np.int64).view(np.uint8)
        size = self._library.llama_state_seq_get_size(place.pointer, number)
        state = np.empty(size + trailer.nbytes, np.uint8)
        written = self._library.llama_state_seq_get_data(place.pointer, _pointer(state), size, number)
        state[written : written + trailer.nbytes] = trailer
        return state[: written + trailer.nbytes]

    def restore(self, sequence: int, state: Bytes) -> bool:
        """Replaces a sequence by a saved state. Returns False if there is no room for it."""
        place, number = self._locate(sequence)
        count = int.from_bytes(state[-_SHIFT_BYTES:].tobytes(), "little")
        size = state.nbytes - (2 * count + 1) * _SHIFT_BYTES
        if not self._library.llama_state_seq_set_data(place.pointer, _pointer(state), size, number):
            return False
        pairs = np.frombuffer(state[size:-_SHIFT_BYTES].tobytes(), np.int64).reshape(count, 2).tolist()
        self._set_shifts(sequence, [(end, shift) for end, shift in pairs])
        return True

    def _set_shifts(self, sequence: int, shifts: list[tuple[int, int]]) -> None:
        self._shifts.pop(sequence, None)
        if shifts:
            self._shifts[sequence] = list(shifts)

    def _is_open(self, sequence: int) -> bool:
        """False for a sequence that never had a token."""
        return not self.settings.separate or self._places[sequence] is not None

    def _locate(self, sequence: int) -> tuple[_NativeContext, int]:
        """The llama.cpp context of a sequence, and the number of the sequence there."""
        assert 0 <= sequence < self.settings.sequences
        return (self._open(sequence), 0) if self.settings.separate else (self._open(0), sequence)

    def close(self) -> None:
        for place in self._places:
            if place is not None:
                self._library.llama_free(place.pointer)
        self._places = [None] * len(self._places)


@dataclass(slots=True)
class _NativeContext:
    """A context of llama.cpp."""

    pointer: Any
    memory: Any
    threads: int
    """At present."""


class _BatchArrays:
    """The arrays of a llama_batch, which every pass fills again."""

    def __init__(self, sequences: int) -> None:
        self._tokens = np.zeros(MAX_BATCH, np.int32)
        self._positions = np.zeros(MAX_BATCH, np.int32)
        self._counts = np.ones(MAX_BATCH, np.int32)
        self._outputs = np.zeros(MAX_BATCH, np.int8)
        self._ids = np.arange(sequences, dtype=np.int32)
        self._id_pointers = np.zeros(MAX_BATCH, np.uintp)
        self._id_address = self._ids.ctypes.data
        tokens, positions = _as_pointer(self._tokens, c.c_int32), _as_pointer(self._positions, c.c_int32)
        counts, outputs = _as_pointer(self._counts, c.c_int32), _as_pointer(self._outputs, c.c_int8)
        ids = _as_pointer(self._id_pointers, c.POINTER(c.c_int32))
        self.batch = Batch(0, tokens, None, positions, counts, ids, outputs)

    def fill(self, chunks: Sequence[tuple[int, int, Sequence[int]]], outputs: int, group: int = 1) -> list[int]:
        """Returns the index of the last token of each chunk. The first chunks have outputs: the last `group` tokens; if
        there are fewer, also the first ones of a later chunk of the sequence."""
        total = 0
        ends: list[int] = []
        missing: dict[int, int] = {}
        for sequence, start, ids in chunks:
            assert ids
            assert 0 <= sequence < len(self._ids)
            end = total + len(ids)
            assert end <= MAX_BATCH
            self._tokens[total:end] = ids
            self._positions[total:end] = np.arange(start, start + len(ids))
            self._id_pointers[total:end] = self._id_address + self._ids.itemsize * sequence
            self._outputs[total:end] = 0
            if len(ends) < outputs:
                first = max(total, end - group)
                self._outputs[first:end] = 1
                missing[sequence] = group - (end - first)
            elif sequence in missing:
                self._outputs[total : total + missing[sequence]] = 1
            ends.append(end - 1)
            total = end
        self.batch.n_tokens = total
        return ends


def _pointer(array: Bytes) -> Any:
    return _as_pointer(array, c.c_uint8)


def _as_pointer(array: Any, kind: Any) -> Any:
    return c.cast(array.ctypes.data, c.POINTER(kind))


def _decode_error(code: int) -> Exception:
    if code == NO_ROOM:
        return NoRoom()
    if code == ABORTED:
        return Aborted()
    return EngineError(f"llama.cpp failed to compute a batch (error {code}).")
