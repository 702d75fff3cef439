"""The options that several commands take, and what they come to."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from palaver.errors import BadParameter

MAX_RUNNING = 1024
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


class Think(StrEnum):
    ON = "on"
    OFF = "off"
    DEFAULT = "default"

    @property
    def wanted(self) -> bool | None:
        return None if self is Think.DEFAULT else self is Think.ON


_MODEL = "A folder, a hub id (owner/name), a training configuration (.yml), or sprout."
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL, show_default=False)]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", metavar="MODEL", help=_MODEL)]
SystemOption = Annotated[str | None, typer.Option("--system", "-s", metavar="TEXT", help="The system prompt.")]
ThinkOption = Annotated[Think, typer.Option("--think", help="Whether the model thinks before it answers.")]
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


def one_model(argument: str | None, option: str | None) -> str | None:
    if argument and option and argument != option:
        raise BadParameter("--model", option, f"the model is already given as {argument!r}")
    return argument or option


def not_both(**given: object) -> None:
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
    return {**out, **settings(others)}


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false", "on", "off"):
        raise BadParameter(name, text, "must be true or false")
    return text.lower() in ("true", "on")


def settings(texts: list[str] | None) -> dict[str, Any]:
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
