"""From a chat request to what is asked of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum, auto

from palaver.chat.model import Model, draw_seed
from palaver.chat.parameters import decide
from palaver.chat.utterance import Request, Utterance
from palaver.errors import BadParameter, NothingToContinue
from palaver.generation import Prompt
from palaver.messages import Message, Tool
from palaver.phases import Phase
from palaver.server.errors import OtherModel
from palaver.server.openai.conversing import Conversing, conversing, tools_of
from palaver.server.openai.fields import ChatRequest, NamedFunction, NamedTool, StreamOptions
from palaver.server.openai.remembering import Remembered
from palaver.server.openai.unknown import check_all
from palaver.server.openai.voicing import Recording, recording
from palaver.server.openai.wishes import chat_parameters
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
class Shown:
    """How the reply is to be told."""

    thinking: bool = True
    """Whether what was thought is told at all."""
    legacy: bool = False
    """Calls as `function_call`."""
    logprobs: bool = False
    token_ids: bool = False
    stream: bool = False
    usage: Usage = Usage.LAST
    audio: Recording | None = None
    """Where it is spoken: then its text is the transcript."""


@dataclass(frozen=True, slots=True)
class Asked:
    model: Model
    request: Request
    choices: int
    shown: Shown
    begun: Message | None = None
    said: tuple[int, ...] = ()

    def utterances(self) -> list[Utterance]:
        """One for each choice. May take a while: not for the event loop."""
        requests = [replace(self.request, choice=choice) for choice in range(self.choices)]
        return [self.model.utterance(request, self.said, self.begun, limit_added=True) for request in requests]


def check_model(name: str | None, model: Model, settings: ServerSettings) -> None:
    """The one in use by its name, or whatever it is by none."""
    known = (model.name, *settings.aliases)
    if name and name not in known:
        raise OtherModel(f"The model {name[:200]!r} is not the one in use, which is {model.name!r}.")


def asked(request: ChatRequest, model: Model, settings: ServerSettings, owner: str, remembered: Remembered) -> Asked:
    """May take a while: not for the event loop. Raises whatever makes the reply impossible."""
    check_all(request)
    check_model(request.model, model, settings)
    given = conversing(request, settings.limits.messages)
    past = remembered.past(owner, given.messages, given.past)
    return asked_for(request, replace(given, past=past), model, settings, owner)


def asked_for(request: ChatRequest, given: Conversing, model: Model, settings: ServerSettings, owner: str) -> Asked:
    """The same where the conversation is known already, however it was sent."""
    parameters = chat_parameters(request, settings, model.format.switches)
    decided = decide(model.engine.info.defaults, parameters, draw_seed(), datetime.now())
    tools, called = offered(request, settings)
    options = replace(decided.options, unsplit=request.reasoning_format == "none", must_call=called)
    whole = Request(given.messages, decided.sampling, tools, options, 0, owner, given.past)
    said = () if given.said is None else checked_ids(given.said, model, whole)
    return Asked(model, whole, choices(request.n, settings), shown(request), given.begun, said)


def offered(request: ChatRequest, settings: ServerSettings) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """The tools the model is told of, and the names of those of which it must call one."""
    tools = tools_of(request.tools, request.functions, settings.limits.tools)
    names = tuple(tool.name for tool in tools)
    match request.tool_choice or request.function_call:
        case "none":
            return (), ()
        case "required":
            wanted = names
        case NamedTool(function=NamedFunction(name=name)) | NamedFunction(name=name):
            wanted = (name,)
        case _:
            return tools, ()
    if not tools or not set(wanted) <= set(names):
        raise BadParameter("tool_choice", ", ".join(wanted) or "required", "there is no such tool among the tools")
    return tools, wanted


def choices(n: int | None, settings: ServerSettings) -> int:
    most = settings.limits.choices
    if n is not None and not 1 <= n <= most:
        raise BadParameter("n", n, f"must be from 1 to {most}")
    return n or 1


def shown(request: ChatRequest) -> Shown:
    return Shown(
        thinking=request.include_reasoning is not False,
        legacy=bool(request.functions) and not request.tools,
        logprobs=bool(request.logprobs),
        token_ids=bool(request.return_token_ids),
        stream=bool(request.stream),
        usage=usage_of(request.stream_options),
        audio=recording(request),
    )


def usage_of(options: StreamOptions | None) -> Usage:
    if options is None or not options.include_usage:
        return Usage.FINISH
    return Usage.EVERY if options.continuous_usage_stats else Usage.LAST


def checked_ids(ids: tuple[int, ...], model: Model, request: Request) -> tuple[int, ...]:
    """Ids that a client says a reply was made of: of control tokens only those that a reply may hold."""
    prompt = model.prompt(request)
    allowed = reply_control(prompt)
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


def reply_control(prompt: Prompt) -> frozenset[int]:
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
