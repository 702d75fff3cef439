"""Commands for help and quitting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from palaver.repl import strings
from palaver.repl.command_table import ArgumentChoice, Command, CommandGroup, UnknownCommand

if TYPE_CHECKING:
    from palaver.repl.session import Session

commands = CommandGroup(strings.GROUP_HELP)
_INDENT = 2


async def _names(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
    names = [ArgumentChoice(command.name, command.description) for command in session.table]
    return [ArgumentChoice("all", strings.SEE_HELP), *names]


@commands.command("help", ("?", "h"), _names)
async def help_(session: Session, arguments: str) -> None:
    name = arguments.strip().removeprefix("/").lower()
    if name == "all":
        groups: dict[str, list[Command]] = {}
        for group in session.table.groups:
            groups.setdefault(group.name, []).extend(group.commands)
        for title, listed in groups.items():
            session.screen.show(Text(title, style="name"), _grid(listed))
        session.screen.show(Text(), Text(strings.KEYBOARD_SHORTCUTS, style="name"), _keys(strings.KEYS))
        session.screen.show(Text(), Text(strings.HELP_SLASHES, style="note"))
    elif name:
        command = session.table.get(name)
        if command is None:
            raise UnknownCommand(name, session.table.suggest(name))
        session.screen.show(_grid([command], with_usage=True))
    else:  # all of it is in sight in a terminal of 60 by 20
        essential = [session.table[name] for name in strings.ESSENTIAL]
        session.screen.show(_keys(strings.ESSENTIAL_KEYS), Text(), _grid(essential, with_usage=False))
        session.screen.show(Text(strings.HELP_MORE, style="note"))


@commands.command("quit", ("exit", "q"))
async def quit_(session: Session, arguments: str) -> None:
    session.should_exit = True


def _grid(commands: Iterable[Command], with_usage: bool = True) -> Padding:
    """Commands and descriptions. Without usages the column of names is narrow, and aliases are left out."""
    grid = Grid.grid(padding=(0, 2, 0, 0))
    if with_usage:
        grid.add_column(overflow="fold", ratio=2)
        grid.add_column(overflow="fold", ratio=3)
    for one in commands:
        usage = f" {one.arguments}" if with_usage and one.arguments else ""
        grid.add_row(Text(f"/{one.name}{usage}"), Text(_describe(one) if with_usage else one.description))
    return Padding.indent(grid, _INDENT)


def _describe(command: Command) -> str:
    if not command.aliases:
        return command.description
    aliases = ", ".join(f"/{alias}" for alias in command.aliases)
    return strings.HELP_ALIASES.format(description=command.description, aliases=aliases)


def _keys(keys: Iterable[tuple[str, str]]) -> Padding:
    grid = Grid.grid(padding=(0, 2, 0, 0))
    for key, action in keys:
        grid.add_row(Text(key), Text(action))
    return Padding.indent(grid, _INDENT)
