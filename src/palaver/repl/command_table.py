"""The commands of the terminal, in one table: from it come help, completion and the nearest names."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from palaver.errors import RequestError

if TYPE_CHECKING:
    from palaver.repl.session import Session

Run = Callable[["Session", str], Awaitable[None]]
"""Takes what was written behind the command's name, as it was written."""


@dataclass(frozen=True, slots=True)
class ArgumentChoice:
    """Something an argument may be, and what it means."""

    text: str
    meaning: str = ""
    whole: bool = False
    """Whether it takes the place of all arguments, not of the last word alone."""


Choices = Callable[["Session", str], Awaitable[Iterable[ArgumentChoice]]]
"""Takes what was written of the arguments so far; gives what may stand in place of the last word."""


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    meaning: str
    run: Run
    arguments: str = ""
    """How they are written, for help."""
    aliases: tuple[str, ...] = ()
    choices: Choices | None = None
    theme: str = ""


class UnknownCommand(RequestError):
    def __init__(self, name: str, near: Sequence[str]) -> None:
        nearest = f" Near it: {', '.join(f'/{one}' for one in near)}." if near else " /help lists them all."
        super().__init__(f"There is no command /{name}.{nearest} To send it as text, write //{name}.")


class CommandGroup:
    """The commands of one module."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.commands: list[Command] = []

    def command(
        self,
        name: str,
        meaning: str,
        arguments: str = "",
        aliases: Iterable[str] = (),
        choices: Choices | None = None,
    ) -> Callable[[Run], Run]:
        def put(run: Run) -> Run:
            self.commands.append(Command(name, meaning, run, arguments, tuple(aliases), choices, self.name))
            return run

        return put


class CommandTable:
    def __init__(self, themes: Iterable[CommandGroup]) -> None:
        self.themes = tuple(themes)
        self._by_name = {name: one for one in self for name in (one.name, *one.aliases)}

    def __iter__(self) -> Iterator[Command]:
        return (command for theme in self.themes for command in theme.commands)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def get(self, name: str) -> Command | None:
        return self._by_name.get(name)

    def near(self, name: str) -> list[str]:
        """The nearest names, the nearest first."""
        starts = [one for one in self._by_name if len(name) > 1 and one.startswith(name.lower())]
        return list(dict.fromkeys([*starts, *difflib.get_close_matches(name.lower(), self._by_name, 3, 0.7)]))[:4]


@dataclass(frozen=True, slots=True)
class MessageLine:
    """A line that is a message."""

    text: str


@dataclass(frozen=True, slots=True)
class CommandLine:
    command: Command
    arguments: str


def parse_line(line: str, table: CommandTable) -> MessageLine | CommandLine:
    """What a line is. `//text` is a message that begins with a slash, and so is a path that is near no command."""
    if not line.startswith("/"):
        return MessageLine(line)
    if line.startswith("//"):
        return MessageLine(line[1:])
    name, arguments = _parted(line[1:])
    command = table.get(name.lower())
    if command is not None:
        return CommandLine(command, arguments)
    near = table.near(name)
    if not near and ("/" in name or not name):
        return MessageLine(line)
    raise UnknownCommand(name, near)


def _parted(text: str) -> tuple[str, str]:
    """The first word, and what comes behind the one space or newline after it."""
    for place, character in enumerate(text):
        if character.isspace():
            return text[:place], text[place + 1 :]
    return text, ""
