from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from palaver.chat import title_writer
from palaver.chat.interface import Chat
from palaver.chat.model import Model
from palaver.chat.model_pool import ModelPool
from palaver.chat.service import Service
from palaver.chat.title_writer import parse_title
from palaver.engines.host.supervisor import ReportProgress
from palaver.messages import user
from palaver.store import open_store
from tests.chat.scripted_service import model, read_entries, reply
from tests.scripted_engine import HoldScript, Script, ScriptedEngine

ANSWER = reply("no", "It is in Norway.")
TITLE = reply("", '"Where Oslo is."')


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(title_writer, "IDLE_SECONDS", 0.01)


@asynccontextmanager
async def stage(folder: Path, *scripts: Script) -> AsyncIterator[tuple[Chat, Service, list[ScriptedEngine]]]:
    engines: list[ScriptedEngine] = []

    async def load(name: str, report: ReportProgress) -> Model:
        made = model(scripts, name)
        assert isinstance(made.engine, ScriptedEngine)
        engines.append(made.engine)
        return made

    with open_store(folder) as store:
        models = ModelPool(load, ("scripted",))
        models.load("scripted")
        async with Service(store, models, titles=True) as service:
            yield service.chat(store.users.ensure().id), service, engines


async def ask(chat: Chat, id: str, parent: str | None = None) -> str:
    sent = await chat.send_message(id, parent, user("Where is Oslo?"))
    await read_entries(chat, sent.reply.id)
    return sent.reply.id


async def changed_title(chat: Chat, id: str, before: str) -> str:
    async with asyncio.timeout(60):
        while (title := (await chat.conversation(id)).title) == before:
            await asyncio.sleep(0.01)
    return title


async def until(calls: Sequence[object], count: int) -> None:
    async with asyncio.timeout(60):
        while len(calls) < count:
            await asyncio.sleep(0.01)


async def test_the_first_exchange_gets_a_title_that_is_no_turn(tmp_path: Path) -> None:
    async with stage(tmp_path, ANSWER, TITLE, ANSWER) as (chat, service, engines):
        id = (await chat.create_conversation()).id
        async with chat.changes() as changes:
            first = await ask(chat, id)
            assert await changed_title(chat, id, "Where is Oslo?") == "Where Oslo is"
            async with asyncio.timeout(60):
                async for change in changes:
                    if change.what == "changed":
                        break
        assert (await chat.conversation(id)).title_given is False
        assert len(await chat.nodes(id)) == 2
        await ask(chat, id, first)
        assert service.titles is not None
        await service.titles.settled()
        assert len(engines[0].calls) == 3, "a later exchange gets no title"


async def test_a_title_that_the_user_chose_stays(tmp_path: Path) -> None:
    hold = asyncio.Event()
    held: Script = [*TITLE[:2], HoldScript(hold), *TITLE[2:]]
    async with stage(tmp_path, ANSWER, ANSWER, held) as (chat, service, engines):
        given = (await chat.create_conversation(title="My own")).id
        await ask(chat, given)
        renamed = (await chat.create_conversation()).id
        await ask(chat, renamed)
        await until(engines[0].calls, 3)  # the title has begun
        await chat.update_conversation(renamed, title="Mine, too")
        hold.set()
        assert service.titles is not None
        await service.titles.settled()
        assert (await chat.conversation(given)).title == "My own"
        assert (await chat.conversation(renamed)).title == "Mine, too"
        assert len(engines[0].calls) == 3


async def test_a_title_gives_way_to_a_turn_and_is_written_later(tmp_path: Path) -> None:
    hold = asyncio.Event()
    held: Script = [*TITLE[:2], HoldScript(hold), *TITLE[2:]]
    async with stage(tmp_path, ANSWER, held, ANSWER, TITLE) as (chat, service, engines):
        first, second = [(await chat.create_conversation(title=title)).id for title in ("", "Given")]
        await ask(chat, first)
        await until(engines[0].calls, 2)  # the title has begun
        assert service.turns.running == ()
        sent = await chat.send_message(second, None, user("And Bergen?"))
        hold.set()
        await read_entries(chat, sent.reply.id)
        assert await changed_title(chat, first, "Where is Oslo?") == "Where Oslo is"
        assert (await chat.conversation(second)).title == "Given"


@pytest.mark.parametrize(
    ("text", "title"),
    [
        (" **A trip to Oslo** ", "A trip to Oslo"),
        ("Title: “Nordwärts”", "Nordwärts"),
        ("Two\nlines", ""),
        ("", ""),
        ("x" * 81, ""),
        ("a\x00b\x1b[31m", "a b [31m"),
    ],
)
def test_titles_are_one_short_line(text: str, title: str) -> None:
    assert parse_title(text) == title
