"""Commands for the current branch: retry, continue, undo, edit, branch, switch, history."""

from __future__ import annotations

import asyncio
import os
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table as Grid
from rich.text import Text

from palaver.errors import BadParameter, NothingToContinue, RequestError
from palaver.messages import Role, Thinking, ToolCall, ToolResult
from palaver.messages import Text as TextPart
from palaver.repl import strings
from palaver.repl.command_table import ArgumentChoice, CommandGroup, escape_message, fixed_choices
from palaver.repl.input import TypedLine
from palaver.repl.markdown import render_markdown
from palaver.repl.reply_view import format_call, render_thinking
from palaver.repl.settings import ThinkingDisplay
from palaver.repl.signals import ignore_key_signals
from palaver.repl.status import fills_context
from palaver.repl.text import format_blob, format_messages, format_seconds, format_tokens, one_line, sanitize
from palaver.store import Blob, ReplyStatus, StoredMessage, TreeNode

if TYPE_CHECKING:
    from palaver.repl.session import Session

commands = CommandGroup(strings.GROUP_BRANCHES)
_STATUS_NOTES = {
    ReplyStatus.STOPPED: strings.STOPPED,
    ReplyStatus.LENGTH: strings.CUT,
    ReplyStatus.INTERRUPTED: strings.INTERRUPTED_REPLY,
    ReplyStatus.FAILED: strings.FAILED_REPLY,
    ReplyStatus.RUNNING: strings.RUNNING,
}


@commands.command("retry", ("regen",))
async def retry(session: Session, arguments: str) -> None:
    path = await session.cursor.path()
    message = next((one for one in reversed(path) if one.role in (Role.USER, Role.TOOL)), None)
    if message is None:
        raise NothingToContinue(strings.NOTHING_TO_RETRY)
    seed = (await session.cursor.settings()).parameters.get("seed")
    if seed is not None:
        session.screen.note(strings.SEED_IS_SET.format(seed=seed))
    await session.generate_reply(message.id)


@commands.command("continue", ("cont",))
async def continue_(session: Session, arguments: str) -> None:
    path = await session.cursor.path()
    if not path or path[-1].role is not Role.ASSISTANT:
        raise NothingToContinue(strings.NOTHING_TO_CONTINUE)
    reply = path[-1]
    if await fills_context(session.chat, reply.reply):
        raise NothingToContinue(strings.CONTEXT_FULL)
    last_event = await _last_event(session, reply)
    is_shown = session.screen.is_live or await session.chat.tool_round(reply.id) is None
    with session.deferred_interrupts():
        continued = await session.wait_for(session.chat.continue_reply(reply.id), strings.WAITING_FOR_MODEL)
        await session.cursor.move(continued.id)
        await session.follow(continued, last_event if continued.id == reply.id else 0)
    await session.follow_tools(continued, is_shown)


async def _last_event(session: Session, reply: StoredMessage) -> int:
    """The number of the last event of the reply: everything up to it was shown before."""
    number = 0
    if reply.reply is not None:
        async with session.chat.events(reply.id) as entries:
            async for entry in entries:
                number = entry.number
    return number


@commands.command("undo")
async def undo(session: Session, arguments: str) -> None:
    if session.cursor.conversation_id is None:
        raise RequestError(strings.NOTHING_TO_UNDO)
    await session.cursor.undo()
    await _show_position(session, strings.UNDONE)


@commands.command("redo")
async def redo(session: Session, arguments: str) -> None:
    if session.cursor.conversation_id is None:
        raise RequestError(strings.NOTHING_TO_REDO)
    await session.cursor.redo()
    await _show_position(session, strings.REDONE)


@commands.command("edit", choices=fixed_choices("reply", "inline"))
async def edit(session: Session, arguments: str) -> None:
    words = arguments.split()
    message = await _find_message(session, [one for one in words if one != "inline"])
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if "inline" in words or not editor or not session.lines.is_interactive:
        session.initial_line = TypedLine(escape_message(message.text), message.id)
        return
    with session.lines.released(), ignore_key_signals():
        text = await edit_text(editor, message.text)
    if text == message.text or not text.strip():
        session.screen.note(strings.NOT_CHANGED)
        return
    await session.edit_message(message.id, text)
    if message.role is Role.ASSISTANT:
        session.screen.note(strings.REPLY_EDITED)


async def _find_message(session: Session, words: Sequence[str]) -> StoredMessage:
    path = await session.cursor.path()
    if not words:
        found = next((one for one in reversed(path) if one.role is Role.USER), None)
    elif words[0] == "reply":
        found = next((one for one in reversed(path) if one.role is Role.ASSISTANT), None)
    else:
        found = path[_parse_number(words[0], len(path)) - 1]
    if found is None:
        raise RequestError(strings.NOTHING_TO_EDIT)
    return found


async def edit_text(editor: str, text: str) -> str:
    """The text after editing; the unchanged text if the editor exits with an error. Raises RequestError if it can't be
    started or leaves no text."""
    with tempfile.TemporaryDirectory(prefix="palaver-") as folder:
        path = Path(folder) / "message.md"
        path.write_text(text, encoding="utf-8")
        try:
            process = await asyncio.create_subprocess_exec(*shlex.split(editor), str(path))
        except (OSError, ValueError) as error:
            raise RequestError(strings.EDITOR_FAILED.format(editor=editor, reason=error)) from None
        if await process.wait() != 0:
            return text
        try:
            return path.read_text(encoding="utf-8").removesuffix("\n")
        except (OSError, UnicodeDecodeError):
            raise RequestError(strings.EDITED_TEXT_UNREADABLE.format(editor=editor)) from None


async def _numbers(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
    path = await session.cursor.path()
    return [ArgumentChoice(str(number), _preview(one)) for number, one in enumerate(path, 1)]


@commands.command("branch", choices=_numbers)
async def branch(session: Session, arguments: str) -> None:
    path = await session.cursor.path()
    if not path:
        raise RequestError(strings.NOTHING_TO_BRANCH)
    if arguments.strip():
        to: str | None = path[_parse_number(arguments.strip(), len(path)) - 1].id
    else:
        last = max((place for place, one in enumerate(path) if one.role is Role.USER), default=0)
        to = path[last - 1].id if last else None
    await session.cursor.move(to)
    await _show_position(session, strings.BRANCHED)


async def _leaves(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
    leaves = await _branch_ends(session)
    return [ArgumentChoice(str(number), _preview(leaf)) for number, leaf in enumerate(leaves, 1)]


@commands.command("branches", ("tree",))
async def branches(session: Session, arguments: str) -> None:
    leaves = await _branch_ends(session)
    if not leaves:
        raise RequestError(strings.NO_BRANCHES)
    here = {one.id for one in await session.cursor.path()}
    grid = Grid.grid(padding=(0, 2, 0, 0))
    for number, leaf in enumerate(leaves, 1):
        path = await session.chat.path(leaf.id)
        question = next((one for one in reversed(path) if one.role is Role.USER), leaf)
        mark = "*" if leaf.id in here else ""
        grid.add_row(
            f"{number}{mark}", format_messages(len(path)), one_line(question.text, 40), one_line(leaf.text, 40)
        )
    session.screen.show(grid)
    session.screen.note(strings.SWITCH_TO_BRANCH)


@commands.command("switch", choices=_leaves)
async def switch(session: Session, arguments: str) -> None:
    target = arguments.strip()
    if target in ("next", "prev"):
        to = await _sibling(session, 1 if target == "next" else -1)
    else:
        leaves = await _branch_ends(session)
        to = leaves[_parse_number(target, len(leaves), strings.BRANCH_NUMBER) - 1].id
    await session.cursor.move(to)
    await show_end(session)


async def _sibling(session: Session, step: int) -> str:
    """The leaf behind the next (or previous) sibling of the last message that has siblings."""
    for one in reversed(await session.cursor.path()):
        siblings = [sibling.id for sibling in await session.chat.siblings(one.id)]
        if len(siblings) > 1:
            start = siblings[(siblings.index(one.id) + step) % len(siblings)]
            return await session.chat.newest_leaf(one.conversation_id, start) or start
    raise RequestError(strings.ONLY_BRANCH)


@commands.command("history", ("log",))
async def history(session: Session, arguments: str) -> None:
    path = await session.cursor.path()
    system = (await session.cursor.settings()).system
    count = _parse_number(arguments.strip(), len(path)) if arguments.strip() else len(path)
    if system and count == len(path):
        session.screen.show(Text(strings.SYSTEM_HEAD, style="name"), Text(sanitize(system)), Text())
    if not path:
        session.screen.note(strings.EMPTY_CONVERSATION)
        return
    await _show_messages(session, path, count, with_thoughts=session.thinking_display is not ThinkingDisplay.HIDDEN)


async def show_end(session: Session, without_last: bool = False) -> None:
    """Shows the title and the last exchange of the branch."""
    path = await session.cursor.path()
    conversation = await session.cursor.conversation()
    if conversation is not None:
        title = one_line(conversation.title) or conversation.id
        session.screen.show(
            Text.assemble(
                (title, "name"), (strings.CONVERSATION_HEAD.format(messages=format_messages(len(path))), "note")
            )
        )
    if without_last:
        path = path[:-1]
    last_user = max((place for place, one in enumerate(path) if one.role is Role.USER), default=0)
    await _show_messages(session, path, len(path) - last_user)


async def _show_messages(
    session: Session, path: Sequence[StoredMessage], count: int, with_thoughts: bool = False
) -> None:
    if not path:
        return
    sibling_counts = _sibling_counts(await session.chat.nodes(path[0].conversation_id))
    for number, one in list(enumerate(path, 1))[-count:] if count else ():
        siblings = sibling_counts[one.parent_id]
        is_full = await fills_context(session.chat, one.reply)
        session.screen.show(*render_message(one, number, siblings, with_thoughts, is_full), Text())


def render_message(
    stored: StoredMessage, number: int, siblings: int = 1, with_thoughts: bool = False, is_full: bool = False
) -> list[RenderableType]:
    """A stored message. Its thinking is one line, or that line and the text. `is_full`: it fills the context."""
    versions = strings.VERSIONS.format(count=siblings) if siblings > 1 else ""
    head = strings.MESSAGE_HEAD.format(number=number, role=strings.ROLES[stored.role])
    shown: list[RenderableType] = [Text.assemble((head, "name"), (versions, "note"))]
    if stored.thinking:
        shown.append(Text(_thinking_line(stored), style="thought"))
    if with_thoughts:
        shown += render_thinking(part.text for part in stored.parts if isinstance(part, Thinking))
    for part in stored.parts:
        match part:
            case TextPart(text):
                shown += render_markdown(text) if stored.role is Role.ASSISTANT else [Text(sanitize(text))]
            case ToolCall(_, name, arguments):
                shown += format_call(name, arguments)
            case ToolResult(_, content, name):
                shown.append(Text(strings.TOOL_RESULT.format(name=sanitize(name), content=sanitize(content))))
            case Blob():
                shown.append(Text(strings.BLOB.format(about=format_blob(part)), style="note"))
            case Thinking():
                pass
    if stored.reply is not None and stored.reply.status in _STATUS_NOTES:
        note = strings.CONTEXT_FULL if is_full else _STATUS_NOTES[stored.reply.status]
        shown.append(Text(note, style="note"))
    return shown


def _thinking_line(stored: StoredMessage) -> str:
    reply = stored.reply
    seconds = reply.timings.get("thinking") if reply else None
    head = strings.THOUGHT_FOR.format(time=format_seconds(seconds)) if seconds else strings.THOUGHT
    return f"{head} · {format_tokens(reply.usage.thinking_tokens)}" if reply and reply.usage else head


async def _branch_ends(session: Session) -> list[StoredMessage]:
    if session.cursor.conversation_id is None:
        return []
    nodes = await session.chat.nodes(session.cursor.conversation_id)
    parents = {node.parent_id for node in nodes}
    return [await session.chat.message(node.id) for node in nodes if node.id not in parents]


def _sibling_counts(nodes: Iterable[TreeNode]) -> Counter[str | None]:
    """The number of children of each message."""
    return Counter(node.parent_id for node in nodes)


async def _show_position(session: Session, verb: str) -> None:
    path = await session.cursor.path()
    if path:
        session.screen.note(strings.NOW_AT.format(verb=verb, preview=_preview(path[-1])))
    else:
        session.screen.note(strings.NOW_AT_START.format(verb=verb))


def _preview(stored: StoredMessage) -> str:
    return one_line(stored.text, 60) or one_line(stored.thinking, 60) or "…"


def _parse_number(text: str, maximum: int, name: str = strings.MESSAGE_NUMBER) -> int:
    if not text.isdigit() or not 0 < int(text) <= maximum:
        if not maximum:
            raise RequestError(strings.EMPTY_CONVERSATION)
        raise BadParameter(name, text, strings.NUMBER_RANGE.format(maximum=f"{maximum:,}"))
    return int(text)
