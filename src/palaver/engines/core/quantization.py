"""Quantised checkpoints of plain decoders that are read without the packages that wrote them: which tensors take the
place of a linear layer's weights.

A configuration is accepted only if all of its settings that matter are known. Any doubt is an UnsupportedModel: the
transformers library then loads the model, with the package of its format."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from palaver.engines.core.runner import UnsupportedModel

BITS_PER_WORD = 32
IGNORED = ("input_scale", "input_zero_point")
"""Of activations, which are not rounded here."""
TYPES = frozenset({"F8_E4M3", "I8", "I32", "I64"})
"""Types of tensors beside floats."""
TensorShapes = dict[str, tuple[tuple[int, ...], ...]]
"""The shapes that each tensor may have."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of linear layers are stored."""

    method: str
    """As the transformers library names it: fp8, compressed-tensors, gptq or awq."""
    packed: bool
    """Whether several numbers share an integer of 32 bits."""
    bits: int
    group: int
    """How many inputs of an output share a scale; 0: all."""
    block: tuple[int, int] | None = None
    """The outputs and inputs that share a scale, where scales are of blocks."""
    symmetric: bool = True
    """Whether no zero points are stored."""
    zero_offset: int = 0
    """What is added to stored zero points."""

    def tensor_shapes(self, module: str, outputs: int, inputs: int, found: Collection[str]) -> TensorShapes | None:
        """The tensors of a linear layer, with the shapes that each may have; None if the layer is not quantised."""
        if f"{module}.{self._mark}" not in found:
            return None
        shapes = self._shapes(outputs, inputs)
        if self.method == "gptq" and f"{module}.g_idx" in found:
            shapes["g_idx"] = ((inputs,),)
        return {f"{module}.{name}": allowed for name, allowed in shapes.items()}

    @property
    def _mark(self) -> str:
        """The last part of the name of a tensor that only quantised layers have."""
        if not self.packed:
            return "weight_scale_inv" if self.method == "fp8" else "weight_scale"
        return "weight_packed" if self.method == "compressed-tensors" else "qweight"

    def _shapes(self, outputs: int, inputs: int) -> TensorShapes:
        """By the last part of the name."""
        if not self.packed:
            return {self._mark: self._scale_shapes(outputs, inputs), "weight": ((outputs, inputs),)}
        groups = _divide(inputs, self.group) if self.group else 1
        words, columns = _divide(inputs * self.bits, BITS_PER_WORD), _divide(outputs * self.bits, BITS_PER_WORD)
        if self.method == "compressed-tensors":
            zeros: TensorShapes = {} if self.symmetric else {"weight_zero_point": ((columns, groups),)}
            packed = {"weight_packed": ((outputs, words),), "weight_scale": ((outputs, groups),)}
            return {**packed, "weight_shape": ((2,),), **zeros}
        weight = (words, outputs) if self.method == "gptq" else (inputs, columns)
        return {"qweight": (weight,), "qzeros": ((groups, columns),), "scales": ((groups, outputs),)}

    def _scale_shapes(self, outputs: int, inputs: int) -> tuple[tuple[int, ...], ...]:
        if self.block is not None:
            rows, columns = self.block
            return ((-(-outputs // rows), -(-inputs // columns)),)
        if self.group:
            return ((outputs, _divide(inputs, self.group)),)
        return (outputs, 1), (outputs,), (1,), (1, 1), ()


def _divide(number: int, by: int) -> int:
    _require(number % by == 0, "sizes that don't fit its groups of weights")
    return number // by


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """None if the weights are plain. Raises UnsupportedModel for formats that are not read here."""
    settings = config.get("quantization_config")
    if settings is None:
        return None
    _require(isinstance(settings, Mapping), "an unknown quantisation")
    readers = {"fp8": _read_fp8, "compressed-tensors": _read_compressed, "gptq": _read_gptq, "awq": _read_awq}
    reader = readers.get(str(settings.get("quant_method")))
    if reader is None:
        raise UnsupportedModel("it has quantised weights of another format")
    return reader(settings)


def _read_fp8(settings: Mapping[str, Any]) -> Quantization:
    block = settings.get("weight_block_size")
    known = isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    _require(known and settings.get("activation_scheme", "dynamic") == "dynamic", "an unknown quantisation")
    _require(settings.get("fmt", "e4m3") == "e4m3", "an unknown quantisation")
    assert block is not None
    return Quantization("fp8", packed=False, bits=8, group=0, block=(block[0], block[1]))


def _read_compressed(settings: Mapping[str, Any]) -> Quantization:
    groups = settings.get("config_groups")
    _require(isinstance(groups, Mapping) and len(groups) == 1, "an unknown quantisation")
    assert isinstance(groups, Mapping)
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, Mapping) else None
    _require(isinstance(weights, Mapping), "an unknown quantisation")
    assert isinstance(weights, Mapping)
    stored = group.get("format") or settings.get("format")
    _require(not settings.get("kv_cache_scheme"), "a quantised cache")
    _require(not settings.get("transform_config"), "weights that were rotated")
    sparsity = settings.get("sparsity_config") or {}
    _require(sparsity.get("format", "dense") == "dense", "sparse weights")
    _require(settings.get("quantization_status", "compressed") == "compressed", "an unknown quantisation")
    bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
    symmetric = bool(weights.get("symmetric", True))
    _require(not weights.get("dynamic") and strategy in ("tensor", "channel", "group", "block"), "an unknown strategy")
    _require(weights.get("actorder") in (None, False, "static", "weight"), "weights in another order")
    size = weights.get("group_size") if strategy == "group" else 0
    _require(type(size) is int and (size > 0) == (strategy == "group"), "an unknown quantisation")
    assert isinstance(size, int)
    block = None
    if strategy == "block":
        found = weights.get("block_structure")
        _require(isinstance(found, list | tuple) and len(found) == 2, "an unknown quantisation")
        assert found is not None
        block = (int(found[0]), int(found[1]))
    if stored == "pack-quantized":
        _require(kind == "int" and bits in (4, 8) and strategy in ("channel", "group"), "an unknown quantisation")
        assert isinstance(bits, int)
        _require(symmetric or bits == 4, "zero points of 8 bits")
        return Quantization("compressed-tensors", True, bits, size, symmetric=symmetric)
    floats = stored in ("float-quantized", "naive-quantized") and kind == "float"
    integers = stored in ("int-quantized", "naive-quantized") and kind == "int"
    _require((floats or integers) and bits == 8 and symmetric, "an unknown quantisation")
    return Quantization("compressed-tensors", False, 8, size, block)


def _read_gptq(settings: Mapping[str, Any]) -> Quantization:
    _require(not settings.get("desc_act") or settings.get("static_groups"), "weights in another order")
    version = settings.get("checkpoint_format", "gptq")
    _require(version in ("gptq", "gptq_v2"), "an unknown quantisation")
    _require(not settings.get("dynamic"), "layers that are quantised differently")
    group = _integer_groups(settings)
    return Quantization("gptq", True, 4, group, symmetric=False, zero_offset=int(version == "gptq"))


def _read_awq(settings: Mapping[str, Any]) -> Quantization:
    _require(str(settings.get("version", "gemm")).lower() == "gemm", "an unknown quantisation")
    return Quantization("awq", True, 4, _integer_groups(settings), symmetric=False)


def _integer_groups(settings: Mapping[str, Any]) -> int:
    size = settings.get("group_size")
    _require(settings.get("bits") == 4 and type(size) is int and (size > 0 or size == -1), "an unknown quantisation")
    assert isinstance(size, int)
    return max(size, 0)


def _require(condition: object, what: str) -> None:
    if not condition:
        raise UnsupportedModel(f"it has {what}")
