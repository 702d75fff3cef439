"""Compiled steps run GGUF files of the models that they know: with the numbers that ggml says a block stands for, the
logits of llama.cpp and of transformers, and bits that depend on the text alone. Other files are left to llama.cpp."""

from __future__ import annotations

import ctypes
import math
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palaver.chat import engine_choice
from palaver.chat.engine_choice import COMPILED, LoadOptions, check_engine_options, make_spec, pick_engine
from palaver.engines import loader
from palaver.engines.base import BY_TEXT
from palaver.engines.compiled import build, weights
from palaver.engines.compiled import engine as compiled_engine
from palaver.engines.compiled.build import load_compiled_library
from palaver.engines.compiled.decoder import CompiledDecoder, RowChunk, Rows
from palaver.engines.compiled.engine import load, load_decoder, open_decoder
from palaver.engines.compiled.weights import FLOAT_ARRAYS, held_bytes
from palaver.engines.core.kv_cache import HostArray, SlotAllocator
from palaver.engines.core.options import EngineOptions
from palaver.engines.core.runner import UnsupportedModel
from palaver.errors import BadParameter, BrokenModel, DoesNotFit
from palaver.generation import Prompt
from palaver.models.resolver import ResolvedModel
from palaver.sampling import Sampling
from tests import gguf_files
from tests.engines import tiny
from tests.engines.compiler import needs_a_compiler
from tests.engines.generate import run
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
LENGTH = 40
ROUNDING = 1e-3
"""How far logits of quantised weights may be from those of float32 weights."""
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
        ids = TEXT[start : start + size]
        rows = Rows([RowChunk(slot, start, ids)], need_logits=True, drafts=[ids[1:]])
        out.append(decoder.run(rows, threads))
        start += size
    return np.concatenate(out)


def deviation(found: HostArray, expected: HostArray) -> float:
    """The typical difference, as a share of the spread of what is expected."""
    return float(np.sqrt(np.square(found - expected).mean()) / expected.std())


def some_kinds(name: str) -> str:
    """As in a file of llama.cpp's mixture Q4_K_M, but with more of them: parts of one layer have different types."""
    kinds = {"attn_v": "q6_k", "attn_q": "q4_k", "attn_k": "f16", "ffn_gate": "q5_k", "ffn_up": "q4_0"}
    kinds |= {"ffn_down": "q8_0", "token_embd": "q6_k", "output": "bf16"}
    return kinds.get(name.split(".")[-2], "f32")


def kind_name(kind: Kinds) -> str:
    return kind if isinstance(kind, str) else "several"


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


@pytest.mark.parametrize("kind", [*QUANTISED, "f16", "bf16", some_kinds], ids=kind_name)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_bits_are_the_same_in_every_pass(kind: Kinds, tied: bool, tmp_path: Path) -> None:
    """For every number of rows, each of which is computed in another way, and of threads. Logits are those of float32
    weights: with floats to the bit, with quantised weights but for the rounding of rows to 16 bits."""
    twins = Twins(tmp_path, "qwen3", **WHOLE, tie_word_embeddings=tied)
    whole = logits_of(decoder_of(twins.write_expanded(kind)), [1] * LENGTH)
    assert np.isfinite(whole).all()
    assert whole.std() > 0.1
    decoder = decoder_of(twins.write(kind), 3)
    expected = logits_of(decoder, [1] * LENGTH)
    assert deviation(expected, whole) <= (0 if kind in FLOATS else ROUNDING)
    for rows in ROW_COUNTS:
        for threads in (1, 3):
            chunks = [rows] * (LENGTH // rows) + [LENGTH % rows] * (LENGTH % rows > 0)
            assert np.array_equal(logits_of(decoder, chunks, threads), expected), (rows, threads)


@pytest.mark.parametrize("kind", [kind for kind in QUANTISED if BLOCKS[kind] == 32])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_sizes_that_fill_no_panel(family: str, kind: str, tmp_path: Path) -> None:
    twins = Twins(tmp_path, family, **ODD)
    whole = logits_of(decoder_of(twins.write_expanded(kind)), [40, *[1] * 20])
    decoder = decoder_of(twins.write(kind), 2)
    expected = logits_of(decoder, [40, *[1] * 20])
    assert deviation(expected, whole) <= ROUNDING
    for chunks in ([60], [1] * 60, [3] * 20):
        assert np.array_equal(logits_of(decoder, chunks, 2)[-1], expected[-1])


@pytest.mark.parametrize("rope", ["default", "linear", "yarn", "yarn with turns"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_bits_are_those_of_the_folder(family: str, rope: str, tmp_path: Path) -> None:
    """Which `test_compiled.py` compares with transformers: the same weights and settings were read."""
    overrides: dict[str, Any] = {"sliding_window": None} if family == "mistral" else {}
    twins = Twins(tmp_path, family, **overrides, **ROPES[rope])
    expected, found = (logits_of(decoder_of(model), [len(TEXT)]) for model in (twins.folder, twins.write()))
    assert np.array_equal(found, expected)


GEMMA3_LAYERS = {
    "num_hidden_layers": 7,
    "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
}
"""As llama.cpp expects them."""
SPECIAL: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("qwen3_moe", {"moe_intermediate_size": 64}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", GEMMA3_LAYERS),
    "gpt-oss": ("gpt_oss", {"intermediate_size": 128, **ROPES["default"]}),
}
SPECIAL_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("qwen3_moe", {**WHOLE, "moe_intermediate_size": 256, "num_experts": 8}),
    "gemma2": ("gemma2", WHOLE),
    "gemma3": ("gemma3", {**WHOLE, **GEMMA3_LAYERS}),
    "gpt-oss": ("gpt_oss", {**WHOLE, "intermediate_size": 256}),
}
"""With sizes of whole blocks of every type."""


@pytest.mark.parametrize("name", [name for name in SPECIAL if name != "gpt-oss"])
def test_bits_of_special_layers_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    family, overrides = SPECIAL[name]
    twins = Twins(tmp_path, family, **overrides)
    expected, found = (logits_of(decoder_of(model), [len(TEXT)]) for model in (twins.folder, twins.write()))
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("rope", ["default", "yarn"])
@torch.inference_mode()
def test_logits_of_gpt_oss_are_those_of_the_library(rope: str, tmp_path: Path) -> None:
    """Whose angles llama.cpp computes from whole numbers of pairs."""
    overrides: dict[str, Any] = {"intermediate_size": 128, **(ROPES[rope] if rope == "default" else {})}
    file = Twins(tmp_path, "gpt_oss", **overrides).write()
    expected = tiny.build("gpt_oss", **overrides)(input_ids=torch.tensor([TEXT])).logits[0].numpy()
    assert np.abs(logits_of(decoder_of(file), [len(TEXT)]) - expected).max() < 1e-3


@pytest.mark.parametrize("name", SPECIAL)
def test_logits_of_special_layers_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    """Whose GELU comes from a table of float16."""
    family, overrides = SPECIAL[name]
    file = Twins(tmp_path, family, **overrides).write()
    assert deviation(logits_of(decoder_of(file), [len(TEXT)]), llama_logits(file)) < 2e-3


@pytest.mark.parametrize("kind", ["q4_0", "q4_k", "q6_k", "q8_0", "mxfp4", some_kinds], ids=kind_name)
@pytest.mark.parametrize("name", SPECIAL_KINDS)
def test_special_layers_with_quantised_weights(name: str, kind: Kinds, tmp_path: Path) -> None:
    """Logits are those of the same weights in float32, but where rounding decides between experts; bits are those of
    tokens computed alone."""
    family, overrides = SPECIAL_KINDS[name]
    twins = Twins(tmp_path, family, **overrides)
    whole = logits_of(decoder_of(twins.write_expanded(kind)), [1] * LENGTH)
    decoder = decoder_of(twins.write(kind), 3)
    expected = logits_of(decoder, [1] * LENGTH)
    assert np.median(np.abs(expected - whole)) <= ROUNDING * whole.std()
    for chunks in ([LENGTH], [7] * 5 + [5], [17, 17, 6]):
        assert np.array_equal(logits_of(decoder, chunks, 3), expected)


SPECIAL_REFUSED: dict[str, tuple[str, Mapping[str, Any]]] = {
    "no number of experts": ("experts", {"qwen3moe.expert_count": 0}),
    "shared experts": ("experts", {"qwen3moe.expert_shared_count": 1}),
    "shared experts of a size": ("experts", {"qwen3moe.expert_shared_feed_forward_length": 64}),
    "another weight of experts": ("experts", {"qwen3moe.expert_weights_scale": 2.5}),
    "no size of experts": ("experts", {"qwen3moe.expert_feed_forward_length": 0}),
    "no window": ("gemma3", {"gemma3.attention.sliding_window": "small"}),
    "another pattern": ("gemma3", {"gemma3.attention.sliding_window_pattern": [1, 0, 1]}),
    "pictures of a model that sees none": ("gemma2", {"gemma2.mm.tokens_per_image": 256}),
    "fewer layers than weights": ("gpt-oss", {"gpt-oss.block_count": 2}),
    "a cap that is none": ("gemma2", {"gemma2.attn_logit_softcapping": "fifty"}),
}


@pytest.mark.parametrize("case", SPECIAL_REFUSED)
def test_in_doubt_special_layers_are_left_to_llama_cpp(case: str, tmp_path: Path) -> None:
    name, settings = SPECIAL_REFUSED[case]
    family, overrides = SPECIAL[name]
    twins = Twins(tmp_path, family, **overrides)
    open_decoder(twins.write())
    with pytest.raises(UnsupportedModel):
        open_decoder(twins.write(**settings))


@pytest.mark.parametrize("window", [None, 0])
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt-oss"])
def test_windows_of_no_size(name: str, window: int | None, tmp_path: Path) -> None:
    """llama.cpp takes the window of Gemma 2 where a file has none."""
    family, overrides = SPECIAL[name]
    twins = Twins(tmp_path, family, **overrides)
    setting = f"{name}.attention.sliding_window"
    metadata = {key: value for key, value in twins.metadata.items() if key != setting}
    file = write_gguf(
        twins.path, metadata if window is None else metadata | {setting: window}, decoder_tensors(twins.folder)
    )
    if name == "gemma2" and window is None:
        assert open_decoder(file)[1].windows == (4096, 0, 4096, 0)
        return
    with pytest.raises(UnsupportedModel, match="windows of no size"):
        open_decoder(file)


def test_a_gemma_that_names_no_base_of_its_angles(tmp_path: Path) -> None:
    """As in Ollama's files, which name it otherwise: llama.cpp's default is none of the model's."""
    family, overrides = SPECIAL["gemma3"]
    twins = Twins(tmp_path, family, **overrides)
    metadata = {name: value for name, value in twins.metadata.items() if name != "gemma3.rope.freq_base"}
    with pytest.raises(UnsupportedModel, match="rotary embedding"):
        open_decoder(write_gguf(twins.path, metadata, decoder_tensors(twins.folder)))


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_scores_of_the_largest_gemma_have_another_scale(family: str, layers: int, tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 2, "head_dim": 16, "num_hidden_layers": layers, "layer_types": None}
    file = Twins(tmp_path, family, **sizes).write()
    assert open_decoder(file)[1].scale == (64 / 2) ** -0.5


@pytest.mark.parametrize("pattern", [0, 1, 3])
def test_so_manieth_layers_have_no_window(pattern: int, tmp_path: Path) -> None:
    """With 0, all have one."""
    windows = [0 if pattern and layer % pattern == pattern - 1 else 24 for layer in range(7)]
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    twins = Twins(tmp_path, "gemma3", num_hidden_layers=7, layer_types=kinds)
    settings: dict[str, Any] = {"gemma3.attention.sliding_window_pattern": pattern}
    file = twins.write(**settings)
    assert open_decoder(file)[1].windows == tuple(windows)
    expected = logits_of(decoder_of(twins.folder), [len(TEXT)])
    assert np.array_equal(logits_of(decoder_of(file), [len(TEXT)]), expected)


@pytest.mark.parametrize("window", [300, (1 << 31) + 5, (1 << 32) - 1])
def test_windows_of_the_whole_text(window: int, tmp_path: Path) -> None:
    twins = Twins(tmp_path, "gpt_oss", intermediate_size=128, sliding_window=300)
    expected = logits_of(decoder_of(twins.write()), [len(TEXT)])
    settings: dict[str, Any] = {"gpt-oss.attention.sliding_window": window}
    file = twins.write(**settings)
    assert np.array_equal(logits_of(decoder_of(file), [len(TEXT)]), expected)


@pytest.mark.parametrize("kind", [*QUANTISED, "f16", "bf16"])
def test_the_estimate_counts_weights_as_they_are_held(kind: str, tmp_path: Path) -> None:
    library = load_compiled_library().functions
    library.palaver_packed_bytes.restype = ctypes.c_int64
    library.palaver_packed_bytes.argtypes = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    checkpoint, _ = open_decoder(Twins(tmp_path, "qwen3", **WHOLE).write(kind))
    tensor = checkpoint.tensors["model.layers.1.mlp.up_proj.weight"]
    number = [*FLOAT_ARRAYS, *weights.QUANTISED].index(tensor.dtype)
    assert held_bytes(tensor) == library.palaver_packed_bytes(number, *tensor.shape)
    held = sum(map(held_bytes, checkpoint.tensors.values()))
    assert compiled_engine.compiled_fit(checkpoint).weights_bytes == held


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


@pytest.mark.parametrize("kind", [*QUANTISED, some_kinds], ids=kind_name)
def test_logits_of_quantised_weights_are_those_of_llama_cpp(kind: Kinds, tmp_path: Path) -> None:
    """Up to its own rounding: it rounds the other factor of each product to 8 bits. Any other order of the weights
    gives logits that have nothing in common with these."""
    twins = Twins(tmp_path, "qwen3", **WHOLE)
    file = twins.write(kind)
    found, expected = logits_of(decoder_of(file), [len(TEXT)]), llama_logits(file)
    assert deviation(found, expected) < 0.2


async def test_an_engine_says_what_the_file_says(tmp_path: Path) -> None:
    settings = {"general.sampling.temp": 0.5, "general.sampling.top_k": 7}
    file = Twins(tmp_path, "qwen3", **WHOLE).write("q5_k", **settings)
    engine = load(file, vocabulary=tiny.VOCABULARY, options=EngineOptions(context=100))
    try:
        out = await run(engine, Prompt(tuple(b"Hello")), Sampling(temperature=0, max_tokens=5, banned_ids=(tiny.END,)))
    finally:
        await engine.close()
    info = engine.info
    assert len(out.ids) == 5
    assert (info.model, info.context_length, info.vocabulary_size) == (file.name, 100, tiny.SIZE)
    assert (info.steps, info.exactness, info.reuse, info.dtype) == (COMPILED, BY_TEXT, "to the token", "Q5_K")
    assert info.end_ids == {tiny.END}
    assert info.defaults == Sampling(temperature=0.5, top_k=7)
    assert info.fingerprint.startswith("compiled/")


def test_a_model_in_two_files(tmp_path: Path) -> None:
    twins = Twins(tmp_path, "llama")
    expected = logits_of(decoder_of(twins.write()), [len(TEXT)])
    tensors = list(decoder_tensors(twins.folder).items())
    for number, part in enumerate((tensors[:9], tensors[9:])):
        metadata = twins.metadata if number == 0 else {}
        split = {"split.no": number, "split.count": 2, "split.tensors.count": len(tensors)}
        write_gguf(tmp_path / f"model-{number + 1:05}-of-00002.gguf", metadata | split, dict(part))
    assert np.array_equal(logits_of(decoder_of(tmp_path / "model-00001-of-00002.gguf"), [len(TEXT)]), expected)


# other files


REFUSED: dict[str, Mapping[str, Any]] = {
    "another architecture": {"general.architecture": "gemma"},
    "no model": {"general.type": "adapter"},
    "experts": {"qwen3.expert_count": 4},
    "a window": {"qwen3.attention.sliding_window": 24},
    "an unknown setting": {"qwen3.logit_scale": 2.0},
    "a part of each head": {"qwen3.rope.dimension_count": 8},
    "values of another size": {"qwen3.attention.value_length": 8},
    "heads by layer": {"qwen3.attention.head_count_kv": [2, 2, 1]},
    "no heads": {"qwen3.attention.head_count": 0},
    "a head of no size": {"qwen3.attention.key_length": "large"},
    "a head that nobody has": {"qwen3.attention.key_length": 1 << 31, "qwen3.attention.value_length": 1 << 31},
    "frequencies by length": {"qwen3.rope.scaling.type": "longrope", "qwen3.rope.scaling.factor": 2.0},
    "a factor of 0": {"qwen3.rope.scaling.type": "linear", "qwen3.rope.scaling.factor": 0.0},
    "another vocabulary": {"qwen3.vocab_size": 5},
    "fewer layers": {"qwen3.block_count": 2},
    "more layers than anybody has": {"qwen3.block_count": 4_000_000_000},
    "a number that is none": {"qwen3.attention.layer_norm_rms_epsilon": "small"},
    "no context": {"qwen3.context_length": 0},
    "a context that is no number": {"qwen3.context_length": "long", "qwen3.attention.sliding_window": 24},
    "a window that is no number": {"qwen3.attention.sliding_window": "small"},
    "several kinds of angles": {"qwen3.rope.scaling.type": [1, 2]},
    "a number that is infinite": {"qwen3.attention.layer_norm_rms_epsilon": math.inf},
}


@pytest.mark.parametrize("case", REFUSED)
def test_in_doubt_it_is_left_to_llama_cpp(case: str, tmp_path: Path) -> None:
    twins = Twins(tmp_path, "qwen3")
    open_decoder(twins.write())
    with pytest.raises(UnsupportedModel):
        open_decoder(twins.write(**REFUSED[case]))


def test_settings_without_effect(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "qwen3.attention.sliding_window": 4096,
        "qwen3.rope.scaling.type": "none",
        "qwen3.expert_count": 0,
    }
    settings |= {"qwen3.vocab_size": tiny.SIZE, "qwen3.rope.dimension_count": 16, "general.quantized_by": "somebody"}
    open_decoder(Twins(tmp_path, "qwen3").write(**settings))


@pytest.mark.parametrize(("name", "other"), [("ffn_norm", "post_attention_norm"), ("attn_norm", "attn_norm")])
def test_two_tensors_for_one_purpose(name: str, other: str, tmp_path: Path) -> None:
    family, overrides = SPECIAL["gpt-oss"]
    twins = Twins(tmp_path, family, **overrides)
    tensors = decoder_tensors(twins.folder)
    tensors[f"blk.00.{name}.weight" if name == other else f"blk.0.{name}.weight"] = tensors[f"blk.0.{other}.weight"]
    with pytest.raises(UnsupportedModel, match="two tensors"):
        open_decoder(write_gguf(twins.path, twins.metadata, tensors))


def test_pictures_that_another_file_encodes(tmp_path: Path) -> None:
    """As Google's own files of Gemma 3 say. Those of Ollama have the encoder's weights, too."""
    family, overrides = SPECIAL["gemma3"]
    settings: dict[str, Any] = {"gemma3.mm.tokens_per_image": 256, "gemma3.vision.block_count": 27}
    twins = Twins(tmp_path, family, **overrides)
    open_decoder(twins.write(**settings))
    tensors = decoder_tensors(twins.folder) | {"mm.mm_soft_emb_norm.weight": ("f32", np.ones(64, np.float32))}
    with pytest.raises(UnsupportedModel, match="mm_soft_emb_norm"):
        open_decoder(write_gguf(twins.path, twins.metadata | settings, tensors))


@pytest.mark.parametrize("name", ["attn_sinks.weight", "ffn_gate_inp.bias", "ffn_down_exps.bias", "attn_output.bias"])
def test_parts_that_gpt_oss_always_has(name: str, tmp_path: Path) -> None:
    family, overrides = SPECIAL["gpt-oss"]
    twins = Twins(tmp_path, family, **overrides)
    tensors = decoder_tensors(twins.folder)
    del tensors[f"blk.2.{name}"]
    with pytest.raises(UnsupportedModel, match=r"layers\.2\."):
        open_decoder(write_gguf(twins.path, twins.metadata, tensors))


def test_experts_beside_no_shared_ones(tmp_path: Path) -> None:
    """As llama.cpp's converter writes files of Qwen3-Coder."""
    family, overrides = SPECIAL["experts"]
    settings: dict[str, Any] = {"qwen3moe.expert_shared_feed_forward_length": 0}
    open_decoder(Twins(tmp_path, family, **overrides).write(**settings))


@pytest.mark.parametrize("part", ["gate", "up"])
def test_no_gate_that_is_no_number_is_clamped(part: str, tmp_path: Path) -> None:
    family, overrides = SPECIAL["gpt-oss"]
    twins = Twins(tmp_path, family, **overrides)
    tensors = decoder_tensors(twins.folder)
    kind, values = tensors[f"blk.1.ffn_{part}_exps.bias"]
    tensors[f"blk.1.ffn_{part}_exps.bias"] = (kind, np.full_like(values, np.nan))
    assert np.isnan(logits_of(decoder_of(write_gguf(twins.path, twins.metadata, tensors)), [20])).all()


def test_more_experts_than_weights(tmp_path: Path) -> None:
    """Their names are never listed: a small file could claim millions."""
    family, overrides = SPECIAL["experts"]
    twins = Twins(tmp_path, family, **overrides)
    tensors = decoder_tensors(twins.folder)
    del tensors["blk.0.ffn_gate_exps.weight"]
    settings: dict[str, Any] = {"qwen3moe.block_count": len(tensors), "qwen3moe.expert_count": 1024}
    with pytest.raises(UnsupportedModel, match="more layers or experts than weights"):
        open_decoder(write_gguf(twins.path, twins.metadata | settings, tensors))


Change = Callable[[dict[str, tuple[str, Array]]], object]
CHANGES: dict[str, Change] = {
    "a tensor less": lambda tensors: tensors.pop("blk.1.attn_norm.weight"),
    "an unknown tensor": lambda tensors: tensors.update({"blk.1.attn_sinks.weight": tensors["output_norm.weight"]}),
    "another shape": lambda tensors: tensors.update({"blk.1.attn_v.weight": ("f32", np.ones((64, 64), np.float32))}),
    "a norm of rounded numbers": lambda tensors: tensors.update({"output_norm.weight": ("q8_0", np.ones(64))}),
    "factors of another size": lambda tensors: tensors.update({"rope_freqs.weight": ("f32", np.ones(3, np.float32))}),
    "factors of 0": lambda tensors: tensors.update({"rope_freqs.weight": ("f32", np.zeros(8, np.float32))}),
    "half a bias": lambda tensors: tensors.update({"blk.0.attn_q.bias": ("f32", np.ones(64, np.float32))}),
}


@pytest.mark.parametrize("case", CHANGES)
def test_other_weights_are_left_to_llama_cpp(case: str, tmp_path: Path) -> None:
    twins = Twins(tmp_path, "qwen3")
    tensors = decoder_tensors(twins.folder)
    CHANGES[case](tensors)
    with pytest.raises(UnsupportedModel):
        open_decoder(write_gguf(twins.path, twins.metadata, tensors))


@pytest.mark.parametrize("part", ["gate", "down"])
def test_biases_of_experts_are_floats(part: str, tmp_path: Path) -> None:
    """Those of all experts are one tensor of two dimensions, as matrices are."""
    family, overrides = SPECIAL["gpt-oss"]
    twins = Twins(tmp_path, family, **overrides)
    tensors, name = decoder_tensors(twins.folder), f"blk.1.ffn_{part}_exps.bias"
    tensors[name] = ("q4_0", tensors[name][1])
    with pytest.raises(UnsupportedModel, match="weights of the type Q4_0"):
        open_decoder(write_gguf(twins.path, twins.metadata, tensors))


def test_types_that_are_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """IQ4_NL has blocks of the same size."""
    monkeypatch.setitem(gguf_files._TENSOR_TYPES, "q4_0", 20)
    with pytest.raises(UnsupportedModel, match="weights of the type IQ4_NL"):
        open_decoder(Twins(tmp_path, "qwen3").write("q4_0"))


def test_sizes_that_are_no_vectors(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="multiples of 16"):
        open_decoder(Twins(tmp_path, "llama", hidden_size=72, head_dim=16).write())


@pytest.mark.parametrize("kind", ["f32", "q4_k"])
def test_a_file_that_shrinks(kind: str, tmp_path: Path) -> None:
    """Between reading its header and its weights."""
    file = Twins(tmp_path, "qwen3", **WHOLE).write(kind)
    checkpoint, config = open_decoder(file)
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(BrokenModel, match="not as long as its header says"):
        load_decoder(checkpoint, config, load_compiled_library(), 1)
    with pytest.raises(BrokenModel, match="damaged"):
        open_decoder(file)


def test_damaged_headers(tmp_path: Path) -> None:
    """Each loads, or is refused in one sentence. `benchmarks/gguf_fuzz.py` tries many more."""
    twins, rng = Twins(tmp_path, "llama", **ROPES["llama3"]), random.Random(1)
    whole = twins.write("q8_0").read_bytes()
    header = len(whole) - sum(one.nbytes for one in open_decoder(twins.path)[0].tensors.values())
    refusals: list[str | None] = []
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(24, header)] = rng.randrange(256)
        twins.path.write_bytes(data)
        refusals.append(_refusal(twins.path))
    refused = [why for why in refusals if why is not None]
    assert 20 < len(refused) < 280
    assert not any("\n" in why for why in refused)


def _refusal(file: Path) -> str | None:
    """Why the file is not run; None where it is."""
    try:
        logits_of(decoder_of(file), [3])
    except (UnsupportedModel, BrokenModel) as error:
        return str(error)
    return None


# the choice


@pytest.fixture
def plain(tmp_path: Path) -> ResolvedModel:
    return ResolvedModel(tmp_path, gguf=Twins(tmp_path, "qwen3").write())


@pytest.fixture
def cpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux without a GPU, with llama.cpp."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(engine_choice, "has_accelerator", lambda: False)
    monkeypatch.setattr(engine_choice, "has_llamacpp", lambda: True)


@pytest.mark.usefixtures("cpu_machine")
def test_compiled_steps_run_plain_decoders(plain: ResolvedModel, tmp_path: Path) -> None:
    for options in (LoadOptions(), LoadOptions(device="cpu"), LoadOptions(exact=True), LoadOptions(compiled=True)):
        assert check_engine_options(plain, options) == COMPILED
    assert make_spec(plain, (), LoadOptions(engine=COMPILED)).compiled is True
    other = write_gguf(tmp_path / "other.gguf", byte_vocabulary() | {"general.architecture": "mamba"})
    assert pick_engine(ResolvedModel(tmp_path, gguf=other)) == "llamacpp"


@pytest.mark.usefixtures("cpu_machine")
def test_what_only_llama_cpp_does(plain: ResolvedModel, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter.gguf"
    adapter.touch()
    for options in (
        LoadOptions(engine="llamacpp"),
        LoadOptions(compiled=False),
        LoadOptions(gpu_layers=0),
        LoadOptions(device="gpu"),
        LoadOptions(adapter=adapter),
        LoadOptions(mmproj=adapter),
    ):
        assert check_engine_options(plain, options) == "llamacpp"
    assert pick_engine(replace(plain, mmproj=adapter)) == "llamacpp"
    with pytest.raises(BadParameter, match="compiled steps run on the CPU"):
        check_engine_options(plain, LoadOptions(compiled=True, device="gpu"))
    for options in (LoadOptions(compiled=True, adapter=adapter), LoadOptions(engine=COMPILED, mmproj=adapter)):
        with pytest.raises(BadParameter, match=r"adapter\.gguf"):
            check_engine_options(plain, options)


@pytest.mark.usefixtures("cpu_machine")
def test_the_machine_decides(plain: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_choice, "has_accelerator", lambda: True)
    assert pick_engine(plain) == "llamacpp"
    assert pick_engine(plain, LoadOptions(device="cpu")) == COMPILED
    monkeypatch.setattr(engine_choice, "has_llamacpp", lambda: False)
    assert pick_engine(plain) == COMPILED
    monkeypatch.setattr(build, "can_build", lambda: False)
    assert pick_engine(plain) == "llamacpp", "which says what to install"


@pytest.mark.usefixtures("cpu_machine")
def test_a_file_is_looked_at_again_when_it_changes(tmp_path: Path) -> None:
    twins = Twins(tmp_path, "qwen3")
    model = ResolvedModel(tmp_path, gguf=twins.write())
    assert pick_engine(model) == COMPILED
    changed: dict[str, Any] = {"qwen3.logit_scale": 2.0}
    twins.write(**changed)
    assert pick_engine(model) == "llamacpp"


def test_where_they_fail_llama_cpp_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they are required, or llama.cpp is not installed."""
    file = Twins(tmp_path, "qwen3").write()
    monkeypatch.setattr(compiled_engine, "available_bytes", lambda: 1000)
    monkeypatch.setattr(loader, "has_llamacpp", lambda: True)
    assert loader.load_gguf(file, vocabulary=tiny.VOCABULARY, options=EngineOptions()) is None
    with pytest.raises(DoesNotFit):
        loader.load_gguf(file, vocabulary=tiny.VOCABULARY, options=EngineOptions(compiled=True))
    monkeypatch.setattr(loader, "has_llamacpp", lambda: False)
    with pytest.raises(DoesNotFit):
        loader.load_gguf(file, vocabulary=tiny.VOCABULARY, options=EngineOptions())
