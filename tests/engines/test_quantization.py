"""Quantised checkpoints give the library's tokens, or the error names the missing package."""

import asyncio
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from palaver.engines.torch import load
from palaver.engines.torch.devices import weights_bytes
from palaver.engines.torch.loader import load_model, open_checkpoint, quiet
from palaver.errors import BrokenModel
from tests.engines import tiny
from tests.engines.generate import run
from tests.engines.reference import reference
from tests.engines.test_families import GREEDY, library_says, prompts

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
CPU = torch.device("cpu")
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], **form: Any) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": form}))
    return folder


def mxfp4(folder: Path) -> Path:
    """Experts in blocks of 32 numbers of four bits, two in a byte, with an exponent for each block."""
    tensors = load_file(tiny.make("gpt_oss", folder) / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        weight = tensors.pop(name).transpose(1, 2)
        blocks = weight.reshape(*weight.shape[:2], -1, 32)
        exponents = (blocks.abs().amax(-1) / 6).log2().ceil()
        nearest = (blocks / 2 ** exponents[..., None]).unsqueeze(-1).sub(FP4).abs().argmin(-1).to(torch.uint8)
        tensors[f"{name}_blocks"] = nearest[..., 0::2] | nearest[..., 1::2] << 4
        tensors[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return rewrite(folder, tensors, quant_method="mxfp4", modules_to_not_convert=skipped)


def fp8(folder: Path) -> Path:
    """Matrices in blocks of 128 by 128 numbers of eight bits, with a scale for each block."""
    pytest.importorskip("accelerate", reason="the library asks for accelerate to load fp8")
    tensors = load_file(tiny.make("qwen3", folder, **WIDE) / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        blocks = tensors[name].view(rows // 128, 128, columns // 128, 128)
        scales = blocks.abs().amax((1, 3)) / 448
        tensors[name] = (blocks / scales[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    return rewrite(folder, tensors, quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128])


def by_library(folder: Path, form: Any) -> Path:
    """Quantised by the library as it loads, and saved."""
    pytest.importorskip("accelerate", reason="the library asks for accelerate to quantise")
    plain = tiny.make("qwen3", folder / "plain", **WIDE)
    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            plain, quantization_config=form, dtype=torch.float32, device_map="cpu"
        )
        model.save_pretrained(folder / "quantised")
    return folder / "quantised"


def bitsandbytes(folder: Path) -> Path:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes isn't installed")
    return by_library(folder, transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"))


def bitsandbytes_8bit(folder: Path) -> Path:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes isn't installed")
    return by_library(folder, transformers.BitsAndBytesConfig(load_in_8bit=True))


def torchao(folder: Path) -> Path:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao isn't installed")
    return by_library(folder, transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig()))


def compressed_tensors(folder: Path) -> Path:
    """Four bits, eight numbers in an integer, with a scale for each group of 64."""
    compressors = pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors isn't installed")
    tensors = load_file(tiny.make("qwen3", folder, **WIDE) / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors.pop(name)
        groups = weight.view(weight.shape[0], -1, 64)
        scales = groups.abs().amax(-1) / 7
        numbers = (groups / scales[..., None]).round().view(weight.shape).to(torch.int8)
        tensors[f"{name}_packed"] = compressors.pack_to_int32(numbers, 4)
        tensors[f"{name}_shape"] = torch.tensor(weight.shape)
        tensors[f"{name}_scale"] = scales
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    form = {"format": "pack-quantized", "quantization_status": "compressed", "ignore": ["lm_head"]}
    return rewrite(folder, tensors, quant_method="compressed-tensors", config_groups=groups, **form)


@pytest.mark.parametrize(
    "make", [mxfp4, fp8, bitsandbytes, torchao, compressed_tensors], ids=lambda make: make.__name__
)
async def test_says_what_the_library_says(make: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = make(tmp_path)
    model = load_model(open_checkpoint(folder), CPU, torch.float32)
    engine = load(folder, vocabulary=tiny.VOCABULARY, device="cpu")
    try:
        assert engine.info.reuse == "to the token"
        together = await asyncio.gather(*(run(engine, prompt, GREEDY) for prompt in prompts()))
        for prompt, out in zip(prompts(), together, strict=True):
            expected = library_says(model, prompt)
            assert out.ids == expected or reference(model, prompt, GREEDY).agrees(out.ids)
    finally:
        await engine.close()


@pytest.mark.parametrize("bits", [4, 8])
async def test_plain_weights_are_quantised_as_they_are_loaded(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes isn't installed")
    folder = tiny.make("qwen3", tmp_path, **WIDE)
    model = load_model(open_checkpoint(folder), CPU, torch.float32, bits)
    assert model.config.quantization_config.load_in_4bit is (bits == 4)
    engine = load(folder, vocabulary=tiny.VOCABULARY, device="cpu", quantize_bits=bits)
    try:
        assert len((await run(engine, prompts()[0], GREEDY)).ids) == GREEDY.max_tokens
    finally:
        await engine.close()


async def test_what_is_quantised_as_it_is_computed_is_reused_too(tmp_path: Path) -> None:
    """Its own logits differ with the way they are computed, by far more than floats do."""
    engine = load(bitsandbytes_8bit(tmp_path), vocabulary=tiny.VOCABULARY, device="cpu")
    try:
        assert engine.info.reuse == "to the token"
        assert len((await run(engine, prompts()[0], GREEDY)).ids) == GREEDY.max_tokens
    finally:
        await engine.close()


@pytest.mark.parametrize(("form", "package"), [("gptq", "gptqmodel"), ("awq", "gptqmodel"), ("quark", "quark")])
def test_a_missing_package_is_named(form: str, package: str, tmp_path: Path) -> None:
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    folder = tiny.make("qwen3", tmp_path)
    rewrite(folder, load_file(folder / "model.safetensors"), quant_method=form, bits=4, group_size=32)
    with pytest.raises(BrokenModel, match=rf"quantised, {form}\) couldn't be loaded: .*(install|package)"):
        load(folder, vocabulary=tiny.VOCABULARY, device="cpu")


def test_what_torchao_stores_in_another_way_is_named(tmp_path: Path) -> None:
    if find_spec("torchao") is not None:
        pytest.skip("torchao is installed")
    folder = tiny.make("qwen3", tmp_path)
    default = {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": {"int4_packing_format": "tile_packed_to_4d"}}
    rewrite(folder, load_file(folder / "model.safetensors"), quant_method="torchao", quant_type={"default": default})
    reason = r"torchao, Int4WeightOnlyConfig, tile_packed_to_4d\) couldn't be loaded: .*torchao"
    with pytest.raises(BrokenModel, match=reason):
        load(folder, vocabulary=tiny.VOCABULARY, device="cpu")


def test_weights_that_become_floats_again_are_counted_as_floats(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(mxfp4(tmp_path))
    plain = sum(parameter.numel() for parameter in tiny.build("gpt_oss").parameters())
    stored = sum(path.stat().st_size for path in checkpoint.weights)
    assert stored < 4 * plain <= weights_bytes(checkpoint, torch.float32) < 4.5 * plain
    assert weights_bytes(checkpoint, torch.float32, torch.device("cuda")) < stored
