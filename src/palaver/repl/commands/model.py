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
from palaver.repl import strings
from palaver.repl.command_table import ArgumentChoice, CommandGroup
from palaver.repl.commands.parameters import set_number
from palaver.repl.status import context_line, model_status, ready_lines, thinking_summary
from palaver.repl.text import format_count, format_messages, format_tokens, format_value, one_line
from palaver.sampling import NUMBERS
from palaver.store import Conversation

if TYPE_CHECKING:
    from palaver.repl.session import Session

commands = CommandGroup(strings.GROUP_MODEL)
_PAGE_SIZE = 40


async def _models(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
    return [ArgumentChoice(name, replaces_all=True) for name in await session.chat.models()]


@commands.command("model", choices=_models)
async def model(session: Session, arguments: str) -> None:
    if arguments.strip():
        await session.chat.load_model(arguments.strip())
        card = await session.wait_for(session.chat.wait_until_ready(), strings.LOADING.format(model=arguments.strip()))
        if card.note:  # it could not be loaded: the previous model stays
            raise ModelError(card.note)
        session.screen.show(*ready_lines(card))
        return
    card = await session.chat.model()
    lines = ready_lines(card) or [Text(model_status(card), style="note")]
    available = ", ".join(await session.chat.models())
    session.screen.show(*lines)
    session.screen.note(strings.AVAILABLE_MODELS.format(names=available) if available else strings.LOAD_BY_NAME)


@commands.command("context")
async def context(session: Session, arguments: str) -> None:
    if session.cursor.conversation_id is None:
        card = await session.chat.model()
        session.screen.note(strings.CONTEXT_EMPTY.format(limit=f"{card.context_length:,}"))
        return
    message_id = (await session.cursor.position()).message_id
    usage = session.chat.context_usage(session.cursor.conversation_id, message_id)
    session.screen.show(context_line(await session.wait_for(usage, strings.COUNTING)))


@commands.command("status")
async def status(session: Session, arguments: str) -> None:
    card = await session.chat.model()
    conversation = await session.cursor.conversation()
    settings = await session.cursor.settings()
    path = await session.cursor.path()
    cursor = await session.cursor.position()
    rows = {
        strings.STATUS_MODEL: model_status(card),
        strings.STATUS_CONTEXT: format_tokens(card.context_length) if card.context_length else "",
        strings.STATUS_DEVICE: f"{card.device} {card.dtype}".strip(),
        strings.STATUS_REUSE: card.reuse,
        strings.STATUS_EXACTNESS: card.exactness,
        strings.STATUS_STEPS: card.steps,
        strings.STATUS_LACKS: "; ".join(f"{capability}: {why}" for capability, why in card.lacks.items()),
        strings.STATUS_THINKING: thinking_summary(card) if card.state is ModelState.READY else "",
        strings.STATUS_CONVERSATION: _describe_conversation(conversation),
        strings.STATUS_BRANCH: _describe_branch(len(path), cursor.can_undo, cursor.can_redo),
        strings.STATUS_SYSTEM: one_line(settings.system, 60),
        strings.STATUS_SET: ", ".join(
            f"{name}={one_line(format_value(value), 30)}" for name, value in settings.parameters.items()
        ),
        strings.STATUS_ATTACHED: format_count(len(session.attachments), strings.FILES) if session.attachments else "",
        strings.STATUS_THOUGHTS: session.thinking_display,
    }
    grid = Grid.grid(padding=(0, 2, 0, 0))
    for name, value in rows.items():
        if value:
            grid.add_row(Text(name, style="name"), Text(value))
    session.screen.show(grid)


def _describe_conversation(conversation: Conversation | None) -> str:
    if conversation is None:
        return strings.STATUS_NEW
    return strings.STATUS_TITLE.format(title=one_line(conversation.title) or strings.NO_TITLE, id=conversation.id)


def _describe_branch(messages: int, can_undo: bool, can_redo: bool) -> str:
    ways = [way for way, can in (("/undo", can_undo), ("/redo", can_redo)) if can]
    count = format_messages(messages)
    return strings.STATUS_WAYS.format(messages=count, ways=strings.AND.join(ways)) if ways else count


@commands.command("tokens")
async def tokens(session: Session, arguments: str) -> None:
    """The tokens of the last reply. With a diffusion model and a number: how many tokens its replies have."""
    if arguments.strip() and (await session.chat.model()).block_length is not None:
        await set_number(session, NUMBERS["max_tokens"], arguments.strip())
        return
    reply = await session.cursor.last_message(Role.ASSISTANT)
    if reply is None:
        raise RequestError(strings.NO_REPLY_YET)
    found = await session.wait_for(session.chat.tokens(reply.id), strings.READING_TOKENS)
    if not found:
        raise RequestError(strings.NO_TOKENS)
    start = int(arguments) if arguments.strip().isdigit() else 1
    if not 0 < start <= len(found):
        raise BadParameter(strings.FIRST_NUMBER, start, strings.NUMBER_RANGE.format(maximum=f"{len(found):,}"))
    shown = list(enumerate(found, 1))[start - 1 :][:_PAGE_SIZE]
    grid = Grid.grid(padding=(0, 2, 0, 0))
    for justify in ("right", "left", "right", "right", "left"):  # number, token, log-probability, share, what else
        grid.add_column(justify=justify)
    for number, token in shown:
        grid.add_row(f"{number}", *_cells(token))
    session.screen.show(grid)
    if shown and shown[-1][0] < len(found):
        session.screen.note(strings.MORE_TOKENS.format(count=f"{len(found):,}", next=shown[-1][0] + 1))


def _cells(token: ReplyToken) -> list[Text]:
    others = [one for one in token.alternatives if one.token_id != token.token_id][:3]
    alternatives = "  ".join(f"{_quoted(one.text)} {_share(one.logprob)}" for one in others)
    if token.logprob is None:
        return [Text(_quoted(token.text)), Text(strings.GIVEN_TOKEN, style="note"), Text(), Text()]
    return [
        Text(_quoted(token.text), style=_style(token.logprob)),
        Text(f"{round(token.logprob, 2) + 0.0:.2f}"),
        Text(_share(token.logprob)),
        Text(alternatives, style="note"),
    ]


def format_token(token: ReplyToken) -> Text:
    """A token and how likely it was."""
    if token.logprob is None:
        return Text.assemble(_quoted(token.text), (f" {strings.GIVEN_TOKEN}", "note"))
    return Text.assemble((_quoted(token.text), _style(token.logprob)), (f" {_share(token.logprob)}", "note"))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _share(logprob: float) -> str:
    return f"{math.exp(min(0.0, logprob)):.1%}"


def _style(logprob: float) -> str:
    share = math.exp(min(0.0, logprob))
    return "green" if share > 0.9 else "none" if share > 0.5 else "yellow" if share > 0.1 else "red"
