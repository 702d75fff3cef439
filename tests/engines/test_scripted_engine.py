import asyncio

import pytest

from palaver.errors import ContextOverflow, EngineClosed, EngineError
from palaver.generation import Ended, Finish, Prompt
from palaver.sampling import Sampling
from tests.engines.generate import continued, run
from tests.engines.tiny import END, VOCABULARY
from tests.scripted_engine import FailScript, HoldScript, ScriptedEngine

PROMPT = Prompt(tuple(b"hi"))


def scripted(*scripts: object, **options: object) -> ScriptedEngine:
    return ScriptedEngine(list(scripts), VOCABULARY, end_ids=frozenset({END}), **options)  # type: ignore[arg-type]


async def test_says_its_scripts_in_turn() -> None:
    engine = scripted((*b"one", END), (*b"two", END))
    first, second = await run(engine, PROMPT, Sampling()), await run(engine, PROMPT, Sampling())
    assert bytes(first.ids[:-1]) + bytes(second.ids[:-1]) == b"onetwo"
    assert first.ended == Ended(Finish.END)
    assert [call.prompt for call in engine.calls] == [PROMPT, PROMPT]


async def test_continues_at_every_position() -> None:
    tokens = [*b"hello", END]
    for cut in range(1, len(tokens)):
        engine = scripted(tuple(tokens))
        reply_ids = (await run(engine, PROMPT, Sampling(), stop_after=cut)).ids
        rest = await run(engine, continued(PROMPT, reply_ids), Sampling())
        assert reply_ids + rest.ids == tokens
        assert engine.cancelled == 1


async def test_a_whole_reply_only_ends() -> None:
    out = await run(scripted(b"ab"), Prompt((1,), (97, END)), Sampling())
    assert (out.ids, out.prefilled, out.ended) == ([], None, Ended(Finish.END))


async def test_honours_lengths_and_stop_strings() -> None:
    assert (await run(scripted(b"hello"), PROMPT, Sampling(max_tokens=2))).ended == Ended(Finish.LENGTH)
    out = await run(scripted(b"hello"), PROMPT, Sampling(stop=("ll",)))
    assert out.ended == Ended(Finish.STOP_STRING, "ll")


async def test_holds_until_the_event_and_fails_on_command() -> None:
    gate = asyncio.Event()
    engine = scripted((65, HoldScript(gate), 66, FailScript()))
    async with engine.generate(PROMPT, Sampling()) as outputs:
        first = [await anext(outputs), await anext(outputs)]
        assert len(first) == 2
        waiting = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0)
        assert not waiting.done()
        gate.set()
        await waiting
        with pytest.raises(EngineError):
            await anext(outputs)


async def test_refuses_when_closed_and_when_too_long() -> None:
    engine = scripted(b"x", context_length=1)
    with pytest.raises(ContextOverflow):
        await run(engine, PROMPT, Sampling())
    await engine.close()
    with pytest.raises(EngineClosed):
        await run(engine, PROMPT, Sampling())
