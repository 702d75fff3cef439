"""`palaver ask`: one question, one answer; stored only with --store and --continue."""

from __future__ import annotations

import re
import select
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from palaver.commands import strings
from palaver.commands.chat import KeyOption, ServerOption
from palaver.commands.options import (
    ALL_ENGINE_FLAGS,
    DatabaseOption,
    DataOption,
    EngineFlags,
    ModelOption,
    NoThinkingOption,
    SetOption,
    SystemOption,
    ThinkingOption,
    ThinkOption,
    check_utf8,
    data_path,
    exclusive,
    has_announcement,
    parse_settings,
    read_stdin,
    report_errors,
    with_engine_flags,
)
from palaver.commands.prompts import fill_prompt, parse_variables, read_prompt
from palaver.errors import BadParameter, EmptyMessage, PalaverError, RequestError
from palaver.repl import strings as repl_strings

if TYPE_CHECKING:
    from palaver.chat.engine_choice import LoadOptions
    from palaver.chat.interface import Chat
    from palaver.chat.model import Model
    from palaver.chat.reply_stream import ReplyRequest
    from palaver.client.completions import CompletionClient
    from palaver.engines.base import Engine
    from palaver.engines.host.process import ChildProcess
    from palaver.events import Folded
    from palaver.formats.tokenizer import FastTokenizer
    from palaver.messages import Part, ToolCall
    from palaver.models.resolver import ResolvedModel

_CODE_BLOCK = re.compile(r"^(`{3,}|~{3,})[^\n]*\n(.*?)^\1", re.MULTILINE | re.DOTALL)
_MAX_ATTACHMENT_BYTES = 128 << 20
_API_NAMES = {"stop_ids": "stop_token_ids", "banned_ids": "banned_token_ids"}


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    files: tuple[tuple[str, bytes], ...]
    """The names and the contents of attached files."""
    system: str | None
    thinking: bool | None
    settings: dict[str, Any]
    schema: str | None
    """The JSON schema that the answer follows."""


@dataclass(frozen=True, slots=True)
class Output:
    """Where a reply is written while it comes. None discards it."""

    answer: TextIO | None
    thinking: TextIO | None

    def write(self, stream: TextIO | None, text: str) -> None:
        from palaver.repl.text import sanitize

        if stream is not None and text:
            stream.write(sanitize(text) if stream.isatty() else text)
            stream.flush()


Answer = dict[str, Any]
"""A reply with the fields of --json."""


@with_engine_flags(
    *(flag for flag in ALL_ENGINE_FLAGS if flag not in ("cache_memory", "max_running", "mmproj", "draft_model"))
)
def ask(
    question: Annotated[str | None, typer.Argument(help=strings.QUESTION)] = None,
    model: ModelOption = None,
    system: SystemOption = None,
    attach: Annotated[list[Path] | None, typer.Option("--attach", "-a", metavar="FILE", help=strings.ATTACH)] = None,
    continue_: Annotated[bool, typer.Option("--continue", "-c", help=strings.CONTINUE)] = False,
    store: Annotated[bool, typer.Option("--store", help=strings.STORE)] = False,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="NAME", help=strings.PROMPT)] = None,
    var: Annotated[list[str] | None, typer.Option("--var", metavar="NAME=VALUE", help=strings.VAR)] = None,
    schema: Annotated[str | None, typer.Option("--schema", metavar="FILE|JSON", help=strings.SCHEMA)] = None,
    extract: Annotated[bool, typer.Option("--extract", "-x", help=strings.EXTRACT)] = False,
    extract_last: Annotated[bool, typer.Option("--extract-last", help=strings.EXTRACT_LAST)] = False,
    think: ThinkOption = ThinkingOption.DEFAULT,
    set_: SetOption = None,
    raw: Annotated[bool, typer.Option("--raw", help=strings.RAW)] = False,
    as_json: Annotated[bool, typer.Option("--json", help=strings.AS_JSON)] = False,
    no_thinking: NoThinkingOption = False,
    flags: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
    server: ServerOption = None,
    no_server: Annotated[bool, typer.Option("--no-server", help=strings.NO_SERVER)] = False,
    key: KeyOption = None,
    data: DataOption = None,
    database: DatabaseOption = None,
) -> None:
    """Ask one question: the answer goes to stdout, thinking to stderr."""
    with report_errors():
        _check_flags(server, no_server, raw, store or continue_, flags)
        exclusive(json=as_json, extract=extract, extract_last=extract_last)
        check_utf8({"QUESTION": question, "--system": system, "--var": var, "--set": set_})
        folder = data_path(data)
        text = _read_text(question, folder, prompt, parse_variables(var))
        files = tuple(map(_read_attachment, attach or ()))
        asked = Question(text, files, system, think.enabled, parse_settings(set_), _read_schema(schema))
        is_whole = as_json or extract or extract_last
        output = Output(None if is_whole else sys.stdout, None if no_thinking or as_json else sys.stderr)
        options = flags.load_options(raw)

        answer: Answer | None = None
        if store or continue_:
            answer = _ask_stored(asked, output, model, options, folder, database, server, key, no_server, continue_)
        elif server is not None or not (no_server or raw or _needs_engine(options)):
            answer = _ask_server(asked, output, model, folder, database, server, key)
        if answer is None:
            answer = _ask_here(asked, output, model, options)
        if as_json:
            import json

            print(json.dumps(answer, ensure_ascii=False))
        elif extract or extract_last:
            print(_extract_code(answer["answer"], extract_last))


def _check_flags(server: str | None, no_server: bool, raw: bool, is_stored: bool, flags: EngineFlags) -> None:
    for name, value in {**flags.given(), "raw": raw, "no_server": no_server}.items():
        exclusive(server=server, **{name: value})
    if is_stored and raw:
        exclusive(store=True, raw=True)


def _needs_engine(options: LoadOptions) -> bool:
    from palaver.chat.engine_choice import LoadOptions

    return options != LoadOptions()


def _ask_here(question: Question, output: Output, model: str | None, options: LoadOptions) -> Answer:
    """With a model in this process."""
    from palaver.chat.engine_choice import LLAMACPP, check_engine_options
    from palaver.engines.host.process import ChildProcess
    from palaver.memory import no_collections
    from palaver.models.resolver import DEFAULT_MODEL, resolve_model

    resolved = resolve_model(model or DEFAULT_MODEL)
    if not question.files:
        resolved = replace(resolved, mmproj=None)  # text alone needs no projector
    hosted = check_engine_options(resolved, options) == LLAMACPP
    with ChildProcess(resolved.gguf) if hosted else nullcontext() as child:  # it starts to load while we import
        import asyncio

        async def run() -> Answer:
            async with AsyncExitStack() as stack:
                with no_collections():  # a tenth of the time to the first token
                    loading = _load_model(model or DEFAULT_MODEL, resolved, options, child)
                    loaded = await stack.enter_async_context(loading)
                    from palaver.repl.plain import PlainPrinter, print_reply

                printer = PlainPrinter(output.answer, output.thinking)
                request = _request(loaded, question, await _read_parts(loaded, question))
                rendered = await asyncio.to_thread(loaded.prompt, request) if question.files else None
                reply = await print_reply(loaded.stream_reply(request, prompt=rendered), printer)
                return _fields(reply.folded, reply.request.sampling.seed, reply.token_ids)

        return asyncio.run(run())


def _ask_server(
    question: Question,
    output: Output,
    model: str | None,
    folder: Path,
    database: str | None,
    server: str | None,
    key: str | None,
) -> Answer | None:
    """With a server: the named one, or one of this data folder that has the model. None if there is no such one."""
    if server is None and not has_announcement(folder):
        return None
    import asyncio

    from palaver.client.completions import CompletionClient
    from palaver.client.discovery import find_server
    from palaver.client.proof import prove_server

    async def run() -> Answer | None:
        running = await find_server(folder, database or "")
        own = running if running is not None and server in (None, running.url, f"{running.url}/") else None
        if own is None and server is None:
            return None
        if own is None:
            client = CompletionClient(str(server), key or "")
        else:
            prove = prove_server(folder, database or "", own.url)
            client = CompletionClient(own.url, key or own.secret, verify=own.trust, prove=prove)
        async with client:
            if server is None and model is not None and model not in await client.models():
                return None
            return await _stream_completion(client, question, output, model)

    return asyncio.run(run())


async def _stream_completion(client: CompletionClient, question: Question, output: Output, model: str | None) -> Answer:
    """Prints the chunks as they come. Ctrl+C ends the reply and keeps what was written."""
    import asyncio
    from contextlib import aclosing

    request = _completion_request(question, model)
    answer: Answer = {"answer": "", "thinking": None, "tool_calls": [], "finish": "stopped", "stop": None}
    answer |= {"usage": None, "seed": request["seed"], "token_ids": [], "notices": []}

    async def read() -> None:
        async with aclosing(client.stream(request)) as chunks:
            async for chunk in chunks:
                _add_chunk(answer, chunk, output)

    from palaver.repl.signals import handle_interrupt

    reading = asyncio.ensure_future(read())
    with handle_interrupt(reading.cancel):
        try:
            await reading
        except asyncio.CancelledError:
            if not reading.cancelled():
                raise
    output.write(output.answer, "\n")
    if note := {"length": repl_strings.CUT_PLAIN, "stopped": repl_strings.STOPPED_PLAIN}.get(answer["finish"]):
        output.write(output.thinking, f"[{note}]\n")
    return answer


def _completion_request(question: Question, model: str | None) -> dict[str, Any]:
    import base64
    import json
    import secrets

    content: list[dict[str, Any]] = [
        {"type": "file", "file": {"filename": name, "file_data": base64.b64encode(data).decode()}}
        for name, data in question.files
    ]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": question.text}]}]
    if question.system:
        messages.insert(0, {"role": "system", "content": question.system})
    request: dict[str, Any] = {"messages": messages, "return_token_ids": True, "seed": secrets.randbelow(2**32)}
    request |= {_API_NAMES.get(name, name): value for name, value in question.settings.items()}
    if model is not None:
        request["model"] = model
    if question.thinking is not None:
        request["enable_thinking"] = question.thinking
    if question.schema is not None:
        schema = {"name": "answer", "schema": json.loads(question.schema)}
        request["response_format"] = {"type": "json_schema", "json_schema": schema}
    return request


def _add_chunk(answer: Answer, chunk: dict[str, Any], output: Output) -> None:
    if usage := chunk.get("usage"):
        answer["usage"] = {
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "reply_tokens": usage["completion_tokens"],
            "thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"],
        }
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if thought := delta.get("reasoning_content"):
            answer["thinking"] = (answer["thinking"] or "") + thought
            output.write(output.thinking, thought)
        if text := delta.get("content"):
            if answer["thinking"] and not answer["answer"]:
                output.write(output.thinking, "\n\n")
            answer["answer"] += text
            output.write(output.answer, text)
        for call in delta.get("tool_calls") or ():
            _add_call(answer["tool_calls"], call, output)
        answer["token_ids"] += choice.get("token_ids") or ()
        if reason := choice.get("finish_reason"):
            answer["stop"] = choice.get("stop_reason")
            ended = "stop_string" if isinstance(answer["stop"], str) else "end"
            answer["finish"] = "length" if reason == "length" else ended


def _add_call(calls: list[dict[str, Any]], delta: dict[str, Any], output: Output) -> None:
    function = delta.get("function") or {}
    if delta["index"] >= len(calls):
        calls.append({"id": delta.get("id"), "name": function.get("name"), "arguments": "", "in_thought": False})
        output.write(output.answer, f"\n[{repl_strings.CALLS.format(name=function.get('name'))}] ")
    calls[delta["index"]]["arguments"] += function.get("arguments") or ""
    output.write(output.answer, function.get("arguments") or "")


def _ask_stored(
    question: Question,
    output: Output,
    model: str | None,
    options: LoadOptions,
    folder: Path,
    database: str | None,
    server: str | None,
    key: str | None,
    no_server: bool,
    goes_on: bool,
) -> Answer:
    """In the last conversation, or a new one."""
    import asyncio

    from palaver.commands.chat import open_chat
    from palaver.store.store import data_folder

    is_local = no_server or (server is None and (model is not None or _needs_engine(options)))

    async def run() -> Answer:
        opened = open_chat(
            server, key, is_local, model, options, data_folder(folder), database, note=strings.ASKS_SERVER
        )
        async with opened as chat:
            return await _ask_in_conversation(chat, question, output, model if server else None, goes_on)

    return asyncio.run(run())


async def _ask_in_conversation(
    chat: Chat, question: Question, output: Output, model: str | None, goes_on: bool
) -> Answer:
    import asyncio

    from palaver.events import Failed, fold
    from palaver.messages import Message, Role, Text
    from palaver.repl.plain import PlainPrinter
    from palaver.repl.signals import handle_interrupt
    from palaver.repl.text import one_line

    await chat.wait_until_ready()
    newest = await chat.conversations(limit=1) if goes_on else ()
    conversation = newest[0] if newest else await chat.create_conversation(system=question.system or "")
    if newest:
        title = one_line(conversation.title, 60) or conversation.id
        print(f"palaver: {strings.CONTINUES.format(title=title)}", file=sys.stderr)
        if question.system is not None:
            await chat.update_conversation(conversation.id, system=question.system)
    parts = [await _attach(chat, data, name, model or "") for name, data in question.files]
    message = Message(Role.USER, (*parts, Text(question.text)))
    given = {**question.settings, "thinking": question.thinking, "model": model, "constraint": None}
    if question.schema is not None:
        given["constraint"] = {"grammar": "json_schema", "text": question.schema}
    parameters = {name: value for name, value in given.items() if value is not None}
    sent = await chat.send_message(conversation.id, conversation.head_id, message, parameters=parameters)
    printer, events = PlainPrinter(output.answer, output.thinking), []
    stopping: list[asyncio.Task[None]] = []
    with handle_interrupt(lambda: stopping.append(asyncio.ensure_future(chat.stop_reply(sent.reply.id)))):
        async with chat.events(sent.reply.id) as entries:
            async for entry in entries:
                events.append(entry.event)
                if isinstance(entry.event, Failed):
                    raise ReplyFailed(entry.event.error)
                printer.show(entry.event)
    tokens = await chat.tokens(sent.reply.id)
    settings = sent.reply.reply.settings if sent.reply.reply else None
    return _fields(fold(events), settings.sampling.seed if settings else None, [one.token_id for one in tokens])


async def _attach(chat: Chat, data: bytes, name: str, model: str) -> Part:
    """A document as text, or media that the model accepts."""
    from palaver.chat.attachments import check_accepted
    from palaver.media.headers import DOCUMENT_TYPES, sniff
    from palaver.messages import Text
    from palaver.store.encoding import media_part

    media_type = sniff(data)
    if media_type is None or media_type in DOCUMENT_TYPES:
        return Text(await chat.read_document(data, name))
    card = await chat.model(model)
    check_accepted(media_type.partition("/")[0], card.name, card.media)
    blob = await chat.put_blob(data, name)
    check_accepted(blob.kind, card.name, card.media)
    return media_part(blob, data)


class ReplyFailed(PalaverError):
    """The reply failed, with the engine's reason."""


FILL_MODEL = "sprout-diffusion"


@with_engine_flags("device", "engine", "adapter", "approximate_cache")
def fill(
    text: Annotated[str, typer.Argument(help=strings.FILL_TEXT)],
    model: Annotated[str | None, typer.Option("--model", "-m", metavar="MODEL", help=strings.FILL_MODEL)] = None,
    set_: SetOption = None,
    flags: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
) -> None:
    """Fill the masks of a text with a diffusion model."""
    import asyncio

    from palaver.models.resolver import resolve_model

    with report_errors():
        check_utf8({"TEXT": text, "--set": set_})
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
    model = build_model(name, engine, format, tokenizer)
    try:
        yield model
    finally:
        model.media.close()
        await engine.close()


async def load_engine(
    model: ResolvedModel, tokenizer: FastTokenizer, options: LoadOptions, child: ChildProcess | None = None
) -> Engine:
    """In this process, since an engine host would only slow down a single question; llama.cpp always in a host.

    `child` is a process for the host that was started ahead.
    """
    from palaver.chat.engine_choice import COMPILED, DIFFUSION, HOSTED, LLAMACPP, MLX, check_engine_options
    from palaver.memory import no_collections

    engine = check_engine_options(model, options)
    vocabulary, device, dtype = tokenizer.vocabulary, options.device, options.dtype
    if engine in HOSTED:
        return await _start_host(model, tokenizer, options, child)
    with no_collections():
        from palaver.engines.core.options import EngineOptions
        from palaver.engines.loader import load_engine as load_folder
        from palaver.engines.loader import load_gguf

    here = EngineOptions(
        exact=options.exact,
        context=model.context_length,
        compiled=True if options.engine == COMPILED else options.compiled,
        approximate_cache=options.approximate_cache,
    )
    if engine == COMPILED:
        assert model.gguf is not None
        loaded = load_gguf(model.gguf, vocabulary=vocabulary, options=here)
        return loaded or await _start_host(model, tokenizer, replace(options, engine=LLAMACPP), None)
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


async def _start_host(
    model: ResolvedModel, tokenizer: FastTokenizer, options: LoadOptions, child: ChildProcess | None
) -> Engine:
    from palaver.chat.engine_choice import make_spec
    from palaver.engines.host.supervisor import HostedEngine

    hosted = HostedEngine(make_spec(model, tokenizer.vocabulary, replace(options, max_running=1)), child=child)
    await hosted.start()
    return hosted


async def _read_parts(model: Model, question: Question) -> list[Part]:
    """The attached files as parts of a message."""
    if not question.files:
        return []
    import asyncio

    from palaver.chat.attachments import AttachmentReader

    reader = AttachmentReader(model.media.decoder, model.name, model.engine.info.media, why=model.text_only)
    return [await asyncio.to_thread(reader.read, data, "file", name) for name, data in question.files]


def _request(model: Model, question: Question, parts: list[Part]) -> ReplyRequest:
    from datetime import datetime

    from palaver.chat.model import draw_seed
    from palaver.chat.reply_stream import ReplyRequest
    from palaver.constraints import Constraint, Grammar
    from palaver.formats.base import RenderOptions
    from palaver.messages import Message, Role, Text
    from palaver.messages import system as system_message
    from palaver.sampling import apply_settings

    settings = {"seed": draw_seed(), **question.settings}
    if question.schema is not None:
        settings["constraint"] = Constraint(Grammar.JSON_SCHEMA, question.schema)
    messages = [Message(Role.USER, (*parts, Text(question.text)))]
    if question.system:
        messages.insert(0, system_message(question.system))
    return ReplyRequest(
        tuple(messages),
        apply_settings(model.engine.info.defaults, settings),
        options=RenderOptions(thinking=question.thinking, now=datetime.now()),
    )


def _read_attachment(path: Path) -> tuple[str, bytes]:
    with _named_file("--attach", path), path.open("rb") as file:  # or a pipe: --attach <(program)
        data = file.read(_MAX_ATTACHMENT_BYTES + 1)
    if len(data) > _MAX_ATTACHMENT_BYTES:
        raise BadParameter("--attach", str(path), strings.ATTACHMENT_TOO_LARGE)
    name = path.name.encode(errors="replace").decode()  # it may be in any encoding
    _check_document(data, name)
    return name, data


@contextmanager
def _named_file(option: str, path: str | Path) -> Iterator[None]:
    """Inside, a file of an option that can't be opened is wrong usage."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise BadParameter(option, str(path)[:200], str(error.strerror)) from None


def _check_document(data: bytes, name: str) -> None:
    """Raises BadMedia for a file that is neither media nor a document, as /attach does."""
    from palaver.chat.attachments import AttachmentReader
    from palaver.media import MediaDecoder
    from palaver.media.headers import sniff

    if data and sniff(data) is None:
        AttachmentReader(MediaDecoder()).read_document(data, name)


def _read_schema(text: str | None) -> str | None:
    """The schema from a file, or written out, as JSON on one line."""
    if text is None:
        return None
    import json

    is_inline = text.lstrip().startswith("{")
    if is_inline:
        check_utf8({"--schema": text})
    try:
        with _named_file("--schema", text):
            value = json.loads(text if is_inline else Path(text).read_text(encoding="utf-8"))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise BadParameter("--schema", text[:80], strings.BAD_SCHEMA)
    return json.dumps(value, ensure_ascii=False)


def _extract_code(text: str, last: bool) -> str:
    """The first code block of the answer, or the last, without its fences."""
    found = _CODE_BLOCK.findall(text)
    if not found:
        print(text, file=sys.stderr)
        raise NoCode
    return str(found[-1 if last else 0][1]).rstrip("\n")


class NoCode(PalaverError):
    def __init__(self) -> None:
        super().__init__(strings.NO_CODE)


def _read_text(question: str | None, folder: Path, prompt: str | None, values: dict[str, str]) -> str:
    """The question from the argument, from the pipe, or both joined, in the named prompt."""
    if prompt is None:
        if values:
            raise RequestError(strings.VAR_WITHOUT_PROMPT)
        return _read_question(question)
    template = read_prompt(folder, prompt)
    piped = "" if sys.stdin is None or sys.stdin.isatty() else _read_pipe(wait=False)
    return fill_prompt(template, values, _joined(question, piped))


def _read_question(question: str | None) -> str:
    """The question from the argument, from the pipe, or both joined."""
    piped = "" if sys.stdin is None or sys.stdin.isatty() else _read_pipe(wait=question is None)
    text = _joined(question, piped)
    if not text.strip():
        raise EmptyMessage
    return text


def _joined(question: str | None, piped: str) -> str:
    return "\n\n".join(part for part in (question, piped.rstrip("\n")) if part)


def _read_pipe(wait: bool) -> str:
    """The text from the pipe. If `wait` is False, an open pipe without data is ignored after a second."""
    if not wait and not _has_input():
        print(f"palaver: {strings.NOTHING_PIPED}", file=sys.stderr)
        return ""
    return read_stdin()


def _has_input() -> bool:
    try:
        return bool(select.select([sys.stdin], [], [], 1.0)[0])
    except (OSError, ValueError):  # a stdin that is not a file never blocks
        return True


def _call_fields(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "name": call.name, "arguments": call.arguments, "in_thought": call.in_thought}


def _fields(folded: Folded, seed: int | None, token_ids: Sequence[int]) -> Answer:
    from dataclasses import asdict

    finished, message = folded.finished, folded.message
    return {
        "answer": message.text,
        "thinking": message.thinking or None,
        "tool_calls": [_call_fields(call) for call in message.tool_calls],
        "finish": finished.finish if finished else None,
        "stop": finished.stop if finished else None,
        "usage": asdict(finished.usage) if finished else None,
        "seed": seed,
        "token_ids": list(token_ids),
        "notices": list(folded.notices),
    }
