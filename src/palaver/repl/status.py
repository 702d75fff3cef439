"""The line after a turn: what it took, and how it ended where that is worth saying."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from palaver import __version__
from palaver.chat.interface import ContextUsage, ModelCard, ModelState
from palaver.errors import ContextOverflow
from palaver.events import Failed, Finished, Usage
from palaver.formats.switches import Switch, SwitchKind, list_values, switch_of_kind, thinking_switch
from palaver.generation import Finish
from palaver.repl.input import TypedLine
from palaver.repl.reply_view import format_seconds, format_tokens
from palaver.repl.sanitize import one_line
from palaver.store import ReplyStatus, StoredReply

if TYPE_CHECKING:
    from palaver.repl.session import Session

ENDINGS = {
    Finish.STOPPED: "stopped: /continue goes on",
    Finish.LENGTH: "length: /continue goes on",
    Finish.STOP_STRING: "stop string",
}


def statistics_line(
    ending: Finished | Failed,
    first: float | None = None,
    before: StoredReply | None = None,
    after: StoredReply | None = None,
) -> str:
    """One line, and a second one for an ending that is worth telling.

    `first`: seconds until something came; `before` and `after`: the reply's record around this run of it.
    """
    if isinstance(ending, Failed):
        interrupted = after is not None and after.status is ReplyStatus.INTERRUPTED
        return "interrupted: /continue goes on" if interrupted else f"failed: {ending.error}"
    usage = ending.usage
    parts = [_counts(usage)]
    if (speed := tokens_per_second(usage, first, before, after)) is not None:
        parts.append(f"{speed:.0f} tokens/s" if speed >= 10 else f"{speed:.1f} tokens/s")
    if first is not None:
        parts.append(f"first {format_seconds(first)}")
    if usage.prompt_tokens:
        known = min(usage.cached_tokens, usage.prompt_tokens)  # of a reply that goes on, more than the prompt is
        cached = f" ({known:,} cached)" if known else ""
        parts.append(f"prompt {usage.prompt_tokens:,}{cached}")
    told = " · ".join(parts)
    if ending.finish not in ENDINGS:
        return told
    stop = f" {ending.stop!r}" if ending.stop else ""
    return f"{told}\n{ENDINGS[ending.finish]}{stop}"


def tokens_per_second(
    usage: Usage, first: float | None, before: StoredReply | None, after: StoredReply | None
) -> float | None:
    """Tokens a second after the first one, by the clock of whoever ran the model."""
    if after is None or "seconds" not in after.timings:
        return None
    said, took, waited = usage.reply_tokens, after.timings["seconds"], after.timings.get("first_token", 0.0)
    if before is not None and before.usage is not None:  # it went on from an earlier run
        said -= before.usage.reply_tokens
        took -= before.timings.get("seconds", 0.0)
        waited = min(first or 0.0, took)
    return (said - 1) / (took - waited) if said > 1 and took > waited else None


def _counts(usage: Usage) -> str:
    """All, and those that were thought; the rest is not all answer, for markers are tokens too."""
    thought = f" ({usage.thinking_tokens:,} thinking)" if usage.thinking_tokens else ""
    return format_tokens(usage.reply_tokens) + thought


NEARLY = 0.8
"""The share from which on a person is warned."""
_BAR = 30
CHOICES = """\
s  send it without the oldest turns, which stay in the record
a  always do so (/set overflow shorten)
n  send it in a new conversation"""


def context_line(gauge: ContextUsage) -> Text:
    share = min(1.0, gauge.used / gauge.limit) if gauge.limit else 1.0
    filled = round(share * _BAR)
    left = max(0, gauge.limit - gauge.used)
    style = "error" if share >= NEARLY else "none"
    bar = ("█" * filled, style), ("░" * (_BAR - filled), "note")
    cached = f" · {gauge.cached:,} of the last prompt were cached" if gauge.cached else ""
    return Text.assemble(*bar, f" {gauge.used:,} of {gauge.limit:,} tokens ({share:.0%}) · {left:,} left{cached}")


async def warn_context(session: Session, ending: Finished | Failed) -> None:
    """Before the end comes."""
    card = await session.chat.model()
    if isinstance(ending, Failed) or not card.context_length:
        return
    used = ending.usage.prompt_tokens + ending.usage.reply_tokens
    if used >= NEARLY * card.context_length:
        left = max(0, card.context_length - used)
        session.screen.note(
            f"The context is {min(1.0, used / card.context_length):.0%} full: {left:,} tokens are left. "
            "/new begins a new conversation, /set overflow shorten leaves the oldest turns out when it is full."
        )


async def offer_context_choices(session: Session, text: str, error: ContextOverflow) -> None:
    """The choices where a message does not fit any more. Nothing was sent; the message stays at hand."""
    session.screen.error(error)
    session.went_well = False
    if not session.lines.is_person:
        return
    session.begun = TypedLine(text)
    session.screen.show(Text(CHOICES))
    try:
        chosen = await session.lines.ask("Which? (Enter: back to the message)")
    except EOFError:
        return
    match chosen.strip().lower()[:1]:
        case "s":
            await _resend(session, text)
        case "a":
            await session.place.set(overflow="shorten")
            await _resend(session, text)
        case "n":
            await session.place.leave()
            await _resend(session, text)
        case _:
            pass


async def _resend(session: Session, text: str) -> None:
    session.begun = None
    try:
        await session.say(text, shorten=True)
    except ContextOverflow as error:  # it does not fit even alone
        session.begun = TypedLine(text)
        session.screen.error(error)


def banner(card: ModelCard) -> list[RenderableType]:
    if card.state is not ModelState.READY:
        return [Text(f"palaver {__version__} · {model_status(card)}")]
    facts = [f"context {card.context_length:,}", " ".join(one for one in (card.device, card.dtype) if one)]
    head = Text.assemble(f"palaver {__version__} · ", (model_name(card), "name"), " · ", " · ".join(facts))
    about = f"{thinking_summary(card)} · {'calls tools' if card.takes_tools else 'calls no tools'}"
    notices = [Text(one_line(notice), style="note") for notice in card.notices]
    return [head, Text(about, style="note"), *notices, Text("/help lists the commands, Ctrl+D leaves.", style="note")]


def model_name(card: ModelCard) -> str:
    """A folder by its last part, everything else as it is."""
    return Path(card.name).name if Path(card.name).is_absolute() else card.name


def thinking_summary(card: ModelCard) -> str:
    """Whether the model thinks, and what can be chosen about it."""
    switches = [_switch(one) for one in thinking_switches(card)]
    if not card.thinks:
        return "does not think"
    return f"thinks ({', '.join(switches)})" if switches else "thinks, without a switch for it"


def thinking_switches(card: ModelCard) -> list[Switch]:
    """The switches that have to do with thinking, each once."""
    kinds = (SwitchKind.EFFORT, SwitchKind.BUDGET)
    found = [thinking_switch(card.switches), *(switch_of_kind(card.switches, kind) for kind in kinds)]
    return list({one.name: one for one in found if one is not None}.values())


def _switch(switch: Switch) -> str:
    values = list_values(switch.values)
    return f"{switch.name}: {values}" if values else switch.name


def model_status(card: ModelCard) -> str:
    match card.state:
        case ModelState.LOADING:
            return loading_line(card)
        case ModelState.FAILED:
            return f"{model_name(card)} could not be loaded: {card.note}"
        case ModelState.NONE:
            return "no model: /model NAME loads one"
        case ModelState.READY:
            return model_name(card)


def loading_line(card: ModelCard) -> str:
    progress = "" if card.progress is None else f" {card.progress:.0%}"
    note = f" · {card.note}" if card.note else ""
    return f"loading {model_name(card)}{progress}{note}"


def waiting_line(what: str, since: float) -> Text:
    return Text(f"{what} · {format_seconds(since)}", style="note")
