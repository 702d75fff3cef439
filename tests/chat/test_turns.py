"""Turns that outlive their readers, their process and their disk."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Table, update

from palaver.chat.continuation import replay
from palaver.chat.interface import Chat, SentMessage
from palaver.chat.turn_log import LogEntry
from palaver.chat.turns import LEFT, SharedLock
from palaver.errors import EngineError
from palaver.events import AnswerDelta, Failed, Finished, Snapshot, Started, fold
from palaver.formats.template import Template
from palaver.generation import Finish
from palaver.messages import Text, assistant, user
from palaver.store import DiskFull, NotFound, ReplyStatus, Store, StoredMessage, open_store
from palaver.store.schema import replies, running
from tests import media_files
from tests.chat.conformance import ANSWER, THOUGHT
from tests.chat.process_kills import event_text, run
from tests.chat.scripted_service import (
    CONTROL,
    OTHER,
    TOKENIZER,
    WAVE,
    Stage,
    open_stage,
    read_entries,
    read_until,
    reply,
    run_service,
)
from tests.scripted_engine import FailScript, HoldScript, Script, ScriptedEngine


async def left_running(store: Store) -> str:
    """A reply in the midst of which its process died."""
    async with run_service(store, held=True) as stage:
        conversation = await stage.chat.create_conversation()
        sent = await stage.chat.send_message(conversation.id, None, user("Wave!"))
        await read_until(stage.chat, sent.reply.id, 2)
        turn = stage.service.turns.get(sent.reply.id)
        assert turn is not None
        assert turn.task is not None
        turn.task.cancel()
        await asyncio.gather(turn.task, return_exceptions=True)
        stage.service.turns._turns.clear()  # as a dead process would: no end is event_text
        store.leases.release()
    return sent.reply.id


async def test_an_orphan_is_interrupted_and_continues_exactly(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        reply_id = await left_running(store)
        async with run_service(store) as stage:
            await stage.service.recovered.wait()
            found = await stage.chat.message(reply_id)
            assert found.reply is not None
            assert found.reply.status is ReplyStatus.INTERRUPTED
            assert found.thinking == "think "[: len(found.thinking)]
            assert found.thinking
            received = await read_entries(stage.chat, reply_id)
            assert isinstance(received[-1].event, Failed)
            await stage.chat.continue_reply(reply_id)
            complete = await read_entries(stage.chat, reply_id)
            assert fold([entry.event for entry in complete]).message == assistant(ANSWER, THOUGHT)
            numbered = [entry for entry in received if not isinstance(entry.event, Failed)]
            assert [entry for entry in complete if entry in numbered] == numbered


async def test_an_orphan_is_resumed_with_resume(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        reply_id = await left_running(store)
        async with run_service(store, resume=True) as stage:
            await stage.service.recovered.wait()
            complete = await read_entries(stage.chat, reply_id)
            assert fold([entry.event for entry in complete]).message == assistant(ANSWER, THOUGHT)
            done = await stage.chat.message(reply_id)
            assert done.reply is not None
            assert done.reply.status is ReplyStatus.DONE


async def test_a_running_server_resumes_new_orphans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palaver.chat.service.RECOVERY_INTERVAL_S", 0.02)
    with open_store(tmp_path) as other, open_store(tmp_path) as store:
        async with run_service(other, resume=True) as server:
            await server.service.recovered.wait()
            reply_id = await left_running(store)
            complete = await read_entries(server.chat, reply_id)
            assert fold([entry.event for entry in complete]).message == assistant(ANSWER, THOUGHT)


async def test_a_turn_of_another_process_is_followed(tmp_path: Path) -> None:
    with open_store(tmp_path) as store, open_store(tmp_path) as other:
        async with run_service(store, held=True) as here, run_service(other) as there:
            conversation = await here.chat.create_conversation()
            sent = await here.chat.send_message(conversation.id, None, user("Wave!"))
            await there.chat.wait_until_ready()
            first = await read_until(there.chat, sent.reply.id, 2)
            reader = asyncio.create_task(read_entries(there.chat, sent.reply.id, first[-1].number))
            here.hold.set()
            rest = await reader
            joined = [entry.event for entry in (*first, *rest)]
            assert fold(joined).message == assistant(ANSWER, THOUGHT)
            assert isinstance(rest[-1].event, Finished)


async def test_a_failing_engine_ends_the_turn_and_keeps_the_text(tmp_path: Path) -> None:
    script: Script = [*WAVE[:6], FailScript(), *WAVE[6:]]
    async with open_stage(tmp_path, [script]) as stage:
        conversation = await stage.chat.create_conversation()
        sent = await stage.chat.send_message(conversation.id, None, user("Wave!"))
        received = await read_entries(stage.chat, sent.reply.id)
        assert isinstance(received[-1].event, Failed)
        failed = await stage.chat.message(sent.reply.id)
        assert failed.reply is not None
        assert failed.reply.status is ReplyStatus.FAILED
        assert failed.reply.error == str(EngineError("The script says to fail here."))
        assert failed.thinking.startswith("think")
        assert len(await stage.chat.tokens(sent.reply.id)) == 6


async def test_a_full_disk_ends_the_turn_with_a_clear_error_and_it_continues_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_stage(tmp_path, held=True) as stage:
        conversation = await stage.chat.create_conversation()
        sent = await stage.chat.send_message(conversation.id, None, user("Wave!"))
        await read_until(stage.chat, sent.reply.id, 2)
        replies = stage.service.store.replies

        def full(*_: object, **__: object) -> None:
            raise DiskFull

        with monkeypatch.context() as patched:
            patched.setattr(replies, "append", full)
            patched.setattr(replies, "finish", full)
            stage.hold.set()
            received = await read_entries(stage.chat, sent.reply.id)
            ending = received[-1].event
            assert isinstance(ending, Failed)
            assert "disk is full" in ending.error
        await stage.chat.continue_reply(sent.reply.id)
        complete = await read_entries(stage.chat, sent.reply.id)
        assert fold([entry.event for entry in complete]).message == assistant(ANSWER, THOUGHT)


async def test_another_model_gives_a_snapshot(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        async with run_service(store) as stage:
            conversation = await stage.chat.create_conversation()
            sent = await stage.chat.send_message(conversation.id, None, user("Wave!"))
            await read_entries(stage.chat, sent.reply.id)
        async with run_service(store) as stage:
            await stage.chat.wait_until_ready()
            await stage.chat.unload_model()
            received = await read_entries(stage.chat, sent.reply.id)
            assert received[0].event == Snapshot(assistant(ANSWER, THOUGHT))
            assert isinstance(received[-1].event, Finished)


async def test_a_reply_ended_by_a_stop_string_says_so_after_a_restart(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        async with run_service(store) as stage:
            conversation = await stage.chat.create_conversation(parameters={"stop": ["👋🏽"]})
            sent = await stage.chat.send_message(conversation.id, None, user("Wave!"))
            before = await read_entries(stage.chat, sent.reply.id)
        async with run_service(store) as stage:
            await stage.chat.wait_until_ready()
            after = await read_entries(stage.chat, sent.reply.id)
        assert after[-1] == before[-1]


async def test_answer_now_closes_the_thought(tmp_path: Path) -> None:
    async with open_stage(tmp_path, held=True) as stage:
        conversation = await stage.chat.create_conversation()
        sent = await stage.chat.send_message(conversation.id, None, user("Wave!"))
        await read_until(stage.chat, sent.reply.id, 2)
        await stage.chat.answer_now(sent.reply.id)
        stage.hold.set()
        await read_entries(stage.chat, sent.reply.id)
        ids = [token.token_id for token in await stage.chat.tokens(sent.reply.id)]
        assert ids[4:].index(CONTROL["</think>"]) < WAVE[4:].index(CONTROL["</think>"])


async def test_the_next_prompt_starts_with_the_computed_tokens(tmp_path: Path) -> None:
    """A reply spelled by other tokens than its text would be encoded to is handed back as it was said."""
    letters = [TOKENIZER.encode([letter])[0] for letter in "think"]
    spelled = [CONTROL["<think>"], *TOKENIZER.encode(["\nhm\n"]), CONTROL["</think>"], *TOKENIZER.encode(["\n\n"])]
    spelled += [*letters, CONTROL["<|im_end|>"]]
    assert TOKENIZER.encode(["think"]) != letters
    async with open_stage(tmp_path, [spelled, OTHER]) as stage:
        chat = stage.chat
        conversation = await chat.create_conversation()
        first = await chat.send_message(conversation.id, None, user("Wave!"))
        await read_entries(chat, first.reply.id)
        second = await chat.send_message(conversation.id, first.reply.id, user("Again!"))
        await read_entries(chat, second.reply.id)
        engine = stage.service.models.engine()
        assert isinstance(engine, ScriptedEngine)
        before, after = (call.prompt.context_ids for call in engine.calls)
        sent = (*before, *letters, CONTROL["<|im_end|>"])
        assert after[: len(sent)] == sent


async def test_a_reply_is_replayed_from_its_record(tmp_path: Path) -> None:
    async with open_stage(tmp_path, [WAVE]) as stage:
        conversation = await stage.chat.create_conversation()
        sent = await stage.chat.send_message(conversation.id, None, user("Wave!"))
        await read_entries(stage.chat, sent.reply.id)
        again = await replay(stage.service.store, stage.service.models.current(), sent.reply.id)
        assert again.same
        assert again.difference is None
    with open_store(tmp_path) as store:
        async with run_service(store, [reply("think 👋", "Wave? No.")]) as stage:
            model = await stage.service.models.ready()
            again = await replay(store, model, sent.reply.id)
            assert not again.same
            assert again.difference is not None
            assert again.recorded[: again.difference] == again.replayed[: again.difference]


async def test_conversations_of_other_users_are_not_found(tmp_path: Path) -> None:
    async with open_stage(tmp_path) as stage:
        stranger = stage.service.chat(stage.service.store.users.ensure("stranger").id)
        conversation = await stage.chat.create_conversation()
        sent = await stage.chat.send_message(conversation.id, None, user("Wave!"))
        await read_entries(stage.chat, sent.reply.id)
        digest = (await stage.chat.put_blob(media_files.picture())).digest
        attempts = (
            stranger.conversation(conversation.id),
            stranger.message(sent.reply.id),
            stranger.path(sent.reply.id),
            stranger.nodes(conversation.id),
            stranger.previews(conversation.id),
            stranger.continue_reply(sent.reply.id),
            stranger.stop_reply(sent.reply.id),
            stranger.tokens(sent.reply.id),
            stranger.raw_text(sent.reply.id),
            stranger.edit_message(sent.message.id, sent.message.parts),
            stranger.send_message(conversation.id, None, user("Hello")),
            stranger.export_conversation(conversation.id, "jsonl"),
            stranger.blob(digest),
            stranger.update_conversation(conversation.id, title="Mine now"),
            stranger.delete_conversation(conversation.id),
            stranger.cursor(conversation.id, "c"),
            read_entries(stranger, sent.reply.id),
        )
        for attempt in attempts:
            with pytest.raises(NotFound):
                await attempt
        assert await stranger.conversations() == ()
        assert await stranger.search("Wave") == ()


async def test_slow_subscribers_do_not_slow_the_turn(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with open_stage(tmp_path, [WAVE]) as stage:
        conversation = await stage.chat.create_conversation()
        sent = await stage.chat.send_message(conversation.id, None, user("Wave!"))

        async def slow() -> list[object]:
            seen: list[object] = []
            async with stage.chat.events(sent.reply.id) as stream:
                async for entry in stream:
                    seen.append(entry.event)
                    await gate.wait()
            return seen

        readers = [asyncio.create_task(slow()) for _ in range(20)]
        await read_entries(stage.chat, sent.reply.id)  # comes to the end while the others stand still
        gate.set()
        for seen in await asyncio.gather(*readers):
            assert isinstance(seen[-1], Finished)
            assert [e for e in seen if isinstance(e, AnswerDelta)]


async def test_a_stop_before_the_first_token_keeps_an_empty_reply(tmp_path: Path) -> None:
    hold = asyncio.Event()
    async with open_stage(tmp_path, [[HoldScript(hold), *WAVE]]) as stage:
        conversation = await stage.chat.create_conversation()
        sent = await stage.chat.send_message(conversation.id, None, user("Wave!"))
        await stage.chat.stop_reply(sent.reply.id)
        received = await read_entries(stage.chat, sent.reply.id)
        assert isinstance(received[-1].event, Finished)
        assert received[-1].event.finish is Finish.STOPPED
        hold.set()
        await stage.chat.continue_reply(sent.reply.id)
        await read_entries(stage.chat, sent.reply.id)
        assert (await stage.chat.message(sent.reply.id)).text == ANSWER


async def read_underway(stage: Stage) -> tuple[SentMessage, asyncio.Task[list[LogEntry]]]:
    """A reply that has said something, and somebody who reads it."""
    conversation = await stage.chat.create_conversation()
    sent = await stage.chat.send_message(conversation.id, None, user("Wave!"))
    await read_until(stage.chat, sent.reply.id, 2)
    reader = asyncio.create_task(read_entries(stage.chat, sent.reply.id))
    await asyncio.sleep(0)
    return sent, reader


async def test_parking_leaves_replies_that_can_be_continued(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        async with run_service(store, held=True) as stage:
            sent, reader = await read_underway(stage)
        assert isinstance((await reader)[-1].event, Failed)
        async with run_service(store) as stage:
            found = await stage.chat.message(sent.reply.id)
            assert found.reply is not None
            assert found.reply.status is ReplyStatus.INTERRUPTED
            assert found.thinking
            await stage.chat.continue_reply(sent.reply.id)
            await read_entries(stage.chat, sent.reply.id)
            assert (await stage.chat.message(sent.reply.id)).text == ANSWER


async def test_a_turn_that_started_while_others_were_left_is_left_too(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        async with run_service(store, held=True) as stage:
            await stage.service.turns.park(leave=True)
            sent, reader = await read_underway(stage)
        last = (await reader)[-1].event
        assert isinstance(last, Failed)
        assert last.error == LEFT
        async with run_service(store, resume=True) as stage:
            complete = await read_entries(stage.chat, sent.reply.id)
            assert fold([entry.event for entry in complete]).message == assistant(ANSWER, THOUGHT)


@pytest.mark.parametrize("resume", [True, False])
async def test_turns_left_open_are_as_after_a_crash(tmp_path: Path, resume: bool) -> None:
    with open_store(tmp_path) as store:
        async with run_service(store, held=True) as stage:
            sent, reader = await read_underway(stage)
            await stage.service.turns.park(leave=True)
            received = await reader
            assert isinstance(received[-1].event, Failed)
            assert received[-1].event.error == LEFT
        async with run_service(store, resume=resume) as stage:
            await stage.service.recovered.wait()
            if not resume:
                found = await stage.chat.message(sent.reply.id)
                assert found.reply is not None
                assert found.reply.status is ReplyStatus.INTERRUPTED
                await stage.chat.continue_reply(sent.reply.id)
            complete = await read_entries(stage.chat, sent.reply.id)
            assert fold([entry.event for entry in complete]).message == assistant(ANSWER, THOUGHT)
            meanings = {entry.number: event_text(entry) for entry in complete if event_text(entry)}
            assert all(meanings[entry.number] == event_text(entry) for entry in received if event_text(entry))


LONG = {"seconds": 2000.0, "thinking": 1000.0, "first_token": 0.5}
"""Timings of an earlier run, too long to be taken for those of a test."""


def set_timings(store: Store, table: Table, reply_id: str, timings: dict[str, float]) -> None:
    with store.database.write_transaction() as connection:
        connection.execute(update(table).where(table.c.message_id == reply_id).values(timings=timings))


def started(entries: list[LogEntry]) -> Started:
    return next(entry.event for entry in entries if isinstance(entry.event, Started))


def check_longer(timings: Mapping[str, float]) -> None:
    """Checks that a second run was added to `LONG`."""
    assert timings["first_token"] == LONG["first_token"]
    assert LONG["thinking"] < timings["thinking"] < LONG["thinking"] + 500
    assert LONG["seconds"] < timings["seconds"] < LONG["seconds"] + 500


async def test_times_of_a_continued_reply_are_those_of_all_its_runs(tmp_path: Path) -> None:
    async with open_stage(tmp_path, held=True) as stage:
        sent, reader = await read_underway(stage)
        await stage.chat.stop_reply(sent.reply.id)
        await reader
        set_timings(stage.service.store, replies, sent.reply.id, LONG)
        stage.hold.set()
        await stage.chat.continue_reply(sent.reply.id)
        seconds = started(await read_entries(stage.chat, sent.reply.id)).thinking_seconds
        done = (await stage.chat.message(sent.reply.id)).reply
        assert done is not None
        check_longer(done.timings)
        assert seconds is not None
        assert LONG["thinking"] <= seconds <= done.timings["thinking"]


@pytest.mark.parametrize("resume", [True, False], ids=["resumed", "interrupted"])
async def test_times_of_a_reply_that_outlived_a_crash_are_those_of_all_its_runs(tmp_path: Path, resume: bool) -> None:
    with open_store(tmp_path) as store:
        reply_id = await left_running(store)
        set_timings(store, running, reply_id, LONG)
        async with run_service(store, resume=resume, held=True) as stage:
            await stage.service.recovered.wait()
            if not resume:
                interrupted = (await stage.chat.message(reply_id)).reply
                assert interrupted is not None
                assert interrupted.timings == LONG
                await stage.chat.continue_reply(reply_id)
            stage.hold.set()
            seconds = started(await read_entries(stage.chat, reply_id)).thinking_seconds
            done = (await stage.chat.message(reply_id)).reply
            assert done is not None
            assert done.status is ReplyStatus.DONE
            check_longer(done.timings)
            assert seconds is not None
            assert LONG["thinking"] <= seconds <= done.timings["thinking"]


async def test_times_of_a_token_are_stored_with_it(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        reply_id = await left_running(store)
        stored = store.replies.timings(reply_id)
        assert 0 < stored["thinking"] <= stored["seconds"]


async def test_a_reply_has_no_times_if_an_earlier_version_left_it(tmp_path: Path) -> None:
    """How long the dead process took is not known, and the time of the rest is not the time of the reply."""
    with open_store(tmp_path) as store:
        reply_id = await left_running(store)
        set_timings(store, running, reply_id, {})
        async with run_service(store, resume=True) as stage:
            await stage.service.recovered.wait()
            assert started(await read_entries(stage.chat, reply_id)).thinking_seconds is None
            done = (await stage.chat.message(reply_id)).reply
            assert done is not None
            assert done.status is ReplyStatus.DONE
            assert done.timings == {}


async def test_a_late_reader_is_told_how_long_the_reply_has_been_thinking(tmp_path: Path) -> None:
    async with open_stage(tmp_path, held=True) as stage, run_service(stage.service.store) as other:
        await other.chat.wait_until_ready()
        sent, reader = await read_underway(stage)
        first = started(await read_until(stage.chat, sent.reply.id, 2)).thinking_seconds
        assert first is not None
        assert first > 0
        late = started(await read_until(other.chat, sent.reply.id, 2)).thinking_seconds
        assert late == first, "another process reads it from the store"
        stage.hold.set()
        assert started(await reader).thinking_seconds is not None


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    count = run(tmp_path, "scripted", kills=4, seconds=0.4, seed=3)
    assert count.wrong == []
    assert count.messages
    assert count.events


async def test_a_reply_renders_its_prompt_once_and_not_in_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renders: list[str] = []
    render = Template.render

    def counted(self: Template, *values: Any, **named: Any) -> str:
        renders.append(threading.current_thread().name)
        return render(self, *values, **named)

    async with open_stage(tmp_path) as stage:
        conversation = await stage.chat.create_conversation()
        await stage.chat.wait_until_ready()
        monkeypatch.setattr(Template, "render", counted)
        sent = await stage.chat.send_message(conversation.id, None, user("Wave!"))
        await read_entries(stage.chat, sent.reply.id)
        assert len(renders) == 1
        sent = await stage.chat.send_message(conversation.id, sent.reply.id, user("Again!"))
        await read_entries(stage.chat, sent.reply.id)
        assert len(renders) == 2
        again = await stage.chat.start_reply(conversation.id, sent.message.id, parameters={"max_tokens": 2})
        await read_entries(stage.chat, again.id)
        assert len(renders) == 3
        await stage.chat.continue_reply(again.id)
        await read_entries(stage.chat, again.id)
        assert threading.main_thread().name not in renders


LIMIT = 8


async def reach_limit(chat: Chat) -> StoredMessage:
    conversation = await chat.create_conversation(parameters={"max_tokens": LIMIT})
    sent = await chat.send_message(conversation.id, None, user("Wave!"), parameters={"seed": 1})
    assert await read_length(chat, sent.reply.id) == (ReplyStatus.LENGTH, LIMIT)
    return await chat.message(sent.reply.id)


async def read_length(chat: Chat, reply_id: str) -> tuple[ReplyStatus, int]:
    """The status of the reply and the number of its tokens, when it has ended."""
    await read_entries(chat, reply_id)
    ended = (await chat.message(reply_id)).reply
    assert ended is not None
    return ended.status, len(await chat.tokens(reply_id))


def held_in_continuation() -> tuple[Script, asyncio.Event]:
    """A reply that stops between the first and the second time that it reaches its limit, until the event is set."""
    hold = asyncio.Event()
    return [*WAVE[:15], HoldScript(hold), *WAVE[15:]], hold


@pytest.mark.parametrize("beside", [False, True], ids=["same", "sibling"])
async def test_a_continued_limit_outlives_a_stop(tmp_path: Path, beside: bool) -> None:
    script, hold = held_in_continuation()
    async with open_stage(tmp_path, [script, OTHER]) as stage:
        chat, limited = stage.chat, await reach_limit(stage.chat)
        if beside:
            sent = await chat.send_message(limited.conversation_id, limited.id, user("And?"))
            await read_entries(chat, sent.reply.id)
        continued = await chat.continue_reply(limited.id)
        assert (continued.id == limited.id) is not beside
        await read_until(chat, continued.id, 7)
        await chat.stop_reply(continued.id)
        status, count = await read_length(chat, continued.id)
        assert status is ReplyStatus.STOPPED
        assert LIMIT < count < 2 * LIMIT
        hold.set()
        for limit in (2 * LIMIT, 3 * LIMIT):
            await chat.continue_reply(continued.id)
            assert await read_length(chat, continued.id) == (ReplyStatus.LENGTH, limit)


@pytest.mark.parametrize("resume", [True, False], ids=["resumed", "interrupted"])
async def test_a_continued_limit_outlives_a_crash(tmp_path: Path, resume: bool) -> None:
    with open_store(tmp_path) as store:
        async with run_service(store, [held_in_continuation()[0]]) as stage:
            reply_id = (await reach_limit(stage.chat)).id
            await stage.chat.continue_reply(reply_id)
            await read_until(stage.chat, reply_id, 7)
            await stage.service.turns.park(leave=True)
        async with run_service(store, [WAVE], resume=resume) as stage:
            await stage.service.recovered.wait()
            if not resume:
                assert (await read_length(stage.chat, reply_id))[0] is ReplyStatus.INTERRUPTED
                await stage.chat.continue_reply(reply_id)
            assert await read_length(stage.chat, reply_id) == (ReplyStatus.LENGTH, 2 * LIMIT)


@pytest.mark.parametrize("instead", [None, WAVE[10]], ids=["sampled", "instead"])
async def test_a_fork_has_the_limit_of_the_continued_reply(tmp_path: Path, instead: int | None) -> None:
    async with open_stage(tmp_path, [WAVE]) as stage:
        chat, limited = stage.chat, await reach_limit(stage.chat)
        await chat.continue_reply(limited.id)
        assert await read_length(chat, limited.id) == (ReplyStatus.LENGTH, 2 * LIMIT)
        fork = await chat.fork_reply(limited.id, 10, instead)
        assert await read_length(chat, fork.id) == (ReplyStatus.LENGTH, 2 * LIMIT)
        await chat.continue_reply(fork.id)
        assert await read_length(chat, fork.id) == (ReplyStatus.LENGTH, 3 * LIMIT)
        assert limited.parent_id is not None
        again = await chat.start_reply(limited.conversation_id, limited.parent_id)
        assert await read_length(chat, again.id) == (ReplyStatus.LENGTH, LIMIT), "a retry begins anew"


def change_tokenizer(stage: Stage) -> None:
    """The model in use has another tokenizer than that of the stored replies."""
    with stage.service.store.database.write_transaction() as connection:
        connection.execute(update(replies).values(tokenizer="another"))


def count_given(stage: Stage, reply_id: str) -> int:
    """The tokens that a reply began with."""
    return sum(math.isnan(step.logprob) for step in stage.service.store.replies.tokens(reply_id))


async def check_limits(stage: Stage, continued_id: str, limit: int = LIMIT) -> None:
    """The reply has as many tokens as its limit after those that it began with, and as many again."""
    given = count_given(stage, continued_id)
    assert given > 0
    assert await read_length(stage.chat, continued_id) == (ReplyStatus.LENGTH, given + limit)
    await stage.chat.continue_reply(continued_id)
    assert await read_length(stage.chat, continued_id) == (ReplyStatus.LENGTH, given + 2 * limit)


LONG_REPLY = reply("no", "Another answer, with a long word and another one. " * 4)


async def test_a_reply_that_reached_its_limit_is_continued_from_its_text_with_as_many_tokens(tmp_path: Path) -> None:
    async with open_stage(tmp_path, [WAVE, LONG_REPLY]) as stage:
        limited = await reach_limit(stage.chat)
        change_tokenizer(stage)
        continued = await stage.chat.continue_reply(limited.id)
        assert continued.id != limited.id
        await check_limits(stage, continued.id)


async def test_a_stopped_reply_is_continued_from_its_text_with_its_limit(tmp_path: Path) -> None:
    """It has more tokens than its limit, which it had reached and was continued."""
    hold = asyncio.Event()
    async with open_stage(tmp_path, [[*LONG_REPLY[:15], HoldScript(hold), *LONG_REPLY[15:]]]) as stage:
        chat, limited = stage.chat, await reach_limit(stage.chat)
        await chat.continue_reply(limited.id)
        await read_until(chat, limited.id, 7)
        await chat.stop_reply(limited.id)
        assert (await read_length(chat, limited.id))[0] is ReplyStatus.STOPPED
        hold.set()
        change_tokenizer(stage)
        await check_limits(stage, (await chat.continue_reply(limited.id)).id)


async def test_a_reply_continued_from_its_text_has_the_limit_of_its_turn(tmp_path: Path) -> None:
    async with open_stage(tmp_path, [WAVE, LONG_REPLY]) as stage:
        conversation = await stage.chat.create_conversation(parameters={"max_tokens": 2 * LIMIT})
        sent = await stage.chat.send_message(conversation.id, None, user("Wave!"), parameters={"max_tokens": LIMIT})
        assert await read_length(stage.chat, sent.reply.id) == (ReplyStatus.LENGTH, LIMIT)
        change_tokenizer(stage)
        await check_limits(stage, (await stage.chat.continue_reply(sent.reply.id)).id)


async def test_an_edited_reply_is_continued_with_the_limit_of_the_conversation(tmp_path: Path) -> None:
    async with open_stage(tmp_path, [LONG_REPLY]) as stage:
        limited = await reach_limit(stage.chat)
        edited = await stage.chat.edit_message(limited.id, (Text("More tokens than the limit."),))
        await check_limits(stage, (await stage.chat.continue_reply(edited.id)).id)


async def test_the_limit_counts_after_the_response_prefix(tmp_path: Path) -> None:
    async with open_stage(tmp_path, [LONG_REPLY]) as stage:
        conversation = await stage.chat.create_conversation(parameters={"max_tokens": LIMIT})
        parameters = {"response_prefix": "A few words before: "}
        sent = await stage.chat.send_message(conversation.id, None, user("Wave!"), parameters=parameters)
        await check_limits(stage, sent.reply.id)
        stored = (await stage.chat.message(sent.reply.id)).reply
        assert stored is not None
        assert stored.settings.sampling.max_tokens == LIMIT


async def test_a_reply_stopped_in_prefill_is_not_in_later_prompts(tmp_path: Path) -> None:
    hold = asyncio.Event()
    async with open_stage(tmp_path, [[HoldScript(hold), *WAVE], OTHER]) as stage:
        chat = stage.chat
        conversation = await chat.create_conversation()
        first = await chat.send_message(conversation.id, None, user("Wave!"))
        await chat.stop_reply(first.reply.id)
        await read_entries(chat, first.reply.id)
        second = await chat.send_message(conversation.id, first.reply.id, user("Please!"))
        await read_entries(chat, second.reply.id)
        engine = stage.service.models.engine()
        assert isinstance(engine, ScriptedEngine)
        sent = b"".join(TOKENIZER.vocabulary[id] for id in engine.calls[-1].prompt.context_ids).decode()
        assert sent.count("<|im_start|>assistant") == 1
        assert "Wave!\n\nPlease!" in sent
        hold.set()
        await replay(stage.service.store, stage.service.models.current(), second.reply.id)
        assert engine.calls[-1].prompt.context_ids == engine.calls[-2].prompt.context_ids
        going = await chat.continue_reply(
            first.reply.id
        )  # it can still be continued: beside, as the conversation went on
        await read_entries(chat, going.id)
        assert (await chat.message(going.id)).text == "Another answer."


async def test_a_shared_lock_is_held_by_many_or_by_one_in_the_order_of_requests() -> None:
    lock, order = SharedLock(), list[str]()
    release = asyncio.Event()

    async def share(name: str) -> None:
        async with lock.shared():
            order.append(name)
            await release.wait()

    async def own(name: str) -> None:
        async with lock.exclusive():
            order.append(name)
            assert len(order) == 3, "those who share it have not left"

    first = [asyncio.create_task(share(name)) for name in ("a", "b")]
    await asyncio.sleep(0)
    second = asyncio.create_task(own("c"))
    await asyncio.sleep(0)
    third = asyncio.create_task(share("d"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert order == ["a", "b"]
    release.set()
    await asyncio.gather(*first, second, third)
    assert order == ["a", "b", "c", "d"]


async def test_requests_with_one_key_start_one_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path) as store:
        async with run_service(store) as stage:
            start, stored = store.replies.start, threading.Semaphore(0)

            def start_slowly(*arguments: Any, **named: Any) -> StoredMessage:
                """Returns when both requests have stored their reply, or one has waited for the other."""
                found = start(*arguments, **named)
                stored.release()
                stored.acquire(timeout=0.2)
                stored.acquire(timeout=0.2)
                return found

            monkeypatch.setattr(store.replies, "start", start_slowly)
            talk = await stage.chat.create_conversation()
            async with stage.chat.changes() as changes:
                sends = (stage.chat.send_message(talk.id, None, user("Hello"), key="once") for _ in range(2))
                first, second = await asyncio.gather(*sends)
                assert first.reply.id == second.reply.id
                await read_entries(stage.chat, first.reply.id)
                seen = []
                async for change in changes:
                    seen.append(change.what)
                    if change.what == "ended":
                        break
                assert seen.count("turn") == 1
