"""From a chat request to what is asked of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum, auto
from typing import Any

from palaver.chat.model import Model, draw_seed
from palaver.chat.parameters import resolve_parameters
from palaver.chat.reply_stream import ReplyRequest, ReplyStream
from palaver.errors import BadParameter, NothingToContinue
from palaver.formats.base import Format
from palaver.generation import Prompt
from palaver.messages import Message, Tool
from palaver.phases import Phase
from palaver.server.errors import OtherModel
from palaver.server.openai.audio import AudioRecording, audio_recording
from palaver.server.openai.messages import ChatHistory, continues, parse_history, parse_tools
from palaver.server.openai.reply_index import ReplyIndex
from palaver.server.openai.sampling_params import chat_parameters, check_nested_fields, ignored_fields, ignores_effort
from palaver.server.openai.schemas import AllowedToolsChoice, ChatRequest, FunctionName, NamedToolChoice, StreamOptions
from palaver.server.settings import ServerSettings


class Usage(Enum):
    """Where a stream's usage goes."""

    FINISH = auto()
    """Into the chunk with the last finish reason: clients that did not ask for it may still count by it."""
    LAST = auto()
    """Into a chunk of its own at the end, without choices."""
    EVERY = auto()
    """Into every chunk, and the last one."""


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How the reply is to be told."""

    thinking: bool = True
    """Whether what was thought is told at all."""
    legacy: bool = False
    """Calls as `function_call`."""
    logprobs: bool = False
    token_ids: bool = False
    stream: bool = False
    usage: Usage = Usage.LAST
    audio: AudioRecording | None = None
    """Where it is spoken: then its text is the transcript."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    model: Model
    request: ReplyRequest
    choices: int
    shown: OutputOptions
    begun: Message | None = None
    said: tuple[int, ...] = ()

    def utterances(self) -> list[ReplyStream]:
        """One for each choice. May take a while: not for the event loop."""
        requests = [replace(self.request, choice=choice) for choice in range(self.choices)]
        return [self.model.utterance(request, self.said, self.begun, limit_added=True) for request in requests]


def check_model(name: str | None, model: Model, settings: ServerSettings) -> None:
    """The one in use by its name, or whatever it is by none."""
    known = (model.name, *settings.aliases)
    if name and name not in known:
        raise OtherModel(f"The model {name[:200]!r} is not the one in use, which is {model.name!r}.")


def parse_request(
    request: ChatRequest, model: Model, settings: ServerSettings, owner: str, remembered: ReplyIndex
) -> ChatCall:
    """May take a while: not for the event loop. Raises whatever makes the reply impossible."""
    check_nested_fields(request)
    check_model(request.model, model, settings)
    given = parse_history(request, settings.limits.messages)
    past = remembered.past(owner, given.messages, given.past)
    return build_call(request, replace(given, past=past), model, settings, owner)


def build_call(
    request: ChatRequest, given: ChatHistory, model: Model, settings: ServerSettings, owner: str
) -> ChatCall:
    """The same where the conversation is known already, however it was sent."""
    parameters = whole_parameters(request, settings, model.format)
    decided = resolve_parameters(model.engine.info.defaults, parameters, draw_seed(), datetime.now())
    options = replace(decided.options, unsplit=request.reasoning_format == "none")
    whole = ReplyRequest(given.messages, decided.sampling, decided.tools, options, 0, owner, given.past)
    said = () if given.said is None else check_token_ids(given.said, model, whole)
    return ChatCall(model, whole, choice_count(request.n, settings), output_options(request), given.begun, said)


def whole_parameters(request: ChatRequest, settings: ServerSettings, format: Format) -> dict[str, Any]:
    """All that a chat request decides but its messages."""
    parameters = chat_parameters(request, settings, format)
    tools = parse_tools(request.tools, request.functions, settings.limits.tools)
    return {**parameters, **_tool_parameters(request, tools, parameters, format)}


def ignored_of(request: ChatRequest, settings: ServerSettings, format: Format) -> list[str]:
    """The fields without effect."""
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
            return {"tools": tools, "calls": False, **_ban_calls(given, format)} if tools else {}
        case "required":
            wanted = names
        case NamedToolChoice(function=FunctionName(name=name)) | FunctionName(name=name):
            wanted = (name,)
        case AllowedToolsChoice(allowed_tools=allowed):
            wanted = tuple(tool.function.name for tool in allowed.tools)
            if allowed.mode == "auto":
                _check_names(wanted, names)
                return {"tools": tuple(tool for tool in tools if tool.name in wanted)}
        case _:
            return {"tools": tools} if tools else {}
    _check_names(wanted, names)
    return {"tools": tools, "must_call": wanted}


def _check_names(wanted: Sequence[str], names: Sequence[str]) -> None:
    if not wanted or not set(wanted) <= set(names):
        raise BadParameter("tool_choice", ", ".join(wanted) or "required", "there is no such tool among the tools")


def _ban_calls(given: Mapping[str, Any], format: Format) -> dict[str, Any]:
    """The tools stay in the prompt, so that the cache hits; what would open a call is never generated."""
    marker = format.call_marker
    if isinstance(marker, int):
        return {"banned_ids": [*(given.get("banned_ids") or ()), marker]}
    banned = given.get("banned_strings") or ()
    listed = [banned] if isinstance(banned, str) else list(banned)
    return {"banned_strings": [*listed, marker]} if marker else {}


def choice_count(n: int | None, settings: ServerSettings) -> int:
    most = settings.limits.choices
    if n is not None and not 1 <= n <= most:
        raise BadParameter("n", n, f"must be from 1 to {most}")
    return n or 1


def output_options(request: ChatRequest) -> OutputOptions:
    return OutputOptions(
        thinking=request.include_reasoning is not False,
        legacy=bool(request.functions) and not request.tools,
        logprobs=bool(request.logprobs),
        token_ids=bool(request.return_token_ids),
        stream=bool(request.stream),
        usage=usage_of(request.stream_options),
        audio=audio_recording(request),
    )


def usage_of(options: StreamOptions | None) -> Usage:
    if options is None or not options.include_usage:
        return Usage.FINISH
    return Usage.EVERY if options.continuous_usage_stats else Usage.LAST


def check_token_ids(ids: tuple[int, ...], model: Model, request: ReplyRequest) -> tuple[int, ...]:
    """Ids that a client says a reply was made of: of control tokens only those that a reply may hold."""
    prompt = model.prompt(request)
    allowed = reply_control_ids(prompt)
    size = len(model.vocabulary) or model.engine.info.vocabulary_size
    for place, token_id in enumerate(ids):
        if not 0 <= token_id < size:
            raise BadParameter("token_ids", token_id, f"token ids here go from 0 to {size - 1}")
        if token_id in prompt.phases.hidden and token_id not in allowed:
            raise BadParameter("token_ids", token_id, "a reply can't hold this control token")
        if token_id in prompt.phases.ends and token_id not in _markers(prompt):
            if place == len(ids) - 1:
                raise NothingToContinue("The reply is whole: there is nothing to continue.")
            raise BadParameter("token_ids", token_id, "the reply ends here, but there is more of it")
    return ids


def reply_control_ids(prompt: Prompt) -> frozenset[int]:
    return prompt.phases.ends | _markers(prompt)


def _markers(prompt: Prompt) -> frozenset[int]:
    """What leads from phase to phase. What merely strays into an answer, and is not said there, is none of it."""
    states = prompt.phases.states
    found = {t.marker for state in states for t in state.triggers if isinstance(t.marker, int)}
    strays = {
        t.marker
        for place, state in enumerate(states)
        for t in state.triggers
        if state.phase is Phase.ANSWER and state.other is None and t.to == place
    }
    return frozenset(marker for marker in found if marker not in strays)
