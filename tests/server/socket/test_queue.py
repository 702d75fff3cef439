"""Where the engine is busy, whoever waits is told so, in the order of their coming."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from palaver.chat.model import Model
from palaver.chat.model_loader import LoadOptions, ModelSlot, build_model, load_model_format
from palaver.chat.service import Service
from palaver.engines.core.scheduler import SchedulerLimits
from palaver.engines.host.supervisor import ReportProgress
from palaver.engines.torch import EngineOptions, load
from palaver.models.catalog import resolve
from palaver.server.app import Server
from palaver.server.settings import ServerSettings
from palaver.store import open_store
from tests.client.live import listening
from tests.server.socket.talk import SUM, talking

LONG = {"min_tokens": 7000, "max_new_tokens": 7000, "do_sample": False}


async def _one_at_a_time(name: str, told: ReportProgress) -> Model:
    folder = resolve(name)
    tokenizer, format = load_model_format(folder, LoadOptions())
    options = EngineOptions(threads=1, limits=SchedulerLimits(running=1, waiting=1))
    engine = await asyncio.to_thread(load, folder, vocabulary=tokenizer.vocabulary, options=options)
    return build_model(name, engine, format, tokenizer)


@asynccontextmanager
async def crowded(folder: Path) -> AsyncIterator[str]:
    with open_store(folder) as store:
        models = ModelSlot(_one_at_a_time, ("sprout",))
        models.load("sprout")
        async with Service(store, models) as service:
            await models.ready()
            async with listening(Server(service, ServerSettings())) as url:
                yield url


async def test_who_waits_is_told_who_is_too_many_refused(tmp_path: Path) -> None:
    async with crowded(tmp_path) as url, talking(url) as first, talking(url) as second, talking(url) as third:
        await first.send(messages=SUM, generation=LONG)
        assert (await first.next())["type"] == "prefill_done"
        await second.send(messages=SUM, generation={"do_sample": False})
        queued = await second.next()
        assert (queued["type"], queued["position"], queued["seq"]) == ("queued", 1, 0)
        assert queued["estimated_wait_s"] is None or queued["estimated_wait_s"] >= 0
        assert "waiting already" in await third.refused(messages=SUM)
        await first.send(type="stop")
        stopped = (await first.rest())[-1]
        assert stopped["finish_reason"] == "stopped"
        assert stopped["generated_tokens"] < LONG["min_tokens"]
        told = [message for message in await second.rest() if message["type"] != "queued"]
        assert [message["seq"] for message in told] == list(range(1, len(told) + 1))
        assert "42" in told[-1]["text"]


async def test_a_stop_in_the_queue_leaves_it(tmp_path: Path) -> None:
    async with crowded(tmp_path) as url, talking(url) as first, talking(url) as second:
        await first.send(messages=SUM, generation=LONG)
        await first.next()
        await second.send(messages=SUM)
        assert (await second.next())["type"] == "queued"
        await second.send(type="stop")
        done = (await second.rest())[-1]
        assert (done["text"], done["finish_reason"], done["generated_tokens"]) == ("", "stopped", 0)
        await second.send(messages=SUM)
        assert (await second.next())["position"] == 1, "the place is free again"
