"""`palaver prompts`: named prompts with variables, for `palaver ask --prompt NAME`, as files in the data folder."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from palaver.commands import strings
from palaver.commands.options import DataOption, check_utf8, data_path, read_stdin, report_errors
from palaver.errors import BadParameter, EmptyMessage, RequestError

FOLDER = "prompts"
INPUT = "input"
"""The variable that stands for the question."""
_NAME = re.compile(r"[\w-]{1,64}")
_VARIABLE = re.compile(r"\{\{\s*([A-Za-z_]\w*)\s*\}\}")

prompts = typer.Typer(help=strings.PROMPTS, no_args_is_help=True)
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help=strings.PROMPT_NAME)]


@prompts.command("list", help=strings.PROMPTS_LIST)
def list_(data: DataOption = None) -> None:
    """Each with its variables and its first words."""
    with report_errors():
        files = sorted((data_path(data) / FOLDER).glob("*.txt"))
        for file in files:
            text = file.read_text(encoding="utf-8")
            names = " ".join(f"{{{{{name}}}}}" for name in variables(text))
            print("  ".join(filter(None, (file.stem, names, " ".join(text.split())[:60]))))
    if not files:
        print(strings.NO_PROMPTS, file=sys.stderr)


@prompts.command(help=strings.PROMPTS_SHOW)
def show(name: NameArgument, data: DataOption = None) -> None:
    with report_errors():
        print(read_prompt(data_path(data), name))


@prompts.command(help=strings.PROMPTS_SAVE)
def save(
    name: NameArgument,
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help=strings.PROMPT_TEXT)] = None,
    data: DataOption = None,
) -> None:
    """Replaces a prompt of that name."""
    with report_errors():
        file = _file(data_path(data), name)
        check_utf8({"TEXT": text})
        text = read_stdin() if text is None else text
        if not text.strip():
            raise EmptyMessage
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        print(strings.PROMPT_SAVED.format(name=name, file=file), file=sys.stderr)


@prompts.command(help=strings.PROMPTS_REMOVE)
def remove(name: NameArgument, data: DataOption = None) -> None:
    with report_errors():
        read_prompt(data_path(data), name)
        _file(data_path(data), name).unlink()


def read_prompt(folder: Path, name: str) -> str:
    """The text of the prompt. Raises BadParameter if there is none of that name."""
    try:
        return _file(folder, name).read_text(encoding="utf-8").rstrip("\n")
    except FileNotFoundError:
        known = ", ".join(sorted(file.stem for file in (folder / FOLDER).glob("*.txt")))
        raise BadParameter("--prompt", name, strings.NO_PROMPT.format(known=known or strings.NONE)) from None


def variables(text: str) -> list[str]:
    return list(dict.fromkeys(_VARIABLE.findall(text)))


def fill_prompt(text: str, values: Mapping[str, str], question: str) -> str:
    """The prompt with its variables filled in. `{{input}}` is the question, which else follows the text."""
    wanted = variables(text)
    given = {**values, **({INPUT: question} if question else {})}
    if missing := [name for name in wanted if name not in given]:
        hint = strings.NO_INPUT if missing == [INPUT] else strings.NO_VALUES.format(name=missing[0])
        raise RequestError(hint)
    if unknown := [name for name in values if name not in wanted]:
        raise BadParameter("--var", unknown[0], strings.NO_VARIABLE.format(known=", ".join(wanted) or strings.NONE))
    filled = _VARIABLE.sub(lambda found: given[found[1]], text)
    return filled if INPUT in wanted or not question else f"{filled}\n\n{question}"


def parse_variables(texts: list[str] | None) -> dict[str, str]:
    """Parses the values of --var."""
    out = {}
    for one in texts or ():
        name, equals, value = one.partition("=")
        if not equals or not name.strip():
            raise BadParameter("--var", one, strings.NAME_VALUE)
        out[name.strip()] = value
    return out


def _file(folder: Path, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise BadParameter("NAME", name, strings.BAD_PROMPT_NAME)
    return folder / FOLDER / f"{name}.txt"
