"""End to end with the embedded model over HTTP: a reply that is stopped and continued has no seam."""

from __future__ import annotations

import random

import pytest

from palaver.chat.interface import Chat, ModelState
from palaver.client.http_chat import HttpChat
from palaver.events import Finished, ThinkingDelta, fold
from palaver.generation import Finish
from palaver.messages import user
from palaver.store import ReplyStatus
from tests.chat.scripted_service import read_entries
from tests.server.live_server import LiveServer

QUESTION = "How many r are in the word strawberry?"


async def stop_after(chat: Chat, reply_id: str, count: int) -> None:
    """Stops the reply after `count` events, unless it has ended."""
    async with chat.events(reply_id) as stream:
        async for entry in stream:
            if entry.number >= count and not isinstance(entry.event, Finished):
                await chat.stop_reply(reply_id)
                break
    await read_entries(chat, reply_id)


@pytest.mark.slow
async def test_stopped_and_continued_over_http_it_is_the_reply_without_the_stop(live: LiveServer) -> None:
    rng = random.Random(3)
    async with HttpChat(live.url) as chat:
        card = await chat.wait_until_ready()
        assert (card.state, card.thinks) == (ModelState.READY, True)
        conversation = await chat.create_conversation()
        for parameters in ({"temperature": 0}, {"temperature": 1.0, "seed": 11}):
            sent = await chat.send_message(conversation.id, None, user(QUESTION), parameters=parameters)
            first_entries = await read_entries(chat, sent.reply.id)
            whole = await chat.tokens(sent.reply.id)
            assert any(isinstance(entry.event, ThinkingDelta) for entry in first_entries)
            for _ in range(3):
                again = await chat.start_reply(conversation.id, sent.message.id, parameters=parameters)
                while True:
                    await stop_after(chat, again.id, rng.randint(1, first_entries[-1].number))
                    status = (await chat.message(again.id)).reply
                    assert status is not None
                    if status.status is ReplyStatus.DONE:
                        break
                    assert (await chat.continue_reply(again.id)).id == again.id
                    if rng.random() < 0.5:
                        break
                rest = await read_entries(chat, again.id)
                assert isinstance(rest[-1].event, Finished)
                assert rest[-1].event.finish is Finish.END
                assert [token.token_id for token in await chat.tokens(again.id)] == [one.token_id for one in whole]
                assert (
                    fold(entry.event for entry in rest).message == fold(entry.event for entry in first_entries).message
                )


async def test_answer_now_and_the_next_turn(live: LiveServer) -> None:
    async with HttpChat(live.url) as chat:
        conversation = await chat.create_conversation(parameters={"temperature": 0})
        sent = await chat.send_message(conversation.id, None, user(QUESTION))
        async with chat.events(sent.reply.id) as stream:
            async for entry in stream:
                if isinstance(entry.event, ThinkingDelta):
                    await chat.answer_now(sent.reply.id)
                    break
        first_entries = await read_entries(chat, sent.reply.id)
        assert fold(entry.event for entry in first_entries).message.text
        more = await chat.send_message(conversation.id, sent.reply.id, user("Thank you!"))
        await read_entries(chat, more.reply.id)
        gauge = await chat.context_usage(conversation.id, more.reply.id)
        assert 0 < gauge.used < gauge.limit
        done = (await chat.message(more.reply.id)).reply
        assert done is not None
        assert done.usage is not None
        assert done.usage.cached_tokens > 0
