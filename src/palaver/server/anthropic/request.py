"""From a request of the Messages API to what is asked of the model: all but the messages is said as a chat request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from palaver.chat.model import Model
from palaver.errors import BadParameter, PalaverError
from palaver.events import fold
from palaver.messages import Message, Role, Thinking, ToolCall
from palaver.phases import Vocabulary
from palaver.server.anthropic.messages import AnthropicTurn, parse_turns
from palaver.server.anthropic.schemas import (
    TOLERATED,
    CountRequest,
    InputTool,
    MessagesRequest,
    OutputConfig,
    ThinkingConfig,
    ToolChoice,
)
from palaver.server.errors import NotSupported
from palaver.server.openai.messages import ChatHistory
from palaver.server.openai.reply_index import ReplyIndex, canonical_arguments
from palaver.server.openai.request import ChatCall, build_call, check_model, check_token_ids
from palaver.server.openai.sampling_params import check_nested_fields, ignored_fields, ignores_effort
from palaver.server.openai.schemas import ChatRequest
from palaver.server.settings import ServerSettings


def recall_ids(what: ChatCall, begun: AnthropicTurn, remembered: ReplyIndex) -> tuple[int, ...]:
    """The ids it goes on from; none where only its words are known."""
    request = what.request
    replies = sum(message.role is Role.ASSISTANT for message in request.messages) + 1
    kept = remembered.past(request.owner, (*request.messages, begun.message), [None] * replies)[-1]
    prompt = what.model.prompt(request, (), begun.message)
    for ids in (kept, _spliced(what.model.vocabulary, prompt.reply_ids, begun)):
        said = _open(ids or (), prompt.phases.ends)
        if said and _says(what, said, begun.message):
            return said
    return ()


def _spliced(vocabulary: Vocabulary, written: tuple[int, ...], begun: AnthropicTurn) -> tuple[int, ...]:
    """What the thoughts were made of, then the rest as it is written; none where the two do not meet."""
    if not begun.ids or not all(token_id < len(vocabulary) for token_id in begun.ids):
        return ()
    signed = b"".join(vocabulary[token_id] for token_id in begun.ids)
    text = b"".join(vocabulary[token_id] for token_id in written)
    if not text.startswith(signed):
        return begun.ids if signed.startswith(text) else ()
    at, place = 0, 0
    while at < len(signed):
        at, place = at + len(vocabulary[written[place]]), place + 1
    return (*begun.ids, *written[place:]) if at == len(signed) else ()


def _open(ids: tuple[int, ...], ends: Collection[int]) -> tuple[int, ...]:
    """Without the end of the turn: whoever sends a reply back to go on wants more of it."""
    return ids[:-1] if ids and ids[-1] in ends else ids


def _says(what: ChatCall, ids: tuple[int, ...], message: Message) -> bool:
    """Whether these tokens are read as this reply, and are such as a reply may hold."""
    try:
        said = check_token_ids(ids, what.model, what.request)
        reader = what.model.reader(what.request, said)
        found = fold([*reader.open(), *reader.close()]).message
    except PalaverError:
        return False
    return _words(found) == _words(message)


def _words(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [(call.name, canonical_arguments(call.arguments)) for call in message.tool_calls]
    return message.thinking.rstrip(), message.text, calls


_SAME = ("stream", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens", "metadata")


class ThreadUnsupportedRequest(NotSupported):
    """By this name their clients know that they must send the whole conversation, and do."""

    def __init__(self) -> None:
        super().__init__("thread: conversations are not kept under it; send all messages, or metadata.conversation.")


def parse_request(
    request: CountRequest, model: Model, settings: ServerSettings, owner: str, remembered: ReplyIndex
) -> ChatCall:
    """May take a while: not for the event loop. Raises whatever makes the reply impossible."""
    said, begun = parse_conversation(request, model, settings)
    messages = tuple(turn.message for turn in said)
    replies = [turn.ids or None for turn in said if turn.message.role is Role.ASSISTANT]
    known = remembered.past(owner, messages, [None] * len(replies))
    past = tuple(whole or signed for whole, signed in zip(known, replies, strict=True))
    what = build_call(to_chat_request(request, model, begun), ChatHistory(messages, past), model, settings, owner)
    return what if begun is None else _going_on(what, begun, remembered)


def parse_conversation(
    request: CountRequest, model: Model, settings: ServerSettings
) -> tuple[Sequence[AnthropicTurn], AnthropicTurn | None]:
    """What was said, and the reply that was begun, where the last message is one."""
    said = parse_turns(request, model.tokenizer, settings.limits.messages)
    if (request.model_extra or {}).get("thread") is not None:
        raise ThreadUnsupportedRequest
    check_nested_fields(request, tolerated=TOLERATED)
    check_model(request.model, model, settings)
    if not said or said[-1].message.role is not Role.ASSISTANT:
        return said, None
    begun = said.pop()
    if begun.message.parts and isinstance(begun.message.parts[-1], ToolCall):
        raise BadParameter("messages", "tool_use", "the last message calls a tool: its tool_result must follow")
    return said, begun if begun.message.parts else None


def _going_on(what: ChatCall, begun: AnthropicTurn, remembered: ReplyIndex) -> ChatCall:
    return replace(what, begun=begun.message, said=recall_ids(what, begun, remembered))


def ignored_of(request: CountRequest, model: Model, settings: ServerSettings) -> list[str]:
    """The fields without effect."""
    ignored = ignored_fields(request, TOLERATED)
    if ignores_effort(to_chat_request(request, model), settings, model.format):
        ignored.append("output_config.effort")
    return ignored


def to_chat_request(request: CountRequest, model: Model, begun: AnthropicTurn | None = None) -> ChatRequest:
    """The same wishes without the messages, for the reply that was begun."""
    config = request.output_config
    given: dict[str, Any] = {
        "messages": [],
        "tools": [_tool(place, tool) for place, tool in enumerate(request.tools or ())] or None,
        "tool_choice": _choice(request.tool_choice),
        "thinking": _thinking(request.thinking, model, begun),
        "include_reasoning": request.thinking is None or request.thinking.display != "omitted",
    }
    if request.tool_choice is not None and request.tool_choice.disable_parallel_tool_use:
        given["parallel_tool_calls"] = False
    if config is not None:
        given |= {"reasoning_effort": config.effort, "response_format": _format(config)}
    if isinstance(request, MessagesRequest):
        given |= {name: getattr(request, name) for name in _SAME} | {"stop": request.stop_sequences}
    return ChatRequest.model_validate(given)


def _tool(place: int, tool: InputTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise BadParameter(f"tools[{place}].type", tool.type[:80], "only tools that the client runs are supported")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice | None) -> Any:
    match choice:
        case None | ToolChoice(type="auto"):
            return None
        case ToolChoice(type="any"):
            return "required"
        case ToolChoice(type="none"):
            return "none"
        case ToolChoice(name=name):
            if not name:
                raise BadParameter("tool_choice.name", name, "must name the tool")
            return {"type": "function", "function": {"name": name}}


def _thinking(config: ThinkingConfig | None, model: Model, begun: AnthropicTurn | None) -> dict[str, Any] | None:
    """A wish for what the model does anyway needs no switch. An answer that was begun without a thought, where nobody
    asked for one, gets none."""
    if config is None:
        answers = begun is not None and not any(isinstance(part, Thinking) for part in begun.message.parts)
        return {"type": "disabled"} if answers and model.format.thinking_switch is not None else None
    switchable, thinks = model.format.thinking_switch is not None, model.format.thinks
    if config.type == "disabled":
        return {"type": "disabled"} if switchable or thinks else None
    enabled = config.type == "enabled" and (switchable or not thinks)
    return {"type": "enabled" if enabled else "adaptive", "budget_tokens": config.budget_tokens}


def _format(config: OutputConfig) -> dict[str, Any] | None:
    if config.format is None:
        return None
    return {"type": "json_schema", "json_schema": {"schema": config.format.schema_}}


NAMES = {
    "stop": "stop_sequences",
    "think": "thinking.type",
    "thinking_budget": "thinking.budget_tokens",
    "budget": "thinking.budget_tokens",
    "effort": "output_config.effort",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "constraint (json_schema)": "output_config.format",
    "constraint": "output_config.format",
}
