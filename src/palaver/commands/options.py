"""The options that several commands take, and what they come to."""

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

MAX_RUNNING = 1024
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


class ThinkingOption(StrEnum):
    ON = "on"
    OFF = "off"
    DEFAULT = "default"

    @property
    def wanted(self) -> bool | None:
        return None if self is ThinkingOption.DEFAULT else self is ThinkingOption.ON


_MODEL = "A folder, a hub id (owner/name), a training configuration (.yml), or sprout."
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL, show_default=False)]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", metavar="MODEL", help=_MODEL)]
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


def parse_size(flag: str, text: str | None) -> int | None:
    """Bytes, from a number with a unit: 8GiB, 512MiB, 8GB, 2g; without one it is bytes."""
    if text is None:
        return None
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise BadParameter(flag, text, "must be a size such as 512MiB or 8GiB")
    number, prefix, binary = found.groups()
    size = int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " "))
    if size <= 0:
        raise BadParameter(flag, text, "must be more than nothing")
    return size


def single_model(argument: str | None, option: str | None) -> str | None:
    if argument and option and argument != option:
        raise BadParameter("--model", option, f"the model is already given as {argument!r}")
    return argument or option


def exclusive(**given: object) -> None:
    """Of flags that contradict each other, at most one: an error names both."""
    flags = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if len(flags) > 1:
        raise BadParameter(flags[0], "given", f"can't be combined with {flags[1]}")


def operator_settings(texts: list[str] | None) -> dict[str, Any]:
    """What an operator sets for requests: sampling parameters, and whether the model thinks."""
    out: dict[str, Any] = {}
    others = []
    for setting in texts or ():
        name, _, text = setting.partition("=")
        if name.strip() == "thinking":
            out["thinking"] = _flag(name.strip(), text.strip())
        else:
            others.append(setting)
    return {**out, **parse_settings(others)}


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false", "on", "off"):
        raise BadParameter(name, text, "must be true or false")
    return text.lower() in ("true", "on")


def parse_settings(texts: list[str] | None) -> dict[str, Any]:
    """What --set says, by name."""
    from palaver.sampling import STRINGS, checked_strings, parse_setting

    out: dict[str, Any] = {}
    for setting in texts or ():
        name, equals, text = setting.partition("=")
        if not equals:
            raise BadParameter("--set", setting, "must be written name=value")
        name, value = parse_setting(name.strip(), text)
        out[name] = checked_strings(name, (*out.get(name, ()), *value)) if name in STRINGS else value
    return out


FAILED, USAGE = 1, 2


@contextmanager
def report_errors() -> Iterator[None]:
    """Status 2 for how it was asked, 1 for the model or the engine."""
    try:
        yield
    except RequestError as error:
        _tell(error)
        raise typer.Exit(USAGE) from None
    except PalaverError as error:
        _tell(_explained(error))
        raise typer.Exit(FAILED) from None
    except BrokenPipeError:  # whoever read the answer has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from None
    except OSError as error:  # a file or a folder that can't be read or written
        name = error.filename2 or error.filename
        _tell(f"{name}: {error.strerror}" if name else error)
        raise typer.Exit(FAILED) from None


def _explained(error: PalaverError) -> str:
    """Of a database that does not answer also what its driver says, which clients of a server are not shown."""
    driver = getattr(error.__cause__, "orig", None)
    from palaver.store.errors import Unreachable

    if not isinstance(error, Unreachable) or driver is None:
        return str(error)
    return f"{error} {str(driver).strip().splitlines()[0]}"


def _tell(error: object) -> None:
    print(f"palaver: {error}", file=sys.stderr)


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
def opened_store(data: Path | None, database: str | None) -> Iterator[Store]:
    """The store at that place, closed at the end; what goes wrong inside is told in one sentence."""
    from palaver.store import open_store

    with report_errors(), open_store(data, database) as store:
        yield store


def find_owner(store: Store, name: str | None) -> str:
    """The id of that user, who must be there; the local one always is."""
    return (store.users.ensure() if name is None else store.users.named(name)).id
