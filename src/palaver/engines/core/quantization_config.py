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
TORCHAO = {
    "Int8WeightOnlyConfig": (8, 2),
    "Int8DynamicActivationInt8WeightConfig": (8, 2),
    "Float8WeightOnlyConfig": (8, 2),
    "Float8DynamicActivationFloat8WeightConfig": (8, 2),
    "Int4WeightOnlyConfig": (4, 2),
    "Float8DynamicActivationInt4WeightConfig": (4, 1),
}
"""The configurations of torchao that are read: the bits of weights, and the version."""
TORCHAO_NAMES = {
    "int8_weight_only": "Int8WeightOnlyConfig",
    "int8_dynamic_activation_int8_weight": "Int8DynamicActivationInt8WeightConfig",
    "float8_weight_only": "Float8WeightOnlyConfig",
    "float8_dynamic_activation_float8_weight": "Float8DynamicActivationFloat8WeightConfig",
    "int4_weight_only": "Int4WeightOnlyConfig",
}
"""How older checkpoints name them."""
TORCHAO_GROUP = 128
"""Inputs that share a scale if weights have 4 bits and the configuration doesn't say it."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of linear layers are stored."""

    method: str
    """As the transformers library names it: fp8, compressed-tensors, gptq, awq or torchao."""
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

    @property
    def has_offsets(self) -> bool:
        """Whether zero points are floats, which are added to numbers times scales."""
        return self.method == "torchao" and not self.symmetric

    def is_quantized(self, module: str, found: Collection[str]) -> bool:
        """Whether a linear layer is, if these tensors are stored."""
        return f"{module}.{self._mark}" in found

    def groups(self, inputs: int) -> int:
        """How many scales each output has."""
        columns = self.group if self.block is None else self.block[1]
        return -(-inputs // columns) if columns else 1

    def tensor_shapes(self, module: str, outputs: int, inputs: int, found: Collection[str]) -> TensorShapes | None:
        """The tensors of a linear layer, with the shapes that each may have; None if the layer is not quantised."""
        if not self.is_quantized(module, found):
            return None
        shapes = self._shapes(outputs, inputs)
        if self.method == "gptq" and f"{module}.g_idx" in found:
            shapes["g_idx"] = ((inputs,),)
        if self.method == "torchao" and f"{module}._weight_zero_point" in found:
            shapes["_weight_zero_point"] = shapes["_weight_scale"]
        return {f"{module}.{name}": allowed for name, allowed in shapes.items()}

    @property
    def _mark(self) -> str:
        """The last part of the name of a tensor that only quantised layers have."""
        if self.method == "torchao":
            return "_weight_qdata"
        if not self.packed:
            return "weight_scale_inv" if self.method == "fp8" else "weight_scale"
        return "weight_packed" if self.method == "compressed-tensors" else "qweight"

    def _shapes(self, outputs: int, inputs: int) -> TensorShapes:
        """By the last part of the name."""
        if self.method == "torchao" and self.bits == 4:
            columns, groups = _divide(inputs, 2), _divide(inputs, self.group)
            return {"_weight_qdata": ((outputs, columns),), "_weight_scale": ((groups, outputs),)}
        if self.method == "torchao":
            return {"_weight_qdata": ((outputs, inputs),), "_weight_scale": self._scale_shapes(outputs, inputs)}
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
    readers = {
        "fp8": _read_fp8,
        "compressed-tensors": _read_compressed,
        "gptq": _read_gptq,
        "awq": _read_awq,
        "torchao": _read_torchao,
    }
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


def _read_torchao(settings: Mapping[str, Any]) -> Quantization:
    """Only the configuration of all layers: what it stores follows from it."""
    name, data, version = _torchao_config(settings)
    _require(name in TORCHAO, f"torchao weights of the kind {name}")
    bits, known_version = TORCHAO[name]
    _require(version in (None, known_version), f"torchao weights of version {version}")
    layout = _member(data.get("int4_packing_format", data.get("packing_format", "plain")))
    _require(layout == "plain" and "layout" not in data, f"torchao weights in the layout {layout}")
    _require(_member(data.get("weight_dtype", "float8_e4m3fn")) == "float8_e4m3fn", "an unknown quantisation")
    if bits == 4:
        size = data.get("group_size", TORCHAO_GROUP)
    else:
        _require(data.get("group_size") is None, "an unknown quantisation")
        size = _torchao_groups(data.get("granularity"))
    _require(type(size) is int and size >= (1 if bits == 4 else 0), "an unknown quantisation")
    return Quantization("torchao", False, bits, size, symmetric=name != "Int4WeightOnlyConfig")


def _torchao_config(settings: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], object]:
    """The name of the configuration, what it holds, and its version; None if it has none."""
    found = settings.get("quant_type")
    if isinstance(found, str):
        return TORCHAO_NAMES.get(found, found), settings.get("quant_type_kwargs") or {}, None
    only = isinstance(found, Mapping) and found.keys() == {"default"} and isinstance(found["default"], Mapping)
    _require(only, "layers that are quantised differently")
    assert isinstance(found, Mapping)
    default = found["default"]
    _require(isinstance(default.get("_data"), Mapping), "an unknown quantisation")
    return str(default.get("_type")), default["_data"], default.get("_version")


def _torchao_groups(granularity: Any) -> int:
    """How many inputs share a scale; 0: all. Of a pair, the second granularity is that of weights."""
    weights = granularity[-1] if isinstance(granularity, list) and granularity else granularity
    if weights is None:
        return 0
    kind = weights.get("_type") if isinstance(weights, Mapping) else weights
    _require(kind in ("PerRow", "PerTensor", "PerGroup"), f"torchao weights with scales of the kind {kind}")
    return weights["_data"]["group_size"] if kind == "PerGroup" else 0


def _member(value: Any) -> str:
    """The name of an enumeration's member, or of a dtype, which torchao writes in two ways."""
    return str(value.get("_data") if isinstance(value, Mapping) else value).lower()


def describe_quantization(settings: Mapping[str, Any]) -> str:
    """The method, and which of its kinds; for error messages."""
    method = str(settings.get("quant_method", "unknown"))
    if method != "torchao":
        return method
    try:
        name, data, _ = _torchao_config(settings)
    except UnsupportedModel:
        return method
    layout = data.get("int4_packing_format")
    return f"{method}, {name}" if layout is None else f"{method}, {name}, {_member(layout)}"


def _integer_groups(settings: Mapping[str, Any]) -> int:
    size = settings.get("group_size")
    _require(settings.get("bits") == 4 and type(size) is int and (size > 0 or size == -1), "an unknown quantisation")
    assert isinstance(size, int)
    return max(size, 0)


def _require(condition: object, what: str) -> None:
    if not condition:
        raise UnsupportedModel(f"it has {what}")
