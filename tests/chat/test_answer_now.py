"""Asking for the answer is part of a reply's record: it is continued, recovered and made again with it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from palaver.chat.interface import Chat
from palaver.chat.model_loader import LoadOptions, ModelSlot, hosted_loader
from palaver.chat.replay import replay
from palaver.chat.service import Service
from palaver.engines.core.reply_state import ReplyState
from palaver.events import ThinkingDelta
from palaver.generation import Prompt
from palaver.messages import user
from palaver.sampling import Sampling
from palaver.store import Store, open_store
from tests.chat.making import CONTROL, TOKENIZER, WAVE, Stage, entries, model, serving, until

ASKED = {"temperature": 1, "seed": 7, "max_tokens": 60}


async def asked_early(stage: Stage) -> str:
    """A reply whose thought was cut short, four tokens in."""
    talk = await stage.chat.create()
    said = await stage.chat.say(talk.id, None, user("Wave!"))
    await until(stage.chat, said.reply.id, 2)
    await stage.chat.answer_now(said.reply.id)
    return said.reply.id


async def test_the_position_is_stored_and_the_reply_is_made_again(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        async with serving(store, [WAVE], held=True) as stage:
            reply_id = await asked_early(stage)
            stage.hold.set()
            await entries(stage.chat, reply_id)
            done = await stage.chat.message(reply_id)
            assert done.reply is not None
            assert done.reply.settings.answer_at == 4
            ids = store.replies.token_ids(reply_id)
            assert CONTROL["</think>"] in ids[4:7]
            again = await replay(store, stage.service.models.current(), reply_id)
            assert again.same, again


async def test_a_reply_that_was_left_goes_on_to_its_answer(tmp_path: Path) -> None:
    """Stopped in the middle of what closes the thought, by the end of its process."""
    with open_store(tmp_path) as store:
        async with serving(store, [WAVE], held=True) as stage:
            reply_id = await asked_early(stage)
            turn = stage.service.turns.get(reply_id)
            assert turn is not None
            recorded = asyncio.Event()
            keep = turn.utterance.keep_answer_at
            assert keep is not None

            async def kept(position: int) -> None:
                await keep(position)
                recorded.set()

            turn.utterance.keep_answer_at = kept
            stage.hold.set()
            await recorded.wait()
            await stage.service.turns.park(leave=True)
            said = store.replies.token_ids(reply_id)
        async with serving(store, [WAVE], resume=True) as stage:
            await stage.service.recovered.wait()
            await entries(stage.chat, reply_id)
            ids = store.replies.token_ids(reply_id)
            assert ids[: len(said)] == said
            assert CONTROL["</think>"] in ids[4:7]


def test_an_engines_reply_closes_the_thought_where_it_was_asked() -> None:
    phases = model().format.render([user("Wave!")]).phases
    live = ReplyState(Prompt((), (), phases), Sampling(), TOKENIZER.vocabulary)
    for token in WAVE[:4]:
        live.take(token)
    assert live.answer_now() == 4
    while live.forced is not None:
        live.take(live.forced)
    again = ReplyState(Prompt((), (), phases, answer_at=4), Sampling(), TOKENIZER.vocabulary)
    for token in WAVE[:4]:
        assert again.forced is None
        again.take(token)
    for token in live.ids[4:]:
        assert again.forced == token
        again.take(token)
    assert again.forced is None
    for end in range(len(live.ids) + 1):
        restored = ReplyState(Prompt((), tuple(live.ids[:end]), phases, answer_at=4), Sampling(), TOKENIZER.vocabulary)
        assert restored.forced == (live.ids[end] if 4 <= end < len(live.ids) else None)


@pytest.mark.slow
async def test_with_the_real_engine_in_its_process(tmp_path: Path) -> None:
    """Made again, and stopped and continued, the sampled reply is the same."""
    pytest.importorskip("torch")
    models = ModelSlot(hosted_loader(LoadOptions()))
    models.load("sprout")
    with open_store(tmp_path) as store:
        async with Service(store, models) as service:
            await models.ready()
            chat = service.chat(store.users.ensure().id)
            reply_id = await _asked_while_thinking(chat)
            await entries(chat, reply_id)
            stored = (await chat.message(reply_id)).reply
            assert stored is not None
            assert stored.settings.answer_at is not None
            assert (await replay(store, models.current(), reply_id)).same
            await _check_continued(store, chat, service, reply_id, stored.settings.answer_at)


async def _asked_while_thinking(chat: Chat) -> str:
    talk = await chat.create(parameters={**ASKED, "thinking": True})
    said = await chat.say(talk.id, None, user("What is 417 + 385?"))
    async with chat.events(said.reply.id) as stream:
        async for entry in stream:
            if isinstance(entry.event, ThinkingDelta):
                await chat.answer_now(said.reply.id)
                break
    return said.reply.id


async def _check_continued(store: Store, chat: Chat, service: Service, reply_id: str, position: int) -> None:
    """From every place about the one where it was asked."""
    whole = store.replies.token_ids(reply_id)
    reply = await chat.message(reply_id)
    request = service.requests.of(service.models.current(), reply, store.users.ensure().id)
    for end in range(max(0, position - 1), min(len(whole), position + 4)):
        again = await service.models.current().reply(request, whole[:end])
        assert again.token_ids == whole
