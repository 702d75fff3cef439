"""Tab completion of commands, their arguments, parameters and paths, from the command table."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document

from palaver.errors import PalaverError
from palaver.repl.command_table import ArgumentChoice, Choices, CommandTable

if TYPE_CHECKING:
    from palaver.repl.session import Session

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
    """Files and folders that complete a typed path."""
    path_text = arguments.strip()
    folder, _, name = path_text.rpartition(os.sep)
    parent = f"{folder}{os.sep}" if folder or path_text.startswith(os.sep) else ""
    try:
        entries = sorted(Path(parent or ".").expanduser().iterdir(), key=lambda path: path.name)
    except OSError:
        return []
    matches = [path for path in entries if path.name.startswith(name) and (name or not path.name.startswith("."))]
    return [
        ArgumentChoice(f"{parent}{path.name}{os.sep if path.is_dir() else ''}", replaces_all=True)
        for path in matches[:MAX_CHOICES]
    ]


def fixed_choices(*choices: str) -> Choices:
    """A completer with a fixed list."""

    async def complete(session: Session, arguments: str) -> list[ArgumentChoice]:
        return [ArgumentChoice(one) for one in choices] if " " not in arguments else []

    return complete


def _completion(choice: ArgumentChoice, replaced: str) -> Completion:
    return Completion(choice.text, start_position=-len(replaced), display_meta=choice.description)
