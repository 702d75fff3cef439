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
from palaver.repl.command_table import ArgumentChoice, CommandGroup
from palaver.repl.completion import fixed_choices
from palaver.repl.input import TypedLine
from palaver.repl.markdown import render_markdown
from palaver.repl.reply_view import format_call, format_seconds, format_tokens
from palaver.repl.sanitize import one_line, sanitize
from palaver.store import Blob, ReplyStatus, StoredMessage, TreeNode

if TYPE_CHECKING:
    from palaver.repl.session import Session

commands = CommandGroup("The branch")
_STATUS_NOTES = {
    ReplyStatus.STOPPED: "stopped: /continue goes on",
    ReplyStatus.LENGTH: "length: /continue goes on",
    ReplyStatus.INTERRUPTED: "interrupted: /continue goes on",
    ReplyStatus.FAILED: "failed: /continue goes on",
    ReplyStatus.RUNNING: "running",
}
_ROLE_NAMES = {Role.USER: "you", Role.ASSISTANT: "model", Role.TOOL: "tool", Role.SYSTEM: "system"}


@commands.command("retry", "another reply to the same message; the old one is kept", "", ("regen",))
async def retry(session: Session, arguments: str) -> None:
    path = await session.cursor.path()
    message = next((one for one in reversed(path) if one.role in (Role.USER, Role.TOOL)), None)
    if message is None:
        raise NothingToContinue("There is no reply to try again.")
    seed = (await session.cursor.settings()).parameters.get("seed")
    if seed is not None:
        session.screen.note(f"The seed is set to {seed}, so the reply may be the same: /seed default draws a new one.")
    await session.generate_reply(message.id)


@commands.command("continue", "go on with the reply exactly where it stopped", "", ("cont",))
async def continue_(session: Session, arguments: str) -> None:
    path = await session.cursor.path()
    if not path or path[-1].role is not Role.ASSISTANT:
        raise NothingToContinue("There is no reply to continue.")
    reply = path[-1]
    last_event = await _last_event(session, reply)
    with session.deferred_interrupts():
        continued = await session.wait_for(session.chat.continue_reply(reply.id), "waiting for the model")
        await session.cursor.move(continued.id)
        await session.follow(continued, last_event if continued.id == reply.id else 0)


async def _last_event(session: Session, reply: StoredMessage) -> int:
    """The number of the last event of the reply: everything up to it was shown before."""
    number = 0
    if reply.reply is not None:
        async with session.chat.events(reply.id) as entries:
            async for entry in entries:
                number = entry.number
    return number


@commands.command("undo", "back to before the last exchange or move")
async def undo(session: Session, arguments: str) -> None:
    if session.cursor.conversation_id is None:
        raise RequestError("There is nothing to undo.")
    await session.cursor.undo()
    await _show_position(session, "Undone")


@commands.command("redo", "take an undo back")
async def redo(session: Session, arguments: str) -> None:
    if session.cursor.conversation_id is None:
        raise RequestError("There is nothing to redo.")
    await session.cursor.redo()
    await _show_position(session, "Redone")


@commands.command(
    "edit",
    "another wording of your last message (or of message N, or of the reply), in $EDITOR or here",
    "[N | reply] [inline]",
    (),
    fixed_choices("reply", "inline"),
)
async def edit(session: Session, arguments: str) -> None:
    words = arguments.split()
    message = await _find_message(session, [one for one in words if one != "inline"])
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if "inline" in words or not editor or not session.lines.is_interactive:
        session.initial_line = TypedLine(message.text, message.id)
        return
    text = await edit_text(editor, message.text)
    if text == message.text or not text.strip():
        session.screen.note("Nothing was changed.")
        return
    await session.edit_message(message.id, text)
    if message.role is Role.ASSISTANT:
        session.screen.note("The reply was edited, on a branch of its own. /continue goes on from it.")


async def _find_message(session: Session, words: Sequence[str]) -> StoredMessage:
    path = await session.cursor.path()
    if not words:
        found = next((one for one in reversed(path) if one.role is Role.USER), None)
    elif words[0] == "reply":
        found = next((one for one in reversed(path) if one.role is Role.ASSISTANT), None)
    else:
        found = path[_parse_number(words[0], len(path)) - 1]
    if found is None:
        raise RequestError("There is no message to edit.")
    return found


async def edit_text(editor: str, text: str) -> str:
    """The text after editing; the unchanged text if the editor exits with an error."""
    with tempfile.TemporaryDirectory(prefix="palaver-") as folder:
        path = Path(folder) / "message.md"
        path.write_text(text, encoding="utf-8")
        try:
            process = await asyncio.create_subprocess_exec(*shlex.split(editor), str(path))
        except (OSError, ValueError) as error:
            raise RequestError(f"The editor {editor!r} can't be run: {error}. /edit inline edits here.") from None
        if await process.wait() != 0:
            return text
        return path.read_text(encoding="utf-8").removesuffix("\n")


async def _numbers(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
    path = await session.cursor.path()
    return [ArgumentChoice(str(number), _preview(one)) for number, one in enumerate(path, 1)]


@commands.command(
    "branch", "go back to message N (or before your last one): the next message begins a branch", "[N]", (), _numbers
)
async def branch(session: Session, arguments: str) -> None:
    path = await session.cursor.path()
    if not path:
        raise RequestError("There is nothing to branch from yet.")
    if arguments.strip():
        to: str | None = path[_parse_number(arguments.strip(), len(path)) - 1].id
    else:
        last = max((place for place, one in enumerate(path) if one.role is Role.USER), default=0)
        to = path[last - 1].id if last else None
    await session.cursor.move(to)
    await _show_position(session, "Branching")


async def _leaves(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
    leaves = await _branch_ends(session)
    return [ArgumentChoice(str(number), _preview(leaf)) for number, leaf in enumerate(leaves, 1)]


@commands.command("branches", "the branches of the conversation")
async def branches(session: Session, arguments: str) -> None:
    leaves = await _branch_ends(session)
    if not leaves:
        raise RequestError("There are no branches yet.")
    here = {one.id for one in await session.cursor.path()}
    grid = Grid.grid(padding=(0, 2, 0, 0))
    for number, leaf in enumerate(leaves, 1):
        path = await session.chat.path(leaf.id)
        question = next((one for one in reversed(path) if one.role is Role.USER), leaf)
        mark = "*" if leaf.id in here else ""
        grid.add_row(f"{number}{mark}", f"{len(path)} messages", one_line(question.text, 40), one_line(leaf.text, 40))
    session.screen.show(grid)
    session.screen.note("/switch NUMBER goes to one.")


@commands.command(
    "switch", "go to another branch, or to another reply to the same message", "N | next | prev", (), _leaves
)
async def switch(session: Session, arguments: str) -> None:
    target = arguments.strip()
    if target in ("next", "prev"):
        to = await _sibling(session, 1 if target == "next" else -1)
    else:
        leaves = await _branch_ends(session)
        to = leaves[_parse_number(target, len(leaves)) - 1].id
    await session.cursor.move(to)
    await show_end(session)


async def _sibling(session: Session, step: int) -> str:
    """The leaf behind the next (or previous) sibling of the last message that has siblings."""
    for one in reversed(await session.cursor.path()):
        siblings = [sibling.id for sibling in await session.chat.siblings(one.id)]
        if len(siblings) > 1:
            start = siblings[(siblings.index(one.id) + step) % len(siblings)]
            return await session.chat.newest_leaf(one.conversation_id, start) or start
    raise RequestError("There is only this branch.")


@commands.command("history", "what was said on this branch", "[how many]", ("log",))
async def history(session: Session, arguments: str) -> None:
    path = await session.cursor.path()
    if not path:
        session.screen.note("Nothing was said yet.")
        return
    count = _parse_number(arguments.strip(), len(path)) if arguments.strip() else len(path)
    await _show_messages(session, path, count)


async def show_end(session: Session, without_last: bool = False) -> None:
    """Shows the title and the last exchange of the branch."""
    path = await session.cursor.path()
    conversation = await session.cursor.conversation()
    if conversation is not None:
        title = one_line(conversation.title) or conversation.id
        session.screen.show(Text.assemble((title, "name"), (f" · {len(path)} messages", "note")))
    if without_last:
        path = path[:-1]
    last_user = max((place for place, one in enumerate(path) if one.role is Role.USER), default=0)
    await _show_messages(session, path, len(path) - last_user)


async def _show_messages(session: Session, path: Sequence[StoredMessage], count: int) -> None:
    if not path:
        return
    sibling_counts = _sibling_counts(await session.chat.nodes(path[0].conversation_id))
    for number, one in list(enumerate(path, 1))[-count:] if count else ():
        siblings = sibling_counts[one.parent_id]
        session.screen.show(*render_message(one, number, siblings), Text())


def render_message(stored: StoredMessage, number: int, siblings: int = 1) -> list[RenderableType]:
    """A stored message, with its thinking summarised in one line."""
    variants = f" · one of {siblings}" if siblings > 1 else ""
    shown: list[RenderableType] = [Text.assemble((f"{number} {_ROLE_NAMES[stored.role]}", "name"), (variants, "note"))]
    if stored.thinking:
        shown.append(Text(_thinking_line(stored), style="thought"))
    for part in stored.parts:
        match part:
            case TextPart(text):
                shown += render_markdown(text) if stored.role is Role.ASSISTANT else [Text(sanitize(text))]
            case ToolCall(_, name, arguments):
                shown += format_call(name, arguments)
            case ToolResult(_, content, name):
                shown.append(Text(f"{sanitize(name)}: {sanitize(content)}"))
            case Blob(kind, media_type):
                shown.append(Text(f"[{kind}, {media_type}]", style="note"))
            case Thinking():
                pass
    if stored.reply is not None and stored.reply.status in _STATUS_NOTES:
        shown.append(Text(_STATUS_NOTES[stored.reply.status], style="note"))
    return shown


def _thinking_line(stored: StoredMessage) -> str:
    reply = stored.reply
    duration = f" for {format_seconds(reply.timings['thinking'])}" if reply and reply.timings.get("thinking") else ""
    count = f" · {format_tokens(reply.usage.thinking_tokens)}" if reply and reply.usage else ""
    return f"thought{duration}{count}"


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
    where = f"after: {_preview(path[-1])}" if path else "before the first message"
    session.screen.note(f"{verb}: you are {where}")


def _preview(stored: StoredMessage) -> str:
    return f"{_ROLE_NAMES[stored.role]}: {one_line(stored.text, 60) or '…'}"


def _parse_number(text: str, maximum: int) -> int:
    if not text.isdigit() or not 0 < int(text) <= maximum:
        raise BadParameter("number", text, f"must be from 1 to {maximum}" if maximum else "there is none")
    return int(text)
