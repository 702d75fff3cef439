"""Plain decoders that are read from their files give the library's logits, at every position and in every dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from palaver.engines.core.checkpoint import open_checkpoint
from palaver.engines.core.decoder_config import read_decoder_config
from palaver.engines.core.kv_cache import SlotAllocator
from palaver.engines.torch import EngineOptions, load
from palaver.engines.torch.batch import build_batch, sequence_chunk
from palaver.engines.torch.devices import CPU, TensorLayout, TensorMemory
from palaver.engines.torch.engine import read_plain_decoder
from palaver.engines.torch.loader import quiet
from palaver.engines.torch.plain_decoder import FusedDecoder, PlainDecoder
from palaver.generation import Prompt
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.generate import run
from tests.engines.test_decoder_config import ROPES

LENGTH = 1024
CHUNK = 128
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
}


def decoded(decoder: PlainDecoder, ids: list[int]) -> torch.Tensor:
    """The logits after each chunk."""
    shape = (decoder.num_kv_heads, decoder.head_dim)
    memory = TensorMemory(decoder.embedding.dtype, CPU)
    slots = SlotAllocator(TensorLayout(((shape, shape),) * len(decoder.layers), memory), 1 << 24)
    slot, forward = slots.allocate(LENGTH), FusedDecoder(decoder)
    starts = range(0, len(ids), CHUNK)
    return torch.cat([forward(build_batch([sequence_chunk(slot, at, ids[at : at + CHUNK])], CPU)) for at in starts])


@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_the_logits_of_the_library(shape: str, rope: str, tmp_path: Path) -> None:
    family, overrides = SHAPES[shape]
    model = tiny.build(family, max_position_embeddings=LENGTH, **overrides, **ROPES[rope])
    with quiet():
        model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    config = read_decoder_config(checkpoint)
    ids = [(7 * i * i + 5 * i) % 256 for i in range(LENGTH)]
    expected = model(input_ids=torch.tensor([ids])).logits[0][CHUNK - 1 :: CHUNK]
    parts = read_plain_decoder(checkpoint, config, CPU, torch.float32, LENGTH)
    assert torch.allclose(decoded(parts, ids), expected, atol=1e-3)
    assert torch.equal(decoded(parts, ids), decoded(PlainDecoder.from_model(model, LENGTH), ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.inference_mode()
def test_the_same_bits_as_the_parts_of_a_loaded_model(dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tiny.make("qwen3", tmp_path)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    checkpoint = open_checkpoint(tmp_path)
    parts = read_plain_decoder(checkpoint, read_decoder_config(checkpoint), CPU, dtype, 512)
    ids = list(range(200))
    assert torch.equal(decoded(parts, ids), decoded(PlainDecoder.from_model(model, 512), ids))


async def test_the_exact_mode(tmp_path: Path) -> None:
    """It is probed as for any other model."""
    folder = tiny.make("llama", tmp_path)
    engine = load(folder, vocabulary=tiny.VOCABULARY, options=EngineOptions(exact=True, compiled=False))
    out = await run(engine, Prompt(tuple(b"Hello")), Sampling(temperature=0, max_tokens=8))
    await engine.close()
    assert len(out.ids) == 8 or out.ended is not None
    assert engine.info.fingerprint.startswith("fused/")
