"""Commands for tools: tool servers, and functions of a file, with results typed by the user."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from palaver.errors import RequestError
from palaver.messages import Role, ToolCall, ToolResult, tool
from palaver.repl import strings
from palaver.repl.command_table import ArgumentChoice, CommandGroup, complete_paths
from palaver.repl.commands.attachments import attach_bytes, check_file, parse_path
from palaver.repl.reply_view import format_call, unanswered_calls
from palaver.repl.text import format_count, one_line
from palaver.sampling import OFF_WORDS
from palaver.store import StoredMessage
from palaver.tools.config import server_from_words
from palaver.tools.oauth import listen_for_code
from palaver.tools.servers import ServerCard

if TYPE_CHECKING:
    from palaver.repl.session import Session

commands = CommandGroup(strings.GROUP_TOOLS)


async def _tools_choices(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
    words = [ArgumentChoice(word) for word in ("add", "remove", "on", "off", "attach", "forget", "sign-in")]
    return [*words, *await complete_paths(session, arguments)]


@commands.command("tools", choices=_tools_choices)
async def tools(session: Session, arguments: str) -> None:
    action, *words = arguments.split() or [""]
    match action.lower():
        case "add":
            await _add_server(session, arguments)
        case "remove" if len(words) == 1:
            await session.chat.remove_tool_server(words[0])
            await _offer_servers(session, [name for name in await _offered_servers(session) if name != words[0]])
            session.screen.note(strings.TOOL_SERVER_REMOVED.format(name=words[0]))
        case "on":
            known = [card.name for card in await session.chat.tool_servers(connect=False)]
            if unknown := [name for name in words if name not in known]:
                raise RequestError(strings.TOOL_SERVER_UNKNOWN.format(name=unknown[0]))
            await _check_support(session)
            await _offer_servers(session, [*await _offered_servers(session), *(words or known)])
        case "attach":
            await _attach_resource(session, words)
            return
        case "sign-in" if len(words) == 1:
            await _sign_in(session, words[0])
        case "forget":
            await _forget_rules(session, words)
            return
        case off if off in OFF_WORDS and words:
            await _offer_servers(session, [name for name in await _offered_servers(session) if name not in words])
        case off if off in OFF_WORDS:
            await session.cursor.set_parameters(tools=None, tool_servers=None)
        case "":
            pass
        case _:
            await _check_support(session)
            await session.cursor.set_parameters(tools=_read_tools(parse_path(arguments.strip())))
    await _show_tools(session)


async def _add_server(session: Session, arguments: str) -> None:
    try:
        _, name, *words = shlex.split(arguments)
        server = server_from_words(name, words)
    except ValueError:
        raise RequestError(strings.TOOL_SERVER_USAGE) from None
    await _check_support(session)
    card = await session.wait_for(session.chat.add_tool_server(server), strings.TOOL_SERVER_STARTS.format(name=name))
    if card.needs_sign_in:
        card = await _sign_in(session, name)
    if not card.error:
        await _offer_servers(session, [*await _offered_servers(session), name])
        session.screen.note(strings.TOOL_SERVER_ADDED.format(name=name))


async def _sign_in(session: Session, name: str) -> ServerCard:
    """Signs in by a browser, which comes back to an address of this program."""
    async with listen_for_code() as callback:
        session.screen.note(strings.TOOL_SIGN_IN.format(name=name))
        session.screen.show(Text(one_line(await session.chat.start_sign_in(name, callback.redirect_uri), 4000)))
        values = await session.wait_for(callback.wait(), strings.WAITING_FOR_SIGN_IN)
    if "code" not in values:
        raise RequestError(strings.TOOL_SIGN_IN_REFUSED.format(name=name))
    card = await session.chat.finish_sign_in(values["state"], values["code"], values.get("iss"))
    session.screen.note(strings.TOOL_SIGNED_IN.format(name=name))
    return card


async def _attach_resource(session: Session, words: list[str]) -> None:
    """Without a name, shows what the server has."""
    if not words:
        raise RequestError(strings.TOOL_ATTACH_USAGE)
    server, name, *values = words + [""] * (2 - len(words))
    listed = await session.wait_for(session.chat.tool_resources(server), strings.WAITING_FOR_TOOLS)
    if not name:
        for one in listed:
            usage = " ".join(f"{argument}=…" for argument in one.arguments)
            text = one_line(f"{usage} {one.title or one.description}", 120)
            session.screen.show(Text.assemble((one_line(one.name), "call"), f" {text}"))
        if not listed:
            session.screen.note(strings.TOOL_NO_RESOURCES.format(name=server))
        return
    pairs = [value.partition("=") for value in values]
    arguments = {key: value for key, _, value in pairs}
    reading = session.chat.read_tool_resource(server, name, arguments)
    data = await session.wait_for(reading, strings.WAITING_FOR_TOOLS)
    await attach_bytes(session, data, name.rstrip("/").rpartition("/")[2] or name)


async def _forget_rules(session: Session, words: list[str]) -> None:
    """Without a name, shows what the user decided for the future."""
    if not words:
        here = session.cursor.conversation_id
        rules = await session.chat.tool_rules()
        for one in rules:
            places = (strings.TOOL_RULE_HERE, strings.TOOL_RULE_ELSEWHERE)
            place = places[one.conversation_id != here] if one.conversation_id else ""
            session.screen.show(Text(strings.TOOL_RULE.format(name=one_line(one.name), rule=one.rule, place=place)))
        session.screen.note(strings.TOOL_RULES_FORGET if rules else strings.TOOL_RULES_NONE)
        return
    count = await session.chat.forget_tool_rules(None if words[0] == "all" else words[0])
    if not count:
        raise RequestError(strings.TOOL_RULE_UNKNOWN.format(name=words[0]))
    session.screen.note(strings.TOOL_RULES_FORGOTTEN.format(rules=format_count(count, strings.TOOL_RULES)))


async def _check_support(session: Session) -> None:
    card = await session.wait_for(session.chat.wait_until_ready(), strings.WAITING_FOR_MODEL)
    if not card.takes_tools:
        raise RequestError(strings.TOOLS_UNSUPPORTED)


async def _offered_servers(session: Session) -> list[str]:
    return list((await session.cursor.settings()).parameters.get("tool_servers") or ())


async def _offer_servers(session: Session, names: Iterable[str]) -> None:
    await session.cursor.set_parameters(tool_servers=list(dict.fromkeys(names)) or None)


async def _show_tools(session: Session) -> None:
    cards = await session.wait_for(session.chat.tool_servers(), strings.WAITING_FOR_TOOLS)
    offered_servers = await _offered_servers(session)
    for card in cards:
        is_offered = card.name in offered_servers
        _show_server(session, card, is_offered)
    if cards:
        session.screen.note(strings.TOOLS_ON_OFF)
    offered = (await session.cursor.settings()).parameters.get("tools") or ()
    for one in offered:
        function = one.get("function", one)
        description = one_line(str(function.get("description") or ""))
        session.screen.show(Text.assemble((str(function["name"]), "call"), f" {description}"))
    if offered:
        session.screen.note(strings.TOOLS_OFFERED.format(tools=format_count(len(offered), strings.TOOLS)))
    elif not cards:
        session.screen.note(strings.NO_TOOLS)


def _show_server(session: Session, card: ServerCard, is_offered: bool) -> None:
    text = strings.TOOL_SERVER_ERROR if card.error else strings.TOOL_SERVER
    count = format_count(len(card.tools), strings.TOOLS)
    mark = "●" if is_offered else "○"
    line = text.format(mark=mark, name=card.name, transport=card.transport, tools=count, error=one_line(card.error))
    session.screen.show(Text(line, style="error" if card.error else ""))
    for one in card.tools if is_offered else ():
        session.screen.show(Text.assemble("  ", (one_line(one.name), "call"), f" {one_line(one.description, 80)}"))
    for notice in card.notices:
        session.screen.note(one_line(notice))


def _read_tools(path: Path) -> list[Any]:
    check_file(path)
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
