"""Ordinary exceptions anywhere in a turn: it ends, it says so, the next one works, nothing is lost."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from palaver.chat.engine_choice import LoadOptions
from palaver.chat.interface import ConversationChange, SentMessage
from palaver.chat.model import Model, build_model, load_model_format
from palaver.chat.model_pool import ModelPool
from palaver.chat.service import Service
from palaver.chat.turn_log import LogEntry, RecorderClosed
from palaver.chat.turns import MAX_QUEUED, NOT_BEGUN, ChangeFeed
from palaver.engines.host.supervisor import ReportProgress
from palaver.errors import BadParameter, ModelError
from palaver.events import Failed, Finished, ReadEvent, fold
from palaver.messages import assistant, user
from palaver.models.resolver import resolve_model
from palaver.store import ReplyStatus, Store, open_store
from tests.chat.faults import KINDS, Faults, throw_at_awaits
from tests.chat.process_kills import event_text
from tests.chat.scripted_service import Stage, model, open_stage, read_entries, read_until, reply, run_service
from tests.scripted_engine import HoldScript

SHORT = reply("hm", "Yes!")
SECONDS = 60
"""Far more than any turn here takes: what is not over by then hangs."""


@dataclasses.dataclass
class Tried:
    """What somebody who talked while there was a fault got to know."""

    message_id: str | None = None
    reply_id: str | None = None
    seen: list[LogEntry] = dataclasses.field(default_factory=list)
    error: BaseException | None = None


async def converse(stage: Stage, conversation: str) -> Tried:
    """Says something and reads the reply, as far as that goes."""
    tried = Tried()

    async def read(id: str) -> None:
        async with stage.chat.events(id) as stream:
            async for entry in stream:
                tried.seen.append(entry)

    try:
        sent: SentMessage = await asyncio.create_task(stage.chat.send_message(conversation, None, user("Well?")))
        tried.message_id, tried.reply_id = sent.message.id, sent.reply.id
        await read(sent.reply.id)
    except (Exception, asyncio.CancelledError) as error:
        tried.error = error
    return tried


async def check_afterwards(stage: Stage, conversation: str, tried: Tried, fault: BaseException, place: int) -> None:
    """With the fault gone: all that was begun is over, what was told is so, and the conversation goes on."""
    chat, where = stage.chat, f"{fault!r} at {place}"
    everything = await asyncio.to_thread(stage.service.store.messages.all, conversation)
    replies = [one for one in everything if one.reply is not None]
    assert tried.message_id is None or tried.message_id in {one.id for one in everything}, where
    assert tried.reply_id is None or tried.reply_id in {one.id for one in replies}, where
    parent = everything[-1].id if everything else None
    for one in replies:
        received = await read_entries(chat, one.id)
        now = {entry.number: event_text(entry) for entry in received if event_text(entry)}
        assert all(now[entry.number] == event_text(entry) for entry in tried.seen if event_text(entry)), where
        if isinstance(received[-1].event, Failed):
            error = received[-1].event.error
            known = ("fault", type(fault).__name__, "The database", NOT_BEGUN, str(RecorderClosed()))
            assert any(what in error for what in known), error
            await chat.continue_reply(one.id)
            received = await read_entries(chat, one.id)
            now = {entry.number: event_text(entry) for entry in received if event_text(entry)}
            assert all(now[entry.number] == event_text(entry) for entry in tried.seen if event_text(entry)), where
        assert isinstance(received[-1].event, Finished), where
        assert [token.token_id for token in await chat.tokens(one.id)] == SHORT, where
    sent = await chat.send_message(conversation, parent, user("And?"))
    assert fold([one.event for one in await read_entries(chat, sent.reply.id)]).message == assistant("Yes!", "hm"), (
        where
    )
    ended = await chat.message(sent.reply.id)
    assert ended.reply is not None
    assert ended.reply.status is ReplyStatus.DONE, where


async def try_every_place(stage: Stage, faults: Faults, kinds: tuple[Callable[[], BaseException], ...]) -> int:
    """A turn for each place where a fault may come, until one goes by undisturbed; how many there were."""
    place = 0
    while True:
        kind = kinds[place % len(kinds)]
        async with asyncio.timeout(SECONDS):
            talk = await stage.chat.create_conversation()
            faults.arm(place, kind)
            tried = await converse(stage, talk.id)
            for turn in stage.service.turns.running:  # a reader that failed has left it
                async for _ in turn.log.follow():
                    pass
            await asyncio.sleep(0)
            faults.disarm()
            if faults.raised is None:
                assert tried.error is None
                return place
            ending = tried.seen[-1].event if tried.seen and tried.error is None else None
            assert tried.error is not None or isinstance(ending, Failed | Finished)
            await check_afterwards(stage, talk.id, tried, faults.raised, place)
        place += 1


def rotated(by: int) -> tuple[Callable[[], BaseException], ...]:
    return (*KINDS[by:], *KINDS[:by])


def put_faults_around(service: Service, faults: Faults, after: bool) -> None:
    """All that a turn calls of the store, the format, its readers and the engine."""
    store, used = service.store, service.models.current()
    faults.around(store.replies, ("start", "append", "finish", "tokens", "token_ids", "running_ids", "resume"), after)
    faults.around(store.messages, ("append", "get", "path", "load_path", "load"), after)
    faults.around(store.conversations, ("get",), after)
    make_reader = used.format.reader

    def reader(*values: Any, **named: Any) -> Any:
        found = make_reader(*values, **named)
        faults.around(found, ("open", "feed", "close"), after)
        return found

    used.format.reader = reader  # type: ignore[method-assign]
    faults.around(used.format, ("render", "reader"), after)
    generate = used.engine.generate

    @asynccontextmanager
    async def generating(*values: Any, **named: Any) -> AsyncIterator[Any]:
        faults.strike()
        async with generate(*values, **named) as generation:
            yield Stepping(generation, faults)
        faults.strike()

    used.engine.generate = generating  # type: ignore[method-assign]


class Stepping:
    """A generation with a fault at each of its steps."""

    def __init__(self, generation: Any, faults: Faults) -> None:
        self._generation = generation
        self._faults = faults
        self.stop, self.answer_now = generation.stop, generation.answer_now

    def __aiter__(self) -> Stepping:
        return self

    async def __anext__(self) -> Any:
        self._faults.strike()
        return await anext(self._generation)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_fault_at_any_call_of_a_turn(tmp_path: Path, after: bool) -> None:
    faults = Faults()
    async with open_stage(tmp_path, [SHORT]) as stage:
        await stage.chat.wait_until_ready()
        put_faults_around(stage.service, faults, after)
        places = await try_every_place(stage, faults, rotated(2 if after else 0))
    assert places > 3 * len(SHORT)


async def test_a_fault_at_any_await_of_a_turn(tmp_path: Path) -> None:
    faults = Faults()
    throw_at_awaits(faults, "palaver/chat")
    async with open_stage(tmp_path, [SHORT]) as stage:
        await stage.chat.wait_until_ready()
        places = await try_every_place(stage, faults, (*KINDS, asyncio.CancelledError))
    assert places > len(SHORT)


async def test_a_fault_at_any_statement_of_a_turn(tmp_path: Path) -> None:
    """In the database itself, where it is told as what it is."""
    from sqlalchemy import event

    faults = Faults()
    async with open_stage(tmp_path, [SHORT]) as stage:
        await stage.chat.wait_until_ready()
        engine = stage.service.store.database.engine
        event.listen(engine, "before_cursor_execute", lambda *_: faults.strike())
        event.listen(engine, "commit", lambda *_: faults.strike())
        places = await try_every_place(stage, faults, rotated(1))
    assert places > 3 * len(SHORT)


async def test_a_fault_at_any_step_of_the_engine(tmp_path: Path) -> None:
    """The real one: sprout, in this process."""
    pytest.importorskip("torch")
    from palaver.engines.torch.engine import load

    model = resolve_model("sprout")
    tokenizer, format = load_model_format(model, LoadOptions())
    engine = load(model.folder, vocabulary=tokenizer.vocabulary)
    faults = Faults()
    faults.around(engine._runner, ("allocate", "run"), after=False)
    models = ModelPool(_never)
    await models.use(build_model("sprout", engine, format, tokenizer))
    with open_store(tmp_path) as store:
        async with Service(store, models) as service:
            chat = service.chat(store.users.ensure().id)
            wanted = {"max_tokens": 12, "temperature": 0}
            talk_to = await chat.create_conversation(parameters=wanted)
            first = await chat.send_message(talk_to.id, None, user("What is 2 + 3?"))
            await read_entries(chat, first.reply.id)
            undisturbed = [token.token_id for token in await chat.tokens(first.reply.id)]
            place = 0
            while True:
                talk_to = await chat.create_conversation(parameters=wanted)
                faults.arm(place, KINDS[place % len(KINDS)])
                sent = await chat.send_message(talk_to.id, None, user("What is 2 + 3?"))
                async with asyncio.timeout(SECONDS):
                    received = await read_entries(chat, sent.reply.id)
                faults.disarm()
                if faults.raised is None:
                    break
                last = received[-1].event
                assert isinstance(last, Failed)
                assert type(faults.raised).__name__ in last.error
                before = [token.token_id for token in await chat.tokens(sent.reply.id)]
                assert before == undisturbed[: len(before)]
                again = await chat.start_reply(talk_to.id, sent.message.id)
                async with asyncio.timeout(SECONDS):
                    received = await read_entries(chat, again.id)
                assert isinstance(received[-1].event, Finished)
                assert [token.token_id for token in await chat.tokens(again.id)] == undisturbed
                place += 1
            assert place >= 6


async def _never(name: str, report: ReportProgress) -> Model:
    raise AssertionError("nothing is loaded here")


async def test_one_replys_fault_does_not_fail_the_others(tmp_path: Path) -> None:
    """Tokens of several replies are one transaction; a token that can't be written does not affect the others."""
    hold = asyncio.Event()
    async with open_stage(tmp_path, [[*SHORT[:2], HoldScript(hold), *SHORT[2:]]]) as stage:
        talks = [await stage.chat.create_conversation() for _ in range(3)]
        sent = [await stage.chat.send_message(talk.id, None, user("Well?")) for talk in talks]
        for one in sent:
            await read_until(stage.chat, one.reply.id, 1)
        replies, bad = stage.service.store.replies, sent[1].reply.id
        append = replies.append

        def appended(lease: Any, frames: Any) -> Any:
            if bad in {frame.reply_id for frame in frames}:
                raise ValueError("this one alone")
            return append(lease, frames)

        replies.append = appended  # type: ignore[method-assign]
        hold.set()
        async with asyncio.timeout(SECONDS):
            endings = [(await read_entries(stage.chat, one.reply.id))[-1].event for one in sent]
    assert [type(ending) for ending in endings] == [Finished, Failed, Finished]


async def test_a_cancelled_caller_leaves_no_reply_that_never_runs(tmp_path: Path) -> None:
    async with open_stage(tmp_path, [SHORT]) as stage:
        chat, replies = stage.chat, stage.service.store.replies
        talk = await chat.create_conversation()
        loop, started, start = asyncio.get_running_loop(), asyncio.Event(), replies.start

        def starting(*values: Any, **named: Any) -> Any:
            loop.call_soon_threadsafe(started.set)
            return start(*values, **named)

        replies.start = starting  # type: ignore[method-assign]
        saying = asyncio.create_task(chat.send_message(talk.id, None, user("Well?")))
        await started.wait()
        saying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saying
        async with asyncio.timeout(SECONDS):
            while len(nodes := await chat.nodes(talk.id)) < 2:
                await asyncio.sleep(0.01)
            assert isinstance((await read_entries(chat, nodes[-1].id))[-1].event, Finished)


async def lose_lease(store: Store, stage: Stage) -> None:
    """What another process does that takes this one for dead."""
    lease = stage.service.turns._lease
    with store.database.write_transaction() as connection:
        from palaver.store.schema import holders

        connection.execute(holders.update().where(holders.c.id == lease.id).values(expires_at=0))


@pytest.mark.parametrize("resume", [True, False])
async def test_a_lost_lease_stops_writing_and_later_turns_work(tmp_path: Path, resume: bool) -> None:
    with open_store(tmp_path) as store, open_store(tmp_path) as other:
        async with run_service(store, [SHORT], held=True) as here:
            talk = await here.chat.create_conversation()
            sent = await here.chat.send_message(talk.id, None, user("Well?"))
            await read_until(here.chat, sent.reply.id, 1)
            reader = asyncio.create_task(read_entries(here.chat, sent.reply.id))
            await lose_lease(store, here)
            async with run_service(other, [SHORT], resume=resume) as there:
                await there.service.recovered.wait()
                second = await here.chat.create_conversation()
                later = await here.chat.send_message(second.id, None, user("And?"))  # here it is found out
                here.hold.set()
                async with asyncio.timeout(SECONDS):
                    assert isinstance((await read_entries(here.chat, later.reply.id))[-1].event, Finished)
                    assert len(await here.chat.nodes(second.id)) == 2
                    if not resume:
                        await there.chat.continue_reply(sent.reply.id)
                    await read_entries(there.chat, sent.reply.id)
                    received = await read_entries(here.chat, sent.reply.id)  # from the store, now that it is another's
                    followed = await reader  # it went on with what the other process stored
                assert isinstance(received[-1].event, Finished)
                assert isinstance(followed[-1].event, Finished if resume else Finished | Failed)
                numbered = [[one for one in read if isinstance(one.event, ReadEvent)] for read in (received, followed)]
                assert numbered[0][: len(numbered[1])] == numbered[1]
                assert [token.token_id for token in await here.chat.tokens(sent.reply.id)] == SHORT


async def test_a_lost_lease_is_noticed_when_it_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palaver.chat.turns.LEASE_SECONDS", 0.06)
    with open_store(tmp_path) as store, open_store(tmp_path) as other:
        async with run_service(store, [SHORT], held=True) as here:
            talk = await here.chat.create_conversation()
            sent = await here.chat.send_message(talk.id, None, user("Well?"))
            await read_until(here.chat, sent.reply.id, 1)
            monkeypatch.setattr("palaver.chat.turns.LEASE_SECONDS", 3600)
            await asyncio.sleep(0.1)
            await lose_lease(store, here)
            await asyncio.to_thread(other.replies.interrupt_orphans)
            here.service.turns._renewing.cancel()
            monkeypatch.setattr("palaver.chat.turns.LEASE_SECONDS", 0.06)
            here.service.turns._renewing = asyncio.create_task(here.service.turns._renew())
            async with asyncio.timeout(SECONDS):
                async with here.chat.events(sent.reply.id) as stream:
                    last = [entry async for entry in stream][-1]
            assert isinstance(last.event, Failed)
            found = await here.chat.message(sent.reply.id)
            assert found.reply is not None
            assert found.reply.status is ReplyStatus.INTERRUPTED


async def test_a_reply_that_cant_be_recovered_does_not_affect_others(tmp_path: Path) -> None:
    """Such as one whose conversation was deleted meanwhile."""
    for resume in (True, False):
        with open_store(tmp_path / str(resume)) as store:
            async with run_service(store, [SHORT], held=True) as stage:
                talks = [await stage.chat.create_conversation() for _ in range(2)]
                sent = [await stage.chat.send_message(talk.id, None, user("Well?")) for talk in talks]
                for one in sent:
                    await read_until(stage.chat, one.reply.id, 1)
                await stage.service.turns.park(leave=True)
            store.conversations.delete(talks[0].id)
            async with run_service(store, [SHORT], resume=resume) as stage:
                await stage.service.recovered.wait()
                async with asyncio.timeout(SECONDS):
                    received = await read_entries(stage.chat, sent[1].reply.id)
                assert isinstance(received[-1].event, Finished if resume else Failed)
                await stage.chat.restore_conversation(talks[0].id)
                first = await stage.chat.message(sent[0].reply.id)
                assert first.reply is not None
                assert first.reply.status is ReplyStatus.INTERRUPTED


async def test_orphans_are_recovered_when_a_later_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("palaver.chat.service.RECOVERY_INTERVAL_S", 0.01)
    with open_store(tmp_path) as store:
        async with run_service(store, [SHORT], held=True) as stage:
            talk = await stage.chat.create_conversation()
            sent = await stage.chat.send_message(talk.id, None, user("Well?"))
            await read_until(stage.chat, sent.reply.id, 1)
            await stage.service.turns.park(leave=True)

        async def load(name: str, report: ReportProgress) -> Model:
            if name == "missing":
                raise BadParameter("model", name, "there is none")
            return model([SHORT], name)

        models = ModelPool(load)
        models.load("missing")
        async with Service(store, models) as service:
            await service.recovered.wait()
            chat = service.chat(store.users.ensure().id)
            await chat.load_model("scripted")
            async with asyncio.timeout(SECONDS):
                assert isinstance((await read_entries(chat, sent.reply.id))[-1].event, Failed)
            found = await chat.message(sent.reply.id)
            assert found.reply is not None
            assert found.reply.status is ReplyStatus.INTERRUPTED


async def test_an_engine_that_does_not_stop_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palaver.chat.turns.PARK_SECONDS", 0.05)
    async with open_stage(tmp_path, [SHORT], held=True) as stage:
        talk = await stage.chat.create_conversation()
        sent = await stage.chat.send_message(talk.id, None, user("Well?"))
        await read_until(stage.chat, sent.reply.id, 1)
        turn = stage.service.turns.get(sent.reply.id)
        assert turn is not None
        turn.reply_stream.stop = lambda: None  # type: ignore[method-assign]
        async with asyncio.timeout(SECONDS):
            await stage.service.turns.park()
            assert isinstance((await read_entries(stage.chat, sent.reply.id))[-1].event, Failed)
        await stage.service.turns.write_pending_endings()
        found = await stage.chat.message(sent.reply.id)
        assert found.reply is not None
        assert found.reply.status is ReplyStatus.INTERRUPTED


async def test_a_model_that_cant_be_loaded_says_why(tmp_path: Path) -> None:
    async def load(name: str, report: ReportProgress) -> Model:
        raise RuntimeError("the wrong magic")

    models = ModelPool(load)
    models.load("odd")
    with pytest.raises(ModelError, match=r"Can't load the model 'odd'.*the wrong magic"):
        await models.ready()
    assert "the wrong magic" in models.card().note


async def test_an_error_while_unloading_does_not_prevent_the_load() -> None:
    async def load(name: str, report: ReportProgress) -> Model:
        return model([SHORT], name)

    async def park() -> None:
        raise RuntimeError("can't park")

    models = ModelPool(load)
    models.load("first")
    await models.ready()
    models.park = park
    models.load("second")
    assert (await models.loaded()).name == "second"


async def test_a_slow_subscriber_misses_changes_and_others_do_not() -> None:
    changes = ChangeFeed()
    async with changes.subscribe("me") as slow, changes.subscribe("me") as quick:
        for number in range(MAX_QUEUED + 1):
            changes.publish("me", ConversationChange(str(number), "message"))
            assert await anext(quick) == ConversationChange(str(number), "message")
        assert await anext(slow) == ConversationChange("", "missed")
