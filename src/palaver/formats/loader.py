"""Loads the format of a model folder or a GGUF file: the tokenizer, the chat template and the special tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palaver.errors import BrokenModel, NoTemplate
from palaver.formats.facts import FILE_NAME
from palaver.formats.format import CompletionFormat, TemplateFormat
from palaver.formats.gguf_tokenizer import load_gguf_tokenizer, named_gguf_tokens
from palaver.formats.template import Template
from palaver.formats.tokenizer import FastTokenizer, load_tokenizer
from palaver.gguf import GGUFHeader

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_format(
    folder: Path,
    tokenizer: FastTokenizer | None = None,
    template: Path | None = None,
    corrections: Path | None = None,
) -> TemplateFormat:
    """Raises NoTemplate if the model has no chat template and none is given. `corrections` is a TOML file of facts; the
    default is `palaver-format.toml` in the model's folder, if it exists."""
    config = _read_config(folder)
    source = template.read_text(encoding="utf-8") if template else template_text(folder, config)
    if source is None:
        raise NoTemplate(folder.name)
    name = template.name if template else f"chat template of {folder.name}"
    format = TemplateFormat(Template(source, name), tokenizer or load_tokenizer(folder), named_tokens(folder, config))
    overrides = corrections or folder / FILE_NAME
    return format.with_overrides(overrides) if corrections or overrides.is_file() else format


def load_gguf_format(
    header: GGUFHeader, tokenizer: FastTokenizer | None = None, template: Path | None = None
) -> TemplateFormat:
    """The format of a GGUF file. Raises NoTemplate if it has no chat template and none is given."""
    source = template.read_text(encoding="utf-8") if template else header.text("tokenizer.chat_template")
    if source is None:
        raise NoTemplate(header.name)
    name = template.name if template else f"chat template of {header.name}"
    return TemplateFormat(Template(source, name), tokenizer or load_gguf_tokenizer(header), named_gguf_tokens(header))


def load_completion(folder: Path, tokenizer: FastTokenizer | None = None) -> CompletionFormat:
    return CompletionFormat(tokenizer or load_tokenizer(folder))


def named_tokens(folder: Path, config: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The special tokens that templates read by name, such as bos_token."""
    found = {**_read_json(folder / "special_tokens_map.json"), **(_read_config(folder) if config is None else config)}
    return {name: text for name in _TOKEN_NAMES if (text := _token_text(found.get(name))) is not None}


def template_text(folder: Path, config: Mapping[str, Any] | None = None) -> str | None:
    """The chat template in a folder, if any."""
    config = _read_config(folder) if config is None else config
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    separate = _read_json(folder / "chat_template.json").get("chat_template")
    return _default_template(separate if separate is not None else config.get("chat_template"))


def named_template(folder: Path, name: str) -> str | None:
    """The chat template that the tokenizer has under this name, beside its default, if any."""
    path = folder / "additional_chat_templates" / f"{name}.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    listed = _read_config(folder).get("chat_template")
    named = {entry["name"]: entry["template"] for entry in listed} if isinstance(listed, list) else {}
    found = named.get(name)
    return found if isinstance(found, str) else None


def _default_template(source: Any) -> str | None:
    """Some models have several named templates; `default` is the one for chat."""
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default") or next(iter(named.values()), None)
    return source if isinstance(source, str) else None


def _read_config(folder: Path) -> dict[str, Any]:
    return _read_json(folder / "tokenizer_config.json")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BrokenModel(f"The model's {path.name} is not JSON ({error}): download the model again.") from None
    return value if isinstance(value, dict) else {}


def _token_text(token: Any) -> str | None:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None
