"""Applies what the options of each request change in its logits to a whole batch on a device.

The work does not grow with the number of rows: each kind of change is one transfer and a few operations."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palaver.engines.core.logits_changes import Ids, LogitsChanges, Scores, TokenCounts

MANY_IDS = 256
"""Lists of banned ids from this length on are kept on the device while the request has them."""
IN_CONTEXT = 0.5
"""What a token counts for being in the context. Counts in the reply are whole numbers."""


class DeviceChanges:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts = _DeviceCounts(device)
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
        own -= presence * (counts >= 1)
        own -= frequency * counts.floor()
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
        few = [(row, ids) for row, changes in rows for ids in changes.banned if 0 < len(ids) < MANY_IDS]
        if few:
            scores.view(-1)[self._places(scores, few)] = -torch.inf
        many: dict[int, tuple[Ids, list[int]]] = {}
        """Lists of ids, which several requests may share, and their rows."""
        for row, changes in rows:
            for ids in changes.banned:
                if len(ids) >= MANY_IDS:
                    many.setdefault(id(ids), (ids, []))[1].append(row)
        for ids, shared_by in many.values():
            scores[self._to_device(np.array(shared_by))[:, None], self._banned.copy_of(ids)[None]] = -torch.inf

    def _mask(self, scores: Tensor, rows: Sequence[tuple[int, LogitsChanges]]) -> None:
        mine = [(row, changes.allowed) for row, changes in rows if changes.allowed is not None]
        if not mine:
            return
        packed = np.stack([np.packbits(mask, bitorder="little") for _, mask in mine])
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


class _DeviceCounts:
    """How often each token is in a reply, a row of one table for each reply with penalties. IN_CONTEXT is added for
    tokens of the context."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._table = torch.empty(0, 0, device=device)
        self._rows: weakref.WeakKeyDictionary[TokenCounts, int] = weakref.WeakKeyDictionary()
        self._free: list[int] = []
        self._counted: dict[int, int] = {}
        """By row: how many tokens of the reply are in the table."""

    def rows(self, replies: Sequence[TokenCounts], size: int) -> Tensor:
        """The counts of these replies, with the tokens since the last call."""
        index = [self._rows[counts] if counts in self._rows else self._add(counts, size) for counts in replies]
        new: list[int] = []
        for row, counts in zip(index, replies, strict=True):
            new.extend(row * size + token_id for token_id in counts.reply_ids[self._counted[row] :])
            self._counted[row] = len(counts.reply_ids)
        if new:
            places = to_device(np.array(new), self._device)
            self._table.view(-1).index_add_(0, places, torch.ones(1, device=self._device).expand(len(new)))
        return self._table[to_device(np.array(index), self._device)]

    def _add(self, counts: TokenCounts, size: int) -> int:
        if not self._free:
            used = len(self._table)
            more = torch.zeros(max(4, used), size, device=self._device)
            self._table = torch.cat((self._table.view(used, size), more))
            self._free.extend(range(used, len(self._table)))
        row = self._free.pop()
        self._rows[counts] = row
        weakref.finalize(counts, self._free.append, row).atexit = False
        self._counted[row] = 0
        self._table[row] = 0
        self._table[row, torch.from_numpy(counts.context_ids).to(self._device)] = IN_CONTEXT
        return row
