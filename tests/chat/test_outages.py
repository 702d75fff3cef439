"""A database that restarts: turns go on by themselves, and their readers need do nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from sqlalchemy import URL, delete, func, select, update

from palaver.chat.model import Model
from palaver.chat.model_pool import ModelPool
from palaver.chat.service import Service
from palaver.engines.host.supervisor import ReportProgress
from palaver.events import Finished, ReadEvent
from palaver.messages import user
from palaver.store import Disconnected, Lease, ReplyEnding, ReplyStatus, Store, TokenFrame, open_store
from palaver.store.schema import reply_tokens, running
from tests.chat.scripted_service import TOKENIZER, WAVE, model, open_stage, read_entries, read_until, reply, run_service
from tests.scripted_engine import PacedEngine
from tests.store.postgres import restart_server, running_server, server_binaries

SCRIPT = reply("1 2 3 4 5 6 7 8 9 " * 10, "a word and another " * 20)
PACE_S = 0.01
STREAMS = 6
SECONDS = 100


@pytest.fixture
def server() -> Iterator[URL]:
    """A PostgreSQL of its own, which the test restarts."""
    binaries = server_binaries()
    if binaries is None:
        assert not os.environ.get("CI"), "PostgreSQL must be tested here, but no server is installed"
        pytest.skip("!!! A RESTART OF POSTGRESQL IS NOT TESTED: no server is installed")
    with running_server(binaries) as url:
        yield url


def paced_front(store: Store) -> Service:
    async def load(name: str, report: ReportProgress) -> Model:
        built = model([SCRIPT], name)
        engine = PacedEngine([SCRIPT], TOKENIZER.vocabulary, PACE_S)
        return Model(engine, built.format, name, built.tokenizer, built.vocabulary)

    models = ModelPool(load, ("scripted",))
    models.load("scripted")
    return Service(store, models, resume=True)


async def test_turns_and_readers_outlast_a_restart_of_the_database(server: URL, tmp_path: Path) -> None:
    address = server.render_as_string()
    with open_store(tmp_path, address) as one, open_store(tmp_path, address) as two:
        async with asyncio.timeout(SECONDS), paced_front(one) as here, paced_front(two) as there:
            await there.models.ready()
            owner = one.users.ensure().id
            chat, other = here.chat(owner), there.chat(owner)
            talks = [await chat.create_conversation() for _ in range(STREAMS)]
            sent = [await chat.send_message(talk.id, None, user("Hello")) for talk in talks]
            replies = [each.reply.id for each in sent]
            readers = [asyncio.create_task(read_entries(at, id)) for id in replies for at in (chat, other)]
            for _ in range(2):
                await asyncio.sleep(0.5)
                await asyncio.to_thread(restart_server, server)
            for number, entries in enumerate(await asyncio.gather(*readers)):
                assert isinstance(entries[-1].event, Finished), (number, entries[-1])
                numbers = [entry.number for entry in entries if isinstance(entry.event, ReadEvent)]
                assert numbers == list(range(1, len(numbers) + 1))
            for each in sent:
                assert [token.token_id for token in await other.tokens(each.reply.id)] == SCRIPT
                assert (await other.message(each.message.id)).text == "Hello"
                assert here.turns.get(each.reply.id) is not None, "the turn stayed where it was"


def lose_tokens(store: Store, reply_id: str, count: int) -> None:
    """What a restart of PostgreSQL may do: commits that did not wait for the disk are gone."""
    with store.database.write_transaction() as connection:
        stored = reply_tokens.c.message_id == reply_id
        connection.execute(delete(reply_tokens).where(stored, reply_tokens.c.start >= count))
        left = connection.execute(select(func.max(reply_tokens.c.start + reply_tokens.c.count)).where(stored)).scalar()
        connection.execute(update(running).where(running.c.message_id == reply_id).values(tokens=left or 0))


@pytest.mark.parametrize("kept", [0, 2])
async def test_tokens_that_the_database_lost_are_stored_again(tmp_path: Path, kept: int) -> None:
    async with asyncio.timeout(SECONDS), open_stage(tmp_path, [WAVE], held=True) as stage:
        store = stage.service.store
        talk = await stage.chat.create_conversation()
        id = (await stage.chat.send_message(talk.id, None, user("Hello"))).reply.id
        await read_until(stage.chat, id, 2)
        lose_tokens(store, id, kept)
        stage.hold.set()
        assert isinstance((await read_entries(stage.chat, id))[-1].event, Finished)
        assert [token.token_id for token in await stage.chat.tokens(id)] == WAVE


async def test_a_reader_elsewhere_waits_for_tokens_that_the_database_lost(tmp_path: Path) -> None:
    async with asyncio.timeout(SECONDS), open_stage(tmp_path, [WAVE], held=True) as stage:
        with open_store(tmp_path) as store:
            async with run_service(store, [WAVE]) as other:
                await other.chat.wait_until_ready()
                talk = await stage.chat.create_conversation()
                id = (await stage.chat.send_message(talk.id, None, user("Hello"))).reply.id
                last = (await read_until(other.chat, id, 2))[-1].number
                lose_tokens(stage.service.store, id, 0)
                reader = asyncio.create_task(read_entries(other.chat, id, last))
                await asyncio.sleep(0.1)
                assert not reader.done()
                stage.hold.set()
                entries = await reader
                assert isinstance(entries[-1].event, Finished)
                numbers = [entry.number for entry in entries if isinstance(entry.event, ReadEvent)]
                assert numbers == list(range(last + 1, last + 1 + len(numbers)))


async def test_tokens_lost_before_the_end_of_the_reply_are_stored_again(tmp_path: Path) -> None:
    async with asyncio.timeout(SECONDS), open_stage(tmp_path, [WAVE]) as stage:
        replies, endings = stage.service.store.replies, list[ReplyEnding]()
        finish = replies.end

        def finish_after_loss(lease: Lease, reply_id: str, ending: ReplyEnding) -> datetime:
            if not endings:
                lose_tokens(stage.service.store, reply_id, 0)
            endings.append(ending)
            return finish(lease, reply_id, ending)

        replies.end = finish_after_loss  # type: ignore[method-assign]
        talk = await stage.chat.create_conversation()
        id = (await stage.chat.send_message(talk.id, None, user("Hello"))).reply.id
        assert isinstance((await read_entries(stage.chat, id))[-1].event, Finished)
        assert len(endings) == 2
        assert [token.token_id for token in await stage.chat.tokens(id)] == WAVE


@pytest.mark.parametrize("committed", [True, False])
async def test_a_commit_that_was_not_confirmed_is_not_written_twice(tmp_path: Path, committed: bool) -> None:
    """The connection is lost while tokens, and then the ending, are committed."""
    async with asyncio.timeout(SECONDS), open_stage(tmp_path, [WAVE]) as stage:
        replies, failures = stage.service.store.replies, list[str]()
        append, finish = replies.append, replies.end

        def append_and_fail(lease: Lease, frames: Sequence[TokenFrame]) -> frozenset[str]:
            if "append" in failures:
                return append(lease, frames)
            failures.append("append")
            if committed:
                append(lease, frames)
            raise Disconnected("The database does not answer.")

        def finish_and_fail(lease: Lease, reply_id: str, ending: ReplyEnding) -> datetime:
            if "finish" in failures:
                return finish(lease, reply_id, ending)
            failures.append("finish")
            if committed:
                finish(lease, reply_id, ending)
            raise Disconnected("The database does not answer.")

        replies.append, replies.end = append_and_fail, finish_and_fail  # type: ignore[method-assign]
        talk = await stage.chat.create_conversation()
        id = (await stage.chat.send_message(talk.id, None, user("Hello"))).reply.id
        assert isinstance((await read_entries(stage.chat, id))[-1].event, Finished)
        assert failures == ["append", "finish"]
        assert [token.token_id for token in await stage.chat.tokens(id)] == WAVE
        stored = (await stage.chat.message(id)).reply
        assert stored is not None
        assert stored.status is ReplyStatus.DONE


async def test_an_outage_that_lasts_too_long_ends_the_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palaver.chat.turn_log.OUTAGE_SECONDS", 0.2)
    async with asyncio.timeout(SECONDS), open_stage(tmp_path, [WAVE]) as stage:
        replies = stage.service.store.replies
        append = replies.append

        def fail(lease: Lease, frames: Sequence[TokenFrame]) -> frozenset[str]:
            raise Disconnected("The database does not answer.")

        replies.append = fail  # type: ignore[method-assign]
        talk = await stage.chat.create_conversation()
        id = (await stage.chat.send_message(talk.id, None, user("Hello"))).reply.id
        await read_entries(stage.chat, id)
        stored = (await stage.chat.message(id)).reply
        assert stored is not None
        assert stored.status is ReplyStatus.FAILED
        replies.append = append  # type: ignore[method-assign]
        await stage.chat.continue_reply(id)
        assert isinstance((await read_entries(stage.chat, id))[-1].event, Finished)


async def test_a_frame_says_what_a_store_misses() -> None:
    from palaver.chat.turn_log import _WaitingTokens
    from palaver.store import TokenCountMismatch
    from tests.store.factories import steps

    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    frame = _WaitingTokens(TokenFrame("a", 5, steps(6, 7)), steps(3, 4, 5), future)
    assert frame.after(5) == frame.tokens
    assert frame.after(3) == replace(frame.tokens, start=3, steps=steps(4, 5, 6, 7))
    assert frame.after(6) == replace(frame.tokens, start=6, steps=steps(7))
    assert frame.after(7) == replace(frame.tokens, start=7, steps=())
    for count in (1, 8):
        with pytest.raises(TokenCountMismatch):
            frame.after(count)
