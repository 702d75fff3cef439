"""Parsing of lines: messages, commands, paths, unknown commands."""

from __future__ import annotations

import pytest

from palaver.repl.command_table import CommandLine, MessageLine, UnknownCommand, parse_line
from palaver.repl.commands import table

EXPECTED_COMMANDS = """
help new open list search title system set params preset think expand collapse retry undo redo continue edit
branch branches switch history tokens context stop save export load import attach image audio file copy model status
quit tools result temperature top_p seed""".split()


def test_every_command_there_should_be_is_there() -> None:
    names = table().names
    assert [name for name in EXPECTED_COMMANDS if name not in names] == []
    listed = [name for command in table() for name in (command.name, *command.aliases)]
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("hello", "hello"),
        ("  indented", "  indented"),
        ("//help", "/help"),
        ("/etc/hosts is a file", "/etc/hosts is a file"),
        ("/ is the root", "/ is the root"),
        ("/usr/bin", "/usr/bin"),
    ],
)
def test_messages(line: str, message: str) -> None:
    assert parse_line(line, table()) == MessageLine(message)


@pytest.mark.parametrize(
    ("line", "name", "arguments"),
    [
        ("/help", "help", ""),
        ("/?", "help", ""),
        ("/QUIT", "quit", ""),
        ("/q", "quit", ""),
        ("/system  two spaces\nand lines", "system", " two spaces\nand lines"),
        ("/temp 0.5", "temperature", "0.5"),
        ("/regen", "retry", ""),
    ],
)
def test_commands(line: str, name: str, arguments: str) -> None:
    found = parse_line(line, table())
    assert isinstance(found, CommandLine)
    assert (found.command.name, found.arguments) == (name, arguments)


@pytest.mark.parametrize(
    ("line", "suggestion"), [("/hepl", "/help"), ("/hist", "/history"), ("/retrry", "/retry"), ("/xyzzy", "/help")]
)
def test_the_nearest_names_are_told(line: str, suggestion: str) -> None:
    with pytest.raises(UnknownCommand, match=suggestion):
        parse_line(line, table())
