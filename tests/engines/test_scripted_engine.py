import asyncio

import pytest

from palaver.errors import EngineError
from palaver.generation import Ended, Finish, Prompt
from palaver.sampling import Sampling
from tests.engines.generate import run
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
