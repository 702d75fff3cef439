"""Commands for thinking: switch, effort, budget, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from palaver.chat.interface import ModelCard
from palaver.errors import BadParameter, RequestError
from palaver.formats.switches import SwitchKind, list_values, switch_of_kind, thinking_switch
from palaver.messages import Role, Thinking
from palaver.repl.command_table import ArgumentChoice, CommandGroup
from palaver.repl.completion import fixed_choices
from palaver.repl.reply_view import render_thinking
from palaver.repl.settings import ThinkingDisplay
from palaver.repl.status import thinking_summary
from palaver.sampling import NUMBERS
from palaver.store import StoredMessage

if TYPE_CHECKING:
    from palaver.repl.session import Session

commands = CommandGroup("Thinking")
_DISPLAY_NAMES = {
    ThinkingDisplay.COLLAPSED: "collapsed",
    ThinkingDisplay.EXPANDED: "in full",
    ThinkingDisplay.HIDDEN: "not at all",
}


async def _choices(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
    card = await session.chat.model()
    if arguments.startswith("effort "):
        effort = switch_of_kind(card.switches, SwitchKind.EFFORT)
        return [ArgumentChoice(str(value)) for value in effort.values] if effort else []
    return [ArgumentChoice(one) for one in ("on", "off", "default", "budget", "effort")] if " " not in arguments else []


@commands.command(
    "think",
    "whether the model thinks, for how many tokens, how hard; bare: what is set",
    "[on | off | default | budget N | effort X]",
    (),
    _choices,
)
async def think(session: Session, arguments: str) -> None:
    card = await session.wait_for(session.chat.wait_until_ready(), "waiting for the model")
    match arguments.split():
        case []:
            pass
        case ["on" | "off" as state]:
            _check_switch(card, state)
            await session.cursor.set_parameters(thinking=state == "on", effort=None)
        case ["default"]:
            await session.cursor.set_parameters(thinking=None, effort=None, budget=None, thinking_budget=None)
        case ["budget", "none" | "off" | "default"]:
            await session.cursor.set_parameters(thinking_budget=None)
        case ["budget", number]:
            await session.cursor.set_parameters(thinking_budget=NUMBERS["thinking_budget"].parse(number))
        case ["effort", "default" | "none"]:
            await session.cursor.set_parameters(effort=None)
        case ["effort", effort]:
            _check_effort(card, effort)
            await session.cursor.set_parameters(effort=effort, thinking=None)
        case _:
            raise RequestError("It is /think on, off, default, budget N or effort X.")
    await _show_thinking_settings(session, card)


async def _show_thinking_settings(session: Session, card: ModelCard) -> None:
    parameters = (await session.cursor.settings()).parameters
    thinking = {None: "the model's default", True: "on", False: "off"}[parameters.get("thinking")]
    effort = f" · effort {parameters['effort']}" if parameters.get("effort") is not None else ""
    budget = parameters.get("thinking_budget")
    limit = f" · at most {budget:,} tokens" if budget is not None else ""
    session.screen.note(f"Thinking: {thinking}{effort}{limit}. The model {thinking_summary(card)}.")


def _check_switch(card: ModelCard, state: str) -> None:
    """Raises if the template has no switch for thinking."""
    switch = thinking_switch(card.switches)
    if switch is None:
        hint = " /think budget 0 closes every thought at once." if card.thinks and state == "off" else ""
        raise RequestError(f"This model's chat template has no switch for thinking.{hint}")


def _check_effort(card: ModelCard, effort: str) -> None:
    switch = switch_of_kind(card.switches, SwitchKind.EFFORT)
    if switch is None:
        raise RequestError("This model's chat template knows no effort.")
    if not switch.others and effort not in map(str, switch.values):
        raise BadParameter("effort", effort, f"this model's chat template takes {list_values(switch.values)}")


@commands.command("expand", "the thought of the last reply in full, or of message N on this branch", "[N]")
async def expand(session: Session, arguments: str) -> None:
    path = await session.cursor.path()
    replies = [one for one in path if one.role is Role.ASSISTANT and one.thinking.strip()]
    if arguments.strip():
        if not arguments.strip().isdigit() or not 0 < int(arguments) <= len(path):
            raise BadParameter(
                "number", arguments.strip(), f"must be from 1 to {len(path)}: /history shows the numbers"
            )
        replies = [one for one in [path[int(arguments) - 1]] if one.thinking.strip()]
    if not replies:
        raise RequestError("There is no thought to show.")
    session.screen.show(*render_thinking(_thoughts(replies[-1])))


@commands.command(
    "collapse", "show thoughts in a few lines while they come, or in full", "[on | off]", (), fixed_choices("on", "off")
)
async def collapse(session: Session, arguments: str) -> None:
    match arguments.strip():
        case "" | "on":
            session.thinking_display = ThinkingDisplay.COLLAPSED
        case "off":
            session.thinking_display = ThinkingDisplay.EXPANDED
        case other:
            raise BadParameter("collapse", other, "must be on or off")
    session.screen.note(f"Thoughts are shown {_DISPLAY_NAMES[session.thinking_display]}.")


async def toggle(session: Session) -> None:
    """Ctrl+T at the prompt: shows the last thinking and expands the following; or collapses again."""
    if session.thinking_display is ThinkingDisplay.EXPANDED:
        session.thinking_display = ThinkingDisplay.COLLAPSED
        session.screen.note(f"Thoughts are shown {_DISPLAY_NAMES[session.thinking_display]}.")
        return
    session.thinking_display = ThinkingDisplay.EXPANDED
    reply = await session.cursor.last_message(Role.ASSISTANT)
    session.screen.show(*(render_thinking(_thoughts(reply)) if reply else ()))
    session.screen.note(f"Thoughts are shown {_DISPLAY_NAMES[session.thinking_display]}.")


def _thoughts(stored: StoredMessage) -> list[str]:
    return [part.text for part in stored.parts if isinstance(part, Thinking)]
