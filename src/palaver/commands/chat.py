"""`palaver chat`: a conversation at the terminal, with a model of this process or with a server's."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaver.commands.options import (
    FAILED,
    CacheOption,
    CompileOption,
    DatabaseOption,
    DataOption,
    DeviceOption,
    ExactOption,
    MaxRunningOption,
    ModelArgument,
    ModelOption,
    NoThinkingOption,
    SetOption,
    SystemOption,
    TemplateOption,
    ThinkingOption,
    ThinkOption,
    exclusive,
    parse_settings,
    parse_size,
    report_errors,
    single_model,
)

if TYPE_CHECKING:
    from palaver.chat.interface import Chat
    from palaver.chat.model_loader import LoadOptions

ResumeOption = Annotated[bool, typer.Option("--resume", "-r", help="Go on with the last conversation.")]
ConversationOption = Annotated[
    str | None, typer.Option("--conversation", "-c", metavar="ID", help="Open this conversation.")
]
PlainOption = Annotated[bool, typer.Option("--plain", help="Raw text, nothing redrawn.")]
ExpandOption = Annotated[bool, typer.Option("--expand", help="Show thoughts in full.")]
ServerOption = Annotated[
    str | None, typer.Option("--server", metavar="URL", help="Talk to a running server instead of loading a model.")
]
KeyOption = Annotated[
    str | None, typer.Option("--key", metavar="KEY", envvar="PALAVER_KEY", help="The server's key.", show_envvar=True)
]
LocalOption = Annotated[bool, typer.Option("--local", help="Load the model here, even if a server of yours runs.")]


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
    template: TemplateOption = None,
    device: DeviceOption = None,
    exact: ExactOption = False,
    compiled: CompileOption = None,
    cache_memory: CacheOption = None,
    max_running: MaxRunningOption = None,
    server: ServerOption = None,
    key: KeyOption = None,
    local: LocalOption = False,
    data: DataOption = None,
    database: DatabaseOption = None,
) -> None:
    """Talk with a model. What is said is kept; --resume goes on with it."""
    import asyncio

    from palaver.chat.model_loader import LoadOptions
    from palaver.repl.session import run
    from palaver.repl.settings import SessionSettings, ThinkingDisplay
    from palaver.store.store import data_folder

    with report_errors():
        name = single_model(model, model_option)
        exclusive(resume=resume, conversation=conversation)
        exclusive(expand=expand, no_thinking=no_thinking)
        own_models: dict[str, object] = {"model": name, "template": template, "device": device, "exact": exact}
        own_models |= {"compile": compiled, "no_compile": compiled is False}
        own_models |= {"kv_cache_memory": cache_memory, "max_num_seqs": max_running}
        for flag, value in {**own_models, "local": local}.items():
            exclusive(server=server, **{flag: value})
        parameters: dict[str, Any] = parse_settings(set_)
        if think.wanted is not None:
            parameters["thinking"] = think.wanted
        thoughts = (
            ThinkingDisplay.EXPANDED if expand else ThinkingDisplay.HIDDEN if no_thinking else ThinkingDisplay.COLLAPSED
        )
        folder = data_folder(data)
        wanted = SessionSettings(folder, conversation, resume, system, parameters, plain, thoughts)
        cache_bytes = parse_size("--kv-cache-memory", cache_memory)
        loading = LoadOptions(
            template, device=device, exact=exact, compiled=compiled, cache_bytes=cache_bytes, max_running=max_running
        )
        own = local or name is not None or loading != LoadOptions()

        async def session() -> bool:
            async with _held(server, key, own, name, loading, folder, database) as talk:
                return await run(talk, wanted)

        went_well = asyncio.run(session())
    if not went_well and not sys.stdin.isatty():
        raise typer.Exit(FAILED)


@asynccontextmanager
async def _held(
    server: str | None,
    key: str | None,
    own: bool,
    name: str | None,
    loading: LoadOptions,
    folder: Path,
    database: str | None,
) -> AsyncIterator[Chat]:
    """The conversations at a server that is named or found, or with a model in an engine host of this program."""
    from palaver.client import HttpChat, find_server

    if server is not None:
        async with HttpChat(server, key or "") as chat:
            yield chat
        return
    running = None if own else await find_server(folder, database or "")
    if running is not None:
        print(f"palaver: attached to your server at {running.url} (--local loads the model here)", file=sys.stderr)
        async with HttpChat(running.url, running.secret, verify=running.trust) as chat:
            yield chat
        return
    async with _served(name, loading, folder, database) as chat:
        yield chat


@asynccontextmanager
async def _served(name: str | None, loading: LoadOptions, folder: Path, database: str | None) -> AsyncIterator[Chat]:
    import asyncio

    from palaver.chat.model_loader import ModelSlot, hosted_loader
    from palaver.chat.service import Service
    from palaver.models.catalog import DEFAULT, embedded
    from palaver.store import open_store

    store = await asyncio.to_thread(open_store, folder, database)
    try:
        models = ModelSlot(hosted_loader(loading), embedded())
        models.load(name or DEFAULT)
        async with Service(store, models) as service:
            owner = await asyncio.to_thread(store.users.ensure)
            yield service.chat(owner.id)
    finally:
        await asyncio.to_thread(store.close)
