"""Tool servers in the terminal: added, offered, approved, edited, stopped and continued."""

from __future__ import annotations

import io
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from palaver.repl.commands import table
from palaver.repl.input import TypedLine
from palaver.repl.screen import Screen, console
from palaver.repl.session import Session
from palaver.repl.settings import SessionSettings
from palaver.tools.toolbox import OperatorServers
from tests.chat.tool_service import ANSWER, open_tools, question
from tests.repl.scripted_session import TypedLines
from tests.tools import misbehaving_server


class AnsweringLines(TypedLines):
    """A user who types these answers to questions. Each is asked for; none is left."""

    def __init__(self) -> None:
        self.answers: list[str] = []
        self.questions: list[str] = []

    async def ask(self, question: str) -> str:
        self.questions.append(question)
        if not self.answers:
            raise EOFError
        return self.answers.pop(0)


class ToolSession:
    def __init__(self, session: Session, shown: io.StringIO, lines: AnsweringLines) -> None:
        self.session, self.shown, self.lines = session, shown, lines

    async def do(self, line: str, *answers: str) -> str:
        self.shown.seek(0)
        self.shown.truncate()
        self.lines.answers = list(answers)
        await self.session.handle_line(TypedLine(line))
        assert not self.lines.answers
        return self.shown.getvalue()


@asynccontextmanager
async def open_session(folder: Path) -> AsyncIterator[ToolSession]:
    async with open_tools(folder) as service:
        service.loop.toolbox.operator = OperatorServers((), folder / "mcp.json")
        chat = service.chat(service.store.users.ensure().id, is_local=True)
        await chat.wait_until_ready()
        shown, lines = io.StringIO(), AnsweringLines()
        session = Session(chat, SessionSettings(folder), Screen(console(shown, 300), live=False), table())
        session.lines = lines
        yield ToolSession(session, shown, lines)


def add(folder: Path) -> str:
    return f"/tools add bad {sys.executable} {misbehaving_server.__file__} '' {folder / 'record'}"


async def test_a_server_is_added_offered_and_its_calls_are_approved(tmp_path: Path) -> None:
    async with open_session(tmp_path) as terminal:
        assert "No tools are offered" in await terminal.do("/tools")
        added = await terminal.do(add(tmp_path))
        assert "● bad (stdio): " in added
        assert "bad__unchanged" in added
        assert (tmp_path / "mcp.json").stat().st_mode & 0o777 == 0o600
        output = await terminal.do(question(["bad__unchanged", "bad__long"]).text, "y")
        assert "calls bad__unchanged()" not in output  # the reply shows them; the question names the tools alone
        assert "bad__unchanged: as always" in output
        assert 300 < output.count("word") < 500  # the start of one line of 100,000 characters
        assert "… 98,000 characters more" in output
        assert terminal.lines.questions[-1].startswith("Run bad__unchanged, bad__long?")
        path = await terminal.session.cursor.path()
        assert [one.role for one in path] == ["user", "assistant"]  # the result was too long for the context
        assert "context" in output
        output = await terminal.do(question(["bad__unchanged"], ["bad__unchanged"]).text, "so what", "always")
        assert "Type one of" in output  # no letter is guessed from other words
        assert (await terminal.session.cursor.path())[-1].text == ANSWER
        assert len([one for one in terminal.lines.questions if one.startswith("Run bad__unchanged?")]) == 2
        assert "calls bad__unchanged()" not in output
        assert "○ bad" in await terminal.do("/tools off bad")
        assert "● bad" in await terminal.do("/tools on")
        assert "No tool server named" in await terminal.do("/tools on nothing")
        assert "Can't find the home folder that ~nobody-here/x.json" in await terminal.do("/tools ~nobody-here/x.json")
        assert "No tools are offered" in await terminal.do("/tools remove bad")


async def test_arguments_are_edited_and_a_round_is_stopped_and_continued(tmp_path: Path) -> None:
    async with open_session(tmp_path) as terminal:
        await terminal.do(add(tmp_path))
        output = await terminal.do(question(["bad__unchanged"]).text, "e", "no JSON", '{"a": 1}')
        assert "must be a JSON object" in output
        assert '[The user changed the arguments to {"a": 1}]' in output
        output = await terminal.do(question(["bad__unchanged"]).text, "q")
        assert "/continue goes on" in output
        output = await terminal.do("/continue", "n")
        assert output.count("calls bad__unchanged()") == 1  # the reply is not shown again
        assert "The user did not allow this call." in output
        assert (await terminal.session.cursor.path())[-1].text == ANSWER
        output = await terminal.do(question(["bad__unchanged"]).text)  # Ctrl+D at the question stops, too
        assert "/continue goes on" in output
