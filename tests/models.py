"""Creates a tiny random model in a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.tiny import CHATML, MERGES, STRINGS, THINK, byte_level


def make_model(
    folder: Path,
    template: str | None = CHATML,
    context: int = 512,
    seed: int = 0,
    added: Sequence[str] = THINK,
) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    definition = byte_level(added=added, merges=MERGES)
    tokens = {token["content"]: token["id"] for token in json.loads(definition)["added_tokens"]}
    config = Qwen3Config(
        vocab_size=max(tokens.values()) + 1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=tokens["<|im_end|>"],
        bos_token_id=None,
        pad_token_id=tokens["<|endoftext|>"],
        initializer_range=0.4,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(definition, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(STRINGS), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
