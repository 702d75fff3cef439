"""Commands for the model: its name, the used context, the status, the tokens of a reply."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.table import Table as Grid
from rich.text import Text

from palaver.chat.interface import ModelState, ReplyToken
from palaver.errors import BadParameter, ModelError, RequestError
from palaver.messages import Role
from palaver.repl.command_table import ArgumentChoice, CommandGroup
from palaver.repl.sanitize import one_line
from palaver.repl.status import banner, context_line, model_status, thinking_summary

if TYPE_CHECKING:
    from palaver.repl.session import Session

commands = CommandGroup("The model")
_PAGE_SIZE = 40


async def _models(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
    return [ArgumentChoice(name, replaces_all=True) for name in await session.chat.models()]


@commands.command("model", "which model is talked to; with a name, load another", "[NAME]", (), _models)
async def model(session: Session, arguments: str) -> None:
    if arguments.strip():
        await session.chat.load_model(arguments.strip())
        card = await session.wait_for(session.chat.wait_until_ready(), f"loading {arguments.strip()}")
        if card.note:  # it could not be loaded: the previous model stays
            raise ModelError(card.note)
        session.screen.show(*banner(card))
        return
    card = await session.chat.model()
    session.screen.show(*banner(card))
    available = ", ".join(await session.chat.models())
    session.screen.note(f"At hand: {available}." if available else "/model NAME loads another.")


@commands.command("context", "how full the model's context is")
async def context(session: Session, arguments: str) -> None:
    if session.cursor.conversation_id is None:
        card = await session.chat.model()
        session.screen.note(f"Nothing was said yet; the context is {card.context_length:,} tokens.")
        return
    message_id = (await session.cursor.position()).message_id
    usage = session.chat.context_usage(session.cursor.conversation_id, message_id)
    session.screen.show(context_line(await session.wait_for(usage, "counting")))


@commands.command("status", "the model, the conversation, what is set, what is attached")
async def status(session: Session, arguments: str) -> None:
    card = await session.chat.model()
    conversation = await session.cursor.conversation()
    settings = await session.cursor.settings()
    path = await session.cursor.path()
    cursor = await session.cursor.position()
    rows = {
        "model": model_status(card),
        "context": f"{card.context_length:,} tokens" if card.context_length else "",
        "device": f"{card.device} {card.dtype}".strip(),
        "reuse": card.reuse,
        "bits of a reply": card.exactness,
        "steps": card.steps,
        "thinking": thinking_summary(card) if card.state is ModelState.READY else "",
        "conversation": f"{one_line(conversation.title) or '(no title)'} ({conversation.id})"
        if conversation
        else "new",
        "branch": f"{len(path)} messages{_undo_note(cursor.can_undo, cursor.can_redo)}",
        "system": one_line(settings.system, 60),
        "set": ", ".join(f"{name}={one_line(str(value), 30)}" for name, value in settings.parameters.items()),
        "attached": f"{len(session.attachments)}" if session.attachments else "",
        "thoughts": session.thinking_display,
    }
    grid = Grid.grid(padding=(0, 2, 0, 0))
    for name, value in rows.items():
        if value:
            grid.add_row(Text(name, style="name"), Text(value))
    session.screen.show(grid)


def _undo_note(can_undo: bool, can_redo: bool) -> str:
    ways = [way for way, can in (("/undo", can_undo), ("/redo", can_redo)) if can]
    return f", {' and '.join(ways)} possible" if ways else ""


@commands.command(
    "tokens", "the last reply token by token, how likely each was, and what else it nearly said", "[FROM]"
)
async def tokens(session: Session, arguments: str) -> None:
    reply = await session.cursor.last_message(Role.ASSISTANT)
    if reply is None:
        raise RequestError("There is no reply yet.")
    found = await session.wait_for(session.chat.tokens(reply.id), "reading the tokens")
    if not found:
        raise RequestError("The tokens of this reply are not known to this model.")
    start = int(arguments) if arguments.strip().isdigit() else 1
    if not 0 < start <= len(found):
        raise BadParameter("from", start, f"must be from 1 to {len(found)}")
    shown = list(enumerate(found, 1))[start - 1 :][:_PAGE_SIZE]
    grid = Grid.grid(padding=(0, 2, 0, 0))
    for justify in ("right", "left", "right", "right", "left"):  # number, token, log-probability, share, what else
        grid.add_column(justify=justify)
    for number, token in shown:
        grid.add_row(f"{number}", *_cells(token))
    session.screen.show(grid)
    if shown and shown[-1][0] < len(found):
        session.screen.note(f"{len(found):,} in all: /tokens {shown[-1][0] + 1} shows more.")


def _cells(token: ReplyToken) -> list[Text]:
    others = [one for one in token.alternatives if one.token_id != token.token_id][:3]
    alternatives = "  ".join(f"{_quoted(one.text)} {_share(one.logprob)}" for one in others)
    if token.logprob is None:
        return [Text(_quoted(token.text)), Text("given", style="note"), Text(), Text()]
    return [
        Text(_quoted(token.text), style=_style(token.logprob)),
        Text(f"{round(token.logprob, 2) + 0.0:.2f}"),
        Text(_share(token.logprob)),
        Text(alternatives, style="note"),
    ]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _share(logprob: float) -> str:
    return f"{math.exp(min(0.0, logprob)):.1%}"


def _style(logprob: float) -> str:
    share = math.exp(min(0.0, logprob))
    return "green" if share > 0.9 else "none" if share > 0.5 else "yellow" if share > 0.1 else "red"
