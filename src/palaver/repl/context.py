"""How full the model's context is, and what can be done when it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from palaver.chat.interface import ContextUsage
from palaver.errors import ContextOverflow
from palaver.events import Failed, Finished
from palaver.repl.lines import Typed

if TYPE_CHECKING:
    from palaver.repl.session import Session

NEARLY = 0.8
"""The share from which on a person is warned."""
_BAR = 30
CHOICES = """\
s  send it without the oldest turns, which stay in the record
a  always do so (/set overflow shorten)
n  send it in a new conversation"""


def gauge(gauge: ContextUsage) -> Text:
    share = min(1.0, gauge.used / gauge.limit) if gauge.limit else 1.0
    filled = round(share * _BAR)
    left = max(0, gauge.limit - gauge.used)
    style = "error" if share >= NEARLY else "none"
    bar = ("█" * filled, style), ("░" * (_BAR - filled), "note")
    cached = f" · {gauge.cached:,} of the last prompt were cached" if gauge.cached else ""
    return Text.assemble(*bar, f" {gauge.used:,} of {gauge.limit:,} tokens ({share:.0%}) · {left:,} left{cached}")


async def warn(session: Session, ending: Finished | Failed) -> None:
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


async def offer(session: Session, text: str, error: ContextOverflow) -> None:
    """The choices where a message does not fit any more. Nothing was sent; the message stays at hand."""
    session.screen.error(error)
    session.went_well = False
    if not session.lines.is_person:
        return
    session.begun = Typed(text)
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
        session.begun = Typed(text)
        session.screen.error(error)
