"""The memory of quantised weights is counted as they are held: packed, or as floats where they become floats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from palaver.engines.core.checkpoint import Checkpoint, open_checkpoint
from palaver.engines.core.decoder_config import read_decoder_config
from palaver.engines.core.quantization_config import Quantization, read_quantization
from palaver.engines.torch import devices, weight_memory
from palaver.engines.torch.devices import check_fit, weights_bytes
from palaver.engines.torch.engine import read_plain_decoder
from palaver.engines.torch.quantized_weights import StoredWeight, read_weight
from palaver.engines.torch.weight_memory import WeightMemory
from palaver.errors import DoesNotFit
from tests.engines.quantized_files import FORMATS, write_quantized

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
Device = Callable[..., None]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Sets what a CUDA device would say."""

    def use(capability: tuple[int, int] = (9, 0), free: int = 1 << 30, triton: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(devices, "free_bytes", lambda _: free)
        monkeypatch.setattr(weight_memory, "find_spec", lambda _: object() if triton else None)

    use()
    return use


def open_quantized(folder: Path, form: str, **sizes: Any) -> tuple[Checkpoint, Quantization, Checkpoint]:
    """The checkpoint, how it is quantised, and the same in floats."""
    quantized, plain = write_quantized(folder, form, **sizes)
    checkpoint = open_checkpoint(quantized)
    quantization = read_quantization(checkpoint.config)
    assert quantization is not None
    return checkpoint, quantization, open_checkpoint(plain)


def packed_bytes(checkpoint: Checkpoint, quantization: Quantization) -> tuple[int, int]:
    """Of all linear layers as they are packed for a GPU, as floats where they can't be; and of the largest one in
    bfloat16 that is packed."""
    tensors = load_file(checkpoint.weights[0])
    config = read_decoder_config(checkpoint, quantization=quantization)
    total = largest = 0
    for modules in config.joined_layers():
        weights = [read_weight(quantization, module, tensors.__getitem__) for module in modules]
        together = StoredWeight.side_by_side(weights)
        packed = None if together is None else together.pack()
        elements = sum(weight.numbers.numel() for weight in weights)
        if packed is None:
            total += 2 * elements
        else:
            total += packed.words.nbytes + packed.scales.nbytes + (0 if packed.zeros is None else packed.zeros.nbytes)
            largest = max(largest, 2 * elements)
    return total, largest


@pytest.mark.parametrize("form", FORMATS)
def test_what_a_gpu_holds(form: str, tmp_path: Path, cuda: Device) -> None:
    checkpoint, quantization, plain = open_quantized(tmp_path, form)
    layers, largest = packed_bytes(checkpoint, quantization)
    others = sum(2 * tensor.elements for name, tensor in plain.tensors.items() if "_proj" not in name)
    assert weights_bytes(checkpoint, torch.bfloat16, CUDA, quantization) == layers + others + largest
    assert (largest == 0) is (form == "torchao int4")


@pytest.mark.parametrize("form", FORMATS)
def test_what_the_cpu_holds(form: str, tmp_path: Path) -> None:
    checkpoint, quantization, plain = open_quantized(tmp_path, form)
    floats = weights_bytes(plain, torch.float32)
    assert weights_bytes(checkpoint, torch.float32, CPU, quantization) == floats
    config = read_decoder_config(checkpoint, quantization=quantization)
    decoder = read_plain_decoder(checkpoint, config, CPU, torch.float32, 64)
    held = sum(linear.weight.nbytes for layer in decoder.layers for linear in layer.linears)
    assert held == sum(4 * tensor.elements for name, tensor in plain.tensors.items() if "_proj" in name)


@pytest.mark.parametrize(
    ("form", "device", "dtype"),
    [
        ("fp8 channels", {"capability": (8, 6)}, torch.bfloat16),
        ("torchao fp8", {"capability": (8, 6)}, torch.bfloat16),
        ("int4 groups", {"triton": False}, torch.bfloat16),
        ("int4 groups", {}, torch.float16),
    ],
)
def test_weights_that_no_kernel_reads_become_floats_if_there_is_memory(
    form: str, device: dict[str, Any], dtype: torch.dtype, tmp_path: Path, cuda: Device
) -> None:
    checkpoint, quantization, plain = open_quantized(tmp_path, form)
    memory = WeightMemory.of(checkpoint, quantization, dtype)
    cuda(**device)
    assert weights_bytes(checkpoint, dtype, CUDA, quantization) == weights_bytes(plain, dtype) == memory.floats
    cuda(**device, free=memory.packed + memory.packable)  # more than half of what is free beside packed weights
    assert weights_bytes(checkpoint, dtype, CUDA, quantization) == memory.packed


def test_older_devices_read_integers(tmp_path: Path, cuda: Device) -> None:
    checkpoint, quantization, _ = open_quantized(tmp_path, "int8 channels")
    memory = WeightMemory.of(checkpoint, quantization, torch.bfloat16)
    cuda(capability=(8, 0))
    assert weights_bytes(checkpoint, torch.bfloat16, CUDA, quantization) == memory.packed + memory.buffer


def test_sizes_that_blocks_do_not_divide_are_counted_as_floats(tmp_path: Path, cuda: Device) -> None:
    """480 is no multiple of 64: so many outputs have gate and up each, and so many inputs the layer after them."""
    checkpoint, quantization, plain = open_quantized(tmp_path, "int8 channels", intermediate_size=480)
    memory = WeightMemory.of(checkpoint, quantization, torch.bfloat16)
    layers, _ = packed_bytes(checkpoint, quantization)
    others = sum(2 * tensor.elements for name, tensor in plain.tensors.items() if "_proj" not in name)
    assert memory.packed == layers + others
    assert not memory.fits_kernels
    assert weights_bytes(checkpoint, torch.bfloat16, CUDA, quantization) == memory.floats


def test_a_model_whose_floats_do_not_fit_is_refused(tmp_path: Path, cuda: Device) -> None:
    """Zero points of torchao are floats, and so these weights become floats: stored, they would fit."""
    checkpoint, quantization, plain = open_quantized(tmp_path, "torchao int4")
    stored = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    floats = weights_bytes(plain, torch.bfloat16)
    cuda(free=(stored + floats) // 2)
    with pytest.raises(DoesNotFit):
        check_fit(checkpoint, CUDA, torch.bfloat16, quantization=quantization)
    cuda(free=2 * floats)
    check_fit(checkpoint, CUDA, torch.bfloat16, quantization=quantization)
