"""Two servers on one store: everything works at the one that does not run the turn."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from palaver.chat.interface import Chat, ConversationChange
from palaver.chat.model import Model
from palaver.chat.model_pool import ModelPool
from palaver.chat.service import Service
from palaver.chat.turn_log import LogEntry
from palaver.engines.host.supervisor import ReportProgress
from palaver.events import Failed, Finished, Started
from palaver.generation import Finish
from palaver.messages import user
from palaver.store import ReplyStatus, StoreError
from palaver.store.notifications import Gap, TokensStored
from palaver.store.replies import NewTokens
from palaver.store.schema import holders
from tests.chat.process_kills import run_fronts
from tests.chat.scripted_service import WAVE, Stage, model, read_entries, read_until, run_service
from tests.scripted_engine import Script
from tests.store.conftest import (  # noqa: F401
    StoreLocation,
    place,
    postgres,
    prepared_postgres,
    prepared_sqlite,
)

SECONDS = 60


@dataclass(frozen=True)
class Pair:
    """The server that runs the turns, and another one."""

    owner: Stage
    other: Stage


@asynccontextmanager
async def two_fronts(
    place: StoreLocation,  # noqa: F811
    script: Script = WAVE,
    *,
    held: bool = True,
    resume: bool = False,
) -> AsyncIterator[Pair]:
    with place.open() as one, place.open() as two:
        async with (
            asyncio.timeout(SECONDS),
            run_service(one, [script], held=held) as owner,
            run_service(two, [script], resume=resume) as other,
        ):
            await other.chat.wait_until_ready()
            await other.service.recovered.wait()
            yield Pair(owner, other)


async def start(chat: Chat) -> str:
    talk = await chat.create_conversation()
    return (await chat.send_message(talk.id, None, user("Hello"))).reply.id


async def status(chat: Chat, reply_id: str) -> ReplyStatus:
    stored = (await chat.message(reply_id)).reply
    assert stored is not None
    return stored.status


def numbered(entries: list[LogEntry]) -> list[LogEntry]:
    return [entry for entry in entries if not isinstance(entry.event, Started)]


async def eventually(check: Callable[[], Awaitable[bool]]) -> None:
    while not await check():
        await asyncio.sleep(0.01)


async def test_a_turn_is_stopped_and_continued_at_the_other_server(place: StoreLocation) -> None:  # noqa: F811
    async with two_fronts(place) as fronts:
        reply = await start(fronts.owner.chat)
        await read_until(fronts.owner.chat, reply, 2)
        reader = asyncio.create_task(read_entries(fronts.other.chat, reply))
        await fronts.other.chat.stop_reply(reply)
        ended = (await reader)[-1].event
        assert isinstance(ended, Finished)
        assert ended.finish is Finish.STOPPED
        assert await status(fronts.owner.chat, reply) is ReplyStatus.STOPPED
        await fronts.other.chat.continue_reply(reply)  # runs there now
        here, there = await asyncio.gather(*(read_entries(one.chat, reply) for one in (fronts.owner, fronts.other)))
        assert numbered(here) == numbered(there)
        assert [token.token_id for token in await fronts.owner.chat.tokens(reply)] == WAVE


@asynccontextmanager
async def unsynced_stop(fronts: Pair) -> AsyncIterator[str]:
    """A reply that was stopped. SQLite shows that to the other server before the disk has it, which the server of the
    turn waits for until this is left."""
    synced, stored = threading.Event(), fronts.owner.service.store.replies
    end = stored.end

    def end_slowly(*arguments: Any) -> Any:
        ended = end(*arguments)
        synced.wait(SECONDS)
        return ended

    stored.end = end_slowly  # type: ignore[method-assign, assignment]
    reply = await start(fronts.owner.chat)
    await read_until(fronts.owner.chat, reply, 2)
    reader = asyncio.create_task(read_entries(fronts.other.chat, reply))
    await fronts.other.chat.stop_reply(reply)
    assert isinstance((await reader)[-1].event, Finished)
    try:
        yield reply
    finally:
        synced.set()


async def test_a_turn_is_continued_at_the_other_server_while_its_ending_is_synced(place: StoreLocation) -> None:  # noqa: F811
    async with two_fronts(place) as fronts:
        async with unsynced_stop(fronts) as reply:
            await fronts.other.chat.continue_reply(reply)
            reader = asyncio.create_task(read_entries(fronts.owner.chat, reply))
            there = await read_entries(fronts.other.chat, reply)
        assert numbered(await reader) == numbered(there)
        assert [token.token_id for token in await fronts.owner.chat.tokens(reply)] == WAVE


async def test_a_turn_is_continued_at_its_server_while_its_ending_is_synced(place: StoreLocation) -> None:  # noqa: F811
    async with two_fronts(place) as fronts:
        async with unsynced_stop(fronts) as reply:
            continuing = asyncio.create_task(fronts.owner.chat.continue_reply(reply))
            await fronts.other.chat.message(reply)  # lets it begin
        assert await status(fronts.owner.chat, (await continuing).id) is ReplyStatus.RUNNING
        fronts.owner.hold.set()
        await read_entries(fronts.owner.chat, reply)
        assert [token.token_id for token in await fronts.owner.chat.tokens(reply)] == WAVE


async def stop_elsewhere(fronts: Pair) -> str:
    """The id of a reply that was stopped after four tokens, at the server that does not run it."""
    reply = await start(fronts.owner.chat)
    await read_until(fronts.owner.chat, reply, 2)
    await fronts.other.chat.stop_reply(reply)
    await read_entries(fronts.owner.chat, reply)
    return reply


async def test_the_engine_starts_while_a_continue_is_synced(place: StoreLocation) -> None:  # noqa: F811
    """And no token is stored before that."""
    synced = threading.Event()

    def wait() -> None:
        synced.wait(SECONDS)

    async with two_fronts(place) as fronts:
        reply = await stop_elsewhere(fronts)
        stored = fronts.other.service.store.replies
        stored.sync = wait  # type: ignore[method-assign]
        try:
            continuing = asyncio.create_task(fronts.other.chat.continue_reply(reply))

            async def has_token() -> bool:
                turn = fronts.other.service.turns.get(reply)
                return turn is not None and "first_token" in turn.timer.timings()

            await eventually(has_token)
            assert not continuing.done(), "the caller is told that it is stored once that is so"
            assert stored.token_ids(reply) == tuple(WAVE[:4])
        finally:
            synced.set()
        assert (await continuing).id == reply
        await read_entries(fronts.other.chat, reply)
        assert stored.token_ids(reply) == tuple(WAVE)


async def test_a_continue_that_is_not_synced_fails_and_can_be_repeated(place: StoreLocation) -> None:  # noqa: F811
    def fail() -> None:
        raise StoreError("The disk is gone.")

    async with two_fronts(place) as fronts:
        reply = await stop_elsewhere(fronts)
        stored = fronts.other.service.store.replies
        stored.sync = fail  # type: ignore[method-assign]
        with pytest.raises(StoreError, match="disk is gone"):
            await fronts.other.chat.continue_reply(reply)
        ended = (await read_entries(fronts.other.chat, reply))[-1].event
        assert isinstance(ended, Failed)
        assert "disk is gone" in ended.error
        assert stored.token_ids(reply) == tuple(WAVE[:4])
        del stored.sync
        await fronts.other.chat.continue_reply(reply)
        await read_entries(fronts.other.chat, reply)
        assert stored.token_ids(reply) == tuple(WAVE)


async def test_readers_that_are_notified_one_after_the_other_read_together(
    place: StoreLocation,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("palaver.chat.fronts.READ_SECONDS", SECONDS)
    async with two_fronts(place) as pair:
        ids = [await start(pair.owner.chat) for _ in range(2)]
        fronts, stored = pair.other.service.fronts, pair.other.service.store.replies
        await fronts.read(ids[0], 0)
        reads: list[Mapping[str, int]] = []
        read_new = stored.read_new

        def recording(positions: Mapping[str, int]) -> dict[str, NewTokens]:
            reads.append(dict(positions))
            return read_new(positions)

        stored.read_new = recording  # type: ignore[method-assign]
        with fronts.follow(ids[0]) as one, fronts.follow(ids[1]) as two:
            fronts.look_seconds = SECONDS
            both = [asyncio.create_task(one.read(0)), asyncio.create_task(two.read(0))]
            for id in ids:
                fronts._receive(TokensStored((id,)))
                for _ in range(10):
                    await asyncio.sleep(0)
            assert reads == [], "the last read was a moment ago"
            fronts._wake_due()
            await asyncio.gather(*both)
            assert reads == [dict.fromkeys(ids, 0)]
            fronts._read_at -= SECONDS
            again = asyncio.create_task(one.read(0))
            fronts._receive(TokensStored((ids[0],)))
            await again


async def test_a_reader_elsewhere_is_woken_and_resumes_by_number(place: StoreLocation) -> None:  # noqa: F811
    async with two_fronts(place) as fronts:
        fronts.other.service.fronts.look_seconds = SECONDS  # only notifications wake it
        reply = await start(fronts.owner.chat)
        first = numbered(await read_until(fronts.owner.chat, reply, 2))
        last = first[-1].number
        reader = asyncio.create_task(read_entries(fronts.other.chat, reply, last))
        await asyncio.sleep(0.1)
        fronts.owner.hold.set()
        rest = numbered(await reader)
        whole = numbered(await read_entries(fronts.owner.chat, reply))
        assert whole == first + rest


async def test_the_answer_is_requested_at_the_other_server(place: StoreLocation) -> None:  # noqa: F811
    async with two_fronts(place) as fronts:
        reply = await start(fronts.owner.chat)
        await read_until(fronts.owner.chat, reply, 2)
        await fronts.other.chat.answer_now(reply)
        turn = fronts.owner.service.turns.get(reply)
        assert turn is not None

        async def requested() -> bool:
            return turn.reply_stream.answer_requested

        await eventually(requested)
        fronts.owner.hold.set()
        await read_entries(fronts.other.chat, reply)
        stored = (await fronts.other.chat.message(reply)).reply
        assert stored is not None
        assert stored.settings.answer_at is not None


async def test_a_command_that_was_not_notified_is_found(place: StoreLocation) -> None:  # noqa: F811
    async with two_fronts(place) as fronts:
        reply = await start(fronts.owner.chat)
        await read_until(fronts.owner.chat, reply, 2)
        fronts.owner.service.fronts._receive = lambda notification: None  # type: ignore[method-assign]
        await fronts.other.chat.stop_reply(reply)
        await read_entries(fronts.owner.chat, reply)
        assert await status(fronts.other.chat, reply) is ReplyStatus.STOPPED


async def test_changes_are_shown_on_the_pages_of_all_servers(place: StoreLocation) -> None:  # noqa: F811
    async with two_fronts(place, held=False) as fronts, fronts.other.chat.changes() as changes:
        talk = await fronts.owner.chat.create_conversation()
        sent = await fronts.owner.chat.send_message(talk.id, None, user("Hello"))
        expected = [
            ConversationChange(talk.id, "created"),
            ConversationChange(talk.id, "message", sent.message.id),
            ConversationChange(talk.id, "turn", sent.reply.id),
            ConversationChange(talk.id, "ended", sent.reply.id),
        ]
        assert [await anext(changes) for _ in expected] == expected
        fronts.other.service.fronts._receive(Gap())
        assert await anext(changes) == ConversationChange("", "missed")


async def test_a_deleted_conversation_stops_its_turns_elsewhere(place: StoreLocation) -> None:  # noqa: F811
    async with two_fronts(place) as fronts:
        reply = await start(fronts.owner.chat)
        await read_until(fronts.owner.chat, reply, 2)
        talk = (await fronts.owner.chat.message(reply)).conversation_id
        await fronts.other.chat.delete_conversation(talk)

        async def ended() -> bool:
            return not fronts.owner.service.turns.running

        await eventually(ended)


async def test_a_stop_survives_the_server_that_should_run_it(
    place: StoreLocation,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("palaver.chat.service.RECOVERY_INTERVAL_S", 0.05)
    async with two_fronts(place, resume=True) as fronts:
        fronts.owner.service.fronts._receive = lambda notification: None  # type: ignore[method-assign]
        fronts.owner.service.fronts.look_seconds = SECONDS
        reply = await start(fronts.owner.chat)
        await read_until(fronts.owner.chat, reply, 2)
        reader = asyncio.create_task(read_entries(fronts.other.chat, reply))
        await asyncio.sleep(0.05)
        await fronts.other.chat.stop_reply(reply)
        database = fronts.other.service.store.database
        with database.write_transaction() as connection:  # what other processes see of one that is dead
            dead = fronts.owner.service.turns.lease.id
            connection.execute(holders.update().where(holders.c.id == dead).values(expires_at=0))
        ended = (await reader)[-1].event
        assert isinstance(ended, Finished)
        assert fronts.other.service.turns.get(reply) is not None


async def test_the_time_from_a_command_to_its_effect_does_not_depend_on_polling(
    place: StoreLocation,  # noqa: F811
) -> None:
    async with two_fronts(place) as fronts:
        for one in (fronts.owner, fronts.other):
            one.service.fronts.look_seconds = SECONDS
        reply = await start(fronts.owner.chat)
        await read_until(fronts.owner.chat, reply, 2)
        reader = asyncio.create_task(read_entries(fronts.other.chat, reply))
        await asyncio.sleep(0.1)
        begun = time.monotonic()
        await fronts.other.chat.stop_reply(reply)
        await reader
        assert time.monotonic() - begun < SECONDS / 2


async def test_a_server_that_is_starting_reads_a_turn_of_another_one_once_it_has_the_model(
    place: StoreLocation,  # noqa: F811
) -> None:
    loading, go_on = asyncio.Event(), asyncio.Event()

    async def load(name: str, report: ReportProgress) -> Model:
        loading.set()
        await go_on.wait()
        return model([WAVE], name)

    models = ModelPool(load, ("scripted",))
    with place.open() as one, place.open() as two:
        async with asyncio.timeout(SECONDS), run_service(one, [WAVE], held=True) as owner:
            reply = await start(owner.chat)
            await read_until(owner.chat, reply, 2)
            models.load("scripted")
            async with Service(two, models, resume=True) as starting:
                await loading.wait()
                reader = asyncio.create_task(read_entries(starting.chat(two.users.ensure().id), reply))
                await asyncio.sleep(0.1)
                go_on.set()
                owner.hold.set()
                assert isinstance((await reader)[-1].event, Finished)


async def test_the_turns_of_a_killed_server_go_on_at_the_other_one(
    place: StoreLocation,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("palaver.chat.service.RECOVERY_INTERVAL_S", 0.1)
    database = None if place.database is None else place.database.render_as_string()
    count = await run_fronts(tmp_path, kills=2, seconds=0.3, database=database, seed=1)
    assert count.wrong == []
    assert count.kills == 2
    assert count.continued, "no reply was cut"
