"""The loop of tool calls: approvals, results, stop and continue, limits, crashes and users."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete

from palaver.chat import tool_loop
from palaver.chat.interface import CallDecision, Chat, Remember
from palaver.chat.parameters import LOOP
from palaver.chat.service import Service
from palaver.chat.tool_loop import DENIED, FORBIDDEN, SKIPPED, LoopLimits, server_calls
from palaver.errors import BadParameter
from palaver.messages import Role, Thinking, ToolCall, ToolResult, tool, user
from palaver.store import (
    Disconnected,
    DiskFull,
    Lease,
    Locked,
    NotFound,
    ReplyStatus,
    StoredMessage,
    StoreError,
    open_store,
)
from palaver.store.blobs import RemoteBlobs
from palaver.store.errors import Unreachable
from palaver.store.schema import holders
from palaver.store.tool_rounds import CallState, RoundState, ToolRounds
from palaver.tools.config import BadToolServer, ServerConfig
from tests.chat import tool_kills
from tests.chat.tool_service import (
    ANSWER,
    approve,
    finished,
    misbehaving,
    next_reply,
    open_tools,
    question,
    reciting_model,
    send,
    wait_for_round,
)
from tests.chat.tool_stops import measure_stops
from tests.formats.families import FAMILIES, Family
from tests.formats.variations import GOES_ON, VARIATIONS
from tests.store.factories import SETTINGS
from tests.tools import misbehaving_server


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with open_tools(tmp_path) as opened:
        yield opened


@pytest.fixture
def chat(service: Service) -> Chat:
    return service.chat(service.store.users.ensure().id)


def results(path: tuple[StoredMessage, ...]) -> list[str]:
    return [part.content for one in path for part in one.parts if isinstance(part, ToolResult)]


def recorded(folder: Path) -> list[str]:
    return (folder / "record").read_text().splitlines() if (folder / "record").exists() else []


async def wait_for_record(folder: Path, line: str) -> None:
    async with asyncio.timeout(10):
        while line not in recorded(folder):
            await asyncio.sleep(0.005)


async def test_nothing_runs_before_it_is_approved_and_one_decision_runs_a_round(chat: Chat, tmp_path: Path) -> None:
    reply = await send(chat, ["bad__unchanged", "bad__injection"])
    round = await wait_for_round(chat, reply.id)
    assert [call.state for call in round.calls] == [CallState.WAITING, CallState.WAITING]
    assert not [line for line in recorded(tmp_path) if line.startswith("call")]
    await chat.decide_calls(reply.id, approve(round))
    following = await next_reply(chat, round)
    assert following.text == ANSWER
    path = await chat.path(following.id)
    assert [one.role for one in path] == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.TOOL, Role.ASSISTANT]
    assert results(path) == ["as always", misbehaving_server.INJECTION]
    assert (await chat.conversation(reply.conversation_id)).head_id == following.id
    assert await chat.tool_round(following.id) is None


async def test_a_stop_while_rules_are_applied_runs_nothing(service: Service, chat: Chat, tmp_path: Path) -> None:
    reply = await send(chat, ["bad__unchanged"])
    await chat.decide_calls(reply.id, approve(await wait_for_round(chat, reply.id), remember=Remember.SERVER))
    await next_reply(chat, await wait_for_round(chat, reply.id, RoundState.DONE))
    rounds, rules = service.store.tool_rounds, service.store.tool_rules
    get_rule = rules.get

    def stop_first(owner: str, conversation: str, tool: str, server: str) -> object:
        rounds.stop(second.id)
        return get_rule(owner, conversation, tool, server)

    rules.get = stop_first  # type: ignore[method-assign, assignment]
    second = await send(chat, ["bad__count"])
    stopped = await wait_for_round(chat, second.id, RoundState.STOPPED)
    await asyncio.sleep(0.2)
    assert stopped.calls[0].state is CallState.WAITING
    assert (await wait_for_round(chat, second.id, RoundState.STOPPED)).calls == stopped.calls
    assert "call count" not in recorded(tmp_path)


async def test_a_denied_call_and_edited_arguments(chat: Chat) -> None:
    reply = await send(chat, ["bad__unchanged", ["bad__control_text", {"a": 1}]])
    round = await wait_for_round(chat, reply.id)
    tokens = await chat.tokens(reply.id)
    with pytest.raises(BadParameter, match="JSON object"):
        await chat.decide_calls(reply.id, [CallDecision(0, True, "[1]")])
    with pytest.raises(BadParameter, match="no such call"):
        await chat.decide_calls(reply.id, [CallDecision(9, True)])
    await chat.decide_calls(reply.id, [CallDecision(0, False), CallDecision(1, True, '{"a": 2}')])
    following = await next_reply(chat, round)
    first, second = results(await chat.path(following.id))
    assert first == DENIED
    assert second == f'[The user changed the arguments to {{"a": 2}}]\n{misbehaving_server.CONTROL_TEXT}'
    assert await chat.tokens(reply.id) == tokens
    assert json.loads(round.calls[1].arguments) == {"a": 1}


async def test_a_model_may_use_the_short_name_of_a_tool_where_it_is_unique(tmp_path: Path) -> None:
    twin = ServerConfig("twin", sys.executable, (misbehaving_server.__file__,))
    async with open_tools(tmp_path, misbehaving(tmp_path / "record"), twin) as service:
        chat = service.chat(service.store.users.ensure().id)
        reply = await send(chat, ["unchanged", "nonsense"])
        assert {one.name for one in reply.reply.settings.tools} >= {"unchanged", "slow"}  # type: ignore[union-attr]
        round = await wait_for_round(chat, reply.id)
        assert [call.name for call in round.calls] == ["bad__unchanged", "nonsense"]
        await chat.decide_calls(reply.id, approve(round))
        path = await chat.path((await next_reply(chat, round)).id)
        assert results(path) == ["as always", "There is no tool 'nonsense'."]
        assert [part.name for one in path for part in one.parts if isinstance(part, ToolResult)] == [
            "unchanged",
            "nonsense",
        ]
        both = await send(chat, ["unchanged"], tool_servers=["bad", "twin"])
        assert {one.name for one in both.reply.settings.tools} >= {"bad__unchanged", "twin__unchanged"}  # type: ignore[union-attr]


async def test_rules_for_a_tool_and_for_a_server(chat: Chat) -> None:
    reply = await send(chat, ["bad__unchanged"], ["bad__unchanged"], ["bad__injection"])
    round = await wait_for_round(chat, reply.id)
    await chat.decide_calls(reply.id, approve(round, remember=Remember.TOOL))
    second = await next_reply(chat, round)  # runs by the rule
    third = await next_reply(chat, await wait_for_round(chat, second.id, RoundState.DONE))
    round = await wait_for_round(chat, third.id)  # another tool of the server
    await chat.decide_calls(third.id, approve(round, remember=Remember.SERVER))
    assert (await next_reply(chat, round)).text == ANSWER
    other = await send(chat, ["bad__control_text"])  # the rule of the server holds in other conversations, too
    assert (await next_reply(chat, await wait_for_round(chat, other.id, RoundState.DONE))).text == ANSWER


async def test_a_tool_that_is_never_allowed(chat: Chat) -> None:
    reply = await send(chat, ["bad__unchanged"], ["bad__unchanged"])
    round = await wait_for_round(chat, reply.id)
    await chat.decide_calls(reply.id, approve(round, allowed=False, remember=Remember.TOOL))
    second = await next_reply(chat, round)
    third = await next_reply(chat, await wait_for_round(chat, second.id, RoundState.DONE))
    assert results(await chat.path(third.id)) == [DENIED, FORBIDDEN]


async def test_a_failing_tool_an_unknown_tool_and_a_wrong_name(chat: Chat) -> None:
    mine = [{"name": "other__tool", "parameters": {"type": "object"}}]
    reply = await send(chat, ["bad__dies", "bad__unchanged_and_more", "other__tool"], tools=mine)
    round = await wait_for_round(chat, reply.id)
    assert [call.name for call in round.calls] == ["bad__dies", "bad__unchanged_and_more"]
    await chat.decide_calls(reply.id, approve(round))
    round = await wait_for_round(chat, reply.id, RoundState.DONE)
    assert round.next_id is None  # the client answers the call that is not of a server
    first, second = (call.result for call in round.calls)
    assert first is not None
    assert "ended with exit code 3" in first
    assert second == "There is no tool 'bad__unchanged_and_more'."
    assert [call.is_error for call in round.calls] == [True, True]
    leaf = await chat.newest_leaf(reply.conversation_id)
    stored = await chat.append_message(reply.conversation_id, leaf, tool("call_2", "mine", "other__tool"))
    following = await chat.start_reply(reply.conversation_id, stored.id)
    assert (await finished(chat, following.id)).text == ANSWER


async def test_stop_in_a_slow_tool_and_continue(chat: Chat, tmp_path: Path) -> None:
    reply = await send(chat, ["bad__slow", "bad__unchanged"])
    round = await wait_for_round(chat, reply.id)
    await chat.decide_calls(reply.id, approve(round))
    await wait_for_record(tmp_path, "call slow")
    await wait_for_record(tmp_path, "call unchanged")
    async with asyncio.timeout(10):
        while (await chat.tool_round(reply.id)).calls[1].state is not CallState.DONE:  # type: ignore[union-attr]
            await asyncio.sleep(0.005)
    started = time.monotonic()
    await chat.stop_reply(reply.id)
    assert time.monotonic() - started < 2.0
    await wait_for_record(tmp_path, "cancelled")
    stopped = await wait_for_round(chat, reply.id, RoundState.STOPPED)
    assert [call.state for call in stopped.calls] == [CallState.INTERRUPTED, CallState.DONE]
    await chat.continue_reply(reply.id)  # asks about the call that had begun
    round = await wait_for_round(chat, reply.id)
    assert recorded(tmp_path).count("call slow") == 1
    await chat.decide_calls(reply.id, [CallDecision(0, False)])
    following = await next_reply(chat, round)
    assert results(await chat.path(following.id)) == [SKIPPED, "as always"]
    assert recorded(tmp_path).count("call unchanged") == 1


async def test_a_call_that_is_cancelled_before_its_first_step_runs_when_it_is_continued(
    service: Service, chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = await send(chat, ["bad__unchanged"])
    round = await wait_for_round(chat, reply.id)
    run, stop = service.loop._run, service.store.tool_rounds.stop

    def stop_first(*arguments: Any) -> Coroutine[Any, Any, None]:
        """Stops the round when the call is about to run: its task is created, but has made no step."""
        monkeypatch.setattr(service.loop, "_run", run)
        stop(reply.id)
        asyncio.get_running_loop().call_soon(service.loop.cancel_calls, reply.id)
        return run(*arguments)

    monkeypatch.setattr(service.loop, "_run", stop_first)
    await chat.decide_calls(reply.id, approve(round))
    stopped = await wait_for_round(chat, reply.id, RoundState.STOPPED)
    assert stopped.calls[0].state is CallState.WAITING
    assert "call unchanged" not in recorded(tmp_path)
    await chat.decide_calls(reply.id, approve(stopped))
    assert (await next_reply(chat, round)).text == ANSWER
    assert recorded(tmp_path).count("call unchanged") == 1


@pytest.mark.parametrize("write", ["begin", "record_result"])
async def test_a_full_disk_delays_a_call_and_loses_no_result(
    service: Service,
    chat: Chat,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    write: str,
) -> None:
    reply = await send(chat, ["bad__unchanged"])
    round = await wait_for_round(chat, reply.id)
    rounds, failures = service.store.tool_rounds, [DiskFull(), Locked(), DiskFull()]
    succeed = getattr(rounds, write)

    def fail_at_first(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return succeed(*arguments)

    monkeypatch.setattr(rounds, write, fail_at_first)
    monkeypatch.setattr(tool_loop, "RETRY_SECONDS", 0)
    await chat.decide_calls(reply.id, approve(round))
    assert (await next_reply(chat, round)).text == ANSWER
    assert not failures
    assert recorded(tmp_path).count("call unchanged") == 1
    waits = [one for one in caplog.messages if "waits for the store" in one]
    assert len(waits) == 1, "an outage is reported once"


class FullDisk:
    def __init__(self) -> None:
        self.is_full = True
        self.waits = asyncio.Event()
        """Set when a result waits for the disk."""


@pytest.fixture
async def full_disk(service: Service, monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    """No result can be recorded until the disk is freed."""
    disk, succeed = FullDisk(), service.store.tool_rounds.record_result
    event_loop = asyncio.get_running_loop()

    def fail_while_full(*arguments: Any) -> bool:
        if disk.is_full:
            event_loop.call_soon_threadsafe(disk.waits.set)
            raise DiskFull
        return succeed(*arguments)

    monkeypatch.setattr(service.store.tool_rounds, "record_result", fail_while_full)
    monkeypatch.setattr(tool_loop, "RETRY_SECONDS", 0.01)
    return disk


async def test_a_stop_while_a_result_waits_for_the_disk_does_not_lose_it(
    chat: Chat, tmp_path: Path, full_disk: FullDisk
) -> None:
    reply = await send(chat, ["bad__unchanged"])
    round = await wait_for_round(chat, reply.id)
    await chat.decide_calls(reply.id, approve(round))
    async with asyncio.timeout(10):
        await full_disk.waits.wait()
    async with chat.changes() as changes:
        await chat.stop_reply(reply.id)
        stopped = await wait_for_round(chat, reply.id, RoundState.STOPPED)
        assert stopped.calls[0].state is CallState.INTERRUPTED
        full_disk.is_full = False
        async with asyncio.timeout(10):
            async for _ in changes:
                shown = await wait_for_round(chat, reply.id, RoundState.STOPPED)
                if shown.calls[0].state is CallState.DONE:
                    break
    await chat.continue_reply(reply.id)
    following = await next_reply(chat, round)
    assert results(await chat.path(following.id)) == ["as always"]
    assert recorded(tmp_path).count("call unchanged") == 1


async def test_a_stop_that_cannot_be_stored_leaves_the_call_running(
    service: Service, chat: Chat, tmp_path: Path, full_disk: FullDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = await send(chat, ["bad__unchanged"])
    round = await wait_for_round(chat, reply.id)
    await chat.decide_calls(reply.id, approve(round))
    async with asyncio.timeout(10):
        await full_disk.waits.wait()

    def refuse(_: str) -> bool:
        raise DiskFull

    monkeypatch.setattr(service.store.tool_rounds, "stop", refuse)
    with pytest.raises(DiskFull):
        await chat.stop_reply(reply.id)
    full_disk.is_full = False
    following = await next_reply(chat, round)
    assert results(await chat.path(following.id)) == ["as always"]
    assert recorded(tmp_path).count("call unchanged") == 1


async def test_a_full_disk_loses_no_sound_that_a_tool_returned(
    service: Service, chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = await send(chat, ["bad__sound"])
    round = await wait_for_round(chat, reply.id)
    put, failures = service.store.blobs.put, [DiskFull()]

    def fail_at_first(data: bytes) -> str:
        if failures:
            raise failures.pop()
        return put(data)

    monkeypatch.setattr(service.store.blobs, "put", fail_at_first)
    monkeypatch.setattr(tool_loop, "RETRY_SECONDS", 0)
    await chat.decide_calls(reply.id, approve(round))
    (call,) = (await wait_for_round(chat, reply.id, RoundState.DONE)).calls
    assert (call.result, [blob.kind for blob in call.media]) == ("Listen.", ["audio"])
    assert not failures
    assert recorded(tmp_path).count("call sound") == 1


async def test_a_storage_that_does_not_answer_loses_no_sound_that_a_tool_returned(
    service: Service, chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = await send(chat, ["bad__sound"])
    round = await wait_for_round(chat, reply.id)
    blobs = RemoteBlobs(Path(), "memory://bucket/sounds")
    write, failures = blobs._files.pipe_file, [ConnectionError("refused"), TimeoutError("no answer")]

    def fail_at_first(path: str, data: bytes) -> None:
        if failures:
            raise failures.pop()
        write(path, data)

    monkeypatch.setattr(blobs._files, "pipe_file", fail_at_first, raising=False)
    monkeypatch.setattr(service.store, "blobs", blobs)
    monkeypatch.setattr(tool_loop, "RETRY_SECONDS", 0)
    await chat.decide_calls(reply.id, approve(round))
    (call,) = (await wait_for_round(chat, reply.id, RoundState.DONE)).calls
    assert (call.result, [blob.kind for blob in call.media]) == ("Listen.", ["audio"])
    assert not failures
    assert recorded(tmp_path).count("call sound") == 1


async def test_a_storage_without_credentials_is_not_waited_for(
    service: Service, chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoCredentialsError(Exception):
        """As botocore raises it."""

    def refuse(path: str, data: bytes) -> None:
        raise NoCredentialsError("Unable to locate credentials")

    reply = await send(chat, ["bad__sound"])
    round = await wait_for_round(chat, reply.id)
    blobs = RemoteBlobs(Path(), "memory://bucket/refused")
    monkeypatch.setattr(blobs._files, "pipe_file", refuse, raising=False)
    monkeypatch.setattr(service.store, "blobs", blobs)
    await chat.decide_calls(reply.id, approve(round))
    (call,) = (await wait_for_round(chat, reply.id)).calls
    assert call.state is CallState.INTERRUPTED
    assert recorded(tmp_path).count("call sound") == 1


@pytest.mark.parametrize("error", [Unreachable("The database can't be opened for writing."), DiskFull()])
async def test_a_call_that_cannot_be_recorded_does_not_run_and_fails_its_round(
    service: Service, chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: StoreError
) -> None:
    """Errors that do not pass by themselves are not waited for, and a full disk not for ever."""
    reply = await send(chat, ["bad__unchanged"])
    round = await wait_for_round(chat, reply.id)
    attempts: list[StoreError] = []

    def refuse(*_: Any) -> None:
        attempts.append(error)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(service.store.tool_rounds, "begin", refuse)
        patch.setattr(tool_loop, "OUTAGE_SECONDS", -1)
        await chat.decide_calls(reply.id, approve(round))
        failed = await wait_for_round(chat, reply.id, RoundState.FAILED)
    assert (failed.error, attempts) == (str(error), [error])
    assert "call unchanged" not in recorded(tmp_path)
    await chat.continue_reply(reply.id)
    assert (await next_reply(chat, round)).text == ANSWER
    assert recorded(tmp_path).count("call unchanged") == 1


async def test_a_result_that_cannot_be_recorded_interrupts_its_call(
    service: Service, chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = await send(chat, ["bad__unchanged"])
    round = await wait_for_round(chat, reply.id)

    def refuse(*_: Any) -> None:
        raise StoreError("The database failed.")

    with monkeypatch.context() as patch:
        patch.setattr(service.store.tool_rounds, "record_result", refuse)
        await chat.decide_calls(reply.id, approve(round))
        assert (await wait_for_round(chat, reply.id)).calls[0].state is CallState.INTERRUPTED
    await chat.decide_calls(reply.id, [CallDecision(0, False)])
    assert results(await chat.path((await next_reply(chat, round)).id)) == [SKIPPED]
    assert recorded(tmp_path).count("call unchanged") == 1


class Refusal:
    """Refuses a write of the store until it is lifted."""

    def __init__(self, rounds: ToolRounds, write: str, error: StoreError, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_lifted = False
        self.attempts = 0
        self._counted = asyncio.Condition()
        self._error, self._write = error, getattr(rounds, write)
        self._event_loop = asyncio.get_running_loop()
        monkeypatch.setattr(rounds, write, self._refuse)

    def _refuse(self, *arguments: Any) -> Any:
        asyncio.run_coroutine_threadsafe(self._count(), self._event_loop)
        if self.is_lifted:
            return self._write(*arguments)
        raise self._error

    async def _count(self) -> None:
        async with self._counted:
            self.attempts += 1
            self._counted.notify_all()

    async def wait(self, attempts: int) -> None:
        async with asyncio.timeout(10), self._counted:
            await self._counted.wait_for(lambda: self.attempts >= attempts)


READ_ONLY = Unreachable("The database can't be opened for writing.")


@pytest.mark.parametrize("error", [READ_ONLY, DiskFull()])
async def test_a_round_whose_failure_cannot_be_recorded_waits_and_does_not_go_on(
    service: Service, chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: StoreError
) -> None:
    reply = await send(chat, ["bad__unchanged"])
    round = await wait_for_round(chat, reply.id)
    rounds = service.store.tool_rounds
    monkeypatch.setattr(tool_loop, "OUTAGE_SECONDS", -1)
    monkeypatch.setattr(tool_loop, "RETRY_SECONDS", 0.01)
    begin, fail = (Refusal(rounds, write, error, monkeypatch) for write in ("begin", "fail"))
    await chat.decide_calls(reply.id, approve(round))
    await fail.wait(2)
    assert rounds.list_actionable() == (reply.id,)
    await service.loop.recover(True)
    await fail.wait(3)
    fail.is_lifted = True
    failed = await wait_for_round(chat, reply.id, RoundState.FAILED)
    assert (failed.error, begin.attempts) == (str(error), 1)
    assert "call unchanged" not in recorded(tmp_path)
    begin.is_lifted = True
    await chat.continue_reply(reply.id)
    assert (await next_reply(chat, round)).text == ANSWER
    assert recorded(tmp_path).count("call unchanged") == 1


async def test_a_step_whose_failure_cannot_be_recorded_holds_up_no_caller(
    service: Service, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = await send(chat, ["bad__unchanged"])
    round = await wait_for_round(chat, reply.id)
    rounds = service.store.tool_rounds
    monkeypatch.setattr(tool_loop, "RETRY_SECONDS", 0.01)
    close, fail = (Refusal(rounds, write, READ_ONLY, monkeypatch) for write in ("close", "fail"))
    async with asyncio.timeout(10):
        await chat.decide_calls(reply.id, approve(round, allowed=False))
        await service.loop.recover(True)
    await fail.wait(2)
    assert close.attempts == 1
    fail.is_lifted = close.is_lifted = True
    assert (await wait_for_round(chat, reply.id, RoundState.FAILED)).error == str(READ_ONLY)
    await chat.continue_reply(reply.id)
    assert (await next_reply(chat, round)).text == ANSWER


async def test_a_round_whose_failure_is_not_recorded_yet_can_be_continued(
    service: Service, chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = await send(chat, ["bad__unchanged"])
    round = await wait_for_round(chat, reply.id)
    rounds = service.store.tool_rounds
    monkeypatch.setattr(tool_loop, "RETRY_SECONDS", 3600)
    begin, fail = (Refusal(rounds, write, READ_ONLY, monkeypatch) for write in ("begin", "fail"))
    await chat.decide_calls(reply.id, approve(round))
    await fail.wait(1)
    fail.is_lifted = begin.is_lifted = True
    await chat.continue_reply(reply.id)
    assert (await next_reply(chat, round)).text == ANSWER
    assert fail.attempts == 1
    assert recorded(tmp_path).count("call unchanged") == 1


async def test_a_stop_of_a_failed_round_interrupts_the_calls_that_still_run(
    service: Service, chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = await send(chat, ["bad__unchanged", "bad__slow"])
    round = await wait_for_round(chat, reply.id)
    begin = service.store.tool_rounds.begin

    def refuse_first(lease: Lease, reply_id: str, position: int, *arguments: Any) -> bool:
        if position == 0:
            raise READ_ONLY
        return begin(lease, reply_id, position, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(service.store.tool_rounds, "begin", refuse_first)
        await chat.decide_calls(reply.id, approve(round)[1:])
        await wait_for_record(tmp_path, "call slow")
        await chat.decide_calls(reply.id, approve(round)[:1])
        failed = await wait_for_round(chat, reply.id, RoundState.FAILED)
    assert [call.state for call in failed.calls] == [CallState.APPROVED, CallState.RUNNING]
    await chat.stop_reply(reply.id)
    await wait_for_record(tmp_path, "cancelled")
    stopped = await wait_for_round(chat, reply.id, RoundState.FAILED)
    assert [call.state for call in stopped.calls] == [CallState.WAITING, CallState.INTERRUPTED]
    await chat.decide_calls(reply.id, [CallDecision(0, True), CallDecision(1, False)])
    assert results(await chat.path((await next_reply(chat, round)).id)) == ["as always", SKIPPED]
    assert recorded(tmp_path).count("call slow") == 1


async def test_a_result_outlasts_an_outage_of_any_length(
    service: Service, chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = await send(chat, ["bad__unchanged"])
    round = await wait_for_round(chat, reply.id)
    monkeypatch.setattr(tool_loop, "OUTAGE_SECONDS", -1)
    monkeypatch.setattr(tool_loop, "RETRY_SECONDS", 0.01)
    result = Refusal(service.store.tool_rounds, "record_result", DiskFull(), monkeypatch)
    await chat.decide_calls(reply.id, approve(round))
    await result.wait(3)
    result.is_lifted = True
    assert results(await chat.path((await next_reply(chat, round)).id)) == ["as always"]
    assert recorded(tmp_path).count("call unchanged") == 1


async def test_a_call_whose_interruption_cannot_be_recorded_is_interrupted_later(
    service: Service, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = await send(chat, ["bad__unchanged"])
    round = await wait_for_round(chat, reply.id)
    rounds = service.store.tool_rounds
    monkeypatch.setattr(tool_loop, "OUTAGE_SECONDS", -1)
    monkeypatch.setattr(tool_loop, "RETRY_SECONDS", 0.01)
    _, interrupt = (Refusal(rounds, write, READ_ONLY, monkeypatch) for write in ("record_result", "interrupt"))
    await chat.decide_calls(reply.id, approve(round))
    await interrupt.wait(3)
    async with chat.changes() as changes:
        interrupt.is_lifted = True
        async with asyncio.timeout(10):
            await anext(aiter(changes))  # pages are told
    assert (await wait_for_round(chat, reply.id)).calls[0].state is CallState.INTERRUPTED
    await chat.decide_calls(reply.id, [CallDecision(0, False)])
    assert results(await chat.path((await next_reply(chat, round)).id)) == [SKIPPED]


@pytest.mark.parametrize("writes", [("begin", "fail"), ("record_result", "interrupt")])
async def test_the_program_ends_at_once_while_the_store_refuses_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: tuple[str, str]
) -> None:
    async with open_tools(tmp_path) as service:
        chat = service.chat(service.store.users.ensure().id)
        reply = await send(chat, ["bad__unchanged"])
        round = await wait_for_round(chat, reply.id)
        monkeypatch.setattr(tool_loop, "RETRY_SECONDS", 3600)
        _, last = (Refusal(service.store.tool_rounds, write, READ_ONLY, monkeypatch) for write in writes)
        await chat.decide_calls(reply.id, approve(round))
        await last.wait(1)
        async with asyncio.timeout(10):
            await service.loop.close()


@pytest.mark.parametrize("write", ["begin", "record_result"])
@pytest.mark.parametrize("new_lease", [False, True])
async def test_a_call_whose_commit_was_not_confirmed_runs_once(
    service: Service, chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str, new_lease: bool
) -> None:
    """PostgreSQL restarts between a commit and its confirmation; a long outage also costs the lease."""
    reply = await send(chat, ["bad__unchanged"])
    round = await wait_for_round(chat, reply.id)
    rounds, failures = service.store.tool_rounds, [Disconnected("no confirmation")]
    succeed, event_loop = getattr(rounds, write), asyncio.get_running_loop()

    def fail_once_written(*arguments: Any) -> Any:
        written = succeed(*arguments)
        if failures:
            assert written
            if new_lease:
                replacing = service.turns._replace_lease(service.turns.lease)
                asyncio.run_coroutine_threadsafe(replacing, event_loop).result()
            raise failures.pop()
        return written

    monkeypatch.setattr(rounds, write, fail_once_written)
    monkeypatch.setattr(tool_loop, "RETRY_SECONDS", 0)
    await chat.decide_calls(reply.id, approve(round))
    assert (await next_reply(chat, round)).text == ANSWER
    assert recorded(tmp_path).count("call unchanged") == 1


async def test_a_call_begins_under_a_new_lease_if_the_old_one_is_lost(
    service: Service, chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = await send(chat, ["bad__unchanged"])
    round = await wait_for_round(chat, reply.id)
    lost, begin, leases = service.turns.lease, service.store.tool_rounds.begin, []

    def record_lease(lease: Lease, *arguments: Any) -> bool:
        leases.append(lease)
        return begin(lease, *arguments)

    monkeypatch.setattr(service.store.tool_rounds, "begin", record_lease)
    with service.store.database.write_transaction() as connection:
        connection.execute(delete(holders).where(holders.c.id == lost.id))
    await chat.decide_calls(reply.id, approve(round))
    assert (await next_reply(chat, round)).text == ANSWER
    assert leases == [lost, service.turns.lease]
    assert lost is not service.turns.lease
    assert recorded(tmp_path).count("call unchanged") == 1


@pytest.mark.parametrize("over_http", [False, True])
async def test_a_stop_frees_everything_and_tells_the_tool(tmp_path: Path, over_http: bool) -> None:
    for stop in await measure_stops(tmp_path, 2, over_http):
        assert max(stop.answered, stop.free, stop.cancelled) < 5.0  # benchmarks/tool_kills.py has the figures


async def test_stop_before_the_approval_and_a_decision_that_goes_on(chat: Chat) -> None:
    reply = await send(chat, ["bad__unchanged"])
    round = await wait_for_round(chat, reply.id)
    await chat.stop_reply(reply.id)
    stopped = await wait_for_round(chat, reply.id, RoundState.STOPPED)
    assert stopped.calls[0].state is CallState.WAITING
    await chat.decide_calls(reply.id, approve(round))
    assert (await next_reply(chat, round)).text == ANSWER


@pytest.mark.parametrize(
    ("limits", "second_call", "what"),
    [
        (LoopLimits(rounds=2), "bad__unchanged", "2 rounds of tool calls"),
        (LoopLimits(seconds=1.5), ["bad__count", {"id": "x", "seconds": 1.5}], r"\d s of replies and tool calls"),
        (LoopLimits(tokens=200), ["bad__unchanged", {"a": "x" * 200}], r"\d{3} tokens"),
    ],
    ids=["rounds", "seconds", "tokens"],
)
async def test_the_loop_is_bounded_and_can_be_continued(
    tmp_path: Path, limits: LoopLimits, second_call: object, what: str
) -> None:
    async with open_tools(tmp_path, limits=limits) as service:
        chat = service.chat(service.store.users.ensure().id)
        reply = await send(chat, ["bad__unchanged"], [second_call], ["bad__unchanged"])
        round = await wait_for_round(chat, reply.id)
        await chat.decide_calls(reply.id, approve(round, remember=Remember.SERVER))
        second = await next_reply(chat, round)
        failed = await wait_for_round(chat, second.id, RoundState.FAILED)
        error = f"The loop stopped after {what}: continue it if it should go on\\."
        assert re.fullmatch(error, failed.error or "")
        await chat.continue_reply(second.id)
        third = await next_reply(chat, failed)
        fourth = await next_reply(chat, await wait_for_round(chat, third.id, RoundState.DONE))
        assert fourth.text == ANSWER


async def test_a_result_too_long_for_the_context_fails_the_round_alone(chat: Chat, service: Service) -> None:
    reply = await send(chat, ["bad__long"])
    round = await wait_for_round(chat, reply.id)
    await chat.decide_calls(reply.id, approve(round))
    failed = await wait_for_round(chat, reply.id, RoundState.FAILED)
    assert failed.error is not None
    assert "context" in failed.error.lower()
    other = await chat.send_message(reply.conversation_id, reply.id, question())
    assert (await finished(chat, other.reply.id)).text == ANSWER


async def test_after_a_crash_a_call_that_had_begun_is_asked_about(tmp_path: Path) -> None:
    async with open_tools(tmp_path) as service:
        chat = service.chat(service.store.users.ensure().id)
        reply = await send(chat, ["bad__slow", "bad__unchanged"])
        round = await wait_for_round(chat, reply.id)
        await chat.decide_calls(reply.id, approve(round)[:1])
        await wait_for_record(tmp_path, "call slow")
    async with open_tools(tmp_path, resume=True) as service:
        chat = service.chat(service.store.users.ensure().id)
        round = await wait_for_round(chat, reply.id)
        assert [call.state for call in round.calls] == [CallState.INTERRUPTED, CallState.WAITING]
        assert recorded(tmp_path).count("call slow") == 1
        await chat.decide_calls(reply.id, [CallDecision(0, False), CallDecision(1, True)])
        following = await next_reply(chat, round)
        assert results(await chat.path(following.id)) == [SKIPPED, "as always"]


async def test_after_a_crash_recorded_results_are_used_and_approved_calls_run(tmp_path: Path) -> None:
    async with open_tools(tmp_path) as service:
        chat = service.chat(service.store.users.ensure().id)
        reply = await send(chat, ["bad__slow", "bad__unchanged"])
        await wait_for_round(chat, reply.id)
    with open_store(tmp_path) as store:  # the process died after a result, and after an approval
        lease = store.leases.open()
        assert store.tool_rounds.decide(reply.id, 0, True, None, "")
        assert store.tool_rounds.begin(lease, reply.id, 0)
        assert not store.tool_rounds.begin(lease, reply.id, 0)
        assert store.tool_rounds.record_result(lease, reply.id, 0, "the result", False)
        assert not store.tool_rounds.decide(reply.id, 0, True, None, "")
        assert store.tool_rounds.decide(reply.id, 1, True, None, "")
    async with open_tools(tmp_path, resume=True) as service:
        chat = service.chat(service.store.users.ensure().id)
        round = await wait_for_round(chat, reply.id, RoundState.DONE)
        following = await next_reply(chat, round)
        assert results(await chat.path(following.id)) == ["the result", "as always"]


@pytest.mark.slow
def test_killed_processes_run_no_call_twice_and_lose_no_result(tmp_path: Path) -> None:
    count = tool_kills.run(tmp_path, kills=2, seconds=0.3)
    assert count.wrong == []
    assert count.kills == 2
    assert count.calls >= tool_kills.ROUNDS * tool_kills.CALLS


async def test_a_round_stays_open_when_the_program_ends(tmp_path: Path) -> None:
    async with open_tools(tmp_path) as service:
        chat = service.chat(service.store.users.ensure().id)
        reply = await send(chat, ["bad__unchanged"])
        round = await wait_for_round(chat, reply.id)
        service.turns.closing = True  # no reply is started any more
        await chat.decide_calls(reply.id, approve(round))
        async with asyncio.timeout(10):
            while not results(await chat.path((await chat.newest_leaf(reply.conversation_id)) or "")):
                await asyncio.sleep(0.005)
    async with open_tools(tmp_path, resume=True) as service:
        chat = service.chat(service.store.users.ensure().id)
        assert (await next_reply(chat, await wait_for_round(chat, reply.id, RoundState.DONE))).text == ANSWER
    assert recorded(tmp_path).count("call unchanged") == 1


async def test_users_reach_their_own_tools_and_calls_alone(service: Service, chat: Chat) -> None:
    reply = await send(chat, ["bad__unchanged"])
    round = await wait_for_round(chat, reply.id)
    stranger = service.chat(service.store.users.ensure("stranger").id)
    with pytest.raises(NotFound):
        await stranger.tool_round(reply.id)
    with pytest.raises(NotFound):
        await stranger.decide_calls(reply.id, approve(round))
    with pytest.raises(NotFound):
        await stranger.stop_reply(reply.id)
    toolbox = service.loop.toolbox
    owner = service.store.users.ensure().id
    toolbox.add(owner, ServerConfig("mine", url="https://tools.example/mcp", headers={"Authorization": "secret"}))
    assert "mine" in toolbox.names(owner)
    assert "mine" not in [card.name for card in await stranger.tool_servers(connect=False)]
    conversation = await stranger.create_conversation(parameters={"tool_servers": ["mine"]})
    with pytest.raises(BadToolServer, match="no tool server 'mine'"):
        await stranger.send_message(conversation.id, None, user("[]"))
    with pytest.raises(BadToolServer, match="no tool server 'mine' of yours"):
        await stranger.remove_tool_server("mine")
    with pytest.raises(BadToolServer, match="only its operator"):
        await chat.add_tool_server(ServerConfig("shell", "sh"))
    with pytest.raises(BadToolServer, match="already"):
        await chat.add_tool_server(ServerConfig("bad", url="https://tools.example/mcp"))
    await chat.remove_tool_server("mine")
    assert [card.name for card in await chat.tool_servers(connect=False)] == ["bad"]


async def test_a_reply_says_which_tools_were_not_offered(tmp_path: Path) -> None:
    broken = ServerConfig("broken", "no-such-command")
    async with open_tools(tmp_path, misbehaving(tmp_path / "record"), broken) as service:
        chat = service.chat(service.store.users.ensure().id)
        reply = await send(chat, ["bad__unchanged"], tool_servers=["bad", "broken"])
        assert reply.reply is not None
        failed = reply.reply.settings.options["loop"]["failed"]
        assert failed == {"broken": "could not be started: no-such-command: No such file or directory"}
        round = await wait_for_round(chat, reply.id)
        await chat.decide_calls(reply.id, approve(round))
        assert (await next_reply(chat, round)).text == ANSWER


async def test_a_reply_carries_the_notices_of_its_servers(chat: Chat) -> None:
    reply = await send(chat, ["bad__deep"])
    assert reply.reply is not None
    notices = reply.reply.settings.options["loop"]["notices"]["bad"]
    assert "The tool 'deep' is offered without its schema, which is nested more than 32 deep." in notices
    assert (await wait_for_round(chat, reply.id)).calls[0].name == "bad__deep"  # it is called all the same


async def test_a_reply_says_why_a_call_was_not_forced(tmp_path: Path) -> None:
    model = reciting_model(FAMILIES["braces with own quotes"], "<|result|>", "I would rather not.<|done|>")
    async with open_tools(tmp_path, model=model) as service:
        chat = service.chat(service.store.users.ensure().id)
        conversation = await chat.create_conversation(parameters={"tool_servers": ["bad"]})
        forced = {"must_call": ["bad__unique"]}
        reply = (await chat.send_message(conversation.id, None, user("Call it."), parameters=forced)).reply
        ended = await finished(chat, reply.id)
        assert ended.text == "I would rather not."
        assert ended.reply is not None
        assert ended.reply.settings.options[LOOP]["notices"]["bad"][-1] == (
            "The tool 'unique': this model can't be forced to call it: "
            "'uniqueItems' is not supported in its syntax of calls."
        )


def test_a_call_inside_a_thought_is_one_that_runs() -> None:
    loop = {"servers": ["bad"], "tools": {"unchanged": "bad__unchanged"}}
    call = ToolCall("call_1", "unchanged", "{}", in_thought=True)
    (found,) = server_calls(replace(SETTINGS, options={LOOP: loop}), (Thinking("Let me look."), call))
    assert (found.name, found.in_thought) == ("bad__unchanged", True)


async def test_a_deleted_conversation_stops_its_calls(chat: Chat, tmp_path: Path) -> None:
    reply = await send(chat, ["bad__slow"])
    round = await wait_for_round(chat, reply.id)
    await chat.decide_calls(reply.id, approve(round))
    await wait_for_record(tmp_path, "call slow")
    await chat.delete_conversation(reply.conversation_id)
    await wait_for_record(tmp_path, "cancelled")


async def test_without_tool_servers_calls_are_the_clients(chat: Chat) -> None:
    conversation = await chat.create_conversation()
    offered = [{"name": "bad__unchanged", "parameters": {"type": "object"}}]
    sent = await chat.send_message(conversation.id, None, question(["bad__unchanged"]), parameters={"tools": offered})
    reply = await finished(chat, sent.reply.id)
    assert reply.reply is not None
    assert reply.reply.status is ReplyStatus.DONE
    assert await chat.tool_round(reply.id) is None


CALL = '<tool_call>\n{"name": "unchanged", "arguments": {}}\n</tool_call>'
CHANNEL = "<|channel|>analysis<|message|>"
IN_THOUGHTS = {
    "in the channel of thoughts": (
        FAMILIES["typed headers"],
        "<|call|>",
        f"{CHANNEL}I look.<|end|><|start|>assistant"
        "<|channel|>analysis to=functions.unchanged json<|message|>{}<|call|>",
        f"{CHANNEL}As always, then.<|end|><|start|>assistant<|channel|>final<|message|>It is.<|return|>",
    ),
    "in a thought that is not closed": (
        VARIATIONS["calls in tags follow a thought that is not closed"],
        "<|result|>",
        f"<think>\nI look.\n{CALL}<|done|>",
        "<think>\nAs always, then.\n</think>\n\nIt is.<|done|>",
    ),
    "in a thought that goes on": (
        VARIATIONS[GOES_ON],
        "<|result|>",
        f"<think>\nI look.\n{CALL}<|done|>",
        "As always, then.\n</think>\n\nIt is.<|done|>",
    ),
}


@pytest.mark.parametrize(("family", "marker", "calls", "answers"), IN_THOUGHTS.values(), ids=IN_THOUGHTS)
async def test_a_call_inside_a_thought_runs_and_the_thought_goes_on(
    family: Family, marker: str, calls: str, answers: str, tmp_path: Path
) -> None:
    async with open_tools(tmp_path, model=reciting_model(family, marker, calls, answers)) as service:
        chat = service.chat(service.store.users.ensure().id)
        reply = await send(chat, [])
        round = await wait_for_round(chat, reply.id)
        assert [call.name for call in round.calls] == ["bad__unchanged"]
        called = await chat.message(reply.id)
        assert (called.thinking.strip(), called.text) == ("I look.", "")
        await chat.decide_calls(reply.id, approve(round))
        following = await next_reply(chat, round)
        assert (following.thinking.strip(), following.text) == ("As always, then.", "It is.")
        path = await chat.path(following.id)
        assert results(path) == ["as always"]
        again = await chat.send_message(path[0].conversation_id, following.id, user("Again?"))  # as history, too
        assert (await finished(chat, again.reply.id)).text.endswith("It is.")
