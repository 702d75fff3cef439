"""Searches the quickest tiles of a model's products on the device at hand, a little at a time.

The engine's thread calls `TileSearch.advance` while it has no requests: each call times one tile, for a few
milliseconds. Tiles are compiled in a thread of their own. What is found counts from the next start on: captured graphs
stay as they are."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from palaver.engines.torch.tile_cache import TileCache
from palaver.engines.torch.tile_shapes import DeviceLimits, ProductShape, TileShape, candidates, refinements

SEARCH_S = 60.0
"""How long a search compiles and times after one start. The next one goes on with the products that are left."""
WORTHWHILE = 0.98
"""A tile is taken if its time over that of the default is below this: the rest may be noise."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Timing:
    """The seconds of a product in some tile, and in the tile that it has now, measured in turn."""

    seconds: float
    default_seconds: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.default_seconds


class CompileResult(NamedTuple):
    compiled: bool
    seconds: float


class TileTimer(Protocol):
    """Used in one thread, but for `compile`."""

    def prepare(self, product: ProductShape, default: TileShape) -> None:
        """Called before the tiles of a product are compiled and timed. `default`: the tile that it has now."""
        ...

    def compile(self, product: ProductShape, tile: TileShape) -> None:
        """Called in another thread: runs nothing on the device. Raises where the tile can't be compiled."""
        ...

    def time(self, product: ProductShape, tile: TileShape) -> Timing | None:
        """None where the device can't run the tile, or where a bit of the result differs from the default's."""
        ...

    def release(self) -> None:
        """Frees the memory for timings."""
        ...


@dataclass(frozen=True, slots=True)
class FoundTile:
    """The quickest tile of a product."""

    product: ProductShape
    default: TileShape
    tile: TileShape
    default_seconds: float
    ratio: float
    """The tile's time over that of the default."""
    tried: int
    rejected: int
    """Tiles that were tried, and those of them that can't be compiled or run, or that give other bits."""


class TileSearch:
    def __init__(
        self,
        products: Sequence[tuple[ProductShape, TileShape]],
        timer: TileTimer,
        cache: TileCache,
        limits: DeviceLimits,
        seconds: float = SEARCH_S,
        compilers: int = 1,
    ) -> None:
        """`products`: each with the tile that it has now. `compilers`: threads that compile."""
        self._timer = timer
        self._cache = cache
        self._limits = limits
        self._seconds_left = seconds
        self._compilers = compilers
        self._pool = ThreadPoolExecutor(compilers, "compile-tiles")  # which starts no thread before it is needed
        self._parts: Iterator[None] | None = self._search_all(list(products))
        self._awaited: Future[CompileResult] | None = None
        """What the next part waits for."""
        self.found: list[FoundTile] = []

    def advance(self) -> bool:
        """Does the next part of the search, which takes some milliseconds. Returns False when it is over: because all
        products were searched, the time is used up, or something failed."""
        if self._parts is None:
            return False
        try:
            next(self._parts)
            over = self._seconds_left <= 0
        except StopIteration:
            over = True
        except Exception as error:  # a search must never end the engine's thread
            _log.info("The search for tiles has stopped: %s", error)
            over = True
        if over:
            self._parts = None
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._timer.release()
        return not over

    def run(self) -> Iterator[FoundTile]:
        """The whole search, at once."""
        while self.advance():
            if self._awaited is not None:
                wait([self._awaited])
            yield from self._take_found()
        yield from self._take_found()

    def _take_found(self) -> list[FoundTile]:
        found, self.found = self.found, []
        return found

    def _search_all(self, products: Sequence[tuple[ProductShape, TileShape]]) -> Iterator[None]:
        for product, default in products:
            yield from self._search(product, default)

    def _search(self, product: ProductShape, default: TileShape) -> Iterator[None]:
        """Yields after each part. A search that doesn't come to its end leaves no file: it begins anew, unless the
        process ended while it timed a tile. An error of the device would end it again at each start."""
        if self._cache.was_cut(product):
            return
        with self._cache.marked(product):
            self._timer.prepare(product, default)
        yield
        best, ratio = default, 1.0
        timings: dict[TileShape, Timing | None] = {default: Timing(1.0, 1.0)}
        for propose in (candidates, refinements):
            tiles = [tile for tile in propose(product, best, self._limits) if tile not in timings]
            for tile, timing in self._time_all(product, tiles):
                if tile is not None:
                    timings[tile] = timing
                    if timing is not None and timing.ratio < ratio:
                        best, ratio = tile, timing.ratio
                yield
        if ratio >= WORTHWHILE:
            best, ratio = default, 1.0
        self._cache.write(product, best, ratio)
        del timings[default]
        measured = [timing.default_seconds for timing in timings.values() if timing is not None]
        default_s, rejected = min(measured, default=0.0), len(timings) - len(measured)
        self.found.append(FoundTile(product, default, best, default_s, ratio, len(timings), rejected))

    def _time_all(
        self, product: ProductShape, tiles: Sequence[TileShape]
    ) -> Iterator[tuple[TileShape | None, Timing | None]]:
        """Each tile and its timing; no tile while one is being compiled."""
        left = deque(tiles)
        jobs: deque[tuple[TileShape, Future[CompileResult]]] = deque()
        while left or jobs:
            while left and len(jobs) < self._compilers:
                jobs.append((left[0], self._pool.submit(self._compile, product, left.popleft())))
            tile, job = jobs[0]
            if not job.done():
                self._awaited = job
                yield None, None
                self._awaited = None
                continue
            jobs.popleft()
            result = job.result()
            began = time.perf_counter()
            timing = None
            if result.compiled:
                with self._cache.marked(product):
                    timing = self._timer.time(product, tile)
            self._seconds_left -= result.seconds / self._compilers + time.perf_counter() - began
            yield tile, timing

    def _compile(self, product: ProductShape, tile: TileShape) -> CompileResult:
        began, compiled = time.perf_counter(), True
        try:
            self._timer.compile(product, tile)
        except Exception as error:  # of Triton, LLVM or the assembler: the tile is left out
            _log.debug("%s of %s can't be compiled: %s", tile, product, error)
            compiled = False
        return CompileResult(compiled, time.perf_counter() - began)
