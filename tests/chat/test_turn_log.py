"""The recorder of tokens: what is stored together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from palaver.chat import turn_log
from palaver.chat.turn_log import FIRST_TOKENS, TokenRecorder
from palaver.store import Lease, Store, TokenFrame, open_store
from tests.store.factories import SETTINGS, new_conversation, steps


class CommitLog:
    """Records which replies each commit has tokens of."""

    def __init__(self, store: Store) -> None:
        self.commits: list[list[str]] = []
        self._append = store.replies.append
        store.replies.append = self._record  # type: ignore[method-assign]

    def _record(self, lease: Lease, frames: Sequence[TokenFrame]) -> frozenset[str]:
        self.commits.append([frame.reply_id for frame in frames])
        return self._append(lease, frames)


async def test_a_commit_waits_for_most_turns_but_not_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path) as store:
        log, lease = CommitLog(store), store.leases.open()
        ids = [store.replies.start(lease, new_conversation(store).id, None, SETTINGS).id for _ in range(4)]
        recorder = TokenRecorder(store, lease, lambda: len(ids))
        earlier = steps(*range(FIRST_TOKENS))
        async with asyncio.timeout(60):
            for id in ids:
                await recorder.record(id, 0, earlier, {})
            log.commits.clear()

            async def record(number: int) -> None:
                await recorder.record(ids[number], FIRST_TOKENS, steps(1), {}, earlier)

            monkeypatch.setattr(turn_log, "COMMIT_SECONDS", 0.0)
            await record(0)
            assert log.commits == [ids[:1]], "after a pause a turn waits for no other"
            monkeypatch.setattr(turn_log, "COMMIT_SECONDS", 3600.0)
            first = asyncio.create_task(record(1))
            for _ in range(10):
                await asyncio.sleep(0)
            assert not first.done()
            await record(2)
            await first
            assert log.commits[1:] == [[ids[1], ids[2]]]
            monkeypatch.setattr(turn_log, "COMMIT_SECONDS", 0.0)
            await record(3)
            assert log.commits[2:] == [[ids[3]]], "the others have no tokens: it does not wait longer"
        recorder.close()


async def test_the_first_tokens_of_a_turn_wait_for_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path) as store:
        log, lease = CommitLog(store), store.leases.open()
        ids = [store.replies.start(lease, new_conversation(store).id, None, SETTINGS).id for _ in range(8)]
        recorder = TokenRecorder(store, lease, lambda: len(ids))
        earlier = steps(*range(FIRST_TOKENS))
        async with asyncio.timeout(60):
            await recorder.record(ids[0], 0, earlier, {})
            monkeypatch.setattr(turn_log, "COMMIT_SECONDS", 3600.0)
            later = asyncio.create_task(recorder.record(ids[0], FIRST_TOKENS, steps(1), {}, earlier))
            for _ in range(10):
                await asyncio.sleep(0)
            assert not later.done()
            await recorder.record(ids[1], 0, steps(1), {})
            await later
            await recorder.record(ids[2], 0, steps(1), {})
        assert log.commits[1:] == [[ids[0], ids[1]], [ids[2]]]
        recorder.close()


async def test_a_single_turn_waits_for_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_log, "COMMIT_SECONDS", 3600.0)
    with open_store(tmp_path) as store:
        lease = store.leases.open()
        id = store.replies.start(lease, new_conversation(store).id, None, SETTINGS).id
        recorder = TokenRecorder(store, lease, lambda: 1)
        async with asyncio.timeout(60):
            for position in range(5):
                await recorder.record(id, position, steps(position), {})
        assert store.replies.token_ids(id) == (0, 1, 2, 3, 4)
        recorder.close()
