"""`palaver ask`: one question, one answer, nothing kept."""

from __future__ import annotations

import select
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaver.commands.options import (
    CompileOption,
    DeviceOption,
    ExactOption,
    ModelOption,
    NoThinkingOption,
    SetOption,
    SystemOption,
    TemplateOption,
    ThinkingOption,
    ThinkOption,
    parse_settings,
    report_errors,
)
from palaver.errors import BadParameter, EmptyMessage

if TYPE_CHECKING:
    from palaver.chat.model import Model
    from palaver.chat.model_loader import LoadOptions
    from palaver.chat.reply_stream import ReplyRecord, ReplyRequest


def ask(
    question: Annotated[str | None, typer.Argument(help="What to ask; from a pipe when left out.")] = None,
    model: ModelOption = None,
    system: SystemOption = None,
    think: ThinkOption = ThinkingOption.DEFAULT,
    set_: SetOption = None,
    template: TemplateOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="Complete the text as it is, without a chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole reply as JSON.")] = False,
    no_thinking: NoThinkingOption = False,
    device: DeviceOption = None,
    exact: ExactOption = False,
    compiled: CompileOption = None,
) -> None:
    """Ask one question: the answer goes to stdout, thinking to stderr."""
    import asyncio

    from palaver.chat.model_loader import LoadOptions
    from palaver.repl.plain import PlainPrinter, show_turn

    with report_errors():
        text, overrides = _question(question), parse_settings(set_)
        loading = LoadOptions(template, raw, device, exact=exact, compiled=compiled)

        async def session() -> ReplyRecord:
            async with _loaded(model, loading) as talker:
                silent = no_thinking or as_json
                printer = PlainPrinter(None if as_json else sys.stdout, None if silent else sys.stderr)
                return await show_turn(talker.utterance(_request(talker, text, system, think, overrides)), printer)

        reply = asyncio.run(session())
        if as_json:
            print(_as_json(reply))


@asynccontextmanager
async def _loaded(name: str | None, loading: LoadOptions) -> AsyncIterator[Model]:
    """In this process: a host would only make one question slower."""
    from palaver.chat.model_loader import build_model, load_model_format, missing_template_notices, resolve_source
    from palaver.engines.torch import EngineOptions, load
    from palaver.models.catalog import DEFAULT, resolve

    trained = resolve_source(name or DEFAULT)
    folder = resolve(trained.model)
    tokenizer, format = load_model_format(folder, loading, trained)
    for note in (*trained.notes, *(() if loading.template else missing_template_notices(trained))):
        print(note, file=sys.stderr)
    engine = load(
        folder,
        vocabulary=tokenizer.vocabulary,
        device=loading.device,
        dtype=loading.dtype,
        options=EngineOptions(exact=loading.exact, context=trained.context, compiled=loading.compiled),
        adapter=trained.adapter,
    )
    if engine.info.hint:
        print(engine.info.hint, file=sys.stderr)
    try:
        yield build_model(name or DEFAULT, engine, format, tokenizer)
    finally:
        await engine.close()


def _request(
    model: Model, text: str, system: str | None, think: ThinkingOption, overrides: dict[str, Any]
) -> ReplyRequest:
    from datetime import datetime

    from palaver.chat.model import draw_seed
    from palaver.chat.reply_stream import ReplyRequest
    from palaver.formats.base import RenderOptions
    from palaver.messages import system as system_message
    from palaver.messages import user
    from palaver.sampling import apply

    sampling = apply(model.engine.info.defaults, {"seed": draw_seed(), **overrides})
    before = (system_message(system),) if system else ()
    return ReplyRequest(
        (*before, user(text)), sampling, options=RenderOptions(thinking=think.wanted, now=datetime.now())
    )


def _question(question: str | None) -> str:
    """The argument, what comes through a pipe, or both."""
    piped = "" if sys.stdin is None or sys.stdin.isatty() else _piped(wait=question is None)
    text = "\n\n".join(part for part in (question, piped.rstrip("\n")) if part)
    if not text.strip():
        raise EmptyMessage
    return text


def _piped(wait: bool) -> str:
    """With a question given, a pipe that stays open and silent is not waited for."""
    if not wait and not _something_comes():
        print("palaver: nothing came through the pipe; only the question is asked.", file=sys.stderr)
        return ""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise BadParameter("the text from the pipe", "...", "must be UTF-8") from None


def _something_comes() -> bool:
    try:
        return bool(select.select([sys.stdin], [], [], 1.0)[0])
    except (OSError, ValueError):  # a stdin that is no file never blocks
        return True


def _as_json(reply: ReplyRecord) -> str:
    import json
    from dataclasses import asdict

    finished = reply.folded.finished
    message = reply.message
    whole = {
        "answer": message.text,
        "thinking": message.thinking or None,
        "tool_calls": [asdict(call) for call in message.tool_calls],
        "finish": reply.finish,
        "stop": finished.stop if finished else None,
        "usage": asdict(finished.usage) if finished else None,
        "seed": reply.request.sampling.seed,
        "token_ids": reply.token_ids,
        "notices": reply.folded.notices,
    }
    return json.dumps(whole, ensure_ascii=False)
