"""Options shared by several commands, their parsing, and the mapping of errors to exit codes."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from palaver.commands import strings
from palaver.errors import BadParameter, PalaverError, RequestError

if TYPE_CHECKING:
    from palaver.chat.engine_choice import LoadOptions
    from palaver.chat.model_pool import ModelPool
    from palaver.store import Store

EXIT_FAILED, EXIT_USAGE = 1, 2
AUTO, VLLM = "auto", "vllm"
ENGINE_KEY_VARIABLE = "PALAVER_ENGINE_KEY"
"""The environment variable with the key of a server elsewhere: the flags of a process can be read by others."""
CACHE_PART = 8
"""With --memory and without --kv-cache-memory, the KV cache of each model is this part of the memory."""
_MODEL_OPTIONS = (
    "template", "dtype", "compiled", "engine", "engine_python", "engine_key", "native_sampling", "gpu_layers",
    "threads", "adapter", "mmproj", "draft_model", "drafts", "approximate_cache",
)  # fmt: skip
"""Options that fit one kind of model."""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smh]?)")
MAX_RUNNING = 1024
MAX_THREADS = 1024
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


class QuickCommand(TyperCommand):
    """A command that builds no validators for parameters that need none.

    typer builds one by pydantic for each parameter, given or not: a tenth of a second before the command begins."""

    def get_params(self, ctx: Any) -> list[Any]:
        return [_quick_parameter(parameter) for parameter in super().get_params(ctx)]


class QuickGroup(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return [_quick_parameter(parameter) for parameter in super().get_params(ctx)]


class _QuickOption(TyperOption):
    def process_value(self, ctx: Any, value: Any) -> Any:
        return _keep_value(self, ctx, value) if _is_valid(self, value) else super().process_value(ctx, value)


class _QuickArgument(TyperArgument):
    def process_value(self, ctx: Any, value: Any) -> Any:
        return _keep_value(self, ctx, value) if _is_valid(self, value) else super().process_value(ctx, value)


def _quick_parameter(parameter: Any) -> Any:
    """The same parameter, with another class."""
    quick: dict[type, type] = {TyperOption: _QuickOption, TyperArgument: _QuickArgument}
    parameter.__class__ = quick.get(type(parameter), type(parameter))
    return parameter


def _is_valid(parameter: TyperOption | TyperArgument, value: Any) -> bool:
    """Whether nothing is to be checked: the parameter is not given, or takes any text."""
    kind = parameter.type_descriptor.annotation
    if kind == list[str]:
        return not parameter.required and (value is None or isinstance(value, list | tuple))
    is_text = isinstance(kind, type) and issubclass(kind, str | Enum)
    return not parameter.required and (value is None or (is_text and isinstance(value, kind)))


def _keep_value(parameter: TyperOption | TyperArgument, ctx: Any, value: Any) -> Any:
    is_list = parameter.multiple or parameter.nargs == -1
    kept = (() if value is None else list(value)) if is_list else value
    return kept if parameter.callback is None else parameter.callback(ctx, parameter, kept)


class ThinkingOption(StrEnum):
    ON = "on"
    OFF = "off"
    DEFAULT = "default"

    @property
    def enabled(self) -> bool | None:
        return None if self is ThinkingOption.DEFAULT else self is ThinkingOption.ON


ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=strings.MODEL, show_default=False)]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", metavar="MODEL", help=strings.MODEL)]
SystemOption = Annotated[str | None, typer.Option("--system", "-s", metavar="TEXT", help=strings.SYSTEM)]
TranscriberOption = Annotated[str, typer.Option("--transcriber", metavar="NAME", help=strings.TRANSCRIBER)]
ThinkOption = Annotated[ThinkingOption, typer.Option("--think", help=strings.THINK)]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help=strings.SET)]
TemplateOption = Annotated[Path | None, typer.Option("--template", metavar="FILE", help=strings.TEMPLATE)]
DeviceOption = Annotated[str | None, typer.Option("--device", metavar="DEVICE", help=strings.DEVICE)]
DtypeOption = Annotated[str | None, typer.Option("--dtype", help=strings.DTYPE)]
ExactOption = Annotated[bool, typer.Option("--exact", help=strings.EXACT)]
CompileOption = Annotated[bool | None, typer.Option("--compile/--no-compile", help=strings.COMPILE, show_default=False)]
CacheOption = Annotated[
    str | None, typer.Option("--kv-cache-memory", metavar="SIZE", help=strings.KV_CACHE_MEMORY, show_default=False)
]
MaxRunningOption = Annotated[
    int | None,
    typer.Option("--max-num-seqs", metavar="N", min=1, max=MAX_RUNNING, help=strings.MAX_NUM_SEQS, show_default=False),
]
EngineOption = Annotated[str, typer.Option("--engine", metavar="ENGINE", help=strings.ENGINE)]
EnginePythonOption = Annotated[
    Path | None,
    typer.Option(
        "--engine-python",
        metavar="FILE",
        envvar="PALAVER_ENGINE_PYTHON",
        help=strings.ENGINE_PYTHON,
        show_default=False,
    ),
]
NativeSamplingOption = Annotated[bool, typer.Option("--native-sampling", help=strings.NATIVE_SAMPLING)]
GpuLayersOption = Annotated[
    int | None, typer.Option("--gpu-layers", metavar="N", min=0, help=strings.GPU_LAYERS, show_default=False)
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", metavar="N", min=1, max=MAX_THREADS, help=strings.THREADS, show_default=False)
]
ApproximateCacheOption = Annotated[bool, typer.Option("--approximate-cache", help=strings.APPROXIMATE_CACHE)]
AdapterOption = Annotated[
    Path | None, typer.Option("--adapter", metavar="PATH", help=strings.ADAPTER, show_default=False)
]
MmprojOption = Annotated[Path | None, typer.Option("--mmproj", metavar="FILE", help=strings.MMPROJ, show_default=False)]
DraftModelOption = Annotated[
    Path | None, typer.Option("--draft-model", metavar="PATH", help=strings.DRAFT_MODEL, show_default=False)
]
DraftsOption = Annotated[bool | None, typer.Option("--drafts/--no-drafts", help=strings.DRAFTS, show_default=False)]
NoThinkingOption = Annotated[bool, typer.Option("--no-thinking", help=strings.NO_THINKING)]
DataOption = Annotated[Path | None, typer.Option("--data", metavar="FOLDER", envvar="PALAVER_DATA", help=strings.DATA)]
DatabaseOption = Annotated[
    str | None, typer.Option("--database", metavar="URL", envvar="PALAVER_DATABASE", help=strings.DATABASE)
]
UserOption = Annotated[str | None, typer.Option("--user", metavar="NAME", help=strings.USER)]


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """The flags for loading a model. A command may have only some of them."""

    template: TemplateOption = None
    device: DeviceOption = None
    dtype: DtypeOption = None
    exact: ExactOption = False
    compiled: CompileOption = None
    cache_memory: CacheOption = None
    max_running: MaxRunningOption = None
    engine: EngineOption = AUTO
    engine_python: EnginePythonOption = None
    native_sampling: NativeSamplingOption = False
    gpu_layers: GpuLayersOption = None
    threads: ThreadsOption = None
    adapter: AdapterOption = None
    mmproj: MmprojOption = None
    draft_model: DraftModelOption = None
    drafts: DraftsOption = None
    approximate_cache: ApproximateCacheOption = False

    def load_options(self, raw: bool = False) -> LoadOptions:
        from palaver.chat.engine_choice import LoadOptions

        return LoadOptions(
            template=self.template,
            raw=raw,
            device=self.device,
            dtype=self.dtype,
            exact=self.exact,
            compiled=self.compiled,
            cache_bytes=parse_size("--kv-cache-memory", self.cache_memory),
            max_running=self.max_running,
            engine=self.engine,
            engine_python=self.engine_python if self.engine == VLLM else None,  # it may be set for all commands
            engine_key=os.environ.get(ENGINE_KEY_VARIABLE) if "://" in self.engine else None,
            native_sampling=self.native_sampling,
            gpu_layers=self.gpu_layers,
            threads=self.threads,
            adapter=self.adapter,
            mmproj=self.mmproj,
            draft_model=self.draft_model,
            drafts=self.drafts,
            approximate_cache=self.approximate_cache,
        )

    def given(self) -> dict[str, object]:
        """The flags by name, for `exclusive`."""
        return {
            "template": self.template,
            "device": self.device,
            "exact": self.exact,
            "compile": self.compiled,
            "no_compile": self.compiled is False,
            "kv_cache_memory": self.cache_memory,
            "max_num_seqs": self.max_running,
            "gpu_layers": self.gpu_layers,
            "threads": self.threads,
            "engine": self.engine != AUTO,
            "native_sampling": self.native_sampling,
            "adapter": self.adapter,
            "mmproj": self.mmproj,
            "draft_model": self.draft_model,
            "drafts": self.drafts,
            "no_drafts": self.drafts is False,
            "approximate_cache": self.approximate_cache,
        }


def with_engine_flags(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command these flags of `EngineFlags` in the place of its parameter `flags`, which gets their values."""
    hints = get_type_hints(EngineFlags, globals() | {"LoadOptions": object}, include_extras=True)
    defaults = inspect.signature(EngineFlags).parameters
    options = [defaults[name].replace(annotation=hints[name]) for name in names]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())
        place = next(place for place, parameter in enumerate(own) if parameter.name == "flags")
        parameters = [*own[:place], *options, *own[place + 1 :]]

        @wraps(command)
        def run(**values: Any) -> None:
            flags = EngineFlags(**{name: values.pop(name) for name in names})
            command(**values, flags=flags)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


ALL_ENGINE_FLAGS = (
    "template", "device", "exact", "compiled", "cache_memory", "max_running", "engine", "engine_python",
    "native_sampling", "gpu_layers", "threads", "adapter", "mmproj", "draft_model", "drafts", "approximate_cache",
)  # fmt: skip


@contextmanager
def report_errors() -> Iterator[None]:
    """Prints errors as one line and exits: 2 for wrong usage, 1 for failures of the model, engine or system."""
    try:
        yield
    except RequestError as error:
        _print_error(error)
        raise typer.Exit(EXIT_USAGE) from None
    except PalaverError as error:
        _print_error(_explain(error))
        raise typer.Exit(EXIT_FAILED) from None
    except BrokenPipeError:  # the reader of our output closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_FAILED) from None
    except OSError as error:  # a file or folder that can't be read or written
        name = error.filename2 or error.filename
        _print_error(f"{name}: {error.strerror}" if name else error)
        raise typer.Exit(EXIT_FAILED) from None


def _explain(error: PalaverError) -> str:
    """The message, with the driver's details for an unreachable database. A server does not send these to clients."""
    driver = getattr(error.__cause__, "orig", None)
    from palaver.store.errors import Unreachable

    if not isinstance(error, Unreachable) or driver is None:
        return str(error)
    return f"{error} {str(driver).strip().splitlines()[0]}"


def _print_error(error: object) -> None:
    print(f"palaver: {error}", file=sys.stderr)


def data_path(data: Path | None) -> Path:
    """The data folder, as `palaver.store.store.data_folder` has it. Creates nothing, and imports no database."""
    from platformdirs import user_data_path

    return user_data_path("palaver", appauthor=False) if data is None else data


def has_announcement(folder: Path) -> bool:
    """Whether a server of this data folder may be running. `palaver.client.discovery.find_server` finds it."""
    return any((folder / "servers").glob("*.json"))


@contextmanager
def store_context(data: Path | None, database: str | None) -> Iterator[Store]:
    """Opens the store and closes it at the end. Errors inside are reported by `report_errors`."""
    from palaver.store import open_store

    with report_errors(), open_store(data, database, blobs=media_place()) as store:
        yield store


def media_place() -> str | None:
    """Where the media of conversations are, if not in the data folder: another folder, or a URL."""
    return os.environ.get("PALAVER_BLOBS") or None


def find_owner(store: Store, name: str | None) -> str:
    """The id of the user with that name, or of the local user. Raises if there is no such user."""
    return (store.users.ensure() if name is None else store.users.get_by_name(name)).id


def parse_size(flag: str, text: str | None) -> int | None:
    """Parses a size in bytes: 8GiB, 512MiB, 8GB, 2g; a number without a unit is bytes."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise BadParameter(flag, text, strings.BAD_SIZE)
    number, prefix, binary = match.groups()
    size = int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " "))
    if size <= 0:
        raise BadParameter(flag, text, strings.NO_SIZE)
    return size


def parse_duration(flag: str, text: str | None) -> float | None:
    """Parses a time such as 90, 30s, 5m or 2h into seconds."""
    if text is None:
        return None
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise BadParameter(flag, text, strings.BAD_DURATION)
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def make_pool(
    options: LoadOptions,
    folder: Path,
    model: str,
    *,
    preload: Sequence[str] = (),
    aliases: Mapping[str, str] | None = None,
    memory: int | None = None,
    keep_alive: float | None = None,
) -> ModelPool:
    """The pool of a command, over the models of its data folder's catalog. `model` is the one in use: options that fit
    one kind of model are for it alone."""
    from dataclasses import replace

    from palaver.chat.engine_choice import LoadOptions
    from palaver.chat.model_loader import ModelLoader
    from palaver.chat.model_pool import ModelPool, PoolLimits
    from palaver.models.catalog import FILE_NAME, Catalog, CatalogEntry, read_catalog
    from palaver.models.disk import offered_names
    from palaver.models.resolver import embedded_models

    file = read_catalog(folder / FILE_NAME)
    if memory is not None and options.cache_bytes is None:
        options = replace(options, cache_bytes=memory // CACHE_PART)
    neutral = LoadOptions()
    own = {name: getattr(options, name) for name in _MODEL_OPTIONS if getattr(options, name) != getattr(neutral, name)}
    common = replace(options, **{name: getattr(neutral, name) for name in own})
    entries = {entry.name: entry for entry in file.entries}
    given = entries.get(model, CatalogEntry(model, model))
    entries[model] = replace(given, options={**given.options, **own})
    names = (*preload, *embedded_models())
    scan = offered_names if file.on_disk else None
    catalog = Catalog(names, tuple(entries.values()), {**file.aliases, **(aliases or {})}, scan)
    catalog.downloads |= {model, *preload}
    loader = ModelLoader(common, catalog)
    limits = PoolLimits(memory, keep_alive, options.cache_bytes or 0)
    return ModelPool(loader.load, catalog, loader.measure, options.states, limits, loader.describe)


def read_stdin() -> str:
    """All of the standard input. In the C locale Python would let bytes that are not UTF-8 pass as surrogates."""
    try:
        text = sys.stdin.buffer.read().decode(sys.stdin.encoding)
    except UnicodeDecodeError as error:
        raise RequestError(strings.STDIN_NOT_UTF8.format(position=error.start)) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def check_utf8(texts: Mapping[str, str | Sequence[str] | None]) -> None:
    """Raises for a text of the command line, by its parameter, that is not UTF-8: Python has surrogates in it."""
    for name, given in texts.items():
        try:
            (given if isinstance(given, str) else "".join(given or ())).encode()
        except UnicodeEncodeError:
            raise RequestError(strings.ARGUMENT_NOT_UTF8.format(name=name)) from None


def single_model(argument: str | None, option: str | None) -> str | None:
    if argument and option and argument != option:
        raise BadParameter("--model", option, strings.MODEL_TWICE.format(model=argument))
    return argument or option


def exclusive(**flags: object) -> None:
    """Raises if more than one of the flags is set. The number 0 is a value; None, False and empty text are not."""
    used = [
        f"--{name.replace('_', '-')}" for name, value in flags.items() if value is not False and value not in (None, "")
    ]
    if len(used) > 1:
        raise RequestError(strings.EXCLUSIVE.format(first=used[0], second=used[1]))


def operator_settings(texts: list[str] | None) -> dict[str, Any]:
    """Parses the operator's settings for requests: sampling parameters and `thinking`."""
    out: dict[str, Any] = {}
    others = []
    for setting in texts or ():
        name, _, text = setting.partition("=")
        if name.strip() == "thinking":
            out["thinking"] = _parse_bool(name.strip(), text.strip())
        else:
            others.append(setting)
    return {**out, **parse_settings(others)}


def _parse_bool(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false", "on", "off"):
        raise BadParameter(name, text, strings.TRUE_OR_FALSE)
    return text.lower() in ("true", "on")


def parse_settings(texts: list[str] | None) -> dict[str, Any]:
    """Parses the values of --set."""
    if not texts:
        return {}
    from palaver.sampling import STRINGS, check_strings, parse_setting

    out: dict[str, Any] = {}
    for setting in texts:
        name, equals, text = setting.partition("=")
        if not equals:
            raise BadParameter("--set", setting, strings.NAME_VALUE)
        name, value = parse_setting(name.strip(), text)
        out[name] = check_strings(name, (*out.get(name, ()), *value)) if name in STRINGS else value
    return out
