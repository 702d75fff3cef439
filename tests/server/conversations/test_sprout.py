"""End to end with the embedded model: what is said over HTTP, stopped and continued has no seam."""

from __future__ import annotations

import random

import pytest

from palaver.chat.interface import Chat, ModelState
from palaver.client import HttpChat
from palaver.events import Finished, ThinkingDelta, fold
from palaver.generation import Finish
from palaver.messages import user
from palaver.store import ReplyStatus
from tests.chat.making import entries
from tests.server.live import Live

QUESTION = "How many r are in the word strawberry?"


async def stopped_at(chat: Chat, reply_id: str, count: int) -> None:
    """Stops the reply when so many events have been heard, unless it is over by then."""
    async with chat.events(reply_id) as stream:
        async for entry in stream:
            if entry.number >= count and not isinstance(entry.event, Finished):
                await chat.stop(reply_id)
                break
    await entries(chat, reply_id)


@pytest.mark.slow
async def test_stopped_and_continued_over_http_it_is_the_reply_without_the_stop(live: Live) -> None:
    dice = random.Random(3)
    async with HttpChat(live.url) as chat:
        card = await chat.ready()
        assert (card.state, card.thinks) == (ModelState.READY, True)
        talk = await chat.create()
        for parameters in ({"temperature": 0}, {"temperature": 1.0, "seed": 11}):
            said = await chat.say(talk.id, None, user(QUESTION), parameters=parameters)
            told = await entries(chat, said.reply.id)
            whole = await chat.tokens(said.reply.id)
            assert any(isinstance(entry.event, ThinkingDelta) for entry in told)
            for _ in range(3):
                again = await chat.reply(talk.id, said.message.id, parameters=parameters)
                while True:
                    await stopped_at(chat, again.id, dice.randint(1, told[-1].number))
                    status = (await chat.message(again.id)).reply
                    assert status is not None
                    if status.status is ReplyStatus.DONE:
                        break
                    assert (await chat.go_on(again.id)).id == again.id
                    if dice.random() < 0.5:
                        break
                rest = await entries(chat, again.id)
                assert isinstance(rest[-1].event, Finished)
                assert rest[-1].event.finish is Finish.END
                assert [token.token_id for token in await chat.tokens(again.id)] == [one.token_id for one in whole]
                assert fold(entry.event for entry in rest).message == fold(entry.event for entry in told).message


async def test_answer_now_and_the_next_turn(live: Live) -> None:
    async with HttpChat(live.url) as chat:
        talk = await chat.create(parameters={"temperature": 0})
        said = await chat.say(talk.id, None, user(QUESTION))
        async with chat.events(said.reply.id) as stream:
            async for entry in stream:
                if isinstance(entry.event, ThinkingDelta):
                    await chat.answer_now(said.reply.id)
                    break
        told = await entries(chat, said.reply.id)
        assert fold(entry.event for entry in told).message.text
        more = await chat.say(talk.id, said.reply.id, user("Thank you!"))
        await entries(chat, more.reply.id)
        gauge = await chat.gauge(talk.id, more.reply.id)
        assert 0 < gauge.used < gauge.limit
        done = (await chat.message(more.reply.id)).reply
        assert done is not None
        assert done.usage is not None
        assert done.usage.cached_tokens > 0
