"""Turns that outlive their readers, their process and their disk."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from palaver.chat.interface import SentMessage
from palaver.chat.replay import replay
from palaver.chat.turn_log import LogEntry
from palaver.chat.turns import LEFT
from palaver.errors import EngineError
from palaver.events import AnswerDelta, Failed, Finished, Snapshot, fold
from palaver.formats.template import Template
from palaver.generation import Finish
from palaver.messages import assistant, user
from palaver.store import DiskFull, NotFound, ReplyStatus, Store, open_store
from tests.chat.conformance import ANSWER, THOUGHT
from tests.chat.killing import run, written
from tests.chat.making import CONTROL, OTHER, TOKENIZER, WAVE, Stage, entries, reply, serving, staged, until
from tests.scripted_engine import FailScript, HoldScript, Script, ScriptedEngine


async def left_running(store: Store) -> str:
    """A reply in the midst of which its process died."""
    async with serving(store, held=True) as stage:
        talk = await stage.chat.create()
        said = await stage.chat.say(talk.id, None, user("Wave!"))
        await until(stage.chat, said.reply.id, 2)
        turn = stage.service.turns.get(said.reply.id)
        assert turn is not None
        assert turn.task is not None
        turn.task.cancel()
        await asyncio.gather(turn.task, return_exceptions=True)
        stage.service.turns._turns.clear()  # as a dead process would: no end is written
        store.leases.let_go()
    return said.reply.id


async def test_what_a_dead_process_left_is_interrupted_and_goes_on_exactly(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        reply_id = await left_running(store)
        async with serving(store) as stage:
            await stage.service.recovered.wait()
            found = await stage.chat.message(reply_id)
            assert found.reply is not None
            assert found.reply.status is ReplyStatus.INTERRUPTED
            assert found.thinking == "think "[: len(found.thinking)]
            assert found.thinking
            told = await entries(stage.chat, reply_id)
            assert isinstance(told[-1].event, Failed)
            await stage.chat.go_on(reply_id)
            whole = await entries(stage.chat, reply_id)
            assert fold([entry.event for entry in whole]).message == assistant(ANSWER, THOUGHT)
            numbered = [entry for entry in told if not isinstance(entry.event, Failed)]
            assert [entry for entry in whole if entry in numbered] == numbered


async def test_what_a_dead_process_left_is_resumed_where_that_is_wanted(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        reply_id = await left_running(store)
        async with serving(store, resume=True) as stage:
            await stage.service.recovered.wait()
            whole = await entries(stage.chat, reply_id)
            assert fold([entry.event for entry in whole]).message == assistant(ANSWER, THOUGHT)
            done = await stage.chat.message(reply_id)
            assert done.reply is not None
            assert done.reply.status is ReplyStatus.DONE


async def test_what_a_process_leaves_while_a_server_runs_is_gone_on_with_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("palaver.chat.service.LOOK_AGAIN_S", 0.02)
    with open_store(tmp_path) as other, open_store(tmp_path) as store:
        async with serving(other, resume=True) as server:
            await server.service.recovered.wait()
            reply_id = await left_running(store)
            whole = await entries(server.chat, reply_id)
            assert fold([entry.event for entry in whole]).message == assistant(ANSWER, THOUGHT)


async def test_a_turn_of_another_process_is_read_as_it_grows(tmp_path: Path) -> None:
    with open_store(tmp_path) as store, open_store(tmp_path) as other:
        async with serving(store, held=True) as here, serving(other) as there:
            talk = await here.chat.create()
            said = await here.chat.say(talk.id, None, user("Wave!"))
            await there.chat.ready()
            first = await until(there.chat, said.reply.id, 2)
            reader = asyncio.create_task(entries(there.chat, said.reply.id, first[-1].number))
            here.hold.set()
            rest = await reader
            joined = [entry.event for entry in (*first, *rest)]
            assert fold(joined).message == assistant(ANSWER, THOUGHT)
            assert isinstance(rest[-1].event, Finished)


async def test_a_failing_engine_ends_the_turn_and_keeps_what_was_said(tmp_path: Path) -> None:
    script: Script = [*WAVE[:6], FailScript(), *WAVE[6:]]
    async with staged(tmp_path, [script]) as stage:
        talk = await stage.chat.create()
        said = await stage.chat.say(talk.id, None, user("Wave!"))
        told = await entries(stage.chat, said.reply.id)
        assert isinstance(told[-1].event, Failed)
        failed = await stage.chat.message(said.reply.id)
        assert failed.reply is not None
        assert failed.reply.status is ReplyStatus.FAILED
        assert failed.reply.error == str(EngineError("The script says to fail here."))
        assert failed.thinking.startswith("think")
        assert len(await stage.chat.tokens(said.reply.id)) == 6


async def test_a_full_disk_ends_the_turn_with_a_clear_error_and_it_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with staged(tmp_path, held=True) as stage:
        talk = await stage.chat.create()
        said = await stage.chat.say(talk.id, None, user("Wave!"))
        await until(stage.chat, said.reply.id, 2)
        replies = stage.service.store.replies

        def full(*_: object, **__: object) -> None:
            raise DiskFull

        with monkeypatch.context() as patched:
            patched.setattr(replies, "append", full)
            patched.setattr(replies, "finish", full)
            stage.hold.set()
            told = await entries(stage.chat, said.reply.id)
            ending = told[-1].event
            assert isinstance(ending, Failed)
            assert "no room" in ending.error
        await stage.chat.go_on(said.reply.id)
        whole = await entries(stage.chat, said.reply.id)
        assert fold([entry.event for entry in whole]).message == assistant(ANSWER, THOUGHT)


async def test_a_model_that_did_not_say_it_gives_a_snapshot(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        async with serving(store) as stage:
            talk = await stage.chat.create()
            said = await stage.chat.say(talk.id, None, user("Wave!"))
            await entries(stage.chat, said.reply.id)
        async with serving(store) as stage:
            await stage.chat.ready()
            await stage.chat.unload()
            told = await entries(stage.chat, said.reply.id)
            assert told[0].event == Snapshot(assistant(ANSWER, THOUGHT))
            assert isinstance(told[-1].event, Finished)


async def test_a_reply_ended_by_a_stop_string_says_so_after_a_restart(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        async with serving(store) as stage:
            talk = await stage.chat.create(parameters={"stop": ["👋🏽"]})
            said = await stage.chat.say(talk.id, None, user("Wave!"))
            before = await entries(stage.chat, said.reply.id)
        async with serving(store) as stage:
            await stage.chat.ready()
            after = await entries(stage.chat, said.reply.id)
        assert after[-1] == before[-1]


async def test_answer_now_closes_the_thought(tmp_path: Path) -> None:
    async with staged(tmp_path, held=True) as stage:
        talk = await stage.chat.create()
        said = await stage.chat.say(talk.id, None, user("Wave!"))
        await until(stage.chat, said.reply.id, 2)
        await stage.chat.answer_now(said.reply.id)
        stage.hold.set()
        await entries(stage.chat, said.reply.id)
        ids = [token.token_id for token in await stage.chat.tokens(said.reply.id)]
        assert ids[4:].index(CONTROL["</think>"]) < WAVE[4:].index(CONTROL["</think>"])


async def test_the_next_prompt_begins_with_what_was_computed(tmp_path: Path) -> None:
    """A reply spelled by other tokens than its text would be encoded to is handed back as it was said."""
    letters = [TOKENIZER.encode([letter])[0] for letter in "think"]
    spelled = [CONTROL["<think>"], *TOKENIZER.encode(["\nhm\n"]), CONTROL["</think>"], *TOKENIZER.encode(["\n\n"])]
    spelled += [*letters, CONTROL["<|im_end|>"]]
    assert TOKENIZER.encode(["think"]) != letters
    async with staged(tmp_path, [spelled, OTHER]) as stage:
        chat = stage.chat
        talk = await chat.create()
        first = await chat.say(talk.id, None, user("Wave!"))
        await entries(chat, first.reply.id)
        second = await chat.say(talk.id, first.reply.id, user("Again!"))
        await entries(chat, second.reply.id)
        engine = stage.service.models.current().engine
        assert isinstance(engine, ScriptedEngine)
        before, after = (call.prompt.context_ids for call in engine.calls)
        said = (*before, *letters, CONTROL["<|im_end|>"])
        assert after[: len(said)] == said


async def test_a_reply_is_made_again_from_its_record(tmp_path: Path) -> None:
    async with staged(tmp_path, [WAVE]) as stage:
        talk = await stage.chat.create()
        said = await stage.chat.say(talk.id, None, user("Wave!"))
        await entries(stage.chat, said.reply.id)
        again = await replay(stage.service.store, stage.service.models.current(), said.reply.id)
        assert again.same
        assert again.difference is None
    with open_store(tmp_path) as store:
        async with serving(store, [reply("think 👋", "Wave? No.")]) as stage:
            model = await stage.service.models.ready()
            again = await replay(store, model, said.reply.id)
            assert not again.same
            assert again.difference is not None
            assert again.recorded[: again.difference] == again.made[: again.difference]


async def test_another_users_things_are_not_found(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        stranger = stage.service.chat(stage.service.store.users.ensure("stranger").id)
        talk = await stage.chat.create()
        said = await stage.chat.say(talk.id, None, user("Wave!"))
        await entries(stage.chat, said.reply.id)
        digest = await stage.chat.put_blob(b"mine")
        attempts = (
            stranger.conversation(talk.id),
            stranger.message(said.reply.id),
            stranger.path(said.reply.id),
            stranger.nodes(talk.id),
            stranger.go_on(said.reply.id),
            stranger.stop(said.reply.id),
            stranger.tokens(said.reply.id),
            stranger.raw(said.reply.id),
            stranger.edit(said.message.id, said.message.parts),
            stranger.say(talk.id, None, user("Hello")),
            stranger.export(talk.id, "jsonl"),
            stranger.blob(digest),
            stranger.change(talk.id, title="Mine now"),
            stranger.delete(talk.id),
            stranger.cursor(talk.id, "c"),
            entries(stranger, said.reply.id),
        )
        for attempt in attempts:
            with pytest.raises(NotFound):
                await attempt
        assert await stranger.conversations() == ()
        assert await stranger.search("Wave") == ()


async def test_slow_readers_do_not_slow_the_turn(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with staged(tmp_path, [WAVE]) as stage:
        talk = await stage.chat.create()
        said = await stage.chat.say(talk.id, None, user("Wave!"))

        async def slow() -> list[object]:
            seen: list[object] = []
            async with stage.chat.events(said.reply.id) as stream:
                async for entry in stream:
                    seen.append(entry.event)
                    await gate.wait()
            return seen

        readers = [asyncio.create_task(slow()) for _ in range(20)]
        await entries(stage.chat, said.reply.id)  # comes to the end while the others stand still
        gate.set()
        for seen in await asyncio.gather(*readers):
            assert isinstance(seen[-1], Finished)
            assert [e for e in seen if isinstance(e, AnswerDelta)]


async def test_a_stop_before_the_first_token_keeps_an_empty_reply(tmp_path: Path) -> None:
    hold = asyncio.Event()
    async with staged(tmp_path, [[HoldScript(hold), *WAVE]]) as stage:
        talk = await stage.chat.create()
        said = await stage.chat.say(talk.id, None, user("Wave!"))
        await stage.chat.stop(said.reply.id)
        told = await entries(stage.chat, said.reply.id)
        assert isinstance(told[-1].event, Finished)
        assert told[-1].event.finish is Finish.STOPPED
        hold.set()
        await stage.chat.go_on(said.reply.id)
        await entries(stage.chat, said.reply.id)
        assert (await stage.chat.message(said.reply.id)).text == ANSWER


async def read_underway(stage: Stage) -> tuple[SentMessage, asyncio.Task[list[LogEntry]]]:
    """A reply that has said something, and somebody who reads it."""
    talk = await stage.chat.create()
    said = await stage.chat.say(talk.id, None, user("Wave!"))
    await until(stage.chat, said.reply.id, 2)
    reader = asyncio.create_task(entries(stage.chat, said.reply.id))
    await asyncio.sleep(0)
    return said, reader


async def test_parking_leaves_replies_that_can_be_continued(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        async with serving(store, held=True) as stage:
            said, reader = await read_underway(stage)
        assert isinstance((await reader)[-1].event, Failed)
        async with serving(store) as stage:
            found = await stage.chat.message(said.reply.id)
            assert found.reply is not None
            assert found.reply.status is ReplyStatus.INTERRUPTED
            assert found.thinking
            await stage.chat.go_on(said.reply.id)
            await entries(stage.chat, said.reply.id)
            assert (await stage.chat.message(said.reply.id)).text == ANSWER


@pytest.mark.parametrize("resume", [True, False])
async def test_what_a_server_leaves_at_its_end_is_as_if_it_had_died(tmp_path: Path, resume: bool) -> None:
    with open_store(tmp_path) as store:
        async with serving(store, held=True) as stage:
            said, reader = await read_underway(stage)
            await stage.service.turns.park(leave=True)
            told = await reader
            assert isinstance(told[-1].event, Failed)
            assert told[-1].event.error == LEFT
        async with serving(store, resume=resume) as stage:
            await stage.service.recovered.wait()
            if not resume:
                found = await stage.chat.message(said.reply.id)
                assert found.reply is not None
                assert found.reply.status is ReplyStatus.INTERRUPTED
                await stage.chat.go_on(said.reply.id)
            whole = await entries(stage.chat, said.reply.id)
            assert fold([entry.event for entry in whole]).message == assistant(ANSWER, THOUGHT)
            meanings = {entry.number: written(entry) for entry in whole if written(entry)}
            assert all(meanings[entry.number] == written(entry) for entry in told if written(entry))


def test_kill_9_loses_nothing_that_was_told(tmp_path: Path) -> None:
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

    async with staged(tmp_path) as stage:
        talk = await stage.chat.create()
        await stage.chat.ready()
        monkeypatch.setattr(Template, "render", counted)
        said = await stage.chat.say(talk.id, None, user("Wave!"))
        await entries(stage.chat, said.reply.id)
        assert len(renders) == 1
        said = await stage.chat.say(talk.id, said.reply.id, user("Again!"))
        await entries(stage.chat, said.reply.id)
        assert len(renders) == 2
        again = await stage.chat.reply(talk.id, said.message.id, parameters={"max_tokens": 2})
        await entries(stage.chat, again.id)
        assert len(renders) == 3
        await stage.chat.go_on(again.id)
        await entries(stage.chat, again.id)
        assert threading.main_thread().name not in renders


async def test_a_reply_stopped_in_prefill_is_no_turn_in_later_prompts(tmp_path: Path) -> None:
    hold = asyncio.Event()
    async with staged(tmp_path, [[HoldScript(hold), *WAVE], OTHER]) as stage:
        chat = stage.chat
        talk = await chat.create()
        first = await chat.say(talk.id, None, user("Wave!"))
        await chat.stop(first.reply.id)
        await entries(chat, first.reply.id)
        second = await chat.say(talk.id, first.reply.id, user("Please!"))
        await entries(chat, second.reply.id)
        engine = stage.service.models.current().engine
        assert isinstance(engine, ScriptedEngine)
        said = b"".join(TOKENIZER.vocabulary[id] for id in engine.calls[-1].prompt.context_ids).decode()
        assert said.count("<|im_start|>assistant") == 1
        assert "Wave!\n\nPlease!" in said
        hold.set()
        await replay(stage.service.store, stage.service.models.current(), second.reply.id)
        assert engine.calls[-1].prompt.context_ids == engine.calls[-2].prompt.context_ids
        going = await chat.go_on(first.reply.id)  # it can still be continued: beside, as the conversation went on
        await entries(chat, going.id)
        assert (await chat.message(going.id)).text == "Another answer."
