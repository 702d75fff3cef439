"""The items of an event stream that follows many turns. A stream of one turn consists of its `LogEntry`s."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from palaver.chat.interface import ConversationChange
from palaver.encoding import Tagged
from palaver.events import Event
from palaver.wire.errors import ErrorSchema


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """The first item. Changes before it are not sent."""

    type: Literal["opened"] = field(default="opened", kw_only=True)


@dataclass(frozen=True, slots=True)
class TurnEvent:
    """An entry in the log of one turn."""

    type: Literal["turn"] = field(default="turn", kw_only=True)
    turn: str
    number: int
    event: Annotated[Event, Tagged]


@dataclass(frozen=True, slots=True)
class StreamChange:
    type: Literal["change"] = field(default="change", kw_only=True)
    change: ConversationChange


@dataclass(frozen=True, slots=True)
class TurnRefused:
    """This turn can't be read; the others continue."""

    type: Literal["refused"] = field(default="refused", kw_only=True)
    turn: str
    error: ErrorSchema


@dataclass(frozen=True, slots=True)
class StreamClosing:
    """The server shuts down: reconnect in a moment."""

    type: Literal["closing"] = field(default="closing", kw_only=True)


StreamItem = Annotated[StreamOpened | TurnEvent | StreamChange | TurnRefused | StreamClosing, Tagged]
