"""The plain decoder in few operations, for any plan; only used after a probe found the model's own logits again."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from palaver.engines.torch.attention import MaskRule
from palaver.engines.torch.plain import Layer, PlainDecoder, Turns, in_pairs
from palaver.engines.torch.planning import Plan
from palaver.engines.torch.scoring import Head, Room, pair_bytes


class FusedDecoder:
    """Runs a plan in about 25 operations a layer."""

    def __init__(self, parts: PlainDecoder) -> None:
        self._parts = parts
        self._head = Head(parts.scale, room=Room() if parts.embedding.device.type == "cpu" else None)
        kind = parts.embedding.dtype, parts.embedding.device
        self.pair_bytes = pair_bytes(parts.heads, parts.shared, *kind, self._head)

    def __call__(self, plan: Plan) -> Tensor:
        """The logits after each sequence's last token; none where they are not asked for."""
        parts = self._parts
        x = F.embedding(plan.ids, parts.embedding)
        turns = parts.rotation.at(plan.positions, plan.furthest)
        rule = MaskRule()
        for index, layer in enumerate(parts.layers):
            queries, keys, values = self._projected(layer, x, turns)
            plan.write(index, keys, values)
            if index == len(parts.layers) - 1:  # from here on all leads to logits, and to nothing else
                if not plan.asked:
                    return x[:0]
                if plan.ends is not None:
                    rows = plan.last[list(plan.ends.order)]
                    x, queries, plan = x[rows], queries[rows], plan.ends
            seen = plan.attend(index, queries, rule, self._head)
            x = layer.output.onto(x, seen.reshape(x.shape[0], -1))
            both = layer.gate_up(layer.after(x))
            x = layer.down.onto(x, F.silu(both[:, : parts.inner]).mul_(both[:, parts.inner :]))
        if plan.picks:
            x = x[plan.last]
        return parts.logits(parts.norm(x))

    def prepare(self, length: int) -> tuple[Tensor, ...]:
        """Makes all that passes over so many tokens will look up, and gives what of it may be replaced later."""
        return self._parts.rotation.tables(min(length - 1, self._parts.most))

    def _projected(self, layer: Layer, x: Tensor, turns: Turns) -> tuple[Tensor, Tensor, Tensor]:
        heads, turning = self._parts.heads, self._parts.heads + self._parts.shared
        mixed = layer.project(layer.before(x)).view(x.shape[0], -1, self._parts.size)
        turned = self._turned(layer, mixed[:, :turning], turns)
        return turned[:, :heads], turned[:, heads:], mixed[:, turning:]

    def _turned(self, layer: Layer, mixed: Tensor, turns: Turns) -> Tensor:
        norm, rotation = layer.queries_keys, self._parts.rotation
        if norm is None:
            return rotation.turn(mixed, turns)
        if isinstance(turns, tuple):
            return rotation.turn(norm(mixed), turns)
        # the weight goes first: the product takes its layout, in which pairs lie side by side
        scaled = torch.mul(layer.paired_weight, in_pairs(norm.unscaled(mixed)))
        return rotation.turn_pairs(scaled, turns)
