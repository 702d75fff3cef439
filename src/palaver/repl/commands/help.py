"""Commands for help and quitting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.table import Table as Grid
from rich.text import Text

from palaver.repl.command_table import ArgumentChoice, Command, CommandGroup, UnknownCommand

if TYPE_CHECKING:
    from palaver.repl.session import Session

commands = CommandGroup("Help")

KEYS = """\
Enter sends; Alt+Enter, or a backslash before Enter, makes a new line; what is pasted stays one message.
Ctrl+C stops a reply and keeps it; /continue goes on exactly where it stopped. Twice within a second, it drops it.
Ctrl+T shows or hides thoughts, Up edits the last message, Ctrl+R searches what was typed, Ctrl+D leaves.
A line //like this sends /like this."""


async def _names(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
    return [ArgumentChoice(command.name, command.description) for command in session.table]


@commands.command("help", "the commands and keys, or one command", "[COMMAND]", ("?", "h"), _names)
async def help_(session: Session, arguments: str) -> None:
    name = arguments.strip().removeprefix("/").lower()
    if name:
        command = session.table.get(name)
        if command is None:
            raise UnknownCommand(name, session.table.suggest(name))
        session.screen.show(_grid([command]))
        return
    for group in session.table.groups:
        session.screen.show(Text(group.name, style="name"), _grid(group.commands))
    session.screen.show(Text("Keys", style="name"), Text(KEYS))


@commands.command("quit", "leave; everything is kept", "", ("exit", "q"))
async def quit_(session: Session, arguments: str) -> None:
    session.should_exit = True


def _grid(commands: Iterable[Command]) -> Grid:
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(overflow="fold", ratio=2)
    grid.add_column(overflow="fold", ratio=3)
    for one in commands:
        also = f" (also {', '.join(f'/{alias}' for alias in one.aliases)})" if one.aliases else ""
        grid.add_row(Text(f"  /{one.name} {one.arguments}".rstrip()), Text(f"{one.description}{also}"))
    return grid
