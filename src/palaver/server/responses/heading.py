"""What is known of a response before its reply begins: from the reply's record, or from what is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from palaver.messages import Tool
from palaver.sampling import Sampling
from palaver.server.responses.fields import LOGPROBS, SEALED
from palaver.server.responses.kept import Kept, kept, response_id
from palaver.server.responses.telling import Shows, Telling
from palaver.store import StoredMessage


def telling_of(reply: StoredMessage, include: Sequence[str] = ()) -> Telling:
    """Of a response that is stored; `include` is what a reader asks for besides what was asked for at first."""
    assert reply.reply is not None
    known, made_by = kept(reply), reply.reply.settings
    about = heading(response_id(reply.id), int(reply.created_at.timestamp()), made_by.model, known)
    about |= decided(made_by.sampling, made_by.tools, known)
    about |= {"conversation": {"id": reply.conversation_id}, "store": True}
    return Telling(reply.id, about, shows(known, include))


def shows(known: Kept, include: Sequence[str] = ()) -> Shows:
    wanted = {*known.include, *include}
    return Shows(known.summary is not None, SEALED in wanted, LOGPROBS in wanted)


def heading(id: str, created_at: int, model: str, known: Kept) -> dict[str, Any]:
    return {
        "id": id,
        "object": "response",
        "created_at": created_at,
        "completed_at": None,
        "status": "in_progress",
        "background": known.background,
        "model": model,
        "output": [],
        "usage": None,
        "error": None,
        "incomplete_details": None,
        "instructions": known.instructions,
        "previous_response_id": known.previous,
        "conversation": None,
        "metadata": known.metadata,
        "parallel_tool_calls": known.parallel,
        "reasoning": {"effort": known.effort, "summary": known.summary},
        "store": False,
        "text": {"format": known.format},
        "tool_choice": known.tool_choice,
        "top_logprobs": known.top_logprobs,
        "truncation": known.truncation,
        "user": known.user,
    }


def decided(sampling: Sampling, tools: Sequence[Tool], known: Kept) -> dict[str, Any]:
    """What the reply is made with: the request's own values, or the model's where it named none."""
    return {
        "max_output_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "tools": [_tool(tool, tool.name in known.strict) for tool in tools],
    }


def _tool(tool: Tool, strict: bool) -> dict[str, Any]:
    about = {"type": "function", "name": tool.name, "description": tool.description or None}
    return {**about, "parameters": dict(tool.parameters), "strict": strict}
