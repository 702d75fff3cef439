"""How the products of a CUDA step are divided into tiles: the shapes, those that were tuned, and those that a search
tries on a device.

A tile never changes a bit of a result. Each sum runs over the inputs in one order, in parts whose number follows from
the sizes alone (`ProductShape.split`). Vectors are not searched: their shapes are part of the order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

ROWS = 32
"""Rows of a tile in a decode step."""
FEW_ROWS = 16
"""Rows up to which a decode step may have tiles of so many."""
HEAD_SIZES = (32, 64, 128, 256)
"""Those of attention that the kernels compute."""


class TileShape(NamedTuple):
    """How a product is divided. Only the number of parts of K changes bits, and it follows from the sizes alone."""

    rows: int
    outputs: int
    depth: int
    stages: int
    warps: int = 4
    distance: int = 0
    early: bool = False

    @property
    def has_blocks(self) -> bool:
        """Whether a program computes three blocks of 64 weights."""
        return self.outputs % 3 == 0

    def suits(self, gated: bool) -> bool:
        """Whether a product of this kind can have the tile: three blocks have as many weights whether gated or not."""
        return not self.has_blocks or self.outputs * (2 if gated else 1) == BLOCK_WEIGHTS


PrefillTiles = tuple[tuple[int, TileShape], ...]
"""By the number of rows up to which each is taken; 0: for all others."""


class VectorShape(NamedTuple):
    """How the product with a single row is divided."""

    outputs: int
    depth: int
    warps: int
    ahead: int = 0


TUNED_DEVICE = "NVIDIA H200"
"""The device of the tables below. Elsewhere they are where a search starts."""
TILES: dict[tuple[int, int], TileShape] = {
    (6144, 4096): TileShape(ROWS, 64, 128, 6),
    (4096, 4096): TileShape(ROWS, 64, 128, 5, 4, 1, True),
    (12288, 4096): TileShape(ROWS, 64, 64, 3),
    (4096, 12288): TileShape(ROWS, 64, 128, 5, 4, 1, True),
    (4096, 1024): TileShape(ROWS, 64, 128, 4, 4, 8),
    (1024, 2048): TileShape(ROWS, 64, 128, 4, 4, 8),
    (3072, 1024): TileShape(ROWS, 64, 64, 5, 4, 16),
    (1024, 3072): TileShape(ROWS, 64, 128, 3, 4, 6),
    (151936, 1024): TileShape(ROWS, 64, 128, 3, 4, 1),
}
"""By the numbers of outputs and inputs: what was quickest on an H200."""
TUNED_GATED = frozenset({(12288, 4096), (3072, 1024)})
"""Those of them that were tuned as products of gate and up; the others were tuned as products that are not gated."""
FEW_TILES: dict[tuple[int, int], TileShape] = {
    (6144, 4096): TileShape(FEW_ROWS, 64, 128, 5, 4, 1),
    (12288, 4096): TileShape(FEW_ROWS, 64, 64, 4, 4, 1),
    (4096, 1024): TileShape(FEW_ROWS, 64, 128, 4, 4, 8),
    (1024, 2048): TileShape(FEW_ROWS, 64, 128, 5, 4, 16),
    (3072, 1024): TileShape(FEW_ROWS, 64, 64, 6, 4, 16),
    (1024, 3072): TileShape(FEW_ROWS, 64, 128, 5, 4, 4),
    (151936, 1024): TileShape(FEW_ROWS, 64, 64, 6),
}
"""The same for at most FEW_ROWS rows; other sizes have the tile of all decode steps."""
MIXED_TILES: dict[tuple[int, int], PrefillTiles] = {
    (6144, 4096): (
        (128, TileShape(64, 64, 64, 6)),
        (256, TileShape(64, 192, 64, 6)),
        (512, TileShape(128, 192, 64, 5, 8)),
        (0, TileShape(256, 192, 64, 4, 8)),
    ),
    (4096, 4096): (
        (128, TileShape(64, 64, 128, 5)),
        (256, TileShape(64, 64, 64, 6)),
        (0, TileShape(128, 128, 64, 5, 8)),
    ),
    (12288, 4096): ((128, TileShape(128, 96, 64, 4, 8)), (0, TileShape(256, 96, 64, 4, 8))),
    (4096, 12288): (
        (128, TileShape(64, 64, 128, 6)),
        (256, TileShape(128, 64, 128, 4)),
        (0, TileShape(128, 128, 64, 5, 8)),
    ),
    (4096, 1024): (
        (128, TileShape(64, 64, 128, 4)),
        (256, TileShape(64, 128, 64, 4, 8)),
        (512, TileShape(128, 128, 64, 4, 8)),
    ),
    (1024, 2048): ((512, TileShape(64, 64, 128, 4)), (0, TileShape(64, 128, 64, 5, 8))),
    (3072, 1024): (
        (128, TileShape(64, 64, 64, 6)),
        (256, TileShape(64, 96, 64, 5)),
        (512, TileShape(128, 96, 64, 4, 8)),
        (0, TileShape(256, 96, 64, 3, 8)),
    ),
    (1024, 3072): ((512, TileShape(64, 64, 128, 4)), (0, TileShape(64, 128, 64, 5, 8))),
}
"""The same for passes with prompts. Tiles of three blocks suit one kind of product only: see `prefill_tiles`."""
VECTORS: dict[tuple[int, int], VectorShape] = {
    (6144, 4096): VectorShape(4, 4096, 8),
    (4096, 4096): VectorShape(8, 2048, 8),
    (12288, 4096): VectorShape(4, 1024, 4),
    (4096, 12288): VectorShape(4, 4096, 8),
    (151936, 4096): VectorShape(4, 4096, 8, 264),
    (4096, 1024): VectorShape(2, 1024, 2),
    (1024, 2048): VectorShape(4, 2048, 4, 264),
    (3072, 1024): VectorShape(4, 1024, 2, 132),
    (1024, 3072): VectorShape(4, 4096, 8, 264),
    (151936, 1024): VectorShape(4, 1024, 2, 528),
}
"""The same for single rows."""

SEARCHED_ROWS = (128, 256, 512, 1024)
"""Numbers of rows of passes with prompts that have a tile each; the last one's is for all longer passes, too."""
PACKED_ROWS = 128
"""Rows of a pass with prompts up to which products read packed weights; one of SEARCHED_ROWS. For more rows a layer's
weights are unpacked first, and products read floats.

On an H200, for the 8B shape, unpacked weights are 1.02 to 1.5 times as quick with 128 rows, 1.5 to 1.8 times with 512
and 1.7 to 2.1 times with 1,024."""
SCALED_TILES = (TileShape(128, 64, 64, 3), TileShape(64, 64, 64, 3))
"""For unpacked weights with scales of groups, and the same for gate and up. Beside each sum they hold that of a group,
and a program waits for its products before it scales them: so small that several programs share a processor."""
SCALED_STAGES = (2, 3)
"""Stages that are tried for them."""
PLAIN_WEIGHTS = ("bfloat16", "float16", "float32")
DEPTH_STAGES = {64: (4, 6), 128: (3, 4, 5), 256: (3,)}
"""Stages that are tried in a decode step, by the depth of a tile."""
DISTANCES = (1, 4, 8, 16)
BLOCK_WEIGHTS = 192
"""Weights of a program that computes blocks: three of 64."""
PREFILL_TILES = (
    TileShape(64, 64, 64, 5),
    TileShape(64, 64, 128, 4),
    TileShape(64, 128, 64, 4, 8),
    TileShape(64, 128, 128, 3, 8),
    TileShape(128, 64, 64, 4),
    TileShape(128, 128, 64, 3, 8),
    TileShape(128, 128, 64, 4, 8),
    TileShape(128, 256, 64, 3, 8),
    TileShape(256, 128, 64, 3, 8),
)
BLOCK_TILES = [
    TileShape(64, BLOCK_WEIGHTS, 64, 6),
    TileShape(128, BLOCK_WEIGHTS, 64, 4, 8),
    TileShape(256, BLOCK_WEIGHTS, 64, 3, 8),
]
MANY_ROWS = 256
"""Rows of a pass from which tiles of more than 128 rows are tried."""
MAX_STAGES = 6
MIN_STAGES = 2
MAX_ACCUMULATORS = 128
"""Registers of a thread that hold sums."""
MAX_BLOCK_ACCUMULATORS = 192
"""The same where a program computes blocks from shared memory: their sums are finished one after the other. Elsewhere
operands are in registers, too."""
RESERVED_SHARED = 1024
"""Bytes of shared memory that barriers may take beside the tiles."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What a device has for a program."""

    name: str
    capability: tuple[int, int]
    shared_memory: int
    """Bytes that one program may take."""
    processors: int

    @property
    def has_dependent_launch(self) -> bool:
        """Whether a kernel may start while the one before it ends."""
        return self.capability >= (9, 0)

    @property
    def multiplies_shared(self) -> bool:
        """Whether products are computed from shared memory; elsewhere the last stage is in registers."""
        return self.capability[0] in (9, 10, 11)

    @property
    def max_distance(self) -> int:
        """How far ahead a loop may ask the L2 for weights: Triton 3.6 does not compile such loops for these devices."""
        return 1 if self.capability[0] in (10, 11) else max(DISTANCES)


@dataclass(frozen=True, slots=True)
class ProductShape:
    """What the tile of a product is chosen by."""

    outputs: int
    inputs: int
    split: int
    """In how many parts the inputs are summed."""
    gated: bool
    weights: str
    """Their dtype, and how many of them share a scale if they are quantised."""
    rows: int = 0
    """Of a pass with prompts; FEW_ROWS: of a decode step of at most so many; 0: of any decode step."""
    period: int = 0
    """After how many inputs sums are multiplied by a scale; 0: after all, or never."""

    @property
    def has_prompts(self) -> bool:
        """Whether it belongs to a pass with prompts."""
        return self.rows > FEW_ROWS

    @property
    def is_plain(self) -> bool:
        """Whether the weights are not quantised."""
        return self.weights in PLAIN_WEIGHTS

    @property
    def is_unpacked(self) -> bool:
        """Whether the weights are quantised, and become floats before the product."""
        return not self.is_plain and self.rows > PACKED_ROWS

    @property
    def reads_floats(self) -> bool:
        """Whether the weights are not packed. Packed ones are stored in blocks and groups, which set the sizes of a
        tile: only its stages are searched."""
        return self.is_plain or self.is_unpacked

    def with_rows(self, rows: int) -> ProductShape:
        return replace(self, rows=rows)

    def is_tuned_for(self, limits: DeviceLimits) -> bool:
        """Whether the tables hold the quickest tiles on this device."""
        sizes = self.outputs, self.inputs
        known = sizes in TILES and self.gated == (sizes in TUNED_GATED)
        return known and self.weights == "bfloat16" and limits.name == TUNED_DEVICE

    def shared_memory(self, tile: TileShape, limits: DeviceLimits) -> int:
        """The bytes that a program takes, at most."""
        itemsize = 4 if self.weights == "float32" else 2
        bits = 8 * itemsize if self.reads_floats else 4 if self.weights.startswith("int4") else 8
        lines = tile.outputs * (2 if self.gated else 1)
        stages = tile.stages if limits.multiplies_shared else max(1, tile.stages - 1)
        return stages * self._step(tile) * (lines * bits // 8 + tile.rows * itemsize) + RESERVED_SHARED

    def _step(self, tile: TileShape) -> int:
        """The inputs of one step of a product."""
        return max(tile.depth, self.period) if self.is_unpacked else tile.depth

    def allows(self, tile: TileShape, limits: DeviceLimits) -> bool:
        """Whether the kernels compute the product in such tiles on the device.

        Eight warps need 128 outputs: each group of four multiplies 64 of them, by the same instruction for all tiles.
        """
        prefill = self.has_prompts
        sums = (2 if self.gated else 1) * (2 if self.is_unpacked and self.period else 1)
        accumulators = tile.rows * tile.outputs * sums // (32 * max(1, tile.warps))
        blocks = tile.has_blocks and limits.multiplies_shared
        return (
            tile.rows in ((64, 128, 256) if prefill else (ROWS, self.rows or ROWS))
            and (self._allows_blocks(tile) if tile.has_blocks else tile.outputs in (64, 128, 256))
            and self.outputs % tile.outputs == 0
            and (tile.depth in DEPTH_STAGES or not self.reads_floats)
            and self.inputs // self.split % self._step(tile) == 0
            and 1 <= tile.stages <= MAX_STAGES
            and self.shared_memory(tile, limits) <= limits.shared_memory
            and (tile.warps == 4 or (tile.warps == 8 and (tile.outputs > 64 or not self.reads_floats)))
            and accumulators <= (MAX_BLOCK_ACCUMULATORS if blocks else MAX_ACCUMULATORS)
            and 0 <= tile.distance <= (0 if prefill else limits.max_distance)
            and not (tile.early and (prefill or not limits.has_dependent_launch))
        )

    def _allows_blocks(self, tile: TileShape) -> bool:
        return self.has_prompts and self.is_plain and self.split == 1 and tile.suits(self.gated)


def prefill_tiles(outputs: int, inputs: int, split: int, gated: bool) -> PrefillTiles:
    """Of passes with prompts, for weights that are floats: those of the table that suit the kind of the product, and a
    default for the other numbers of rows."""
    wide = TileShape(128, 128, 64, 3 if split == 1 and not gated else 4, 8)
    last = wide if outputs % 128 == 0 else TileShape(128, 64, 64, 3)
    tuned = MIXED_TILES.get((outputs, inputs), ())
    return (*(entry for entry in tuned if entry[1].suits(gated)), (0, last))


def fit_tile(tile: TileShape, product: ProductShape, limits: DeviceLimits) -> TileShape:
    """The tile, or the nearest to it that the device allows; the tile itself where none is known."""
    tile = tile._replace(
        distance=min(tile.distance, limits.max_distance), early=tile.early and limits.has_dependent_launch
    )
    for shape in (tile, *_smaller_tiles(tile, product)):
        for stages in range(shape.stages, 0, -1):
            fitting = shape._replace(stages=stages)
            if product.allows(fitting, limits):
                return fitting
    return tile


def _smaller_tiles(tile: TileShape, product: ProductShape) -> Iterator[TileShape]:
    """Those that a product starts from where the device does not allow its tile in any number of stages."""
    if not product.reads_floats:
        return
    if product.has_prompts:
        yield tile._replace(rows=tile.rows // 2)
    yield TileShape(64 if product.has_prompts else ROWS, 64, 64, 4)


def candidates(product: ProductShape, start: TileShape, limits: DeviceLimits) -> list[TileShape]:
    """The shapes that a search tries first, besides the one it starts from."""
    if not product.reads_floats:
        found: Iterable[TileShape] = (start._replace(stages=stages) for stages in range(MIN_STAGES, MAX_STAGES + 1))
    elif product.has_prompts:
        found = _prefill_tiles(product, limits)
    else:
        found = _decode_tiles(product, limits)
    return _distinct(found, product, start, limits)


def refinements(product: ProductShape, best: TileShape, limits: DeviceLimits) -> list[TileShape]:
    """What a search tries next, from the quickest shape so far."""
    found = [best._replace(stages=best.stages + more) for more in (-1, 1)]
    if product.is_plain and not product.has_prompts:
        found += [best._replace(distance=distance) for distance in DISTANCES]
        found += [best._replace(distance=1, early=True), best._replace(early=True)]
    return _distinct(found, product, best, limits)


def _decode_tiles(product: ProductShape, limits: DeviceLimits) -> Iterator[TileShape]:
    wide = product.outputs // 128 * product.split >= limits.processors
    for outputs in (64, 128) if wide else (64,):
        for depth, counts in DEPTH_STAGES.items():
            for stages in counts:
                yield TileShape(product.rows or ROWS, outputs, depth, stages)


def _prefill_tiles(product: ProductShape, limits: DeviceLimits) -> Iterator[TileShape]:
    blocks = [tile._replace(outputs=tile.outputs // 2) for tile in BLOCK_TILES] if product.gated else BLOCK_TILES
    for tile in (*PREFILL_TILES, *blocks):
        if product.is_unpacked and product.period:
            yield from (tile._replace(stages=stages) for stages in SCALED_STAGES)
        elif tile.rows <= 128 or product.rows >= MANY_ROWS:
            stages = range(tile.stages, MIN_STAGES - 1, -1)
            fitting = (tile._replace(stages=count) for count in stages)
            yield next((found for found in fitting if product.allows(found, limits)), tile)


def _distinct(
    tiles: Iterable[TileShape], product: ProductShape, but: TileShape, limits: DeviceLimits
) -> list[TileShape]:
    """Those that the device allows, each once."""
    return [tile for tile in dict.fromkeys(tiles) if tile != but and product.allows(tile, limits)]
