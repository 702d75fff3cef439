"""The parts of a plain decoder, loaded by torch, for compiled steps."""

from __future__ import annotations

from palaver.engines.compiled.build import Library
from palaver.engines.compiled.decoder import CompiledDecoder, DecoderSizes, RotaryTable
from palaver.engines.compiled.weights import DecoderWeights, LayerWeights, Norm, Projection, Weight
from palaver.engines.core.runner import UnsupportedModel
from palaver.engines.torch.decoders.plain import DecoderLayer, Linear, PlainDecoder, RMSNorm


def compile_decoder(parts: PlainDecoder, library: Library, max_threads: int) -> CompiledDecoder:
    """Raises UnsupportedModel for models that compiled steps can't compute."""
    if parts.embedding.device.type != "cpu" or not parts.embedding.is_contiguous():
        raise UnsupportedModel("compiled steps need float32 on the CPU")
    weights = DecoderWeights(
        embedding=parts.embedding.numpy(),
        layers=(_layer(layer, parts.intermediate_size) for layer in parts.layers),
        norm=_norm(parts.norm),
        lm_head=_projection(parts.lm_head),
    )
    rotary = RotaryTable(parts.rotary.frequencies, parts.max_position)
    sizes = DecoderSizes(parts.num_heads, parts.num_kv_heads, parts.head_dim, parts.intermediate_size, parts.scale)
    return CompiledDecoder(weights, sizes, rotary, library, max_threads)


def _layer(layer: DecoderLayer, intermediate_size: int) -> LayerWeights:
    return LayerWeights(
        input_norm=_norm(layer.input_norm),
        qkv=_projection(layer.qkv_proj),
        qk_norm=None if layer.qk_norm is None else _norm(layer.qk_norm),
        output=_projection(layer.o_proj),
        post_attention_norm=_norm(layer.post_attention_norm),
        gate=_projection(layer.gate_up_proj, 0, intermediate_size),
        up=_projection(layer.gate_up_proj, intermediate_size, 2 * intermediate_size),
        down=_projection(layer.down_proj),
    )


def _norm(norm: RMSNorm) -> Norm:
    return Norm(norm.weight.numpy(), norm.epsilon)


def _projection(linear: Linear, start: int = 0, stop: int | None = None) -> Projection:
    """The outputs from `start` to `stop`."""
    bias = None if linear.bias is None else linear.bias[start:stop].numpy()
    return Projection(Weight(linear.weight[:, start:stop].t().numpy(), "float32"), bias)
