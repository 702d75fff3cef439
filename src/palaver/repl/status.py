"""Status lines: the statistics after a turn, the context gauge, the banner and the model's state."""

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

FINISH_NOTES = {
    Finish.STOPPED: "stopped: /continue goes on",
    Finish.LENGTH: "length: /continue goes on",
    Finish.STOP_STRING: "stop string",
}
WARNING_SHARE = 0.8
"""The used share of the context from which on the user is warned."""
CHOICES = """\
s  send it without the oldest turns, which stay in the record
a  always do so (/set overflow shorten)
n  send it in a new conversation"""
_BAR_WIDTH = 30


def statistics_line(
    ending: Finished | Failed,
    time_to_first_token: float | None = None,
    before: StoredReply | None = None,
    after: StoredReply | None = None,
) -> str:
    """Token counts and speed on one line; a second line names an ending other than the model's own.

    `before` and `after` are the stored reply before and after this run.
    """
    if isinstance(ending, Failed):
        interrupted = after is not None and after.status is ReplyStatus.INTERRUPTED
        return "interrupted: /continue goes on" if interrupted else f"failed: {ending.error}"
    usage = ending.usage
    parts = [_format_counts(usage)]
    if (speed := tokens_per_second(usage, time_to_first_token, before, after)) is not None:
        parts.append(f"{speed:.0f} tokens/s" if speed >= 10 else f"{speed:.1f} tokens/s")
    if time_to_first_token is not None:
        parts.append(f"first {format_seconds(time_to_first_token)}")
    if usage.prompt_tokens:
        cached_tokens = min(
            usage.cached_tokens, usage.prompt_tokens
        )  # a continued reply may have more cached tokens than prompt tokens
        cached = f" ({cached_tokens:,} cached)" if cached_tokens else ""
        parts.append(f"prompt {usage.prompt_tokens:,}{cached}")
    line = " · ".join(parts)
    if ending.finish not in FINISH_NOTES:
        return line
    stop = f" {ending.stop!r}" if ending.stop else ""
    return f"{line}\n{FINISH_NOTES[ending.finish]}{stop}"


def tokens_per_second(
    usage: Usage, time_to_first_token: float | None, before: StoredReply | None, after: StoredReply | None
) -> float | None:
    """Decoding speed after the first token, by the clock of the process that ran the model."""
    if after is None or "seconds" not in after.timings:
        return None
    tokens, seconds, wait = usage.reply_tokens, after.timings["seconds"], after.timings.get("first_token", 0.0)
    if before is not None and before.usage is not None:  # the reply was continued: measure only this run
        tokens -= before.usage.reply_tokens
        seconds -= before.timings.get("seconds", 0.0)
        wait = min(time_to_first_token or 0.0, seconds)
    return (tokens - 1) / (seconds - wait) if tokens > 1 and seconds > wait else None


def _format_counts(usage: Usage) -> str:
    """All tokens of the reply, and the thinking tokens. The rest includes markers, so it is not labelled as answer."""
    thought = f" ({usage.thinking_tokens:,} thinking)" if usage.thinking_tokens else ""
    return format_tokens(usage.reply_tokens) + thought


def context_line(usage: ContextUsage) -> Text:
    share = min(1.0, usage.used / usage.limit) if usage.limit else 1.0
    filled = round(share * _BAR_WIDTH)
    left = max(0, usage.limit - usage.used)
    style = "error" if share >= WARNING_SHARE else "none"
    bar = ("█" * filled, style), ("░" * (_BAR_WIDTH - filled), "note")
    cached = f" · {usage.cached:,} of the last prompt were cached" if usage.cached else ""
    return Text.assemble(*bar, f" {usage.used:,} of {usage.limit:,} tokens ({share:.0%}) · {left:,} left{cached}")


async def warn_context(session: Session, ending: Finished | Failed) -> None:
    """Warns when the context is nearly full."""
    card = await session.chat.model()
    if isinstance(ending, Failed) or not card.context_length:
        return
    used = ending.usage.prompt_tokens + ending.usage.reply_tokens
    if used >= WARNING_SHARE * card.context_length:
        left = max(0, card.context_length - used)
        session.screen.note(
            f"The context is {min(1.0, used / card.context_length):.0%} full: {left:,} tokens are left. "
            "/new begins a new conversation, /set overflow shorten leaves the oldest turns out when it is full."
        )


async def offer_context_choices(session: Session, text: str, error: ContextOverflow) -> None:
    """Asks what to do with a message that does not fit into the context. The message was not sent."""
    session.screen.error(error)
    session.succeeded = False
    if not session.lines.is_interactive:
        return
    session.initial_line = TypedLine(text)
    session.screen.show(Text(CHOICES))
    try:
        choice = await session.lines.ask("Which? (Enter: back to the message)")
    except EOFError:
        return
    match choice.strip().lower()[:1]:
        case "s":
            await _resend(session, text)
        case "a":
            await session.cursor.set_parameters(overflow="shorten")
            await _resend(session, text)
        case "n":
            await session.cursor.start_new()
            await _resend(session, text)
        case _:
            pass


async def _resend(session: Session, text: str) -> None:
    session.initial_line = None
    try:
        await session.send_text(text, shorten=True)
    except ContextOverflow as error:  # it does not fit even without earlier turns
        session.initial_line = TypedLine(text)
        session.screen.error(error)


def banner(card: ModelCard) -> list[RenderableType]:
    if card.state is not ModelState.READY:
        return [Text(f"palaver {__version__} · {model_status(card)}")]
    facts = [f"context {card.context_length:,}", " ".join(one for one in (card.device, card.dtype) if one)]
    head = Text.assemble(f"palaver {__version__} · ", (model_name(card), "name"), " · ", " · ".join(facts))
    capabilities = f"{thinking_summary(card)} · {'calls tools' if card.takes_tools else 'calls no tools'}"
    notices = [Text(one_line(notice), style="note") for notice in card.notices]
    return [
        head,
        Text(capabilities, style="note"),
        *notices,
        Text("/help lists the commands, Ctrl+D leaves.", style="note"),
    ]


def model_name(card: ModelCard) -> str:
    """The last part of a folder's path; any other name unchanged."""
    return Path(card.name).name if Path(card.name).is_absolute() else card.name


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


def waiting_line(description: str, seconds: float) -> Text:
    return Text(f"{description} · {format_seconds(seconds)}", style="note")


def thinking_summary(card: ModelCard) -> str:
    """Whether the model thinks, and the switches its template has for thinking."""
    switches = [_format_switch(one) for one in thinking_switches(card)]
    if not card.thinks:
        return "does not think"
    return f"thinks ({', '.join(switches)})" if switches else "thinks, without a switch for it"


def thinking_switches(card: ModelCard) -> list[Switch]:
    """The switches that control thinking, without duplicates."""
    kinds = (SwitchKind.EFFORT, SwitchKind.BUDGET)
    found = [thinking_switch(card.switches), *(switch_of_kind(card.switches, kind) for kind in kinds)]
    return list({one.name: one for one in found if one is not None}.values())


def _format_switch(switch: Switch) -> str:
    values = list_values(switch.values)
    return f"{switch.name}: {values}" if values else switch.name
