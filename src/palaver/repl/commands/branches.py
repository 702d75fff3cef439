"""The branch that is talked on: what was said, said again, taken back, gone on with, left and returned to."""

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

_LEFT = {
    ReplyStatus.STOPPED: "stopped: /continue goes on",
    ReplyStatus.LENGTH: "length: /continue goes on",
    ReplyStatus.INTERRUPTED: "interrupted: /continue goes on",
    ReplyStatus.FAILED: "failed: /continue goes on",
    ReplyStatus.RUNNING: "running",
}


@commands.command("retry", "another reply to the same message; the old one is kept", "", ("regen",))
async def retry(session: Session, arguments: str) -> None:
    path = await session.place.path()
    asked = next((one for one in reversed(path) if one.role in (Role.USER, Role.TOOL)), None)
    if asked is None:
        raise NothingToContinue("There is no reply to try again.")
    seed = (await session.place.begins_with()).parameters.get("seed")
    if seed is not None:
        session.screen.note(f"The seed is set to {seed}, so the reply may be the same: /seed default draws a new one.")
    await session.answer(asked.id)


@commands.command("continue", "go on with the reply exactly where it stopped", "", ("cont",))
async def continue_(session: Session, arguments: str) -> None:
    path = await session.place.path()
    if not path or path[-1].role is not Role.ASSISTANT:
        raise NothingToContinue("There is no reply to continue.")
    reply = path[-1]
    known = await _events(session, reply)
    going = await session.waited(session.chat.go_on(reply.id), "waiting for the model")
    await session.place.move(going.id)
    await session.follow(going, known if going.id == reply.id else 0)


async def _events(session: Session, reply: StoredMessage) -> int:
    """How many events the reply has had: those that were seen."""
    number = 0
    if reply.reply is not None:
        async with session.chat.events(reply.id) as entries:
            async for entry in entries:
                number = entry.number
    return number


@commands.command("undo", "back to before the last exchange or move")
async def undo(session: Session, arguments: str) -> None:
    if session.place.id is None:
        raise RequestError("There is nothing to undo.")
    await session.place.undo()
    await _tell_place(session, "Undone")


@commands.command("redo", "take an undo back")
async def redo(session: Session, arguments: str) -> None:
    if session.place.id is None:
        raise RequestError("There is nothing to redo.")
    await session.place.redo()
    await _tell_place(session, "Redone")


@commands.command(
    "edit",
    "another wording of your last message (or of message N, or of the reply), in $EDITOR or here",
    "[N | reply] [inline]",
    (),
    fixed_choices("reply", "inline"),
)
async def edit(session: Session, arguments: str) -> None:
    wanted = arguments.split()
    message = await _meant(session, [one for one in wanted if one != "inline"])
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if "inline" in wanted or not editor or not session.lines.is_person:
        session.begun = TypedLine(message.text, message.id)
        return
    text = await edited(editor, message.text)
    if text == message.text or not text.strip():
        session.screen.note("Nothing was changed.")
        return
    await session.reword(message.id, text)
    if message.role is Role.ASSISTANT:
        session.screen.note("The reply was edited, on a branch of its own. /continue goes on from it.")


async def _meant(session: Session, wanted: Sequence[str]) -> StoredMessage:
    path = await session.place.path()
    if not wanted:
        found = next((one for one in reversed(path) if one.role is Role.USER), None)
    elif wanted[0] == "reply":
        found = next((one for one in reversed(path) if one.role is Role.ASSISTANT), None)
    else:
        found = path[_number(wanted[0], len(path)) - 1]
    if found is None:
        raise RequestError("There is no message to edit.")
    return found


async def edited(editor: str, text: str) -> str:
    """What the person leaves in the editor; the same text where it ends with an error."""
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
    path = await session.place.path()
    return [ArgumentChoice(str(number), _short(one)) for number, one in enumerate(path, 1)]


@commands.command(
    "branch", "go back to message N (or before your last one): the next message begins a branch", "[N]", (), _numbers
)
async def branch(session: Session, arguments: str) -> None:
    path = await session.place.path()
    if not path:
        raise RequestError("There is nothing to branch from yet.")
    if arguments.strip():
        to: str | None = path[_number(arguments.strip(), len(path)) - 1].id
    else:
        last = max((place for place, one in enumerate(path) if one.role is Role.USER), default=0)
        to = path[last - 1].id if last else None
    await session.place.move(to)
    await _tell_place(session, "Branching")


async def _leaves(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
    leaves = await _branch_ends(session)
    return [ArgumentChoice(str(number), _short(leaf)) for number, leaf in enumerate(leaves, 1)]


@commands.command("branches", "the branches of the conversation")
async def branches(session: Session, arguments: str) -> None:
    leaves = await _branch_ends(session)
    if not leaves:
        raise RequestError("There are no branches yet.")
    here = {one.id for one in await session.place.path()}
    grid = Grid.grid(padding=(0, 2, 0, 0))
    for number, leaf in enumerate(leaves, 1):
        path = await session.chat.path(leaf.id)
        asked = next((one for one in reversed(path) if one.role is Role.USER), leaf)
        mark = "*" if leaf.id in here else ""
        grid.add_row(f"{number}{mark}", f"{len(path)} messages", one_line(asked.text, 40), one_line(leaf.text, 40))
    session.screen.show(grid)
    session.screen.note("/switch NUMBER goes to one.")


@commands.command(
    "switch", "go to another branch, or to another reply to the same message", "N | next | prev", (), _leaves
)
async def switch(session: Session, arguments: str) -> None:
    wanted = arguments.strip()
    if wanted in ("next", "prev"):
        to = await _sibling(session, 1 if wanted == "next" else -1)
    else:
        leaves = await _branch_ends(session)
        to = leaves[_number(wanted, len(leaves)) - 1].id
    await session.place.move(to)
    await show_end(session)


async def _sibling(session: Session, way: int) -> str:
    """The end of the branch through the next (or previous) wording of the last message that has several."""
    for one in reversed(await session.place.path()):
        siblings = [sibling.id for sibling in await session.chat.siblings(one.id)]
        if len(siblings) > 1:
            start = siblings[(siblings.index(one.id) + way) % len(siblings)]
            return await session.chat.newest_leaf(one.conversation_id, start) or start
    raise RequestError("There is only this branch.")


@commands.command("history", "what was said on this branch", "[how many]", ("log",))
async def history(session: Session, arguments: str) -> None:
    path = await session.place.path()
    if not path:
        session.screen.note("Nothing was said yet.")
        return
    count = _number(arguments.strip(), len(path)) if arguments.strip() else len(path)
    await _show(session, path, count)


async def show_end(session: Session, without_last: bool = False) -> None:
    """The last exchange, so that a person knows where they are."""
    path = await session.place.path()
    conversation = await session.place.conversation()
    if conversation is not None:
        title = one_line(conversation.title) or conversation.id
        session.screen.show(Text.assemble((title, "name"), (f" · {len(path)} messages", "note")))
    if without_last:
        path = path[:-1]
    asked = max((place for place, one in enumerate(path) if one.role is Role.USER), default=0)
    await _show(session, path, len(path) - asked)


async def _show(session: Session, path: Sequence[StoredMessage], count: int) -> None:
    if not path:
        return
    widths = _widths(await session.chat.nodes(path[0].conversation_id))
    for number, one in list(enumerate(path, 1))[-count:] if count else ():
        siblings = widths[one.parent_id]
        session.screen.show(*message(one, number, siblings), Text())


def message(stored: StoredMessage, number: int, siblings: int = 1) -> list[RenderableType]:
    """A message of the past; its thoughts in one line."""
    several = f" · one of {siblings}" if siblings > 1 else ""
    shown: list[RenderableType] = [Text.assemble((f"{number} {_WHO[stored.role]}", "name"), (several, "note"))]
    if stored.thinking:
        shown.append(Text(_thought(stored), style="thought"))
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
    if stored.reply is not None and stored.reply.status in _LEFT:
        shown.append(Text(_LEFT[stored.reply.status], style="note"))
    return shown


_WHO = {Role.USER: "you", Role.ASSISTANT: "model", Role.TOOL: "tool", Role.SYSTEM: "system"}


def _thought(stored: StoredMessage) -> str:
    reply = stored.reply
    took = f" for {format_seconds(reply.timings['thinking'])}" if reply and reply.timings.get("thinking") else ""
    count = f" · {format_tokens(reply.usage.thinking_tokens)}" if reply and reply.usage else ""
    return f"thought{took}{count}"


async def _branch_ends(session: Session) -> list[StoredMessage]:
    if session.place.id is None:
        return []
    nodes = await session.chat.nodes(session.place.id)
    parents = {node.parent_id for node in nodes}
    return [await session.chat.message(node.id) for node in nodes if node.id not in parents]


def _widths(nodes: Iterable[TreeNode]) -> Counter[str | None]:
    """How many messages there are under each."""
    return Counter(node.parent_id for node in nodes)


async def _tell_place(session: Session, verb: str) -> None:
    path = await session.place.path()
    where = f"after: {_short(path[-1])}" if path else "before the first message"
    session.screen.note(f"{verb}: you are {where}")


def _short(stored: StoredMessage) -> str:
    return f"{_WHO[stored.role]}: {one_line(stored.text, 60) or '…'}"


def _number(text: str, most: int) -> int:
    if not text.isdigit() or not 0 < int(text) <= most:
        raise BadParameter("number", text, f"must be from 1 to {most}" if most else "there is none")
    return int(text)
