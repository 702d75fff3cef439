"""Resolves a model's name to its files: an embedded model, a folder, a hub id or a training configuration."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palaver.errors import ModelError, NoWeights, UnknownModel, UnsafeWeights
from palaver.models.axolotl import is_configuration, read_configuration

DEFAULT_MODEL = "sprout"
_EMBEDDED = Path(__file__).parent
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
ReportDownload = Callable[[float | None], None]
"""Called with the progress of a download, from 0 to 1, or None if it is not known yet. Any thread may call it."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The files of a model, and the settings of the training configuration that named it."""

    folder: Path
    adapter: Path | None = None
    """The folder of a LoRA adapter to merge into the weights."""
    template: str | None = None
    """The text of the chat template in the training configuration."""
    output_folder: Path | None = None
    """The folder that training wrote: a chat template in it is the one that the model was trained with."""
    template_name: str | None = None
    """The name of the chat template that the model was trained with (`templates.TEMPLATES`)."""
    fallback_template: str | None = None
    """The name of the chat template for a model without one."""
    context_length: int | None = None
    """The sequence length of the training."""
    notes: tuple[str, ...] = ()
    """Notices for the user about what was chosen."""


def embedded_models() -> list[str]:
    """The names of the models that are shipped with Palaver."""
    return sorted(path.parent.name for path in _EMBEDDED.glob("*/config.json"))


def resolve_model(name: str, report: ReportDownload | None = None) -> ResolvedModel:
    """The model of that name. Accesses the network only for a hub id that is not on disk.

    With `report`, the hub's client itself prints neither progress bars nor warnings.
    """
    if not is_configuration(name):
        return ResolvedModel(resolve_folder(name, report=report))
    trained = read_configuration(Path(name).expanduser())
    return ResolvedModel(
        resolve_folder(trained.model, report=report),
        trained.adapter,
        trained.template,
        trained.output_folder,
        trained.template_name,
        trained.fallback_template,
        trained.context_length,
        trained.notes,
    )


def resolve_folder(name: str, weights: bool = True, report: ReportDownload | None = None) -> Path:
    """The folder of an embedded model, a folder or a hub id. Without `weights`, a hub id may lack safetensors."""
    if name in embedded_models():
        return _EMBEDDED / name
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _check_folder(folder, name)
    if folder.exists():
        raise UnknownModel(name, "it is a file. Name the folder that contains config.json and *.safetensors.")
    if _HUB_ID.fullmatch(name) and ".." not in name:
        return _find_snapshot(name, weights) or _download(name, weights, report)
    raise UnknownModel(
        name, f"name a folder, a model of the hub (such as Qwen/Qwen3-0.6B), or {', '.join(embedded_models())}."
    )


def _check_folder(folder: Path, name: str) -> Path:
    if not (folder / "config.json").is_file():
        raise UnknownModel(name, "the folder contains no config.json, so it is not a model.")
    return folder


def _find_snapshot(name: str, weights: bool) -> Path | None:
    """The hub's snapshot on disk, if it is complete."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=_FILE_PATTERNS, local_files_only=True))
    except Exception:  # the download reports the reason
        return None
    return folder if not weights or _is_complete(folder) else None


def _is_complete(folder: Path) -> bool:
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return all((folder / shard).is_file() for shard in shards)
    except (ValueError, KeyError, TypeError, AttributeError):  # the engine reports a broken index
        return True


def _download(name: str, weights: bool, report: ReportDownload | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    bar = None if report is None else _reporting_bar(report)
    try:
        with _quiet(report is not None):
            if weights:
                _check_weights(name, HfApi().list_repo_files(name))
            if report is not None:
                report(None)
            return Path(snapshot_download(name, allow_patterns=_FILE_PATTERNS, tqdm_class=bar))
    except ModelError:
        raise
    except GatedRepoError as error:
        raise UnknownModel(name, "its publisher requires access. Log in to the hub first.") from error
    except RepositoryNotFoundError as error:
        raise UnknownModel(name, "there is no such folder, and no such model on the hub (or it is private).") from error
    except Exception as error:  # the hub's client raises many types
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnknownModel(
            name, f"it is not on this computer and can't be downloaded from the hub ({reason})."
        ) from None


@contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    """Inside the context, the hub's client does not log its retries: they would be written into the live lines."""
    log = logging.getLogger("huggingface_hub")
    level = log.level
    if quiet:
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _reporting_bar(report: ReportDownload) -> Any:
    """A class of progress bars for the hub's client that report the bytes and print nothing."""
    from huggingface_hub.utils import tqdm

    class ReportingBar(tqdm):  # type: ignore[type-arg, misc, unused-ignore]
        def __init__(self, *values: Any, **named: Any) -> None:
            super().__init__(*values, **{**named, "file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            done: bool | None = super().update(n)
            if self.unit == "B" and self.total:
                report(min(1.0, self.n / self.total))
            return done

    return ReportingBar


def _check_weights(name: str, files: Sequence[str]) -> None:
    if any(file.endswith(".safetensors") for file in files):
        return
    pickles = [file for file in files if Path(file).suffix in _PICKLE_SUFFIXES]
    raise UnsafeWeights(name, ", ".join(pickles[:3])) if pickles else NoWeights(name)
