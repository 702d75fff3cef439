"""Asking for the answer is part of a reply's record: it is continued, recovered and made again with it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from palaver.chat.continuation import replay
from palaver.chat.engine_choice import LoadOptions
from palaver.chat.interface import Chat
from palaver.chat.model_loader import ModelLoader
from palaver.chat.model_pool import ModelPool
from palaver.chat.service import Service
from palaver.engines.core.reply_state import ReplyState
from palaver.events import ThinkingDelta
from palaver.generation import Prompt
from palaver.messages import user
from palaver.sampling import Sampling
from palaver.store import Store, open_store
from tests.chat.scripted_service import CONTROL, TOKENIZER, WAVE, Stage, model, read_entries, read_until, run_service

ASKED = {"temperature": 1, "seed": 7, "max_tokens": 60}


async def asked_early(stage: Stage) -> str:
    """A reply whose thought was cut short, four tokens in."""
    conversation = await stage.chat.create_conversation()
    sent = await stage.chat.send_message(conversation.id, None, user("Wave!"))
    await read_until(stage.chat, sent.reply.id, 2)
    await stage.chat.answer_now(sent.reply.id)
    return sent.reply.id


async def test_the_position_is_stored_and_replayed(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        async with run_service(store, [WAVE], held=True) as stage:
            reply_id = await asked_early(stage)
            stage.hold.set()
            await read_entries(stage.chat, reply_id)
            done = await stage.chat.message(reply_id)
            assert done.reply is not None
            assert done.reply.settings.answer_at == 4
            ids = store.replies.token_ids(reply_id)
            assert CONTROL["</think>"] in ids[4:7]
            again = await replay(store, stage.service.models.current(), reply_id)
            assert again.same, again


async def test_a_reply_that_was_left_open_continues_with_its_answer(tmp_path: Path) -> None:
    """Stopped in the middle of what closes the thought, by the end of its process."""
    with open_store(tmp_path) as store:
        async with run_service(store, [WAVE], held=True) as stage:
            reply_id = await asked_early(stage)
            turn = stage.service.turns.get(reply_id)
            assert turn is not None
            recorded = asyncio.Event()
            keep = turn.reply_stream.record_answer_at
            assert keep is not None

            async def kept(position: int) -> None:
                await keep(position)
                recorded.set()

            turn.reply_stream.record_answer_at = kept
            stage.hold.set()
            await recorded.wait()
            await stage.service.turns.park(leave=True)
            sent = store.replies.token_ids(reply_id)
        async with run_service(store, [WAVE], resume=True) as stage:
            await stage.service.recovered.wait()
            await read_entries(stage.chat, reply_id)
            ids = store.replies.token_ids(reply_id)
            assert ids[: len(sent)] == sent
            assert CONTROL["</think>"] in ids[4:7]


def test_the_thinking_is_closed_at_the_requested_position() -> None:
    phases = model().format.render([user("Wave!")]).phases
    live = ReplyState(Prompt((), (), phases), Sampling(), TOKENIZER.vocabulary)
    for token in WAVE[:4]:
        live.append_token(token)
    assert live.answer_now() == 4
    while live.forced_id is not None:
        live.append_token(live.forced_id)
    again = ReplyState(Prompt((), (), phases, answer_at=4), Sampling(), TOKENIZER.vocabulary)
    for token in WAVE[:4]:
        assert again.forced_id is None
        again.append_token(token)
    for token in live.token_ids[4:]:
        assert again.forced_id == token
        again.append_token(token)
    assert again.forced_id is None
    for end in range(len(live.token_ids) + 1):
        restored = ReplyState(
            Prompt((), tuple(live.token_ids[:end]), phases, answer_at=4), Sampling(), TOKENIZER.vocabulary
        )
        assert restored.forced_id == (live.token_ids[end] if 4 <= end < len(live.token_ids) else None)


@pytest.mark.slow
async def test_with_the_real_engine_in_its_process(tmp_path: Path) -> None:
    """Made again, and stopped and continued, the sampled reply is the same."""
    pytest.importorskip("torch")
    models = ModelPool(ModelLoader(LoadOptions()).load)
    models.load("sprout")
    with open_store(tmp_path) as store:
        async with Service(store, models) as service:
            await models.ready()
            chat = service.chat(store.users.ensure().id)
            reply_id, position = await _asked_while_thinking(chat)
            assert (await replay(store, models.current(), reply_id)).same
            await _check_continued(store, chat, service, reply_id, position)


async def _asked_while_thinking(chat: Chat) -> tuple[str, int]:
    """A reply, and the number of its tokens when it was asked. A thought of 40 tokens may end before that is done: then
    another one is asked."""
    for _ in range(20):
        conversation = await chat.create_conversation(parameters={**ASKED, "thinking": True})
        sent = await chat.send_message(conversation.id, None, user("What is 417 + 385?"))
        async with chat.events(sent.reply.id) as stream:
            async for entry in stream:
                if isinstance(entry.event, ThinkingDelta):
                    await chat.answer_now(sent.reply.id)
                    break
        await read_entries(chat, sent.reply.id)
        stored = (await chat.message(sent.reply.id)).reply
        assert stored is not None
        if stored.settings.answer_at is not None:
            return sent.reply.id, stored.settings.answer_at
    raise AssertionError("each thought ended before it was asked")


async def _check_continued(store: Store, chat: Chat, service: Service, reply_id: str, position: int) -> None:
    """From every place about the one where it was asked."""
    complete = store.replies.token_ids(reply_id)
    reply = await chat.message(reply_id)
    request = service.requests.rebuild(service.models.current(), reply, store.users.ensure().id)
    for end in range(max(0, position - 1), min(len(complete), position + 4)):
        again = await service.models.current().reply(request, complete[:end])
        assert again.token_ids == complete
