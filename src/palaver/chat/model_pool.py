"""The models of a service, each in an engine process of its own: loaded when they are asked for, kept while they are
used, and evicted least recently used first when memory is needed. One of them is the model in use by default."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from palaver.chat.interface import ModelCard, ModelState
from palaver.chat.model import Model
from palaver.chat.model_loader import Describe, Load, Measure, model_card, resident_bytes
from palaver.engines.base import Engine, EngineGeneration, EngineInfo, EngineState, EngineStatus
from palaver.engines.llamacpp.state_files import remove_states
from palaver.errors import (
    DoesNotFit,
    EngineClosed,
    EngineError,
    ExceedsMemoryLimit,
    ModelError,
    ModelLoading,
    ModelNotOffered,
    NoModel,
    PalaverError,
)
from palaver.generation import Ended, Finish, MediaExpansion, MediaItem, Output, Prompt, Queued
from palaver.media import MediaDecoder
from palaver.memory import available_bytes
from palaver.models.catalog import Catalog
from palaver.sampling import Sampling

_log = logging.getLogger(__name__)
Park = Callable[[], Awaitable[None]]
_REPORT_SECONDS = 0.25
"""How often a generation that waits for its model reports the progress."""
_DESCRIBE_SECONDS = 3.0
_SERVE_SECONDS = 2.0
"""How long a request that waited for a model has to use it before the model may be evicted."""
_EXPANSION_SECONDS = 120.0
"""How long a thread waits for the model before it expands media."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    memory: int | None = None
    """Bytes of all loaded models together, with their caches. None: what the machine has free."""
    keep_alive: float | None = None
    """Seconds after which an unused model is unloaded. None: only when memory is needed."""
    cache_bytes: int = 0
    """The bound on the KV cache of one model, which is counted before the cache has grown."""


@dataclass(eq=False)
class PooledModel:
    """A model that was asked for, loaded or not."""

    name: str
    model: Model | None = None
    """As it is given out. It stays after an eviction: its engine loads the weights again when it generates."""
    engine: Engine | None = None
    """The engine itself; None while it is not loaded."""
    info: EngineInfo | None = None
    loading: asyncio.Task[None] | None = None
    progress: float | None = None
    note: str = ""
    error: PalaverError | None = None
    """The error of the last load."""
    users: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while nothing uses the engine."""
    is_awaited: bool = False
    """Whether a request waits for the load."""
    is_reserved: bool = False
    """After a load that a request waited for: that request is served before the model is evicted again."""
    accepts_users: asyncio.Event = field(default_factory=asyncio.Event)
    """Not set while it waits to be idle and is then evicted: further users wait until it is loaded again."""
    last_use: int = 0
    used_at: float = 0.0
    nbytes: int = 0
    is_fixed: bool = False
    """Whether it can't be loaded again, and is never evicted."""
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.idle.set()
        self.accepts_users.set()

    @property
    def is_usable(self) -> bool:
        """Whether the engine is loaded, and a new user need not wait for another model."""
        return self.engine is not None and (self.is_reserved or self.accepts_users.is_set())

    @property
    def is_ready(self) -> bool:
        """Whether a request is computed at once: its card says READY."""
        if self.loading is not None or self.model is None or self.engine is None:
            return False
        return self.engine.status.state is EngineState.READY

    def card(self) -> ModelCard:
        if self.loading is not None:
            return ModelCard(self.name, ModelState.LOADING, self.progress, self.note)
        if self.model is not None and self.engine is not None:
            return model_card(self.model, self.engine.status)
        if self.model is not None and self.error is None:
            return replace(model_card(self.model, _LOADED), state=ModelState.AVAILABLE, progress=None)
        if self.error is not None:
            return ModelCard(self.name, ModelState.FAILED, note=str(self.error))
        return ModelCard(self.name, ModelState.AVAILABLE)


_LOADED = EngineStatus(EngineState.READY)


class ModelPool:
    """The loaded models. A model that runs a reply is never evicted."""

    def __init__(
        self,
        load: Load,
        names: Sequence[str] | Catalog = (),
        measure: Measure | None = None,
        states: Path | None = None,
        limits: PoolLimits = PoolLimits(),  # noqa: B008 - frozen
        describe: Describe | None = None,
    ) -> None:
        """`load` loads a model by name; `names` are the models that may be asked for. `measure` finds (or downloads) a
        model and estimates its memory. `states`: as in `LoadOptions`. `describe` reads a card from the files of a model
        that was never loaded."""
        self._load = load
        self._measure = measure
        self._describe = describe
        self._descriptions: dict[str, asyncio.Task[ModelCard]] = {}
        self._states = states
        self.limits = limits
        self.catalog = names if isinstance(names, Catalog) else Catalog(names)
        self.park: Park | None = None
        """Called before all models are unloaded, to park their turns."""
        self.decoder: MediaDecoder | None = None
        """Decodes the media of prompts; the models make one themselves if there is none."""
        self._models: dict[str, PooledModel] = {}
        self._default = ""
        """The name of the model in use by default."""
        self._requested = ""
        """The name that `load` was called with last."""
        self._switching: asyncio.Task[None] | None = None
        """The task that loads it and puts it into use."""
        self._error: PalaverError | None = None
        """The error of that load."""
        self._load_lock = asyncio.Lock()
        """One model is loaded at a time, in the order of the requests: each needs to know the memory of the others."""
        self._uses = itertools.count(1)
        self._expiry: asyncio.Task[None] | None = None

    # the model in use by default

    def current(self) -> Model:
        model = self._models[self._default].model if self._default else None
        if model is not None:
            return model
        if self._switching is not None:
            raise ModelLoading(self._requested)
        raise self._error or NoModel()

    def engine(self) -> Engine:
        """The loaded engine of the model in use. Raises NoModel while it is evicted."""
        self.current()
        engine = self._models[self._default].engine
        if engine is None:
            raise NoModel
        return engine

    def card(self, name: str = "") -> ModelCard:
        """The model of that name; without one, the model in use, or else the one that is loading or has failed."""
        if name and (known := self._models.get(self.resolve(name))) is not None:
            return known.card()
        if name:
            return ModelCard(self.resolve(name), ModelState.AVAILABLE)
        if not self._default:
            return self.loading_card()
        note = "" if self._error is None else str(self._error)
        card = self._models[self._default].card()
        return replace(card, note=note) if note else card

    def is_ready(self, name: str = "") -> bool:
        """Whether the model of that name, or the one in use, is loaded and its engine runs. Raises ModelNotOffered."""
        known = self._models.get(self.resolve(name) if name else self._default)
        return known is not None and known.is_ready

    def loading_card(self) -> ModelCard:
        """The model that `load` loads; without one, the model in use."""
        if self._switching is not None:
            entry = self._models.get(self._requested)
            return ModelCard(
                self._requested, ModelState.LOADING, entry.progress if entry else None, entry.note if entry else ""
            )
        if self._default:
            return self.card()
        if self._error is not None:
            return ModelCard(self._requested, ModelState.FAILED, note=str(self._error))
        return ModelCard(self._requested, ModelState.NONE)

    async def use(self, model: Model) -> None:
        """Puts a model into use that is loaded already. It is never evicted."""
        await self.unload()
        entry = self._models[model.name] = PooledModel(model.name, is_fixed=True)
        self._set_loaded(entry, model)
        entry.model = model
        self._default = self._requested = model.name

    def load(self, name: str) -> None:
        """Starts loading a model and puts it into use. The one that was in use before stays loaded while there is
        memory for it, and its turns go on."""
        previous, self._requested, self._error = self._switching, name, None
        self.catalog.downloads.add(name)
        entry = self._entry(name)
        if entry.loading is None:
            entry.progress, entry.note = None, ""
        self._switching = asyncio.create_task(self._switch(entry, previous))

    async def ready(self) -> Model:
        """The model in use. Waits for one only if there is none."""
        while not self._default and self._switching is not None:
            await self._settle(self._switching)
        return self.current()

    async def settled(self) -> Model:
        """The model in use when `load` has ended, whether or not it succeeded."""
        while self._switching is not None:
            await self._settle(self._switching)
        return self.current()

    async def loaded(self) -> Model:
        """The model that `load` loaded last. Raises the error of its load, even if another model is in use."""
        model = await self.settled()
        if self._error is not None:
            raise self._error
        return model

    # all models

    @property
    def names(self) -> tuple[str, ...]:
        """The models that can be asked for: the one in use first, without aliases."""
        own = (self._default,) if self._default else ()
        return tuple(dict.fromkeys((*own, *self.catalog.names())))

    def resolve(self, name: str) -> str:
        """The model's own name, from its name or an alias. Raises ModelNotOffered."""
        if name in self._models:
            return name
        found = self.catalog.resolve(name)
        if found is None:
            raise ModelNotOffered(name, (*self.names, *self.catalog.aliases))
        return found or self._default

    def offers(self, name: str) -> bool:
        """Whether a model of that name is loaded or can be loaded."""
        with suppress(ModelNotOffered):
            return bool(self.resolve(name))
        return False

    async def get(self, name: str | None = None) -> Model:
        """The model of that name, which is loaded first if it never was; without a name, the one in use.

        Raises ModelNotOffered. A model that was evicted is returned as it is: its engine loads it when it generates.
        """
        found = self.resolve(name) if name else self._default
        if not found or found == self._default:
            return self.current()
        entry = self._entry(found)
        if entry.model is None or entry.model.engine.info.media:  # expanding media must not wait in its thread
            entry.is_awaited = True
            await self._ensure_loaded(entry)
        assert entry.model is not None
        return entry.model

    async def preload(self, name: str) -> None:
        """Loads a model ahead of its first request."""
        await self._ensure_loaded(self._entry(self.resolve(name)))

    async def for_reply(self, name: str) -> Model:
        """The model that made a reply, if it is offered; else the one in use."""
        return await self.get(name) if name and self.offers(name) else await self.ready()

    def reader_for(self, name: str, tokenizer: str) -> Model | None:
        """A model that can read the tokens of a reply by that model: of the same name or the same tokenizer, else the
        one in use. It may be evicted. None if none was ever loaded."""
        known = [entry.model for entry in self._models.values() if entry.model is not None]
        known.sort(key=lambda model: (model.tokenizer != tokenizer, model.name != name, model.name != self._default))
        return known[0] if known else None

    async def describe(self, *names: str) -> tuple[ModelCard, ...]:
        """A card of each model that can be asked for, or of those with these names. Models that were never loaded say
        what their files say, as far as these are read in a few seconds; the next call has the rest."""
        names = tuple(map(self.resolve, names)) or self.names
        if self._describe is not None:
            for name in names:
                if name not in self._descriptions and not self._was_loaded(name):
                    self._descriptions[name] = asyncio.create_task(self._describe(name))
            read = (self._descriptions.get(name) for name in names)
            if unread := [task for task in read if task is not None and not task.done()]:
                await asyncio.wait(unread, timeout=_DESCRIBE_SECONDS)
        return tuple(self._describe_one(name) for name in names)

    def _was_loaded(self, name: str) -> bool:
        return name in self._models and self._models[name].model is not None

    def _describe_one(self, name: str) -> ModelCard:
        card = self._models[name].card() if name in self._models else ModelCard(name, ModelState.AVAILABLE)
        read = self._descriptions.get(name)
        if card.context_length or read is None or not read.done() or read.exception() is not None:
            return card
        return replace(read.result(), state=card.state, progress=card.progress, note=card.note)

    async def metrics(self) -> dict[str, float]:
        """The figures of all loaded engines, added up."""
        total: dict[str, float] = {}
        for entry in list(self._models.values()):
            for name, value in (await entry.engine.metrics() if entry.engine is not None else {}).items():
                total[name] = total.get(name, 0.0) + value
        return total

    @property
    def used_bytes(self) -> int:
        """The memory of the loaded models, by their own figures."""
        return sum(entry.nbytes for entry in self._models.values() if entry.engine is not None)

    async def forget(self, conversation: str) -> None:
        """Frees the conversation's caches, and deletes the states that models stored of it."""
        for entry in list(self._models.values()):
            if entry.engine is not None:
                await entry.engine.forget(conversation)
        if self._states is not None:
            await asyncio.to_thread(remove_states, self._states, conversation)

    async def unload(self, name: str = "") -> None:
        """Unloads the model of that name as soon as its replies have ended; without a name, parks all turns and unloads
        everything."""
        if name:
            entry = self._models.get(self.resolve(name))
            if entry is not None and entry.engine is not None:
                await self._evict(entry)
            return
        loading = (entry.loading for entry in self._models.values())
        tasks = [self._switching, self._expiry, *loading, *self._descriptions.values()]
        self._descriptions = {}
        self._switching = self._expiry = None
        if running := [task for task in tasks if task is not None]:
            for task in running:
                task.cancel()
            await asyncio.wait(running)
        entries, self._models = list(self._models.values()), {}
        self._default, self._requested, self._error = "", "", None
        loaded = [entry.engine for entry in entries if entry.engine is not None]
        try:
            if self.park is not None and loaded:
                await self.park()
        except Exception:  # their turns end with the engines
            _log.exception("the turns could not be parked")
        finally:
            for entry in entries:
                entry.is_closed, entry.engine = True, None
                entry.accepts_users.set()  # those that wait get EngineClosed
            for engine in loaded:
                await engine.close()

    # for the engines that are given out

    async def acquire(self, entry: PooledModel) -> Engine:
        """The loaded engine, which is not evicted until `release`."""
        while True:
            if entry.is_usable:
                assert entry.engine is not None
                entry.users += 1
                entry.idle.clear()
                self._touch(entry)
                return entry.engine
            entry.is_awaited = True
            await self._ensure_loaded(entry)

    def release(self, entry: PooledModel) -> None:
        entry.users -= 1
        self._touch(entry)
        self._set_idle(entry)

    # loading and evicting

    def _entry(self, name: str) -> PooledModel:
        if name not in self._models:
            self._models[name] = PooledModel(name)
        return self._models[name]

    def _set_idle(self, entry: PooledModel) -> None:
        entry.is_reserved = False
        if not entry.users:
            entry.idle.set()

    def _touch(self, entry: PooledModel) -> None:
        entry.last_use, entry.used_at = next(self._uses), time.monotonic()

    async def _settle(self, switching: asyncio.Task[None]) -> None:
        await asyncio.wait([switching])
        if self._switching is switching:
            self._switching = None

    async def _switch(self, entry: PooledModel, previous: asyncio.Task[None] | None) -> None:
        try:
            if previous is not None:
                previous.cancel()
                await asyncio.wait([previous])
            await self._ensure_loaded(entry)
            self._default = entry.name
        except PalaverError as error:
            self._error = error
            if self._default:
                error.args = (f"{error} {self._default} is still in use.",)
        except asyncio.CancelledError:
            if entry.loading is not None:
                entry.loading.cancel()
            raise
        finally:
            if self._switching is asyncio.current_task():
                self._switching = None

    async def _ensure_loaded(self, entry: PooledModel) -> None:
        """Waits until the model is loaded. Several callers wait for one load, and get its error."""
        while entry.engine is not None and not entry.is_usable:  # its replies end before it is evicted
            await entry.accepts_users.wait()
        if entry.is_closed:
            raise EngineClosed
        if entry.is_usable:
            return
        if entry.loading is None:
            entry.error, entry.progress, entry.note = None, None, ""
            entry.loading = asyncio.create_task(self._bring(entry))
        loading = entry.loading
        await asyncio.wait([loading])
        if entry.error is not None:
            raise entry.error
        if loading.cancelled():
            raise EngineClosed

    async def _bring(self, entry: PooledModel) -> None:
        """Loads the model. Sets the entry's error if that fails."""

        def report(progress: float | None, note: str) -> None:
            entry.progress, entry.note = progress, note

        try:
            needed = 0
            if self._measure is not None:
                needed = await self._measure(entry.name, report)  # may download: others are loaded meanwhile
            async with self._load_lock:
                if entry.engine is None:
                    report(None, "waiting for memory")
                    await self._make_room(entry, max(needed, entry.nbytes))
                    model = await self._start(entry, report)
                    entry.nbytes = entry.nbytes or needed
                    self._set_loaded(entry, model)
                    await self._correct_room(entry)
        except PalaverError as error:
            entry.error = error
        except Exception as error:
            _log.exception("the model %r could not be loaded", entry.name)
            entry.error = ModelError(f"Can't load the model {entry.name!r} ({type(error).__name__}: {error}).")
        finally:
            entry.loading = None

    async def _start(self, entry: PooledModel, report: Callable[[float | None, str], None]) -> Model:
        """Loads the model; evicts another one as long as it doesn't fit."""
        while True:
            try:
                report(None, "")
                return await self._load(entry.name, report)
            except DoesNotFit:
                victim = self._victim(entry)
                if victim is None:
                    raise
                await self._evict(victim)

    def _set_loaded(self, entry: PooledModel, model: Model) -> None:
        entry.engine, entry.info, entry.error = model.engine, model.engine.info, None
        if self.decoder is not None:
            model.media.use(self.decoder)
        entry.nbytes = resident_bytes(model.engine, self.limits.cache_bytes) or entry.nbytes
        entry.model = replace(model, engine=PooledEngine(self, entry))
        self._touch(entry)
        if entry.is_awaited:
            entry.is_awaited, entry.is_reserved = False, True
            entry.idle.clear()
            asyncio.get_running_loop().call_later(_SERVE_SECONDS, self._set_idle, entry)
        if self.limits.keep_alive is not None and self._expiry is None:
            self._expiry = asyncio.create_task(self._expire(self.limits.keep_alive))

    async def _make_room(self, entry: PooledModel, needed: int) -> None:
        """Evicts the least recently used models until the memory suffices. Waits for their replies."""
        limit = self.limits.memory
        if limit is not None and needed > limit:
            raise ExceedsMemoryLimit(entry.name, needed, limit)
        while needed > self._free_bytes():
            victim = self._victim(entry)
            if victim is None:
                return  # the engine says whether it fits
            await self._evict(victim)

    async def _correct_room(self, entry: PooledModel) -> None:
        """Evicts unused models if the loaded one takes more than was estimated."""
        limit = self.limits.memory
        while limit is not None and self.used_bytes > limit:
            victim = self._victim(entry)
            if victim is None:
                return
            await self._evict(victim)

    def _free_bytes(self) -> float:
        if self.limits.memory is not None:
            return self.limits.memory - self.used_bytes
        free = available_bytes()
        return float("inf") if free is None else free

    def _victim(self, beside: PooledModel) -> PooledModel | None:
        """The model to evict: unused ones first, and of those the least recently used."""
        loaded = [
            entry
            for entry in self._models.values()
            if entry.engine is not None and entry is not beside and not entry.is_fixed
        ]
        return min(loaded, key=lambda entry: (not entry.idle.is_set(), entry.last_use), default=None)

    async def _evict(self, entry: PooledModel) -> None:
        """Unloads a model once its replies have ended. Further replies wait until it is loaded again."""
        entry.accepts_users.clear()
        try:
            await entry.idle.wait()
            engine, entry.engine = entry.engine, None
        finally:
            entry.accepts_users.set()
        if engine is not None:
            _log.info("unloading %s", entry.name)
            await engine.close()

    async def _expire(self, seconds: float) -> None:
        """Evicts models that were not used for so long."""
        while True:
            await asyncio.sleep(min(max(seconds / 4, 0.05), 15.0))
            for entry in list(self._models.values()):
                unused = time.monotonic() - entry.used_at >= seconds
                if entry.engine is not None and entry.idle.is_set() and unused and not entry.is_fixed:
                    await self._evict(entry)


class PooledEngine:
    """The engine of a pooled model. It can be used at any time: what generates loads the model if it was evicted."""

    def __init__(self, pool: ModelPool, entry: PooledModel) -> None:
        self._pool = pool
        self._entry = entry
        self._loop = asyncio.get_running_loop()

    @property
    def info(self) -> EngineInfo:
        assert self._entry.info is not None
        return self._entry.info

    @property
    def status(self) -> EngineStatus:
        engine = self._entry.engine
        return engine.status if engine is not None else _LOADED

    @asynccontextmanager
    async def generate(self, prompt: Prompt, sampling: Sampling, choice: int = 0) -> AsyncIterator[EngineGeneration]:
        if self._entry.is_closed:
            raise EngineClosed
        generation = PooledGeneration(self._pool, self._entry, prompt, sampling, choice)
        try:
            if self._entry.is_usable:
                await generation.open()
            yield generation.inner or generation
        finally:
            await generation.close()

    def expand_media(self, item: MediaItem) -> MediaExpansion:
        acquiring = asyncio.run_coroutine_threadsafe(self._pool.acquire(self._entry), self._loop)
        try:
            engine = acquiring.result(_EXPANSION_SECONDS)
        except TimeoutError:
            acquiring.cancel()
            raise EngineError(f"The model {self._entry.name!r} could not be loaded in time: try again.") from None
        try:
            return engine.expand_media(item)
        finally:
            self._loop.call_soon_threadsafe(self._pool.release, self._entry)

    async def metrics(self) -> dict[str, float]:
        engine = self._entry.engine
        return await engine.metrics() if engine is not None else {}

    async def forget(self, conversation: str) -> None:
        if self._entry.engine is not None:
            await self._entry.engine.forget(conversation)

    async def close(self) -> None:
        """The pool closes its engines itself."""


class PooledGeneration:
    """A generation whose model is being loaded. It reports the progress, and goes on as the engine's generation."""

    def __init__(self, pool: ModelPool, entry: PooledModel, prompt: Prompt, sampling: Sampling, choice: int) -> None:
        self._pool = pool
        self._entry = entry
        self._request = (prompt, sampling, choice)
        self.inner: EngineGeneration | None = None
        """The engine's generation, once it is open."""
        self._stack = AsyncExitStack()
        self._opening: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._answer_now = False
        self._ended = False
        self._reported: tuple[float | None, str] | None = None

    def __aiter__(self) -> PooledGeneration:
        return self

    async def __anext__(self) -> Output:
        if self._ended:
            raise StopAsyncIteration
        if self.inner is None and (waiting := await self._wait()) is not None:
            self._ended = isinstance(waiting, Ended)
            return waiting
        assert self.inner is not None
        return await anext(self.inner)

    def stop(self) -> None:
        self._stopped.set()
        if self.inner is not None:
            self.inner.stop()

    def answer_now(self) -> None:
        self._answer_now = True
        if self.inner is not None:
            self.inner.answer_now()

    async def open(self) -> None:
        """Opens the engine's generation. Loads the model first if it is not loaded."""
        engine = await self._pool.acquire(self._entry)
        self._stack.callback(self._pool.release, self._entry)
        inner = await self._stack.enter_async_context(engine.generate(*self._request))
        if self._answer_now:
            inner.answer_now()
        if self._stopped.is_set():
            inner.stop()
        self.inner = inner

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        await self._stack.aclose()

    async def _wait(self) -> Output | None:
        """The next progress of the load; None once the generation is open."""
        if self._opening is None:
            self._opening = asyncio.create_task(self.open())
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            while not self._opening.done():
                report = (self._entry.progress, self._entry.note)
                if report != self._reported:
                    self._reported = report
                    return Queued(0, None, self._entry.name, self._entry.progress)
                waits = {self._opening, stopped}
                await asyncio.wait(waits, timeout=_REPORT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if stopped.done() and not self._opening.done():
                    return Ended(Finish.STOPPED)
            self._opening.result()
            return None
        finally:
            stopped.cancel()
