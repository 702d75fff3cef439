"""Commands for conversations: new, open, list, search, title, delete."""

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
_PAGE_SIZE = 20


async def _titles(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
    return [
        ArgumentChoice(one_line(one.title) or one.id, format_time(one.updated_at), replaces_all=True)
        for one in await list_conversations(session.chat)
    ]


@commands.command("new", "begin a new conversation, with the same system prompt and parameters", "", ("clear", "reset"))
async def new(session: Session, arguments: str) -> None:
    previous_id = session.cursor.conversation_id
    await session.cursor.start_new()
    session.attachments.clear()
    session.screen.note("A new conversation. The one before is kept: /open finds it.")
    if previous_id is not None:
        await session.chat.clear_cache(previous_id)  # its KV cache can be freed


@commands.command(
    "open", "go on with a conversation, found by its title, its words or its number", "[WORDS]", (), _titles
)
async def open_(session: Session, arguments: str) -> None:
    conversation_id = await _choose(session, arguments.strip())
    if conversation_id is not None:
        await session.open(conversation_id)


@commands.command("list", "the newest conversations, or those with these words in their title", "[WORDS]", ("ls",))
async def list_(session: Session, arguments: str) -> None:
    page = await session.chat.conversations(limit=_PAGE_SIZE, title=arguments.strip())
    _show_list(session, page)
    if len(page) == _PAGE_SIZE:
        session.screen.note("There may be more: /list WORDS, /search WORDS.")


@commands.command("search", "find what was said, in all conversations", "WORDS", ("find",))
async def search(session: Session, arguments: str) -> None:
    if not arguments.strip():
        raise RequestError("Write what to look for: /search WORDS.")
    hits = await session.chat.search(arguments.strip())
    session.listed_ids = list(dict.fromkeys(hit.conversation_id for hit in hits))
    grid = _grid()
    for hit in hits:
        number = session.listed_ids.index(hit.conversation_id) + 1
        grid.add_row(f"{number}", one_line(hit.title, 40), f"{hit.role}: {one_line(hit.snippet)}")
    session.screen.show(grid if hits else Text("Nothing was found.", style="note"))
    if hits:
        session.screen.note("/open NUMBER opens one.")


@commands.command("title", "show or set the conversation's title", "[TEXT]")
async def title(session: Session, arguments: str) -> None:
    if arguments.strip():
        conversation = await session.cursor.ensure_conversation()
        await session.chat.update_conversation(conversation.id, title=arguments.strip())
    current = await session.cursor.conversation()
    shown = one_line(current.title) if current else ""
    session.screen.note(f"The title is {shown!r}." if shown else "There is no title yet: the first message makes one.")


@commands.command("delete", "put the conversation into the bin; `palaver undelete` brings it back")
async def delete(session: Session, arguments: str) -> None:
    conversation = await session.cursor.conversation()
    if conversation is None:
        raise RequestError("There is no conversation to delete yet.")
    await session.cursor.start_new()
    await session.chat.delete_conversation(conversation.id)
    session.screen.note(f"Deleted. `palaver undelete {conversation.id}` brings it back.")


async def _choose(session: Session, query: str) -> str | None:
    """The conversation that matches the query; of several, the user picks one."""
    if query.isdigit() and 0 < int(query) <= len(session.listed_ids):
        return session.listed_ids[int(query) - 1]
    matches = await _matches(session, query)
    if len(matches) == 1 and query:
        return matches[0].id
    if not matches:
        raise RequestError(f"No conversation has {query!r}: /list shows the newest." if query else "There is none yet.")
    _show_list(session, matches[:_PAGE_SIZE])
    try:
        number = await session.lines.ask("Which number? (Enter: none)")
    except EOFError:
        return None
    return await _choose(session, number.strip()) if number.strip() else None


async def _matches(session: Session, query: str) -> Sequence[Conversation]:
    """Conversations by title, then by a prefix of the id, then by full-text search."""
    by_title = await session.chat.conversations(limit=_PAGE_SIZE, title=query)
    exact = [one for one in by_title if one.title == query]
    if by_title or not query:
        return exact if len(exact) == 1 else by_title
    try:
        return [await find_conversation(session.chat, query)]
    except NotFound:
        hits = await session.chat.search(query)
        ids = list(dict.fromkeys(hit.conversation_id for hit in hits))
        return [await session.chat.conversation(id) for id in ids]


def _show_list(session: Session, page: Sequence[Conversation]) -> None:
    """Lists conversations with the numbers that /open accepts."""
    session.listed_ids = [one.id for one in page]
    grid = _grid()
    for number, one in enumerate(page, 1):
        here = "*" if one.id == session.cursor.conversation_id else ""
        grid.add_row(f"{number}{here}", one_line(one.title, 60) or "(no title)", format_time(one.updated_at))
    session.screen.show(grid if page else Text("There is no conversation.", style="note"))


def format_time(moment: datetime) -> str:
    """The time in the local time zone."""
    return f"{moment.astimezone():%Y-%m-%d %H:%M}"


def _grid() -> Grid:
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right")
    return grid
