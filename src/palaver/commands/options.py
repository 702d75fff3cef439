"""Options shared by several commands, their parsing, and the mapping of errors to exit codes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaver.errors import BadParameter, PalaverError, RequestError

if TYPE_CHECKING:
    from palaver.store import Store

EXIT_FAILED, EXIT_USAGE = 1, 2
MAX_RUNNING = 1024
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_MODEL_HELP = "A folder, a hub id (owner/name), a training configuration (.yml), or sprout."


class ThinkingOption(StrEnum):
    ON = "on"
    OFF = "off"
    DEFAULT = "default"

    @property
    def enabled(self) -> bool | None:
        return None if self is ThinkingOption.DEFAULT else self is ThinkingOption.ON


ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP, show_default=False)]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", metavar="MODEL", help=_MODEL_HELP)]
SystemOption = Annotated[str | None, typer.Option("--system", "-s", metavar="TEXT", help="The system prompt.")]
ThinkOption = Annotated[ThinkingOption, typer.Option("--think", help="Whether the model thinks before it answers.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A sampling parameter; may be repeated.")
]
TemplateOption = Annotated[
    Path | None, typer.Option("--template", metavar="FILE", help="A chat template to use instead of the model's.")
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 or mps; the best one by default.")
]
ExactOption = Annotated[
    bool,
    typer.Option("--exact", help="Keep the bits of a reply independent of other requests. Slower."),
]
CompileOption = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Require, or never use, the step that is compiled for this CPU; used where it can be by default.",
        show_default=False,
    ),
]
CacheOption = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-memory",
        metavar="SIZE",
        help="The most memory of the KV cache, such as 512MiB or 8GiB.",
        show_default=False,
    ),
]
MaxRunningOption = Annotated[
    int | None,
    typer.Option(
        "--max-num-seqs", metavar="N", min=1, max=MAX_RUNNING, help="How many requests run at once.", show_default=False
    ),
]
NoThinkingOption = Annotated[bool, typer.Option("--no-thinking", help="Do not show what the model thinks.")]
DataOption = Annotated[
    Path | None,
    typer.Option("--data", metavar="FOLDER", envvar="PALAVER_DATA", help="Where conversations and media are kept."),
]
DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="URL",
        envvar="PALAVER_DATABASE",
        help="postgresql://... to keep conversations there; a file in the data folder by default.",
    ),
]
UserOption = Annotated[str | None, typer.Option("--user", metavar="NAME", help="Whose; the local user's by default.")]


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


@contextmanager
def store_context(data: Path | None, database: str | None) -> Iterator[Store]:
    """Opens the store and closes it at the end. Errors inside are reported by `report_errors`."""
    from palaver.store import open_store

    with report_errors(), open_store(data, database) as store:
        yield store


def find_owner(store: Store, name: str | None) -> str:
    """The id of the user with that name, or of the local user. Raises if there is no such user."""
    return (store.users.ensure() if name is None else store.users.get_by_name(name)).id


def parse_size(flag: str, text: str | None) -> int | None:
    """Parses a size in bytes: 8GiB, 512MiB, 8GB, 2g; a number without a unit is bytes."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise BadParameter(flag, text, "must be a size such as 512MiB or 8GiB")
    number, prefix, binary = match.groups()
    size = int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " "))
    if size <= 0:
        raise BadParameter(flag, text, "must be more than nothing")
    return size


def single_model(argument: str | None, option: str | None) -> str | None:
    if argument and option and argument != option:
        raise BadParameter("--model", option, f"the model is already given as {argument!r}")
    return argument or option


def exclusive(**flags: object) -> None:
    """Raises if more than one of the flags is set."""
    used = [f"--{name.replace('_', '-')}" for name, value in flags.items() if value]
    if len(used) > 1:
        raise BadParameter(used[0], "given", f"can't be combined with {used[1]}")


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
        raise BadParameter(name, text, "must be true or false")
    return text.lower() in ("true", "on")


def parse_settings(texts: list[str] | None) -> dict[str, Any]:
    """Parses the values of --set."""
    from palaver.sampling import STRINGS, check_strings, parse_setting

    out: dict[str, Any] = {}
    for setting in texts or ():
        name, equals, text = setting.partition("=")
        if not equals:
            raise BadParameter("--set", setting, "must be written name=value")
        name, value = parse_setting(name.strip(), text)
        out[name] = check_strings(name, (*out.get(name, ()), *value)) if name in STRINGS else value
    return out
