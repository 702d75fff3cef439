"""The transformers library's model code, run over lanes: an attention, a mask and a cache of ours put under it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from palaver.engines.torch.attention import MaskRule
from palaver.engines.torch.attention_kernels import AttentionHead, pair_bytes
from palaver.engines.torch.batch import ForwardBatch
from palaver.engines.torch.kv_cache import KVLayout
from palaver.engines.torch.loader import quiet
from palaver.engines.torch.rope import LongRope


class UnsupportedModel(Exception):
    """The model does something with its cache or its masks that lanes can't follow."""


class LibraryDecoder:
    """Runs a plan through the model. One name in the library's tables leads back here."""

    def __init__(self, model: PreTrainedModel, rope: LongRope | None = None) -> None:
        self._model = model
        self._rope = rope
        self._plan: ForwardBatch
        self._cache = _LaneCache(self._write, self._seen)
        self._layer = 0
        self.pair_bytes = 0
        """What attention takes for each pair of a query and a key, as seen so far."""
        self._before = model.config._attn_implementation
        self._name = f"palaver_{id(self):x}"

    def attach(self) -> None:
        if self._rope is not None:
            self._rope.attach()
        AttentionInterface.register(self._name, self._attend)
        AttentionMaskInterface.register(self._name, _mask)
        with quiet():
            self._model.set_attn_implementation(self._name)
        if self._model.config._attn_implementation != self._name:
            raise UnsupportedModel("its attention can't be replaced")

    def detach(self) -> None:
        if self._rope is not None:
            self._rope.detach()
        with quiet():
            self._model.set_attn_implementation(self._before)
        for table in (AttentionInterface, AttentionMaskInterface):
            table._global_mapping.pop(self._name, None)

    def __call__(self, plan: ForwardBatch) -> Tensor:
        """The logits after each sequence's last token."""
        self._plan = plan
        if self._rope is not None:
            self._rope.use(plan.long)
        try:
            out = self._model(
                input_ids=plan.ids[None],
                position_ids=plan.positions[None],
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=plan.last,
            )
        finally:
            del self._plan  # it holds on to lanes
        logits: Tensor = out.logits[0]
        return logits if logits.shape[0] == plan.last.shape[0] else logits[plan.last]

    def prepare(self, length: int) -> tuple[Tensor, ...]:
        """It looks up nothing that is ever replaced."""
        return ()

    def _seen(self) -> Tensor:
        """How many tokens come before each row, less the rows before it: added to the rows' numbers it gives the
        positions, as the length of a cache would where one sequence is computed."""
        return self._plan.positions - torch.arange(self._plan.positions.shape[0], device=self._plan.positions.device)

    def _write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._layer = layer
        self._plan.write(layer, keys[0].transpose(0, 1), values[0].transpose(0, 1))

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
            raise UnsupportedModel("it masks attention in a way of its own")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        rule = MaskRule() if attention_mask is None else attention_mask
        head = AttentionHead(scale, softcap, s_aux)
        needed = pair_bytes(query.shape[1], key.shape[1], query.dtype, query.device, head)
        self.pair_bytes = max(self.pair_bytes, needed)
        return self._plan.attend(self._layer, query[0].transpose(0, 1), rule, head)[None], None


def _mask(mask_function: Callable[..., Tensor], **_: Any) -> MaskRule:
    return MaskRule(None if mask_function is causal_mask_function else mask_function)


class LateCache(DynamicCache):
    """An empty cache that looks as if so many tokens had been seen, as one does whose window has moved on."""

    def __init__(self, seen: int) -> None:
        super().__init__()
        self._seen = seen

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._seen + super().get_seq_length(layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return super().get_seq_length(layer_idx) + length, self._seen


class _LaneCache(Cache):
    """Looks empty to the library: where tokens stand is told by their positions, what they see by our masks."""

    def __init__(self, write: Callable[[int, Tensor, Tensor], None], seen: Callable[[], Tensor]) -> None:
        super().__init__(layers=[])
        self._write = write
        self._seen = seen

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self._write(layer_idx, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int | None = None) -> int | Tensor:
        """A layer that asks for its own length computes positions from it, as Llama 4 does."""
        return 0 if layer_idx is None else self._seen()

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
def kv_layout(model: PreTrainedModel, ids: Tensor) -> KVLayout:
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
    return KVLayout(tuple(layers), cache.layers[0].keys.dtype, cache.layers[0].keys.device)
