"""Quantised checkpoints of plain decoders are read without the packages that wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from palaver.engines.core.checkpoint import open_checkpoint
from palaver.engines.core.decoder_config import read_decoder_config
from palaver.engines.core.options import EngineOptions
from palaver.engines.core.quantization_config import read_quantization
from palaver.engines.core.runner import UnsupportedModel
from palaver.engines.torch.engine import load, load_plain_model, read_plain_decoder
from palaver.engines.torch.quantized_weights import StoredWeight, read_weight
from palaver.errors import UnsafeWeights
from tests.engines import tiny
from tests.engines.generate import run
from tests.engines.quantized_files import FORMATS, write_quantized
from tests.engines.test_families import GREEDY, prompts

CPU = torch.device("cpu")


@pytest.mark.parametrize("form", FORMATS)
def test_weights_stand_for_the_numbers_that_were_stored(form: str, tmp_path: Path) -> None:
    for number, (outputs, inputs) in enumerate([(128, 256), (256, 128), (64, 384)]):
        if form == "fp8 blocks" and outputs < 128:
            continue
        torch.manual_seed(number)
        store, settings = FORMATS[form]
        stored, expected = store(torch.randn(outputs, inputs))
        quantization = read_quantization({"quantization_config": settings})
        assert quantization is not None
        found = {f"x.{name}": tensor for name, tensor in stored.items()}
        weight = read_weight(quantization, "x", found.__getitem__)
        assert torch.equal(weight.dequantize(torch.float32), expected)
        if form == "torchao int4":  # zero points that are floats
            assert weight.pack() is None
            assert StoredWeight.side_by_side([weight, weight]) is None
            continue
        both = StoredWeight.side_by_side([weight, weight])
        assert both is not None
        packed = both.pack()
        assert packed is not None
        assert (packed.outputs, packed.inputs) == (2 * outputs, inputs)
        assert torch.equal(packed.dequantize(torch.float32), torch.cat([expected, expected]))


@pytest.mark.parametrize("form", FORMATS)
async def test_replies_are_those_of_the_floats(form: str, tmp_path: Path) -> None:
    quantized, plain = write_quantized(tmp_path, form)
    replies = []
    for folder in (quantized, plain):
        engine = load_plain_model(folder, tiny.VOCABULARY, CPU, torch.float32, EngineOptions())
        try:
            replies.append([(await run(engine, prompt, GREEDY)).ids for prompt in prompts()])
        finally:
            await engine.close()
    assert replies[0] == replies[1]


@pytest.mark.parametrize(("outputs", "inputs"), [(32, 128), (64, 64)])
def test_sizes_that_blocks_do_not_divide_are_not_packed(outputs: int, inputs: int) -> None:
    store, settings = FORMATS["int4 groups"]
    stored, expected = store(torch.randn(outputs, inputs))
    quantization = read_quantization({"quantization_config": settings})
    assert quantization is not None
    weight = read_weight(quantization, "x", {f"x.{name}": tensor for name, tensor in stored.items()}.__getitem__)
    assert weight.pack() is None
    assert torch.equal(weight.dequantize(torch.float32), expected)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "activations that are rounded by stored scales": ("fp8 blocks", {"activation_scheme": "static"}),
    "no blocks": ("fp8 blocks", {"weight_block_size": None}),
    "another order": ("gptq", {"desc_act": True}),
    "three bits": ("gptq", {"bits": 3}),
    "another layout": ("awq", {"version": "gemv"}),
    "a quantised cache": ("fp8 channels", {"kv_cache_scheme": {"num_bits": 8}}),
    "rotated weights": ("int4 groups", {"transform_config": {"config_groups": {"u": {}}}}),
    "two kinds of layers": ("int4 groups", {"config_groups": {"a": {}, "b": {}}}),
    "another method": ("awq", {"quant_method": "hqq"}),
    "torchao: several kinds of layers": ("torchao int8", {"quant_type": {"a": {}, "b": {}}}),
    "torchao: another string": ("torchao fp8", {"quant_type": "autoquant"}),
    "torchao: an older layout": ("torchao fp8", {"quant_type": "int4_weight_only", "quant_type_kwargs": {"layout": 1}}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_left_to_the_library(case: str) -> None:
    form, changes = REFUSED[case]
    read_quantization({"quantization_config": FORMATS[form][1]})
    with pytest.raises(UnsupportedModel):
        read_quantization({"quantization_config": FORMATS[form][1] | changes})


@pytest.mark.parametrize(
    ("form", "change", "reason"),
    [
        ("torchao int8", {"_type": "IntxWeightOnlyConfig"}, "IntxWeightOnlyConfig"),
        ("torchao int8", {"_version": 1}, "version 1"),
        ("torchao int8", {"_data": {"granularity": {"_type": "PerBlock", "_data": {}}}}, "PerBlock"),
        ("torchao int4", {"_data": {"int4_packing_format": "tile_packed_to_4d"}}, "tile_packed_to_4d"),
        ("torchao int4 symmetric", {"_data": {"int4_packing_format": {"_data": "PRESHUFFLED"}}}, "preshuffled"),
        ("torchao fp8 tensor", {"_data": {"weight_dtype": {"_data": "float8_e5m2"}}}, "an unknown quantisation"),
    ],
)
def test_what_torchao_stores_in_another_way_is_named(form: str, change: dict[str, Any], reason: str) -> None:
    settings = FORMATS[form][1]
    changed = settings | {"quant_type": {"default": settings["quant_type"]["default"] | change}}
    with pytest.raises(UnsupportedModel, match=reason):
        read_quantization({"quantization_config": changed})


def test_zero_points_of_8_bits_must_be_zeros() -> None:
    store, settings = FORMATS["torchao int8"]
    stored, _ = store(torch.randn(64, 128))
    stored["_weight_zero_point"][3] = 1
    quantization = read_quantization({"quantization_config": settings})
    assert quantization is not None
    with pytest.raises(UnsupportedModel, match="zero points"):
        read_weight(quantization, "x", {f"x.{name}": tensor for name, tensor in stored.items()}.__getitem__)


def test_scales_of_activations_are_refused(tmp_path: Path) -> None:
    """They belong to inputs that were scaled before the weights were quantised."""
    quantized, _ = write_quantized(tmp_path, "torchao int8")
    tensors = load_file(quantized / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj._weight_act_pre_scale"] = torch.ones(256)
    save_file(tensors, quantized / "model.safetensors")
    checkpoint = open_checkpoint(quantized)
    with pytest.raises(UnsupportedModel, match="_weight_act_pre_scale"):
        read_decoder_config(checkpoint, quantization=read_quantization(checkpoint.config))


def test_pickled_weights_of_torchao_are_never_loaded(tmp_path: Path) -> None:
    quantized, _ = write_quantized(tmp_path, "torchao fp8")
    (quantized / "model.safetensors").rename(quantized / "pytorch_model.bin")
    with pytest.raises(UnsafeWeights, match=r"pytorch_model\.bin"):
        load(quantized, vocabulary=tiny.VOCABULARY, device="cpu")


def test_columns_in_another_order_are_refused() -> None:
    store, settings = FORMATS["gptq"]
    stored, _ = store(torch.randn(64, 128))
    stored["g_idx"] = stored["g_idx"].flip(0)
    quantization = read_quantization({"quantization_config": settings})
    assert quantization is not None
    with pytest.raises(UnsupportedModel, match="another order"):
        read_weight(quantization, "x", {f"x.{name}": tensor for name, tensor in stored.items()}.__getitem__)


def test_biases_that_the_model_does_not_have_must_be_zeros(tmp_path: Path) -> None:
    quantized, _ = write_quantized(tmp_path, "gptq")
    checkpoint = open_checkpoint(quantized)
    quantization = read_quantization(checkpoint.config)
    config = read_decoder_config(checkpoint, quantization=quantization)
    read_plain_decoder(checkpoint, config, CPU, torch.float32, 64)
    tensors = load_file(quantized / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.bias"] += 1
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="up_proj"):
        read_plain_decoder(open_checkpoint(quantized), config, CPU, torch.float32, 64)


def test_tensors_of_other_shapes_are_refused(tmp_path: Path) -> None:
    quantized, _ = write_quantized(tmp_path, "int4 groups")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 32
    (quantized / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(quantized)
    with pytest.raises(UnsupportedModel, match="weight_scale"):
        read_decoder_config(checkpoint, quantization=read_quantization(checkpoint.config))
