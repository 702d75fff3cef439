"""Commands for tools: functions offered to the model, with results typed by the user."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from palaver.errors import RequestError
from palaver.messages import Role, ToolCall, ToolResult, tool
from palaver.repl import strings
from palaver.repl.command_table import ArgumentChoice, CommandGroup, complete_paths
from palaver.repl.reply_view import format_call, unanswered_calls
from palaver.repl.text import format_count, one_line
from palaver.sampling import OFF_WORDS
from palaver.store import StoredMessage

if TYPE_CHECKING:
    from palaver.repl.session import Session

commands = CommandGroup(strings.GROUP_TOOLS)


@commands.command("tools", choices=complete_paths)
async def tools(session: Session, arguments: str) -> None:
    argument = arguments.strip()
    if argument.lower() in OFF_WORDS:
        await session.cursor.set_parameters(tools=None)
    elif argument:
        card = await session.wait_for(session.chat.wait_until_ready(), strings.WAITING_FOR_MODEL)
        if not card.takes_tools:
            raise RequestError(strings.TOOLS_UNSUPPORTED)
        await session.cursor.set_parameters(tools=_read_tools(Path(argument).expanduser()))
    offered = (await session.cursor.settings()).parameters.get("tools") or ()
    for one in offered:
        function = one.get("function", one)
        description = one_line(str(function.get("description") or ""))
        session.screen.show(Text.assemble((str(function["name"]), "call"), f" {description}"))
    count = format_count(len(offered), strings.TOOLS)
    session.screen.note(strings.TOOLS_OFFERED.format(tools=count) if offered else strings.NO_TOOLS)


def _read_tools(path: Path) -> list[Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RequestError(strings.TOOLS_NOT_JSON.format(path=path, reason=error)) from None
    tools = value.get("tools", [value]) if isinstance(value, dict) else value
    if not isinstance(tools, list) or not tools:
        raise RequestError(strings.TOOLS_EMPTY.format(path=path))
    return tools


async def _calls(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
    return [ArgumentChoice(call.name, one_line(call.arguments, 40)) for call in await _unanswered_calls(session)]


@commands.command("result", choices=_calls)
async def result(session: Session, arguments: str) -> None:
    calls = await _unanswered_calls(session)
    if not calls:
        raise RequestError(strings.NO_OPEN_CALL)
    call, text = _select_call(calls, arguments)
    if not text.strip():
        session.screen.show(*(line for one in calls for line in format_call(one.name, one.arguments)))
        raise RequestError(strings.RESULT_USAGE)
    message = tool(call.id, text, call.name)
    if len(calls) == 1:
        await session.send_message(message)
        return
    conversation = await session.cursor.ensure_conversation()
    parent_id = (await session.cursor.position()).message_id
    stored = await session.chat.append_message(conversation.id, parent_id, message)
    await session.cursor.move(stored.id)
    remaining = ", ".join(one.name for one in calls if one.id != call.id)
    session.screen.note(strings.RESULT_TAKEN.format(names=remaining))


def _select_call(calls: list[ToolCall], arguments: str) -> tuple[ToolCall, str]:
    name, _, rest = arguments.partition(" ")
    named = next((one for one in calls if name in (one.name, one.id)), None)
    return (named, rest) if named is not None else (calls[0], arguments)


async def _unanswered_calls(session: Session) -> list[ToolCall]:
    """Tool calls of the last reply without a result."""
    path = await session.cursor.path()
    last = max((place for place, one in enumerate(path) if one.role is Role.ASSISTANT), default=None)
    if last is None:
        return []
    answered = [part.call_id for one in path[last + 1 :] for part in one.parts if isinstance(part, ToolResult)]
    return unanswered_calls(_tool_calls(path[last]), answered)


def _tool_calls(reply: StoredMessage) -> list[ToolCall]:
    return [part for part in reply.parts if isinstance(part, ToolCall)]
