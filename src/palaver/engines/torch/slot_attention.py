"""Attention of the next token of sequences whose slots may be anywhere, by the kernels of `attention_kernels.py`: their
addresses are in tables on the device, so that a captured pass serves any sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from palaver.engines.core.runner import UnsupportedModel
from palaver.engines.torch import attention_kernels, kernel_functions
from palaver.engines.torch.attention import MaskRule
from palaver.engines.torch.attention_functions import AttentionParams
from palaver.engines.torch.batch import SequenceChunk
from palaver.engines.torch.cuda_step import attention_programs, slot_address
from palaver.engines.torch.device_changes import to_device
from palaver.engines.torch.devices import TensorLayout
from palaver.engines.torch.step_weights import HeadShape

FIRST_ROWS, FIRST_TOKENS = 4, 4096
"""Sequences, and tokens of the longest of them, that the buffers have room for at first."""


class SlotAttention:
    """A `RowAttention`. Raises UnsupportedModel for keys and values that the kernels don't know."""

    positions: Tensor

    def __init__(self, layout: TensorLayout) -> None:
        ((self._kv_heads, self._size), *others) = {shape for pair in layout.layer_shapes for shape in pair}
        if others or self._size not in (32, 64, 128, 256):
            raise UnsupportedModel("keys and values in sizes that the kernels don't know")
        self._layout = layout
        self._capacity = FIRST_TOKENS
        self._table = self._new_table(FIRST_ROWS)
        self._tiles = self._sums = torch.empty(0, device=layout.device)
        self._new: tuple[Tensor, Tensor] | None = None
        """The keys and values of the new tokens, until the layer attends."""
        half, device = self._size // 2, layout.device
        self._cos, self._sin = torch.ones(1, half, device=device), torch.zeros(1, half, device=device)
        self._gain = torch.ones(self._size, dtype=layout.dtype, device=device)
        """No rotation and no norm: the model's own code did both."""

    def load(self, chunks: Sequence[SequenceChunk]) -> bool:
        moves = len(chunks) > self._table.shape[1]
        if moves:
            self._table = self._new_table(2 * len(chunks))
            self._drop_tiles()
        addresses = np.array([slot_address(chunk) for chunk in chunks], dtype=np.int64)
        self._table[:3, : len(chunks)].copy_(to_device(np.ascontiguousarray(addresses.T), self._layout.device))
        return moves

    def make_room(self, tokens: int) -> bool:
        if tokens <= self._capacity:
            return False
        self._capacity = 2 * tokens
        self._drop_tiles()
        return True

    def _new_table(self, rows: int) -> Tensor:
        """Addresses as in `slot_address`, and rotary positions: all 0."""
        return torch.zeros(4, rows, dtype=torch.int64, device=self._layout.device)

    def _drop_tiles(self) -> None:
        self._tiles = self._sums = torch.empty(0, device=self._layout.device)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._new = keys, values

    def attend(self, layer: int, queries: Tensor, rule: MaskRule, params: AttentionParams) -> Tensor:
        if not rule.causal:
            raise UnsupportedModel("it masks attention in its own way")
        assert self._new is not None, "keys and values come first"
        qkv, self._new = torch.cat((queries, *self._new), 1), None
        heads = HeadShape(queries.shape[1], self._kv_heads, self._size, norm=False)
        rows, out = len(qkv), torch.empty_like(queries, memory_format=torch.contiguous_format)
        self._reserve_tiles(heads)
        *addresses, no_rotation = self._table
        tables = (*addresses, self.positions, no_rotation, self._cos, self._sin, self._gain, self._gain)
        attention_kernels.rotate_and_write(
            qkv,
            addresses,
            self.positions,
            (no_rotation, self._cos, self._sin),
            (self._gain, self._gain),
            layer,
            0.0,
            heads.sizes,
            norm=False,
        )
        attention_kernels._attend[(rows * heads.kv_heads, programs := attention_programs(rows))](
            qkv,
            *tables,
            self._tiles,
            self._sums,
            layer,
            self._entries,
            params.scale,
            0.0,
            0,
            params.softcap or 1.0,
            PROGRAMS=programs,
            NORM=False,
            ROTATED=True,
            WINDOW=False,
            SOFTCAP=params.softcap is not None,
            STAGES=2,
            **heads.sizes,
            **kernel_functions.launch_options(False, num_warps=4),
        )
        sizes = heads.sizes
        attention_kernels.join_tiles(
            self._tiles, self._sums, self.positions, params.sinks, out, rows, self._entries, None, sizes, pdl=False
        )
        return out

    @property
    def _entries(self) -> int:
        """Tiles of the longest sequence."""
        return -(-self._capacity // attention_kernels.TILE)

    def _reserve_tiles(self, heads: HeadShape) -> None:
        """In the first pass after memory was dropped, which is not captured."""
        entries = self._table.shape[1] * heads.kv_heads * self._entries * heads.padded_group
        if self._sums.numel() < entries * 2:
            self._tiles = torch.empty(entries * heads.size, device=self._layout.device)
            self._sums = torch.empty(entries * 2, device=self._layout.device)
