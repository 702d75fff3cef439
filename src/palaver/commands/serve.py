"""`palaver serve`: the web page, the API servers and the conversations."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaver.commands.options import (
    CacheOption,
    CompileOption,
    DatabaseOption,
    DataOption,
    DeviceOption,
    ExactOption,
    MaxRunningOption,
    ModelArgument,
    ModelOption,
    TemplateOption,
    ThinkingOption,
    ThinkOption,
    operator_settings,
    parse_size,
    report_errors,
    single_model,
)
from palaver.errors import BadParameter, PalaverError

if TYPE_CHECKING:
    from palaver.chat.model_loader import LoadOptions, ModelSlot
    from palaver.server.run import TLSCertificate
    from palaver.server.settings import ServerSettings
    from palaver.store import Store

Strings = list[str] | None


def serve(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    host: Annotated[
        str, typer.Option("--host", help="The address to listen on; elsewhere than here keys are needed.")
    ] = ("127.0.0.1"),
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="0 takes a free one.")] = 8080,
    make_key: Annotated[
        bool, typer.Option("--make-key", help="Make an administrator's key where there is none, and show it once.")
    ] = False,
    think: ThinkOption = ThinkingOption.DEFAULT,
    defaults: Annotated[
        Strings,
        typer.Option("--set", metavar="NAME=VALUE", help="A parameter for requests that name none; repeatable."),
    ] = None,
    forced: Annotated[
        Strings, typer.Option("--force", metavar="NAME=VALUE", help="One that no request can change; repeatable.")
    ] = None,
    alias: Annotated[Strings, typer.Option("--alias", metavar="NAME", help="Another name of the model.")] = None,
    allow_host: Annotated[
        Strings, typer.Option("--allow-host", metavar="NAME", help="Another name of this server; repeatable.")
    ] = None,
    allow_origin: Annotated[
        Strings, typer.Option("--allow-origin", metavar="URL", help="Pages from elsewhere that may call; repeatable.")
    ] = None,
    prefix: Annotated[str, typer.Option("--prefix", metavar="PATH", help="The path it has behind a proxy.")] = "",
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", metavar="FILE", help="A certificate, for TLS.")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Its private key.")] = None,
    max_body: Annotated[int, typer.Option("--max-body", metavar="MB", min=1, help="The largest request.")] = 32,
    rate: Annotated[
        int, typer.Option("--rate", metavar="N", min=0, help="Requests a minute of one key; 0 is no limit.")
    ] = 0,
    any_variables: Annotated[
        bool, typer.Option("--any-variables", help="Let requests set template variables that are no switches.")
    ] = False,
    any_model: Annotated[
        bool, typer.Option("--any-model", help="Let an administrator load models by their hub ids.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on with replies that a crash cut short.")
    ] = True,
    grace: Annotated[
        float, typer.Option("--grace", metavar="S", min=0, help="For how long running replies may finish at the end.")
    ] = 10.0,
    socket_grace: Annotated[
        float,
        typer.Option("--socket-grace", metavar="S", min=0, help="For how long a turn waits whose WebSocket was cut."),
    ] = 30.0,
    voice: Annotated[
        str, typer.Option("--voice", metavar="NAME", help="What speaks: espeak, or a text-to-speech model.")
    ] = "espeak",
    debug_log: Annotated[bool, typer.Option("--debug-log", help="Log what is said, too.")] = False,
    template: TemplateOption = None,
    device: DeviceOption = None,
    exact: ExactOption = False,
    compiled: CompileOption = None,
    cache_memory: CacheOption = None,
    max_running: MaxRunningOption = None,
    data: DataOption = None,
    database: DatabaseOption = None,
) -> None:
    """Serve a model: the OpenAI API under /v1, conversations under /api."""
    import asyncio

    from palaver.chat.model_loader import LoadOptions
    from palaver.server.run import log_to_stderr
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
            any_model=any_model,
            aliases=tuple(alias or ()),
            voice=voice,
            debug=debug_log,
        )
        cache_bytes = parse_size("--kv-cache-memory", cache_memory)
        options = LoadOptions(
            template, device=device, exact=exact, compiled=compiled, cache_bytes=cache_bytes, max_running=max_running
        )
        with open_store(data, database) as store:
            _ensure_keys(store, settings, make_key)
            certificate = _certificate(tls_cert, tls_key)
            name = single_model(model, model_option)
            log_to_stderr(debug_log)
            asyncio.run(_run(store, database or "", name, options, settings, certificate, grace, resume))


async def _run(
    store: Store,
    database: str,
    name: str | None,
    options: LoadOptions,
    settings: ServerSettings,
    certificate: TLSCertificate | None,
    grace: float,
    resume: bool,
) -> None:
    import asyncio
    import secrets
    from dataclasses import replace

    from palaver.chat.model_loader import ModelSlot, hosted_loader, model_checker
    from palaver.chat.service import Service
    from palaver.client.connection import leaf_certificate
    from palaver.client.discovery import announce_server, local_token
    from palaver.models.resolver import DEFAULT_MODEL, embedded_models
    from palaver.server.app import Server
    from palaver.server.run import UvicornServer, listen, run_server, server_url

    models = ModelSlot(hosted_loader(options), embedded_models(), model_checker(options))
    listener = listen(settings)
    url = server_url(settings, listener, certificate is not None)
    secret, login = local_token(store.folder), secrets.token_urlsafe(16)
    leaf = leaf_certificate(certificate.chain) if certificate is not None else ""
    with listener, announce_server(store.folder, url, secret, _without_password(database), leaf) as announced:
        async with Service(store, models, resume=resume) as service:
            models.load(name or DEFAULT_MODEL)
            settings = replace(settings, instance=announced.instance, secret=secret, login_code=login)
            server = Server(service, settings)
            print(f"palaver: {name or DEFAULT_MODEL} at {url} (OpenAI API: {url}/v1)", file=sys.stderr)
            if sys.stderr.isatty():  # the login link must not be logged
                print(f"palaver: the page with the right to change the model: {url}/?login={login}", file=sys.stderr)
            notices = asyncio.create_task(_show_notices(models))
            await run_server(UvicornServer(server, grace, certificate), listener, server)
            notices.cancel()


async def _show_notices(models: ModelSlot) -> None:
    """Prints the model's notices once it is loaded."""
    with suppress(PalaverError):
        for notice in (await models.ready()).notices:
            print(f"palaver: {notice}", file=sys.stderr)


def _ensure_keys(store: Store, settings: ServerSettings, make_key: bool) -> None:
    from palaver.server.auth import is_loopback

    if store.keys.any():
        return
    if is_loopback(settings.host):
        if settings.hosts:
            print(
                f"palaver: requests to {', '.join(settings.hosts)} need a key, and there is none: "
                "make one with `palaver keys add NAME`",
                file=sys.stderr,
            )
        return
    if not make_key:
        raise BadParameter(
            "--host",
            settings.host,
            "others can reach this address, so keys are needed: make one with `palaver keys add NAME --admin`, "
            "or start with --make-key",
        )
    _, text = store.keys.add(store.users.ensure().id, admin=True)
    print(f"palaver: a new administrator's key, shown only now:\n{text}", file=sys.stderr)


def _certificate(chain: Path | None, key: Path | None) -> TLSCertificate | None:
    from palaver.server.run import TLSCertificate

    for option, path in (("--tls-cert", chain), ("--tls-key", key)):
        if path is not None and not path.is_file():
            raise BadParameter(option, str(path), "there is no such file")
    if chain is None and key is not None:
        raise BadParameter("--tls-key", str(key), "needs --tls-cert")
    return TLSCertificate(chain, key) if chain is not None else None


def _check_prefix(prefix: str) -> str:
    path = prefix.rstrip("/")
    if path and not path.startswith("/"):
        raise BadParameter("--prefix", prefix, "must begin with a slash")
    return path


def _without_password(database: str) -> str:
    """The database URL without its password."""
    from sqlalchemy import make_url

    return make_url(database).render_as_string() if database else ""
