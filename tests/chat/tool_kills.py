"""Kills a process in the middle of its loops of tool calls, and checks that no call ran twice and no result was lost.

Every call has an id of its own, which its tool server appends to a file when it runs it. Used by the tests and, for
longer, by benchmarks/tool_kills.py.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from palaver.chat.interface import CallDecision, Chat
from palaver.messages import ToolResult
from palaver.store import Conversation, ReplyStatus, StoredMessage
from palaver.store.tool_rounds import UNDECIDED, CallState, RoundCall, RoundState, ToolRound
from tests import forkserver
from tests.chat.tool_service import ANSWER, approve, finished, misbehaving, next_reply, open_tools, send, wait_for_round

STREAMS, ROUNDS, CALLS = 4, 3, 2
_CONTEXT = forkserver.preload("tests.chat.tool_kills")


@dataclass
class Count:
    """The result of the checks. `wrong` must stay empty."""

    kills: int = 0
    loops: int = 0
    calls: int = 0
    interrupted: int = 0
    run_again: int = 0
    wrong: list[str] = field(default_factory=list)


def run_client(folder: Path) -> None:
    asyncio.run(_run_loops(folder))


async def _run_loops(folder: Path) -> None:
    async with open_tools(folder, misbehaving(folder / "record")) as service, asyncio.TaskGroup() as tasks:
        chat = service.chat(service.store.users.ensure().id)
        for _ in range(STREAMS):
            tasks.create_task(_converse(chat))


async def _converse(chat: Chat) -> None:
    while True:
        rounds = [[["bad__count", {"id": uuid4().hex, "seconds": 0.005}] for _ in range(CALLS)] for _ in range(ROUNDS)]
        reply = await send(chat, *rounds)
        for _ in range(ROUNDS):
            round = await wait_for_round(chat, reply.id)
            await chat.decide_calls(reply.id, approve(round))
            reply = await next_reply(chat, round)
        assert reply.text == ANSWER


def run_and_kill(folder: Path, seconds: float) -> None:
    """Kills a client process that many seconds after its first call."""
    record = folder / "record"
    before = record.stat().st_size if record.exists() else 0
    client = _CONTEXT.Process(target=run_client, args=(folder,))
    client.start()
    while not record.exists() or record.stat().st_size == before:
        if not client.is_alive():
            raise RuntimeError("the client ended by itself")
        time.sleep(0.002)
    time.sleep(seconds)
    client.kill()
    client.join()


async def check(folder: Path, moments: random.Random, checked: set[str], count: Count) -> None:
    """Goes on with every loop that was cut, and compares the calls that ran with those that were asked for."""
    again: Counter[str] = Counter()
    async with open_tools(folder, misbehaving(folder / "record"), resume=True) as service:
        chat = service.chat(service.store.users.ensure().id)
        conversations = [one for one in await chat.conversations(limit=1000) if one.id not in checked]
        for conversation in conversations:
            await _go_on(chat, conversation, moments, again, count)
        ran = _ran(folder)
        for conversation in conversations:
            await _check_conversation(chat, conversation, ran, again, count)
            checked.add(conversation.id)
    count.kills += 1
    count.loops += len(conversations)


async def _go_on(
    chat: Chat, conversation: Conversation, moments: random.Random, again: Counter[str], count: Count
) -> None:
    """Answers what the loop asks, until the model does."""
    leaf = await chat.newest_leaf(conversation.id)
    if leaf is None:  # cut before its first message
        return
    path = await chat.path(leaf)
    reply = next((one for one in reversed(path) if one.reply is not None), None)
    if reply is None:
        reply = await chat.start_reply(conversation.id, path[-1].id)
    async with asyncio.timeout(60):
        while True:
            reply = await _complete(chat, reply)
            if await chat.tool_round(reply.id) is None:
                return
            round = await _settled(chat, reply)
            if round.state is RoundState.OPEN:
                await chat.decide_calls(reply.id, [_decide(call, moments, again, count) for call in _waiting(round)])
            reply = await next_reply(chat, round)


async def _complete(chat: Chat, reply: StoredMessage) -> StoredMessage:
    """The reply once it is done: one that was cut before its end is continued."""
    ended = await finished(chat, reply.id)
    while ended.reply is not None and ended.reply.status is not ReplyStatus.DONE:
        await chat.continue_reply(ended.id)
        ended = await finished(chat, ended.id)
    return ended


async def _settled(chat: Chat, reply: StoredMessage) -> ToolRound:
    """The round once it waits for a decision or is done."""
    while True:
        round = await chat.tool_round(reply.id)
        assert round is not None
        busy = [call for call in round.calls if call.state in (CallState.NEW, CallState.APPROVED, CallState.RUNNING)]
        if round.state is RoundState.DONE or (not busy and _waiting(round)):
            return round
        await asyncio.sleep(0.01)


def _waiting(round: ToolRound) -> list[RoundCall]:
    return [call for call in round.calls if call.state in UNDECIDED]


def _decide(call: RoundCall, moments: random.Random, again: Counter[str], count: Count) -> CallDecision:
    """Half of the interrupted calls are run again, the others are skipped."""
    if call.state is CallState.WAITING:
        return CallDecision(call.position, True)
    count.interrupted += 1
    allowed = moments.random() < 0.5
    if allowed:
        count.run_again += 1
        again[_call_id(call)] += 1
    return CallDecision(call.position, allowed)


def _call_id(call: RoundCall) -> str:
    return str(json.loads(call.arguments)["id"])


def _ran(folder: Path) -> Counter[str]:
    lines = (folder / "record").read_text().splitlines()
    return Counter(line.split()[1] for line in lines if line.startswith("count "))


async def _check_conversation(
    chat: Chat, conversation: Conversation, ran: Counter[str], again: Counter[str], count: Count
) -> None:
    leaf = await chat.newest_leaf(conversation.id)
    if leaf is None:
        return
    path = await chat.path(leaf)
    if path[-1].text != ANSWER:
        count.wrong.append(f"the loop of {conversation.id} did not come to its end")
    results = [part.content for one in path for part in one.parts if isinstance(part, ToolResult)]
    if len(results) != ROUNDS * CALLS:
        count.wrong.append(f"{conversation.id} has {len(results)} results")
    rounds = [await chat.tool_round(one.id) for one in path if one.reply is not None]
    calls = [call for round in rounds if round is not None for call in round.calls]
    for call in calls:
        count.calls += 1
        id = _call_id(call)
        if ran[id] > 1 + again[id]:
            count.wrong.append(f"the call {id} ran {ran[id]} times")
        if call.result not in results:
            count.wrong.append(f"the result of {id} is lost")
        if call.state is CallState.DONE and call.result != f"counted {id}":
            count.wrong.append(f"the result of {id} is {call.result!r}")
        if call.state is CallState.DONE and not ran[id]:
            count.wrong.append(f"the call {id} has a result but never ran")


def run(
    folder: Path, kills: int, seconds: float, seed: int = 0, after_each: Callable[[Count], None] | None = None
) -> Count:
    """Kills clients at random moments of the first `seconds` after their first call."""
    moments, count, checked = random.Random(seed), Count(), set[str]()
    for _ in range(kills):
        run_and_kill(folder, moments.uniform(0, seconds))
        asyncio.run(check(folder, moments, checked, count))
        if after_each is not None:
            after_each(count)
    return count
