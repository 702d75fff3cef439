"""Ordinary exceptions anywhere in a turn: it ends, it says so, the next one works, nothing is lost."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from palaver.chat.change_feed import MAX_BEHIND, ChangeFeed
from palaver.chat.interface import ConversationChange, SentMessage
from palaver.chat.model import Model
from palaver.chat.model_loader import LoadOptions, ModelSlot, build_model, load_model_format
from palaver.chat.service import Service
from palaver.chat.turn_log import LogEntry, RecorderClosed
from palaver.chat.turns import LOST, NOT_BEGUN
from palaver.engines.host.supervisor import ReportProgress
from palaver.errors import BadParameter, ModelError, PalaverError
from palaver.events import Failed, Finished, fold
from palaver.messages import assistant, user
from palaver.models.catalog import resolve
from palaver.store import ReplyStatus, Store, open_store
from tests.chat.faults import KINDS, Faults, throw_at_awaits
from tests.chat.killing import written
from tests.chat.making import Stage, entries, model, reply, serving, staged, until
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
        said: SentMessage = await asyncio.create_task(stage.chat.say(conversation, None, user("Well?")))
        tried.message_id, tried.reply_id = said.message.id, said.reply.id
        await read(said.reply.id)
    except (Exception, asyncio.CancelledError) as error:
        tried.error = error
    return tried


async def check_afterwards(stage: Stage, conversation: str, tried: Tried, fault: BaseException, place: int) -> None:
    """With the fault gone: all that was begun is over, what was told is so, and the conversation goes on."""
    chat, where = stage.chat, f"{fault!r} at {place}"
    everything = await asyncio.to_thread(stage.service.store.messages.everything, conversation)
    replies = [one for one in everything if one.reply is not None]
    assert tried.message_id is None or tried.message_id in {one.id for one in everything}, where
    assert tried.reply_id is None or tried.reply_id in {one.id for one in replies}, where
    parent = everything[-1].id if everything else None
    for one in replies:
        told = await entries(chat, one.id)
        now = {entry.number: written(entry) for entry in told if written(entry)}
        assert all(now[entry.number] == written(entry) for entry in tried.seen if written(entry)), where
        if isinstance(told[-1].event, Failed):
            error = told[-1].event.error
            known = ("fault", type(fault).__name__, "The database", NOT_BEGUN, str(RecorderClosed()))
            assert any(what in error for what in known), error
            await chat.go_on(one.id)
            told = await entries(chat, one.id)
            now = {entry.number: written(entry) for entry in told if written(entry)}
            assert all(now[entry.number] == written(entry) for entry in tried.seen if written(entry)), where
        assert isinstance(told[-1].event, Finished), where
        assert [token.token_id for token in await chat.tokens(one.id)] == SHORT, where
    said = await chat.say(conversation, parent, user("And?"))
    assert fold([one.event for one in await entries(chat, said.reply.id)]).message == assistant("Yes!", "hm"), where
    ended = await chat.message(said.reply.id)
    assert ended.reply is not None
    assert ended.reply.status is ReplyStatus.DONE, where


async def try_every_place(stage: Stage, faults: Faults, kinds: tuple[Callable[[], BaseException], ...]) -> int:
    """A turn for each place where a fault may come, until one goes by undisturbed; how many there were."""
    place = 0
    while True:
        kind = kinds[place % len(kinds)]
        async with asyncio.timeout(SECONDS):
            talk = await stage.chat.create()
            faults.arm(place, kind)
            tried = await converse(stage, talk.id)
            for turn in stage.service.turns.running:  # a reader that failed has left it
                async for _ in turn.log.read():
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
    faults.around(store.replies, ("start", "append", "finish", "tokens", "token_ids", "held", "resume"), after)
    faults.around(store.messages, ("append", "get", "path", "full_path", "full"), after)
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
    async with staged(tmp_path, [SHORT]) as stage:
        await stage.chat.ready()
        put_faults_around(stage.service, faults, after)
        places = await try_every_place(stage, faults, rotated(2 if after else 0))
    assert places > 3 * len(SHORT)


async def test_a_fault_at_any_await_of_a_turn(tmp_path: Path) -> None:
    faults = Faults()
    throw_at_awaits(faults, "palaver/chat")
    async with staged(tmp_path, [SHORT]) as stage:
        await stage.chat.ready()
        places = await try_every_place(stage, faults, (*KINDS, asyncio.CancelledError))
    assert places > len(SHORT)


async def test_a_fault_at_any_statement_of_a_turn(tmp_path: Path) -> None:
    """In the database itself, where it is told as what it is."""
    from sqlalchemy import event

    faults = Faults()
    async with staged(tmp_path, [SHORT]) as stage:
        await stage.chat.ready()
        engine = stage.service.store.database.engine
        event.listen(engine, "before_cursor_execute", lambda *_: faults.strike())
        event.listen(engine, "commit", lambda *_: faults.strike())
        places = await try_every_place(stage, faults, rotated(1))
    assert places > 3 * len(SHORT)


async def test_a_fault_at_any_step_of_the_engine(tmp_path: Path) -> None:
    """The real one: sprout, in this process."""
    pytest.importorskip("torch")
    from palaver.engines.torch.engine import load

    folder = resolve("sprout")
    tokenizer, format = load_model_format(folder, LoadOptions())
    engine = load(folder, vocabulary=tokenizer.vocabulary)
    faults = Faults()
    faults.around(engine._runner, ("begin", "run"), after=False)
    models = ModelSlot(_never)
    await models.use(build_model("sprout", engine, format, tokenizer))
    with open_store(tmp_path) as store:
        async with Service(store, models) as service:
            chat = service.chat(store.users.ensure().id)
            wanted = {"max_tokens": 6, "temperature": 0}
            talk_to = await chat.create(parameters=wanted)
            first = await chat.say(talk_to.id, None, user("What is 2 + 3?"))
            await entries(chat, first.reply.id)
            undisturbed = [token.token_id for token in await chat.tokens(first.reply.id)]
            place = 0
            while True:
                talk_to = await chat.create(parameters=wanted)
                faults.arm(place, KINDS[place % len(KINDS)])
                said = await chat.say(talk_to.id, None, user("What is 2 + 3?"))
                async with asyncio.timeout(SECONDS):
                    told = await entries(chat, said.reply.id)
                faults.disarm()
                if faults.raised is None:
                    break
                last = told[-1].event
                assert isinstance(last, Failed)
                assert type(faults.raised).__name__ in last.error
                before = [token.token_id for token in await chat.tokens(said.reply.id)]
                assert before == undisturbed[: len(before)]
                again = await chat.reply(talk_to.id, said.message.id)
                async with asyncio.timeout(SECONDS):
                    told = await entries(chat, again.id)
                assert isinstance(told[-1].event, Finished)
                assert [token.token_id for token in await chat.tokens(again.id)] == undisturbed
                place += 1
            assert place >= 6


async def _never(name: str, told: ReportProgress) -> Model:
    raise AssertionError("nothing is loaded here")


async def test_one_replys_fault_does_not_fail_the_others(tmp_path: Path) -> None:
    """Tokens of several replies are one transaction; what can't be written of one is not the others'."""
    hold = asyncio.Event()
    async with staged(tmp_path, [[*SHORT[:2], HoldScript(hold), *SHORT[2:]]]) as stage:
        talks = [await stage.chat.create() for _ in range(3)]
        said = [await stage.chat.say(talk.id, None, user("Well?")) for talk in talks]
        for one in said:
            await until(stage.chat, one.reply.id, 1)
        replies, bad = stage.service.store.replies, said[1].reply.id
        append = replies.append

        def appended(lease: Any, pieces: Any) -> Any:
            if bad in {piece.reply_id for piece in pieces}:
                raise ValueError("this one alone")
            return append(lease, pieces)

        replies.append = appended  # type: ignore[method-assign]
        hold.set()
        async with asyncio.timeout(SECONDS):
            endings = [(await entries(stage.chat, one.reply.id))[-1].event for one in said]
    assert [type(ending) for ending in endings] == [Finished, Failed, Finished]


async def test_a_caller_that_leaves_leaves_no_reply_that_never_runs(tmp_path: Path) -> None:
    async with staged(tmp_path, [SHORT]) as stage:
        chat, replies = stage.chat, stage.service.store.replies
        talk = await chat.create()
        loop, started, start = asyncio.get_running_loop(), asyncio.Event(), replies.start

        def starting(*values: Any, **named: Any) -> Any:
            loop.call_soon_threadsafe(started.set)
            return start(*values, **named)

        replies.start = starting  # type: ignore[method-assign]
        saying = asyncio.create_task(chat.say(talk.id, None, user("Well?")))
        await started.wait()
        saying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saying
        async with asyncio.timeout(SECONDS):
            while len(nodes := await chat.nodes(talk.id)) < 2:
                await asyncio.sleep(0.01)
            assert isinstance((await entries(chat, nodes[-1].id))[-1].event, Finished)


async def lose_lease(store: Store, stage: Stage) -> None:
    """What another process does that takes this one for dead."""
    lease = stage.service.turns._lease
    with store.database.writing() as connection:
        from palaver.store.schema import holders

        connection.execute(holders.update().where(holders.c.id == lease.id).values(expires_at=0))


@pytest.mark.parametrize("resume", [True, False])
async def test_whoever_lost_its_lease_stops_writing_and_later_turns_work(tmp_path: Path, resume: bool) -> None:
    with open_store(tmp_path) as store, open_store(tmp_path) as other:
        async with serving(store, [SHORT], held=True) as here:
            talk = await here.chat.create()
            said = await here.chat.say(talk.id, None, user("Well?"))
            await until(here.chat, said.reply.id, 1)
            reader = asyncio.create_task(entries(here.chat, said.reply.id))
            await lose_lease(store, here)
            async with serving(other, [SHORT], resume=resume) as there:
                await there.service.recovered.wait()
                second = await here.chat.create()
                later = await here.chat.say(second.id, None, user("And?"))  # here it is found out
                async with asyncio.timeout(SECONDS):
                    assert (await reader)[-1].event == Failed(LOST)
                here.hold.set()
                async with asyncio.timeout(SECONDS):
                    assert isinstance((await entries(here.chat, later.reply.id))[-1].event, Finished)
                    assert len(await here.chat.nodes(second.id)) == 2
                    if not resume:
                        await there.chat.go_on(said.reply.id)
                    await entries(there.chat, said.reply.id)
                    told = await entries(here.chat, said.reply.id)  # from the store, now that it is another's
                assert isinstance(told[-1].event, Finished)
                assert [token.token_id for token in await here.chat.tokens(said.reply.id)] == SHORT


async def test_a_lost_lease_is_noticed_when_it_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palaver.chat.turns.SECONDS", 0.06)
    with open_store(tmp_path) as store, open_store(tmp_path) as other:
        async with serving(store, [SHORT], held=True) as here:
            talk = await here.chat.create()
            said = await here.chat.say(talk.id, None, user("Well?"))
            await until(here.chat, said.reply.id, 1)
            monkeypatch.setattr("palaver.chat.turns.SECONDS", 3600)
            await asyncio.sleep(0.1)
            await lose_lease(store, here)
            await asyncio.to_thread(other.replies.interrupt_orphans)
            here.service.turns._renewing.cancel()
            monkeypatch.setattr("palaver.chat.turns.SECONDS", 0.06)
            here.service.turns._renewing = asyncio.create_task(here.service.turns._renew())
            async with asyncio.timeout(SECONDS):
                async with here.chat.events(said.reply.id) as stream:
                    last = [entry async for entry in stream][-1]
            assert isinstance(last.event, Failed)
            found = await here.chat.message(said.reply.id)
            assert found.reply is not None
            assert found.reply.status is ReplyStatus.INTERRUPTED


async def test_one_reply_that_cant_be_recovered_does_not_keep_the_others_from_it(tmp_path: Path) -> None:
    """Such as one whose conversation was deleted meanwhile."""
    for resume in (True, False):
        with open_store(tmp_path / str(resume)) as store:
            async with serving(store, [SHORT], held=True) as stage:
                talks = [await stage.chat.create() for _ in range(2)]
                said = [await stage.chat.say(talk.id, None, user("Well?")) for talk in talks]
                for one in said:
                    await until(stage.chat, one.reply.id, 1)
                await stage.service.turns.park(leave=True)
            store.conversations.delete(talks[0].id)
            async with serving(store, [SHORT], resume=resume) as stage:
                await stage.service.recovered.wait()
                async with asyncio.timeout(SECONDS):
                    told = await entries(stage.chat, said[1].reply.id)
                assert isinstance(told[-1].event, Finished if resume else Failed)
                await stage.chat.undelete(talks[0].id)
                first = await stage.chat.message(said[0].reply.id)
                assert first.reply is not None
                assert first.reply.status is ReplyStatus.INTERRUPTED


async def test_what_a_dead_process_left_is_recovered_when_a_later_model_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("palaver.chat.service.LOOK_AGAIN_S", 0.01)
    with open_store(tmp_path) as store:
        async with serving(store, [SHORT], held=True) as stage:
            talk = await stage.chat.create()
            said = await stage.chat.say(talk.id, None, user("Well?"))
            await until(stage.chat, said.reply.id, 1)
            await stage.service.turns.park(leave=True)

        async def load(name: str, told: ReportProgress) -> Model:
            if name == "missing":
                raise BadParameter("model", name, "there is none")
            return model([SHORT], name)

        models = ModelSlot(load)
        models.load("missing")
        async with Service(store, models) as service:
            await service.recovered.wait()
            chat = service.chat(store.users.ensure().id)
            await chat.load("scripted")
            async with asyncio.timeout(SECONDS):
                assert isinstance((await entries(chat, said.reply.id))[-1].event, Failed)
            found = await chat.message(said.reply.id)
            assert found.reply is not None
            assert found.reply.status is ReplyStatus.INTERRUPTED


async def test_an_engine_that_does_not_stop_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palaver.chat.turns.PARK_SECONDS", 0.05)
    async with staged(tmp_path, [SHORT], held=True) as stage:
        talk = await stage.chat.create()
        said = await stage.chat.say(talk.id, None, user("Well?"))
        await until(stage.chat, said.reply.id, 1)
        turn = stage.service.turns.get(said.reply.id)
        assert turn is not None
        turn.utterance.stop = lambda: None  # type: ignore[method-assign]
        async with asyncio.timeout(SECONDS):
            await stage.service.turns.park()
            assert isinstance((await entries(stage.chat, said.reply.id))[-1].event, Failed)
        await stage.service.turns.settle()
        found = await stage.chat.message(said.reply.id)
        assert found.reply is not None
        assert found.reply.status is ReplyStatus.INTERRUPTED


async def test_a_model_that_cant_be_loaded_says_why(tmp_path: Path) -> None:
    async def load(name: str, told: ReportProgress) -> Model:
        raise RuntimeError("the wrong magic")

    models = ModelSlot(load)
    models.load("odd")
    with pytest.raises(ModelError, match=r"'odd' could not be loaded.*the wrong magic"):
        await models.ready()
    assert "the wrong magic" in models.card().note


async def test_a_model_that_cant_be_put_away_does_not_keep_the_next_one_from_loading() -> None:
    async def load(name: str, told: ReportProgress) -> Model:
        return model([SHORT], name)

    async def park() -> None:
        raise RuntimeError("can't park")

    models = ModelSlot(load)
    models.load("first")
    await models.ready()
    models.park = park
    models.load("second")
    with pytest.raises(PalaverError, match="can't park"):
        await models.ready()
    models.load("third")
    assert (await models.ready()).name == "third"


async def test_a_listener_that_is_behind_misses_something_and_the_others_do_not() -> None:
    changes = ChangeFeed()
    async with changes.listen("me") as slow, changes.listen("me") as quick:
        for number in range(MAX_BEHIND + 1):
            changes.tell("me", ConversationChange(str(number), "message"))
            assert await anext(quick) == ConversationChange(str(number), "message")
        assert await anext(slow) == ConversationChange("", "missed")
