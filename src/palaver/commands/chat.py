"""`palaver chat`: a conversation at the terminal, with a local model or a running server."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaver.commands import strings
from palaver.commands.options import (
    ALL_ENGINE_FLAGS,
    EXIT_FAILED,
    DatabaseOption,
    DataOption,
    EngineFlags,
    ModelArgument,
    ModelOption,
    NoThinkingOption,
    SetOption,
    SystemOption,
    ThinkingOption,
    ThinkOption,
    TranscriberOption,
    check_utf8,
    exclusive,
    make_pool,
    media_place,
    parse_settings,
    report_errors,
    single_model,
    with_engine_flags,
)

if TYPE_CHECKING:
    from palaver.chat.engine_choice import LoadOptions
    from palaver.chat.interface import Chat

ResumeOption = Annotated[bool, typer.Option("--resume", "-r", help=strings.RESUME)]
ConversationOption = Annotated[
    str | None, typer.Option("--conversation", "-c", metavar="ID", help=strings.CONVERSATION)
]
PlainOption = Annotated[bool, typer.Option("--plain", help=strings.PLAIN)]
ExpandOption = Annotated[bool, typer.Option("--expand", help=strings.EXPAND)]
ServerOption = Annotated[str | None, typer.Option("--server", metavar="URL", help=strings.SERVER)]
KeyOption = Annotated[
    str | None, typer.Option("--key", metavar="KEY", envvar="PALAVER_KEY", help=strings.SERVER_KEY, show_envvar=True)
]
LocalOption = Annotated[bool, typer.Option("--local", help=strings.LOCAL)]


@with_engine_flags(*ALL_ENGINE_FLAGS)
def chat(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    resume: ResumeOption = False,
    conversation: ConversationOption = None,
    system: SystemOption = None,
    think: ThinkOption = ThinkingOption.DEFAULT,
    set_: SetOption = None,
    plain: PlainOption = False,
    expand: ExpandOption = False,
    no_thinking: NoThinkingOption = False,
    flags: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
    transcriber: TranscriberOption = "",
    server: ServerOption = None,
    key: KeyOption = None,
    local: LocalOption = False,
    data: DataOption = None,
    database: DatabaseOption = None,
) -> None:
    """Talk with a model. What is said is kept; --resume goes on with it."""
    import asyncio
    from dataclasses import replace

    from palaver.chat.engine_choice import LoadOptions
    from palaver.client.http_chat import HttpChat
    from palaver.repl.session import run as run_session
    from palaver.repl.settings import SessionSettings, ThinkingDisplay
    from palaver.store.store import data_folder

    with report_errors():
        check_utf8({"--system": system, "--set": set_})
        name = single_model(model, model_option)
        exclusive(resume=resume, conversation=conversation)
        exclusive(expand=expand, no_thinking=no_thinking)
        for flag, value in {"model": name, **flags.given(), "transcriber": transcriber, "local": local}.items():
            exclusive(server=server, **{flag: value})
        parameters: dict[str, Any] = parse_settings(set_)
        if think.enabled is not None:
            parameters["thinking"] = think.enabled
        thinking_display = (
            ThinkingDisplay.EXPANDED if expand else ThinkingDisplay.HIDDEN if no_thinking else ThinkingDisplay.COLLAPSED
        )
        folder = data_folder(data)
        settings = SessionSettings(folder, conversation, resume, system, parameters, plain, thinking_display)
        options = flags.load_options()
        needs_engine = local or name is not None or options != LoadOptions() or bool(transcriber)

        async def run() -> bool:
            async with open_chat(
                server, key, needs_engine, name, options, folder, database, transcriber
            ) as chat_client:
                is_attached = isinstance(chat_client, HttpChat)
                return await run_session(chat_client, replace(settings, is_attached=is_attached))

        succeeded = asyncio.run(run())
    if not succeeded and not sys.stdin.isatty():
        raise typer.Exit(EXIT_FAILED)


@asynccontextmanager
async def open_chat(
    server: str | None,
    key: str | None,
    needs_engine: bool,
    name: str | None,
    options: LoadOptions,
    folder: Path,
    database: str | None,
    transcriber: str = "",
    note: str = strings.ATTACHED,
) -> AsyncIterator[Chat]:
    """The chat at the given server, at a running server of the same data folder, or with a local model.

    `note`: printed for a running server that was found.
    """
    from palaver.client.discovery import find_server
    from palaver.client.http_chat import HttpChat
    from palaver.client.proof import prove_server

    running = None if needs_engine else await find_server(folder, database or "")
    if running is not None and (server is None or (not key and running.url == server.rstrip("/"))):
        if server is None:
            print(f"palaver: {note.format(url=running.url)}", file=sys.stderr)
        prove = prove_server(folder, database or "", running.url)
        async with HttpChat(running.url, running.secret, verify=running.trust, prove=prove) as chat:
            yield chat
        return
    if server is not None:
        async with HttpChat(server, key or "") as chat:
            yield chat
        return
    async with _local_chat(name, options, folder, database, transcriber) as chat:
        yield chat


@asynccontextmanager
async def _local_chat(
    name: str | None, options: LoadOptions, folder: Path, database: str | None, transcriber: str
) -> AsyncIterator[Chat]:
    import asyncio
    from dataclasses import replace

    from palaver.chat.engine_choice import STATES
    from palaver.chat.service import Service
    from palaver.models.resolver import DEFAULT_MODEL
    from palaver.store import open_store
    from palaver.tools.config import FILE_NAME, read_servers
    from palaver.tools.toolbox import USERS_FOLDER, OperatorServers, Toolbox

    store = await asyncio.to_thread(open_store, folder, database, blobs=media_place())
    try:
        options = replace(options, states=folder / STATES)
        models = make_pool(options, folder, name or DEFAULT_MODEL)
        models.load(name or DEFAULT_MODEL)
        file = folder / FILE_NAME
        toolbox = Toolbox(OperatorServers(read_servers(file), file), folder / USERS_FOLDER)
        async with Service(store, models, transcriber=transcriber, toolbox=toolbox) as service:
            owner = await asyncio.to_thread(store.users.ensure)
            yield service.chat(owner.id, is_local=True)
    finally:
        await asyncio.to_thread(store.close)
