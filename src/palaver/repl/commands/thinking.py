"""Commands for thinking: switch, effort, budget, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from palaver.chat.interface import ModelCard
from palaver.errors import BadParameter, RequestError
from palaver.formats.facts import SwitchKind, list_values, switch_of_kind, thinking_switch
from palaver.messages import Role, Thinking
from palaver.repl import strings
from palaver.repl.command_table import ArgumentChoice, CommandGroup, fixed_choices
from palaver.repl.reply_view import render_thinking
from palaver.repl.settings import ThinkingDisplay, parse_switch
from palaver.repl.status import thinking_summary
from palaver.sampling import NUMBERS
from palaver.store import StoredMessage

if TYPE_CHECKING:
    from palaver.repl.session import Session

commands = CommandGroup(strings.GROUP_THINKING)
_DISPLAY_NOTES = {
    ThinkingDisplay.COLLAPSED: strings.THOUGHTS_COLLAPSED,
    ThinkingDisplay.EXPANDED: strings.THOUGHTS_EXPANDED,
    ThinkingDisplay.HIDDEN: strings.THOUGHTS_HIDDEN,
}
_DEFAULT_WORDS = ("default", "none", "null", "reset")


async def _choices(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
    card = await session.chat.model()
    if arguments.startswith("effort "):
        effort = switch_of_kind(card.switches, SwitchKind.EFFORT)
        return [ArgumentChoice(str(value)) for value in effort.values] if effort else []
    return [ArgumentChoice(one) for one in ("on", "off", "default", "budget", "effort")] if " " not in arguments else []


@commands.command("think", choices=_choices)
async def think(session: Session, arguments: str) -> None:
    card = await session.wait_for(session.chat.wait_until_ready(), strings.WAITING_FOR_MODEL)
    match arguments.lower().split():
        case []:
            summary = thinking_summary(card)
            await _show_thinking_settings(session, strings.THINKING_OF_MODEL.format(summary=summary))
            return
        case [word] if (state := parse_switch(word)) is not None:
            _check_switch(card, state)
            await session.cursor.set_parameters(thinking=state, effort=None)
        case [word] if word in _DEFAULT_WORDS:
            await session.cursor.set_parameters(thinking=None, effort=None, budget=None, thinking_budget=None)
        case ["budget", word] if word in _DEFAULT_WORDS:
            await session.cursor.set_parameters(thinking_budget=None)
        case ["budget", number]:
            await session.cursor.set_parameters(thinking_budget=NUMBERS["thinking_budget"].parse(number))
        case ["effort", word] if word in _DEFAULT_WORDS and not _has_effort(card, word):
            await session.cursor.set_parameters(effort=None)
        case ["effort", effort]:
            _check_effort(card, effort)
            await session.cursor.set_parameters(effort=effort, thinking=None)
        case _:
            raise RequestError(strings.THINK_USAGE)
    await _show_thinking_settings(session)


async def _show_thinking_settings(session: Session, *about: str) -> None:
    parameters = (await session.cursor.settings()).parameters
    state = {None: strings.THINKING_DEFAULT, True: strings.THINKING_ON, False: strings.THINKING_OFF}
    facts = [strings.THINKING_SETTING.format(state=state[parameters.get("thinking")])]
    if parameters.get("effort") is not None:
        facts.append(strings.THINKING_EFFORT.format(effort=parameters["effort"]))
    if (budget := parameters.get("thinking_budget")) is not None:
        facts.append(strings.THINKING_BUDGET.format(tokens=f"{budget:,}"))
    session.screen.note(" ".join((f"{' · '.join(facts)}.", *about)))


def _check_switch(card: ModelCard, state: bool) -> None:
    """Raises if the template has no switch for thinking."""
    if thinking_switch(card.switches) is None:
        can_be_ended = card.thinks and not state
        raise RequestError(strings.NO_THINKING_SWITCH_OFF if can_be_ended else strings.NO_THINKING_SWITCH)


def _has_effort(card: ModelCard, effort: str) -> bool:
    """Whether the template has an effort of that name, such as `none`."""
    switch = switch_of_kind(card.switches, SwitchKind.EFFORT)
    return switch is not None and effort in map(str, switch.values)


def _check_effort(card: ModelCard, effort: str) -> None:
    switch = switch_of_kind(card.switches, SwitchKind.EFFORT)
    if switch is None:
        raise RequestError(strings.NO_EFFORT)
    if not switch.others and effort not in map(str, switch.values):
        raise BadParameter("effort", effort, strings.EFFORT_LEVELS.format(levels=list_values(switch.values)))


@commands.command("expand", ("thought", "thoughts"))
async def expand(session: Session, arguments: str) -> None:
    """Shows the thoughts of the last reply, or of the given message, or says that it has none."""
    path = await session.cursor.path()
    number = arguments.strip()
    if number and (not number.isdigit() or not 0 < int(number) <= len(path)):
        raise BadParameter(strings.MESSAGE_NUMBER, number, strings.NUMBER_RANGE.format(maximum=f"{len(path):,}"))
    replies = [path[int(number) - 1]] if number else [one for one in path if one.role is Role.ASSISTANT]
    if not replies:
        raise RequestError(strings.NO_REPLY_YET)
    if not replies[-1].thinking.strip():
        raise RequestError(strings.NO_THOUGHT_IN.format(number=number) if number else strings.NO_THOUGHT)
    session.screen.show(*render_thinking(_thoughts(replies[-1])))


@commands.command("collapse", choices=fixed_choices("on", "off"))
async def collapse(session: Session, arguments: str) -> None:
    word = arguments.strip()
    state = parse_switch(word or "on")
    if state is None:
        raise BadParameter("collapse", word, strings.ON_OR_OFF)
    session.thinking_display = ThinkingDisplay.COLLAPSED if state else ThinkingDisplay.EXPANDED
    session.screen.note(_DISPLAY_NOTES[session.thinking_display])


async def toggle(session: Session) -> None:
    """Ctrl+T at the prompt: shows the last thinking and expands the following; or collapses again."""
    if session.thinking_display is ThinkingDisplay.EXPANDED:
        session.thinking_display = ThinkingDisplay.COLLAPSED
        session.screen.note(_DISPLAY_NOTES[session.thinking_display])
        return
    session.thinking_display = ThinkingDisplay.EXPANDED
    reply = await session.cursor.last_message(Role.ASSISTANT)
    session.screen.show(*(render_thinking(_thoughts(reply)) if reply else ()))
    session.screen.note(_DISPLAY_NOTES[session.thinking_display])


def _thoughts(stored: StoredMessage) -> list[str]:
    return [part.text for part in stored.parts if isinstance(part, Thinking)]
