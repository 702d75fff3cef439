"""What a checkpoint says about its diffusion: the mask token, what a block sees, and the defaults of its sampler.

A folder says it in `config.json`, under `diffusion`; axolotl's training configurations say it under the same name. The
mask token is read from there or from the tokenizer, and never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from palaver.errors import BrokenModel

DEFAULT_STEPS = 128
DEFAULT_TOKENS = 256
MAX_STEPS = 10_000
MAX_BLOCK = 100_000
GEMMA = "diffusion_gemma"
"""The model type of DiffusionGemma, which has a sampler of its own and no mask token."""
NO_MASK_TOKEN = (
    "{name} names no mask token, so it can't be run as a diffusion model: set `diffusion.mask_token_id` in its"
    " config.json, or `mask_token` in its tokenizer_config.json. A model that writes left to right needs no --engine."
)


class Visibility(StrEnum):
    """What the tokens of a block see."""

    BIDIRECTIONAL = "bidirectional"
    """Every token sees all others, before and behind it. Nothing computed can be reused exactly."""
    BLOCK_CAUSAL = "block_causal"
    """The context is read causally. A block sees the context and itself: keys and values of the context are exact."""


@dataclass(frozen=True, slots=True)
class DiffusionConfig:
    mask_id: int | None
    """None for a model that starts from random tokens instead of masked ones."""
    attention: Visibility = Visibility.BIDIRECTIONAL
    shift: bool = True
    """Whether the state at a token predicts the token after it, as in the causal model that it was trained from."""
    block_length: int | None = None
    """The tokens of a block. None: the whole reply is one block."""
    steps: int = DEFAULT_STEPS
    """The steps of a block."""
    tokens: int = DEFAULT_TOKENS
    """The longest reply if a request names none. Only for bidirectional models, whose replies have to be laid out."""
    temperature: float = 0.0


def find_diffusion(folder: Path, trained: Mapping[str, Any] | None = None) -> Mapping[str, Any] | None:
    """The settings of a diffusion model: those of its training configuration, else its own. None for other models."""
    if trained is not None:
        return trained
    config = _read_json(folder / "config.json")
    settings = {} if config.get("model_type") == GEMMA else config.get("diffusion")
    return settings if isinstance(settings, Mapping) else None


def read_diffusion_config(folder: Path, settings: Mapping[str, Any], vocabulary_size: int) -> DiffusionConfig:
    """Raises BrokenModel for settings that are missing or wrong."""
    reader = _SettingsReader(folder, settings)
    return DiffusionConfig(
        mask_id=_mask_id(folder, settings, vocabulary_size),
        attention=reader.visibility(),
        shift=reader.flag("shift", True),
        block_length=reader.whole(("block_length",), None, MAX_BLOCK),
        steps=reader.whole(("steps", "generation_steps", "num_diffusion_steps"), DEFAULT_STEPS, MAX_STEPS),
        tokens=reader.whole(("tokens", "generation_max_length"), DEFAULT_TOKENS, MAX_BLOCK),
        temperature=reader.temperature(),
    )


class _SettingsReader:
    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        self._settings = settings

    def whole(self, names: tuple[str, ...], default: Any, most: int) -> Any:
        name, value = next(((name, self._settings[name]) for name in names if self._settings.get(name)), ("", None))
        if value is None:
            return default
        if type(value) is not int or not 1 <= value <= most:
            raise self._wrong(name, f"must be a whole number from 1 to {most:,}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._settings.get(name, default)
        if type(value) is not bool:
            raise self._wrong(name, "must be true or false")
        return value

    def visibility(self) -> Visibility:
        value = self._settings.get("attention", Visibility.BIDIRECTIONAL.value)
        if value not in set(Visibility):
            raise self._wrong("attention", f"must be one of {', '.join(Visibility)}")
        return Visibility(value)

    def temperature(self) -> float:
        value = next((self._settings[n] for n in ("temperature", "generation_temperature") if n in self._settings), 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 5:
            raise self._wrong("temperature", "must be a number from 0 to 5")
        return float(value)

    def _wrong(self, name: str, why: str) -> BrokenModel:
        return BrokenModel(f"{self._folder.name}: diffusion.{name} {why} (got {self._settings.get(name)!r}).")


def _mask_id(folder: Path, settings: Mapping[str, Any], vocabulary_size: int) -> int:
    """By its id, by its text, or as the tokenizer's mask token."""
    found = settings.get("mask_token_id")
    if found is None:
        text = settings.get("mask_token_str") or settings.get("mask_token") or _tokenizer_mask(folder)
        found = _added_tokens(folder).get(text) if isinstance(text, str) else None
    if found is None:
        raise BrokenModel(NO_MASK_TOKEN.format(name=folder.name))
    if type(found) is not int or not 0 <= found < vocabulary_size:
        raise BrokenModel(f"{folder.name}: the mask token {found!r} is not in the model's {vocabulary_size:,} tokens.")
    return found


def _tokenizer_mask(folder: Path) -> str | None:
    value = _read_json(folder / "tokenizer_config.json").get("mask_token")
    return value.get("content") if isinstance(value, Mapping) else value


def _added_tokens(folder: Path) -> dict[str, int]:
    """The tokens with a text of their own; a mask token is always one of them."""
    listed = _read_json(folder / "tokenizer.json").get("added_tokens") or ()
    return {entry["content"]: entry["id"] for entry in listed}


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the loader of the model reports it
        return {}
    return value if isinstance(value, dict) else {}
