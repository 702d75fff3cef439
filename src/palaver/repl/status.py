"""Status lines: the first screen, the statistics after a turn, the context gauge and the model's state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from palaver import __version__
from palaver.chat.interface import Chat, ContextUsage, ModelCard, ModelState
from palaver.errors import ContextOverflow, PalaverError
from palaver.events import Failed, Finished, Usage
from palaver.formats.facts import Switch, SwitchKind, list_values, switch_of_kind, thinking_switch
from palaver.generation import Finish
from palaver.models.resolver import DEFAULT_MODEL
from palaver.repl import strings
from palaver.repl.command_table import escape_message
from palaver.repl.input import TypedLine
from palaver.repl.text import format_seconds, format_share, format_speed, format_tokens, one_line
from palaver.store import ReplyStatus, StoredReply

if TYPE_CHECKING:
    from palaver.repl.session import Session

FINISH_NOTES = {Finish.STOPPED: strings.STOPPED, Finish.LENGTH: strings.CUT, Finish.STOP_STRING: strings.STOP_STRING}
WARNING_SHARE = 0.8
"""The used share of the context from which on the user is warned."""
_BAR_WIDTH = 14


def statistics_line(
    ending: Finished | Failed,
    time_to_first_token: float | None = None,
    before: StoredReply | None = None,
    after: StoredReply | None = None,
    width: int = 80,
    is_full: bool = False,
) -> str:
    """Token counts and speed on one line; a second line names an ending other than the model's own.

    `before` and `after` are the stored reply before and after this run, `is_full` whether it fills the context. What
    doesn't fit into the width is left out, from the end.
    """
    if isinstance(ending, Failed):
        interrupted = after is not None and after.status is ReplyStatus.INTERRUPTED
        return strings.INTERRUPTED_REPLY if interrupted else strings.FAILED.format(reason=ending.error)
    usage = ending.usage
    parts = [_format_counts(usage)]
    if (speed := tokens_per_second(usage, time_to_first_token, before, after)) is not None:
        parts.append(format_speed(speed))
    if time_to_first_token is not None:
        parts.append(strings.FIRST_TOKEN.format(time=format_seconds(time_to_first_token)))
    if usage.prompt_tokens:
        cached = min(usage.cached_tokens, usage.prompt_tokens)  # a continued reply may have more cached tokens
        text = strings.PROMPT_CACHED if cached else strings.PROMPT_TOKENS
        parts.append(text.format(tokens=f"{usage.prompt_tokens:,}", cached=f"{cached:,}"))
    while len(parts) > 1 and len(" · ".join(parts)) > width:
        parts.pop()
    line = " · ".join(parts)
    if ending.finish not in FINISH_NOTES:
        return line
    if is_full:
        return f"{line}\n{strings.CONTEXT_FULL}"
    stop = json.dumps(ending.stop or "", ensure_ascii=False)
    return f"{line}\n{FINISH_NOTES[ending.finish].format(text=stop)}"


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
    tokens = format_tokens(usage.reply_tokens)
    if not usage.thinking_tokens:
        return tokens
    return strings.THINKING_TOKENS.format(tokens=tokens, thinking=f"{usage.thinking_tokens:,}")


def context_line(usage: ContextUsage) -> Text:
    share = min(1.0, usage.used / usage.limit) if usage.limit else 1.0
    filled = round(share * _BAR_WIDTH)
    left = max(0, usage.limit - usage.used)
    style = "error" if share >= WARNING_SHARE else "none"
    bar = ("█" * filled, style), ("░" * (_BAR_WIDTH - filled), "note")
    line = strings.CONTEXT_USED.format(
        used=f"{usage.used:,}", limit=f"{usage.limit:,}", share=format_share(share), left=f"{left:,}"
    )
    if usage.cached:
        line = strings.CONTEXT_CACHED.format(line=line, cached=f"{usage.cached:,}")
    return Text.assemble(*bar, f" {line}")


async def fills_context(chat: Chat, reply: StoredReply | None) -> bool:
    """Whether the reply ended because the context of its model is full, not at `max_tokens`."""
    if reply is None or reply.status is not ReplyStatus.LENGTH or reply.usage is None:
        return False
    try:
        card = await chat.model(reply.settings.model)
    except PalaverError:  # it is not offered any more: the model in use would continue the reply
        card = await chat.model()
    used = reply.usage.prompt_tokens + reply.usage.reply_tokens
    return 0 < card.context_length <= used


async def warn_context(session: Session, ending: Finished | Failed) -> None:
    """Warns when the context is nearly full."""
    card = await session.chat.model()
    if isinstance(ending, Failed) or not card.context_length:
        return
    used = ending.usage.prompt_tokens + ending.usage.reply_tokens
    if used >= WARNING_SHARE * card.context_length:
        left = max(0, card.context_length - used)
        share = format_share(min(1.0, used / card.context_length))
        session.screen.note(strings.CONTEXT_NEARLY_FULL.format(share=share, left=f"{left:,}"))


async def offer_context_choices(session: Session, text: str, error: ContextOverflow) -> None:
    """Asks what to do with a message that does not fit into the context. The message was not sent."""
    session.screen.error(error)
    session.succeeded = False
    if not session.lines.is_interactive:
        return
    session.initial_line = TypedLine(escape_message(text))
    session.screen.show(Text(strings.CONTEXT_CHOICES))
    try:
        choice = await session.lines.ask(strings.CONTEXT_QUESTION)
    except EOFError:
        return
    match choice.strip().lower():
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
        session.initial_line = TypedLine(escape_message(text))
        session.screen.error(error)


def first_screen(card: ModelCard, is_attached: bool = False) -> list[RenderableType]:
    """What a new user reads first, also while the model still loads: the model, one example, the way on."""
    is_demo = card.name == DEFAULT_MODEL
    about, example = strings.DEMO_MODELS.get(card.name, ("", strings.EXAMPLE))
    lines = [Text.assemble(strings.BANNER.format(version=__version__), (model_name(card), "name"))]
    if card.state is ModelState.NONE:
        lines = [Text(strings.BANNER.format(version=__version__) + strings.NO_MODEL)]
    elif about:
        lines.append(Text(about))
    lines += [
        Text(),
        Text.assemble((strings.FIRST_EXAMPLE, "note"), (example, "example")),
    ]
    if is_demo and is_attached:
        lines.append(
            Text.assemble((strings.REAL_MODEL_ON_SERVER, "note"), (strings.REAL_MODEL_SERVER_COMMAND, "example"))
        )
    elif is_demo:
        lines.append(
            Text.assemble(
                (strings.REAL_MODEL, "note"),
                (strings.REAL_MODEL_COMMAND, "example"),
                (strings.REAL_MODEL_SIZE, "note"),
            )
        )
    return [*lines, Text(), Text(strings.FIRST_KEYS, style="note")]


def ready_lines(card: ModelCard) -> list[RenderableType]:
    """What is known of a loaded model, with its notices; or why there is none."""
    if card.state is ModelState.FAILED:
        failed = strings.LOAD_FAILED.format(model=model_name(card), reason=card.note)
        return [Text(failed, style="error"), Text(strings.LOAD_ANOTHER, style="note")]
    if card.state is not ModelState.READY:
        return []
    facts = [
        strings.READY.format(model=model_name(card)),
        strings.CONTEXT_FACT.format(tokens=f"{card.context_length:,}"),
        strings.NEVER_THINKS if not card.thinks else strings.THINKS,
        strings.CALLS_TOOLS if card.takes_tools else strings.CALLS_NO_TOOLS,
        card.device,
    ]
    notices = [Text(one_line(notice), style="note") for notice in card.notices]
    return [Text(" · ".join(filter(None, facts)), style="note"), *notices]


def model_name(card: ModelCard) -> str:
    """The last part of a folder's path; any other name unchanged."""
    return Path(card.name).name if Path(card.name).is_absolute() else card.name


def model_status(card: ModelCard) -> str:
    match card.state:
        case ModelState.LOADING:
            return loading_line(card)
        case ModelState.FAILED:
            return strings.LOAD_FAILED.format(model=model_name(card), reason=card.note)
        case ModelState.NONE:
            return strings.NO_MODEL
        case ModelState.READY | ModelState.AVAILABLE:
            return model_name(card)


def loading_line(card: ModelCard) -> str:
    progress = "" if card.progress is None else f" {card.progress:.0%}"
    line = strings.LOADING.format(model=model_name(card)) + progress
    return strings.LOADING_STEP.format(line=line, step=card.note) if card.note else line


def waiting_line(description: str, seconds: float) -> Text:
    return Text(strings.WAITING.format(what=description, time=format_seconds(seconds)), style="note")


def thinking_summary(card: ModelCard) -> str:
    """Whether the model thinks, and the switches its template has for thinking."""
    switches = [_format_switch(one) for one in thinking_switches(card)]
    if not card.thinks:
        return strings.NEVER_THINKS
    return strings.THINKS_WITH_SWITCHES.format(switches=", ".join(switches)) if switches else strings.THINKS_ALWAYS


def thinking_switches(card: ModelCard) -> list[Switch]:
    """The switches that control thinking, without duplicates."""
    kinds = (SwitchKind.EFFORT, SwitchKind.BUDGET)
    found = [thinking_switch(card.switches), *(switch_of_kind(card.switches, kind) for kind in kinds)]
    return list({one.name: one for one in found if one is not None}.values())


def _format_switch(switch: Switch) -> str:
    values = list_values(switch.values)
    return f"{switch.name}: {values}" if values else switch.name
