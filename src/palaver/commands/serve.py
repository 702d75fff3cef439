"""`palaver serve`: the web page, the API servers and the conversations."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaver.commands import strings
from palaver.commands.options import (
    ALL_ENGINE_FLAGS,
    DatabaseOption,
    DataOption,
    EngineFlags,
    ModelArgument,
    ModelOption,
    ThinkingOption,
    ThinkOption,
    TranscriberOption,
    make_pool,
    media_place,
    operator_settings,
    parse_duration,
    parse_size,
    report_errors,
    single_model,
    with_engine_flags,
)
from palaver.errors import BadParameter, PalaverError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from palaver.chat.model_pool import ModelPool
    from palaver.server.app import TLSCertificate
    from palaver.server.settings import ServerSettings
    from palaver.store import Store
    from palaver.tools.toolbox import Toolbox

Strings = list[str] | None


@with_engine_flags(*ALL_ENGINE_FLAGS)
def serve(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    host: Annotated[str, typer.Option("--host", help=strings.HOST)] = ("127.0.0.1"),
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help=strings.PORT)] = 8080,
    make_key: Annotated[bool, typer.Option("--make-key", help=strings.MAKE_KEY)] = False,
    think: ThinkOption = ThinkingOption.DEFAULT,
    defaults: Annotated[
        Strings,
        typer.Option("--set", metavar="NAME=VALUE", help=strings.DEFAULTS),
    ] = None,
    forced: Annotated[Strings, typer.Option("--force", metavar="NAME=VALUE", help=strings.FORCED)] = None,
    alias: Annotated[Strings, typer.Option("--alias", metavar="NAME", help=strings.ALIAS)] = None,
    memory: Annotated[str | None, typer.Option("--memory", metavar="SIZE", help=strings.MEMORY)] = None,
    keep_alive: Annotated[str | None, typer.Option("--keep-alive", metavar="TIME", help=strings.KEEP_ALIVE)] = None,
    preload: Annotated[Strings, typer.Option("--preload", metavar="MODEL", help=strings.PRELOAD)] = None,
    allow_host: Annotated[Strings, typer.Option("--allow-host", metavar="NAME", help=strings.ALLOW_HOST)] = None,
    allow_origin: Annotated[Strings, typer.Option("--allow-origin", metavar="URL", help=strings.ALLOW_ORIGIN)] = None,
    prefix: Annotated[str, typer.Option("--prefix", metavar="PATH", help=strings.PREFIX)] = "",
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", metavar="FILE", help=strings.TLS_CERT)] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help=strings.TLS_KEY)] = None,
    max_body: Annotated[int, typer.Option("--max-body", metavar="MB", min=1, help=strings.MAX_BODY)] = 32,
    rate: Annotated[int, typer.Option("--rate", metavar="N", min=0, help=strings.RATE)] = 0,
    remote_media: Annotated[bool, typer.Option("--remote-media", help=strings.REMOTE_MEDIA)] = False,
    share: Annotated[bool, typer.Option("--share", help=strings.SHARE)] = False,
    tools: Annotated[Path | None, typer.Option("--tools", metavar="FILE", help=strings.SERVE_TOOLS)] = None,
    any_variables: Annotated[bool, typer.Option("--any-variables", help=strings.ANY_VARIABLES)] = False,
    any_model: Annotated[bool, typer.Option("--any-model", help=strings.ANY_MODEL)] = False,
    titles: Annotated[bool, typer.Option("--titles/--no-titles", help=strings.TITLES)] = True,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help=strings.RESUME_REPLIES)] = True,
    grace: Annotated[float, typer.Option("--grace", metavar="S", min=0, help=strings.GRACE)] = 10.0,
    socket_grace: Annotated[
        float,
        typer.Option("--socket-grace", metavar="S", min=0, help=strings.SOCKET_GRACE),
    ] = 30.0,
    voice: Annotated[str, typer.Option("--voice", metavar="NAME", help=strings.VOICE)] = "espeak",
    transcriber: TranscriberOption = "",
    debug_log: Annotated[bool, typer.Option("--debug-log", help=strings.DEBUG_LOG)] = False,
    flags: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
    data: DataOption = None,
    database: DatabaseOption = None,
) -> None:
    """Serve a model: the OpenAI API under /v1, conversations under /api."""
    import asyncio
    from dataclasses import replace

    from palaver.chat.engine_choice import STATES
    from palaver.memory import return_large_blocks
    from palaver.models.resolver import DEFAULT_MODEL
    from palaver.server.app import log_to_stderr
    from palaver.server.settings import ServerLimits, ServerSettings
    from palaver.store import open_store

    with report_errors():
        thinking_default: dict[str, Any] = {} if think.enabled is None else {"thinking": think.enabled}
        settings = ServerSettings(
            host=host,
            port=port,
            prefix=_check_prefix(prefix),
            hosts=tuple(allow_host or ()),
            origins=tuple(allow_origin or ()),
            limits=ServerLimits(body_bytes=max_body << 20, requests_per_minute=rate, socket_grace_seconds=socket_grace),
            defaults={**thinking_default, **operator_settings(defaults)},
            forced=operator_settings(forced),
            any_variables=any_variables,
            remote_media=remote_media,
            any_model=any_model,
            aliases=tuple(name for name in alias or () if "=" not in name),
            voice=voice,
            share=share,
            debug=debug_log,
        )
        options = flags.load_options()
        with open_store(data, database, blobs=media_place()) as store:
            _ensure_keys(store, settings, make_key)
            certificate = _certificate(tls_cert, tls_key)
            name = single_model(model, model_option)
            log_to_stderr(debug_log)
            return_large_blocks()
            toolbox = _toolbox(store, tools)
            models = make_pool(
                replace(options, states=store.folder / STATES),
                store.folder,
                name or DEFAULT_MODEL,
                preload=preload or (),
                aliases=_named_aliases(alias or ()),
                memory=parse_size("--memory", memory),
                keep_alive=parse_duration("--keep-alive", keep_alive),
            )
            serving = _run(
                store, database or "", name, models, preload or (), settings, certificate, grace, resume, transcriber,
                toolbox, titles,
            )  # fmt: skip
            asyncio.run(serving)


async def _run(
    store: Store,
    database: str,
    name: str | None,
    models: ModelPool,
    preload: Sequence[str],
    settings: ServerSettings,
    certificate: TLSCertificate | None,
    grace: float,
    resume: bool,
    transcriber: str,
    toolbox: Toolbox,
    titles: bool,
) -> None:
    import asyncio
    import secrets
    from dataclasses import replace

    from palaver.chat.service import Service
    from palaver.client.discovery import announce_server, leaf_certificate, local_token
    from palaver.models.resolver import DEFAULT_MODEL
    from palaver.server.app import Server, UvicornServer, listen, run_server, server_url

    listener = listen(settings)
    url = server_url(settings, listener, certificate is not None)
    secret, login = local_token(store.folder), secrets.token_urlsafe(16)
    leaf = leaf_certificate(certificate.chain) if certificate is not None else ""
    with listener, announce_server(store.folder, url, secret, _without_password(database), leaf) as announced:
        service = Service(store, models, resume=resume, transcriber=transcriber, toolbox=toolbox, titles=titles)
        async with service:
            models.load(name or DEFAULT_MODEL)
            settings = replace(settings, instance=announced.instance, secret=secret, login_code=login)
            server = Server(service, settings)
            print(f"palaver: {strings.SERVING.format(model=name or DEFAULT_MODEL, url=url)}", file=sys.stderr)
            if sys.stderr.isatty():  # the login link must not be logged
                link = f"{url}/?login={login}"
                print(f"palaver: {strings.LOGIN_LINK.format(url=link)}", file=sys.stderr)
            notices = asyncio.create_task(_show_notices(models, preload))
            await run_server(UvicornServer(server, grace, certificate), listener, server)
            notices.cancel()


async def _show_notices(models: ModelPool, preload: Sequence[str]) -> None:
    """Loads the further models once the first is loaded, and prints the notices of each."""
    with suppress(PalaverError):
        for notice in (await models.ready()).notices:
            print(f"palaver: {notice}", file=sys.stderr)
        for name in preload:
            try:
                await models.preload(name)
            except PalaverError as error:
                print(f"palaver: {error}", file=sys.stderr)


def _named_aliases(texts: Sequence[str]) -> dict[str, str]:
    pairs = (text.partition("=") for text in texts if "=" in text)
    return {name.strip(): target.strip() for name, _, target in pairs}


def _toolbox(store: Store, file: Path | None) -> Toolbox:
    """The servers of the operator's file are for all users; those of the data folder are for the local user alone."""
    from palaver.tools.config import FILE_NAME, read_servers
    from palaver.tools.toolbox import USERS_FOLDER, OperatorServers, Toolbox

    if file is not None and not file.is_file():
        raise BadParameter("--tools", str(file), strings.NO_FILE)
    if file is not None:
        operator = OperatorServers(read_servers(file))
    else:
        operator = OperatorServers(read_servers(store.folder / FILE_NAME), only_for=store.users.ensure().id)
    return Toolbox(operator, store.folder / USERS_FOLDER)


def _ensure_keys(store: Store, settings: ServerSettings, make_key: bool) -> None:
    from palaver.server.auth import is_loopback

    if store.keys.any():
        return
    if is_loopback(settings.host):
        if settings.hosts:
            print(f"palaver: {strings.KEYS_NEEDED.format(hosts=', '.join(settings.hosts))}", file=sys.stderr)
        return
    if not make_key:
        raise BadParameter("--host", settings.host, strings.HOST_NEEDS_KEYS)
    _, text = store.keys.add(store.users.ensure().id, admin=True)
    print(f"palaver: {strings.NEW_ADMIN_KEY.format(key=text)}", file=sys.stderr)


def _certificate(chain: Path | None, key: Path | None) -> TLSCertificate | None:
    from palaver.server.app import TLSCertificate

    for option, path in (("--tls-cert", chain), ("--tls-key", key)):
        if path is not None and not path.is_file():
            raise BadParameter(option, str(path), strings.NO_FILE)
    if chain is None and key is not None:
        raise BadParameter("--tls-key", str(key), strings.NEEDS_CERT)
    return TLSCertificate(chain, key) if chain is not None else None


def _check_prefix(prefix: str) -> str:
    path = prefix.rstrip("/")
    if path and not path.startswith("/"):
        raise BadParameter("--prefix", prefix, strings.PREFIX_SLASH)
    return path


def _without_password(database: str) -> str:
    """The database URL without its password."""
    from sqlalchemy import make_url

    return make_url(database).render_as_string() if database else ""
