"""When the replies of a dead process wait for their model: what is logged, and when its load is tried again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from typing import Any, cast

import pytest

from palaver.chat.model import Model
from palaver.chat.recovery import Recovery
from palaver.errors import PalaverError


class Orphans:
    """One reply of the model "a", which no process gets."""

    closing = False

    async def list_orphans(self) -> Mapping[str, str]:
        return {"reply": "a"}

    async def claim_orphans(self, ids: Collection[str]) -> Collection[str]:
        return ()


class Models:
    """Counts the loads. They fail with `error`, if there is one."""

    error: Exception | None = None
    loads = 0

    def offers(self, name: str) -> bool:
        return True

    async def for_reply(self, name: str) -> Model:
        self.loads += 1
        if self.error is not None:
            raise self.error
        return cast(Model, object())


@pytest.fixture
def recovery() -> Recovery:
    unused: Any = None
    return Recovery(unused, cast(Any, Orphans()), unused)


async def resume(recovery: Recovery, models: Models) -> None:
    async with asyncio.TaskGroup() as tasks:
        await recovery.resume(cast(Any, models), tasks)


async def test_every_outage_of_a_model_is_logged_once(
    recovery: Recovery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("palaver.chat.recovery.RETRY_SECONDS", 0.0)
    models, counts = Models(), list[int]()
    with caplog.at_level(logging.WARNING, "palaver.chat.recovery"):
        for error in (PalaverError("No memory."), PalaverError("No memory."), None, PalaverError("No disk.")):
            models.error = error
            await resume(recovery, models)
            counts.append(len(caplog.records))
    assert counts == [1, 1, 1, 2]
    assert caplog.messages[-1] == "1 replies wait for a server with the model a: No disk."


@pytest.mark.parametrize("error", [PalaverError("No memory."), RuntimeError("a mistake")])
async def test_a_load_that_failed_is_tried_again_after_a_pause(
    recovery: Recovery, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    models = Models()
    models.error = error
    monkeypatch.setattr("palaver.chat.recovery.RETRY_SECONDS", 0.0)
    for _ in range(2):
        await resume(recovery, models)
    assert models.loads == 2
    monkeypatch.setattr("palaver.chat.recovery.RETRY_SECONDS", 1e9)
    for _ in range(2):
        await resume(recovery, models)
    assert models.loads == 3
