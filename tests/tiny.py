"""Small tokenizers and chat templates for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence

from palaver.formats.tokenizer import _BYTES

TURNS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
THINK = ("<think>", "</think>")


def byte_level(
    special: Sequence[str] = TURNS, added: Sequence[str] = THINK, merges: Sequence[tuple[str, str]] = ()
) -> str:
    """The definition of a byte-level tokenizer: all bytes, a few merges, and the given control tokens."""
    vocabulary = {character: place for place, character in enumerate(sorted(_BYTES, key=_BYTES.__getitem__))}
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    tokens = [(text, True) for text in special] + [(text, False) for text in added]
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": len(vocabulary) + place,
                    "content": text,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": is_special,
                }
                for place, (text, is_special) in enumerate(tokens)
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocabulary,
                "merges": [list(merge) for merge in merges],
            },
        }
    )


MERGES = [
    ("t", "h"),
    ("th", "i"),
    ("Ġ", "t"),
    ("Ġ", "a"),
    ("e", "r"),
    ("i", "n"),
    ("n", "k"),
    ("thi", "nk"),
    ("<", "/"),
]

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and message.reasoning_content is defined and loop.last %}
{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""
"""The model opens thinking itself; a variable makes the prompt close it."""

PREOPENED = CHATML.replace(
    "{%- if enable_thinking is defined and enable_thinking is false %}",
    "{%- if not (enable_thinking is defined and enable_thinking is false) %}{{- '<think>\\n' }}{%- else %}",
)
"""The generation prompt opens thinking."""

SPLITTING = """\
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and '</think>' in content %}
{%- set content = content.split('</think>')[-1] %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""
"""Ignores a reasoning field, removes thinking from past contents, and always opens thinking."""

PLAIN = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""No thinking at all."""

STRINGS = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
