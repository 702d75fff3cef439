"""Commands for conversations: new, open, list, search, title, delete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from rich.table import Table as Grid

from palaver.errors import RequestError
from palaver.repl import strings
from palaver.repl.command_table import ArgumentChoice, CommandGroup
from palaver.repl.cursor import find_conversation, list_conversations
from palaver.repl.text import one_line
from palaver.store import Conversation, NotFound

if TYPE_CHECKING:
    from palaver.repl.session import Session

commands = CommandGroup(strings.GROUP_CONVERSATIONS)
_PAGE_SIZE = 20


async def _titles(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
    return [
        ArgumentChoice(one_line(one.title) or one.id, format_time(one.updated_at), replaces_all=True)
        for one in await list_conversations(session.chat)
    ]


@commands.command("new", ("clear", "reset"))
async def new(session: Session, arguments: str) -> None:
    previous_id = session.cursor.conversation_id
    was_deleted = await session.cursor.is_deleted()
    await session.cursor.start_new()
    session.attachments.clear()
    if previous_id is None:
        session.screen.note(strings.NEW_EMPTY_CONVERSATION)
    elif was_deleted:
        session.screen.note(strings.NEW_AFTER_DELETED)
    else:
        session.screen.note(strings.NEW_CONVERSATION)
        await session.chat.clear_cache(previous_id)  # its KV cache can be freed


@commands.command("open", choices=_titles)
async def open_(session: Session, arguments: str) -> None:
    conversation_id = await _choose(session, arguments.strip())
    if conversation_id is not None:
        await session.open(conversation_id)


@commands.command("list", ("ls",))
async def list_(session: Session, arguments: str) -> None:
    words = arguments.strip()
    page = await session.chat.conversations(limit=_PAGE_SIZE, title=words)
    if not page:
        session.screen.note(
            strings.NO_MATCHING_CONVERSATIONS.format(words=words) if words else strings.NO_CONVERSATIONS
        )
        return
    _show_list(session, page)
    session.screen.note(strings.OPEN_NUMBER)
    if len(page) == _PAGE_SIZE:
        session.screen.note(strings.MORE_CONVERSATIONS.format(count=_PAGE_SIZE))


@commands.command("search", ("find",))
async def search(session: Session, arguments: str) -> None:
    if not arguments.strip():
        raise RequestError(strings.SEARCH_USAGE)
    hits = await session.chat.search(arguments.strip())
    session.listed_ids = list(dict.fromkeys(hit.conversation_id for hit in hits))
    grid = _grid()
    for hit in hits:
        number = session.listed_ids.index(hit.conversation_id) + 1
        grid.add_row(
            f"{number}",
            one_line(hit.title, 40),
            (strings.SEARCH_THOUGHT if hit.in_thought else strings.SEARCH_HIT).format(
                role=strings.ROLES[hit.role], snippet=one_line(hit.snippet)
            ),
        )
    if not hits:
        session.screen.note(strings.SEARCH_NOTHING.format(words=arguments.strip()))
        return
    session.screen.show(grid)
    session.screen.note(strings.OPEN_NUMBER)


@commands.command("title")
async def title(session: Session, arguments: str) -> None:
    if typed := _unquote(arguments.strip()):
        conversation = await session.cursor.ensure_conversation()
        await session.chat.update_conversation(conversation.id, title=typed)
    current = await session.cursor.conversation()
    shown = one_line(current.title) if current else ""
    session.screen.note(strings.TITLE.format(title=shown) if shown else strings.NO_TITLE_YET)


def _unquote(text: str) -> str:
    """The text without one pair of quotes around all of it. Quotes within a text are part of it."""
    for quote in "\"'":
        if len(text) > 1 and text.startswith(quote) and text.endswith(quote) and text.count(quote) == 2:
            return text[1:-1].strip()
    return text


@commands.command("delete")
async def delete(session: Session, arguments: str) -> None:
    conversation = await session.cursor.conversation()
    if conversation is None:
        raise RequestError(strings.NOTHING_TO_DELETE)
    await session.cursor.start_new()
    await session.chat.delete_conversation(conversation.id)
    session.screen.note(strings.DELETED.format(id=conversation.id))


async def _choose(session: Session, query: str) -> str | None:
    """The conversation that matches the query; of several, the user picks one."""
    if query.isdigit() and 0 < int(query) <= len(session.listed_ids):
        return session.listed_ids[int(query) - 1]
    matches = await _matches(session, query)
    if len(matches) == 1 and query:
        return matches[0].id
    if not matches:
        raise RequestError(strings.OPEN_NOTHING.format(words=query) if query else strings.NO_CONVERSATIONS)
    _show_list(session, matches[:_PAGE_SIZE])
    try:
        number = await session.lines.ask(strings.OPEN_QUESTION)
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
        grid.add_row(f"{number}{here}", one_line(one.title, 60) or strings.NO_TITLE, format_time(one.updated_at))
    session.screen.show(grid)


def format_time(moment: datetime) -> str:
    """The time in the local time zone."""
    return f"{moment.astimezone():%Y-%m-%d %H:%M}"


def _grid() -> Grid:
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right")
    return grid
