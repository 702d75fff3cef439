"""Models of the transformers library with recurrent or convolutional layers beside attention, or without attention:
keys and values lie in KV-cache slots, and the states of all running sequences in the rows of one batch."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from palaver.engines.core.kv_cache import Slot
from palaver.engines.core.runner import UnsupportedModel
from palaver.engines.torch.batch import ForwardBatch
from palaver.engines.torch.cuda_graphs import Capture
from palaver.engines.torch.devices import TensorLayout, TensorMemory
from palaver.engines.torch.hybrid_graphs import NoAttention, RowAttention, RowPasses
from palaver.engines.torch.library_decoder import LibraryDecoder, SlotCache
from palaver.engines.torch.media import MediaEncoder

if TYPE_CHECKING:  # it needs Triton
    from palaver.engines.torch.hybrid_kernels import LayerKernels

NO_ATTENTION = (((1, 1), (1, 1)),)
"""The keys and values of a model without attention: slots need some."""
MIN_ROWS = 4
"""Rows that are allocated at first."""
KINDS = ("conv_states", "recurrent_states")
"""The attributes of a cache's layer that hold states."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One state of a layer in the library's cache: where it is, and what a sequence takes in it."""

    layer: int
    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class HybridLayout:
    """What a sequence takes in the cache of a hybrid model."""

    kv: TensorLayout
    """Of the layers with attention."""
    attention_layers: tuple[int, ...]
    """The model's layers with attention, in order."""
    states: tuple[StateTensor, ...]


@torch.inference_mode()
def hybrid_layout(model: PreTrainedModel, ids: Tensor) -> HybridLayout:
    """From a pass over a few tokens. Raises UnsupportedModel where the cache holds anything else than keys and values
    of each token and states of one size."""
    cache = DynamicCache(config=model.config)
    model(input_ids=ids[None], use_cache=True, **{cache_parameter(model): cache})
    pairs, attention, states = [], [], []
    memory = TensorMemory(model.dtype, ids.device)
    for number, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is not None and values is not None:
            if keys.shape[2] != ids.shape[0] or values.shape[2] != ids.shape[0] or keys.dtype != values.dtype:
                raise UnsupportedModel("its cache doesn't hold a key and a value for each token")
            pairs.append(((keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])))
            attention.append(number)
            memory = TensorMemory(keys.dtype, keys.device)
        for kind in KINDS:
            found = getattr(layer, kind, {})
            states += [
                StateTensor(number, kind, index, tuple(state.shape[1:]), state.dtype)
                for index, state in found.items()
                if state is not None
            ]
    return HybridLayout(TensorLayout(tuple(pairs) or NO_ATTENTION, memory), tuple(attention), tuple(states))


def cache_parameter(model: PreTrainedModel) -> str:
    """The name of the parameter that takes the cache."""
    return "past_key_values" if "past_key_values" in inspect.signature(model.forward).parameters else "cache_params"


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentSnapshot:
    """A copy of the states of one sequence."""

    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class StateRows:
    """The recurrent states of the running sequences: a row for each of them in one tensor for each state. The rows in
    use are the first ones, so that a pass works on them in place. A row is copied when a sequence joins or leaves."""

    def __init__(self, states: Sequence[StateTensor], device: torch.device) -> None:
        self._states = states
        self._device = device
        self._slots: list[Slot[Tensor]] = []
        """The sequence of each row, by its KV slot."""
        self._rows: dict[Slot[Tensor], int] = {}
        self.row_bytes = sum(state.nbytes for state in states)
        self.version = 0
        """Changes with the sequences and with their rows."""
        self.on_resized: Callable[[], None] = lambda: None
        """Called before all rows move: views hold references to the old memory."""
        self.tensors = [self._zeros(state, 0) for state in states]

    @property
    def capacity(self) -> int:
        return int(self.tensors[0].shape[0])

    @property
    def nbytes(self) -> int:
        return self.capacity * self.row_bytes

    @property
    def full(self) -> bool:
        return len(self._slots) == self.capacity

    def resize(self, capacity: int) -> None:
        """Moves all rows to memory for so many of them."""
        assert capacity >= len(self._slots)
        self.on_resized()
        old = self.tensors
        self.version += 1
        try:
            for number, state in enumerate(self._states):
                tensor = self._zeros(state, capacity)
                tensor[: len(self._slots)] = old[number][: len(self._slots)]
                old[number] = tensor  # one after the other: only one of them exists twice
        except BaseException:
            smallest = min(tensor.shape[0] for tensor in old)
            self.tensors = [tensor[:smallest] for tensor in old]
            raise

    def clear(self) -> None:
        """Removes all sequences, and frees their memory."""
        self._slots, self._rows = [], {}
        self.resize(0)

    def erase_unused(self) -> None:
        """Erases what rows without a sequence still hold; their memory is freed if nothing runs."""
        if not self._slots:
            self.resize(0)
        for tensor in self.tensors:
            tensor[len(self._slots) :].zero_()

    def trim(self) -> None:
        """Frees the memory of rows without a sequence, except for one."""
        if self.capacity > len(self._slots) + 1:
            self.resize(len(self._slots) + 1)

    def add(self, slot: Slot[Tensor], snapshot: RecurrentSnapshot | None = None) -> None:
        """Adds a sequence that goes on after the snapshot. There must be a free row."""
        row = len(self._slots)
        assert row < self.capacity
        self._slots.append(slot)
        self._place(slot, row)
        for number, tensor in enumerate(self.tensors):
            if snapshot is None:
                tensor[row].zero_()
            else:
                tensor[row] = snapshot.tensors[number]

    def remove(self, slot: Slot[Tensor]) -> None:
        """Removes a sequence. The last row takes the place of its row."""
        row, last = self._rows.pop(slot), self._slots.pop()
        self.version += 1
        if last is not slot:
            for tensor in self.tensors:
                tensor[row] = tensor[len(self._slots)]
            self._place(last, row)

    def snapshot(self, slot: Slot[Tensor]) -> RecurrentSnapshot:
        row = self._rows[slot]
        return RecurrentSnapshot(tuple(tensor[row].clone() for tensor in self.tensors))

    def select(self, slots: Sequence[Slot[Tensor]], move: bool = True) -> list[int]:
        """The rows of these sequences, which are moved to the first rows unless `move` is False."""
        if move:
            behind = [slot for slot in slots if self._rows[slot] >= len(slots)]
            if behind:
                selected = set(slots)
                others = [slot for slot in self._slots[: len(slots)] if slot not in selected]
                for slot, other in zip(behind, others, strict=True):
                    self._swap(slot, other)
        return [self._rows[slot] for slot in slots]

    def _swap(self, first: Slot[Tensor], second: Slot[Tensor]) -> None:
        a, b = self._rows[first], self._rows[second]
        for tensor in self.tensors:
            held = tensor[a].clone()
            tensor[a] = tensor[b]
            tensor[b] = held
        self._place(first, b)
        self._place(second, a)

    def _place(self, slot: Slot[Tensor], row: int) -> None:
        self._slots[row] = slot
        self._rows[slot] = row
        self.version += 1

    def _zeros(self, state: StateTensor, capacity: int) -> Tensor:
        return torch.zeros((capacity, *state.shape), dtype=state.dtype, device=self._device)


class HybridCache(SlotCache):
    """The cache that the library's layers see: keys and values go to slots, and the states are views of rows."""

    def __init__(self, decoder: HybridDecoder, config: Any, states: Sequence[StateTensor]) -> None:
        super().__init__(decoder._write, decoder._row_offsets)
        self.layers = DynamicCache(config=config).layers
        self._states = states
        for state in states:
            layer = self.layers[state.layer]
            getattr(layer, f"is_{state.kind}_initialized")[state.index] = True
            if state.kind == "conv_states":
                layer.conv_kernel_size[state.index] = state.shape[-1]
        for number in {state.layer for state in states}:
            self.layers[number].device, self.layers[number].dtype = decoder.device, decoder.dtype

    def bind(self, views: Sequence[Tensor], has_previous: bool) -> None:
        """Sets the rows of a pass. `has_previous`: False before the first token of a sequence."""
        for state, view in zip(self._states, views, strict=True):
            layer = self.layers[state.layer]
            getattr(layer, state.kind)[state.index] = view
            layer.has_previous_state[state.index] = has_previous

    def unbind(self) -> None:
        for state in self._states:
            getattr(self.layers[state.layer], state.kind)[state.index] = None

    def keeps_views(self, views: Sequence[Tensor]) -> bool:
        """Whether the layers still hold these views: they must change states in place."""
        pairs = zip(self._states, views, strict=True)
        return all(getattr(self.layers[state.layer], state.kind)[state.index] is view for state, view in pairs)

    def __len__(self) -> int:
        return len(self.layers)


@dataclass(frozen=True, slots=True)
class _RowOrder:
    """How the rows of a decode pass follow from a batch, whose rows are ordered by slot."""

    batch: weakref.ref[ForwardBatch]
    version: int
    """Of the state rows."""
    views: list[Tensor]
    from_batch: Tensor | None
    """The batch's row for each row of states; None where both are in the same order."""
    to_batch: Tensor | None
    """The row of states for each of the batch's rows."""
    to_result: Tensor | None
    """The row of states for each sequence, in the order in which they were given."""
    batch_rows: list[int]
    """As `from_batch`, on the host."""


class HybridDecoder(LibraryDecoder):
    """Runs either the next tokens of one sequence, as one row of several tokens, or the next token of several
    sequences, as rows of one token each: recurrent layers know no other batches."""

    def __init__(self, model: PreTrainedModel, layout: HybridLayout, media: MediaEncoder | None = None) -> None:
        super().__init__(model, media=media)
        self.device, self.dtype = layout.kv.device, model.dtype
        self.layout = layout
        self.states = StateRows(layout.states, layout.kv.device)
        self._cache: HybridCache = HybridCache(self, model.config, layout.states)
        self._kv_layers = {number: index for index, number in enumerate(layout.attention_layers)}
        names = inspect.signature(model.forward).parameters
        self._cache_parameter = cache_parameter(model)
        self._takes_positions = "position_ids" in names
        self._order: _RowOrder | None = None
        self._rows: _RowOrder | None = None
        """The order of the pass that runs, if it decodes several sequences."""
        self.states.on_resized = self._drop_views
        self._passes: RowPasses | None = None
        """Decode passes as graphs; None where every operation is launched by itself."""
        self._kernels: LayerKernels | None = None
        """What takes the place of some layers of the model."""
        self._attention: RowAttention | None = None
        self._num_rows = 0
        """What attends in the pass that runs, if it is one of these, and its number of rows."""

    def use_graphs(self, capture: Capture, attention: RowAttention | None = None) -> None:
        """From now on decode passes are captured. Raises where attention has no kernels, as without Triton."""
        if attention is None and self._kv_layers:
            from palaver.engines.torch.slot_attention import SlotAttention  # it needs Triton

            attention = SlotAttention(self.layout.kv)
        attention = attention or NoAttention()
        self._passes = RowPasses(self._compute_rows, attention, capture)

    def drop_graphs(self) -> None:
        self._passes = None

    def use_kernels(self) -> None:
        """From now on kernels compute the layers that they know. Raises where there are none, as without Triton."""
        from palaver.engines.torch.hybrid_kernels import LayerKernels  # it needs Triton

        self._kernels = LayerKernels(self._model)
        self._kernels.attach()

    def drop_kernels(self) -> None:
        if self._kernels is not None:
            self._kernels.detach()
            self._kernels = None

    @property
    def uses_kernels(self) -> bool:
        return self._kernels is not None

    @property
    def uses_graphs(self) -> bool:
        """Whether decode passes were captured."""
        return self._passes is not None and self._passes.captured > 0

    def attach(self) -> None:
        if self._kv_layers:
            super().attach()

    def detach(self) -> None:
        self.drop_kernels()
        if self._kv_layers:
            super().detach()

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """The logits after each sequence's last token. The slots must have rows in `states`."""
        chunk = batch.chunks[0]
        if self._passes is not None and batch.is_decode and chunk.start and not batch.has_media:
            return self._replay(self._passes, batch)
        if len(batch.chunks) > 1:
            return self._decode(batch)
        (row,) = self.states.select([chunk.slot], move=False)
        views = [tensor[row : row + 1] for tensor in self.states.tensors]
        self._rows = None
        return self._in_place(views, chunk.start > 0, lambda: LibraryDecoder.__call__(self, batch))

    def _decode(self, batch: ForwardBatch) -> Tensor:
        assert batch.is_decode, "prompts are computed one at a time"
        assert not batch.has_media, "media are computed one sequence at a time"
        self._batch, self._rows = batch, self._row_order(batch)
        rows = self._rows.from_batch
        ids, positions = batch.ids, batch.inputs.rotary_positions
        if rows is not None:
            ids, positions = ids[rows], positions[rows]
        try:
            out = self._in_place(self._rows.views, True, lambda: self._call_model(ids[:, None], positions[:, None], 1))
        finally:
            del self._batch
        logits: Tensor = out.logits[:, -1]
        return logits if self._rows.to_result is None else logits[self._rows.to_result]

    def _replay(self, passes: RowPasses, batch: ForwardBatch) -> Tensor:
        """As `_decode`, in the order of states."""
        known, order = self._order, self._row_order(batch)
        if order is not known:
            passes.load([batch.chunks[row] for row in order.batch_rows])
        inputs = batch.inputs.stacked
        logits = passes.run(inputs if order.from_batch is None else inputs[:, order.from_batch], batch.max_position)
        return logits if order.to_result is None else logits[order.to_result]

    def _compute_rows(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The pass of a graph: over the first rows of states."""
        assert self._passes is not None
        self._attention, self._num_rows = self._passes.attention, len(ids)
        views = [tensor[: len(ids)] for tensor in self.states.tensors]
        try:
            out = self._in_place(views, True, lambda: self._call_model(ids[:, None], positions[:, None], 1))
        finally:
            self._attention = None
        logits: Tensor = out.logits[:, -1]
        return logits

    def _in_place(self, views: list[Tensor], has_previous: bool, run: Callable[[], Any]) -> Any:
        """Runs a pass over these rows of states, which it changes."""
        self._cache.bind(views, has_previous)
        out = run()
        if not self._cache.keeps_views(views):
            raise UnsupportedModel("it replaces its states")
        return out

    def _forward(self, batch: ForwardBatch, positions: Tensor) -> Any:
        return self._call_model(batch.ids[None], positions, batch.last_rows)

    def _call_model(self, ids: Tensor, positions: Tensor, logits_to_keep: Tensor | int) -> Any:
        options: dict[str, Any] = {self._cache_parameter: self._cache, "logits_to_keep": logits_to_keep}
        if self._takes_positions:
            options["position_ids"] = positions
        return self._model(input_ids=ids, use_cache=True, **options)

    def _drop_views(self) -> None:
        self._order = self._rows = None
        self._cache.unbind()
        if self._passes is not None:
            self._passes.clear()

    def _row_order(self, batch: ForwardBatch) -> _RowOrder:
        known = self._order
        if known is not None and known.batch() is batch and known.version == self.states.version:
            return known
        rows = self.states.select([chunk.slot for chunk in batch.chunks])
        given = dict(zip(batch.order, rows, strict=True))
        in_order = list(range(len(rows)))
        result = [given[i] for i in in_order]

        def index(numbers: list[int]) -> Tensor | None:
            return None if numbers == in_order else torch.tensor(numbers, device=self.device)

        from_batch = sorted(in_order, key=rows.__getitem__)
        views = [tensor[: len(rows)] for tensor in self.states.tensors]
        version = self.states.version
        self._order = _RowOrder(
            weakref.ref(batch), version, views, index(from_batch), index(rows), index(result), from_batch
        )
        return self._order

    def _row_offsets(self) -> Tensor:
        if self._attention is not None:
            return self._attention.positions[: self._num_rows, None]
        if self._rows is None:
            return super()._row_offsets()
        return self._by_states(self._batch.positions)[:, None]

    def _write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        number = self._kv_layers[layer]
        if self._attention is not None:
            self._layer = number
            self._attention.write(number, keys[:, :, 0], values[:, :, 0])
            return
        if self._rows is None:
            super()._write(number, keys, values)
            return
        self._layer = number
        self._batch.write(number, self._by_slots(keys[:, :, 0]), self._by_slots(values[:, :, 0]))

    def _attend_rows(self, query: Tensor, rule: Any, params: Any) -> Tensor:
        if self._attention is not None:
            return self._attention.attend(self._layer, query[:, :, 0], rule, params)[:, None]
        if self._rows is None:
            return super()._attend_rows(query, rule, params)
        out = self._batch.attend(self._layer, self._by_slots(query[:, :, 0]), rule, params)
        return self._by_states(out)[:, None]

    def _by_slots(self, rows: Tensor) -> Tensor:
        """From the order of states to that of the batch."""
        return rows if self._rows is None or self._rows.to_batch is None else rows[self._rows.to_batch]

    def _by_states(self, rows: Tensor) -> Tensor:
        """From the order of the batch to that of states."""
        return rows if self._rows is None or self._rows.from_batch is None else rows[self._rows.from_batch]


def candidate_rows(capacity: int) -> tuple[int, int]:
    """How many rows to have where so many are in use, the preferred first."""
    return max(MIN_ROWS, 2 * capacity), capacity + 1
