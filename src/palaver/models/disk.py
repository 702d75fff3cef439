"""The models on disk: which ones the hub's cache holds, what their files say, and how large they are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palaver.errors import BadParameter, UnknownModel
from palaver.gguf import read_gguf
from palaver.models import gguf
from palaver.models.resolver import ResolvedModel, embedded_models, is_complete, resolve_folder

_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
_TEXT_CONFIGS = ("text_config", "llm_config")
_ENCODER_FLAGS = {"image": "clip.has_vision_encoder", "audio": "clip.has_audio_encoder"}
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
_HUB_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class DiskModel:
    """A model that can be loaded without a download."""

    name: str
    path: Path
    """A folder, or a GGUF file."""
    nbytes: int
    place: str
    """Where it lies: shipped or hub."""
    has_template: bool = True
    """Whether it has a chat template, as far as that is known."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the files say without an engine. 0 and empty where they don't."""

    context_length: int = 0
    media: tuple[str, ...] = ()
    nbytes: int = 0


def hub_cache() -> Path:
    """The folder in which the hub's client keeps its downloads."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def find_models(cache: Path | None = None) -> list[DiskModel]:
    """The shipped models and those in the hub's cache that are complete."""
    shipped = [
        DiskModel(name, folder, weights_bytes(ResolvedModel(folder)), "shipped")
        for name in embedded_models()
        for folder in [resolve_folder(name)]
    ]
    return [*shipped, *_hub_models(hub_cache() if cache is None else cache)]


def offered_names(cache: Path | None = None) -> list[str]:
    """The names of those that can chat."""
    return [model.name for model in find_models(cache) if model.has_template]


def _hub_models(cache: Path) -> Iterator[DiskModel]:
    for repository in sorted(cache.glob(f"{_HUB_PREFIX}*")):
        name = repository.name.removeprefix(_HUB_PREFIX).replace("--", "/")
        folder = _snapshot(repository)
        if folder is None:
            continue
        if is_complete(folder):
            has_template = any((folder / file).is_file() for file in _TEMPLATE_FILES) or _config_has_template(folder)
            yield DiskModel(name, folder, weights_bytes(ResolvedModel(folder)), "hub", has_template)
        for choice in gguf.complete_choices(folder):
            variant = choice.quantisation or Path(choice.name).stem
            yield DiskModel(f"{name}:{variant}", folder / choice.name, choice.nbytes, "hub")


def _snapshot(repository: Path) -> Path | None:
    """The snapshot that the main branch names, else the newest."""
    snapshots = repository / "snapshots"
    main = repository / "refs" / "main"
    if main.is_file() and (folder := snapshots / main.read_text().strip()).is_dir():
        return folder
    folders = [folder for folder in snapshots.glob("*") if folder.is_dir()]
    return max(folders, key=lambda folder: folder.stat().st_mtime, default=None)


def _config_has_template(folder: Path) -> bool:
    return "chat_template" in _read_json(folder / "tokenizer_config.json")


def read_facts(model: ResolvedModel) -> ModelFacts:
    """What the files of a model say. Raises a ModelError if they are damaged."""
    size = weights_bytes(model)
    if model.gguf is not None:
        length = read_gguf(model.gguf).model_integer("context_length") or 0
        return ModelFacts(_shorter(length, model.context_length), _projector_media(model.mmproj), size)
    config = _read_json(model.folder / "config.json")
    if isinstance(thinker := config.get("thinker_config"), dict):
        config = thinker  # of a model that also speaks: the part that sees, hears and writes
    text = next((config[name] for name in _TEXT_CONFIGS if isinstance(config.get(name), dict)), config)
    lengths = [text.get(name) for name in _CONTEXT_FIELDS]
    length = next((one for one in lengths if isinstance(one, int) and one > 0), 0)
    return ModelFacts(_shorter(length, model.context_length), _media(config), size)


def _shorter(length: int, limit: int | None) -> int:
    return length if limit is None else min(length, limit) if length else limit


def _media(config: Mapping[str, Any]) -> tuple[str, ...]:
    parts = {"image": "vision_config", "audio": "audio_config"}
    return _with_video(tuple(kind for kind, name in parts.items() if isinstance(config.get(name), dict)))


def _projector_media(mmproj: Path | None) -> tuple[str, ...]:
    if mmproj is None:
        return ()
    header = read_gguf(mmproj)
    return _with_video(tuple(kind for kind, key in _ENCODER_FLAGS.items() if header.flag(key)))


def _with_video(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """As engines say it: a model that takes pictures takes a video as its frames."""
    return (*kinds, "video") if "image" in kinds else kinds


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def weights_bytes(model: ResolvedModel) -> int:
    """The size of a model's weights on disk, with its adapter."""
    if model.gguf is not None:
        folder = model.gguf.parent
        sizes = {path.name: path.stat().st_size for path in folder.glob("*.gguf")}
        parts = gguf.parts_of(model.gguf.name, sizes)
        return sum(sizes[part] for part in parts) or model.gguf.stat().st_size
    folders = [model.folder, *([model.adapter] if model.adapter is not None and model.adapter.is_dir() else [])]
    total = sum(path.stat().st_size for folder in folders for path in folder.glob("*.safetensors"))
    return total if model.quantize_bits is None else total * model.quantize_bits // 16


def remove_model(name: str, cache: Path | None = None) -> int:
    """Deletes a model from the hub's cache, and what was downloaded of it. Returns the bytes that were freed.

    With a quantisation (owner/name:Q8_0) only the files of that. Raises UnknownModel, and BadParameter for a
    shipped one.
    """
    base, _, variant = name.partition(":")
    if name in embedded_models():
        raise BadParameter("MODEL", name, "it is shipped with Palaver, and can't be removed")
    root = hub_cache() if cache is None else cache
    repository = root / f"{_HUB_PREFIX}{base.replace('/', '--')}"
    if "/" not in base or ".." in base or not repository.is_dir():
        raise UnknownModel(name, f"it is not in the hub's cache ({root}). Delete other files by hand.")
    if not variant:
        size = sum(path.stat().st_size for path in repository.rglob("*") if path.is_file() and not path.is_symlink())
        shutil.rmtree(repository)
        return size
    folder = _snapshot(repository)
    choices = gguf.complete_choices(folder) if folder is not None else []
    sizes = {str(path.relative_to(folder)): 0 for path in folder.rglob("*.gguf")} if folder is not None else {}
    chosen = gguf.choose(name, choices, variant, None)
    assert folder is not None
    for part in gguf.parts_of(chosen.name, sizes):
        link = folder / part
        blob = link.resolve()
        link.unlink()
        blob.unlink(missing_ok=True)
    return chosen.nbytes
