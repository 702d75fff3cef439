"""The composition root: flags to engine, format and front-end. Heavy imports happen inside the commands."""

from __future__ import annotations

import select
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaver import __version__
from palaver.commands.errors import FAILED, errors_told
from palaver.commands.formats import formats
from palaver.commands.inspect import inspect
from palaver.errors import BadParameter, EmptyMessage

if TYPE_CHECKING:
    from palaver.chat import Chat, Reply
    from palaver.formats.options import Options
    from palaver.messages import Message
    from palaver.sampling import Sampling

app = typer.Typer(
    name="palaver",
    help="Talk to open-weight language models on your own machine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


app.add_typer(formats, name="formats")
app.command()(inspect)


class Think(StrEnum):
    ON = "on"
    OFF = "off"
    DEFAULT = "default"


ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", metavar="MODEL", help="A folder, a hub id (owner/name), or sprout.")
]
SystemOption = Annotated[str | None, typer.Option("--system", "-s", metavar="TEXT", help="The system prompt.")]
ThinkOption = Annotated[Think, typer.Option("--think", help="Whether the model thinks before it answers.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A sampling parameter; may be repeated.")
]
TemplateOption = Annotated[
    Path | None, typer.Option("--template", metavar="FILE", help="A chat template to use instead of the model's.")
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 or mps; the best one by default.")
]
ExactOption = Annotated[
    bool, typer.Option("--exact", help="Replies do not depend on what else the engine does, to the last bit.")
]
NoThinkingOption = Annotated[bool, typer.Option("--no-thinking", help="Do not show what the model thinks.")]


def main() -> None:
    app()


def _version(wanted: bool) -> None:
    if wanted:
        print(f"palaver {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")] = False,
) -> None:
    pass


@app.command()
def ask(
    question: Annotated[str | None, typer.Argument(help="What to ask; from a pipe when left out.")] = None,
    model: ModelOption = None,
    system: SystemOption = None,
    think: ThinkOption = Think.DEFAULT,
    settings: SetOption = None,
    template: TemplateOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="Complete the text as it is, without a chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole reply as JSON.")] = False,
    no_thinking: NoThinkingOption = False,
    device: DeviceOption = None,
    exact: ExactOption = False,
) -> None:
    """Ask one question: the answer goes to stdout, thinking to stderr."""
    import asyncio

    from palaver.chat import Request
    from palaver.messages import user
    from palaver.repl.plain import PlainPrinter, show_turn

    with errors_told():
        text, overrides = _question(question), _settings(settings)

        async def session() -> Reply:
            async with _loaded(model, template, raw, device, exact) as talk:
                request = Request((*_system(system), user(text)), _sampling(talk, overrides), options=_options(think))
                silent = no_thinking or as_json
                printer = PlainPrinter(None if as_json else sys.stdout, None if silent else sys.stderr)
                return await show_turn(talk.turn(request), printer)

        reply = asyncio.run(session())
        if as_json:
            print(_as_json(reply))


@app.command()
def chat(
    model: Annotated[str | None, typer.Argument(help="A folder, a hub id (owner/name), or sprout.")] = None,
    model_option: ModelOption = None,
    system: SystemOption = None,
    think: ThinkOption = Think.DEFAULT,
    settings: SetOption = None,
    template: TemplateOption = None,
    no_thinking: NoThinkingOption = False,
    device: DeviceOption = None,
    exact: ExactOption = False,
) -> None:
    """Talk with a model, a line a turn."""
    import asyncio

    from palaver.repl.conversation import Conversation, LineChat, piped_lines, typed_lines
    from palaver.repl.plain import PlainPrinter

    with errors_told():
        if model and model_option and model != model_option:
            raise BadParameter("--model", model_option, f"the model is already given as {model!r}")
        overrides = _settings(settings)
        typed = sys.stdin.isatty()

        async def session() -> bool:
            async with _loaded(model or model_option, template, False, device, exact) as talk:
                sampling = _sampling(talk, overrides)
                conversation = Conversation(talk, sampling, _options(think), _system(system), "seed" in overrides)
                if typed:
                    print(_banner(talk), file=sys.stderr)
                lines = typed_lines() if typed else piped_lines(sys.stdin)
                printer = PlainPrinter(sys.stdout, None if no_thinking else sys.stderr)
                return await LineChat(conversation, lines, printer, sys.stderr).run()

        went_well = asyncio.run(session())
    if not went_well and not typed:
        raise typer.Exit(FAILED)


@asynccontextmanager
async def _loaded(
    model: str | None, template: Path | None, raw: bool, device: str | None, exact: bool
) -> AsyncIterator[Chat]:
    from palaver.chat import Chat
    from palaver.engines.torch import Options, load
    from palaver.formats.loading import load_completion, load_format
    from palaver.formats.tokenizer import load_tokenizer
    from palaver.models.catalog import DEFAULT, resolve

    if template is not None and not template.is_file():
        raise BadParameter("--template", str(template), "there is no such file")
    folder = resolve(model or DEFAULT)
    tokenizer = load_tokenizer(folder)
    format = load_completion(folder, tokenizer) if raw else load_format(folder, tokenizer, template)
    engine = load(folder, vocabulary=tokenizer.vocabulary, device=device, options=Options(exact=exact))
    try:
        yield Chat(engine, format)
    finally:
        await engine.close()


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


def _settings(settings: list[str] | None) -> dict[str, Any]:
    from palaver.sampling import STRINGS, checked_strings, parse_setting

    out: dict[str, Any] = {}
    for setting in settings or ():
        name, equals, text = setting.partition("=")
        if not equals:
            raise BadParameter("--set", setting, "must be written name=value")
        name, value = parse_setting(name.strip(), text)
        out[name] = checked_strings(name, (*out.get(name, ()), *value)) if name in STRINGS else value
    return out


def _sampling(chat: Chat, overrides: dict[str, Any]) -> Sampling:
    from palaver.chat import draw_seed
    from palaver.sampling import apply

    return apply(chat.engine.info.defaults, {"seed": draw_seed(), **overrides})


def _options(think: Think) -> Options:
    from datetime import datetime

    from palaver.formats.options import Options

    return Options(thinking=None if think is Think.DEFAULT else think is Think.ON, now=datetime.now())


def _system(text: str | None) -> tuple[Message, ...]:
    from palaver.messages import system

    return (system(text),) if text else ()


def _banner(chat: Chat) -> str:
    info = chat.engine.info
    return f"{Path(info.model).name} · context {info.context_length} · {info.device} {info.dtype} · /help"


def _as_json(reply: Reply) -> str:
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
