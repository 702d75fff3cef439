"""Parsing of lines: messages, commands, paths, unknown commands. Completion of paths."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from palaver.repl.command_table import CommandCompleter, CommandLine, MessageLine, UnknownCommand, parse_line
from palaver.repl.commands import table
from palaver.repl.session import Session

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


async def complete(line: str) -> list[str]:
    completer = CommandCompleter(table(), cast(Session, None))
    return [one.text async for one in completer.get_completions_async(Document(line), CompleteEvent())]


async def test_paths_are_completed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "far").symlink_to("x" * 300)  # no file system has such a name: whether it is a folder can't be told
    assert await complete(f"/attach {tmp_path}/f") == [f"{tmp_path}/far", f"{tmp_path}/file", f"{tmp_path}/folder/"]


@pytest.mark.parametrize("path", ["~no-such-user/", "a\0b/", "no-such-folder/"])
async def test_a_path_that_is_none_has_no_completions(path: str) -> None:
    assert await complete(f"/attach {path}") == []
