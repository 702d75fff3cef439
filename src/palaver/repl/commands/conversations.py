"""Conversations: begun, found, opened, named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from rich.table import Table as Grid
from rich.text import Text

from palaver.errors import RequestError
from palaver.repl.command_table import ArgumentChoice, CommandGroup
from palaver.repl.cursor import find_conversation, list_conversations
from palaver.repl.sanitize import one_line
from palaver.store import Conversation, NotFound

if TYPE_CHECKING:
    from palaver.repl.session import Session

commands = CommandGroup("Conversations")
_SHOWN = 20


async def _titles(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
    return [
        ArgumentChoice(one_line(one.title) or one.id, when(one.updated_at), whole=True)
        for one in await list_conversations(session.chat)
    ]


@commands.command("new", "begin a new conversation, with the same system prompt and parameters", "", ("clear", "reset"))
async def new(session: Session, arguments: str) -> None:
    before = session.place.id
    await session.place.leave()
    session.attached.clear()
    session.screen.note("A new conversation. The one before is kept: /open finds it.")
    if before is not None:
        await session.chat.forget(before)  # what was computed for it is not needed soon


@commands.command(
    "open", "go on with a conversation, found by its title, its words or its number", "[WORDS]", (), _titles
)
async def open_(session: Session, arguments: str) -> None:
    chosen = await _chosen(session, arguments.strip())
    if chosen is not None:
        await session.open(chosen)


@commands.command("list", "the newest conversations, or those with these words in their title", "[WORDS]", ("ls",))
async def list_(session: Session, arguments: str) -> None:
    page = await session.chat.conversations(limit=_SHOWN, title=arguments.strip())
    _offer(session, page)
    if len(page) == _SHOWN:
        session.screen.note("There may be more: /list WORDS, /search WORDS.")


@commands.command("search", "find what was said, in all conversations", "WORDS", ("find",))
async def search(session: Session, arguments: str) -> None:
    if not arguments.strip():
        raise RequestError("Write what to look for: /search WORDS.")
    hits = await session.chat.search(arguments.strip())
    session.offered = list(dict.fromkeys(hit.conversation_id for hit in hits))
    grid = _grid()
    for hit in hits:
        number = session.offered.index(hit.conversation_id) + 1
        grid.add_row(f"{number}", one_line(hit.title, 40), f"{hit.role}: {one_line(hit.snippet)}")
    session.screen.show(grid if hits else Text("Nothing was found.", style="note"))
    if hits:
        session.screen.note("/open NUMBER opens one.")


@commands.command("title", "show or set the conversation's title", "[TEXT]")
async def title(session: Session, arguments: str) -> None:
    if arguments.strip():
        conversation = await session.place.made()
        await session.chat.change(conversation.id, title=arguments.strip())
    conversation_now = await session.place.conversation()
    shown = one_line(conversation_now.title) if conversation_now else ""
    session.screen.note(f"The title is {shown!r}." if shown else "There is no title yet: the first message makes one.")


@commands.command("delete", "put the conversation into the bin; `palaver undelete` brings it back")
async def delete(session: Session, arguments: str) -> None:
    conversation = await session.place.conversation()
    if conversation is None:
        raise RequestError("There is no conversation to delete yet.")
    await session.place.leave()
    await session.chat.delete(conversation.id)
    session.screen.note(f"Deleted. `palaver undelete {conversation.id}` brings it back.")


async def _chosen(session: Session, wanted: str) -> str | None:
    """The conversation that is meant; where there are several, a person picks one."""
    if wanted.isdigit() and 0 < int(wanted) <= len(session.offered):
        return session.offered[int(wanted) - 1]
    matches = await _matches(session, wanted)
    if len(matches) == 1 and wanted:
        return matches[0].id
    if not matches:
        raise RequestError(
            f"No conversation has {wanted!r}: /list shows the newest." if wanted else "There is none yet."
        )
    _offer(session, matches[:_SHOWN])
    try:
        number = await session.lines.ask("Which number? (Enter: none)")
    except EOFError:
        return None
    return await _chosen(session, number.strip()) if number.strip() else None


async def _matches(session: Session, wanted: str) -> Sequence[Conversation]:
    """By title, then by the beginning of the id, then by what was said."""
    titled = await session.chat.conversations(limit=_SHOWN, title=wanted)
    exact = [one for one in titled if one.title == wanted]
    if titled or not wanted:
        return exact if len(exact) == 1 else titled
    try:
        return [await find_conversation(session.chat, wanted)]
    except NotFound:
        hits = await session.chat.search(wanted)
        ids = list(dict.fromkeys(hit.conversation_id for hit in hits))
        return [await session.chat.conversation(id) for id in ids]


def _offer(session: Session, page: Sequence[Conversation]) -> None:
    """Shows them with numbers, which /open understands."""
    session.offered = [one.id for one in page]
    grid = _grid()
    for number, one in enumerate(page, 1):
        here = "*" if one.id == session.place.id else ""
        grid.add_row(f"{number}{here}", one_line(one.title, 60) or "(no title)", when(one.updated_at))
    session.screen.show(grid if page else Text("There is no conversation.", style="note"))


def when(moment: datetime) -> str:
    """In the person's own time."""
    return f"{moment.astimezone():%Y-%m-%d %H:%M}"


def _grid() -> Grid:
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right")
    return grid
