"""Replies as plain text: the answer on one stream, thinking on another."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, assert_never

from palaver.chat import Reply, Turn
from palaver.events import (
    AnswerDelta,
    Event,
    Failed,
    Finished,
    Notice,
    PhaseOpened,
    Started,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallOpened,
)
from palaver.generation import Finish
from palaver.phases import Phase


class PlainPrinter:
    """Writes events as they come: answers to one stream, thoughts to another; None is nowhere."""

    def __init__(self, answers: TextIO | None, thoughts: TextIO | None) -> None:
        self._answers = answers
        self._thoughts = thoughts
        self._thinking = False

    def show(self, event: Event) -> None:
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
            case Notice(text) | Failed(text):
                self._write(self._thoughts, f"\n[{text}]\n")
            case Finished(finish):
                self._end(finish)
            case Started():
                pass
            case _:
                assert_never(event)

    def _turn_to(self, phase: Phase) -> None:
        if self._thinking and phase is not Phase.THINKING:
            self._write(self._thoughts, "\n\n")
        self._thinking = phase is Phase.THINKING

    def _end(self, finish: Finish) -> None:
        self._turn_to(Phase.END)
        self._write(self._answers, "\n")
        if finish in (Finish.LENGTH, Finish.STOPPED):
            self._write(self._thoughts, f"[{_NOTES[finish]}]\n")

    def _write(self, stream: TextIO | None, text: str) -> None:
        if stream is not None:
            stream.write(text)
            stream.flush()


_NOTES = {Finish.LENGTH: "cut: the length is used up", Finish.STOPPED: "stopped"}


async def show_turn(turn: Turn, printer: PlainPrinter) -> Reply:
    """Runs the turn to its end or to Ctrl+C, which stops it and keeps what was said."""
    async with turn:
        with _stopped_by_interrupt(turn):
            async for event in turn:
                printer.show(event)
        return turn.reply()


@contextmanager
def _stopped_by_interrupt(turn: Turn) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, turn.stop)
    except (NotImplementedError, RuntimeError):  # not the main thread, or no signals on this system
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
