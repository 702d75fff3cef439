"""The search for tiles: it tries what a device can run, takes the quickest, keeps what it found, and never disturbs a
request. No GPU is needed: times are made up."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from palaver.engines.core import engine
from palaver.engines.core.engine import Worker
from palaver.engines.core.generation import CloseCommand, Outbox, SubmitCommand
from palaver.engines.torch.tile_cache import TileCache
from palaver.engines.torch.tile_search import TileSearch, Timing
from palaver.engines.torch.tile_shapes import (
    FEW_ROWS,
    FEW_TILES,
    MIXED_TILES,
    PACKED_ROWS,
    ROWS,
    SCALED_TILES,
    SEARCHED_ROWS,
    TILES,
    DeviceLimits,
    ProductShape,
    TileShape,
    candidates,
    fit_tile,
    prefill_tiles,
    refinements,
)

H200 = DeviceLimits("NVIDIA H200", (9, 0), 232448, 132)
DEVICES = (
    H200,
    DeviceLimits("NVIDIA A100-SXM4-80GB", (8, 0), 166912, 108),
    DeviceLimits("NVIDIA GeForce RTX 4090", (8, 9), 101376, 128),
    DeviceLimits("NVIDIA B200", (10, 0), 232448, 148),
    DeviceLimits("NVIDIA GeForce RTX 5090", (12, 0), 101376, 170),
)
SIZES = [
    (outputs, inputs, split, gated)
    for outputs, inputs, split in (
        (64, 64, 1),
        (128, 2880, 15),
        (192, 320, 1),
        (1024, 3072, 4),
        (2560, 10240, 2),
        (4096, 4096, 2),
        (5120, 2880, 1),
        (12288, 4096, 1),
        (151936, 1024, 1),
    )
    for gated in (False, True)
    if split == 1 or not gated
]
PRODUCT = ProductShape(2560, 4096, 2, False, "bfloat16")
START = TileShape(ROWS, 64, 128, 4)


def products(*sizes: tuple[int, int, int, bool], weights: str = "bfloat16") -> Iterator[ProductShape]:
    for size in sizes:
        for rows in (0, FEW_ROWS, *SEARCHED_ROWS):
            yield ProductShape(*size, weights, rows)


def default_tile(product: ProductShape) -> TileShape:
    """As `TiledProjection.of` takes it for sizes that are in no table."""
    if product.has_prompts:
        return TileShape(128, 128, 64, 4, 8) if product.outputs % 128 == 0 else TileShape(128, 64, 64, 3)
    return TileShape(ROWS, 64, 128 if product.inputs // product.split % 128 == 0 else 64, 4)


@pytest.mark.parametrize("limits", DEVICES, ids=lambda limits: limits.name.split()[-1])
def test_every_candidate_divides_the_product_and_fits_the_device(limits: DeviceLimits) -> None:
    for product in products(*SIZES):
        start = fit_tile(default_tile(product), product, limits)
        first = candidates(product, start, limits)
        tiles = [start, *first, *(better for tile in (start, *first) for better in refinements(product, tile, limits))]
        assert start not in first
        assert len(set(first)) == len(first)
        for tile in tiles:
            part = product.inputs // product.split
            assert part % tile.depth == 0
            assert product.outputs % tile.outputs == 0
            lines = tile.outputs * (1 + product.gated) + tile.rows
            in_memory = tile.stages if limits.capability[0] in (9, 10) else max(1, tile.stages - 1)
            assert in_memory * lines * tile.depth * 2 <= limits.shared_memory
            assert tile.stages >= 1
            assert tile.rows >= 64 if product.has_prompts else tile.rows in (ROWS, product.rows)
            assert tile.has_blocks or tile.outputs >= 16 * tile.warps  # so that all products use one instruction
            assert not tile.has_blocks or (product.split == 1 and product.has_prompts)
            if product.has_prompts or limits.capability < (9, 0):
                assert not tile.early
            if limits.name == "NVIDIA B200":
                assert tile.distance <= 1


def test_a_product_has_a_handful_of_candidates() -> None:
    for product in products((6144, 4096, 1, False), (12288, 4096, 1, True), (4096, 12288, 2, False)):
        start = default_tile(product)
        first = candidates(product, start, H200)
        assert 4 <= len(first) <= 16
        assert 1 <= len(refinements(product, first[0], H200)) <= 8


def test_tuned_tiles_suit_the_device_they_were_tuned_on() -> None:
    for (outputs, inputs), tile in TILES.items():
        gated = (outputs, inputs) in ((12288, 4096), (3072, 1024))
        split = 2 if outputs == 4096 and inputs >= 4096 else 1
        product = ProductShape(outputs, inputs, split, gated, "bfloat16")
        assert product.allows(tile, H200)
        few = FEW_TILES.get((outputs, inputs), tile)
        assert product.with_rows(FEW_ROWS).allows(few, H200)
        assert few.outputs == tile.outputs
        assert fit_tile(tile, product, H200) == tile
        assert product.is_tuned_for(H200)
        assert not any(product.is_tuned_for(limits) for limits in DEVICES[1:])
        for rows, prefill in MIXED_TILES.get((outputs, inputs), ()):
            assert product.with_rows(rows or 1024).allows(prefill, H200)
    assert not PRODUCT.is_tuned_for(H200)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("sizes", MIXED_TILES, ids=str)
def test_a_product_of_a_tuned_size_but_of_the_other_kind_has_tiles_of_its_own(
    sizes: tuple[int, int], gated: bool
) -> None:
    small = TileShape(64, 64, 64, 4)
    for rows in (64, *SEARCHED_ROWS, 4096):
        tile = next(tile for most, tile in prefill_tiles(*sizes, 1, gated) if rows <= most or not most)
        product = ProductShape(*sizes, 1, gated, "bfloat16", rows)
        fitting = fit_tile(tile, product, H200)
        assert fitting._replace(stages=tile.stages) == tile != small
        assert product.allows(fitting, H200)
        if product.is_tuned_for(H200):
            assert fitting == tile


def test_a_size_is_tuned_for_one_kind_of_product() -> None:
    def is_tuned(outputs: int, inputs: int, gated: bool) -> bool:
        return ProductShape(outputs, inputs, 1, gated, "bfloat16").is_tuned_for(H200)

    assert is_tuned(12288, 4096, gated=True)  # gate and up of Qwen3-8B
    assert not is_tuned(12288, 4096, gated=False)  # queries, keys and values of Llama-2-7B
    assert is_tuned(6144, 4096, gated=False)
    assert not is_tuned(6144, 4096, gated=True)
    assert not is_tuned(3072, 1024, gated=False)  # queries, keys and values of Qwen1.5-0.5B


def test_only_three_blocks_of_a_kind_suit_it() -> None:
    assert TileShape(128, 192, 64, 4).suits(gated=False)
    assert not TileShape(128, 192, 64, 4).suits(gated=True)
    assert TileShape(128, 96, 64, 4).suits(gated=True)
    assert not TileShape(128, 96, 64, 4).suits(gated=False)
    assert all(TileShape(128, 128, 64, 4).suits(gated) for gated in (False, True))


def test_a_tile_that_does_not_fit_loses_stages() -> None:
    rtx = DEVICES[2]
    wide = ProductShape(12288, 4096, 1, True, "bfloat16", 1024)
    fitting = fit_tile(TileShape(128, 128, 64, 4, 8), wide, rtx)
    assert fitting == TileShape(128, 128, 64, 3, 8)
    tile = TileShape(ROWS, 64, 128, 6, 4, 8)
    assert fit_tile(tile, PRODUCT, rtx) == tile._replace(stages=5)
    assert fit_tile(tile, PRODUCT, DEVICES[3]) == tile._replace(distance=1)
    assert fit_tile(tile._replace(early=True), PRODUCT, rtx) == tile._replace(stages=5)


@pytest.mark.parametrize("limits", DEVICES[1:], ids=lambda limits: limits.name.split()[-1])
@pytest.mark.parametrize("gated", [False, True])
def test_the_largest_blocks_are_for_devices_that_multiply_from_shared_memory(limits: DeviceLimits, gated: bool) -> None:
    outputs = 96 if gated else 192
    product = ProductShape(12288, 4096, 1, gated, "bfloat16", 1024)
    largest = TileShape(256, outputs, 64, 4, 8)
    tiles = [fit_tile(largest, product, limits), *candidates(product, START, limits)]
    if limits.multiplies_shared:
        assert tiles[0] == largest
    else:
        assert tiles[0] == TileShape(128, outputs, 64, 4 if limits.shared_memory > 150_000 else 3, 8)
        assert max(tile.rows * tile.outputs * (1 + gated) // (32 * tile.warps) for tile in tiles) <= 128


def test_of_quantised_weights_only_the_stages_are_searched() -> None:
    start = TileShape(128, 64, 64, 3, 8)
    for product in products((4096, 4096, 1, False), weights="uint8 by 128"):
        if product.has_prompts and not product.is_unpacked:
            found = [*candidates(product, start, H200), *refinements(product, start, H200)]
            assert found
            assert {tile._replace(stages=0) for tile in found} == {start._replace(stages=0)}


@pytest.mark.parametrize("period", [0, 16, 64, 128, 256])
@pytest.mark.parametrize("limits", DEVICES, ids=lambda limits: limits.name.split()[-1])
def test_weights_that_were_unpacked_are_searched_as_floats(limits: DeviceLimits, period: int) -> None:
    for gated in (False, True):
        product = ProductShape(4096, 4096, 1, gated, "int4 by 128", 512, period)
        assert product.is_unpacked
        assert not product.with_rows(PACKED_ROWS).is_unpacked
        start = fit_tile(SCALED_TILES[gated], product, limits)
        tiles = [start, *candidates(product, start, limits)]
        assert len(tiles) > 1
        for tile in tiles:
            lines = tile.outputs * (1 + gated) + tile.rows
            in_memory = tile.stages if limits.capability[0] in (9, 10) else max(1, tile.stages - 1)
            assert in_memory * lines * max(tile.depth, period) * 2 <= limits.shared_memory
            sums = tile.outputs * tile.rows * (1 + gated) * (2 if period else 1)
            assert sums <= 128 * 32 * tile.warps  # registers
            assert tile.outputs >= 16 * tile.warps


def test_tiles_of_packed_and_of_unpacked_weights_have_files_of_their_own(tmp_path: Path) -> None:
    cache = TileCache(H200, "triton", tmp_path)
    packed = ProductShape(4096, 4096, 1, False, "int4 by 128", PACKED_ROWS, 128)
    cache.write(packed, START._replace(rows=64), 0.9)
    cache.write(packed.with_rows(256), START._replace(rows=128, stages=2), 0.9)
    names = {file.name for file in cache.folder.iterdir()}
    assert sum("unpacked" in name for name in names) == 1
    assert len(names) == 2


def test_what_was_found_is_read_again(tmp_path: Path) -> None:
    cache = TileCache(H200, "triton 3.6.0", tmp_path)
    tiles = {product: fit_tile(default_tile(product), product, H200) for product in products(*SIZES)}
    assert not any(map(cache.read, tiles))
    for product, tile in tiles.items():
        cache.write(product, tile, 0.9)
    again = TileCache(H200, "triton 3.6.0", tmp_path)
    assert {product: again.read(product) for product in tiles} == tiles


def test_another_device_or_version_has_tiles_of_its_own(tmp_path: Path) -> None:
    TileCache(H200, "triton 3.6.0", tmp_path).write(PRODUCT, START, 0.9)
    assert TileCache(H200, "triton 3.7.0", tmp_path).read(PRODUCT) is None
    for limits in DEVICES[1:]:
        assert TileCache(limits, "triton 3.6.0", tmp_path).read(PRODUCT) is None
    older = DeviceLimits(H200.name, (8, 9), H200.shared_memory, H200.processors)
    assert TileCache(older, "triton 3.6.0", tmp_path).read(PRODUCT) is None


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"tile": 5}',
        '{"tile": {"rows": 32}}',
        '{"tile": [32, 64, 128, 4, 4, 0, false]}',
        "\udcff",
        json.dumps({"tile": START._replace(depth=96)._asdict()}),
        json.dumps({"tile": START._replace(stages=60)._asdict()}),
        json.dumps({"tile": START._replace(rows=64)._asdict()}),
        json.dumps({"tile": START._asdict() | {"warps": "4"}}),
        json.dumps({"tile": START._asdict() | {"distance": True}}),
    ],
)
def test_a_damaged_file_is_ignored_and_written_anew(tmp_path: Path, damaged: str) -> None:
    cache = TileCache(H200, "triton", tmp_path)
    cache.write(PRODUCT, START, 1.0)
    (file,) = cache.folder.iterdir()
    file.write_bytes(damaged.encode("utf-8", "surrogateescape"))
    assert cache.read(PRODUCT) is None
    cache.write(PRODUCT, START, 1.0)
    assert cache.read(PRODUCT) == START


def test_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    everything = list(products(*SIZES))
    tiles = [START._replace(stages=stages, depth=64) for stages in (2, 3, 4)]
    product = ProductShape(64, 64, 1, False, "bfloat16")
    stop = threading.Event()
    seen = []

    def write(number: int) -> None:
        cache = TileCache(H200, "triton", tmp_path)
        for other in everything[number::4]:
            cache.write(product, tiles[number % 3], 0.9)
            cache.write(other, fit_tile(default_tile(other), other, H200), 0.9)

    def read() -> None:
        cache = TileCache(H200, "triton", tmp_path)
        while not stop.is_set():
            seen.append(cache.read(product))

    TileCache(H200, "triton", tmp_path).write(product, tiles[0], 0.9)
    with ThreadPoolExecutor(5) as pool:
        reader = pool.submit(read)
        list(pool.map(write, range(4)))
        stop.set()
        reader.result()
    cache = TileCache(H200, "triton", tmp_path)
    others = [other for other in everything if other != product]
    assert all(cache.read(other) == fit_tile(default_tile(other), other, H200) for other in others)
    assert set(seen) <= {*tiles, fit_tile(default_tile(product), product, H200)}  # never a part of a file
    assert not list(cache.folder.glob("*.tmp"))


class MadeUpTimer:
    """Times of tiles by a function; None: other bits. It notes in which threads it was called."""

    def __init__(self, seconds: Callable[[TileShape], float | None], compile_s: float = 0.0) -> None:
        self._seconds = seconds
        self._compile_s = compile_s
        self._default = START
        self.prepared: list[ProductShape] = []
        self.timed: list[TileShape] = []
        self.threads: set[str] = set()
        self.released = 0

    def prepare(self, product: ProductShape, default: TileShape) -> None:
        self.prepared.append(product)
        self._default = default

    def compile(self, product: ProductShape, tile: TileShape) -> None:
        assert threading.current_thread().name.startswith("compile-tiles")
        time.sleep(self._compile_s)
        if tile.depth == 256:
            raise RuntimeError("it can't be compiled")

    def time(self, product: ProductShape, tile: TileShape) -> Timing | None:
        assert tile.depth != 256, "it was not compiled"
        self.threads.add(threading.current_thread().name)
        self.timed.append(tile)
        seconds, default = self._seconds(tile), self._seconds(self._default)
        return None if seconds is None or default is None else Timing(seconds, default)

    def release(self) -> None:
        self.released += 1


def work(tile: TileShape) -> float:
    """Seconds: less with 5 stages of depth 128, and with a distance of 8."""
    return 1.0 + abs(tile.stages - 5) / 10 + abs(tile.depth - 128) / 640 + abs(tile.distance - 8) / 80


@pytest.fixture
def cache(tmp_path: Path) -> TileCache:
    return TileCache(H200, "triton", tmp_path)


def test_the_quickest_tile_is_found_and_kept(cache: TileCache) -> None:
    timer = MadeUpTimer(work)
    search = TileSearch([(PRODUCT, START)], timer, cache, H200)
    (found,) = search.run()
    assert found.tile == START._replace(stages=5, distance=8)
    assert found.default_seconds == pytest.approx(1.2)
    assert found.ratio == pytest.approx(1 / 1.2)
    assert found.tried == len(timer.timed) + found.rejected
    assert found.rejected == 1  # it can't be compiled
    assert cache.read(PRODUCT) == found.tile
    assert timer.released == 1
    assert not search.advance()


def test_a_small_gain_changes_nothing(cache: TileCache) -> None:
    search = TileSearch([(PRODUCT, START)], MadeUpTimer(lambda tile: 0.99 if tile != START else 1.0), cache, H200)
    (found,) = search.run()
    assert found.tile == START
    assert found.ratio == 1
    assert cache.read(PRODUCT) == START  # so that it is not searched again


def test_a_tile_with_other_bits_is_never_taken(cache: TileCache) -> None:
    timer = MadeUpTimer(lambda tile: None if tile.stages == 5 else work(tile))
    (found,) = TileSearch([(PRODUCT, START)], timer, cache, H200).run()
    assert found.tile.stages != 5
    assert found.tile.distance == 8


def test_several_threads_compile_ahead(cache: TileCache) -> None:
    several = [(product, fit_tile(default_tile(product), product, H200)) for product in products(*SIZES[:3])]
    search = TileSearch(several, MadeUpTimer(work, compile_s=0.001), cache, H200, compilers=4)
    assert [found.product for found in search.run()] == [product for product, _ in several]


def test_a_search_ends_with_its_time_and_goes_on_at_the_next_start(cache: TileCache) -> None:
    several = [(ProductShape(64 * n, 1024, 1, False, "bfloat16"), START) for n in (1, 3, 5)]
    done: list[ProductShape] = []
    for _ in range(20):
        left = [(product, tile) for product, tile in several if cache.read(product) is None]
        if not left:
            break
        timer = MadeUpTimer(work, compile_s=0.005)
        found = list(TileSearch(left, timer, cache, H200, seconds=0.15).run())
        assert timer.released == 1
        done += [one.product for one in found]
    assert done == [product for product, _ in several]


def test_a_search_that_fails_ends_quietly(cache: TileCache, tmp_path: Path) -> None:
    def fail(_: TileShape) -> float:
        raise RuntimeError("out of memory")

    search = TileSearch([(PRODUCT, START)], MadeUpTimer(fail), cache, H200)
    assert list(search.run()) == []
    assert not search.advance()
    (tmp_path / "file").write_text("not a folder")
    unwritable = TileCache(H200, "triton", tmp_path / "file")
    assert list(TileSearch([(PRODUCT, START)] * 2, MadeUpTimer(work), unwritable, H200).run()) == []


def test_a_product_whose_timing_failed_is_not_timed_again(cache: TileCache) -> None:
    """An error of the device may end the process, at each start if it is tried again."""

    def fail(_: TileShape) -> float:
        raise RuntimeError("an illegal memory access was encountered")

    other = ProductShape(4096, 4096, 2, False, "bfloat16")
    assert list(TileSearch([(PRODUCT, START)], MadeUpTimer(fail), cache, H200).run()) == []
    assert cache.was_cut(PRODUCT)
    timer = MadeUpTimer(work)
    found = list(TileSearch([(PRODUCT, START), (other, START)], timer, cache, H200).run())
    assert [one.product for one in found] == [other]
    assert not cache.was_cut(other)


class OneRequestScheduler:
    """Is busy with what is submitted until it is told to end."""

    def __init__(self, timer: MadeUpTimer) -> None:
        self._timer = timer
        self._timed_before = 0
        self.submitted = threading.Event()
        self.end = threading.Event()
        self.busy = False
        self.disturbed = 0

    def submit(self, generation: Any) -> None:
        self.busy = True
        self._timed_before = len(self._timer.timed)
        self.submitted.set()

    def step(self) -> None:
        time.sleep(0.001)
        self.disturbed += len(self._timer.timed) != self._timed_before
        self.busy = self.busy and not self.end.is_set()

    def drain(self) -> list[Any]:
        return []


def test_requests_come_first_and_closing_ends_the_search(cache: TileCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "IDLE_S", 0.001)
    several = [(product, fit_tile(default_tile(product), product, H200)) for product in products(*SIZES)]
    timer = MadeUpTimer(work, compile_s=0.001)
    search = TileSearch(several, timer, cache, H200)
    scheduler: Any = OneRequestScheduler(timer)
    worker = Worker(scheduler, Outbox(), nullcontext, on_idle=search.advance)
    _wait_until(lambda: len(timer.timed) > 3)
    generation: Any = None
    worker.post(SubmitCommand(generation))
    assert scheduler.submitted.wait(1)
    time.sleep(0.05)
    assert scheduler.disturbed == 0
    before = len(timer.timed)
    scheduler.end.set()
    _wait_until(lambda: len(timer.timed) > before + 3)  # it goes on
    began = time.perf_counter()
    worker.post(CloseCommand())
    worker.join()
    assert time.perf_counter() - began < 1
    timed = len(timer.timed)
    time.sleep(0.05)
    assert len(timer.timed) == timed
    assert len(search.found) < len(several)
    assert timer.threads == {"palaver-engine"}


def _wait_until(condition: Callable[[], bool]) -> None:
    until = time.perf_counter() + 10
    while not condition():
        assert time.perf_counter() < until
        time.sleep(0.001)
