"""`palaver ask`: one question, one answer, nothing stored."""

from __future__ import annotations

import select
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaver.commands import strings
from palaver.commands.options import (
    ALL_ENGINE_FLAGS,
    EngineFlags,
    ModelOption,
    NoThinkingOption,
    SetOption,
    SystemOption,
    ThinkingOption,
    ThinkOption,
    parse_settings,
    report_errors,
    with_engine_flags,
)
from palaver.errors import EmptyMessage, RequestError

if TYPE_CHECKING:
    from palaver.chat.engine_spec import LoadOptions
    from palaver.chat.model import Model
    from palaver.chat.reply_stream import ReplyRecord, ReplyRequest
    from palaver.engines.base import Engine
    from palaver.engines.host.process import ChildProcess
    from palaver.formats.tokenizer import FastTokenizer
    from palaver.messages import ToolCall
    from palaver.models.resolver import ResolvedModel


@with_engine_flags(*(flag for flag in ALL_ENGINE_FLAGS if flag not in ("cache_memory", "max_running", "mmproj")))
def ask(
    question: Annotated[str | None, typer.Argument(help=strings.QUESTION)] = None,
    model: ModelOption = None,
    system: SystemOption = None,
    think: ThinkOption = ThinkingOption.DEFAULT,
    set_: SetOption = None,
    raw: Annotated[bool, typer.Option("--raw", help=strings.RAW)] = False,
    as_json: Annotated[bool, typer.Option("--json", help=strings.AS_JSON)] = False,
    no_thinking: NoThinkingOption = False,
    flags: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
) -> None:
    """Ask one question: the answer goes to stdout, thinking to stderr."""
    from palaver.chat.engine_spec import LLAMACPP, check_engine_options
    from palaver.engines.host.process import ChildProcess
    from palaver.models.resolver import DEFAULT_MODEL, resolve_model

    with report_errors():
        text, overrides = _read_question(question), parse_settings(set_)
        options = flags.load_options(raw)

        resolved = replace(resolve_model(model or DEFAULT_MODEL), mmproj=None)  # a question is text
        hosted = check_engine_options(resolved, options) == LLAMACPP
        with ChildProcess(resolved.gguf) if hosted else nullcontext() as child:  # it starts to load while we import
            import asyncio

            async def run() -> ReplyRecord:
                async with _load_model(model or DEFAULT_MODEL, resolved, options, child) as loaded:
                    from palaver.repl.plain import PlainPrinter, print_reply

                    silent = no_thinking or as_json
                    printer = PlainPrinter(None if as_json else sys.stdout, None if silent else sys.stderr)
                    request = _request(loaded, text, system, think, overrides)
                    return await print_reply(loaded.stream_reply(request), printer)

            reply = asyncio.run(run())
        if as_json:
            print(_to_json(reply))


FILL_MODEL = "sprout-diffusion"


@with_engine_flags("device", "engine", "adapter", "approximate_cache")
def fill(
    text: Annotated[str, typer.Argument(help=strings.FILL_TEXT)],
    model: ModelOption = None,
    set_: SetOption = None,
    flags: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
) -> None:
    """Fill the masks of a text with a diffusion model."""
    import asyncio

    from palaver.models.resolver import resolve_model

    with report_errors():
        name, options, overrides = model or FILL_MODEL, flags.load_options(False), parse_settings(set_)

        async def run() -> str:
            async with _load_model(name, resolve_model(name), options, None) as loaded:
                from palaver.chat.model import draw_seed
                from palaver.sampling import apply_settings

                sampling = apply_settings(loaded.engine.info.defaults, {"seed": draw_seed(), **overrides})
                before, stream = loaded.fill_text(text, sampling)
                async with stream:
                    async for _ in stream:
                        pass
                return before + stream.reply().message.text

        print(asyncio.run(run()))


@asynccontextmanager
async def _load_model(
    name: str, resolved: ResolvedModel, options: LoadOptions, child: ChildProcess | None
) -> AsyncIterator[Model]:
    from palaver.memory import no_collections

    with no_collections():
        from palaver.chat.model import build_model, load_model_format

        tokenizer, format = load_model_format(resolved, options)
    for note in resolved.notes:
        print(note, file=sys.stderr)
    engine = await load_engine(resolved, tokenizer, options, child)
    if engine.info.hint:
        print(engine.info.hint, file=sys.stderr)
    try:
        yield build_model(name, engine, format, tokenizer)
    finally:
        await engine.close()


async def load_engine(
    model: ResolvedModel, tokenizer: FastTokenizer, options: LoadOptions, child: ChildProcess | None = None
) -> Engine:
    """In this process, since an engine host would only slow down a single question; llama.cpp always in a host.

    `child` is a process for the host that was started ahead.
    """
    from palaver.chat.engine_spec import DIFFUSION, HOSTED, MLX, check_engine_options, make_spec
    from palaver.memory import no_collections

    engine = check_engine_options(model, options)
    vocabulary, device, dtype = tokenizer.vocabulary, options.device, options.dtype
    if engine in HOSTED:
        from palaver.engines.host.supervisor import HostedEngine

        hosted = HostedEngine(make_spec(model, vocabulary, replace(options, max_running=1)), child=child)
        await hosted.start()
        return hosted
    with no_collections():
        from palaver.engines.core.options import EngineOptions
        from palaver.engines.loader import load_engine as load_folder

    here = EngineOptions(
        exact=options.exact,
        context=model.context_length,
        compiled=options.compiled,
        approximate_cache=options.approximate_cache,
    )
    if engine == MLX:
        from palaver.engines.mlx.engine import load as load_mlx

        return load_mlx(model.folder, vocabulary=vocabulary, device=device, dtype=dtype, options=here)
    common: dict[str, Any] = {
        "vocabulary": vocabulary,
        "device": device,
        "dtype": dtype,
        "options": here,
        "adapter": options.adapter or model.adapter,
        "quantize_bits": model.quantize_bits,
    }
    if engine == DIFFUSION:
        from palaver.engines.diffusion.engine import load as load_diffusion

        return load_diffusion(model.folder, trained=model.diffusion, **common)
    return load_folder(model.folder, **common)


def _request(
    model: Model, text: str, system: str | None, think: ThinkingOption, overrides: dict[str, Any]
) -> ReplyRequest:
    from datetime import datetime

    from palaver.chat.model import draw_seed
    from palaver.chat.reply_stream import ReplyRequest
    from palaver.formats.base import RenderOptions
    from palaver.messages import system as system_message
    from palaver.messages import user
    from palaver.sampling import apply_settings

    sampling = apply_settings(model.engine.info.defaults, {"seed": draw_seed(), **overrides})
    system_messages = (system_message(system),) if system else ()
    return ReplyRequest(
        (*system_messages, user(text)), sampling, options=RenderOptions(thinking=think.enabled, now=datetime.now())
    )


def _read_question(question: str | None) -> str:
    """The question from the argument, from the pipe, or both joined."""
    piped = "" if sys.stdin is None or sys.stdin.isatty() else _read_pipe(wait=question is None)
    text = "\n\n".join(part for part in (question, piped.rstrip("\n")) if part)
    if not text.strip():
        raise EmptyMessage
    return text


def _read_pipe(wait: bool) -> str:
    """The text from the pipe. If `wait` is False, an open pipe without data is ignored after a second."""
    if not wait and not _has_input():
        print(f"palaver: {strings.NOTHING_PIPED}", file=sys.stderr)
        return ""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise RequestError(strings.PIPE_NOT_UTF8) from None


def _has_input() -> bool:
    try:
        return bool(select.select([sys.stdin], [], [], 1.0)[0])
    except (OSError, ValueError):  # a stdin that is not a file never blocks
        return True


def _call_fields(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "name": call.name, "arguments": call.arguments, "in_thought": call.in_thought}


def _to_json(reply: ReplyRecord) -> str:
    import json
    from dataclasses import asdict

    finished = reply.folded.finished
    message = reply.message
    fields = {
        "answer": message.text,
        "thinking": message.thinking or None,
        "tool_calls": [_call_fields(call) for call in message.tool_calls],
        "finish": reply.finish,
        "stop": finished.stop if finished else None,
        "usage": asdict(finished.usage) if finished else None,
        "seed": reply.request.sampling.seed,
        "token_ids": reply.token_ids,
        "notices": reply.folded.notices,
    }
    return json.dumps(fields, ensure_ascii=False)
