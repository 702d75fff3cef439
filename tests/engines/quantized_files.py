"""Checkpoints of plain decoders in quantised formats, written as the formats define them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engines import tiny

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
GROUP = 64
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column that each half byte of an integer has, from its lowest on."""
Stored = tuple[dict[str, Tensor], Tensor]
"""The tensors of a linear layer by the ends of their names, and the weights that they stand for."""


def pack(numbers: Tensor, bits: int = 4) -> Tensor:
    """[rows, columns] of integers to 32-bit integers, the first column in the lowest bits."""
    count = 32 // bits
    places = torch.arange(count, device=numbers.device) * bits
    words = (numbers.long().unflatten(1, (-1, count)) << places).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def fp8_blocks(weight: Tensor) -> Stored:
    rows, columns = weight.shape
    blocks = weight.view(rows // 128, 128, columns // 128, 128)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
    wide = codes.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return {"weight": codes, "weight_scale_inv": scales}, wide


def fp8_channels(weight: Tensor) -> Stored:
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (weight / scales.float()).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scales, "input_scale": torch.ones(1)}, codes.float() * scales.float()


def fp8_tensor(weight: Tensor) -> Stored:
    scale = (weight.abs().amax() / 448).reshape(1)
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def int8_channels(weight: Tensor) -> Stored:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def _groups(weight: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes from 0 on, zero points and scales, [outputs, groups] each but the codes."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / (steps - 1)).half()
    zeros = (-low / scales.float()).round().clamp(1, steps - 1)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, steps - 1)
    return codes.flatten(1), zeros, scales


def _wide(codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    values = codes.unflatten(1, (-1, GROUP)) - zeros[..., None]
    return (values * scales.float()[..., None]).flatten(1)


def int4_groups(weight: Tensor) -> Stored:
    groups = weight.unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(-1) / 7
    codes = (groups / scales[..., None]).round().flatten(1) + 8
    tensors = {"weight_packed": pack(codes), "weight_shape": torch.tensor(weight.shape), "weight_scale": scales}
    return tensors, _wide(codes, torch.full_like(scales, 8), scales)


def int4_zero_points(weight: Tensor) -> Stored:
    codes, zeros, scales = _groups(weight, 16)
    tensors = {"weight_packed": pack(codes), "weight_shape": torch.tensor(weight.shape), "weight_scale": scales}
    return tensors | {"weight_zero_point": pack(zeros.t()).t().contiguous()}, _wide(codes, zeros, scales)


def int8_packed(weight: Tensor) -> Stored:
    scales = weight.unflatten(1, (-1, GROUP)).abs().amax(-1) / 127
    codes = (weight.unflatten(1, (-1, GROUP)) / scales[..., None]).round().flatten(1) + 128
    tensors = {"weight_packed": pack(codes, 8), "weight_shape": torch.tensor(weight.shape), "weight_scale": scales}
    return tensors, _wide(codes, torch.full_like(scales, 128), scales)


def gptq(weight: Tensor) -> Stored:
    codes, zeros, scales = _groups(weight, 16)
    tensors = {
        "qweight": pack(codes).t().contiguous(),
        "qzeros": pack((zeros - 1).t()),
        "scales": scales.t().contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
        "bias": torch.zeros(weight.shape[0]),
    }
    return tensors, _wide(codes, zeros, scales)


def awq(weight: Tensor) -> Stored:
    codes, zeros, scales = _groups(weight, 16)

    def pack_columns(numbers: Tensor) -> Tensor:
        return pack(numbers.unflatten(1, (-1, 8))[..., list(AWQ_PLACES)].flatten(1))

    tensors = {"qweight": pack_columns(codes.t()), "qzeros": pack_columns(zeros.t()), "scales": scales.t().contiguous()}
    return tensors, _wide(codes, zeros, scales)


def _torchao_tensors(**tensors: Tensor) -> dict[str, Tensor]:
    return {f"_weight_{name}": tensor for name, tensor in tensors.items()}


def torchao_int8(weight: Tensor) -> Stored:
    scales = weight.abs().amax(1, keepdim=True) / 127.5
    codes = (weight / scales).round().clamp(-128, 127).to(torch.int8)
    zeros = torch.zeros_like(scales, dtype=torch.int8)
    return _torchao_tensors(qdata=codes, scale=scales, zero_point=zeros), codes.float() * scales


def torchao_int8_groups(weight: Tensor) -> Stored:
    groups = weight.unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(-1) / 127.5
    codes = (groups / scales[..., None]).round().clamp(-128, 127)
    wide = (codes * scales[..., None]).flatten(1)
    return _torchao_tensors(qdata=codes.flatten(1).to(torch.int8), scale=scales), wide


def torchao_fp8(weight: Tensor) -> Stored:
    scales = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scales).to(torch.float8_e4m3fn)
    return _torchao_tensors(qdata=codes, scale=scales), codes.float() * scales


def torchao_fp8_tensor(weight: Tensor) -> Stored:
    scale = (weight.abs().amax() / 448).reshape(1, 1)
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return _torchao_tensors(qdata=codes, scale=scale), codes.float() * scale


def _torchao_int4(codes: Tensor, scales: Tensor, zeros: Tensor) -> Stored:
    """`codes` from -8 to 7, [outputs, groups, GROUP]; scales and zeros [outputs, groups]."""
    wide = (codes * scales.float()[..., None] + zeros.float()[..., None]).flatten(1)
    halves = codes.flatten(1).to(torch.int16) & 15
    data = (halves[:, 0::2] | halves[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    return _torchao_tensors(qdata=data, scale=scales.t().contiguous(), zero_point=zeros.t().contiguous()), wide


def torchao_int4(weight: Tensor) -> Stored:
    """Zero points are floats: a group's smallest number plus 8 steps."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    scales = (high - low) / 15
    codes = ((groups - low[..., None]) / scales[..., None]).round().clamp(0, 15) - 8
    return _torchao_int4(codes, scales.bfloat16(), (low + 8 * scales).bfloat16())


def torchao_int4_symmetric(weight: Tensor) -> Stored:
    groups = weight.unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(-1) / 8
    codes = (groups / scales[..., None]).round().clamp(-8, 7)
    return _torchao_int4(codes, scales.bfloat16(), torch.zeros_like(scales).bfloat16())


def _compressed(stored: str, kind: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False} | more
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": groups,
        "format": stored,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
    }


def _torchao(kind: str, version: int = 2, **data: Any) -> dict[str, Any]:
    return {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": kind, "_version": version, "_data": data}},
        "modules_to_not_convert": None,
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }


def _member(kind: str, name: str) -> dict[str, str]:
    return {"_type": kind, "_data": name}


def _granularity(kind: str, **data: int) -> dict[str, Any]:
    return {"_type": kind, "_version": 1, "_data": data}


E4M3 = _member("torch.dtype", "float8_e4m3fn")
FORMATS: dict[str, tuple[Callable[[Tensor], Stored], dict[str, Any]]] = {
    "fp8 blocks": (
        fp8_blocks,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    "fp8 channels": (fp8_channels, _compressed("float-quantized", "float", 8, "channel")),
    "fp8 tensor": (fp8_tensor, _compressed("float-quantized", "float", 8, "tensor")),
    "int8 channels": (int8_channels, _compressed("int-quantized", "int", 8, "channel")),
    "int8 packed": (int8_packed, _compressed("pack-quantized", "int", 8, "group", group_size=GROUP)),
    "int4 groups": (int4_groups, _compressed("pack-quantized", "int", 4, "group", group_size=GROUP)),
    "int4 zero points": (
        int4_zero_points,
        _compressed("pack-quantized", "int", 4, "group", group_size=GROUP, symmetric=False),
    ),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
}
KERNEL_FORMATS = tuple(FORMATS)
"""The CUDA kernels read the numbers of these as they do those of the formats below."""
FORMATS |= {
    "torchao int8": (torchao_int8, _torchao("Int8WeightOnlyConfig", granularity=_granularity("PerRow", dim=-1))),
    "torchao int8 groups": (
        torchao_int8_groups,
        _torchao("Int8WeightOnlyConfig", group_size=None, granularity=_granularity("PerGroup", group_size=GROUP)),
    ),
    "torchao fp8": (torchao_fp8, {"quant_method": "torchao", "quant_type": "float8_weight_only"}),
    "torchao fp8 tensor": (
        torchao_fp8_tensor,
        _torchao(
            "Float8DynamicActivationFloat8WeightConfig",
            granularity=[_granularity("PerTensor"), _granularity("PerTensor")],
            weight_dtype=E4M3,
            packing_format=_member("Float8PackingFormat", "PLAIN"),
        ),
    ),
    "torchao int4": (
        torchao_int4,
        _torchao("Int4WeightOnlyConfig", group_size=GROUP, int4_packing_format=_member("Int4PackingFormat", "PLAIN")),
    ),
    "torchao int4 symmetric": (
        torchao_int4_symmetric,
        _torchao("Float8DynamicActivationInt4WeightConfig", 1, int4_packing_format="plain", group_size=GROUP),
    ),
}


def store_tensors(tensors: dict[str, Tensor], form: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a checkpoint in the format, and the floats that they stand for."""
    store, _ = FORMATS[form]
    found, wide = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        stored, wide[name] = store(found.pop(name).float())
        found |= {f"{name.removesuffix('weight')}{end}": tensor for end, tensor in stored.items()}
    return found, wide


def write_quantized(folder: Path, form: str, **sizes: Any) -> tuple[Path, Path]:
    """A folder in the format, and one with the floats that its weights stand for."""
    plain = tiny.make("qwen3", folder / "plain", **WIDE | sizes)
    quantized = tiny.make("qwen3", folder / "quantized", **WIDE | sizes)
    tensors, wide = store_tensors(load_file(plain / "model.safetensors"), form)
    for place, found in (plain, wide), (quantized, tensors):
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, place / "model.safetensors")
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": FORMATS[form][1]}))
    return quantized, plain
