"""Writes LoRA adapters as peft does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


def write_peft_adapter(model: Path, folder: Path, **settings: Any) -> Path:
    """An adapter with random matrices, which changes what the model says. Needs peft."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(model)
    chosen = {"r": 4, "lora_alpha": 8, "target_modules": list(TARGETS), "init_lora_weights": False, **settings}
    peft.get_peft_model(base, peft.LoraConfig(**chosen)).save_pretrained(folder)
    return folder
