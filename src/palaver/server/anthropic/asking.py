"""From a request of the Messages API to what is asked of the model: all but the messages is said as a chat request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from palaver.chat.model import Model
from palaver.errors import BadParameter
from palaver.messages import Role, Thinking, ToolCall
from palaver.server.anthropic.conversing import Turn, turns
from palaver.server.anthropic.fields import (
    TOLERATED,
    CountRequest,
    MessagesRequest,
    OutputConfig,
    ThinkingConfig,
    ToolChoice,
    ToolGiven,
)
from palaver.server.anthropic.recalling import recalled
from palaver.server.errors import NotSupported
from palaver.server.openai.asking import Asked, asked_for, check_model
from palaver.server.openai.conversing import Conversing
from palaver.server.openai.fields import ChatRequest
from palaver.server.openai.remembering import Remembered
from palaver.server.openai.unknown import check_all, ignored_fields
from palaver.server.openai.wishes import ignores_effort
from palaver.server.settings import ServerSettings

_SAME = ("stream", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens", "metadata")


class ThreadUnsupportedRequest(NotSupported):
    """By this name their clients know that they must send the whole conversation, and do."""

    def __init__(self) -> None:
        super().__init__("thread: conversations are not kept under it; send all messages, or metadata.conversation.")


def asked(request: CountRequest, model: Model, settings: ServerSettings, owner: str, remembered: Remembered) -> Asked:
    """May take a while: not for the event loop. Raises whatever makes the reply impossible."""
    said, begun = conversation(request, model, settings)
    messages = tuple(turn.message for turn in said)
    replies = [turn.ids or None for turn in said if turn.message.role is Role.ASSISTANT]
    known = remembered.past(owner, messages, [None] * len(replies))
    past = tuple(whole or signed for whole, signed in zip(known, replies, strict=True))
    what = asked_for(as_chat(request, model, begun), Conversing(messages, past), model, settings, owner)
    return what if begun is None else _going_on(what, begun, remembered)


def conversation(request: CountRequest, model: Model, settings: ServerSettings) -> tuple[Sequence[Turn], Turn | None]:
    """What was said, and the reply that was begun, where the last message is one."""
    said = turns(request, model.tokenizer, settings.limits.messages)
    if (request.model_extra or {}).get("thread") is not None:
        raise ThreadUnsupportedRequest
    check_all(request, tolerated=TOLERATED)
    check_model(request.model, model, settings)
    if not said or said[-1].message.role is not Role.ASSISTANT:
        return said, None
    begun = said.pop()
    if begun.message.parts and isinstance(begun.message.parts[-1], ToolCall):
        raise BadParameter("messages", "tool_use", "the last message calls a tool: its tool_result must follow")
    return said, begun if begun.message.parts else None


def _going_on(what: Asked, begun: Turn, remembered: Remembered) -> Asked:
    return replace(what, begun=begun.message, said=recalled(what, begun, remembered))


def ignored_of(request: CountRequest, model: Model, settings: ServerSettings) -> list[str]:
    """The fields without effect."""
    ignored = ignored_fields(request, TOLERATED)
    if ignores_effort(as_chat(request, model), settings, model.format):
        ignored.append("output_config.effort")
    return ignored


def as_chat(request: CountRequest, model: Model, begun: Turn | None = None) -> ChatRequest:
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


def _tool(place: int, tool: ToolGiven) -> dict[str, Any]:
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


def _thinking(config: ThinkingConfig | None, model: Model, begun: Turn | None) -> dict[str, Any] | None:
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
