"""What is told of the model: at the start, and while it loads."""

from __future__ import annotations

from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from palaver import __version__
from palaver.chat.interface import ModelCard, ModelState
from palaver.formats.switches import Switch, SwitchKind, list_values, switch_of_kind, thinking_switch
from palaver.repl.safe import one_line
from palaver.repl.thinking import seconds


def banner(card: ModelCard) -> list[RenderableType]:
    if card.state is not ModelState.READY:
        return [Text(f"palaver {__version__} · {standing(card)}")]
    facts = [f"context {card.context_length:,}", " ".join(one for one in (card.device, card.dtype) if one)]
    head = Text.assemble(f"palaver {__version__} · ", (name(card), "name"), " · ", " · ".join(facts))
    about = f"{thinking(card)} · {'calls tools' if card.takes_tools else 'calls no tools'}"
    notices = [Text(one_line(notice), style="note") for notice in card.notices]
    return [head, Text(about, style="note"), *notices, Text("/help lists the commands, Ctrl+D leaves.", style="note")]


def name(card: ModelCard) -> str:
    """A folder by its last part, everything else as it is."""
    return Path(card.name).name if Path(card.name).is_absolute() else card.name


def thinking(card: ModelCard) -> str:
    """Whether the model thinks, and what can be chosen about it."""
    switches = [_switch(one) for one in relevant(card)]
    if not card.thinks:
        return "does not think"
    return f"thinks ({', '.join(switches)})" if switches else "thinks, without a switch for it"


def relevant(card: ModelCard) -> list[Switch]:
    """The switches that have to do with thinking, each once."""
    kinds = (SwitchKind.EFFORT, SwitchKind.BUDGET)
    found = [thinking_switch(card.switches), *(switch_of_kind(card.switches, kind) for kind in kinds)]
    return list({one.name: one for one in found if one is not None}.values())


def _switch(switch: Switch) -> str:
    values = list_values(switch.values)
    return f"{switch.name}: {values}" if values else switch.name


def standing(card: ModelCard) -> str:
    match card.state:
        case ModelState.LOADING:
            return loading(card)
        case ModelState.FAILED:
            return f"{name(card)} could not be loaded: {card.note}"
        case ModelState.NONE:
            return "no model: /model NAME loads one"
        case ModelState.READY:
            return name(card)


def loading(card: ModelCard) -> str:
    progress = "" if card.progress is None else f" {card.progress:.0%}"
    note = f" · {card.note}" if card.note else ""
    return f"loading {name(card)}{progress}{note}"


def waiting(what: str, since: float) -> Text:
    return Text(f"{what} · {seconds(since)}", style="note")
