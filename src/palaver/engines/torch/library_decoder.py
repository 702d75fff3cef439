"""The transformers library's model code over KV-cache slots: its attention, masks and cache are replaced by ours, and
so is the choice between the two sets of frequencies of longrope."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, PreTrainedModel
from transformers.masking_utils import causal_mask_function
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from palaver.engines.core.runner import UnsupportedModel
from palaver.engines.torch.attention import MaskRule
from palaver.engines.torch.attention_functions import AttentionParams, pair_bytes
from palaver.engines.torch.batch import ForwardBatch
from palaver.engines.torch.devices import TensorLayout, TensorMemory
from palaver.engines.torch.loader import quiet
from palaver.engines.torch.media import MediaEncoder, find_decoder, media_rows
from palaver.engines.torch.plain_decoder import FusedDecoder, interleave_halves


class LibraryDecoder:
    """Runs a batch through the library's model. Registers an attention implementation under a name of its own."""

    def __init__(self, model: PreTrainedModel, rope: LongRope | None = None, media: MediaEncoder | None = None) -> None:
        self._model = model
        self.interleaves = False
        """Whether queries and keys have the two halves of each head interleaved, as in `FusedDecoder`."""
        self._decoder: Any = model if media is None else find_decoder(model)
        """What attention is replaced in: encoders of media keep their own."""
        self._media = media
        self._selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._rope = rope
        self._batch: ForwardBatch
        self._cache = SlotCache(self._write, self._row_offsets)
        self._layer = 0
        self.pair_bytes = 0
        """The most memory that attention took for a pair of a query and a key so far."""
        self.recorded_attention: dict[int, tuple[MaskRule, AttentionParams]] | None = None
        """If not None, gets what each layer attends with."""
        self._original_attention = self._decoder.config._attn_implementation
        self._name = f"palaver_{id(self):x}"

    def attach(self) -> None:
        if self._rope is not None:
            self._rope.attach()
        AttentionInterface.register(self._name, self._attend)
        AttentionMaskInterface.register(self._name, _mask)
        with quiet():
            self._set_attention(self._name)
        if self._decoder.config._attn_implementation != self._name:
            raise UnsupportedModel("its attention can't be replaced")

    def detach(self) -> None:
        if self._rope is not None:
            self._rope.detach()
        with quiet():
            self._set_attention(self._original_attention)
        for table in (AttentionInterface, AttentionMaskInterface):
            table._global_mapping.pop(self._name, None)

    def _set_attention(self, name: str) -> None:
        """Not in encoders of media that are parts of the decoder, as in Phi-4 multimodal."""
        self._decoder.set_attn_implementation(name if self._media is None else {"": name})

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """The logits after each sequence's last token."""
        self._batch = batch
        if self._rope is not None:
            self._rope.use(batch.long_rope)
        try:
            if self._media is None or not batch.has_media:
                out = self._forward(batch, batch.inputs.rotary_positions[None])
            else:
                rows = media_rows(batch, self._media.dimensions)
                one_each = batch.inputs.rotary_positions[None]
                positions = one_each if rows.positions is None else rows.positions[:, None]
                with self._media.injected(rows.items):
                    out = self._forward(batch, positions)
        finally:
            del self._batch  # it holds references to pools
        logits: Tensor = out.logits[0]
        if self._selects_rows and logits.shape[0] == batch.last_rows.shape[0]:
            return logits
        return logits[batch.last_rows]

    def _forward(self, batch: ForwardBatch, positions: Tensor) -> Any:
        return self._model(
            input_ids=batch.ids[None],
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=batch.last_rows,
        )

    def prepare(self, length: int) -> tuple[Tensor, ...]:
        """The library's model has no tables that are replaced."""
        return ()

    def _row_offsets(self) -> Tensor:
        """The position of each row less its index: added to row indices it gives positions, as the length of a cache
        does where one sequence is computed."""
        return self._batch.positions - torch.arange(self._batch.positions.shape[0], device=self._batch.positions.device)

    def _write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._layer = layer
        self._batch.write(layer, self._ordered(keys[0].transpose(0, 1)), values[0].transpose(0, 1))

    def _ordered(self, heads: Tensor) -> Tensor:
        return interleave_halves(heads).flatten(-2) if self.interleaves else heads

    def _attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: MaskRule | Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if isinstance(attention_mask, Tensor) or not getattr(module, "is_causal", True):
            raise UnsupportedModel("it masks attention in its own way")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        rule = MaskRule() if attention_mask is None else attention_mask
        params = AttentionParams(scale, softcap, s_aux)
        needed = pair_bytes(query.shape[1], key.shape[1], query.dtype, query.device, params)
        self.pair_bytes = max(self.pair_bytes, needed)
        if self.recorded_attention is not None:
            self.recorded_attention[self._layer] = (rule, params)
        return self._attend_rows(query, rule, params), None

    def _attend_rows(self, query: Tensor, rule: MaskRule, params: AttentionParams) -> Tensor:
        return self._batch.attend(self._layer, self._ordered(query[0].transpose(0, 1)), rule, params)[None]


class TextAndMediaDecoder:
    """For models that take media and whose text decoder is a plain one: passes over text take few operations, and the
    library's code computes those with media. Both use the same slots."""

    def __init__(self, plain: FusedDecoder, library: LibraryDecoder) -> None:
        self._plain = plain
        self._library = library
        library.interleaves = plain.interleaves

    def __call__(self, batch: ForwardBatch) -> Tensor:
        return self._library(batch) if batch.has_media else self._plain(batch)

    def alternating(self) -> Callable[[ForwardBatch], Tensor]:
        """Passes by the library's code and by few operations in turn, to compare their slots."""
        decoders: Iterator[Callable[[ForwardBatch], Tensor]] = itertools.cycle((self._library, self._plain))
        return lambda batch: next(decoders)(batch)

    def prepare(self, length: int) -> tuple[Tensor, ...]:
        return self._plain.prepare(length)

    @property
    def pair_bytes(self) -> int:
        return max(self._plain.pair_bytes, self._library.pair_bytes)


def _mask(mask_function: Callable[..., Tensor], **_: Any) -> MaskRule:
    return MaskRule(None if mask_function is causal_mask_function else mask_function)


class OffsetCache(DynamicCache):
    """An empty cache that reports a length, as a sliding window does whose tokens have left it."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length + super().get_seq_length(layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return super().get_seq_length(layer_idx) + length, self._length


class SlotCache(Cache):
    """Looks empty to the library: position ids say where tokens stand, and our masks what they see."""

    def __init__(self, write: Callable[[int, Tensor, Tensor], None], row_offsets: Callable[[], Tensor]) -> None:
        super().__init__(layers=[])
        self._write = write
        self._row_offsets = row_offsets

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self._write(layer_idx, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int | None = None) -> int | Tensor:
        """A layer that asks for its own length, as in Llama 4, computes positions from it."""
        return 0 if layer_idx is None else self._row_offsets()

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return length, 0

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    @property
    def is_compileable(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0


@torch.inference_mode()
def kv_layout(model: PreTrainedModel, ids: Tensor) -> TensorLayout:
    """What one token takes in the model's cache. Raises where the cache isn't a key and a value in every layer."""
    cache = DynamicCache()
    model(input_ids=ids[None], past_key_values=cache, use_cache=True)
    layers = []
    for layer in cache.layers:
        keys, values = layer.keys, layer.values
        if keys.shape[2] != ids.shape[0] or values.shape[2] != ids.shape[0] or keys.dtype != values.dtype:
            raise UnsupportedModel("its cache doesn't hold a key and a value for each token")
        layers.append(((keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])))
    if len(layers) != model.config.get_text_config().num_hidden_layers:
        raise UnsupportedModel("its layers share their caches")
    keys = cache.layers[0].keys
    return TensorLayout(tuple(layers), TensorMemory(keys.dtype, keys.device))


ROPE_TYPE = "longrope"


class LongRope:
    """The two sets of rotary frequencies of a model with longrope (Phi-3 and its successors for 128k tokens); one of
    them is active: one for texts up to the length the model was first trained for, one for longer texts.

    The transformers library picks a set for a whole pass by its greatest position. Here the length of each sequence
    decides, and sequences of different sets never share a pass."""

    def __init__(self, modules: list[Any], original_length: int) -> None:
        self.original_length = original_length
        self._modules = modules
        self._short = [module.original_inv_freq for module in modules]
        self._long = [_long_frequencies(module, original_length) for module in modules]

    def attach(self) -> None:
        """Stops the library from changing the frequencies."""
        for module in self._modules:
            module.rope_type = "default"

    def detach(self) -> None:
        for module in self._modules:
            module.rope_type = ROPE_TYPE

    def use(self, long: bool) -> None:
        for module, frequencies in zip(self._modules, self._long if long else self._short, strict=True):
            module.inv_freq = frequencies


def find_longrope(model: PreTrainedModel) -> LongRope | None:
    """None where the model has no longrope embeddings, or several with different original lengths."""
    modules = [module for module in model.modules() if getattr(module, "rope_type", None) == ROPE_TYPE]
    lengths = {module.config.rope_parameters.get("original_max_position_embeddings") for module in modules}
    return LongRope(modules, lengths.pop()) if len(lengths) == 1 else None


def _long_frequencies(module: nn.Module, original_length: int) -> Any:
    frequencies, _ = ROPE_INIT_FUNCTIONS[ROPE_TYPE](
        module.config, module.original_inv_freq.device, seq_len=original_length + 1
    )
    return frequencies
