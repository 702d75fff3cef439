"""What readers cost a turn, and what the turn layer costs a token.

    python -m benchmarks.turns [--model sprout] [--rounds 5]

A reply of sprout's is generated again and again, in turns without readers and with a hundred of them, half of which
take their time; the ratio of the two paces is printed, and the turn's pace against the bare engine's.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from palaver.chat.interface import Chat
from palaver.chat.reply_request import RequestBuilder
from palaver.chat.service import Service
from palaver.messages import user
from palaver.store import open_store
from tests.chat.process_kills import served

READERS = 100
SLOW_S = 0.05
QUESTION = "Count from 1 to 100."
HOW = {"temperature": 0.0, "max_tokens": 300}


async def paced(chat: Chat, readers: int) -> tuple[float, str]:
    """Seconds from the first to the last event of a turn with so many readers, half of them slow."""
    talk = await chat.create_conversation()
    said = await chat.send_message(talk.id, None, user(QUESTION), parameters=HOW)
    others = [asyncio.create_task(_read(chat, said.reply.id, SLOW_S * (n % 2))) for n in range(readers)]
    times = await _read(chat, said.reply.id, 0)
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return times[-1] - times[0], said.reply.id


async def _read(chat: Chat, reply_id: str, wait: float) -> list[float]:
    times = []
    async with chat.events(reply_id) as stream:
        async for entry in stream:
            if entry.number:
                times.append(time.perf_counter())
            if wait:
                await asyncio.sleep(wait)
    return times


async def bare(service: Service, reply_id: str) -> float:
    """The same reply from the engine alone: nothing stored, no log."""
    model = service.models.current()
    stored = service.store.messages.get(reply_id)
    request = RequestBuilder(service.store).rebuild(model, stored, "")
    times = []
    async with model.stream_reply(request) as utterance:
        async for _ in utterance:
            times.append(time.perf_counter())
    return times[-1] - times[1]


async def measure(model: str, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder))
        async with served(store, model) as service:
            chat = service.chat(store.users.ensure().id)
            await paced(chat, 0)
            alone, crowded, engine = [], [], []
            for _ in range(rounds):
                seconds, reply_id = await paced(chat, 0)
                alone.append(seconds)
                crowded.append((await paced(chat, READERS))[0])
                engine.append(await bare(service, reply_id))
            tokens = len(store.replies.token_ids(reply_id))
        store.close()
    one, many, least = map(statistics.median, (alone, crowded, engine))
    print(f"a reply of {tokens} tokens, {rounds} rounds, medians")
    print(f"  one reader                   {one / tokens * 1e3:6.2f} ms a token")
    print(f"  {READERS} readers, half slow       {many / tokens * 1e3:6.2f} ms a token   {many / one:5.2f} times")
    print(f"  the engine host alone        {least / tokens * 1e3:6.2f} ms a token   {least / one:5.2f} times")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="sprout")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    asyncio.run(measure(given.model, given.rounds))


if __name__ == "__main__":
    main()
