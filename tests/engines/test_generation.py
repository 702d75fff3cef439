"""One generation: outputs from the worker's thread, read in the caller's event loop."""

from __future__ import annotations

import asyncio
from functools import partial

from palaver.engines.core.generation import Command, LocalGeneration, Outbox, PendingStep
from palaver.generation import Alternative, Ended, Finish, Prompt, Step
from palaver.sampling import Sampling


async def test_alternatives_are_read_by_the_reader_of_the_reply() -> None:
    steps = [Step(7, -0.5, (Alternative(7, -0.5),)), Step(8, -0.1)]
    built: list[int] = []

    def build(step: Step) -> Step:
        built.append(step.token_id)
        return step

    posted: list[Command] = []
    generation = LocalGeneration(Prompt((1,)), Sampling(), 0, posted.append)
    outbox = Outbox()
    async with generation as outputs:
        for step in steps:
            outbox.put(generation, PendingStep(step.token_id, partial(build, step)))
        outbox.put(generation, Ended(Finish.END))
        assert built == []
        assert generation.token_count == 2
        assert [output async for output in outputs] == [*steps, Ended(Finish.END)]
    assert built == [7, 8]


async def test_a_pending_step_wakes_a_reader_that_waits() -> None:
    generation = LocalGeneration(Prompt((1,)), Sampling(), 0, lambda command: None)
    outbox = Outbox()
    async with generation as outputs:
        waiting = asyncio.create_task(anext(outputs))
        await asyncio.sleep(0)
        outbox.put(generation, PendingStep(3, lambda: Step(3, -1.0)))
        outbox.flush_if_due()
        assert await waiting == Step(3, -1.0)
