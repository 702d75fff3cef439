"""A reply stream has one owner; stopping keeps the tokens, continuing leaves no seam."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from palaver.chat.model import Model
from palaver.chat.reply_stream import ReplyRecord, ReplyRequest, SeamTrimmer
from palaver.errors import BadParameter, ContextOverflow, EngineError, NothingToContinue
from palaver.events import AnswerDelta, Event, Finished, PhaseOpened, ReadEvent, Started, ThinkingDelta, ToolCallDelta
from palaver.formats.format import TemplateFormat
from palaver.formats.template import Template
from palaver.formats.tokenizer import FastTokenizer
from palaver.generation import Finish
from palaver.messages import user
from palaver.phases import Phase
from palaver.sampling import Sampling
from tests.scripted_engine import FailScript, HoldScript, Script, ScriptedEngine
from tests.tiny import CHATML, MERGES, PREOPENED, STRINGS, byte_level

TOKENIZER = FastTokenizer(byte_level(merges=MERGES))
CONTROL = TOKENIZER.control
THOUGHT = [CONTROL["<think>"], *TOKENIZER.encode(["\nthink 👋\n"]), CONTROL["</think>"]]
ANSWER = [*TOKENIZER.encode(["\n\nWave: 👋🏽 <think"]), CONTROL["<|im_end|>"]]
REPLY = [*THOUGHT, *ANSWER]


def chat(*script: object, template: str = CHATML, context: int = 4096) -> Model:
    steps: Script = script or REPLY  # type: ignore[assignment]
    engine = ScriptedEngine([steps], TOKENIZER.vocabulary, context_length=context)
    return Model(engine, TemplateFormat(Template(template), TOKENIZER, STRINGS))


def request(**sampling: object) -> ReplyRequest:
    return ReplyRequest((user("Wave!"),), Sampling(**sampling))  # type: ignore[arg-type]


async def test_the_stream_of_a_turn() -> None:
    async with chat().stream_reply(request()) as turn:
        events = [event async for event in turn]
    assert isinstance(events[0], Started)
    kinds = [type(e) for e in events[1:-1]]
    assert kinds[0] is PhaseOpened
    assert set(kinds) == {PhaseOpened, ThinkingDelta, AnswerDelta}
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.finish is Finish.END
    assert last.usage.reply_tokens == len(REPLY)
    assert last.usage.thinking_tokens == len(THOUGHT) - 1


async def test_not_streaming_folds_the_same_stream() -> None:
    reply = await chat().reply(request())
    assert reply.message.thinking == "think 👋"
    assert reply.message.text == "Wave: 👋🏽 <think"
    assert reply.token_ids == tuple(REPLY)


async def test_a_thought_the_template_opens_is_announced_first() -> None:
    async with chat(*REPLY[1:], template=PREOPENED).stream_reply(request()) as turn:
        events = [event async for event in turn]
    assert events[0] == PhaseOpened(Phase.THINKING)


async def stopped_after(count: int) -> ReplyRecord:
    """The reply of an engine that falls silent after so many tokens, stopped then."""
    async with chat(*REPLY[:count], HoldScript(asyncio.Event())).stream_reply(request()) as turn:

        async def stop() -> None:
            while len(turn.token_ids) < count:
                await asyncio.sleep(0)
            turn.stop()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stop())
            async for _ in turn:
                pass
        return turn.reply()


@pytest.mark.parametrize("count", range(1, len(REPLY)))
async def test_stop_and_continue_leave_no_seam(count: int) -> None:
    conversation = chat()
    complete = await conversation.reply(request())
    part = await stopped_after(count)
    assert part.finish is Finish.STOPPED
    assert part.token_ids == tuple(REPLY[:count])
    assert "�" not in part.message.text + part.message.thinking
    async with conversation.continue_reply(part) as turn:
        events: list[Event] = [event async for event in turn]
    rest = turn.reply()
    assert rest.token_ids == complete.token_ids
    assert rest.message == complete.message
    assert rest.finish is Finish.END
    assert len(rest.steps) == len(REPLY) - count
    assert events


async def test_a_reply_that_reached_max_tokens_gets_as_many_again() -> None:
    conversation = chat()
    part = await conversation.reply(request(max_tokens=3))
    assert part.finish is Finish.LENGTH
    async with conversation.continue_reply(part) as turn:
        async for _ in turn:
            pass
    assert turn.reply().token_ids == tuple(REPLY[:6])


async def test_a_complete_reply_is_not_continued() -> None:
    conversation = chat()
    complete = await conversation.reply(request())
    with pytest.raises(NothingToContinue):
        conversation.continue_reply(complete)


async def test_stop_ends_a_turn_that_is_waiting() -> None:
    never = asyncio.Event()
    conversation = chat(REPLY[0], HoldScript(never), *REPLY[1:])
    async with conversation.stream_reply(request()) as turn:
        events = []
        async for event in turn:
            events.append(event)
            if isinstance(event, PhaseOpened):
                asyncio.get_running_loop().call_soon(turn.stop)
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.finish is Finish.STOPPED
    assert turn.token_ids == (REPLY[0],)


async def test_leaving_the_turn_ends_the_generation() -> None:
    conversation = chat()
    async with conversation.stream_reply(request()) as turn:
        async for _ in turn:
            break
    engine = conversation.engine
    assert isinstance(engine, ScriptedEngine)
    assert engine.cancelled == 1


async def test_stop_strings_end_the_answer_and_are_not_in_it() -> None:
    reply = await chat().reply(request(stop=("think",)))
    assert reply.finish is Finish.STOP_STRING
    assert reply.folded.finished
    assert reply.folded.finished.stop == "think"
    assert reply.message.thinking == "think 👋"
    assert reply.message.text == "Wave: 👋🏽 <"


async def test_a_stop_string_that_the_template_declares_ends_the_answer() -> None:
    reply = await chat(template='{%- set stop_strings = ["🏽"] %}' + CHATML).reply(request())
    assert reply.finish is Finish.STOP_STRING
    assert reply.message.text == "Wave: 👋"


async def test_a_failing_engine_is_an_error() -> None:
    with pytest.raises(EngineError):
        await chat(REPLY[0], FailScript()).reply(request())


async def test_invalid_requests_are_refused_before_the_engine_is_called() -> None:
    with pytest.raises(ContextOverflow, match="context length is 10"):
        await chat(context=10).reply(request())
    with pytest.raises(BadParameter, match="top_p"):
        await chat().reply(request(top_p=7.0))


async def test_the_same_request_is_the_same_prompt() -> None:
    conversation = chat()
    first, second = request(), replace(request())
    assert conversation.stream_reply(first).prompt == conversation.stream_reply(second).prompt


@pytest.mark.parametrize(
    ("sent", "events", "new"),
    [
        ({}, [AnswerDelta(" a")], [AnswerDelta(" a")]),
        ({AnswerDelta: " "}, [AnswerDelta(" a")], [AnswerDelta("a")]),
        ({AnswerDelta: " a"}, [AnswerDelta(" "), AnswerDelta("a b")], [AnswerDelta(" b")]),
        ({ThinkingDelta: "\n"}, [AnswerDelta("x")], [AnswerDelta("x")]),
        ({ThinkingDelta: "\n"}, [ThinkingDelta("\nmore")], [ThinkingDelta("more")]),
        ({ToolCallDelta: '{"a'}, [ToolCallDelta(0, '{"ab"')], [ToolCallDelta(0, 'b"')]),
        ({AnswerDelta: "zzz"}, [AnswerDelta("other")], [AnswerDelta("other")]),
    ],
)
def test_text_that_the_client_has_is_not_sent_again(sent: Any, events: list[ReadEvent], new: list[ReadEvent]) -> None:
    trimmer = SeamTrimmer(sent)
    assert [new_event for event in events if (new_event := trimmer.trim(event)) is not None] == new
