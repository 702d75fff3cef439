"""One generation: outputs from the worker's thread, read in the caller's event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from palaver.engines.core.generation import (
    AnswerNowCommand,
    CancelCommand,
    Command,
    LocalGeneration,
    Outbox,
    OutputOrError,
    PendingStep,
    SubmitCommand,
)
from palaver.engines.core.media import MissingMedia
from palaver.errors import UnsupportedContent
from palaver.generation import (
    Alternative,
    Ended,
    Finish,
    MediaExpansion,
    MediaItem,
    MediaSpan,
    Prefilled,
    Prompt,
    Step,
)
from palaver.sampling import Sampling


async def test_alternatives_are_read_by_the_reader_of_the_reply() -> None:
    steps = [Step(7, -0.5, (Alternative(7, -0.5),)), Step(8, -0.1)]
    built: list[int] = []

    class Table:
        def read_step(self, row: int) -> Step:
            built.append(steps[row].token_id)
            return steps[row]

    posted: list[Command] = []
    generation = LocalGeneration(Prompt((1,)), Sampling(), 0, posted.append)
    outbox = Outbox()
    async with generation as outputs:
        for row, step in enumerate(steps):
            outbox.put(generation, PendingStep(step.token_id, Table(), row))
        outbox.put(generation, Ended(Finish.END))
        assert built == []
        assert generation.token_count == 2
        assert [output async for output in outputs] == [*steps, Ended(Finish.END)]
    assert built == [7, 8]


async def test_a_pending_step_wakes_a_reader_that_waits() -> None:
    class Table:
        def read_step(self, row: int) -> Step:
            return Step(row, -1.0)

    generation = LocalGeneration(Prompt((1,)), Sampling(), 0, lambda command: None)
    outbox = Outbox()
    async with generation as outputs:
        waiting = asyncio.create_task(anext(outputs))
        await asyncio.sleep(0)
        outbox.put(generation, PendingStep(3, Table(), 3))
        outbox.flush_if_due()
        assert await waiting == Step(3, -1.0)


@dataclass
class Loaded:
    expansion: MediaExpansion = field(default_factory=lambda: MediaExpansion((1,)))
    nbytes: int = 0


ITEM = MediaItem("image", "digest", "<image>")
SEEN = Prompt((1, 2), (3,), healing=b"x", healing_at=1, media=(MediaSpan(ITEM, 0, 1),))


async def test_a_missing_item_is_loaded_and_the_request_goes_on_from_its_tokens() -> None:
    posted: list[Command] = []
    loaded = Loaded()
    generation = LocalGeneration(SEEN, Sampling(), 0, posted.append, load_media=lambda item: loaded)
    async with generation as outputs:
        pushed: list[OutputOrError] = [Prefilled(3, 0), Step(7, -0.5), MissingMedia([ITEM.key])]
        for output in (*pushed, Prefilled(4, 4), Step(8, -0.5), Ended(Finish.END)):
            generation.push(output)
        seen = [output async for output in outputs]
    assert seen == [Prefilled(3, 0), Step(7, -0.5), Step(8, -0.5), Ended(Finish.END)]
    assert [type(command) for command in posted] == [SubmitCommand, SubmitCommand]
    assert generation.media == {ITEM.key: loaded}
    assert (generation.prompt.reply_ids, generation.prompt.healing_at) == ((3, 7), 1)


async def test_commands_that_come_while_an_item_is_loaded_are_not_lost() -> None:
    posted: list[Command] = []

    def stop(item: MediaItem) -> Loaded:
        generation.stop()
        return Loaded()

    def answer(item: MediaItem) -> Loaded:
        generation.answer_now()
        return Loaded()

    generation = LocalGeneration(SEEN, Sampling(), 0, posted.append, load_media=stop)
    async with generation as outputs:
        generation.push(MissingMedia([ITEM.key]))
        assert [output async for output in outputs] == [Ended(Finish.STOPPED)]
    assert [type(command) for command in posted] == [SubmitCommand, CancelCommand]
    posted.clear()
    generation = LocalGeneration(SEEN, Sampling(), 0, posted.append, load_media=answer)
    async with generation as outputs:
        generation.push(MissingMedia([ITEM.key]))
        generation.push(Ended(Finish.END))
        assert [output async for output in outputs] == [Ended(Finish.END)]
    kinds = [type(command) for command in posted]
    assert kinds == [SubmitCommand, AnswerNowCommand, SubmitCommand, AnswerNowCommand]


async def test_an_item_that_cannot_be_loaded_fails_its_request() -> None:
    def fail(item: MediaItem) -> Loaded:
        raise UnsupportedContent("The file is damaged.")

    posted: list[Command] = []
    generation = LocalGeneration(SEEN, Sampling(), 0, posted.append, load_media=fail)
    async with generation as outputs:
        generation.push(MissingMedia([ITEM.key]))
        with pytest.raises(UnsupportedContent, match="damaged"):
            await anext(outputs)
    assert isinstance(posted[-1], CancelCommand)
