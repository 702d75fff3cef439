"""What the model thinks: whether, how hard, how long; and how much of it is shown."""

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
    card = await session.waited(session.chat.ready(), "waiting for the model")
    match arguments.split():
        case []:
            pass
        case ["on" | "off" as wanted]:
            _check_switch(card, wanted)
            await session.place.set(thinking=wanted == "on", effort=None)
        case ["default"]:
            await session.place.set(thinking=None, effort=None, budget=None, thinking_budget=None)
        case ["budget", "none" | "off" | "default"]:
            await session.place.set(thinking_budget=None)
        case ["budget", number]:
            await session.place.set(thinking_budget=NUMBERS["thinking_budget"].parse(number))
        case ["effort", "default" | "none"]:
            await session.place.set(effort=None)
        case ["effort", effort]:
            _check_effort(card, effort)
            await session.place.set(effort=effort, thinking=None)
        case _:
            raise RequestError("It is /think on, off, default, budget N or effort X.")
    await _tell(session, card)


async def _tell(session: Session, card: ModelCard) -> None:
    parameters = (await session.place.begins_with()).parameters
    thinking = {None: "the model's default", True: "on", False: "off"}[parameters.get("thinking")]
    effort = f" · effort {parameters['effort']}" if parameters.get("effort") is not None else ""
    budget = parameters.get("thinking_budget")
    most = f" · at most {budget:,} tokens" if budget is not None else ""
    session.screen.note(f"Thinking: {thinking}{effort}{most}. The model {thinking_summary(card)}.")


def _check_switch(card: ModelCard, wanted: str) -> None:
    """Nothing is claimed that the template can't do."""
    switch = thinking_switch(card.switches)
    if switch is None:
        other = " /think budget 0 closes every thought at once." if card.thinks and wanted == "off" else ""
        raise RequestError(f"This model's chat template has no switch for thinking.{other}")


def _check_effort(card: ModelCard, effort: str) -> None:
    switch = switch_of_kind(card.switches, SwitchKind.EFFORT)
    if switch is None:
        raise RequestError("This model's chat template knows no effort.")
    if not switch.others and effort not in map(str, switch.values):
        raise BadParameter("effort", effort, f"this model's chat template takes {list_values(switch.values)}")


@commands.command("expand", "the thought of the last reply in full, or of message N on this branch", "[N]")
async def expand(session: Session, arguments: str) -> None:
    path = await session.place.path()
    thoughtful = [one for one in path if one.role is Role.ASSISTANT and one.thinking.strip()]
    if arguments.strip():
        if not arguments.strip().isdigit() or not 0 < int(arguments) <= len(path):
            raise BadParameter(
                "number", arguments.strip(), f"must be from 1 to {len(path)}: /history shows the numbers"
            )
        thoughtful = [one for one in [path[int(arguments) - 1]] if one.thinking.strip()]
    if not thoughtful:
        raise RequestError("There is no thought to show.")
    session.screen.show(*render_thinking(_thoughts(thoughtful[-1])))


@commands.command(
    "collapse", "show thoughts in a few lines while they come, or in full", "[on | off]", (), fixed_choices("on", "off")
)
async def collapse(session: Session, arguments: str) -> None:
    match arguments.strip():
        case "" | "on":
            session.thoughts = ThinkingDisplay.COLLAPSED
        case "off":
            session.thoughts = ThinkingDisplay.EXPANDED
        case other:
            raise BadParameter("collapse", other, "must be on or off")
    session.screen.note(f"Thoughts are shown {_HOW[session.thoughts]}.")


async def toggle(session: Session) -> None:
    """Ctrl+T at the prompt: the last thought is shown, and those to come; or no longer."""
    if session.thoughts is ThinkingDisplay.EXPANDED:
        session.thoughts = ThinkingDisplay.COLLAPSED
        session.screen.note(f"Thoughts are shown {_HOW[session.thoughts]}.")
        return
    session.thoughts = ThinkingDisplay.EXPANDED
    reply = await session.place.last(Role.ASSISTANT)
    session.screen.show(*(render_thinking(_thoughts(reply)) if reply else ()))
    session.screen.note(f"Thoughts are shown {_HOW[session.thoughts]}.")


_HOW = {
    ThinkingDisplay.COLLAPSED: "collapsed",
    ThinkingDisplay.EXPANDED: "in full",
    ThinkingDisplay.HIDDEN: "not at all",
}


def _thoughts(stored: StoredMessage) -> list[str]:
    return [part.text for part in stored.parts if isinstance(part, Thinking)]
