"""Resolves a model's name to its files: embedded models, folders, hub ids, GGUF models, training configurations."""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from palaver.errors import BadParameter, ModelError, NoWeights, UnknownModel, UnsafeWeights
from palaver.models import gguf
from palaver.models.axolotl import TrainingSettings, is_configuration, read_configuration, split_checkpoint
from palaver.models.download import Repository, fetch_weights, list_repository

DEFAULT_MODEL = "sprout"
_EMBEDDED = Path(__file__).parent
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
ReportDownload = Callable[[float | None], None]
"""Called with the progress of a download, from 0 to 1, or None if it is not known yet. Any thread may call it."""


@dataclass(frozen=True, slots=True)
class ResolvedModel(TrainingSettings):
    """The files of a model, and the settings of the training configuration that named it."""

    folder: Path
    gguf: Path | None = None
    """The GGUF file in the folder, of several parts the first. None for a folder with config.json and safetensors."""
    mmproj: Path | None = None
    """The projector of a GGUF model that sees or hears, if there is one beside it."""


def embedded_models() -> list[str]:
    """The names of the models that are shipped with Palaver."""
    return sorted(path.parent.name for path in _EMBEDDED.glob("*/config.json"))


def is_embedded(folder: Path) -> bool:
    """Whether the folder is that of a model that is shipped with Palaver."""
    return folder.parent == _EMBEDDED


def resolve_model(name: str, report: ReportDownload | None = None, download: bool = True) -> ResolvedModel:
    """The model of that name. Accesses the network only for a hub id that is not on disk, and only if `download`.

    With `report`, the hub's client itself prints neither progress bars nor warnings.
    """
    if not is_configuration(name):
        file = find_gguf(name, report, download)
        if file is not None:
            return ResolvedModel(file.parent, gguf=file, mmproj=gguf.find_projector(name, file))
        return ResolvedModel(resolve_folder(name, report=report, download=download))
    trained = read_configuration(*split_checkpoint(name))
    settings = {field.name: getattr(trained, field.name) for field in fields(TrainingSettings)}
    return ResolvedModel(resolve_folder(trained.model, report=report, download=download), **settings)


def find_gguf(name: str, report: ReportDownload | None = None, download: bool = True) -> Path | None:
    """The GGUF file of that name: path, folder, folder:Q8_0, hub/repo, hub/repo:Q8_0 or ollama:name.

    None if the name is that of a folder with config.json, or of a hub id with safetensors."""
    if name.startswith(gguf.OLLAMA_PREFIX):
        return gguf.find_ollama(name)
    path = Path(os.path.expanduser(name))
    if path.is_file():
        return path if gguf.is_gguf_file(path) else None
    if name in embedded_models() or (path / "config.json").is_file():
        return None
    base, variant = (name, "") if path.is_dir() or ":" not in name else name.rsplit(":", 1)
    folder = Path(os.path.expanduser(base))
    if folder.is_dir():
        return gguf.find_in_folder(folder, base, variant) if any(folder.glob("*.gguf")) else None
    return _find_hub_gguf(base, variant, report, download) if _is_hub_id(base) else None


def _find_hub_gguf(name: str, variant: str, report: ReportDownload | None, download: bool) -> Path | None:
    """Without a named quantisation, safetensors come first."""
    if not variant and _find_snapshot(name, weights=True) is not None:
        return None
    on_disk = gguf.find_on_disk(name, variant)
    if on_disk is not None or not download:
        return on_disk
    with _hub_client(name, quiet=report is not None):
        repository = list_repository(name)
        sizes = repository.sizes
        if not variant and (_has_safetensors(sizes) or not gguf.list_choices(sizes)):
            return None
        if report is not None:
            report(None)
        fetch_weights(repository, gguf.files_to_download(name, variant, sizes), report)
        return gguf.download(name, variant, sizes, None if report is None else _reporting_bar(report))


def files_to_download(name: str) -> tuple[Repository, tuple[str, ...]]:
    """The repository of a hub id, and the large files that a download of it fetches. Raises a ModelError."""
    base, _, variant = name.partition(":")
    if name in embedded_models():
        raise BadParameter("MODEL", name, "it is shipped with Palaver, and there is nothing to download")
    if not _is_hub_id(base):
        raise UnknownModel(name, "models of the hub have names such as Qwen/Qwen3-0.6B.")
    with _hub_client(base, quiet=True):
        repository = list_repository(base)
        if variant or not _has_safetensors(repository.sizes):
            if not variant and not gguf.list_choices(repository.sizes):
                _check_weights(base, repository.sizes)
            return repository, gguf.files_to_download(base, variant, repository.sizes)
    return repository, tuple(name for name in repository.sizes if name.endswith(".safetensors"))


def _is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and ".." not in name


def resolve_folder(
    name: str, weights: bool = True, report: ReportDownload | None = None, download: bool = True
) -> Path:
    """The folder of an embedded model, a folder or a hub id. Without `weights`, a hub id may lack safetensors."""
    if name in embedded_models():
        return _EMBEDDED / name
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        return _check_folder(folder, name)
    if folder.exists():
        raise UnknownModel(
            name, "it is a file, and not a GGUF file. Name the folder that contains config.json and *.safetensors."
        )
    if _is_hub_id(name):
        if (found := _find_snapshot(name, weights)) is not None:
            return found
        if not download:
            raise UnknownModel(name, f"it is not on this computer. `palaver models pull {name}` downloads it.")
        return _download(name, weights, report)
    raise UnknownModel(
        name,
        f"name a folder, a model of the hub (such as Qwen/Qwen3-0.6B), a GGUF file, or {', '.join(embedded_models())}.",
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
    return folder if not weights or is_complete(folder) else None


def is_complete(folder: Path) -> bool:
    """Whether a snapshot of the hub has all of its weights."""
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
    from huggingface_hub import snapshot_download

    bar = None if report is None else _reporting_bar(report)
    with _hub_client(name, quiet=report is not None):
        repository = list_repository(name)
        if weights:
            _check_weights(name, repository.sizes)
        if report is not None:
            report(None)
        fetch_weights(repository, (one for one in repository.sizes if one.endswith(".safetensors")), report)
        return Path(snapshot_download(name, allow_patterns=_FILE_PATTERNS, tqdm_class=bar))


@contextmanager
def _hub_client(name: str, quiet: bool) -> Iterator[None]:
    """Raises errors of the hub's client as UnknownModel, with the reason.

    If `quiet`, the client does not log its retries: they would be written into the live lines."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    log = logging.getLogger("huggingface_hub")
    level = log.level
    if quiet:
        log.setLevel(logging.ERROR)
    try:
        yield
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
    finally:
        log.setLevel(level)


def _reporting_bar(report: ReportDownload) -> Any:
    """A class of progress bars for the hub's client that report the bytes and print nothing."""
    from huggingface_hub.utils import tqdm

    class ReportingBar(tqdm):  # type: ignore[type-arg, misc, unused-ignore]
        def __init__(self, *values: Any, **named: Any) -> None:
            super().__init__(*values, **{**named, "file": io.StringIO(), "disable": False})
            self._counts_bytes = named.get("unit") == "B"
            self._done = float(named.get("initial") or 0)
            """Counted here: the client may have turned its bars off, which then count nothing."""

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            self._done += n or 0
            if self._counts_bytes and self.total:
                report(min(1.0, self._done / self.total))
            return shown

    return ReportingBar


def _check_weights(name: str, files: Iterable[str]) -> None:
    if _has_safetensors(files):
        return
    pickles = [file for file in files if Path(file).suffix in _PICKLE_SUFFIXES]
    raise UnsafeWeights(name, ", ".join(pickles[:3])) if pickles else NoWeights(name)


def _has_safetensors(files: Iterable[str]) -> bool:
    return any(file.endswith(".safetensors") for file in files)
