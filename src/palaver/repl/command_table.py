"""The table of slash commands: source of help, of suggestions for unknown names, and of tab completion."""

from __future__ import annotations

import difflib
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document

from palaver.errors import PalaverError, RequestError
from palaver.repl import strings
from palaver.repl.strings import CommandText

if TYPE_CHECKING:
    from palaver.repl.session import Session


CommandFunction = Callable[["Session", str], Awaitable[None]]
"""Called with the text after the command's name, unchanged."""


@dataclass(frozen=True, slots=True)
class ArgumentChoice:
    """A possible value of an argument, with a description."""

    text: str
    description: str = ""
    replaces_all: bool = False
    """Whether it replaces all arguments instead of the last word."""


Choices = Callable[["Session", str], Awaitable[Iterable[ArgumentChoice]]]
"""Called with the arguments typed so far; returns the choices for the last word."""


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    description: str
    run: CommandFunction
    arguments: str = ""
    """The usage shown in help."""
    aliases: tuple[str, ...] = ()
    choices: Choices | None = None
    group: str = ""


class UnknownCommand(RequestError):
    def __init__(self, name: str, suggestions: Sequence[str]) -> None:
        names = ", ".join(f"/{one}" for one in suggestions)
        hint = strings.DID_YOU_MEAN.format(names=names) if suggestions else strings.SEE_HELP
        super().__init__(strings.UNKNOWN_COMMAND.format(name=name, hint=hint))


class CommandGroup:
    """The commands of one module."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.commands: list[Command] = []

    def command(
        self,
        name: str,
        aliases: Iterable[str] = (),
        choices: Choices | None = None,
        text: CommandText | None = None,
    ) -> Callable[[CommandFunction], CommandFunction]:
        """`text` is the command's usage and description, by default the one in `strings.COMMANDS`."""
        shown = text or strings.COMMANDS[name]

        def register(run: CommandFunction) -> CommandFunction:
            self.commands.append(Command(name, shown.description, run, shown.usage, tuple(aliases), choices, self.name))
            return run

        return register


class CommandTable:
    def __init__(self, groups: Iterable[CommandGroup]) -> None:
        self.groups = tuple(groups)
        self._by_name = {name: one for one in self for name in (one.name, *one.aliases)}

    def __iter__(self) -> Iterator[Command]:
        return (command for group in self.groups for command in group.commands)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def get(self, name: str) -> Command | None:
        return self._by_name.get(name)

    def __getitem__(self, name: str) -> Command:
        return self._by_name[name]

    def suggest(self, name: str) -> list[str]:
        """Similar command names, the most similar first."""
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
    """Parses a line. `//text` is a message that begins with a slash, and so is a path that resembles no command."""
    if not line.startswith("/"):
        return MessageLine(line)
    if line.startswith("//"):
        return MessageLine(line[1:])
    name, arguments = _split_command(line[1:])
    command = table.get(name.lower())
    if command is not None:
        return CommandLine(command, arguments)
    suggestions = table.suggest(name)
    if not suggestions and ("/" in name or not name):
        return MessageLine(line)
    raise UnknownCommand(name, suggestions)


def escape_message(text: str) -> str:
    """The line that sends the text as a message."""
    return f"/{text}" if text.startswith("/") else text


def _split_command(text: str) -> tuple[str, str]:
    """The first word, and the text after the one whitespace character that follows it."""
    for place, character in enumerate(text):
        if character.isspace():
            return text[:place], text[place + 1 :]
    return text, ""


MAX_CHOICES = 200


class CommandCompleter(Completer):
    """Completes lines that begin with a slash; messages are not completed."""

    def __init__(self, table: CommandTable, session: Session) -> None:
        self._table = table
        self._session = session

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        return ()

    async def get_completions_async(
        self, document: Document, complete_event: CompleteEvent
    ) -> AsyncGenerator[Completion, None]:
        text = document.text_before_cursor
        if not text.startswith("/") or text.startswith("//") or "\n" in text:
            return
        name, space, arguments = text[1:].partition(" ")
        if not space:
            for choice in self._names(name.lower()):
                yield _completion(choice, name)
            return
        command = self._table.get(name.lower())
        if command is None or command.choices is None:
            return
        try:
            choices = list(await command.choices(self._session, arguments))
        except PalaverError:
            return
        for choice in matching_choices(choices, arguments):
            yield _completion(choice, _replaced_text(choice, arguments))

    def _names(self, prefix: str) -> list[ArgumentChoice]:
        """Commands whose name, or else an alias, starts with the prefix."""
        return [
            ArgumentChoice(name, command.description)
            for command in self._table
            for name in [next((one for one in (command.name, *command.aliases) if one.startswith(prefix)), None)]
            if name is not None
        ]


def matching_choices(choices: Iterable[ArgumentChoice], arguments: str) -> list[ArgumentChoice]:
    """The choices that start with the typed text first, then those that contain it."""
    pairs = [(one, _replaced_text(one, arguments).lower()) for one in choices]
    starting = [one for one, typed in pairs if one.text.lower().startswith(typed)]
    containing = [one for one, typed in pairs if typed in f"{one.text}\n{one.description}".lower()]
    return list(dict.fromkeys([*starting, *containing]))[:MAX_CHOICES]


def _replaced_text(choice: ArgumentChoice, arguments: str) -> str:
    """The typed text that the choice replaces."""
    return arguments if choice.replaces_all else arguments.rpartition(" ")[2]


async def complete_paths(session: Session, arguments: str) -> list[ArgumentChoice]:
    """Files and folders that complete a typed path; none if its folder can't be read or its name is no valid one."""
    path_text = arguments.strip()
    folder, _, name = path_text.rpartition(os.sep)
    parent = f"{folder}{os.sep}" if folder or path_text.startswith(os.sep) else ""
    try:
        entries = sorted(Path(parent or ".").expanduser().iterdir(), key=lambda path: path.name)
    except (OSError, RuntimeError, ValueError):  # also an unknown user, a null character
        return []
    matches = [path for path in entries if path.name.startswith(name) and (name or not path.name.startswith("."))]
    return [
        ArgumentChoice(f"{parent}{path.name}{os.sep if _is_folder(path) else ''}", replaces_all=True)
        for path in matches[:MAX_CHOICES]
    ]


def _is_folder(path: Path) -> bool:
    """Whether the path is a folder; False if that can't be told."""
    with suppress(OSError):
        return path.is_dir()
    return False


def fixed_choices(*choices: str) -> Choices:
    """A completer with a fixed list."""

    async def complete(session: Session, arguments: str) -> list[ArgumentChoice]:
        return [ArgumentChoice(one) for one in choices] if " " not in arguments else []

    return complete


def _completion(choice: ArgumentChoice, replaced: str) -> Completion:
    return Completion(choice.text, start_position=-len(replaced), display_meta=choice.description)
