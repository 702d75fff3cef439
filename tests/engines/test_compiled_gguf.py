"""Compiled steps run GGUF files of plain decoders: with the numbers that ggml says a block stands for, the logits of
llama.cpp and of transformers, and bits that depend on the text alone. Other files are left to llama.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palaver.engines.compiled.build import load_compiled_library
from palaver.engines.compiled.decoder import CompiledDecoder, RowChunk, Rows
from palaver.engines.compiled.engine import load_decoder, open_decoder
from palaver.engines.core.kv_cache import HostArray, SlotAllocator
from tests.engines import tiny
from tests.engines.compiler import needs_a_compiler
from tests.engines.test_decoder_config import ROPES
from tests.gguf_files import (
    CONTROL,
    NORMAL,
    Array,
    Kinds,
    decoder_metadata,
    decoder_tensors,
    write_gguf,
)
from tests.gguf_quants import BLOCK_BYTES, BLOCKS, dequantise, quantise

pytestmark = needs_a_compiler

FLOATS = ("f32", "f16", "bf16")
QUANTISED = tuple(BLOCKS)
WHOLE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}
"""Sizes of whole blocks of every type."""
ODD = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32}
"""Whole blocks of 32, but no whole panels."""
ROW_COUNTS = (1, 2, 3, 4, 5, 8, 11, 17, 40)
TEXT = [(7 * i * i + 5 * i) % 256 for i in range(300)]
BYTE_PIECES = [chr(code) if code > 32 and chr(code).isprintable() else chr(256 + code) for code in range(256)]
"""Any names will do: nothing is tokenized here."""


def byte_vocabulary() -> dict[str, Any]:
    pieces = [*BYTE_PIECES, *tiny.MARKERS]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [NORMAL] * 256 + [CONTROL] * len(tiny.MARKERS),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": tiny.END,
    }


class Twins:
    """A tiny model as a folder with safetensors, and GGUF files of it."""

    def __init__(self, folder: Path, family: str, **overrides: Any) -> None:
        self.folder = tiny.make(family, folder / "safetensors", **overrides)
        self.path = folder / "model.gguf"

    @property
    def metadata(self) -> dict[str, Any]:
        return decoder_metadata(self.folder) | byte_vocabulary()

    def write(self, kind: Kinds = "f32", **extra: Any) -> Path:
        return write_gguf(self.path, self.metadata | extra, decoder_tensors(self.folder, kind))

    def write_expanded(self, kind: Kinds) -> Path:
        """The numbers that the weights of the other file stand for, in float32."""
        tensors = {name: ("f32", stands_for(*one)) for name, one in decoder_tensors(self.folder, kind).items()}
        return write_gguf(self.path.with_name("expanded.gguf"), self.metadata, tensors)


def stands_for(kind: str, values: Array) -> Array:
    if kind == "bf16":
        return ((values.view(np.uint32) + 0x8000 >> 16) << 16).view(np.float32)
    if kind in FLOATS:
        return values.astype(np.float16 if kind == "f16" else np.float32).astype(np.float32)
    return dequantise(kind, quantise(kind, values)).reshape(values.shape)


def decoder_of(model: Path, threads: int = 1) -> CompiledDecoder:
    return load_decoder(*open_decoder(model), load_compiled_library(), threads)


def logits_of(decoder: CompiledDecoder, chunks: Sequence[int], threads: int = 1) -> HostArray:
    """After each token of the text, which is computed in chunks of these sizes."""
    slot = SlotAllocator(decoder.layout, 1 << 26).allocate(len(TEXT))
    start, out = 0, []
    for size in chunks:
        rows = Rows([RowChunk(slot, start, TEXT[start : start + size])], need_logits=True, every_row=True)
        out.append(decoder.run(rows, threads))
        start += size
    return np.concatenate(out)


def some_kinds(name: str) -> str:
    """As in a file of llama.cpp's mixture Q4_K_M, but with more of them: parts of one layer have different types."""
    kinds = {"attn_v": "q6_k", "attn_q": "q4_k", "attn_k": "f16", "ffn_gate": "q5_k", "ffn_up": "q4_0"}
    kinds |= {"ffn_down": "q8_0", "token_embd": "q6_k", "output": "bf16"}
    return kinds.get(name.split(".")[-2], "f32")


# numbers


@pytest.mark.parametrize("kind", QUANTISED)
def test_blocks_stand_for_what_ggml_says(kind: str) -> None:
    """Of all bytes, with scales that are infinite or no numbers too."""
    library = pytest.importorskip("xllamacpp.xllamacpp", reason="NOTHING IS SHOWN HERE: xllamacpp is not installed")
    decode = getattr(ctypes.CDLL(library.__file__), f"dequantize_row_{kind.replace('_k', '_K')}")
    decode.argtypes, decode.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), None
    rng = np.random.default_rng(1)
    for data in (
        quantise(kind, rng.normal(0, 0.1, (50, BLOCKS[kind]))),
        rng.integers(0, 256, (500, BLOCK_BYTES[kind]), dtype=np.uint8),
    ):
        expected = np.empty((len(data), BLOCKS[kind]), np.float32)
        decode(np.ascontiguousarray(data).ctypes.data, expected.ctypes.data, expected.size)
        with np.errstate(all="ignore"):
            assert np.array_equal(dequantise(kind, data), expected, equal_nan=True)


@pytest.mark.parametrize("kind", [*QUANTISED, "f16", "bf16", some_kinds], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_bits_are_those_of_float32_weights(kind: Kinds, tied: bool, tmp_path: Path) -> None:
    """For every number of rows, in each of which the weights are computed in another way, and of threads."""
    twins = Twins(tmp_path, "qwen3", **WHOLE, tie_word_embeddings=tied)
    expected = logits_of(decoder_of(twins.write_expanded(kind)), [1] * 60)
    assert np.isfinite(expected).all()
    assert expected.std() > 0.1
    decoder = decoder_of(twins.write(kind), 3)
    for rows in ROW_COUNTS:
        for threads in (1, 2, 3):
            chunks = [rows] * (60 // rows) + [60 % rows] * (60 % rows > 0)
            assert np.array_equal(logits_of(decoder, chunks, threads), expected), (rows, threads)


@pytest.mark.parametrize("kind", [kind for kind in QUANTISED if BLOCKS[kind] == 32])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_sizes_that_fill_no_panel(family: str, kind: str, tmp_path: Path) -> None:
    twins = Twins(tmp_path, family, **ODD)
    expected = logits_of(decoder_of(twins.write_expanded(kind)), [40, *[1] * 20])
    decoder = decoder_of(twins.write(kind), 2)
    for chunks in ([60], [1] * 60, [3] * 20):
        assert np.array_equal(logits_of(decoder, chunks, 2)[-1], expected[-1])


@pytest.mark.parametrize("rope", ["default", "linear", "yarn"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_bits_are_those_of_the_folder(family: str, rope: str, tmp_path: Path) -> None:
    """Which `test_compiled.py` compares with transformers: the same weights and settings were read."""
    overrides: dict[str, Any] = {"sliding_window": None} if family == "mistral" else {}
    twins = Twins(tmp_path, family, **overrides, **ROPES[rope])
    expected, found = (logits_of(decoder_of(model), [len(TEXT)]) for model in (twins.folder, twins.write()))
    assert np.array_equal(found, expected)


def test_biases_everywhere(tmp_path: Path) -> None:
    twins = Twins(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    expected, found = (logits_of(decoder_of(model), [len(TEXT)]) for model in (twins.folder, twins.write()))
    assert np.array_equal(found, expected)


def test_frequencies_that_are_divided(tmp_path: Path) -> None:
    """Those of Llama 3. The factors are rounded in the file."""
    twins = Twins(tmp_path, "llama", head_dim=64, **ROPES["llama3"])
    folder, file = (open_decoder(model)[1] for model in (twins.folder, twins.write()))
    np.testing.assert_allclose(file.frequencies.angles, folder.frequencies.angles, rtol=1e-6)
    expected, found = (logits_of(decoder_of(model), [len(TEXT)]) for model in (twins.folder, twins.path))
    assert np.abs(found - expected).max() < 1e-3


def llama_logits(file: Path) -> HostArray:
    """After each token of the text, computed by llama.cpp."""
    pytest.importorskip("xllamacpp", reason="NOTHING IS SHOWN HERE: xllamacpp is not installed")
    from palaver.engines.llamacpp.context import Context, ContextSettings, LoadedModel

    model = LoadedModel([file])
    context = Context(model, ContextSettings(512, 1, float32=True, flash_attention=False))
    rows = [context.decode([(0, position, [token_id])])[0].copy() for position, token_id in enumerate(TEXT)]
    context.close()
    model.close()
    return np.stack(rows)


@pytest.mark.parametrize("rope", ["default", "linear", "yarn", "llama3"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_are_those_of_llama_cpp(family: str, rope: str, tmp_path: Path) -> None:
    overrides: dict[str, Any] = {"sliding_window": None} if family == "mistral" else {}
    if rope == "llama3" and family.startswith("qwen"):
        pytest.skip("llama.cpp reads no factors of these")
    twins = Twins(tmp_path, family, **overrides, **ROPES[rope])
    file = twins.write()
    found = logits_of(decoder_of(file), [len(TEXT)])
    assert np.abs(found - llama_logits(file)).max() < 2e-3


@pytest.mark.parametrize("kind", [*QUANTISED, some_kinds], ids=str)
def test_logits_of_quantised_weights_are_those_of_llama_cpp(kind: Kinds, tmp_path: Path) -> None:
    """Up to its own rounding: it rounds the other factor of each product to 8 bits. Any other order of the weights
    gives logits that have nothing in common with these."""
    twins = Twins(tmp_path, "qwen3", **WHOLE)
    file = twins.write(kind)
    found, expected = logits_of(decoder_of(file), [len(TEXT)]), llama_logits(file)
    assert np.sqrt(np.square(found - expected).mean()) < 0.2 * expected.std()
