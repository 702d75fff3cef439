"""The catalog: which models a server offers, under which names, and the file that says so.

    [aliases]
    gpt-4o = "Qwen/Qwen3-8B"        # programs with hard-coded names get this model

    [models."Qwen/Qwen3-8B"]        # a model to offer: a hub id, a folder, a GGUF file, a training configuration

    [models.support]                # a name of one's own
    model = "Qwen/Qwen3-8B"
    adapter = "/models/support-lora"

The shipped models, and by default those that lie on disk, are offered as well."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palaver.errors import BadParameter, RequestError
from palaver.models.axolotl import is_configuration, list_checkpoints, split_checkpoint

FILE_NAME = "models.toml"
MAX_FILE_BYTES = 1 << 20
_SCAN_SECONDS = 5.0
_PATH_OPTIONS = ("template", "adapter", "mmproj", "draft_model", "engine_python")
_OPTIONS: Mapping[str, type] = {
    "template": str,
    "adapter": str,
    "mmproj": str,
    "draft_model": str,
    "drafts": bool,
    "engine": str,
    "engine_python": str,
    "native_sampling": bool,
    "device": str,
    "dtype": str,
    "exact": bool,
    "gpu_layers": int,
    "threads": int,
    "max_running": int,
}
"""The options of a model in the file: fields of `LoadOptions`."""
_ALIAS = re.compile(r"[A-Za-z0-9][\w.:/@+-]{0,199}")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_HEADER = re.compile(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?")


class BadCatalog(RequestError):
    """The file of models is not valid."""


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model that is offered."""

    name: str
    source: str
    """What the resolver finds its files by."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of its own for loading it: fields of `LoadOptions`."""


class Catalog:
    """The models that may be asked for. Only these: a name from a request is never looked up elsewhere."""

    def __init__(
        self,
        names: Sequence[str] = (),
        entries: Sequence[CatalogEntry] = (),
        aliases: Mapping[str, str] | None = None,
        scan: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        """`scan` lists the models on disk. An alias of "" is the model in use by default."""
        self._entries = {**{name: CatalogEntry(name, name) for name in names}, **{one.name: one for one in entries}}
        self.aliases = dict(aliases or {})
        self.downloads: set[str] = set()
        """Models that the operator asked to load. Only these are downloaded if they are not on disk."""
        self._scan = scan
        self._scanned: tuple[str, ...] = ()
        self._checkpoints: dict[str, CatalogEntry] = {}
        """By name: the checkpoints of the training configurations that are offered."""
        self._scanned_at = float("-inf")

    def names(self) -> tuple[str, ...]:
        """The names of all models, without aliases."""
        on_disk = self._on_disk()
        return tuple(dict.fromkeys((*self._entries, *self._checkpoints, *on_disk)))

    def resolve(self, name: str) -> str | None:
        """The model's own name; empty for an alias of the model in use, None if it is not offered."""
        name = self.aliases.get(name, name)
        if not name or name in self._entries:
            return name
        return name if name in self._on_disk() or name in self._checkpoints else None

    def entry(self, name: str) -> CatalogEntry:
        """How the model is loaded. A name that is not in the catalog was given by the operator, and is its source."""
        return self._entries.get(name) or self._checkpoints.get(name) or CatalogEntry(name, name)

    def _on_disk(self) -> tuple[str, ...]:
        """The models on disk. Looks for them, and for checkpoints, every few seconds."""
        if time.monotonic() - self._scanned_at > _SCAN_SECONDS:
            self._scanned = tuple(self._scan()) if self._scan is not None else ()
            entries = (checkpoint for entry in self._entries.values() for checkpoint in _checkpoints(entry))
            self._checkpoints = {entry.name: entry for entry in entries}
            self._scanned_at = time.monotonic()
        return self._scanned


def _checkpoints(entry: CatalogEntry) -> list[CatalogEntry]:
    """The checkpoints of an entry that is a training configuration: `name@checkpoint-200`."""
    path, chosen = split_checkpoint(entry.source)
    if chosen or not is_configuration(entry.source):
        return []
    names = list_checkpoints(path)
    return [CatalogEntry(f"{entry.name}@{one}", f"{entry.source}@{one}", entry.options) for one in names]


@dataclass(frozen=True, slots=True)
class CatalogFile:
    """What the file says."""

    entries: tuple[CatalogEntry, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    on_disk: bool = True
    """Whether the models on disk are offered too."""


def read_catalog(file: Path) -> CatalogFile:
    """Reads the file; without one, nothing but the defaults. Raises BadCatalog."""
    if not file.is_file():
        return CatalogFile()
    if file.stat().st_size > MAX_FILE_BYTES:
        raise BadCatalog(f"{file} is larger than {MAX_FILE_BYTES} bytes.")
    try:
        value = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadCatalog(f"{file} is not valid TOML: {error}.") from None
    for name in value:
        if name not in ("aliases", "models", "on_disk"):
            raise BadCatalog(f"{file}: there is no setting {name!r}; there are aliases, models and on_disk.")
    on_disk = value.get("on_disk", True)
    if not isinstance(on_disk, bool):
        raise BadCatalog(f"{file}: on_disk must be true or false.")
    entries = tuple(_entry(file, name, one) for name, one in _table(file, value, "models").items())
    aliases = _table(file, value, "aliases")
    for name, target in aliases.items():
        if not isinstance(target, str) or not target:
            raise BadCatalog(f"{file}: the alias {name!r} must name a model.")
    return CatalogFile(entries, aliases, on_disk)


def _table(file: Path, value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = value.get(name, {})
    if not isinstance(table, dict):
        raise BadCatalog(f"{file}: {name} must be a table.")
    return table


def _entry(file: Path, name: str, value: Any) -> CatalogEntry:
    where = f"{file}: the model {name!r}"
    if not isinstance(value, dict):
        raise BadCatalog(f"{where} must be a table, such as [models.{json.dumps(name)}].")
    source = value.get("model", name)
    if not isinstance(source, str) or not source:
        raise BadCatalog(f"{where}: model must be a hub id, a folder or a file.")
    options: dict[str, Any] = {}
    for key, given in value.items():
        if key == "model":
            continue
        if key not in _OPTIONS:
            raise BadCatalog(f"{where} has an unknown option {key!r}; there are model, {', '.join(_OPTIONS)}.")
        if type(given) is not _OPTIONS[key]:
            raise BadCatalog(f"{where}: {key} must be a {_OPTIONS[key].__name__}.")
        options[key] = _path(file, str(given)) if key in _PATH_OPTIONS else given
        if key in _PATH_OPTIONS and not options[key].exists():
            raise BadCatalog(f"{where}: {key} {given!r} does not exist.")
    return CatalogEntry(name, source, options)


def _path(file: Path, text: str) -> Path:
    return file.parent / os.path.expanduser(text)


def write_alias(file: Path, alias: str, target: str | None) -> None:
    """Adds or replaces an alias; without a target, removes it. The rest of the file stays as it is."""
    if not _ALIAS.fullmatch(alias):
        raise BadParameter("alias", alias, "must be a name without spaces")
    known = read_catalog(file).aliases
    if target is None and alias not in known:
        raise BadParameter("alias", alias, f"there is no such alias (aliases: {', '.join(known) or 'none'})")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    start = next((n for n, line in enumerate(lines) if _header(line) == "aliases"), None)
    if start is None:
        lines += [*([""] if lines else []), "[aliases]"]
        start = len(lines) - 1
    end = next((n for n in range(start + 1, len(lines)) if _header(lines[n])), len(lines))
    section = [line for line in lines[start + 1 : end] if alias not in _keys(line)]
    if target is not None:
        key = alias if _BARE_KEY.fullmatch(alias) else json.dumps(alias)
        while section and not section[-1].strip():
            section.pop()
        section.append(f"{key} = {json.dumps(target)}")
        section += [""] if end < len(lines) else []
    _write(file, "\n".join([*lines[: start + 1], *section, *lines[end:]]) + "\n", alias, target)


def _header(line: str) -> str:
    match = _HEADER.fullmatch(line)
    return match[1].strip() if match else ""


def _keys(line: str) -> tuple[str, ...]:
    """The key of a line `key = "value"`."""
    try:
        return tuple(tomllib.loads(line))
    except tomllib.TOMLDecodeError:
        return ()


def _write(file: Path, text: str, alias: str, target: str | None) -> None:
    """Replaces the file at once. Raises BadCatalog if the alias would not be in it: it is written in another way."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, path = tempfile.mkstemp(dir=file.parent, prefix=".models-", suffix=".toml")
    new = Path(path)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        if read_catalog(new).aliases.get(alias) != target:
            raise BadCatalog(f"{file} can't be changed: edit its aliases by hand.")
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
