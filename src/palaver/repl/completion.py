"""Completion of commands, their arguments, parameters and paths, from the table of commands."""

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

MOST = 200


class CommandCompleter(Completer):
    """Only for lines that begin with a slash: what is said to a model is not guessed at."""

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
            yield _completion(choice, _begun(choice, arguments))

    def _names(self, begun: str) -> list[ArgumentChoice]:
        """Names first; an alias only where the name itself does not begin so."""
        return [
            ArgumentChoice(name, command.meaning)
            for command in self._table
            for name in [next((one for one in (command.name, *command.aliases) if one.startswith(begun)), None)]
            if name is not None
        ]


def matching_choices(choices: Iterable[ArgumentChoice], arguments: str) -> list[ArgumentChoice]:
    """Those that begin as what was written first, then those that hold it."""
    given = [(one, _begun(one, arguments).lower()) for one in choices]
    starts = [one for one, begun in given if one.text.lower().startswith(begun)]
    holds = [one for one, begun in given if begun in f"{one.text}\n{one.meaning}".lower()]
    return list(dict.fromkeys([*starts, *holds]))[:MOST]


def _begun(choice: ArgumentChoice, arguments: str) -> str:
    """What the choice takes the place of."""
    return arguments if choice.whole else arguments.rpartition(" ")[2]


async def complete_paths(session: Session, arguments: str) -> list[ArgumentChoice]:
    """Files and folders, for what was written of a path."""
    begun = arguments.strip()
    folder, _, name = begun.rpartition(os.sep)
    parent = f"{folder}{os.sep}" if folder or begun.startswith(os.sep) else ""
    try:
        entries = sorted(Path(parent or ".").expanduser().iterdir(), key=lambda path: path.name)
    except OSError:
        return []
    found = [path for path in entries if path.name.startswith(name) and (name or not path.name.startswith("."))]
    return [
        ArgumentChoice(f"{parent}{path.name}{os.sep if path.is_dir() else ''}", whole=True) for path in found[:MOST]
    ]


def fixed_choices(*choices: str) -> Choices:
    """Always the same few."""

    async def given(session: Session, arguments: str) -> list[ArgumentChoice]:
        return [ArgumentChoice(one) for one in choices] if " " not in arguments else []

    return given


def _completion(choice: ArgumentChoice, begun: str) -> Completion:
    return Completion(choice.text, start_position=-len(begun), display_meta=choice.meaning)
