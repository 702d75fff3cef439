"""Plain decoders are recognised by their configuration, and read as the transformers library reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from palaver.engines.compiled.decoder import RotaryTable
from palaver.engines.core.checkpoint import open_checkpoint
from palaver.engines.core.decoder_config import (
    FAMILIES,
    read_decoder_config,
    read_generation_config,
    read_plain_config,
)
from palaver.engines.core.runner import UnsupportedModel
from palaver.engines.torch.loader import end_ids, quiet, sampling_defaults
from tests.engines import tiny

THETA = {"rope_theta": 10_000.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **THETA}},
    "llama3": {
        "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 500_000.0}
        | {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
    },
    "yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, **THETA}},
    "yarn with turns": {
        "rope_parameters": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, **THETA}
        | {"beta_fast": 8.0, "beta_slow": 0.5}
    },
    "yarn with options": {
        "rope_parameters": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, **THETA}
        | {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False}
    },
    "yarn with its own factor": {
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, **THETA}
        | {"attention_factor": 1.25}
    },
}


def save(folder: Path, family: str = "qwen3", **overrides: Any) -> Any:
    return tiny.make(family, folder, **overrides)


def edit(folder: Path, name: str = "config.json", **settings: Any) -> Path:
    """Changes settings of a saved model; None removes one."""
    path = folder / name
    config = json.loads(path.read_text()) if path.exists() else {}
    config |= settings
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


@pytest.mark.parametrize("rope", ROPES)
def test_angles_are_those_of_the_library(rope: str, tmp_path: Path) -> None:
    model = tiny.build("llama", head_dim=64, **ROPES[rope])
    with quiet():
        model.save_pretrained(tmp_path)
    frequencies = read_decoder_config(open_checkpoint(tmp_path)).frequencies
    library = model.model.rotary_emb
    np.testing.assert_allclose(frequencies.angles, library.inv_freq.numpy(), rtol=3e-7)
    positions = [0, 1, 100, 511]
    cos, sin = library(torch.empty(1), torch.tensor([positions]))
    table = RotaryTable(frequencies, 511).up_to(511)[positions]
    np.testing.assert_allclose(table[..., 0], cos[0, :, :32].numpy(), atol=2e-5)
    np.testing.assert_allclose(table[..., 1], sin[0, :, :32].numpy(), atol=2e-5)


PLAIN = ("llama", "qwen2", "qwen3")
COMPILED = ("mistral", "qwen3_moe", "gemma2", "gemma3")
"""With windows, experts, or other norms: for compiled steps alone."""
GGUF_ALONE = ("gpt_oss",)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_no_other_family_is_taken_for_one_that_is_known(family: str, folder_of: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(folder_of(family))
    if family in (*PLAIN, *COMPILED):
        assert read_decoder_config(checkpoint).tensor_shapes().keys() == checkpoint.tensors.keys()
    else:
        with pytest.raises(UnsupportedModel):
            read_decoder_config(checkpoint)


@pytest.mark.parametrize("family", [*PLAIN, *COMPILED])
def test_plain_decoders_alone(family: str, folder_of: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(folder_of(family))
    if family in PLAIN:
        read_plain_config(checkpoint)
    else:
        with pytest.raises(UnsupportedModel):
            read_plain_config(checkpoint)


def test_all_families_are_tried_here() -> None:
    """`test_compiled.py` compares the logits of each with the library's."""
    names = {"gemma3": "gemma3_text"}
    assert {names.get(family, family) for family in (*PLAIN, *COMPILED, *GGUF_ALONE)} == set(FAMILIES)


SPECIAL: dict[str, tuple[str, dict[str, Any]]] = {
    "no number of experts": ("qwen3_moe", {"num_local_experts": None}),
    "more experts than there are": ("qwen3_moe", {"num_experts_per_tok": 5}),
    "more experts than anybody has": ("qwen3_moe", {"num_local_experts": 4_000_000_000}),
    "layers without experts": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "experts in some layers": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "weights of experts that nobody states": ("qwen3_moe", {"norm_topk_prob": None}),
    "a window of a kind of model that has none": ("qwen3_moe", {"sliding_window": 24, "use_sliding_window": True}),
    "attention to later tokens": ("gemma3", {"use_bidirectional_attention": True}),
    "a window of no size": ("gemma3", {"sliding_window": 0}),
    "a window that is no number": ("gemma2", {"sliding_window": "large"}),
    "another kind of attention": ("gemma2", {"layer_types": ["sliding_attention", "chunked_attention"] * 2}),
    "kinds of fewer layers": ("gemma2", {"layer_types": ["sliding_attention", "full_attention"]}),
    "kinds of attention that the library ignores": ("mistral", {"layer_types": ["full_attention"] * 3}),
    "a pattern below zero": ("gemma3", {"layer_types": None, "sliding_window_pattern": -1}),
    "another gate": ("gemma2", {"hidden_activation": "gelu"}),
    "a cap below zero": ("gemma2", {"final_logit_softcapping": -30.0}),
    "a scale of no size": ("gemma3", {"query_pre_attn_scalar": 0}),
    "angles of one kind of layer": ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
    "angles of other layers alone": ("gemma3", {"rope_parameters": {"rope_type": "default", **THETA}}),
    "no angles": ("gemma3", {"rope_parameters": None}),
    "angles of no layer with a window": ("gemma3", {"rope_parameters": None, "rope_theta": 1e6}),
    "angles of windows alone": ("gemma3", {"rope_parameters": None, "rope_local_base_freq": 1e4}),
    "angles without bases": (
        "gemma3",
        {"rope_parameters": {f"{kind}_attention": {"rope_type": "default"} for kind in ("full", "sliding")}}
        | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
    ),
    "angles that are a number": ("gemma3", {"rope_parameters": 1e6}),
    "angles in two places": ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "no word about a cap of logits": ("gemma2", {"final_logit_softcapping": None}),
    "no norms of what layers add": ("gemma2", {"model_type": "gemma"}),
}


@pytest.mark.parametrize("case", SPECIAL)
def test_in_doubt_special_layers_are_left_to_the_library(case: str, tmp_path: Path) -> None:
    family, settings = SPECIAL[case]
    folder = save(tmp_path, family)
    read_decoder_config(open_checkpoint(folder))
    with pytest.raises(UnsupportedModel):
        read_decoder_config(open_checkpoint(edit(folder, **settings)))


def test_gemmas_of_older_versions_are_read_as_the_library_reads_them(tmp_path: Path) -> None:
    """Published files name two bases of angles, and each so manieth layer without a window."""
    folder = save(tmp_path, "gemma3", num_hidden_layers=7, layer_types=None)
    expected = read_decoder_config(open_checkpoint(folder))
    edit(folder, rope_parameters=None, layer_types=None, _sliding_window_pattern=None, tie_word_embeddings=None)
    edit(folder, rope_theta=1e6, rope_local_base_freq=10_000.0, rope_scaling={"rope_type": "linear", "factor": 8.0})
    found = read_decoder_config(open_checkpoint(folder))
    assert found.windows == expected.windows == (24, 24, 24, 24, 24, 0, 24)
    assert found.tied
    assert expected.local_frequencies is not None
    assert found.local_frequencies is not None
    assert np.array_equal(found.local_frequencies.angles, expected.local_frequencies.angles)
    np.testing.assert_allclose(found.frequencies.angles, expected.frequencies.angles / 8, rtol=1e-6)


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_settings_that_only_gemma3_has(family: str, tmp_path: Path) -> None:
    folder = edit(save(tmp_path, family), layer_types=None)
    expected = read_decoder_config(open_checkpoint(folder))
    found = read_decoder_config(open_checkpoint(edit(folder, sliding_window_pattern=3, rope_local_base_freq=5.0)))
    assert found.windows == expected.windows
    assert found.local_frequencies is None


def test_settings_that_only_gemma_has(tmp_path: Path) -> None:
    folder = edit(save(tmp_path, "llama"), attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    config = read_decoder_config(open_checkpoint(folder))
    assert (config.score_cap, config.logit_cap) == (0, 0)


REFUSED: dict[str, dict[str, Any]] = {
    "a window": {"sliding_window": 24, "use_sliding_window": True},
    "windows in some layers": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "another activation": {"hidden_act": "gelu"},
    "no head size": {"head_dim": None},
    "no number of keys": {"num_key_value_heads": None},
    "a number that is none": {"rms_norm_eps": "small"},
    "quantised": {"quantization_config": {"quant_method": "fp8"}},
    "biases that are not in the files": {"attention_bias": True},
    "dynamic angles": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **THETA}},
    "a part of each head": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, **THETA}},
    "scaled queries": {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.5, **THETA}},
    "angles without a factor": {"rope_parameters": {"rope_type": "linear", **THETA}},
    "a length beside the angles": {"original_max_position_embeddings": 128},
    "another number of layers": {"num_hidden_layers": 2},
    "other sizes": {"intermediate_size": 64},
    "tied, with an output layer in the files": {"tie_word_embeddings": True},
    "an unknown family": {"model_type": "plain"},
    "a size that nobody has": {"hidden_size": 10**400},
    "heads that nobody has": {"head_dim": 1 << 30},
    "a number without an end": {"rms_norm_eps": 10**400},
    "a number that is infinite": {"rms_norm_eps": math.inf},
    "several kinds of angles": {"rope_parameters": {"rope_type": ["default"], **THETA}},
    "kinds of attention that are no list": {"layer_types": 3},
    "kinds of attention without names": {"layer_types": [["full_attention"]] * 3},
}


@pytest.mark.parametrize("case", REFUSED)
def test_in_doubt_it_is_left_to_the_library(case: str, tmp_path: Path) -> None:
    folder = save(tmp_path)
    read_decoder_config(open_checkpoint(folder))
    with pytest.raises(UnsupportedModel):
        read_decoder_config(open_checkpoint(edit(folder, **REFUSED[case])))


def test_settings_of_older_versions_are_read_as_the_library_reads_them(tmp_path: Path) -> None:
    """Published files have `rope_theta` and `rope_scaling`, and a window that is turned off."""
    folder = save(tmp_path)
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    edit(folder, rope_parameters=None, layer_types=None, rope_theta=1e6, rope_scaling=scaling)
    edit(folder, sliding_window=4096, use_sliding_window=False)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    frequencies = read_decoder_config(open_checkpoint(folder)).frequencies
    np.testing.assert_allclose(frequencies.angles, model.model.rotary_emb.inv_freq.numpy(), rtol=3e-7)
    assert frequencies.scaling == model.model.rotary_emb.attention_scaling


GENERATION: dict[str, dict[str, Any] | None] = {
    "none": None,
    "empty": {},
    "sampling": {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [3, 5]},
    "greedy": {"do_sample": False, "temperature": 0.6},
    "a temperature alone": {"temperature": 0.7, "eos_token_id": 9},
    "neither": {"top_k": 10, "min_p": 0.1},
    "sampling without a temperature": {"do_sample": True},
    "penalties": {"do_sample": True, "repetition_penalty": 1.1},
    "out of bounds": {"do_sample": True, "temperature": 0.5, "top_p": 7.0},
}


@pytest.mark.parametrize("case", GENERATION)
def test_defaults_are_those_of_the_library(case: str, tmp_path: Path) -> None:
    folder = save(tmp_path)
    path = folder / "generation_config.json"
    path.unlink(missing_ok=True)
    if GENERATION[case] is not None:
        path.write_text(json.dumps(GENERATION[case]))
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model.generation_config, GenerationConfig)
    defaults, ends = read_generation_config(open_checkpoint(folder))
    assert defaults == sampling_defaults(model.generation_config)
    assert ends == end_ids(model)


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "x"}'])
def test_a_broken_generation_config_is_left_to_the_library(text: str, tmp_path: Path) -> None:
    folder = save(tmp_path)
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(UnsupportedModel):
        read_generation_config(open_checkpoint(folder))


def test_sampling_in_the_configuration_is_left_to_the_library(tmp_path: Path) -> None:
    folder = edit(save(tmp_path), temperature=0.5)
    (folder / "generation_config.json").unlink()
    with pytest.raises(UnsupportedModel):
        read_generation_config(open_checkpoint(folder))
