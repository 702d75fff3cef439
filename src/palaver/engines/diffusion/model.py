"""The passes of a diffusion model: the transformers library's code, with attention of our own over each conversation.

A pass has segments, one for each conversation: its next tokens, all as rows of one batch. Attention is computed for
each segment alone, so conversations of any length share a pass without padding.

The keys and values of a context are kept (`ContextKeyValues`). A segment reads its tokens either causally, which
extends the context, or in full, as a block that sees the context and itself and leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from palaver.engines.core.runner import UnsupportedModel
from palaver.engines.torch.library_decoder import SlotCache
from palaver.engines.torch.loader import quiet

FULL, SLIDING = "full_attention", "sliding_attention"
"""The kinds of layers, as `layer_types` of a configuration names them."""
GROWTH = 512
"""Room for so many more tokens is allocated at once."""


class ContextKeyValues:
    """The keys and values of the tokens that a conversation has finished."""

    def __init__(self) -> None:
        self.length = 0
        """Tokens read so far."""
        self.last_logits: Tensor | None = None
        """The logits after the last of them."""
        self._layers: list[list[Tensor]] = []

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes keys and values (heads, tokens, size) behind the context; returns those of the context and them."""
        end = self.length + keys.shape[1]
        if layer == len(self._layers):
            self._layers.append([_buffer(keys, end), _buffer(values, end)])
        buffers = self._layers[layer]
        for at, new in enumerate((keys, values)):
            if buffers[at].shape[1] < end:
                larger = _buffer(new, end)
                larger[:, : self.length] = buffers[at][:, : self.length]
                buffers[at] = larger
            buffers[at][:, self.length : end] = new
        return buffers[0][:, :end], buffers[1][:, :end]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for layer in self._layers for buffer in layer)

    def copy(self, length: int) -> ContextKeyValues:
        """A context of the first `length` tokens, with memory of its own and without logits."""
        copied = ContextKeyValues()
        copied.length = length
        for layer in self._layers:
            copied._layers.append([_copied(buffer, length) for buffer in layer])
        return copied


def _buffer(like: Tensor, length: int) -> Tensor:
    rounded = -(-length // GROWTH) * GROWTH
    return like.new_empty((like.shape[0], rounded, like.shape[2]))


def _copied(buffer: Tensor, length: int) -> Tensor:
    found = _buffer(buffer, length)
    found[:, :length] = buffer[:, :length]
    return found


@dataclass(frozen=True, slots=True)
class PassSegment:
    """The next tokens of one conversation in a pass."""

    context: ContextKeyValues
    ids: Sequence[int]
    rows: slice
    """The rows whose logits are wanted."""
    causal: bool = False
    """Whether each token sees only those before it; the context then grows by these tokens."""


class DiffusionModel:
    """Runs passes. Registers an attention implementation under a name of its own."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._segments: Sequence[PassSegment] = ()
        self._cache = SlotCache(self._note_layer, self._row_offsets)
        self._positions: Tensor
        self._layer = 0
        self._windows: set[int] = set()
        self._name = f"palaver_diffusion_{id(self):x}"
        AttentionInterface.register(self._name, self._attend)
        AttentionMaskInterface.register(self._name, _no_mask)
        with quiet():
            model.set_attn_implementation(self._name)
        if model.config._attn_implementation != self._name:
            raise UnsupportedModel("its attention can't be replaced")
        self.window = self._probe_window()
        """The sliding window of its layers. Within it a token sees everything, so a text must fit into it."""

    @property
    def device(self) -> torch.device:
        return self._model.device

    def _probe_window(self) -> int | None:
        """The shortest window of a layer, from a pass of one token. Raises UnsupportedModel for other attentions."""
        config = self._model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        if other := kinds - {FULL, SLIDING}:
            raise UnsupportedModel(f"it has layers of the kind {min(other)}")
        if SLIDING in kinds:
            self._windows.add(config.sliding_window)
        with torch.inference_mode():
            self.run([PassSegment(ContextKeyValues(), (0,), slice(0, 1))])
        return min(self._windows, default=None)

    def close(self) -> None:
        for table in (AttentionInterface, AttentionMaskInterface):
            table._global_mapping.pop(self._name, None)

    def run(self, segments: Sequence[PassSegment]) -> list[Tensor]:
        """The logits of the wanted rows of each segment, in 32 bits."""
        ids = [token for segment in segments for token in segment.ids]
        starts = [segment.context.length for segment in segments]
        positions = [s + at for s, segment in zip(starts, segments, strict=True) for at in range(len(segment.ids))]
        wanted, counts, first = [], [], 0
        for segment in segments:
            rows = range(len(segment.ids))[segment.rows]
            wanted += [first + row for row in rows]
            counts.append(len(rows))
            first += len(segment.ids)
        inputs = torch.tensor([ids, positions], device=self.device)
        self._segments, self._positions = segments, inputs[1]
        try:
            out = self._model(
                input_ids=inputs[:1],
                position_ids=inputs[1:],
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=self.device),
            )
        finally:
            self._segments = ()
        logits: Tensor = out.logits[0]
        parts = list((logits if len(logits) == len(wanted) else logits[wanted]).float().split(counts))
        for segment, part in zip(segments, parts, strict=True):
            if segment.causal:
                segment.context.length += len(segment.ids)
                segment.context.last_logits = part[-1] if len(part) else None
        return parts

    def _note_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._layer = layer

    def _row_offsets(self) -> Tensor:
        return self._positions - torch.arange(len(self._positions), device=self.device)

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **settings: Any
    ) -> tuple[Tensor, None]:
        """Attention of rows (1, heads, rows, size), each segment over its own context and rows."""
        if any(settings.get(name) is not None for name in ("softcap", "s_aux")):
            raise UnsupportedModel("it has an attention that diffusion doesn't know")
        if settings.get("sliding_window") is not None:
            self._windows.add(settings["sliding_window"])
        found, at = [], 0
        for segment in self._segments:
            rows = slice(at, at + len(segment.ids))
            at = rows.stop
            keys, values = segment.context.write(self._layer, key[0, :, rows], value[0, :, rows])
            mask = _causal_mask(len(segment.ids), keys.shape[1], query.device) if segment.causal else None
            found.append(
                F.scaled_dot_product_attention(
                    query[:, :, rows],
                    keys[None],
                    values[None],
                    mask,
                    scale=settings.get("scaling"),
                    enable_gqa=True,
                )
            )
        joined = found[0] if len(found) == 1 else torch.cat(found, 2)
        return joined.transpose(1, 2).contiguous(), None


def _causal_mask(rows: int, keys: int, device: torch.device) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool, device=device).tril(keys - rows)


def _no_mask(*_: Any, **__: Any) -> None:
    return None
