"""`palaver tools`: lists, tries, adds and removes tool servers, and runs the demo server."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from palaver.commands import strings
from palaver.commands.options import EXIT_FAILED, DataOption, report_errors
from palaver.errors import BadParameter

if TYPE_CHECKING:
    from palaver.tools.config import ServerConfig
    from palaver.tools.servers import ServerCard, ToolOutcome

tools = typer.Typer(help=strings.TOOLS, no_args_is_help=True)

FileOption = Annotated[Path | None, typer.Option("--file", metavar="FILE", help=strings.TOOLS_FILE)]


@tools.command("list", help=strings.TOOLS_LIST)
def list_(file: FileOption = None, data: DataOption = None) -> None:
    """Exits with 1 if a server failed."""
    import asyncio

    from palaver.tools.config import read_servers
    from palaver.tools.servers import ToolServerState

    with report_errors():
        cards = asyncio.run(_connect(read_servers(tools_file(file, data)), tokens_folder(data)))
    if not cards:
        print(strings.NO_TOOL_SERVERS)
    for card in cards:
        _print_card(card)
    if any(card.state is ToolServerState.FAILED for card in cards):
        raise typer.Exit(EXIT_FAILED)


@tools.command(help=strings.TOOLS_CALL)
def call(
    name: Annotated[str, typer.Argument(metavar="TOOL", help=strings.TOOL_NAME)],
    arguments: Annotated[str, typer.Argument(metavar="JSON", help=strings.TOOL_ARGUMENTS)] = "{}",
    file: FileOption = None,
    data: DataOption = None,
) -> None:
    """The result goes to stdout. Exits with 1 if the tool says that it failed."""
    import asyncio
    import json

    from palaver.tools.config import read_servers

    with report_errors():
        try:
            values = json.loads(arguments)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise BadParameter("JSON", arguments, strings.NOT_AN_OBJECT)
        outcome = asyncio.run(_call(read_servers(tools_file(file, data)), tokens_folder(data), name, values))
    print(outcome.text)
    if outcome.is_error:
        raise typer.Exit(EXIT_FAILED)


@tools.command(help=strings.TOOLS_ADD)
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help=strings.TOOL_SERVER_NAME)],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND|URL", help=strings.TOOL_SERVER_COMMAND)
    ] = None,
    header: Annotated[list[str] | None, typer.Option("--header", help=strings.TOOL_SERVER_HEADER)] = None,
    env: Annotated[list[str] | None, typer.Option("--env", help=strings.TOOL_SERVER_ENV)] = None,
    file: FileOption = None,
    data: DataOption = None,
) -> None:
    from palaver.tools.config import BadToolServer, add_server, server_from_words

    with report_errors():
        try:
            server = server_from_words(name, command or (), _pairs("--header", header), _pairs("--env", env))
        except BadToolServer:
            if not command:
                raise BadParameter(name, "", strings.NEEDS_COMMAND) from None
            raise
        add_server(tools_file(file, data), server)
        print(strings.TOOL_SERVER_ADDED.format(name=name))
        if server.url and not server.headers:
            _sign_in_if_needed(server, data, is_needed=False)


@tools.command("sign-in", help=strings.TOOLS_SIGN_IN)
def sign_in(
    name: Annotated[str, typer.Argument(metavar="NAME", help=strings.TOOL_SERVER_NAME)],
    file: FileOption = None,
    data: DataOption = None,
) -> None:
    from palaver.tools.config import BadToolServer, read_servers

    with report_errors():
        server = next((one for one in read_servers(tools_file(file, data)) if one.name == name and one.url), None)
        if server is None:
            raise BadToolServer(strings.NO_TOOL_SERVER.format(name=name))
        _sign_in_if_needed(server, data, is_needed=True)


def _sign_in_if_needed(server: ServerConfig, data: Path | None, is_needed: bool) -> None:
    """Signs in by a browser, if the server needs it or the user asks for it."""
    import asyncio

    from palaver.tools.oauth import listen_for_code
    from palaver.tools.servers import ToolServers

    async def run() -> None:
        connections = ToolServers([server], tokens=tokens_folder(data))
        try:
            if not is_needed and not (await connections.connect())[0].needs_sign_in:
                return
            async with listen_for_code() as callback:
                signing = connections.sign_in(server.name, callback.redirect_uri)
                print(strings.TOOL_SIGN_IN.format(name=server.name, url=await signing.url), flush=True)
                values = await callback.wait()
                if "code" not in values or values["state"] != signing.state:
                    raise BadParameter("code", values.get("error", ""), strings.SIGN_IN_REFUSED)
                signing.finish(values["code"], values.get("iss"))
                assert signing.task is not None
                await signing.task
            print(strings.TOOL_SIGNED_IN.format(name=server.name))
        finally:
            await connections.close()

    asyncio.run(run())


def tokens_folder(data: Path | None) -> Path:
    """The folder for the tokens of sign-ins to servers of the file."""
    from palaver.store.store import data_folder
    from palaver.tools.toolbox import OPERATOR, TOKENS_FOLDER, USERS_FOLDER

    return data_folder(data) / USERS_FOLDER / TOKENS_FOLDER / OPERATOR


@tools.command(help=strings.TOOLS_REMOVE)
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help=strings.TOOL_SERVER_NAME)],
    file: FileOption = None,
    data: DataOption = None,
) -> None:
    from palaver.tools.config import remove_server

    with report_errors():
        remove_server(tools_file(file, data), name)
    print(strings.TOOL_SERVER_REMOVED.format(name=name))


@tools.command(help=strings.TOOLS_DEMO)
def demo(
    http: Annotated[int | None, typer.Option("--http", metavar="PORT", help=strings.DEMO_PORT, max=65535)] = None,
    notes: Annotated[Path | None, typer.Option("--notes", metavar="FILE", help=strings.DEMO_NOTES)] = None,
    data: DataOption = None,
) -> None:
    from palaver.tools.demo import NOTES, run_server

    with report_errors():
        if notes is None:
            from palaver.store.store import data_folder

            notes = data_folder(data) / NOTES
        run_server(notes, http)


def tools_file(file: Path | None, data: Path | None) -> Path:
    """The file that names the tool servers."""
    from palaver.store.store import data_folder
    from palaver.tools.config import FILE_NAME

    if file is not None and not file.exists():
        raise BadParameter("--file", str(file), strings.NO_FILE)
    return data_folder(data) / FILE_NAME if file is None else file


async def _connect(servers: Iterable[ServerConfig], tokens: Path) -> tuple[ServerCard, ...]:
    from palaver.tools.servers import ToolServers

    connections = ToolServers(servers, tokens=tokens)
    try:
        return await connections.connect()
    finally:
        await connections.close()


async def _call(servers: Iterable[ServerConfig], tokens: Path, name: str, arguments: dict[str, object]) -> ToolOutcome:
    from palaver.tools.servers import ToolServers

    connections = ToolServers(servers, tokens=tokens)
    try:
        return await connections.call(name, arguments)
    finally:
        await connections.close()


def _print_card(card: ServerCard) -> None:
    text = strings.TOOL_SERVER_FAILED if card.error else strings.TOOL_SERVER_READY
    print(text.format(name=card.name, transport=card.transport, count=len(card.tools), error=card.error))
    for tool in card.tools:
        parameters = ", ".join(tool.parameters.get("properties") or ())
        print(f"  {tool.name}({parameters})  {' '.join(tool.description.split())[:100]}")
    for notice in card.notices:
        print(f"  {notice}", file=sys.stderr)


def _pairs(option: str, texts: list[str] | None) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts or ()]
    for name, equals, value in pairs:
        if not name or not equals:
            raise BadParameter(option, f"{name}{value}", strings.NAME_VALUE)
    return {name: value for name, _, value in pairs}
