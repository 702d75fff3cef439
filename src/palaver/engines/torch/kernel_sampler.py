"""Samples a batch on CUDA by the kernels of `sampling_kernels` and `filter_kernels`, with all options of its requests.

What the options ask for at the next token is known to the host. It goes to the device in one copy; then all launches
are one CUDA graph, where the logits of a batch are always at the same place."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palaver.engines.core.logits_changes import Ids, LogitsChanges, TokenMask
from palaver.engines.core.logits_processor import LogitsProcessor
from palaver.engines.torch import sampling_kernels
from palaver.engines.torch.cuda_graphs import Capture
from palaver.engines.torch.device_changes import CountTable, SlotTable, TooManyEdits, to_device
from palaver.engines.torch.sampling_kernels import (
    BIAS,
    COUNTS,
    FORCED,
    PENALTIES,
    SETTINGS,
    UNIFORM,
    XTC_UNIFORM,
    BlockLists,
    ScoreChanges,
)
from palaver.sampling import Sampling

MAX_EDITS = 64
"""Single tokens of a row whose score is changed; more banned ones go into its mask."""
PASS_MULTIPLE = 4
"""Graphs have a multiple of so many passes, so that few are captured."""
BUFFERS = 3
"""Copies to the device that may be under way at once."""
IDLE = np.array(sampling_kernels.row_settings(Sampling(temperature=0)))
"""The settings of padding."""


class KernelSampler:
    """Holds the tables of the requests that are sampled, and the graphs."""

    def __init__(self, device: torch.device, slots: int = 4, capture: Capture | None = None) -> None:
        """`slots`: replies with penalties or biases that have room at first."""
        self._device = device
        self._slots = slots
        self._capture = capture
        self._counts = CountTable(device, slots)
        self._biases: SlotTable[LogitsProcessor] = SlotTable(device, torch.float32, slots)
        self._settings: WeakKeyDictionary[LogitsProcessor, NDArray[np.float64]] = WeakKeyDictionary()
        self._undecided: WeakSet[LogitsProcessor] = WeakSet()
        """Replies with a token that their likeliest tokens did not decide."""
        self._staging: _Staging | None = None
        self._graphs: dict[tuple[int, ...], tuple[Callable[[], Tensor], Tensor]] = {}

    def compile(self, logits: Tensor, vocabulary_size: int) -> None:
        """Compiles all kernels, so that no request waits for them."""
        self._reserve_staging(len(logits), vocabulary_size)
        assert self._staging is not None
        changes = self._staging.clear(len(logits), self._counts.tensor, self._biases.tensor)
        self._compute(logits, changes, 1)

    def needs_filters(self, processor: LogitsProcessor) -> bool:
        """Whether the likeliest tokens probably don't decide a draw. Speed alone depends on it."""
        return sampling_kernels.always_needs_filters(processor.sampling) or processor in self._undecided

    def note_undecided(self, processor: LogitsProcessor) -> None:
        self._undecided.add(processor)

    def sample(self, logits: Tensor, processors: Sequence[LogitsProcessor | None], undecided: bool = False) -> Tensor:
        """A row of results for each row of the logits; None for padding. Raises TooManyEdits. `undecided`: whether any
        draw may need the filters' passes, such as by a tie."""
        samplings = [one.sampling for one in processors if one is not None]
        needing = samplings if undecided else filter(sampling_kernels.may_need_filters, samplings)
        passes = max(map(sampling_kernels.filter_passes, needing), default=0)
        return self._compute(logits, self._prepare(len(logits), processors), passes)

    def replay(
        self,
        logits: Tensor,
        raw: BlockLists,
        processors: Sequence[LogitsProcessor | None],
        then: Callable[[Tensor], None],
    ) -> Tensor:
        """As `sample`, and calls `then` with the results, in a graph; the logits and their lists are always in the same
        memory. The results are overwritten by the next call."""
        if self._capture is None:
            computed = self.sample(logits, processors)
            then(computed)
            return computed
        rows = len(logits)
        filtered = (one.sampling for one in processors if one is not None and self.needs_filters(one))
        passes = max(map(sampling_kernels.filter_passes, filtered), default=0)
        passes = -(-passes // PASS_MULTIPLE) * PASS_MULTIPLE
        self._reserve(rows, processors)
        tables = (self._counts.tensor.data_ptr(), self._biases.tensor.data_ptr())
        key = (logits.data_ptr(), rows, passes, *tables)
        if key not in self._graphs:
            self._graphs = {known: graph for known, graph in self._graphs.items() if known[3:] == tables}
            assert self._staging is not None
            changes = self._staging.clear(rows, self._counts.tensor, self._biases.tensor)
            self._compute(logits, changes, passes, raw)  # kernels can't be compiled while a graph is captured
            results: list[Tensor] = []

            def run() -> Tensor:
                results.append(self._compute(logits, changes, passes, raw))
                then(results[0])
                return results[0]

            self._graphs[key] = (self._capture(run), results[0])
        self._prepare(rows, processors)
        replay, out = self._graphs[key]
        replay()
        return out

    @staticmethod
    def _compute(logits: Tensor, changes: ScoreChanges, passes: int, raw: BlockLists | None = None) -> Tensor:
        """`raw`: of the logits, if it is computed already."""
        scores, settings = sampling_kernels.change_scores(logits, changes), changes.settings
        own = BlockLists(scores.shape[0], scores.shape[1], scores.device)
        own.compute(scores, settings)
        if raw is None:
            raw = BlockLists(logits.shape[0], logits.shape[1], logits.device)
            raw.compute(logits, settings)
        return sampling_kernels.sample_rows(logits, scores, settings, raw, own, passes)

    def _reserve(self, rows: int, processors: Sequence[LogitsProcessor | None]) -> None:
        size = next(one.vocabulary_size for one in processors if one is not None)
        self._reserve_staging(rows, size)
        for table, used in (
            (self._counts, any(one is not None and one.has_penalties for one in processors)),
            (self._biases, any(one is not None and one.has_biases for one in processors)),
        ):
            if used:
                table.reserve(rows, size)

    def _reserve_staging(self, rows: int, size: int) -> None:
        if self._staging is None or self._staging.rows < rows or self._staging.size != size:
            self._staging = _Staging(max(rows, self._slots), size, self._device)
            self._graphs.clear()

    def _prepare(self, rows: int, processors: Sequence[LogitsProcessor | None]) -> ScoreChanges:
        """Sends what the options of the requests ask for to the device."""
        self._reserve(rows, processors)
        staging = self._staging
        assert staging is not None
        staging.begin(rows)
        try:
            for row, processor in enumerate(processors):
                if processor is not None:
                    self._fill(staging, row, processor)
        except Exception:  # nothing is sent, so the tokens of other rows are not counted
            self._counts.clear()
            raise
        return staging.send(self._counts.tensor, self._biases.tensor)

    def _fill(self, staging: _Staging, row: int, processor: LogitsProcessor) -> None:
        settings = staging.settings[row]
        known = self._settings.get(processor)
        if known is None:
            known = self._settings[processor] = np.array(sampling_kernels.row_settings(processor.sampling))
        settings[:] = known
        if processor.do_sample:
            settings[UNIFORM], settings[XTC_UNIFORM] = processor.uniform(), processor.xtc_uniform()
        else:
            settings[:COUNTS] = IDLE[:COUNTS]
            settings[PENALTIES:COUNTS] = known[PENALTIES:COUNTS]
            forced = processor.reply.forced_id
            settings[FORCED] = -1 if forced is None else forced
        if processor.is_active:
            changes = processor.changes()
            if changes.counts is not None:
                settings[COUNTS], staging.count_ids[row] = found = self._counts.find(changes.counts)
                staging.count_slots[row] = found[0]
            if changes.bias is not None or changes.banned_always is not None:
                settings[BIAS] = self._find_biases(processor, changes)
            staging.add_edits(row, changes)
            staging.add_mask(row, changes)

    def _find_biases(self, processor: LogitsProcessor, changes: LogitsChanges) -> int:
        slot, new = self._biases.find(processor)
        if new:
            row = np.zeros(self._biases.tensor.shape[1], dtype=np.float32)
            if changes.bias is not None:
                row[changes.bias[0]] = changes.bias[1]
            if changes.banned_always is not None:
                row[changes.banned_always] = -np.inf
            self._biases.tensor[slot].copy_(to_device(row, self._device))
        return slot


class _Staging:
    """What the options of the rows ask for, in the host's memory and on the device. Fields lie one after the other;
    masks come last, so that only those that there are get copied."""

    def __init__(self, rows: int, size: int, device: torch.device) -> None:
        self.rows, self.size = rows, size
        self._mask_bytes = -(-size // 8)
        self._sizes = {
            "settings": SETTINGS * 8,
            "count_slots": 8,
            "count_ids": 8,
            "edits": 8,
            "masked": 8,
            "edited_ids": MAX_EDITS * 4,
            "edit_values": MAX_EDITS * 4,
        }
        self._head = rows * sum(self._sizes.values())
        total = self._head + rows * self._mask_bytes
        pinned = device.type == "cuda"
        self._buffers = [torch.zeros(total, dtype=torch.uint8, pin_memory=pinned) for _ in range(BUFFERS)]
        self._on_device = torch.zeros(total, dtype=torch.uint8, device=device)
        self._next = 0
        self._masks = 0
        self._packed: dict[int, NDArray[np.uint8]] = {}
        """Of long lists of banned ids, which stay the same: the masks."""
        self._use(self._buffers[0].numpy())

    def _use(self, buffer: NDArray[np.uint8]) -> None:
        at, fields = 0, dict[str, Any]()
        for name, size in self._sizes.items():
            fields[name] = buffer[at : at + self.rows * size]
            at += self.rows * size
        self.settings = fields["settings"].view(np.float64).reshape(self.rows, SETTINGS)
        self.count_slots, self.count_ids, self._edits, self._masked = (
            fields[name].view(np.int64) for name in ("count_slots", "count_ids", "edits", "masked")
        )
        self._edited_ids = fields["edited_ids"].view(np.int32).reshape(self.rows, MAX_EDITS)
        self._edit_values = fields["edit_values"].view(np.float32).reshape(self.rows, MAX_EDITS)
        self._mask_rows = buffer[self._head :].reshape(self.rows, self._mask_bytes)

    def begin(self, rows: int) -> None:
        self._next = (self._next + 1) % BUFFERS
        self._use(self._buffers[self._next].numpy())
        self.settings[:rows] = IDLE
        self.count_ids[:rows] = -1
        self._edits[:rows] = 0
        self._masked[:rows] = -1
        self._masks = 0

    def add_edits(self, row: int, changes: LogitsChanges) -> None:
        """Raises TooManyEdits."""
        if changes.repetitions is not None:
            self._add(row, *changes.repetitions)
        if changes.end_ids is not None:
            self._add(row, -1 - changes.end_ids, np.full(len(changes.end_ids), changes.end_penalty, dtype=np.float32))
        for ids in changes.banned:
            if len(ids) <= MAX_EDITS // 4:
                self._add(row, ids, np.full(len(ids), -np.inf, dtype=np.float32))

    def _add(self, row: int, ids: Ids, values: NDArray[np.float32]) -> None:
        start = int(self._edits[row])
        stop = start + len(ids)
        if stop > MAX_EDITS:
            raise TooManyEdits
        self._edited_ids[row, start:stop] = ids
        self._edit_values[row, start:stop] = values
        self._edits[row] = stop

    def add_mask(self, row: int, changes: LogitsChanges) -> None:
        masks = [self._pack_banned(ids) for ids in changes.banned if len(ids) > MAX_EDITS // 4]
        if changes.allowed is not None:
            masks.append(changes.allowed.bits)
        if not masks:
            return
        own = self._mask_rows[self._masks]
        own[:] = masks[0]
        for mask in masks[1:]:
            own &= mask
        self._masked[row] = self._masks
        self._masks += 1

    def _pack_banned(self, ids: Ids) -> NDArray[np.uint8]:
        key = id(ids)
        if key not in self._packed:
            self._packed[key] = TokenMask.without(self.size, ids.tolist()).bits
            weakref.finalize(ids, self._packed.pop, key, None).atexit = False
        return self._packed[key]

    def send(self, counts: Tensor, biases: Tensor) -> ScoreChanges:
        used = self._head + self._masks * self._mask_bytes
        self._on_device[:used].copy_(self._buffers[self._next][:used], non_blocking=True)
        return self._views(counts, biases)

    def clear(self, rows: int, counts: Tensor, biases: Tensor) -> ScoreChanges:
        """The places on the device, with nothing to change."""
        self.begin(rows)
        return self.send(counts, biases)

    def _views(self, counts: Tensor, biases: Tensor) -> ScoreChanges:
        at, fields = 0, dict[str, Tensor]()
        for name, size in self._sizes.items():
            fields[name] = self._on_device[at : at + self.rows * size]
            at += self.rows * size
        masks = self._on_device[self._head :].view(self.rows, self._mask_bytes)
        settings = fields["settings"].view(torch.float64).view(self.rows, SETTINGS)
        whole = {name: fields[name].view(torch.int64) for name in ("count_slots", "count_ids", "edits", "masked")}
        ids = fields["edited_ids"].view(torch.int32).view(self.rows, MAX_EDITS)
        values = fields["edit_values"].view(torch.float32).view(self.rows, MAX_EDITS)
        return ScoreChanges(
            vocabulary_size=self.size,
            settings=settings,
            counts=counts,
            biases=biases,
            edited_ids=ids,
            edit_values=values,
            masks=masks,
            **whole,
        )
