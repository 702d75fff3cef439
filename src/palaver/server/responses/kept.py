"""How a response's id names a turn, and what is kept of the request with the turn's reply.

A response is a reply of a conversation: its id holds the id of the reply's message, so that nothing but the
conversation has to be stored, and every reply, whichever door it came through, is a response too.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from palaver.chat.interface import Chat
from palaver.store import NotFound, StoredMessage

_ID = re.compile(r"resp_([0-9a-z]{1,64})")
_NOTE = "response"


class Kept(BaseModel):
    """What a response tells of its request besides what the reply's own record has."""

    model_config = ConfigDict(extra="ignore")

    asked: bool = False
    """Whether the reply was asked for as a response; other doors' replies were not."""
    background: bool = False
    metadata: dict[str, str] = Field(default_factory=dict)
    instructions: str | None = None
    developer: str = ""
    """What the input's own system messages said at the beginning of a conversation."""
    previous: str | None = None
    inputs: int = 0
    """How many messages of the branch, up to the reply, came with the request."""
    tool_choice: Any = "auto"
    parallel: bool = True
    strict: list[str] = Field(default_factory=list)
    """The tools that were sent as strict ones."""
    format: dict[str, Any] = Field(default_factory=lambda: {"type": "text"})
    effort: str | None = None
    summary: str | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    include: list[str] = Field(default_factory=list)
    top_logprobs: int = 0
    user: str | None = None
    cancelled: bool = False
    """Whether it was cancelled when it did not run: it was put aside, and does not go on any more."""
    deleted: bool = False
    of: str = ""
    """The reply that was cancelled or deleted: one that was made from it, with all that is kept of it, was not."""

    def note(self) -> dict[str, Any]:
        return {_NOTE: self.model_dump(exclude_defaults=True)}


def kept(reply: StoredMessage) -> Kept:
    """Of a reply that was asked for elsewhere, or whose note is none of ours: the defaults."""
    note = reply.reply.settings.options.get("note") if reply.reply is not None else None
    try:
        known = Kept.model_validate(note.get(_NOTE) if isinstance(note, dict) and _NOTE in note else {})
    except ValidationError:
        return Kept()
    return known if known.of == reply.id else known.model_copy(update={"cancelled": False, "deleted": False})


def is_background(reply: StoredMessage) -> bool:
    """Whether it was asked for in the background, and nobody has cancelled or deleted it."""
    known = kept(reply)
    return known.asked and known.background and not known.cancelled and not known.deleted


def response_id(reply: str) -> str:
    return f"resp_{reply}"


async def found(chat: Chat, id: str) -> StoredMessage:
    """The reply that a response's id names; NotFound where it is another's, was deleted or never was."""
    named = _ID.fullmatch(id)
    if named is None:
        raise NotFound("response", id[:200])
    try:
        stored = await chat.message(named[1])
    except NotFound:
        raise NotFound("response", id) from None
    if stored.reply is None or kept(stored).deleted:
        raise NotFound("response", id)
    return stored
