"""Commands for comparing replies: `/compare` sends messages to several settings at once, `/choose` prefers a reply."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from rich.table import Table as Grid
from rich.text import Text

from palaver.chat.comparisons import MAX_COLUMNS, check_columns, column_name
from palaver.chat.interface import Column, ReplyToken
from palaver.errors import BadParameter, RequestError
from palaver.messages import Message
from palaver.repl import strings
from palaver.repl.command_table import ArgumentChoice, CommandGroup
from palaver.repl.commands.model import format_token
from palaver.repl.commands.parameters import full_name
from palaver.repl.comparison_view import ComparisonFollower, ComparisonView, column_width
from palaver.repl.settings import find_preset, parse_switch
from palaver.repl.status import fills_context
from palaver.repl.text import format_value, one_line, sanitize
from palaver.sampling import parse_setting
from palaver.store import Conversation, ReplyStatus
from palaver.store.comparisons import Comparison

if TYPE_CHECKING:
    from palaver.repl.session import Session

commands = CommandGroup(strings.GROUP_BRANCHES)
_OWN_SETTINGS = "default"
_MAX_TOKENS = 60
"""The tokens of a reply that are shown beside those of the others."""


@dataclass(frozen=True, slots=True)
class CompareMode:
    """Messages of this session go to these columns."""

    columns: tuple[Column, ...]
    blind: bool


async def _choices(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
    presets = [ArgumentChoice(shlex.quote(one.name), strings.COMPARE_PRESET) for one in await session.chat.presets()]
    models = [ArgumentChoice(shlex.quote(name), strings.COMPARE_MODEL) for name in await session.chat.models()]
    words = [ArgumentChoice("blind", strings.COMPARE_BLIND), ArgumentChoice("off", strings.COMPARE_STOP)]
    own = ArgumentChoice(_OWN_SETTINGS, strings.COMPARE_OWN)
    fixed = [own, ArgumentChoice("temperature="), ArgumentChoice("thinking="), ArgumentChoice("system=")]
    return [*(words if " " not in arguments else ()), *fixed, *models, *presets]


@commands.command("compare", choices=_choices)
async def compare(session: Session, arguments: str) -> None:
    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise RequestError(strings.COMPARE_QUOTES.format(reason=error)) from None
    if words == ["off"]:
        session.compare_mode = None
        session.screen.note(strings.COMPARE_OFF)
    elif words:
        blind = words[0] == "blind"
        columns = tuple([await _parse_column(session, word) for word in words[blind:]])
        if len(columns) < 2 or len(columns) > MAX_COLUMNS:
            raise RequestError(strings.COMPARE_USAGE.format(maximum=MAX_COLUMNS))
        check_columns(columns)
        session.compare_mode = CompareMode(columns, blind)
        session.screen.note(strings.COMPARE_BLIND_ON if blind else strings.COMPARE_ON)
    else:
        await _show_mode(session)


async def _show_mode(session: Session) -> None:
    mode = session.compare_mode
    if mode is None:
        session.screen.note(strings.COMPARE_USAGE.format(maximum=MAX_COLUMNS))
    else:
        columns = " · ".join(one_line(_describe(column), 40) for column in mode.columns)
        session.screen.note(strings.COMPARE_STATE.format(columns=columns))
    rows = await session.chat.tally()
    if not rows:
        return
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_row(*(Text(head, style="note") for head in strings.TALLY_HEAD))
    for row in rows:
        every = strings.TALLY_SHARE.format(chosen=row.chosen, compared=row.compared)
        blind = strings.TALLY_SHARE.format(chosen=row.blind_chosen, compared=row.blind_compared)
        grid.add_row(Text(sanitize(row.name)), every, blind)
    session.screen.show(grid)


def _describe(column: Column) -> str:
    settings = ", ".join(f"{name}={format_value(value)}" for name, value in column.parameters.items())
    return column.name or settings or _OWN_SETTINGS


async def _parse_column(session: Session, word: str) -> Column:
    """`name=value,name=value`, a model, a preset, or `default`: the settings of the conversation."""
    if "=" not in word:
        if word == _OWN_SETTINGS:
            return Column()
        if word in await session.chat.models():
            return Column({"model": word})
        preset = await find_preset(session.chat, word)
        system = {"system": preset.system} if preset.system else {}
        return Column({**preset.parameters, **system}, preset.name)
    parameters: dict[str, Any] = {}
    for setting in re.split(r",(?=\w+=)", word):
        name, _, value = setting.partition("=")
        parameters |= [_parse_value(full_name(name.strip().lower()), value)]
    return Column(parameters)


def _parse_value(name: str, value: str) -> tuple[str, Any]:
    if name == "thinking":
        if (switch := parse_switch(value)) is None:
            raise BadParameter(name, value, strings.ON_OR_OFF)
        return name, switch
    if name == "budget":
        if not value.isdigit():
            raise BadParameter(name, value, strings.WHOLE_NUMBER)
        return name, int(value)
    return (name, value) if name in ("system", "effort", "model") else parse_setting(name, value)


async def send_compared(
    session: Session, message: Message | None, parent: str | None, overrides: Mapping[str, Any]
) -> Comparison:
    """Sends a message to all columns, or replies to `parent` again."""
    mode = session.compare_mode
    assert mode is not None
    conversation = await session.cursor.ensure_conversation()
    columns = [await _turn_column(session, conversation, parent, one, overrides) for one in mode.columns]
    return await session.wait_for(
        session.chat.compare(conversation.id, parent, message, columns, blind=mode.blind, key=uuid4().hex),
        strings.WAITING_FOR_MODEL,
    )


async def show_compared(session: Session, comparison: Comparison) -> None:
    """Shows the replies to a message that was sent, and asks which is better."""
    from palaver.repl.session import Interrupted

    try:
        await decide(session, comparison)
    except Interrupted:  # the message is sent
        session.screen.note(strings.CHOOSE_LATER)


async def _turn_column(
    session: Session, conversation: Conversation, parent: str | None, column: Column, overrides: Mapping[str, Any]
) -> Column:
    """The column with the parameters of its turn. Its name does not change: choices are counted by it."""
    given = {**overrides, **column.parameters}
    parameters = await session.turn_parameters(conversation, parent, given)
    if parameters == given:
        return Column(given, column.name)
    card = await session.chat.model({**conversation.parameters, **given}.get("model") or "")
    return Column(parameters, column_name(Column(given, column.name), card.name))


async def decide(session: Session, comparison: Comparison) -> None:
    """Shows the replies and asks which is better, until there is an answer."""
    await _show_replies(session, comparison)
    while session.lines.is_interactive:
        can_continue = await _unfinished(session, comparison)
        more = strings.CHOOSE_CONTINUE if can_continue else ""
        question = strings.CHOOSE_QUESTION.format(count=len(comparison.replies), more=more)
        try:
            answer = (await session.lines.ask(question)).strip().lower()
        except EOFError:
            answer = ""
        if not answer:
            session.screen.note(strings.CHOOSE_LATER)
            return
        if answer == "t":
            await _show_tokens(session, comparison)
        elif answer == "c" and can_continue:
            for reply_id in can_continue:
                await session.wait_for(session.chat.continue_reply(reply_id), strings.WAITING_FOR_MODEL)
            await _show_replies(session, comparison)
        elif answer == "n" or (answer.isdigit() and 0 < int(answer) <= len(comparison.replies)):
            await _choose(session, comparison, None if answer == "n" else int(answer))
            return
        else:
            session.screen.note(strings.CHOOSE_HELP)


async def _choose(session: Session, comparison: Comparison, number: int | None) -> None:
    """Records the choice, and moves to the chosen branch."""
    reply_id = None if number is None else comparison.replies[number - 1].reply_id
    decided = await session.chat.choose_reply(comparison.id, reply_id)
    if comparison.blind:
        for place, one in enumerate(decided.replies, 1):
            session.screen.note(strings.REVEALED.format(number=place, name=one_line(one.name)))
    if number is None or reply_id is None:
        session.screen.note(strings.CHOSEN_NONE)
        return
    name = one_line(decided.replies[number - 1].name)
    session.screen.note(strings.CHOSEN.format(number=number, name=name))
    await session.cursor.move(await session.chat.newest_leaf(comparison.conversation_id, reply_id))
    await session.follow_tools(await session.chat.message(reply_id), is_shown=False)


@commands.command("choose")
async def choose(session: Session, arguments: str) -> None:
    """Shows the last comparison again and asks, or takes the number of a reply, or `none`."""
    id = session.cursor.conversation_id
    path = {one.id for one in await session.cursor.path()}
    found = [one for one in (await session.chat.comparisons(id) if id else ()) if one.parent_id in path]
    if not found:
        raise RequestError(strings.NOTHING_TO_CHOOSE)
    comparison, word = found[-1], arguments.strip().lower()
    if not word:
        await decide(session, comparison)
    elif word == "none":
        await _choose(session, comparison, None)
    elif word.isdigit() and 0 < int(word) <= len(comparison.replies):
        await _choose(session, comparison, int(word))
    else:
        maximum = len(comparison.replies)
        raise BadParameter(strings.REPLY_NUMBER, word, strings.NUMBER_RANGE.format(maximum=maximum))


async def _show_replies(session: Session, comparison: Comparison) -> None:
    """Side by side where the terminal is wide enough, else one after the other."""
    names = _column_names(comparison)
    reply_ids = [one.reply_id for one in comparison.replies]
    width = column_width(session.screen.width, len(names)) if session.screen.is_live else None
    if width is None:
        for name, reply_id in zip(names, reply_ids, strict=True):
            session.screen.show(Text(name, style="name"))
            with session.deferred_interrupts():
                await session.follow(await session.chat.message(reply_id))
        return
    view = ComparisonView(session.screen, names, width, session.thinking_display)
    with session.deferred_interrupts():
        endings = await ComparisonFollower(session.chat, view, session.lines, session.screen).follow(reply_ids, width)
    session.succeeded = session.succeeded and None not in endings
    session.screen.show(Text())


def _column_names(comparison: Comparison) -> list[str]:
    """The number of each reply, and its name unless that is hidden."""
    return [f"{number} {one_line(one.name)}".strip() for number, one in enumerate(comparison.replies, 1)]


async def _unfinished(session: Session, comparison: Comparison) -> list[str]:
    """The replies that can be continued."""
    replies = [await session.chat.message(one.reply_id) for one in comparison.replies]
    ended = (ReplyStatus.DONE, ReplyStatus.RUNNING)
    incomplete = [one for one in replies if one.reply and one.reply.status not in ended]
    return [one.id for one in incomplete if not await fills_context(session.chat, one.reply)]


async def _show_tokens(session: Session, comparison: Comparison) -> None:
    """The first tokens of all replies side by side, with their probabilities."""
    found: Sequence[Sequence[ReplyToken]] = [await session.chat.tokens(one.reply_id) for one in comparison.replies]
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right")
    grid.add_row("", *(Text(name, style="name") for name in _column_names(comparison)))
    for number, row in enumerate(zip_longest(*(tokens[:_MAX_TOKENS] for tokens in found)), 1):
        grid.add_row(f"{number}", *(Text() if token is None else format_token(token) for token in row))
    session.screen.show(grid)
    if any(len(tokens) > _MAX_TOKENS for tokens in found):
        session.screen.note(strings.FIRST_TOKENS.format(count=_MAX_TOKENS))
