"""A stored turn as a reply stream: the same batches wherever it runs, and after it was stopped and continued."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from palaver.chat.interface import ServerChat
from palaver.chat.local_chat import LocalChat
from palaver.chat.turn_log import TurnLog
from palaver.events import AnswerDelta, Failed, Finished, ReplyBatch, Started, Usage, Waiting, fold
from palaver.generation import Finish, Step
from palaver.messages import user
from palaver.store import DiskFull, Lease, TokenFrame
from tests.chat.scripted_service import TOKENIZER, WAVE, Stage, open_stage, run_service
from tests.scripted_engine import Script

SECONDS = 60
SCRIPT: Script = [Step(id, -0.25 * (at % 7)) for at, id in enumerate(WAVE)]


async def batches(chat: ServerChat, reply_id: str, raw: bool = False) -> list[ReplyBatch]:
    """All batches but those of the status."""
    async with asyncio.timeout(SECONDS), await chat.reply_stream(reply_id, raw=raw) as stream:
        found = [batch async for batch in stream.batches()]
    return [batch for batch in found if not isinstance(batch.events[0], Waiting | Started)]


def server_chat(stage: Stage) -> ServerChat:
    assert isinstance(stage.chat, LocalChat)
    return stage.chat


def answer_text(read: list[ReplyBatch]) -> str:
    ids = [step.token_id for batch in read for step in batch.answer_steps]
    return b"".join(TOKENIZER.vocabulary[id] for id in ids).decode()


async def test_a_turn_is_the_same_here_elsewhere_and_after_its_end(tmp_path: Path) -> None:
    async with open_stage(tmp_path, [SCRIPT], held=True) as stage, run_service(stage.service.store, [SCRIPT]) as other:
        await other.chat.wait_until_ready()
        talk = await stage.chat.create_conversation()
        reply = (await stage.chat.send_message(talk.id, None, user("Hello"))).reply.id
        readers = [asyncio.create_task(batches(server_chat(one), reply)) for one in (stage, other)]
        await asyncio.sleep(0.3)  # the other process reads the tokens before the hold
        stage.hold.set()
        here, elsewhere = await asyncio.gather(*readers)
        ended = await batches(server_chat(other), reply)
        raw = await batches(server_chat(other), reply, raw=True)
    assert here == elsewhere == ended
    assert [step for batch in here for step in batch.steps] == SCRIPT
    folded = fold(event for batch in here for event in batch.events)
    assert answer_text(here) == folded.message.text
    assert fold(event for batch in raw for event in batch.events).message.text.startswith("<think>\nthink")
    assert [batch.steps for batch in raw][-1] == here[-1].steps


async def test_a_continued_turn_has_the_batches_of_the_whole_reply(tmp_path: Path) -> None:
    async with open_stage(tmp_path, [SCRIPT], held=True) as stage:
        talk = await stage.chat.create_conversation()
        reply = (await stage.chat.send_message(talk.id, None, user("Hello"))).reply.id
        async with stage.chat.events(reply) as entries:
            async for entry in entries:
                if entry.number == 2:
                    await stage.chat.stop_reply(reply)
                last = entry.event
        assert isinstance(last, Finished)
        assert last.finish is Finish.STOPPED
        stage.hold.set()
        await stage.chat.continue_reply(reply)
        continued = await batches(server_chat(stage), reply)
    assert [step for batch in continued for step in batch.steps] == SCRIPT
    assert isinstance(continued[-1].events[0], Finished)


async def test_closing_a_reader_does_not_stop_the_turn(tmp_path: Path) -> None:
    async with open_stage(tmp_path, [SCRIPT], held=True) as stage:
        chat = server_chat(stage)
        talk = await chat.create_conversation()
        reply = (await chat.send_message(talk.id, None, user("Hello"))).reply.id
        async with await chat.reply_stream(reply) as stream:
            await anext(stream.batches())
        stage.hold.set()
        assert isinstance((await batches(chat, reply))[-1].events[0], Finished)


def test_an_ended_log_still_has_the_events_of_its_tokens() -> None:
    ending = ReplyBatch((Finished(Finish.END, Usage()),))
    assert TurnLog([ReplyBatch((AnswerDelta("a"),)), ending]).events() == [AnswerDelta("a")]


async def test_tokens_that_arrive_during_a_commit_are_stored_together(tmp_path: Path) -> None:
    async with open_stage(tmp_path, [SCRIPT]) as stage:
        replies, recorded = stage.service.store.replies, list[TokenFrame]()
        append = replies.append

        def record(lease: Lease, frames: Sequence[TokenFrame]) -> frozenset[str]:
            recorded.extend(frames)
            return append(lease, frames)

        replies.append = record  # type: ignore[method-assign]
        talk = await stage.chat.create_conversation()
        reply = (await stage.chat.send_message(talk.id, None, user("Hello"))).reply.id
        shown = 0
        async with await server_chat(stage).reply_stream(reply) as stream:
            async for batch in stream.batches():
                shown += len(batch.steps)
                assert shown <= len(replies.tokens(reply)), "a token is stored before it is shown"
        assert [step for frame in recorded for step in frame.steps] == SCRIPT
        assert 1 < len(recorded) < len(SCRIPT) / 2


@pytest.mark.parametrize("commits", [0, 1])
async def test_a_failed_commit_shows_nothing_of_its_tokens(tmp_path: Path, commits: int) -> None:
    async with open_stage(tmp_path, [SCRIPT]) as stage, run_service(stage.service.store, [SCRIPT]) as other:
        await other.chat.wait_until_ready()
        replies, calls = stage.service.store.replies, itertools.count()
        append = replies.append

        def fail_later(lease: Lease, frames: Sequence[TokenFrame]) -> frozenset[str]:
            if next(calls) >= commits:
                raise DiskFull
            return append(lease, frames)

        replies.append = fail_later  # type: ignore[method-assign]
        talk = await stage.chat.create_conversation()
        reply = (await stage.chat.send_message(talk.id, None, user("Hello"))).reply.id
        shown = await batches(server_chat(stage), reply)
        assert isinstance(shown[-1].events[0], Failed)
        stored = replies.tokens(reply)
        assert [step for batch in shown for step in batch.steps] == list(stored) == SCRIPT[: len(stored)]
        assert bool(stored) is bool(commits)
        assert await batches(server_chat(other), reply) == shown, "the same is read from the store"
