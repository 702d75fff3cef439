"""From the body of a chat completion request to a `ChatCall`: messages, tools, checks, output options, parameters."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum, auto
from typing import Any

from palaver.chat.attachments import AttachmentReader, named_in_errors
from palaver.chat.model import Model, draw_seed
from palaver.chat.parameters import resolve_parameters
from palaver.chat.reply_request import check_token_ids
from palaver.chat.reply_stream import GeneratedReply, ReplyRequest
from palaver.errors import BadParameter, NothingToContinue
from palaver.formats.base import Format
from palaver.messages import Message, Part, Role, Text, Thinking, Tool, ToolCall, ToolResult
from palaver.server.openai.sampling_params import AUDIO, chat_parameters, ignores_effort, is_spoken
from palaver.server.openai.schemas import (
    AllowedToolsChoice,
    ChatMessage,
    ChatRequest,
    ChatTool,
    FunctionDefinition,
    FunctionName,
    NamedToolChoice,
    RequestFields,
    SamplingFields,
    VoiceReference,
)
from palaver.server.settings import ServerSettings
from palaver.server.state import ReplyIndex
from palaver.store.records import new_id
from palaver.transcripts.openai import from_openai
from palaver.voice.audio_format import AudioFormat, audio_format
from palaver.voice.base import VoiceSettings

CONVERSATION_HEADER = "x-conversation"
"""The request header that names a conversation, and the response header that says which one was used."""
IGNORED_HEADER = "x-palaver-ignored"
"""The response header that names the fields without effect."""
RECORDING_SECONDS = 3600
"""How long a later request may refer to the audio of a reply by its id."""
STREAMED_FORMAT = "pcm16"
_MODALITIES = ({"text"}, {"text", AUDIO}, {AUDIO})
_NOT_WITH_AUDIO = ("response_format", "json_schema", "regex", "grammar", "logprobs")


@dataclass(frozen=True, slots=True)
class AudioRecording:
    """The audio of one reply, and the id by which a later request may refer to it."""

    format: AudioFormat
    voice: VoiceSettings
    id: str = field(default_factory=lambda: f"audio_{new_id()}")
    expires_at: int = field(default_factory=lambda: int(time.time()) + RECORDING_SECONDS)

    def value(self, data: str, transcript: str) -> dict[str, Any]:
        return {"id": self.id, "data": data, "expires_at": self.expires_at, "transcript": transcript}


class UsageChunks(Enum):
    """Which chunks of a stream have the usage."""

    FINISH = auto()
    """The chunk with the last finish reason, for clients that did not ask for usage."""
    LAST = auto()
    """A chunk of its own at the end, without choices."""
    EVERY = auto()
    """Every chunk, and one of its own at the end."""


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What the response contains beside the answer."""

    thinking: bool = True
    """Whether thinking is part of the response."""
    legacy: bool = False
    """Whether tool calls are sent as `function_call`."""
    logprobs: bool = False
    top_logprobs: int = 0
    """The number of alternatives of each token."""
    token_ids: bool = False
    stream: bool = False
    usage: UsageChunks = UsageChunks.LAST
    drafts: bool = False
    """Whether the blocks that a diffusion model denoises are part of the stream."""
    audio: AudioRecording | None = None
    """Set for a spoken reply, whose text is the transcript."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A parsed request."""

    model: Model
    request: ReplyRequest
    choices: int
    output: OutputOptions
    partial: Message | None = None
    """The reply to continue, as the client sent it."""
    partial_ids: tuple[int, ...] = ()
    """Its token ids, if the client sent them or they are known."""

    def reply_streams(self) -> list[GeneratedReply]:
        """One for each choice. Renders the prompts, so call it in a thread."""
        requests = [replace(self.request, choice=choice) for choice in range(self.choices)]
        ids, partial = self.partial_ids, self.partial
        return [self.model.stream_reply(request, ids, partial, limit_added=True) for request in requests]


def parse_request(
    request: ChatRequest,
    model: Model,
    settings: ServerSettings,
    owner: str,
    reply_index: ReplyIndex,
    attachments: AttachmentReader,
) -> ChatCall:
    """Call it in a thread: long prompts take time. Raises every error that makes the reply impossible."""
    check_nested_fields(request)
    history = parse_history(request, settings.limits.messages, attachments)
    past = reply_index.lookup(owner, history.messages, history.past)
    return build_call(request, replace(history, past=past), model, settings, owner)


def build_call(
    request: ChatRequest, history: ChatHistory, model: Model, settings: ServerSettings, owner: str
) -> ChatCall:
    """Builds the call from a parsed history, for every API."""
    parameters = request_parameters(request, settings, model.format)
    resolved = resolve_parameters(model.engine.info.defaults, parameters, draw_seed(), datetime.now())
    options = replace(resolved.options, unsplit=request.reasoning_format == "none")
    reply = ReplyRequest(history.messages, resolved.sampling, resolved.tools, options, 0, owner, history.past)
    ids = () if history.partial_ids is None else check_token_ids(history.partial_ids, model, reply)
    return ChatCall(model, reply, choice_count(request.n, settings), output_options(request), history.partial, ids)


def request_parameters(request: ChatRequest, settings: ServerSettings, format: Format) -> dict[str, Any]:
    """All parameters of a chat request except its messages."""
    parameters = chat_parameters(request, settings, format)
    tools = parse_tools(request.tools, request.functions, settings.limits.tools)
    return {**parameters, **_tool_parameters(request, tools, parameters, format)}


def ignored_request_fields(request: ChatRequest, settings: ServerSettings, format: Format) -> list[str]:
    """The fields that were sent and have no effect."""
    ignored = ignored_fields(request)
    if ignores_effort(request, settings, format):
        ignored.append("reasoning_effort")
    if request.store is not None:
        ignored.append("store")
    if request.add_generation_prompt is False and not continues(request):
        ignored.append("add_generation_prompt")
    if set(request.metadata or ()) - {"conversation"}:
        ignored.append("metadata")
    return ignored


def _tool_parameters(
    request: ChatRequest, tools: tuple[Tool, ...], given: Mapping[str, Any], format: Format
) -> dict[str, Any]:
    names = tuple(tool.name for tool in tools)
    match request.tool_choice or request.function_call:
        case "none":
            return {"tools": tools, **forbid_calls(given, format)} if tools else {}
        case "required":
            if not names:
                raise BadParameter("tool_choice", "required", "needs tools")
            chosen = names
        case NamedToolChoice(function=FunctionName(name=name)) | FunctionName(name=name):
            chosen = (name,)
        case AllowedToolsChoice(allowed_tools=allowed):
            chosen = tuple(tool.function.name for tool in allowed.tools)
            if allowed.mode == "auto":
                _check_names(chosen, names)
                return {"tools": tuple(tool for tool in tools if tool.name in chosen)}
        case _:
            return {"tools": tools} if tools else {}
    _check_names(chosen, names)
    return {"tools": tools, "must_call": chosen}


def _check_names(chosen: Sequence[str], names: Sequence[str]) -> None:
    if not chosen:
        raise BadParameter("tool_choice", "allowed_tools", "names no tools")
    if not set(chosen) <= set(names):
        raise BadParameter("tool_choice", ", ".join(chosen), "there is no such tool among the tools")


def forbid_calls(given: Mapping[str, Any], format: Format) -> dict[str, Any]:
    """Parameters of a reply without calls, beside those given. The tools stay in the prompt, so that the cache hits;
    what would open a call is never generated."""
    marker = format.call_marker
    if isinstance(marker, int):
        return {"calls": False, "banned_ids": [*(given.get("banned_ids") or ()), marker]}
    banned = given.get("banned_strings") or ()
    listed = [banned] if isinstance(banned, str) else list(banned)
    return {"calls": False, **({"banned_strings": [*listed, marker]} if marker else {})}


def choice_count(n: int | None, settings: ServerSettings) -> int:
    limit = settings.limits.choices
    if n is not None and not 1 <= n <= limit:
        raise BadParameter("n", n, f"must be from 1 to {limit}")
    return n or 1


def output_options(request: ChatRequest) -> OutputOptions:
    return OutputOptions(
        thinking=request.include_reasoning is not False,
        legacy=bool(request.functions) and not request.tools,
        logprobs=bool(request.logprobs),
        top_logprobs=request.top_logprobs or 0,
        token_ids=bool(request.return_token_ids),
        stream=bool(request.stream),
        usage=usage_chunks(request),
        drafts=request.stream_options is not None and request.stream_options.include_drafts,
        audio=audio_recording(request),
    )


def usage_chunks(request: SamplingFields) -> UsageChunks:
    options = request.stream_options
    if options is not None and options.include_usage:
        return UsageChunks.EVERY if options.continuous_usage_stats else UsageChunks.LAST
    return UsageChunks.LAST if request.usage is not None and request.usage.include else UsageChunks.FINISH


def audio_recording(request: ChatRequest) -> AudioRecording | None:
    """The recording that the request asks for, or None for a reply in text alone."""
    modalities = request.modalities or ["text"]
    if set(modalities) not in _MODALITIES:
        raise BadParameter("modalities", modalities, 'must be ["text"] or ["text", "audio"]')
    if not is_spoken(request):
        if request.audio is not None:
            raise BadParameter("audio", "...", 'needs modalities to be ["text", "audio"]')
        return None
    for name in _NOT_WITH_AUDIO:
        if getattr(request, name):
            raise BadParameter(name, "...", "can't be combined with a spoken reply")
    if request.n not in (None, 1):
        raise BadParameter("n", request.n, "only one reply can be spoken at a time")
    options = request.audio
    format = options.format if options is not None else None
    if request.stream and format not in (None, STREAMED_FORMAT):
        raise BadParameter("audio.format", format, f"must be {STREAMED_FORMAT} if the reply is streamed")
    format = format or (STREAMED_FORMAT if request.stream else "wav")
    voice = voice_name(options.voice if options is not None else None)
    return AudioRecording(audio_format(format, "audio.format"), VoiceSettings(voice))


def voice_name(voice: str | VoiceReference | None) -> str:
    return voice.id if isinstance(voice, VoiceReference) else voice or ""


def conversation_name(metadata: Mapping[str, Any] | None, headers: Mapping[str, str]) -> str | None:
    """The conversation that a request names: the id, `new`, or None."""
    inside = (metadata or {}).get("conversation")
    if inside is not None and not isinstance(inside, str):
        raise BadParameter("metadata.conversation", inside, "must be the id of a conversation, or new")
    return inside or headers.get(CONVERSATION_HEADER) or None


_FIELD_NAMES = {
    "think": "enable_thinking",
    "effort": "reasoning_effort",
    "budget": "thinking_budget",
    "stop_ids": "stop_token_ids",
    "banned_ids": "banned_token_ids",
    "constraint (json_schema)": "response_format",
    "constraint (regex)": "response_format.regex",
    "constraint (lark)": "response_format.grammar",
    "constraint": "response_format",
}


@contextmanager
def api_field_names(names: Mapping[str, str] = _FIELD_NAMES) -> Iterator[None]:
    """Inside, a BadParameter is raised under the name of the request's field instead of the parameter's."""
    try:
        yield
    except BadParameter as error:
        if error.name not in names:
            raise
        raise BadParameter(names[error.name], error.value, error.why) from error


IGNORED = frozenset(
    (
        "cache_prompt",
        "guided_decoding_backend",
        "id_slot",
        "litellm_call_id",
        "max_tool_calls",
        "moderation",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "timeout",
        "user",
        "verbosity",
        "web_search_options",
    )
)
"""Hints for speed, style or accounting that clients send by default. They change no reply."""

_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "echo": (False,),
    "suffix": ("",),
    "length_penalty": (1, 1.0),
    "detokenize": (True,),
    "strict": (None,),
    "add_special_tokens": (False,),
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "mirostat": (0,),
    "tfs_z": (1, 1.0),
    "typical_p": (1, 1.0),
    "xtc_probability": (0, 0.0),
}
"""Unsupported fields, and the values of them that ask for the default behaviour."""


@dataclass(frozen=True, slots=True)
class ToleratedFields:
    """The unsupported fields that one API accepts."""

    ignored: Collection[str] = IGNORED
    harmless: Mapping[str, Sequence[Any]] = field(default_factory=lambda: _HARMLESS)


OPENAI = ToleratedFields()


def check_unknown_fields(fields: RequestFields, path: str = "", tolerated: ToleratedFields = OPENAI) -> None:
    """Raises BadParameter for the first field that is unknown or unsupported."""
    for name, value in (fields.model_extra or {}).items():
        if value is None or name in tolerated.ignored or value in tolerated.harmless.get(name, ()):
            continue
        raise BadParameter(path + name, _shortened(value), "this field is not supported")


def ignored_fields(fields: RequestFields, tolerated: ToleratedFields = OPENAI) -> list[str]:
    """The fields of a request that were sent and have no effect."""
    sent = {**{name: getattr(fields, name) for name in type(fields).model_fields}, **(fields.model_extra or {})}
    return [name for name, value in sent.items() if value is not None and name in tolerated.ignored]


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    return {IGNORED_HEADER: ", ".join(names)} if names else {}


def check_nested_fields(fields: RequestFields, path: str = "", tolerated: ToleratedFields = OPENAI) -> None:
    """Checks the fields of the request and of all objects inside."""
    check_unknown_fields(fields, path, tolerated)
    for name in type(fields).model_fields:
        value = getattr(fields, name)
        if isinstance(value, RequestFields):
            check_nested_fields(value, f"{path}{name}.", tolerated)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, RequestFields):
                    check_nested_fields(item, f"{path}{name}[{index}].", tolerated)


def _shortened(value: Any) -> Any:
    text = repr(value)
    return value if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True, slots=True)
class ChatHistory:
    """The messages of a request, and the partial reply that it asks to continue."""

    messages: tuple[Message, ...]
    past: tuple[tuple[int, ...] | None, ...]
    """The token ids of the replies among the messages, if they were sent."""
    partial: Message | None = None
    partial_ids: tuple[int, ...] | None = None
    """The token ids of the partial reply, if they were sent."""


def parse_history(
    request: ChatRequest, limit: int, attachments: AttachmentReader, places: Sequence[str] | None = None
) -> ChatHistory:
    """Blocking if files are attached: call it in a thread. `places`: how errors name each message."""
    if len(request.messages) > limit:
        raise BadParameter("messages", f"{len(request.messages)} messages", f"at most {limit} are taken")
    messages = parse_messages(request.messages, attachments, places)
    ids = [message.token_ids for message in request.messages]
    last = request.messages[-1] if request.messages else None
    mode = request.continue_final_message
    if last is not None and continues(request):
        before = messages[:-1]
        if mode is None and last.token_ids is None:
            _check_prefill(messages[-1])
            if not any(map(_has_content, messages[-1].parts)):
                return ChatHistory(before, _past(before, ids))
        partial_ids = None if last.token_ids is None else tuple(last.token_ids)
        return ChatHistory(before, _past(before, ids), _partial(messages[-1], mode or True), partial_ids)
    if mode:
        raise NothingToContinue("continue_final_message: the last message is not the assistant's.")
    return ChatHistory(messages, _past(messages, ids))


def continues(request: ChatRequest) -> bool:
    """Whether the last message is a reply that is to be continued."""
    last = request.messages[-1] if request.messages else None
    return last is not None and last.role == "assistant" and request.continue_final_message is not False


def _check_prefill(message: Message) -> None:
    """A trailing assistant message is continued, unless what must follow it is the result of its call."""
    if message.tool_calls:
        why = "the last message calls a tool: its result must follow, or continue_final_message to continue the call"
        raise BadParameter("messages", "tool_calls", why)


def _has_content(part: Part) -> bool:
    return not isinstance(part, Text | Thinking) or bool(part.text)


def parse_messages(
    messages: Sequence[ChatMessage], attachments: AttachmentReader, places: Sequence[str] | None = None
) -> tuple[Message, ...]:
    names: dict[str, str] = {}
    parsed = []
    for index, chat_message in enumerate(messages):
        message = _message(places[index] if places else f"messages[{index}]", chat_message, attachments)
        names.update((call.id, call.name) for call in message.tool_calls)
        parsed.append(with_tool_names(message, names))
    return tuple(parsed)


def parse_tools(
    tools: Sequence[ChatTool] | None, functions: Sequence[FunctionDefinition] | None, limit: int
) -> tuple[Tool, ...]:
    offered = [*(tool.function for tool in tools or ()), *(functions or ())]
    if len(offered) > limit:
        raise BadParameter("tools", f"{len(offered)} tools", f"at most {limit} are taken")
    names = [function.name for function in offered]
    for name in names:
        if names.count(name) > 1:
            raise BadParameter("tools", name, "two tools have this name")
    return tuple(Tool(f.name, f.description or "", f.parameters or {"type": "object"}) for f in offered)


def _past(messages: Sequence[Message], ids: Sequence[list[int] | None]) -> tuple[tuple[int, ...] | None, ...]:
    replies = zip(messages, ids, strict=False)
    return tuple(None if sent is None else tuple(sent) for message, sent in replies if message.role is Role.ASSISTANT)


def _message(where: str, message: ChatMessage, attachments: AttachmentReader) -> Message:
    value = message.model_dump(exclude_none=True, exclude={"token_ids", "refusal", "function_call"})
    if message.function_call is not None:
        value["tool_calls"] = [{"id": "", "function": message.function_call.model_dump()}]
    if message.refusal and not message.content:
        value["content"] = message.refusal
    if message.audio is not None:
        raise BadParameter(f"{where}.audio", message.audio.id, "recordings are known to chat completions alone")
    if message.role in ("tool", "function") and message.content is None:
        raise BadParameter(f"{where}.content", None, "a tool result needs content")
    try:
        with named_in_errors(where):
            parsed = from_openai(value, attachments.read_url)
    except (ValueError, KeyError, TypeError) as error:
        raise BadParameter(where, "...", str(error)) from None
    return Message(parsed.role, parsed.parts or (Text(""),)) if parsed.role is Role.USER else parsed


def with_tool_names(message: Message, names: dict[str, str]) -> Message:
    """Adds the tool's name to its results: some templates need it, and clients leave it out."""
    parts = (
        replace(part, name=names.get(part.call_id, "")) if isinstance(part, ToolResult) and not part.name else part
        for part in message.parts
    )
    return Message(message.role, tuple(parts))


def _partial(message: Message, mode: bool | str) -> Message:
    """The message as the reply to continue. A last part of thinking is open; an empty text after it closes it."""
    thinks = any(isinstance(part, Thinking) for part in message.parts)
    rest = [part for part in message.parts if isinstance(part, Text | ToolCall)]
    if mode == "reasoning_content":
        if rest:
            raise BadParameter("continue_final_message", mode, "the thinking has ended: an answer follows it")
        return message if thinks else Message(Role.ASSISTANT, (Thinking(""),))
    if mode == "content" and not rest:
        return Message(Role.ASSISTANT, (*message.parts, Text("")))
    return message
