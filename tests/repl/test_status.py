"""The line after a turn, and the one while it waits for its model."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest

from palaver.chat.service import Service
from palaver.events import Failed, Finished, Usage
from palaver.generation import Finish
from palaver.messages import Role
from palaver.repl import strings
from palaver.repl.commands import table
from palaver.repl.input import TypedLine
from palaver.repl.screen import Screen, console
from palaver.repl.session import Session
from palaver.repl.settings import SessionSettings
from palaver.repl.status import statistics_line
from palaver.sampling import Sampling
from palaver.store import ReplySettings, ReplyStatus, StoredReply, open_store
from tests.chat.scripted_service import TOKENIZER
from tests.chat.test_model_pool import Shelf
from tests.repl.scripted_session import TypedLines, open_session

USAGE = Usage(20, 15, 31, 10)


def record(usage: Usage, **timings: float) -> StoredReply:
    return StoredReply(ReplyStatus.DONE, ReplySettings("m", Sampling()), usage, timings)


def test_a_whole_reply() -> None:
    after = record(USAGE, seconds=2.0, first_token=0.5)
    expected = statistics_line(Finished(Finish.END, USAGE), 0.6, None, after)
    assert expected == "31 tokens (10 thinking) · 20 tokens/s · first 0.6 s · prompt 20 (15 cached)"
    assert statistics_line(Finished(Finish.END, Usage(1_200, 0, 1, 0))) == "1 token · prompt 1,200"


def test_a_narrow_terminal_shows_fewer_numbers() -> None:
    after = record(USAGE, seconds=2.0, first_token=0.5)
    whole = statistics_line(Finished(Finish.END, USAGE), 0.6, None, after)
    for width in range(20, 90):
        line = statistics_line(Finished(Finish.STOPPED, USAGE), 0.6, None, after, width).splitlines()[0]
        assert whole.startswith(line)
        assert len(line) <= max(width, len("31 tokens (10 thinking)"))
    line = statistics_line(Finished(Finish.END, USAGE), 0.6, None, after, 60)
    assert line == "31 tokens (10 thinking) · 20 tokens/s · first 0.6 s"


def test_of_a_reply_that_went_on_the_new_part_is_measured() -> None:
    before = record(Usage(20, 0, 20, 10), seconds=10.0, first_token=0.5)
    after = record(USAGE, seconds=13.0, first_token=0.5)
    assert "· 5.0 tokens/s ·" in statistics_line(Finished(Finish.END, USAGE), 1.0, before, after)


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        (Finished(Finish.STOPPED, USAGE), "\nStopped. /continue picks up where it left off."),
        (Finished(Finish.LENGTH, USAGE), "\nReached the length limit. /continue picks up where it left off."),
        (Finished(Finish.STOP_STRING, USAGE, stop="END"), '\nEnded at the stop string "END".'),
        (Failed("The engine died."), "Failed: The engine died."),
    ],
)
def test_endings_that_are_worth_telling(ending: Finished | Failed, expected: str) -> None:
    assert statistics_line(ending).endswith(expected)


FULL = (
    "The context is full, so the reply can't go on. /new starts over; "
    "/set overflow shorten drops the oldest messages from now on."
)
LONG = TOKENIZER.encode(["word " * 300])


@pytest.mark.parametrize("is_live", [False, True])
async def test_a_reply_that_fills_the_context_offers_what_helps(tmp_path: Path, is_live: bool) -> None:
    async with open_session(tmp_path, LONG, context=128) as session:
        session.session.screen.is_live = is_live
        shown = await session.do("Count!")
        assert shown.count(FULL) == 1
        assert "/continue" not in shown
        assert FULL in await session.do("/continue")
        history = await session.do("/history")
        assert FULL in history
        assert "/continue" not in history


async def test_a_reply_that_ends_at_max_tokens_can_be_continued(tmp_path: Path) -> None:
    async with open_session(tmp_path, LONG, context=256) as session:
        await session.do("/max_tokens 8")
        await session.do("Count!")
        assert strings.CUT in await session.do("/history")
        await session.do("/continue")
        reply = await session.session.cursor.last_message(Role.ASSISTANT)
        assert reply is not None
        assert reply.reply is not None
        assert reply.reply.usage is not None
        assert reply.reply.usage.reply_tokens == 16


async def test_compared_replies_that_fill_the_context_are_not_continued(tmp_path: Path) -> None:
    questions: list[str] = []

    class Asked(TypedLines):
        async def ask(self, question: str) -> str:
            questions.append(question)
            return ""

    async with open_session(tmp_path, LONG, LONG, context=128) as session:
        session.session.lines = Asked()
        await session.do("/compare default seed=1")
        await session.do("Count!")
    assert questions == ["Which is better? 1 to 2, n none, t tokens (Enter: later):"]


@pytest.mark.parametrize("line", ["Hello!", "/compare model=b default"])
async def test_a_model_that_a_message_waits_for_is_shown_while_it_is_loaded(tmp_path: Path, line: str) -> None:
    shelf, shown = Shelf(), io.StringIO()
    pool = shelf.pool()
    pool.load("a")
    with open_store(tmp_path) as store:
        async with Service(store, pool) as service, asyncio.timeout(60):
            chat = service.chat(store.users.ensure().id)
            await chat.wait_until_ready()
            shelf.gate.clear()
            parameters = {} if line.startswith("/") else {"model": "b"}
            settings = SessionSettings(tmp_path, parameters=parameters)
            session = Session(chat, settings, Screen(console(shown, 80), live=True), table())
            session.lines = TypedLines()
            if line.startswith("/"):
                await session.handle_line(TypedLine(line))
            sending = asyncio.create_task(session.handle_line(TypedLine("Hello!")))
            while "Loading b 50%" not in shown.getvalue():
                await asyncio.sleep(0.01)
            shelf.gate.set()
            await sending
            assert session.succeeded
