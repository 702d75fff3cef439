"""Comparing replies in the terminal: side by side, stopped and continued, chosen, blind."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from palaver.chat.interface import Chat, Column
from palaver.chat.turn_log import LogEntry
from palaver.errors import PalaverError
from palaver.events import Finished, Started, Usage, Waiting
from palaver.generation import Finish
from palaver.repl.commands.compare import CompareMode
from palaver.repl.comparison_view import ComparisonFollower, ComparisonView
from palaver.repl.settings import ThinkingDisplay
from palaver.store import StoredMessage
from tests.repl.conftest import Door
from tests.repl.emulator import TerminalEmulator, log_entries, make_screen
from tests.repl.scripted_session import ScriptedSession, TypedLines, open_session
from tests.repl.terminal import CTRL_C, ENTER, Terminal
from tests.repl.test_terminal import fresh
from tests.repl.test_tools import AnsweringLines

QUESTION = "Which is better\\?"


def test_replies_stand_side_by_side_and_one_is_chosen(terminal: Terminal, door: Door) -> None:
    fresh(terminal)
    terminal.do("/compare temperature=0,max_tokens=400 thinking=off,seed=3")
    with door.crawling():
        terminal.enter("Count from 1 to 90.")
        terminal.wait(r"1 sprout · max_tokens 400 · temp\w+… │ 2 sprout · seed 3 · thinking off *\n─+ │ ─+")
        terminal.type(CTRL_C)  # stops both
        terminal.wait(rf"Stopped\.(?s:.*)Stopped\.(?s:.*){QUESTION}.*c continue")
    terminal.type("c" + ENTER)
    terminal.wait(rf"90(?s:.*)\n{QUESTION} 1 to 2, n none, t tokens \(Enter: later\):$")
    terminal.type("t" + ENTER)
    terminal.wait(rf"These are the first 60 tokens(?s:.*){QUESTION}")
    assert re.search(r'\n +1 +"<think>" \d+\.\d% +"1" \d+\.\d%', terminal.transcript())
    terminal.type("7" + ENTER)
    terminal.wait(rf"Type the number of a reply(?s:.*){QUESTION}")
    terminal.type("2" + ENTER)
    terminal.wait(r"Going on with 2: sprout · seed 3 · thinking off\n›$")
    assert re.search(r"2 Model · 2 versions\n(?!.*Thought)", terminal.do("/history"))
    shown = terminal.do("/compare")
    assert re.search(r"Comparing: temperature=0, max_tokens=400 · thinking=off, seed=3", shown)
    assert re.search(r"sprout · seed 3 · thinking off +1 of \d+", shown)
    assert "Messages get one reply again" in terminal.do("/compare off")
    assert "Going on with 1" in terminal.do("/choose 1")
    assert re.search(r"2 Model · 2 versions\nThought", terminal.do("/history"))


class CompareSession:
    """A session with a scripted model and a user who answers questions."""

    def __init__(self, scripted: ScriptedSession) -> None:
        self._scripted = scripted
        self.session = scripted.session
        self.lines = self.session.lines = AnsweringLines()

    async def do(self, line: str, *answers: str) -> str:
        self.lines.answers = list(answers)
        return await self._scripted.do(line)


async def test_a_blind_comparison_reveals_names_after_the_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_session(tmp_path) as scripted:
        terminal = CompareSession(scripted)
        chat = terminal.session.chat
        await chat.save_preset("calm", "Be calm.", {"temperature": 0.2})
        assert "after your choice" in await terminal.do("/compare blind calm default")
        shown = await terminal.do("Wave!", "1")
        assert re.search(r"^1\n2\n1 was (calm|scripted)\n2 was (calm|scripted)\nGoing on with 1: ", shown)
        printed = capsys.readouterr().out
        assert "Wave: 👋🏽 <think" in printed
        assert "Another answer." in printed
        (comparison,) = await chat.comparisons(terminal.session.cursor.conversation_id or "")
        assert {one.name for one in comparison.replies} == {"calm", "scripted"}
        calm = next(one for one in comparison.replies if one.name == "calm")
        assert dict(calm.parameters) == {"temperature": 0.2, "system": "Be calm."}
        settings = (await chat.message(calm.reply_id)).reply
        assert settings is not None
        assert settings.settings.options["system"] == "Be calm."
        shown = await terminal.do("/retry", "n")  # the same message to all columns once more
        assert "None is better" in shown
        assert len(await chat.nodes(comparison.conversation_id)) == 5
        shown = await terminal.do("And again.", "")
        assert "/choose decides later" in shown
        assert "Going on with 2" in await terminal.do("/choose", "x", "2")
        assert "None is better" in await terminal.do("/choose none")
        assert "must be between 1 and 2" in await terminal.do("/choose 3")
        await terminal.do("/compare off")
        await terminal.do("One more.")
        assert len(await chat.nodes(comparison.conversation_id)) == 10


async def test_columns_that_are_not_valid_change_nothing(tmp_path: Path) -> None:
    async with open_session(tmp_path) as scripted:
        terminal = CompareSession(scripted)
        for line, expected in (
            ("/compare temperature=0", "2 to 8 columns"),
            ("/compare temperature=0 temperature=9", "must be between 0 and 5"),
            ("/compare temperature=0 nothing=9", "Unknown parameter 'nothing'"),
            ("/compare temperature=0 nowhere", 'No preset named "nowhere"'),
            ("/compare temperature=0 thinking=perhaps", "must be on or off"),
            ("/compare temperature=0 budget=x", "whole number"),
            ('/compare temperature=0 "system=', "quotes are not closed"),
            ("/compare " + "temp=0 " * 9, "2 to 8 columns"),
        ):
            assert expected in await terminal.do(line)
            assert terminal.session.compare_mode is None
        await terminal.do('/compare default "system=Be brief, please.,thinking=off,budget=3,temp=1"')
        settings = {"system": "Be brief, please.", "thinking": False, "budget": 3, "temperature": 1.0}
        assert terminal.session.compare_mode == CompareMode((Column(), Column(settings)), False)


class BrokenChat:
    """Of its replies, the one called "lost" can't be read, and the others never end."""

    def __init__(self, names: list[str]) -> None:
        self._all_read = asyncio.Barrier(len(names))
        self.readers: list[str] = []

    @asynccontextmanager
    async def events(self, reply_id: str) -> AsyncIterator[AsyncIterator[LogEntry]]:
        self.readers.append(reply_id)
        try:
            yield self._entries(reply_id)
        finally:
            self.readers.remove(reply_id)

    async def _entries(self, reply_id: str) -> AsyncIterator[LogEntry]:
        await self._all_read.wait()
        if reply_id == "lost":
            raise PalaverError("The connection is lost.")
        await asyncio.Event().wait()
        yield LogEntry(0, Waiting(0))

    async def message(self, id: str) -> StoredMessage:
        raise PalaverError("The connection is lost.")


def follow_replies(chat: BrokenChat, names: list[str]) -> Awaitable[object]:
    screen = make_screen(TerminalEmulator())
    view = ComparisonView(screen, names, 36, ThinkingDisplay.COLLAPSED)
    return ComparisonFollower(cast(Chat, chat), view, TypedLines(), screen).follow(names, 36)


async def test_a_column_that_cannot_be_read_ends_the_others() -> None:
    names = ["lost", "endless"]
    chat = BrokenChat(names)
    with pytest.raises(PalaverError, match="The connection is lost"):
        await follow_replies(chat, names)
    assert chat.readers == []


async def test_an_error_of_the_painter_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = asyncio.Event()

    def fail(view: ComparisonView) -> None:
        failed.set()
        raise ValueError("no such column")

    async def entries(chat: BrokenChat, reply_id: str) -> AsyncIterator[LogEntry]:
        await failed.wait()
        for entry in log_entries(Started(1, 0), Finished(Finish.END, Usage(1, 1))):
            yield entry

    monkeypatch.setattr(ComparisonView, "paint", fail)
    monkeypatch.setattr(BrokenChat, "_entries", entries)
    with pytest.raises(ValueError, match="no such column"):
        await follow_replies(BrokenChat(["one"]), ["one"])
