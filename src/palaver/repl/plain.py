"""Replies as plain text: the answer on one stream, thinking on another."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO, assert_never

from palaver.chat.reply_stream import GeneratedReply, ReplyRecord
from palaver.events import (
    AnswerDelta,
    DraftBlock,
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
from palaver.repl import strings
from palaver.repl.signals import handle_interrupt
from palaver.repl.text import sanitize

if TYPE_CHECKING:
    from palaver.chat.turn_log import LogEntry  # it imports the store, which `palaver ask` doesn't use

_ENDINGS = {Finish.LENGTH: strings.CUT_PLAIN, Finish.STOPPED: strings.STOPPED_PLAIN}


class PlainPrinter:
    """Writes events as they come: answers to one stream, thinking to another. None discards the text.

    Text for a terminal is sanitized; text for a file or a pipe is written unchanged.
    """

    def __init__(self, answer_stream: TextIO | None, thinking_stream: TextIO | None) -> None:
        self._answer_stream = answer_stream
        self._thinking_stream = thinking_stream
        self._is_thinking = False

    def show(self, event: Event) -> None:
        match event:
            case Waiting() | DraftBlock():
                pass
            case Started(notice=notice):
                if notice:
                    self._print(Notice(notice))
            case Snapshot(message):
                self._write(self._thinking_stream, message.thinking)
                self._write(self._answer_stream, message.text)
            case Finished(finish, tail=tail):
                self._end(tail, _ENDINGS.get(finish))
            case Failed(error, tail):
                self._end(tail, error)
            case _:
                self._print(event)

    def _print(self, event: ReadEvent) -> None:
        match event:
            case PhaseOpened(phase):
                self._set_phase(phase)
            case ThinkingDelta(text):
                self._write(self._thinking_stream, text)
            case AnswerDelta(text):
                self._write(self._answer_stream, text)
            case ToolCallOpened(_, _, name):
                self._write(self._answer_stream, f"\n[{strings.CALLS.format(name=name)}] ")
            case ToolCallDelta(_, arguments):
                self._write(self._answer_stream, arguments)
            case Notice(text):
                self._write(self._thinking_stream, f"\n[{text}]\n")
            case _:
                assert_never(event)

    def _set_phase(self, phase: Phase) -> None:
        if self._is_thinking and phase is not Phase.THINKING:
            self._write(self._thinking_stream, "\n\n")
        self._is_thinking = phase is Phase.THINKING

    def _end(self, tail: tuple[ReadEvent, ...], note: str | None) -> None:
        for event in tail:
            self._print(event)
        self._set_phase(Phase.END)
        self._write(self._answer_stream, "\n")
        if note is not None:
            self._write(self._thinking_stream, f"[{note}]\n")

    def _write(self, stream: TextIO | None, text: str) -> None:
        if stream is not None:
            stream.write(sanitize(text) if stream.isatty() else text)
            stream.flush()


class PlainView:
    """A turn of a conversation as plain text. Events up to `last_event` were shown before."""

    def __init__(self, printer: PlainPrinter, last_event: int = 0) -> None:
        self._printer = printer
        self._last_event = last_event
        self.ending: Finished | Failed | None = None
        self.time_to_first_token: float | None = None

    def handle(self, entry: LogEntry) -> None:
        if isinstance(entry.event, Finished | Failed):
            self.ending = entry.event
        elif entry.number <= self._last_event and not isinstance(entry.event, Started):
            return
        self._printer.show(entry.event)

    def paint(self) -> None:
        """Does nothing: events are written as they come."""

    def toggle(self) -> None:
        """Does nothing: written text can't be redrawn."""

    def close(self) -> None:
        """Does nothing: no text is buffered."""


async def print_reply(stream: GeneratedReply, printer: PlainPrinter) -> ReplyRecord:
    """Prints the stream to its end. Ctrl+C stops the reply and keeps what was generated."""
    async with stream:
        with handle_interrupt(stream.stop):
            async for event in stream:
                printer.show(event)
        return stream.reply()
