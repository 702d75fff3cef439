"""A training configuration of axolotl as the name of a model: what it trained can be talked to.

Only what says how to load the result is read; how it was trained does not matter here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from palaver.errors import BrokenModel

_OWN = "tokenizer_default"
_FALLBACK = "tokenizer_default_fallback_"
_ADAPTERS = ("lora", "qlora")
_OUTPUT = "./model-out"
"""Where results go when the configuration does not say."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """What is to be loaded."""

    model: str
    """A folder or a hub id."""
    adapter: Path | None = None
    """The folder of a LoRA adapter that belongs on top of the model."""
    saved: Path | None = None
    """The folder that the training wrote, where there is one: a chat template in it is the one it trained with."""
    template: str | None = None
    """The text of a chat template that stands in the configuration."""
    name: str | None = None
    """The name of the chat template it was trained with."""
    fallback: str | None = None
    """The name of one for a model that brings none."""
    context: int | None = None
    """How many tokens it was trained on at most."""
    notes: tuple[str, ...] = ()
    """What a person should know of what was chosen, or could not be."""


def is_configuration(name: str) -> bool:
    path = Path(name).expanduser()
    return path.suffix in (".yml", ".yaml") and path.is_file()


def read_configuration(path: Path) -> TrainedModel:
    """BrokenModel for what is no such configuration, or names what is not there."""
    config = _mapping(path)
    base = config.get("base_model")
    if not isinstance(base, str) or not base:
        raise BrokenModel(f"{path}: there is no base_model.")
    weights = _weights(path, config, _place(path, base) or base)
    length = config.get("sequence_len")
    return replace(_talking(path, config, weights), context=length if isinstance(length, int) else None)


def _mapping(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BrokenModel(f"{path} can't be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise BrokenModel(f"{path} holds no settings.")
    return value


def _weights(path: Path, config: Mapping[str, Any], base: str) -> TrainedModel:
    """The model, the adapter on top of it, and what to tell of the choice."""
    kind = config.get("adapter")
    output = str(config.get("lora_model_dir") or config.get("output_dir") or _OUTPUT)
    folder = _folder(path, output)
    if not kind:
        if folder is not None and (folder / "config.json").is_file():
            return TrainedModel(str(folder), saved=folder)
        return TrainedModel(base, notes=(f"{output} holds no trained model yet: this is {base} as it was before.",))
    if kind not in _ADAPTERS:
        raise BrokenModel(f"{path}: adapters of the kind {kind!r} can't be loaded; known are {', '.join(_ADAPTERS)}.")
    if folder is None or not (folder / "adapter_config.json").is_file():
        raise BrokenModel(f"{path}: there is no adapter in {output} (adapter_config.json): train it first.")
    return TrainedModel(base, folder, saved=folder)


def _talking(path: Path, config: Mapping[str, Any], trained: TrainedModel) -> TrainedModel:
    """With the chat template that the configuration names, else its data sets; else the model's own is meant."""
    for place in (config, *_datasets(config)):
        name = place.get("chat_template")
        if name:
            return _named(path, str(name), place.get("chat_template_jinja"), trained)
    types = {one["type"] for one in _datasets(config) if isinstance(one.get("type"), str)}
    if any("chatml" in one for one in types):
        return replace(trained, name="chatml")
    if any(one.startswith("alpaca") for one in types):
        return replace(trained, fallback="alpaca")
    return trained


def _named(path: Path, name: str, jinja: Any, trained: TrainedModel) -> TrainedModel:
    if name == _OWN:
        return trained
    if name.startswith(_FALLBACK):
        return replace(trained, fallback=name.removeprefix(_FALLBACK))
    if name == "jinja" and isinstance(jinja, str):
        return replace(trained, template=_text(path, jinja))
    if "{{" in name or "{%" in name or name.endswith(".jinja"):
        return replace(trained, template=_text(path, name))
    return replace(trained, name=name)


def _text(path: Path, value: str) -> str:
    """A template's text, or that of the file it names."""
    if "{" in value:
        return value
    found = _place(path, value)
    if found is None:
        raise BrokenModel(f"{path}: there is no chat template {value}.")
    return Path(found).read_text(encoding="utf-8")


def _datasets(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    given = config.get("datasets")
    return [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []


def _place(path: Path, name: str) -> str | None:
    """Where a relative path leads, from the folder one is in or from the configuration's."""
    given = Path(name).expanduser()
    for candidate in (given, path.parent / given):
        if candidate.exists():
            return str(candidate)
    return None


def _folder(path: Path, name: str) -> Path | None:
    found = _place(path, name)
    return Path(found) if found is not None and Path(found).is_dir() else None
