"""`palaver models`: lists, shows, downloads and removes models, and names them."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from palaver.commands import strings
from palaver.commands.options import DataOption, report_errors
from palaver.errors import BadParameter, UnknownModel

if TYPE_CHECKING:
    from palaver.models.catalog import CatalogFile
    from palaver.models.machine_fit import MachineFit

models = typer.Typer(help=strings.MODELS, no_args_is_help=True)
NameArgument = Annotated[str, typer.Argument(metavar="MODEL", help=strings.MODEL_ON_HUB)]
_BAR_SECONDS = 0.2


def format_size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"


def count_files(files: Sequence[str]) -> str:
    return f"{len(files)} file{'' if len(files) == 1 else 's'}"


@models.command("list", help=strings.MODELS_LIST)
def list_(data: DataOption = None) -> None:
    from palaver.models.disk import find_models

    with report_errors():
        catalog = _read_catalog(data)
        rows = [(one.name, format_size(one.nbytes), one.place) for one in find_models()]
        rows += [(one.name, "", strings.IN_CATALOG.format(model=one.source)) for one in catalog.entries]
        rows += [(name, "", strings.ALIAS_OF.format(model=target)) for name, target in catalog.aliases.items()]
    width = max(len(name) for name, _, _ in rows)
    for name, size, place in rows:
        print(f"{name:{width}}  {size:>8}  {place}")


@models.command(help=strings.MODELS_SHOW)
def show(name: NameArgument, data: DataOption = None) -> None:
    from palaver.chat.engine_choice import LoadOptions
    from palaver.chat.model import load_model_format
    from palaver.models.disk import read_facts
    from palaver.models.machine_fit import machine_fit
    from palaver.models.resolver import resolve_model

    with report_errors():
        catalog = _read_catalog(data)
        wanted = catalog.aliases.get(name, name)
        source = next((one.source for one in catalog.entries if one.name == wanted), wanted)
        try:
            resolved = resolve_model(source, download=False)
        except UnknownModel:
            _show_remote(source)
            return
        facts = read_facts(resolved)
        _, format = load_model_format(resolved, LoadOptions())
        rows = {
            strings.SHOW_FILES: str(resolved.gguf or resolved.folder),
            strings.SHOW_SIZE: format_size(facts.nbytes),
            strings.SHOW_CONTEXT: f"{facts.context_length:,}" if facts.context_length else "",
            strings.SHOW_TAKES: ", ".join(("text", *facts.media, *(("tools",) if format.takes_tools else ()))),
            strings.SHOW_THINKS: strings.YES if format.thinks else strings.NO,
            strings.SHOW_FIT: _describe_fit(machine_fit(facts.nbytes)),
        }
        for title, value in rows.items():
            if value:
                print(f"{title}: {value}")


@models.command(help=strings.MODELS_PULL)
def pull(
    name: NameArgument,
    force: Annotated[bool, typer.Option("--force", help=strings.PULL_FORCE)] = False,
) -> None:
    """Says what it needs and how fast it will be, then downloads. Goes on where a download was cut."""
    from palaver.engines.machine import has_gpu_memory
    from palaver.models.machine_fit import machine_fit
    from palaver.models.resolver import files_to_download, resolve_model

    with report_errors():
        repository, files = files_to_download(name)
        nbytes = sum(repository.sizes[file] for file in files)
        fit = machine_fit(nbytes)
        print(
            strings.PULLING.format(
                model=name, size=format_size(nbytes), files=count_files(files), fit=_describe_fit(fit)
            )
        )
        if not (fit.fits or force or has_gpu_memory()):
            raise BadParameter("MODEL", name, strings.PULL_TOO_LARGE)
        resolved = resolve_model(name, _ProgressLine(nbytes).report)
        print(strings.PULLED.format(model=name, folder=resolved.gguf or resolved.folder))


@models.command(help=strings.MODELS_REMOVE)
def remove(name: NameArgument) -> None:
    from palaver.models.disk import remove_model

    with report_errors():
        print(strings.REMOVED_MODEL.format(model=name, size=format_size(remove_model(name))))


@models.command(help=strings.MODELS_ALIAS)
def alias(
    name: Annotated[str, typer.Argument(metavar="NAME", help=strings.ALIAS_NAME)],
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=strings.ALIAS_MODEL)] = None,
    data: DataOption = None,
) -> None:
    """Without a model, removes the alias."""
    from palaver.models.catalog import write_alias

    with report_errors():
        write_alias(_catalog_file(data), name, model)
        if model is None:
            print(strings.ALIAS_REMOVED.format(name=name))
            return
        print(strings.ALIAS_SET.format(name=name, model=model))
        if not _is_at_hand(model, data):
            print(strings.ALIAS_NOT_ON_DISK.format(model=model), file=sys.stderr)


def _is_at_hand(model: str, data: Path | None) -> bool:
    """Whether a model is on disk, or described in the configuration."""
    from palaver.models.resolver import resolve_model

    catalog = _read_catalog(data)
    source = next((one.source for one in catalog.entries if one.name == model), model)
    try:
        resolve_model(source, download=False)
    except UnknownModel:
        return False
    return True


def _catalog_file(data: Path | None) -> Path:
    from palaver.models.catalog import FILE_NAME
    from palaver.store.store import data_folder

    return data_folder(data) / FILE_NAME


def _read_catalog(data: Path | None) -> CatalogFile:
    from palaver.models.catalog import read_catalog

    return read_catalog(_catalog_file(data))


def _show_remote(name: str) -> None:
    """A model that is not on disk, as the hub describes it."""
    from palaver.models.machine_fit import machine_fit
    from palaver.models.resolver import files_to_download

    repository, files = files_to_download(name)
    nbytes = sum(repository.sizes[file] for file in files)
    print(strings.NOT_DOWNLOADED.format(model=name, size=format_size(nbytes), files=count_files(files)))
    print(f"{strings.SHOW_FIT}: {_describe_fit(machine_fit(nbytes))}")


def _describe_fit(fit: MachineFit) -> str:
    """By the processor and its memory alone: where there is a GPU, it says so."""
    from palaver.engines.machine import has_gpu_memory

    gpu = has_gpu_memory()
    text = strings.FITS if fit.fits else strings.FITS_NOT_RAM if gpu else strings.FITS_NOT
    text = text.format(needed=format_size(fit.needed_bytes), memory=format_size(fit.memory_bytes))
    if fit.fits:
        text += f"; {strings.ABOUT_SPEED.format(speed=f'{fit.tokens_per_second:,.0f}')}"
    return strings.GPU_NOT_EXAMINED.format(fit=text) if gpu else text


class _ProgressLine:
    """The progress of a download on stderr: one line in a terminal, every tenth of it elsewhere."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._shown_at = 0.0
        self._tenth = -1

    def report(self, progress: float | None) -> None:
        if progress is None:
            return
        line = strings.DOWNLOADED.format(share=f"{progress:.0%}", done=format_size(progress * self._nbytes))
        if sys.stderr.isatty():
            if progress >= 1 or time.monotonic() - self._shown_at >= _BAR_SECONDS:
                self._shown_at = time.monotonic()
                print(f"\r{line}", end="\n" if progress >= 1 else "", file=sys.stderr, flush=True)
        elif int(progress * 10) > self._tenth:
            self._tenth = int(progress * 10)
            print(line, file=sys.stderr, flush=True)
