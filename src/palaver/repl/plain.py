"""Replies as plain text: the answer on one stream, thinking on another."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO, assert_never

from palaver.chat.reply_stream import ReplyRecord, ReplyStream
from palaver.chat.turn_log import LogEntry
from palaver.events import (
    AnswerDelta,
    Event,
    Failed,
    Finished,
    Notice,
    PhaseOpened,
    ReadEvent,
    Snapshot,
    Started,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallOpened,
    Waiting,
)
from palaver.generation import Finish
from palaver.phases import Phase
from palaver.repl.sanitize import sanitize

_ENDINGS = {Finish.LENGTH: "cut: the length is used up", Finish.STOPPED: "stopped"}


class PlainPrinter:
    """Writes events as they come: answers to one stream, thoughts to another; None is nowhere.

    On a terminal the text is made safe for it; into a file or a pipe it goes as it is.
    """

    def __init__(self, answers: TextIO | None, thoughts: TextIO | None) -> None:
        self._answers = answers
        self._thoughts = thoughts
        self._thinking = False

    def show(self, event: Event) -> None:
        match event:
            case Waiting():
                pass
            case Started(notice=notice):
                if notice:
                    self._show(Notice(notice))
            case Snapshot(message):
                self._write(self._thoughts, message.thinking)
                self._write(self._answers, message.text)
            case Finished(finish, tail=tail):
                self._end(tail, _ENDINGS.get(finish))
            case Failed(error, tail):
                self._end(tail, error)
            case _:
                self._show(event)

    def _show(self, event: ReadEvent) -> None:
        match event:
            case PhaseOpened(phase):
                self._turn_to(phase)
            case ThinkingDelta(text):
                self._write(self._thoughts, text)
            case AnswerDelta(text):
                self._write(self._answers, text)
            case ToolCallOpened(_, _, name):
                self._write(self._answers, f"\n[calls {name}] ")
            case ToolCallDelta(_, arguments):
                self._write(self._answers, arguments)
            case Notice(text):
                self._write(self._thoughts, f"\n[{text}]\n")
            case _:
                assert_never(event)

    def _turn_to(self, phase: Phase) -> None:
        if self._thinking and phase is not Phase.THINKING:
            self._write(self._thoughts, "\n\n")
        self._thinking = phase is Phase.THINKING

    def _end(self, tail: tuple[ReadEvent, ...], note: str | None) -> None:
        for event in tail:
            self._show(event)
        self._turn_to(Phase.END)
        self._write(self._answers, "\n")
        if note is not None:
            self._write(self._thoughts, f"[{note}]\n")

    def _write(self, stream: TextIO | None, text: str) -> None:
        if stream is not None:
            stream.write(sanitize(text) if stream.isatty() else text)
            stream.flush()


class PlainView:
    """A turn of a conversation as plain text; what is `known` was shown before."""

    def __init__(self, printer: PlainPrinter, known: int = 0) -> None:
        self._printer = printer
        self._known = known
        self.ending: Finished | Failed | None = None
        self.first: float | None = None

    def take(self, entry: LogEntry) -> None:
        if isinstance(entry.event, Finished | Failed):
            self.ending = entry.event
        elif entry.number <= self._known and not isinstance(entry.event, Started):
            return
        self._printer.show(entry.event)

    def paint(self) -> None:
        """Everything is written as it comes."""

    def toggle(self) -> None:
        """What was written stays."""

    def leave(self) -> None:
        """Nothing is held back."""


async def show_turn(utterance: ReplyStream, printer: PlainPrinter) -> ReplyRecord:
    """Runs it to its end or to Ctrl+C, which stops it and keeps what was said."""
    async with utterance:
        with interrupts(utterance.stop):
            async for event in utterance:
                printer.show(event)
        return utterance.reply()


@contextmanager
def interrupts(handler: Callable[[], object]) -> Iterator[None]:
    """Inside, Ctrl+C calls the handler; how it was before comes back at the end."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, handler)
    except (NotImplementedError, RuntimeError):  # not the main thread, or no signals on this system
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
