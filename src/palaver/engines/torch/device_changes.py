"""Applies what the options of each request change in its logits to a whole batch on a device, by torch's operations;
where Triton is installed, `kernel_sampler` does it.

The work does not grow with the number of rows: each kind of change is one transfer and a few operations."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palaver.engines.core.logits_changes import Ids, LogitsChanges, Scores, TokenCounts

MANY_IDS = 256
"""Lists of banned ids from this length on are kept on the device while the request has them."""
FEW_SLOTS = 4
"""Rows of a table at first, where nothing holds on to its address."""

Key = TypeVar("Key")


class TooManyEdits(Exception):
    """The options of a row change the scores of more tokens than the kernels have room for."""


class DeviceChanges:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts = CountTable(device, FEW_SLOTS)
        self._banned = _DeviceIds(device)

    def apply(self, logits: Tensor, changes: Sequence[LogitsChanges | None]) -> Tensor:
        """The scores after the changes of each row: the same tensor if there are none, else a new one."""
        rows = [(row, own) for row, own in enumerate(changes) if own is not None]
        if not rows:
            return logits
        scores = logits.clone(memory_format=torch.contiguous_format)
        self._apply_penalties(scores, rows)
        self._add(scores, [(row, *own.repetitions) for row, own in rows if own.repetitions is not None])
        self._apply_end_penalties(scores, rows)
        self._add(scores, [(row, *own.bias) for row, own in rows if own.bias is not None])
        self._ban(scores, rows)
        self._mask(scores, rows)
        return scores

    def _apply_penalties(self, scores: Tensor, rows: Sequence[tuple[int, LogitsChanges]]) -> None:
        mine = [(row, changes, changes.counts) for row, changes in rows if changes.counts is not None]
        if not mine:
            return
        counts = self._counts.rows([counts for _, _, counts in mine], scores.shape[1])
        index = self._to_device(np.array([row for row, _, _ in mine]))
        values = np.array([(c.repetition_penalty, c.presence_penalty, c.frequency_penalty) for _, c, _ in mine])
        repetition, presence, frequency = self._to_device(values.astype(np.float32)).T[:, :, None]
        own = scores[index]
        own = torch.where(counts > 0, _penalised(own, repetition), own)
        own -= presence * (counts > 1)
        own -= frequency * (counts >> 1)
        scores[index] = own

    def _apply_end_penalties(self, scores: Tensor, rows: Sequence[tuple[int, LogitsChanges]]) -> None:
        mine = [(row, c.end_ids, c.end_penalty) for row, c in rows if c.end_ids is not None]
        if not mine:
            return
        places = self._places(scores, [(row, ids) for row, ids, _ in mine])
        penalties = np.concatenate([np.full(len(ids), penalty, dtype=np.float32) for _, ids, penalty in mine])
        flat = scores.view(-1)
        flat[places] = _penalised(flat[places], self._to_device(penalties))

    def _add(self, scores: Tensor, values_by_row: Sequence[tuple[int, Ids, Scores]]) -> None:
        """Adds values to the scores of token ids, which a row has once each."""
        if values_by_row:
            places = self._places(scores, [(row, ids) for row, ids, _ in values_by_row])
            scores.view(-1)[places] += self._to_device(np.concatenate([values for _, _, values in values_by_row]))

    def _ban(self, scores: Tensor, rows: Sequence[tuple[int, LogitsChanges]]) -> None:
        every = [(row, changes.all_banned) for row, changes in rows]
        few = [(row, ids) for row, banned in every for ids in banned if 0 < len(ids) < MANY_IDS]
        if few:
            scores.view(-1)[self._places(scores, few)] = -torch.inf
        many: dict[int, tuple[Ids, list[int]]] = {}
        """Lists of ids, which several requests may share, and their rows."""
        for row, banned in every:
            for ids in banned:
                if len(ids) >= MANY_IDS:
                    many.setdefault(id(ids), (ids, []))[1].append(row)
        for ids, shared_by in many.values():
            scores[self._to_device(np.array(shared_by))[:, None], self._banned.copy_of(ids)[None]] = -torch.inf

    def _mask(self, scores: Tensor, rows: Sequence[tuple[int, LogitsChanges]]) -> None:
        mine = [(row, changes.allowed) for row, changes in rows if changes.allowed is not None]
        if not mine:
            return
        packed = np.stack([mask.bits for _, mask in mine])
        bits = torch.arange(8, dtype=torch.uint8, device=self._device)
        allowed = (self._to_device(packed)[:, :, None] >> bits & 1).flatten(1)[:, : scores.shape[1]].bool()
        index = self._to_device(np.array([row for row, _ in mine]))
        scores[index] = scores[index].masked_fill(~allowed, -torch.inf)

    def _places(self, scores: Tensor, ids_by_row: Sequence[tuple[int, Ids]]) -> Tensor:
        """Indices into all rows, one after the other."""
        return self._to_device(np.concatenate([row * scores.shape[1] + ids for row, ids in ids_by_row]))

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return to_device(array, self._device)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Without waiting for what the device computes: from ordinary memory a copy would wait."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class UploadBuffer:
    """Sends arrays to the device, one after the other, each to the same memory. `to_device` allocates memory for each,
    which takes longer than the copy."""

    HOST_BUFFERS = 3
    """Copies that may be under way before a further one waits."""

    def __init__(self, numbers: int, device: torch.device) -> None:
        """For arrays of at most so many integers."""
        on_cuda = device.type == "cuda"
        self._on_device = torch.zeros(numbers, dtype=torch.int64, device=device)
        self._on_host = [torch.zeros(numbers, dtype=torch.int64, pin_memory=on_cuda) for _ in range(self.HOST_BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in self._on_host] if on_cuda else []
        self._next = 0

    def send(self, array: NDArray[np.int64]) -> Tensor:
        """The array on the device, until the next call."""
        at, size = self._next, array.size
        self._next = (at + 1) % self.HOST_BUFFERS
        if self._copied:
            self._copied[at].synchronize()
        source, target = self._on_host[at][:size], self._on_device[:size]
        source.numpy()[:] = array.reshape(-1)
        target.copy_(source, non_blocking=True)
        if self._copied:
            self._copied[at].record()
        return target.view(array.shape)


def _penalised(scores: Tensor, penalty: Tensor) -> Tensor:
    """Less likely by the factor `penalty`, whatever the sign of the score."""
    return torch.where(scores > 0, scores / penalty, scores * penalty)


class _DeviceIds:
    """Copies of arrays of token ids, freed with the arrays."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[int, Tensor] = {}

    def copy_of(self, ids: Ids) -> Tensor:
        key = id(ids)
        if key not in self._copies:
            self._copies[key] = torch.tensor(ids, device=self._device)
            weakref.finalize(ids, self._copies.pop, key, None).atexit = False
        return self._copies[key]


class SlotTable(Generic[Key]):
    """A table on the device with a row for each of the objects that were used last."""

    def __init__(self, device: torch.device, dtype: torch.dtype, slots: int) -> None:
        """`slots`: rows at first; it has more if more are used at once."""
        self._device = device
        self._slots: WeakKeyDictionary[Key, int] = WeakKeyDictionary()
        """Least recently used first."""
        self._capacity = slots
        self.tensor = torch.empty(0, 0, dtype=dtype, device=device)

    def reserve(self, rows: int, size: int) -> None:
        """Makes room for so many objects at once, each with a row of so many numbers."""
        if self.tensor.shape[1] == size and len(self.tensor) >= rows:
            return
        self._capacity = max(self._capacity, 1 << (rows - 1).bit_length())
        self._slots.clear()
        self.tensor = torch.zeros(self._capacity, size, dtype=self.tensor.dtype, device=self._device)

    def find(self, key: Key) -> tuple[int, bool]:
        """The row of an object, and whether it is new, so that something else may be in it."""
        slot = self._slots.pop(key, None)
        new = slot is None
        if slot is None:
            slot = next(iter(set(range(self._capacity)) - set(self._slots.values())), None)
        if slot is None:
            slot = self._slots.pop(next(iter(self._slots)))
        self._slots[key] = slot
        return slot, new

    def clear(self) -> None:
        """Forgets what is in which row."""
        self._slots.clear()


class CountTable:
    """How often each token is in a reply: twice the number, and 1 more for the tokens of the context."""

    def __init__(self, device: torch.device, slots: int) -> None:
        self._device = device
        self._table: SlotTable[TokenCounts] = SlotTable(device, torch.int32, slots)
        self._counted: dict[int, int] = {}
        """By row: how many tokens of the reply are in the table."""

    @property
    def tensor(self) -> Tensor:
        return self._table.tensor

    def reserve(self, rows: int, size: int) -> None:
        self._table.reserve(rows, size)

    def find(self, counts: TokenCounts) -> tuple[int, int]:
        """The row of a reply, and the token that is still to be counted in it, or -1. The caller counts it."""
        slot, new = self._table.find(counts)
        if new:
            self._counted[slot] = 0
            self.tensor[slot] = 0
            self.tensor[slot, to_device(counts.context_ids, self._device)] = 1
        missing = counts.reply_ids[self._counted[slot] :]
        self._counted[slot] = len(counts.reply_ids)
        if len(missing) == 1:
            return slot, missing[0]
        if missing:
            twos = torch.full((1,), 2, dtype=torch.int32, device=self._device).expand(len(missing))
            self.tensor[slot].index_add_(0, to_device(np.array(missing), self._device), twos)
        return slot, -1

    def clear(self) -> None:
        """Call where a token that `find` returned was not counted: all rows are counted again when they are used."""
        self._table.clear()

    def rows(self, replies: Sequence[TokenCounts], size: int) -> Tensor:
        """The counts of these replies, with the tokens since the last call."""
        self.reserve(len(replies), size)
        found = [self.find(counts) for counts in replies]
        new = [(slot, token_id) for slot, token_id in found if token_id >= 0]
        if new:
            slots, ids = to_device(np.array(new).T.copy(), self._device)
            self.tensor[slots, ids] += 2
        return self.tensor[to_device(np.array([slot for slot, _ in found]), self._device)]
