"""Reads axolotl's training configurations, so that one can be used as the name of the model it trained, and has the
chat templates by the names that training configurations use, for models without one.

Only the settings that determine how to load the result are read. Each template is written from the known format:
markers, and the whitespace between them. In a format without a system role, the system prompt is put before the first
message. Formats with a built-in system prompt are left out."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from palaver.errors import BrokenModel

_TOKENIZER_DEFAULT = "tokenizer_default"
_FALLBACK_PREFIX = "tokenizer_default_fallback_"
_ADAPTERS = ("lora", "qlora")
_DEFAULT_OUTPUT = "./model-out"
"""axolotl's default for `output_dir`."""
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
"""A folder in `output_dir` with the model as it was after so many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """What a training configuration says about the model that it trains."""

    adapter: Path | None = None
    """The folder of a LoRA adapter to merge into the model."""
    output_folder: Path | None = None
    """The folder that training wrote, if it exists: a chat template in it is the one that was trained with."""
    template: str | None = None
    """The text of a chat template in the configuration."""
    template_name: str | None = None
    """The name of the chat template that the model was trained with (`templates.find_template`)."""
    fallback_template: str | None = None
    """The name of the chat template for a model without one."""
    context_length: int | None = None
    """The sequence length of the training."""
    quantize_bits: int | None = None
    """The weights are quantised to this many bits when they are loaded, as for the training."""
    notes: tuple[str, ...] = ()
    """Notices for the user about what was chosen."""
    diffusion: Mapping[str, Any] | None = None
    """The settings under `diffusion`, of a training that makes a diffusion model."""


@dataclass(frozen=True, slots=True)
class TrainedModel(TrainingSettings):
    """The result of a training configuration."""

    model: str
    """A folder or a hub id."""


def is_configuration(name: str) -> bool:
    """Whether it names a configuration, or a checkpoint of its training, as in `run.yml@checkpoint-200`."""
    path, _ = split_checkpoint(name)
    return path.suffix in (".yml", ".yaml") and path.is_file()


def split_checkpoint(name: str) -> tuple[Path, str]:
    """The file of a configuration, and the name of the checkpoint behind it; empty if there is none."""
    file, _, checkpoint = name.rpartition("@")
    if not file or not _CHECKPOINT.fullmatch(checkpoint):
        file, checkpoint = name, ""
    return Path(os.path.expanduser(file)), checkpoint


def list_checkpoints(path: Path) -> tuple[str, ...]:
    """The checkpoints that the training of a configuration has written, the oldest first."""
    try:
        folder = _find_folder(path, _output(_read_yaml(path)))
        found = [one.name for one in folder.iterdir() if one.is_dir()] if folder is not None else []
    except (BrokenModel, OSError):
        return ()
    numbers = {int(match[1]): name for name in found if (match := _CHECKPOINT.fullmatch(name))}
    return tuple(numbers[number] for number in sorted(numbers))


def read_configuration(path: Path, checkpoint: str = "") -> TrainedModel:
    """The result of the training, or one of its checkpoints. Raises BrokenModel if the file is no configuration or
    refers to missing files."""
    config = _read_yaml(path)
    base = config.get("base_model")
    if not isinstance(base, str) or not base:
        raise BrokenModel(f"{path}: there is no base_model.")
    base = _find_path(path, base) or base
    weights = _find_checkpoint(path, config, base, checkpoint) if checkpoint else _find_weights(path, config, base)
    length = config.get("sequence_len")
    return replace(
        _with_template(path, config, weights),
        context_length=length if isinstance(length, int) else None,
        quantize_bits=_quantize_bits(path, config),
        diffusion=_diffusion(path, config),
    )


def _diffusion(path: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    plugins = config.get("plugins")
    named = any("diffusion" in str(one) for one in plugins) if isinstance(plugins, list) else False
    settings = config.get("diffusion")
    if settings is None and not named:
        return None
    if not isinstance(settings, dict | None):
        raise BrokenModel(f"{path}: diffusion must be a mapping of settings.")
    return dict(settings or {})


def _read_yaml(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BrokenModel(f"{path} can't be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise BrokenModel(f"{path} is no mapping of settings.")
    return value


def _quantize_bits(path: Path, config: Mapping[str, Any]) -> int | None:
    bits = next((bits for bits in (4, 8) if config.get(f"load_in_{bits}bit")), None)
    if bits is not None and find_spec("bitsandbytes") is None:
        raise BrokenModel(f"{path}: load_in_{bits}bit needs the Python package bitsandbytes, which is not installed.")
    return bits


def _find_weights(path: Path, config: Mapping[str, Any], base: str) -> TrainedModel:
    """The model, its adapter, and notices about the choice."""
    adapter_type = _adapter_type(path, config)
    output = str(config.get("lora_model_dir") or _output(config))
    folder = _find_folder(path, output)
    if not adapter_type:
        if folder is not None and (folder / "config.json").is_file():
            return TrainedModel(str(folder), output_folder=folder)
        return TrainedModel(base, notes=(f"{output} holds no trained model yet: this is {base} as it was before.",))
    if folder is None or not (folder / "adapter_config.json").is_file():
        raise BrokenModel(f"{path}: there is no adapter in {output} (adapter_config.json): train it first.")
    return TrainedModel(base, adapter=folder, output_folder=folder)


def _find_checkpoint(path: Path, config: Mapping[str, Any], base: str, checkpoint: str) -> TrainedModel:
    output, adapter_type = _output(config), _adapter_type(path, config)
    folder = _find_folder(path, f"{output}/{checkpoint}")
    if folder is None or not (folder / ("adapter_config.json" if adapter_type else "config.json")).is_file():
        there = ", ".join(list_checkpoints(path)) or "none"
        raise BrokenModel(f"{path}: there is no {checkpoint} in {output} (there are: {there}).")
    saved = any(folder.glob("chat_template*")) or (folder / "tokenizer_config.json").is_file()
    model, adapter = (base, folder) if adapter_type else (str(folder), None)
    return TrainedModel(model, adapter=adapter, output_folder=folder if saved else folder.parent)


def _adapter_type(path: Path, config: Mapping[str, Any]) -> str | None:
    kind = config.get("adapter")
    if kind and kind not in _ADAPTERS:
        raise BrokenModel(f"{path}: adapters of the kind {kind!r} can't be loaded; known are {', '.join(_ADAPTERS)}.")
    return kind or None


def _output(config: Mapping[str, Any]) -> str:
    return str(config.get("output_dir") or _DEFAULT_OUTPUT)


def _with_template(path: Path, config: Mapping[str, Any], trained: TrainedModel) -> TrainedModel:
    """Adds the chat template of the configuration, else of its data sets; by default the model's own is used."""
    for section in (config, *_datasets(config)):
        name = section.get("chat_template")
        if name:
            return _with_named_template(path, str(name), section.get("chat_template_jinja"), trained)
    types = {one["type"] for one in _datasets(config) if isinstance(one.get("type"), str)}
    if any("chatml" in one for one in types):
        return replace(trained, template_name="chatml")
    if any(one.startswith("alpaca") for one in types):
        return replace(trained, fallback_template="alpaca")
    return trained


def _with_named_template(path: Path, name: str, jinja: Any, trained: TrainedModel) -> TrainedModel:
    if name == _TOKENIZER_DEFAULT:
        return trained
    if name.startswith(_FALLBACK_PREFIX):
        return replace(trained, fallback_template=name.removeprefix(_FALLBACK_PREFIX))
    if name == "jinja" and isinstance(jinja, str):
        return replace(trained, template=_template_text(path, jinja))
    if "{{" in name or "{%" in name or name.endswith(".jinja"):
        return replace(trained, template=_template_text(path, name))
    return replace(trained, template_name=name)


def _template_text(path: Path, value: str) -> str:
    """The text of a template, given directly or as a file."""
    if "{" in value:
        return value
    resolved = _find_path(path, value)
    if resolved is None:
        raise BrokenModel(f"{path}: there is no chat template {value}.")
    return Path(resolved).read_text(encoding="utf-8")


def _datasets(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    value = config.get("datasets")
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _find_path(path: Path, name: str) -> str | None:
    """Resolves a path relative to the working directory, then to the configuration's folder."""
    value = Path(os.path.expanduser(name))
    for candidate in (value, path.parent / value):
        if candidate.exists():
            return str(candidate)
    return None


def _find_folder(path: Path, name: str) -> Path | None:
    resolved = _find_path(path, name)
    return Path(resolved) if resolved is not None and Path(resolved).is_dir() else None


_BEFORE = """\
{%- set first = messages[0] -%}
{%- set before = first['content'] + '\\n\\n' if first['role'] == 'system' else '' -%}
"""

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""

ALPACA = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{- '### Instruction:\\n' + message['content'] -}}
{%- elif message['role'] == 'assistant' -%}
{{- '### Response:\\n' + message['content'] + eos_token -}}
{%- else -%}
{{- message['content'] -}}
{%- endif -%}
{{- '' if loop.last else '\\n\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '\\n\\n### Response:\\n' -}}
{%- endif -%}
"""

DEEPSEEK = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{- '<｜User｜>' + message['content'] -}}
{%- elif message['role'] == 'assistant' -%}
{{- '<｜Assistant｜>' + message['content'] + eos_token -}}
{%- else -%}
{{- message['content'] + '\\n\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<｜Assistant｜>' -}}
{%- endif -%}
"""

GEMMA = (
    "{{- bos_token -}}\n"
    + _BEFORE
    + """\
{%- for message in (messages[1:] if before else messages) -%}
{%- set name = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{- '<start_of_turn>' + name + '\\n' + (before if loop.first else '') + message['content'] | trim -}}
{{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""
)

LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' -}}
{{- message['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

PHI = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>\\n' -}}
{%- endif -%}
"""


def _mistral(opens: str, closes: str, answers: str) -> str:
    """The three versions differ only in whitespace."""
    return (
        "{{- bos_token -}}\n"
        + _BEFORE
        + f"""\
{{%- for message in (messages[1:] if before else messages) -%}}
{{%- if message['role'] == 'assistant' -%}}
{{{{- '{answers}' + message['content'] + eos_token -}}}}
{{%- else -%}}
{{{{- '{opens}' + (before if loop.first else '') + message['content'] + '{closes}' -}}}}
{{%- endif -%}}
{{%- endfor -%}}
"""
    )


TEMPLATES = {
    "alpaca": ALPACA,
    "chatml": CHATML,
    "deepseek_v2": DEEPSEEK,
    "gemma": GEMMA,
    "llama3": LLAMA3,
    "mistral_v1": _mistral(" [INST] ", " [/INST]", " "),
    "mistral_v2v3": _mistral("[INST] ", "[/INST]", " "),
    "mistral_v3_tekken": _mistral("[INST]", "[/INST]", ""),
    "phi_35": PHI,
}


def find_template(name: str) -> str | None:
    """The chat template of that name: from an installed axolotl, else one of our own."""
    return _installed_template(name) or TEMPLATES.get(name)


def _installed_template(name: str) -> str | None:
    """The template of an installed axolotl. The package itself is not imported."""
    spec = find_spec("axolotl") if re.fullmatch(r"\w[\w.-]*", name) else None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "utils" / "chat_templates" / "templates" / f"{name}.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None
