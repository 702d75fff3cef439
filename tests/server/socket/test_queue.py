"""A busy engine: waiting clients get their queue position, and further ones are refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from palaver.chat.engine_choice import LoadOptions
from palaver.chat.model import Model, build_model, load_model_format
from palaver.chat.model_pool import ModelPool
from palaver.chat.service import Service
from palaver.engines.core.scheduler import SchedulerLimits
from palaver.engines.host.supervisor import ReportProgress
from palaver.engines.torch import EngineOptions, load
from palaver.models.resolver import resolve_model
from palaver.server.app import Server
from palaver.server.settings import ServerSettings
from palaver.store import open_store
from tests.client.live import listening
from tests.server.socket.client import SUM, connect_client

LONG = {"min_tokens": 7000, "max_new_tokens": 7000, "do_sample": False}


async def _load_single(name: str, report: ReportProgress) -> Model:
    model = resolve_model(name)
    tokenizer, format = load_model_format(model, LoadOptions())
    options = EngineOptions(threads=1, limits=SchedulerLimits(max_running=1, max_waiting=1))
    engine = await asyncio.to_thread(load, model.folder, vocabulary=tokenizer.vocabulary, options=options)
    return build_model(name, engine, format, tokenizer)


@asynccontextmanager
async def crowded(folder: Path) -> AsyncIterator[str]:
    with open_store(folder) as store:
        models = ModelPool(_load_single, ("sprout",))
        models.load("sprout")
        async with Service(store, models) as service:
            await models.ready()
            async with listening(Server(service, ServerSettings())) as url:
                yield url


async def test_a_waiting_client_gets_its_position_and_one_too_many_is_refused(tmp_path: Path) -> None:
    async with (
        crowded(tmp_path) as url,
        connect_client(url) as first,
        connect_client(url) as second,
        connect_client(url) as third,
    ):
        await first.send(messages=SUM, generation=LONG)
        assert (await first.receive())["type"] == "prefill_done"
        await second.send(messages=SUM, generation={"do_sample": False})
        queued = await second.receive()
        assert (queued["type"], queued["position"], queued["seq"]) == ("queued", 1, 0)
        assert queued["estimated_wait_s"] is None or queued["estimated_wait_s"] >= 0
        assert "waiting already" in await third.expect_error(messages=SUM)
        await first.send(type="stop")
        stopped = (await first.receive_turn())[-1]
        assert stopped["finish_reason"] == "stopped"
        assert stopped["generated_tokens"] < LONG["min_tokens"]
        received = [message for message in await second.receive_turn() if message["type"] != "queued"]
        assert [message["seq"] for message in received] == list(range(1, len(received) + 1))
        assert "42" in received[-1]["text"]


async def test_a_stop_in_the_queue_leaves_it(tmp_path: Path) -> None:
    async with crowded(tmp_path) as url, connect_client(url) as first, connect_client(url) as second:
        await first.send(messages=SUM, generation=LONG)
        await first.receive()
        await second.send(messages=SUM)
        assert (await second.receive())["type"] == "queued"
        await second.send(type="stop")
        done = (await second.receive_turn())[-1]
        assert (done["text"], done["finish_reason"], done["generated_tokens"]) == ("", "stopped", 0)
        await second.send(messages=SUM)
        assert (await second.receive())["position"] == 1, "the place in the queue is free again"
