"""The command line: registers the commands. Heavy imports happen inside the commands."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from palaver import __version__
from palaver.commands.ask import ask
from palaver.commands.backup import backup, restore
from palaver.commands.chat import chat
from palaver.commands.conversations import conversations, delete, undelete
from palaver.commands.export import export, import_
from palaver.commands.formats import formats
from palaver.commands.inspect import inspect
from palaver.commands.keys import keys
from palaver.commands.replay import replay
from palaver.commands.serve import serve

app = typer.Typer(
    name="palaver",
    help="Talk to open-weight language models on your own machine. Without a command: chat.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(chat)
app.command()(ask)
app.command()(conversations)
app.command()(delete)
app.command()(undelete)
app.command()(export)
app.command("import")(import_)
app.command()(backup)
app.command()(restore)
app.command()(replay)
app.command()(inspect)
app.command()(serve)
app.add_typer(keys, name="keys")
app.add_typer(formats, name="formats")


def main() -> None:
    app(_with_command(sys.argv[1:]))


def _with_command(arguments: list[str]) -> list[str]:
    """Without a command, all arguments belong to `chat`."""
    bare = not arguments or (arguments[0].startswith("-") and arguments[0] not in ("--help", "--version"))
    return ["chat", *arguments] if bare else arguments


def _version(requested: bool) -> None:
    if requested:
        print(f"palaver {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")] = False,
) -> None:
    pass
