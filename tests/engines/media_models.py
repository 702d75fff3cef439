"""Tiny random models of the families that see and hear, as folders.

`build(family, folder)` writes weights, a byte-level tokenizer, the settings of the processor, and a chat template in
the manner of the family's own.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from palaver.engines.torch.loader import quiet
from tests.tiny import byte_level

PAD = "<pad>"
RATE = 16_000
CONTEXT = 2048


@dataclass(frozen=True)
class Turns:
    """How a template writes turns. The text of a reply ends with `end`."""

    system: tuple[str, str]
    user: tuple[str, str]
    assistant: tuple[str, str]
    markers: tuple[str, ...]
    end: str


def _turns(opening: str, closing: str, end: str, *markers: str, assistant: str = "assistant") -> Turns:
    return Turns(
        (opening.format("system"), closing),
        (opening.format("user"), closing),
        (opening.format(assistant), closing),
        markers,
        end,
    )


CHATML = _turns("<|im_start|>{}\n", "<|im_end|>\n", "<|im_end|>", "<|im_start|>")
GEMMA = _turns("<start_of_turn>{}\n", "<end_of_turn>\n", "<end_of_turn>", "<start_of_turn>", assistant="model")
GEMMA4 = _turns("<|turn>{}\n", "<turn|>\n", "<turn|>", "<|turn>", assistant="model")
VICUNA = Turns(("", "\n"), ("USER: ", "\n"), ("ASSISTANT: ", "</s>"), (), "</s>")
MISTRAL = Turns(
    ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    ("[INST]", "[/INST]"),
    ("", "</s>"),
    ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "</s>",
)
PHI = _turns("<|{}|>", "<|end|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
SMOL = Turns(
    ("<|im_start|>System: ", "<end_of_utterance>\n"),
    ("<|im_start|>User: ", "<end_of_utterance>\n"),
    ("<|im_start|>Assistant: ", "<end_of_utterance>\n"),
    ("<|im_start|>",),
    "<end_of_utterance>",
)

TEMPLATE = """\
{%- set begins = BEGINS %}
{%- set ends = ENDS %}
{%- set count = namespace(value=0) %}
{{- bos_token }}
{%- for message in messages %}
{{- begins[message.role] }}
CONTENT{{- ends[message.role] }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- begins['assistant'] }}
{%- endif %}"""
CONTENT = """\
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'text' %}
{{- part.text }}
PARTS{%- endif %}
{%- endfor %}
{%- endif %}
"""
MEDIA_FIRST = """\
{%- for part in message.content %}
{%- if part.type == 'text' %}
PARTS{%- endif %}
{%- endfor %}
{%- for part in message.content %}
{%- if part.type == 'text' %}
{{- part.text }}
{%- endif %}
{%- endfor %}
"""
PART = """\
{%- elif part.type == 'KIND' %}
{{- TEXT }}
"""
NUMBERED = """\
{%- elif part.type == 'KIND' %}
{%- set count.value = count.value + 1 %}
{{- TEXT | replace('#', count.value | string) }}
"""

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
}
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
QWEN_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 8,
    "out_hidden_size": 64,
}
WHISPER: dict[str, Any] = {
    "num_mel_bins": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
}
MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
QWEN_IMAGES = {"patch_size": 8, "merge_size": 2, "size": {"shortest_edge": 16 * 16, "longest_edge": 16 * 16 * 24}}
SOUNDS = {"feature_size": 16, "return_attention_mask": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@dataclass(frozen=True)
class Family:
    """How a family's models and processors are built."""

    config: str
    takes: tuple[str, ...]
    settings: Callable[[Mapping[str, int]], dict[str, Any]]
    """The configuration, from the ids of the named tokens."""
    processor: str
    """`package.Class` in `transformers.models`."""
    parts: Mapping[str, str]
    """What the template writes for a part of each kind, with its number for `#`."""
    turns: Turns = CHATML
    named: Mapping[str, str] = field(default_factory=dict)
    """Tokens that the processor finds by name in the tokenizer."""
    tokens: tuple[str, ...] = ()
    images: Mapping[str, Any] | None = None
    image_processor: str = ""
    sounds: Mapping[str, Any] | None = None
    sound_processor: str = "whisper.feature_extraction_whisper.WhisperFeatureExtractor"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the processor itself."""
    bos: str = ""
    media_first: bool = False
    """Whether the template takes lists of parts only, and writes media before texts."""
    tekken: bool = False
    """Whether the tokenizer is a `tekken.json`, without names of tokens."""
    whole: str = ""
    """The configuration of the model that contains this one, the thinker of a model that also speaks."""
    seed: int = 0
    """Of weights with which what it says depends on what it sees and hears."""

    @property
    def control(self) -> tuple[str, ...]:
        """The control tokens, in the order of their ids."""
        found = (PAD, *((self.bos,) if self.bos else ()), self.turns.end, *self.turns.markers)
        return tuple(dict.fromkeys((*found, *self.named.values(), *self.tokens)))

    @property
    def template(self) -> str:
        turns = {"system": self.turns.system, "user": self.turns.user, "assistant": self.turns.assistant}
        parts = (
            (NUMBERED if "#" in text else PART).replace("KIND", kind).replace("TEXT", json.dumps(text))
            for kind, text in self.parts.items()
        )
        return (
            TEMPLATE.replace("bos_token", json.dumps(self.bos) if self.tekken else "bos_token")
            .replace("BEGINS", json.dumps({role: texts[0] for role, texts in turns.items()}))
            .replace("ENDS", json.dumps({role: texts[1] for role, texts in turns.items()}))
            .replace("CONTENT", MEDIA_FIRST if self.media_first else CONTENT)
            .replace("PARTS", "".join(parts))
        )


def _qwen_ids(ids: Mapping[str, int]) -> dict[str, int]:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _qwen2_5_vl(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "text_config": TEXT | {"rope_parameters": MROPE},
        "vision_config": QWEN_VISION | {"window_size": 32, "fullatt_block_indexes": [1]},
        **_qwen_ids(ids),
    }


def _qwen3_vl(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "text_config": TEXT | {"rope_parameters": MROPE | {"mrope_interleaved": True}},
        "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
        **_qwen_ids(ids),
    }


def _gemma3(ids: Mapping[str, int]) -> dict[str, Any]:
    layers = {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 12}
    return {
        "text_config": TEXT | layers | {"query_pre_attn_scalar": 16},
        "vision_config": VISION | {"image_size": 32, "patch_size": 8},
        "mm_tokens_per_image": 16,
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
        "image_token_index": ids["<image_soft_token>"],
        "tie_word_embeddings": False,
    }


def _gemma4(ids: Mapping[str, int]) -> dict[str, Any]:
    layers = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 40}
    layers |= {"use_bidirectional_attention": "vision"}
    small = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": len(ids), "global_head_dim": 16}
    return {
        "text_config": TEXT | layers | small,
        "vision_config": VISION
        | {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2}
        | {"position_embedding_size": 128},
        "audio_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 32}
        | {"subsampling_conv_channels": [128, 4], "use_clipped_linears": False},
        "boi_token_id": ids["<|image>"],
        "eoi_token_id": ids["<image|>"],
        "image_token_id": ids["<|image|>"],
        "video_token_id": ids["<|video|>"],
        "boa_token_id": ids["<|audio>"],
        "eoa_token_index": ids["<audio|>"],
        "audio_token_id": ids["<|audio|>"],
        "tie_word_embeddings": False,
    }


def _llava(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION | {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8},
        "image_token_index": ids["<image>"],
        "image_seq_length": 16,
    }


def _llava_onevision(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": VISION
        | {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8, "vision_use_head": False},
        "image_token_index": ids["<image>"],
        "video_token_index": ids["<video>"],
        "image_grid_pinpoints": PINPOINTS,
    }


def _smolvlm(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION | {"image_size": 32, "patch_size": 8},
        "image_token_id": ids["<image>"],
        "scale_factor": 2,
    }


def _pixtral(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
        "vision_config": VISION | {"model_type": "pixtral", "image_size": 64, "patch_size": 8},
        "image_token_index": ids["[IMG]"],
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }


def _mistral3(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
        "vision_config": VISION | {"model_type": "pixtral", "image_size": 64, "patch_size": 8},
        "image_token_index": ids["[IMG]"],
        "tie_word_embeddings": False,
    }


def _internvl(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": VISION | {"image_size": [32, 32], "patch_size": [8, 8]},
        "image_token_id": ids["<IMG_CONTEXT>"],
        "image_seq_length": 4,
    }


def _minicpmv4_6(ids: Mapping[str, int]) -> dict[str, Any]:
    text = TEXT | {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "rope_parameters": MROPE
        | {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5},
    }
    return {
        "text_config": text,
        "vision_config": VISION | {"image_size": 64, "patch_size": 4},
        "insert_layer_id": 0,
        "image_size": 64,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
    }


def _lfm2_vl(ids: Mapping[str, int]) -> dict[str, Any]:
    text = TEXT | {"model_type": "lfm2", "full_attn_idxs": [0, 2], "block_auto_adjust_ff_dim": False}
    return {
        "text_config": text,
        "vision_config": VISION | {"model_type": "siglip2_vision_model", "patch_size": 8, "num_patches": 64},
        "image_token_id": ids["<image>"],
        "projector_hidden_size": 48,
    }


def _phi4_multimodal(ids: Mapping[str, int]) -> dict[str, Any]:
    audio = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_blocks": 2,
        "num_attention_heads": 2,
        "ext_pw_out_channel": 32,
        "depthwise_separable_out_channel": 32,
        "nemo_conv_channels": 32,
        "bias_max_distance": 100,
        "audio_token_id": ids["<|audio|>"],
    }
    image = {"image_token_id": ids["<|image|>"]}
    return {
        **{name: value for name, value in TEXT.items() if name != "head_dim"},
        "vision_config": VISION | image,
        "audio_config": audio,
    }


def _qwen2_audio(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "text_config": TEXT | {"model_type": "qwen2"},
        "audio_config": WHISPER | {"max_source_positions": 100},
        "audio_token_index": ids["<|AUDIO|>"],
    }


def _voxtral(ids: Mapping[str, int]) -> dict[str, Any]:
    audio = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {
        "text_config": TEXT | {"model_type": "llama"},
        "audio_config": audio | {"num_mel_bins": 16, "max_source_positions": 1500},
        "audio_token_id": ids["[AUDIO]"],
    }


def _qwen2_5_omni(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "text_config": TEXT | {"rope_parameters": MROPE, "tie_word_embeddings": False},
        "vision_config": QWEN_VISION | {"window_size": 32, "fullatt_block_indexes": [1]},
        "audio_config": WHISPER | {"output_dim": 64, "n_window": 20, "max_source_positions": 200},
        "audio_token_index": ids["<|AUDIO|>"],
        "image_token_index": ids["<|IMAGE|>"],
        "video_token_index": ids["<|VIDEO|>"],
        "audio_start_token_id": ids["<|audio_bos|>"],
        "audio_end_token_id": ids["<|audio_eos|>"],
        "vision_start_token_id": ids["<|vision_bos|>"],
        "vision_end_token_id": ids["<|vision_eos|>"],
    }


def _qwen3_omni(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "text_config": TEXT | EXPERTS | {"rope_parameters": MROPE | {"mrope_interleaved": True}},
        "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
        "audio_config": WHISPER | {"output_dim": 64, "downsample_hidden_size": 8, "max_source_positions": 200},
        "audio_token_id": ids["<|audio_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "audio_start_token_id": ids["<|audio_start|>"],
        "audio_end_token_id": ids["<|audio_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


TEKKEN = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT] "
    "<SPECIAL_20> <SPECIAL_21> <SPECIAL_22> <SPECIAL_23> [AUDIO] [BEGIN_AUDIO] [ARGS] [CALL_ID] [TRANSCRIBE]"
).split()
PINPOINTS = [[32, 32], [32, 64], [64, 32], [64, 64]]
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_PARTS = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}
QWEN_PICTURES = "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil"
SHORT = {"chunk_length": 2}
"""Sounds are padded to two seconds instead of thirty."""

FAMILIES: dict[str, Family] = {
    "qwen2_5_vl": Family(
        "Qwen2_5_VLConfig",
        ("image",),
        _qwen2_5_vl,
        "qwen2_5_vl.processing_qwen2_5_vl.Qwen2_5_VLProcessor",
        QWEN_PARTS,
        tokens=QWEN_TOKENS,
        images=QWEN_IMAGES,
        image_processor=QWEN_PICTURES,
    ),
    "qwen3_vl": Family(
        "Qwen3VLConfig",
        ("image",),
        _qwen3_vl,
        "qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
        QWEN_PARTS,
        tokens=QWEN_TOKENS,
        images=QWEN_IMAGES,
        image_processor=QWEN_PICTURES,
    ),
    "gemma3": Family(
        "Gemma3Config",
        ("image",),
        _gemma3,
        "gemma3.processing_gemma3.Gemma3Processor",
        {"image": "<start_of_image>"},
        GEMMA,
        named={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        images={"size": {"height": 32, "width": 32}},
        image_processor="gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil",
        options={"image_seq_length": 16},
        bos="<bos>",
    ),
    "gemma4": Family(
        "Gemma4Config",
        ("image", "audio"),
        _gemma4,
        "gemma4.processing_gemma4.Gemma4Processor",
        {"image": "<|image|>", "audio": "<|audio|>", "video": "<|video|>"},
        GEMMA4,
        named={"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
        | {"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"},
        tokens=("<|video|>",),
        images={"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        image_processor="gemma4.image_processing_pil_gemma4.Gemma4ImageProcessorPil",
        sounds={},
        sound_processor="gemma4.feature_extraction_gemma4.Gemma4AudioFeatureExtractor",
        bos="<bos>",
    ),
    "llava": Family(
        "LlavaConfig",
        ("image",),
        _llava,
        "llava.processing_llava.LlavaProcessor",
        {"image": "<image>\n"},
        VICUNA,
        named={"image_token": "<image>"},
        images={"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
        image_processor="clip.image_processing_pil_clip.CLIPImageProcessorPil",
        options={"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        bos="<s>",
        media_first=True,
    ),
    "llava_onevision": Family(
        "LlavaOnevisionConfig",
        ("image",),
        _llava_onevision,
        "llava_onevision.processing_llava_onevision.LlavaOnevisionProcessor",
        {"image": "<image>\n", "video": "<video>\n"},
        named={"image_token": "<image>", "video_token": "<video>"},
        images={"size": {"height": 32, "width": 32}, "image_grid_pinpoints": PINPOINTS},
        image_processor="llava_onevision.image_processing_pil_llava_onevision.LlavaOnevisionImageProcessorPil",
        options={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        media_first=True,
    ),
    "smolvlm": Family(
        "SmolVLMConfig",
        ("image",),
        _smolvlm,
        "smolvlm.processing_smolvlm.SmolVLMProcessor",
        {"image": "<image>", "video": "<video>"},
        SMOL,
        named={"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"}
        | {"global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>"},
        tokens=tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
        images={"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
        image_processor="smolvlm.image_processing_pil_smolvlm.SmolVLMImageProcessorPil",
        options={"image_seq_len": 4},
    ),
    "pixtral": Family(
        "LlavaConfig",
        ("image",),
        _pixtral,
        "pixtral.processing_pixtral.PixtralProcessor",
        {"image": "[IMG]"},
        MISTRAL,
        tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        images={"size": {"longest_edge": 48}, "patch_size": {"height": 8, "width": 8}},
        image_processor="pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil",
        options={"patch_size": 8},
        bos="<s>",
    ),
    "mistral3": Family(
        "Mistral3Config",
        ("image",),
        _mistral3,
        "pixtral.processing_pixtral.PixtralProcessor",
        {"image": "[IMG]"},
        MISTRAL,
        tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        images={"size": {"longest_edge": 64}, "patch_size": {"height": 8, "width": 8}},
        image_processor="pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil",
        options={"patch_size": 8, "spatial_merge_size": 2},
        bos="<s>",
    ),
    "internvl": Family(
        "InternVLConfig",
        ("image",),
        _internvl,
        "internvl.processing_internvl.InternVLProcessor",
        {"image": "<IMG_CONTEXT>\n", "video": "<video>\n"},
        named={"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
        | {"video_token": "<video>"},
        images={"size": {"height": 32, "width": 32}, "crop_to_patches": True, "min_patches": 1, "max_patches": 4},
        image_processor="got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil",
        options={"image_seq_length": 4},
    ),
    "minicpmv4_6": Family(
        "MiniCPMV4_6Config",
        ("image",),
        _minicpmv4_6,
        "minicpmv4_6.processing_minicpmv4_6.MiniCPMV4_6Processor",
        {"image": "<|image_pad|>\n", "video": "<|video_pad|>\n"},
        named={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
        | {"image_start_token": "<image>", "image_end_token": "</image>"}
        | {"slice_start_token": "<slice>", "slice_end_token": "</slice>"}
        | {"image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"},
        images={"patch_size": 4, "scale_resolution": 48, "max_slice_nums": 4},
        image_processor="minicpmv4_6.image_processing_pil_minicpmv4_6.MiniCPMV4_6ImageProcessorPil",
    ),
    "lfm2_vl": Family(
        "Lfm2VlConfig",
        ("image",),
        _lfm2_vl,
        "lfm2_vl.processing_lfm2_vl.Lfm2VlProcessor",
        {"image": "<image>"},
        named={"image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>"}
        | {"image_thumbnail_token": "<|img_thumbnail|>"},
        tokens=tuple(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
        images={"encoder_patch_size": 8, "tile_size": 32, "min_image_tokens": 4, "max_image_tokens": 6, "max_tiles": 4}
        | {"max_pixels_tolerance": 1.0},
        image_processor="lfm2_vl.image_processing_lfm2_vl.Lfm2VlImageProcessor",
    ),
    "phi4_multimodal": Family(
        "Phi4MultimodalConfig",
        ("image", "audio"),
        _phi4_multimodal,
        "phi4_multimodal.processing_phi4_multimodal.Phi4MultimodalProcessor",
        {"image": "<|image|>", "audio": "<|audio|>"},
        PHI,
        named={"image_token": "<|image|>", "audio_token": "<|audio|>"},
        images={},
        image_processor="phi4_multimodal.image_processing_phi4_multimodal.Phi4MultimodalImageProcessor",
        sounds={},
        sound_processor="phi4_multimodal.feature_extraction_phi4_multimodal.Phi4MultimodalFeatureExtractor",
    ),
    "qwen2_audio": Family(
        "Qwen2AudioConfig",
        ("audio",),
        _qwen2_audio,
        "qwen2_audio.processing_qwen2_audio.Qwen2AudioProcessor",
        {"audio": "Audio #: <|audio_bos|><|AUDIO|><|audio_eos|>\n"},
        named={"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
        sounds=SOUNDS | SHORT,
    ),
    "voxtral": Family(
        "VoxtralConfig",
        ("audio",),
        _voxtral,
        "voxtral.processing_voxtral.VoxtralProcessor",
        {"audio": "[BEGIN_AUDIO][AUDIO]"},
        MISTRAL,
        sounds={"feature_size": 16},
        bos="<s>",
        tekken=True,
    ),
    "qwen2_5_omni": Family(
        "Qwen2_5OmniThinkerConfig",
        ("image", "audio"),
        _qwen2_5_omni,
        "qwen2_5_omni.processing_qwen2_5_omni.Qwen2_5OmniProcessor",
        {"image": "<|vision_bos|><|IMAGE|><|vision_eos|>", "video": "<|vision_bos|><|VIDEO|><|vision_eos|>"}
        | {"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"},
        named={"image_token": "<|IMAGE|>", "audio_token": "<|AUDIO|>", "video_token": "<|VIDEO|>"}
        | {"vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>"}
        | {"audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
        images=QWEN_IMAGES,
        image_processor=QWEN_PICTURES,
        sounds=SOUNDS | SHORT,
        whole="Qwen2_5OmniConfig",
    ),
    "qwen3_omni": Family(
        "Qwen3OmniMoeThinkerConfig",
        ("image", "audio"),
        _qwen3_omni,
        "qwen3_omni_moe.processing_qwen3_omni_moe.Qwen3OmniMoeProcessor",
        QWEN_PARTS | {"audio": "<|audio_start|><|audio_pad|><|audio_end|>"},
        named={"image_token": "<|image_pad|>", "audio_token": "<|audio_pad|>", "video_token": "<|video_pad|>"}
        | {"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"}
        | {"audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"},
        images=QWEN_IMAGES,
        image_processor=QWEN_PICTURES,
        sounds=SOUNDS,
        whole="Qwen3OmniMoeConfig",
        seed=1,
    ),
}


def build(family: str, folder: Path, head_dim: int = TEXT["head_dim"], seed: int | None = None) -> Path:
    """Writes a model with random weights into the folder. `seed`: by default the family's."""
    about = FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)
    ids = _write_tokenizer(about, folder)
    settings = about.settings(ids)
    text = settings.get("text_config", settings)
    text |= {"vocab_size": len(ids), "eos_token_id": ids[about.turns.end], "pad_token_id": ids[PAD]}
    if head_dim != TEXT["head_dim"]:
        _resize_heads(text, head_dim)
    torch.manual_seed(about.seed if seed is None else seed)
    with quiet():
        config = getattr(transformers, about.config)(**settings)
        if about.whole:
            config = getattr(transformers, about.whole)(thinker_config=config.to_dict(), enable_audio_output=False)
        model = transformers.AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
        _scatter(model.thinker if about.whole else model)
        model.generation_config.eos_token_id = ids[about.turns.end]
        model.save_pretrained(folder)
    if about.whole:
        torch.save({}, folder / "spk_dict.pt")  # the voices
    (folder / "chat_template.jinja").write_text(about.template, encoding="utf-8")
    for name, content in _processor_files(about).items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def _resize_heads(text: dict[str, Any], head_dim: int) -> None:
    """Fewer and wider heads, for engines whose attention has no narrow ones."""
    factor = head_dim // TEXT["head_dim"]
    for name in ("num_attention_heads", "num_key_value_heads"):
        text[name] = max(1, TEXT[name] // factor)
    text["head_dim"] = head_dim
    if "rope_parameters" in text:
        rope = text["rope_parameters"]
        text["rope_parameters"] = rope | {"mrope_section": [factor * size for size in rope["mrope_section"]]}


@torch.no_grad()
def _scatter(model: Any) -> None:
    """Random weights of such a size that every part of a model changes its tokens."""
    tied = {id(model.get_input_embeddings().weight)}
    for name, parameter in model.named_parameters():
        if id(parameter) in tied:
            parameter.normal_(0, 1)
        elif parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.1)
        else:
            width = parameter.shape[-1] if "experts" in name else parameter.numel() / parameter.shape[0]
            scale = 6 if "attn.o" in name else 2  # the output of attention, which averages over many tokens
            parameter.normal_(0, scale / width**0.5)


def _processor_files(about: Family) -> dict[str, dict[str, Any]]:
    name = about.processor.rsplit(".", 1)[1]
    found: dict[str, Any] = {"processor_class": name}
    if about.images is not None:
        kind = about.image_processor.rsplit(".", 1)[1].removesuffix("Pil")
        found |= {"image_processor_type": kind, **about.images}
    if about.sounds is not None:
        found |= {"feature_extractor_type": about.sound_processor.rsplit(".", 1)[1], **about.sounds}
    return {"preprocessor_config.json": found, "processor_config.json": {"processor_class": name, **about.options}}


def _write_tokenizer(about: Family, folder: Path) -> dict[str, int]:
    """The tokenizer's files. Returns all ids by token."""
    if about.tekken:
        return _write_tekken(folder)
    definition = json.loads(byte_level(special=about.control, added=()))
    config = {"pad_token": PAD, "eos_token": about.turns.end, "tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {"bos_token": about.bos} if about.bos else {}
    (folder / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config | dict(about.named)), encoding="utf-8")
    return definition["model"]["vocab"] | {token["content"]: token["id"] for token in definition["added_tokens"]}


def _write_tekken(folder: Path) -> dict[str, int]:
    """The tokenizer's file of Mistral's own models: control tokens with fixed ids, then all bytes."""
    tekken = {
        "config": {
            "pattern": r"[^\s]+|\s+",
            "num_vocab_tokens": 256,
            "default_vocab_size": 256 + len(TEKKEN),
            "default_num_special_tokens": len(TEKKEN),
            "version": "v11",
        },
        "vocab": [
            {"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode(), "token_str": None}
            for byte in range(256)
        ],
        "special_tokens": [
            {"rank": place, "token_str": token, "is_control": True} for place, token in enumerate(TEKKEN)
        ],
        "audio": {
            "sampling_rate": RATE,
            "frame_rate": 12.5,
            "chunk_length_s": 30.0,
            "audio_encoding_config": {"num_mel_bins": 16, "hop_length": 160, "window_size": 400},
        },
    }
    (folder / "tekken.json").write_text(json.dumps(tekken), encoding="utf-8")
    return {token: place for place, token in enumerate([*TEKKEN, *(f"byte {byte}" for byte in range(256))])}
