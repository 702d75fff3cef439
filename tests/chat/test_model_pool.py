"""Several models in one service: loaded on demand, evicted least recently used first, never while they write."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from palaver.chat.interface import Column, ModelState
from palaver.chat.model import Model
from palaver.chat.model_pool import ModelPool, PoolLimits
from palaver.chat.reply_stream import ReplyRequest
from palaver.chat.service import Service
from palaver.engines.host.supervisor import ReportProgress
from palaver.errors import EngineClosed, ExceedsMemoryLimit, ModelNotOffered, UnknownModel
from palaver.events import Finished, Waiting
from palaver.messages import user
from palaver.models.catalog import Catalog, CatalogEntry
from palaver.sampling import Sampling
from palaver.store import ReplyStatus, Store, open_store
from tests.chat.scripted_service import WAVE, model, read_entries, read_until
from tests.scripted_engine import HoldScript, Script, ScriptedEngine

SIZES = {"a": 4, "b": 4, "c": 4, "large": 11}
ASK = ReplyRequest((user("Wave!"),), Sampling())


class Shelf:
    """Loads scripted models, and counts what is loaded at once."""

    def __init__(self, sizes: Mapping[str, int] = SIZES, hold: asyncio.Event | None = None) -> None:
        self.sizes = sizes
        self.loads: list[str] = []
        self.open: dict[str, ScriptedEngine] = {}
        self.most = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure = ""
        """Why loads fail once the gate is open."""
        self.script: list[Script] = [WAVE] if hold is None else [[*WAVE[:4], HoldScript(hold), *WAVE[4:]]]

    async def load(self, name: str, report: ReportProgress) -> Model:
        if name == "missing":
            raise UnknownModel(name, "there is none.")
        report(0.5, "reading")
        await self.gate.wait()
        if self.failure:
            raise UnknownModel(name, self.failure)
        self.loads.append(name)
        made = model(self.script, name)
        assert isinstance(made.engine, ScriptedEngine)
        engine, close = made.engine, made.engine.close
        self.open[name] = engine
        self.most = max(self.most, sum(self.sizes.get(one, 0) for one in self.open))

        async def close_and_count() -> None:
            self.open.pop(name, None)
            await close()

        engine.close = close_and_count  # type: ignore[method-assign]
        return made

    async def measure(self, name: str, report: ReportProgress) -> int:
        return self.sizes.get(name, 0)

    def pool(self, memory: int | None = 10, **limits: float) -> ModelPool:
        catalog = Catalog((*self.sizes, "missing"), aliases={"gpt-4o": "b", "default": ""})
        return ModelPool(self.load, catalog, self.measure, limits=PoolLimits(memory, **limits))  # type: ignore[arg-type]


async def answer(pool: ModelPool, name: str) -> str:
    return (await (await pool.get(name)).reply(ASK)).message.text


async def test_models_are_loaded_on_demand_and_the_least_recently_used_is_evicted() -> None:
    shelf = Shelf()
    pool = shelf.pool()
    pool.load("a")
    await pool.ready()
    for name in ("b", "a", "c", "a"):
        assert (await answer(pool, name)).startswith("Wave")
    assert shelf.loads == ["a", "b", "c"], "b was used before a, so b made room"
    assert set(shelf.open) == {"a", "c"}
    assert pool.card("b").state is ModelState.AVAILABLE
    assert pool.card("b").context_length, "what is known of it stays known"
    assert pool.used_bytes == 8
    await answer(pool, "gpt-4o")
    assert shelf.loads[-1] == "b"
    assert shelf.most <= 10
    assert (await pool.get("default")).name == "a"
    await pool.unload()
    assert not shelf.open


async def test_unknown_names_get_the_list_of_what_is_there() -> None:
    pool = Shelf().pool()
    pool.load("a")
    await pool.ready()
    with pytest.raises(ModelNotOffered, match=r"'nope'.*There are: a, b, c, large, missing, gpt-4o, default\."):
        await pool.get("nope")
    with pytest.raises(ModelNotOffered):
        await pool.get("../a")
    await pool.unload()


async def test_requests_for_one_model_wait_for_one_load() -> None:
    shelf = Shelf()
    pool = shelf.pool()
    pool.load("a")
    await pool.ready()
    shelf.gate.clear()
    waiting = [asyncio.create_task(answer(pool, "b")) for _ in range(5)]
    while not pool.card("b").progress:
        await asyncio.sleep(0)
    assert (pool.card("b").state, pool.card("b").progress) == (ModelState.LOADING, 0.5)
    assert (await answer(pool, "a")).startswith("Wave"), "the other model serves meanwhile"
    waiting.pop().cancel()
    shelf.gate.set()
    assert len(await asyncio.gather(*waiting)) == 4
    assert shelf.loads == ["a", "b"]
    with pytest.raises(UnknownModel):
        await answer(pool, "missing")
    assert pool.card("missing").state is ModelState.FAILED
    await pool.unload()


async def test_a_model_that_never_fits_is_refused_and_evicts_nothing() -> None:
    shelf = Shelf()
    pool = shelf.pool()
    pool.load("a")
    await pool.ready()
    with pytest.raises(ExceedsMemoryLimit, match="'large' needs about"):
        await answer(pool, "large")
    assert set(shelf.open) == {"a"}
    assert (await pool.get()).name == "a"
    await pool.unload()


async def test_a_running_reply_is_never_evicted_and_the_one_that_waits_sees_progress() -> None:
    hold = asyncio.Event()
    shelf = Shelf(hold=hold)
    pool = shelf.pool(memory=4)
    pool.load("a")
    await pool.ready()
    first = asyncio.create_task(answer(pool, "a"))
    while not shelf.open["a"].calls:
        await asyncio.sleep(0)
    second = asyncio.create_task(answer(pool, "b"))
    third = (await pool.get("a")).stream_reply(ASK)
    while pool.card("b").note != "waiting for memory":
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    assert not first.done()
    assert shelf.loads == ["a"]
    seen = []
    async with third:
        async for batch in third.batches():
            seen.append(batch.events[0])
            hold.set()
    assert (await first).startswith("Wave")
    assert (await second).startswith("Wave")
    assert shelf.loads == ["a", "b", "a"], "the third reply came after b, which waited longer"
    assert isinstance(seen[-1], Finished)
    assert next(event.loading for event in seen if isinstance(event, Waiting)) == "a"
    assert shelf.most == 4
    await pool.unload()


async def test_a_request_for_a_model_that_is_being_unloaded_waits_for_one_load() -> None:
    hold = asyncio.Event()
    shelf, measured = Shelf(hold=hold), list[str]()
    pool = shelf.pool()

    async def measure(name: str, report: ReportProgress) -> int:
        measured.append(name)
        return 4

    pool._measure = measure
    pool.load("a")
    await pool.ready()
    first = asyncio.create_task(answer(pool, "a"))
    while not shelf.open["a"].calls:
        await asyncio.sleep(0)
    unloading = asyncio.create_task(pool.unload("a"))
    second = asyncio.create_task(answer(pool, "a"))
    for _ in range(100):  # iterations of the event loop
        await asyncio.sleep(0)
    assert measured == ["a"], "it is not loaded while the first reply runs"
    hold.set()
    assert await first == await second
    await unloading
    assert (measured, shelf.loads) == (["a", "a"], ["a", "a"])
    await pool.unload()


@pytest.mark.parametrize("everything", [False, True], ids=["cancelled", "everything"])
async def test_a_request_does_not_wait_for_an_unloading_that_is_over(everything: bool) -> None:
    hold = asyncio.Event()
    shelf = Shelf(hold=hold)
    pool = shelf.pool()
    pool.load("a")
    await pool.ready()
    first = asyncio.create_task(answer(pool, "a"))
    while not shelf.open["a"].calls:
        await asyncio.sleep(0)
    engine = shelf.open["a"]
    unloading = asyncio.create_task(pool.unload("a"))
    await asyncio.sleep(0)
    loading = asyncio.create_task(pool.preload("a"))
    await asyncio.sleep(0)
    assert not loading.done()
    if everything:
        await pool.unload()
        with pytest.raises(EngineClosed):
            await loading
    else:
        unloading.cancel()
        await loading
        assert shelf.open["a"] is engine, "it is loaded still"
    hold.set()
    await asyncio.gather(first, unloading, return_exceptions=True)
    await pool.unload()


async def test_a_reply_that_waits_for_its_model_can_be_stopped() -> None:
    shelf = Shelf()
    pool = shelf.pool(memory=4)
    pool.load("a")
    await pool.ready()
    loaded = await pool.get("a")
    stream = loaded.stream_reply(ASK)
    await answer(pool, "b")
    shelf.gate.clear()
    async with stream:
        async for batch in stream.batches():
            if isinstance(batch.events[0], Waiting):
                stream.stop()
    assert stream.reply().finish is not None
    assert not stream.steps
    shelf.gate.set()
    await pool.unload()
    with pytest.raises(EngineClosed):
        await loaded.reply(ASK)


async def test_an_unused_model_is_unloaded_after_a_while() -> None:
    shelf = Shelf()
    pool = shelf.pool(memory=None, keep_alive=0.1)
    pool.load("a")
    await pool.ready()
    async with asyncio.timeout(10):
        while shelf.open:
            await asyncio.sleep(0.02)
    assert pool.card().state is ModelState.AVAILABLE
    assert (await answer(pool, "")).startswith("Wave")
    await pool.unload()


async def test_random_requests_with_room_for_two_of_three_lose_nothing() -> None:
    shelf, numbers = Shelf(), random.Random(7)
    pool = shelf.pool()
    pool.load("a")
    await pool.ready()
    running = asyncio.Semaphore(8)

    async def one(name: str) -> str:
        async with running:
            return await answer(pool, name)

    names = [numbers.choice("abc") for _ in range(200)]
    answers = await asyncio.gather(*(one(name) for name in names))
    assert all(text == answers[0] for text in answers)
    assert shelf.most <= 10
    assert len(shelf.loads) >= 3
    await pool.unload()


async def test_turns_of_two_models_run_side_by_side_in_one_conversation(tmp_path: Path) -> None:
    hold = asyncio.Event()
    shelf = Shelf(hold=hold)
    pool = shelf.pool()
    with open_store(tmp_path) as store:
        pool.load("a")
        async with Service(store, pool) as service:
            chat = service.chat(store.users.ensure().id)
            talk = await chat.create_conversation()
            choices = ({"model": "a"}, {"model": "gpt-4o"})
            started = await chat.start_replies(talk, None, (user("Wave!"),), choices)
            for reply in started.replies:
                await read_until(chat, reply.id, 1)
            hold.set()
            for reply in started.replies:
                await read_entries(chat, reply.id)
            found = [await chat.message(reply.id) for reply in started.replies]
            assert [one.reply.settings.model for one in found if one.reply] == ["a", "b"]
            assert found[0].text == found[1].text
            columns = [Column({"model": "a"}), Column({"model": "gpt-4o", "temperature": 0})]
            comparison = await chat.compare(talk.id, None, user("Wave!"), columns)
            assert [one.name for one in comparison.replies] == ["a", "b · temperature 0"]
            for one in comparison.replies:
                await read_entries(chat, one.reply_id)
            with pytest.raises(ModelNotOffered):
                await chat.compare(talk.id, None, user("Wave!"), [Column({"model": "nope"}), Column()])
            named = await chat.create_conversation(parameters={"model": "c"})
            sent = await chat.send_message(named.id, None, user("Wave!"))
            assert sent.reply.reply is not None
            assert sent.reply.reply.settings.model == "c"
            await read_entries(chat, sent.reply.id)
            with pytest.raises(ModelNotOffered):
                await chat.create_conversation(parameters={"model": "nope"})
            forked = await chat.fork_reply(found[1].id, 2)
            assert forked.reply is not None
            assert forked.reply.settings.model == "b", "a reply is continued by its own model"
            await read_entries(chat, forked.id)


async def test_a_reply_of_a_dead_process_waits_for_a_server_that_has_its_model(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        pool = Shelf(hold=asyncio.Event()).pool(memory=None)
        pool.load("a")
        async with Service(store, pool, resume=True) as service:
            chat = service.chat(store.users.ensure().id)
            talk = await chat.create_conversation()
            sent = [await chat.send_message(talk.id, None, user("Wave!"), parameters={"model": n}) for n in "abc"]
            for one in sent:
                await read_until(chat, one.reply.id, 1)
            await service.turns.park(leave=True)

        async def statuses(names: tuple[str, ...]) -> list[ReplyStatus]:
            pool = ModelPool(Shelf().load, names)
            pool.load(names[0])
            async with Service(store, pool, resume=True) as service:
                await service.recovered.wait()
                chat = service.chat(store.users.ensure().id)
                if names == ("other",):
                    await chat.stop_reply(sent[2].reply.id)
                    continued = await chat.continue_reply(sent[2].reply.id)
                    await read_entries(chat, continued.id)
                for turn in service.turns.running:
                    await read_entries(chat, turn.id)
                found = [await chat.message(one.reply.id) for one in sent]
                return [one.reply.status for one in found if one.reply is not None]

        running, done = ReplyStatus.RUNNING, ReplyStatus.DONE
        assert await statuses(("b",)) == [running, done, running], "the others are not given up"
        assert await statuses(("other", "a")) == [done, done, running], "a is loaded to continue its reply"
        assert await statuses(("other",)) == [done, done, done], "a user may continue it with another model"


async def leave_replies(store: Store, names: str) -> dict[str, str]:
    """Starts a reply of each model and leaves it running, as a dead process does. Returns the replies by model."""
    pool = Shelf(hold=asyncio.Event()).pool(memory=None)
    pool.load(names[0])
    async with Service(store, pool, resume=True) as service:
        chat = service.chat(store.users.ensure().id)
        talk = await chat.create_conversation()
        sent = {n: await chat.send_message(talk.id, None, user("Wave!"), parameters={"model": n}) for n in names}
        for one in sent.values():
            await read_until(chat, one.reply.id, 1)
        await service.turns.park(leave=True)
    return {name: one.reply.id for name, one in sent.items()}


async def test_replies_are_recovered_although_the_default_model_can_not_be_loaded(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        replies = await leave_replies(store, "b")
        pool = Shelf().pool(memory=None)
        pool.load("missing")
        async with Service(store, pool, resume=True) as service, asyncio.timeout(30):
            chat = service.chat(store.users.ensure().id)
            entries = await read_entries(chat, replies["b"])
            assert isinstance(entries[-1].event, Finished)
            assert pool.card().state is ModelState.FAILED


@pytest.mark.parametrize("slow", ["a", "default"])
async def test_replies_are_recovered_while_another_model_is_downloaded(tmp_path: Path, slow: str) -> None:
    with open_store(tmp_path) as store:
        replies = await leave_replies(store, "ab")
        shelf, downloaded = Shelf({"a": 4, "b": 4, "default": 4}), asyncio.Event()

        async def measure(name: str, report: ReportProgress) -> int:
            if name == slow:
                await downloaded.wait()
            return 0

        pool = ModelPool(shelf.load, tuple(shelf.sizes), measure)
        pool.load("default")
        async with Service(store, pool, resume=True) as service, asyncio.timeout(30):
            chat = service.chat(store.users.ensure().id)
            assert isinstance((await read_entries(chat, replies["b"]))[-1].event, Finished)
            assert slow not in shelf.loads
            downloaded.set()
            assert isinstance((await read_entries(chat, replies["a"]))[-1].event, Finished)
            await service.recovered.wait()


def test_the_catalog_offers_what_the_operator_names() -> None:
    scanned: list[str] = ["on/disk"]
    entry = CatalogEntry("support", "Qwen/Qwen3-8B", {"exact": True})
    catalog = Catalog(("sprout",), (entry,), {"gpt-4o": "support", "lost": "not/offered"}, lambda: scanned)
    assert catalog.names() == ("sprout", "support", "on/disk")
    assert catalog.resolve("gpt-4o") == "support"
    assert catalog.resolve("on/disk") == "on/disk"
    assert catalog.resolve("lost") is None
    assert catalog.resolve("Qwen/Qwen3-8B") is None, "the hub is not asked because of a request"
    assert catalog.entry("support") == entry
