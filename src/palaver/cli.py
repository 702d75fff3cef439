"""The command line: registers the commands. Heavy imports happen inside the commands."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from palaver import __version__
from palaver.commands import strings
from palaver.commands.ask import ask, fill
from palaver.commands.chat import chat
from palaver.commands.cluster import cluster
from palaver.commands.formats import formats
from palaver.commands.inspect import inspect
from palaver.commands.models import models
from palaver.commands.options import QuickCommand, QuickGroup
from palaver.commands.prompts import prompts
from palaver.commands.replay import replay
from palaver.commands.serve import serve
from palaver.commands.store import backup, conversations, delete, export, import_, keys, purge, restore, undelete
from palaver.commands.tools import tools

app = typer.Typer(
    name="palaver",
    cls=QuickGroup,
    help=strings.PALAVER,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(help=strings.CHAT, cls=QuickCommand)(chat)
app.command(help=strings.ASK, cls=QuickCommand)(ask)
app.command(help=strings.FILL, cls=QuickCommand)(fill)
app.command(help=strings.CONVERSATIONS, cls=QuickCommand)(conversations)
app.command(help=strings.DELETE, cls=QuickCommand)(delete)
app.command(help=strings.UNDELETE, cls=QuickCommand)(undelete)
app.command(help=strings.PURGE, cls=QuickCommand)(purge)
app.command(help=strings.EXPORT, cls=QuickCommand)(export)
app.command("import", help=strings.IMPORT, cls=QuickCommand)(import_)
app.command(help=strings.BACKUP, cls=QuickCommand)(backup)
app.command(help=strings.RESTORE, cls=QuickCommand)(restore)
app.command(help=strings.REPLAY, cls=QuickCommand)(replay)
app.command(help=strings.INSPECT, cls=QuickCommand)(inspect)
app.command(help=strings.SERVE, cls=QuickCommand)(serve)
app.add_typer(prompts, name="prompts")
app.add_typer(keys, name="keys")
app.add_typer(formats, name="formats")
app.add_typer(tools, name="tools")
app.add_typer(models, name="models")
app.add_typer(cluster, name="cluster")


def main() -> None:
    _open_closed_streams()
    app(_with_command(sys.argv[1:]))


def _open_closed_streams() -> None:
    """A stream that was closed before the start, as `palaver <&-` does, is an empty one."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - stays open


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
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help=strings.VERSION)] = False,
) -> None:
    pass
