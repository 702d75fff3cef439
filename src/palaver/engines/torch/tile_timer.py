"""Which tiles the products of a model have, and how long they take on CUDA: on the model's own weights, layer by layer
as in a step, so that no weights are in the L2 cache that would not be there in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from palaver.engines.torch.cuda_graphs import CudaGraphCapture
from palaver.engines.torch.cuda_step import DecoderStep
from palaver.engines.torch.forward_probe import KERNELS_VERSION
from palaver.engines.torch.step_weights import Experts, FeedForward, StepLayer, StepModel, TiledProjection
from palaver.engines.torch.tile_cache import TileCache
from palaver.engines.torch.tile_search import SEARCH_S, TileSearch, Timing
from palaver.engines.torch.tile_shapes import (
    FEW_ROWS,
    ROWS,
    SEARCHED_ROWS,
    DeviceLimits,
    ProductShape,
    TileShape,
    fit_tile,
)

SERIES_S = 0.001
"""How long the products of one measurement take together, if there are so many: at least one."""
REPEATS = 3
"""Measurements of which the shortest counts."""


def device_limits(device: torch.device) -> DeviceLimits:
    properties = torch.cuda.get_device_properties(device)
    return DeviceLimits(
        properties.name,
        (properties.major, properties.minor),
        properties.shared_memory_per_block_optin,
        properties.multi_processor_count,
    )


def open_tile_cache(limits: DeviceLimits) -> TileCache:
    return TileCache(limits, f"triton {triton.__version__} kernels {KERNELS_VERSION}")


@dataclass(frozen=True, slots=True)
class Product:
    """The projections of one shape, and what the kernel does besides the product."""

    shape: ProductShape
    """That of a decode step."""
    projections: list[TiledProjection]
    normed: bool = False
    """Whether the input is scaled by a norm."""
    residual: bool = False
    """Whether the result is added to the residual."""
    wide: bool = False
    """Whether the result is float32."""
    softcap: float = 0.0
    prefills: bool = True
    """Whether passes with prompts compute it for all rows."""


def product_shape(projection: TiledProjection, gated: bool = False, rows: int = 0) -> ProductShape:
    packed = projection.packed
    weights = (
        str(projection.weight.dtype).removeprefix("torch.") if packed is None else f"{packed.kind} by {packed.group}"
    )
    period = 0 if packed is None else packed.period
    return ProductShape(projection.outputs, projection.inputs, projection.split, gated, weights, rows, period)


def list_products(model: StepModel) -> list[Product]:
    """Each shape once, with the projections of all layers that have it."""
    products: dict[ProductShape, Product] = {}
    for product in _products(model):
        first = products.setdefault(product.shape, product)
        if first is not product:
            first.projections.extend(product.projections)
    return list(products.values())


def _products(model: StepModel) -> Iterator[Product]:
    for layer in model.layers:
        feed_forward = layer.feed_forward
        yield Product(product_shape(layer.qkv), [layer.qkv], normed=True)
        yield Product(product_shape(layer.output), [layer.output], residual=layer.output_gain is None)
        if isinstance(feed_forward, Experts):
            yield Product(product_shape(feed_forward.router), [feed_forward.router], normed=True, wide=True)
        else:
            gate_up, down = feed_forward.gate_up, feed_forward.down
            yield Product(product_shape(gate_up, gated=True), [gate_up], normed=True)
            yield Product(product_shape(down), [down], residual=layer.result_gain is None)
    head, softcap = model.head, model.logit_softcap
    yield Product(product_shape(head), [head], normed=True, wide=True, softcap=softcap, prefills=False)


def with_tiles(model: StepModel, choose: Callable[[ProductShape, TileShape], TileShape]) -> StepModel:
    """The model with other tiles: `choose` gets the tile that each product has so far."""

    def change(projection: TiledProjection, gated: bool = False) -> TiledProjection:
        shape = product_shape(projection, gated)
        tiles = [(rows, choose(shape.with_rows(rows), projection.prefill_tile(rows))) for rows in SEARCHED_ROWS]
        tiles[-1] = (0, tiles[-1][1])  # for longer passes, too
        tile = choose(shape, projection.tile)
        few = choose(shape.with_rows(FEW_ROWS), projection.few_tile)
        few = few if few.outputs == tile.outputs else tile
        return replace(projection, tile=tile, few_tile=few, prefill_tiles=tuple(tiles))

    def change_feed_forward(feed_forward: FeedForward | Experts) -> FeedForward | Experts:
        if isinstance(feed_forward, Experts):
            return replace(feed_forward, router=change(feed_forward.router))
        return replace(feed_forward, gate_up=change(feed_forward.gate_up, True), down=change(feed_forward.down))

    def change_layer(layer: StepLayer) -> StepLayer:
        feed_forward = change_feed_forward(layer.feed_forward)
        return replace(layer, qkv=change(layer.qkv), output=change(layer.output), feed_forward=feed_forward)

    return replace(model, layers=[change_layer(layer) for layer in model.layers], head=change(model.head))


def with_known_tiles(model: StepModel) -> StepModel:
    """The model with the tiles that were found on this device, and others that the device can run."""
    limits = device_limits(model.embedding.device)
    cache = open_tile_cache(limits)
    found: dict[ProductShape, TileShape | None] = {}

    def choose(product: ProductShape, tile: TileShape) -> TileShape:
        if product not in found:
            found[product] = cache.read(product)
        return found[product] or fit_tile(tile, product, limits)

    return with_tiles(model, choose)


def search_tiles(
    step: DecoderStep, everything: bool = False, seconds: float = SEARCH_S, compilers: int = 1
) -> TileSearch:
    """A search for the products that were tuned nowhere; with `everything`, for all of them."""
    limits = device_limits(step.device)
    cache = open_tile_cache(limits)

    def is_known(product: ProductShape) -> bool:
        return not everything and (product.is_tuned_for(limits) or cache.read(product) is not None)

    products = list_products(step.model)
    left = [
        (shape, _tile(product.projections[0], shape))
        for rows in (0, FEW_ROWS, *SEARCHED_ROWS)
        for product in products
        for shape in (product.shape.with_rows(rows),)
        if (product.prefills or not shape.has_prompts) and not is_known(shape)
    ]
    return TileSearch(left, ProductTimer(step, products), cache, limits, seconds, compilers)


def _tile(projection: TiledProjection, shape: ProductShape) -> TileShape:
    return projection.prefill_tile(shape.rows) if shape.has_prompts else projection.decode_tile(shape.rows or ROWS)


class ProductBuffers:
    """What a product reads and writes besides its weights."""

    def __init__(self, product: Product, rows: int, like: Tensor) -> None:
        def random(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator, dtype=like.dtype, device=like.device)

        generator = torch.Generator(like.device).manual_seed(1)
        outputs, inputs = product.shape.outputs, product.shape.inputs
        self.x = random(rows, inputs)
        self.squares: Tensor | None = None
        if product.normed:
            self.squares = torch.zeros(rows, inputs // 64, dtype=torch.float64, device=like.device)
            self.squares[:, 0] = self.x.double().square().sum(1)
        self.out = torch.zeros(rows, outputs, dtype=torch.float32 if product.wide else like.dtype, device=like.device)
        self._added: Tensor | None = None
        if product.residual:
            self._added = random(rows, outputs)
            self._gain = random(outputs)
            self._scaled = torch.zeros_like(self.out)
            self._squares = torch.zeros(rows * (outputs // 64), dtype=torch.float64, device=like.device)

    def residual(self, tile: TileShape) -> tuple[Tensor, Tensor, Tensor] | None:
        """As in `DecoderStep._linear`."""
        if self._added is None:
            return None
        rows, outputs = self.out.shape
        parts = outputs // tile.outputs
        return self._gain, self._scaled, self._squares[: rows * parts].view(rows, parts)

    def reset(self) -> None:
        """So that each product starts from the same residual."""
        if self._added is not None:
            self.out.copy_(self._added)

    def results(self, tile: TileShape) -> list[Tensor]:
        """Copies of all that a product has written."""
        residual = self.residual(tile)
        if residual is None:
            return [self.out.clone()]
        return [self.out.clone(), self._scaled.clone(), residual[2].sum(1).float()]  # as the next norm takes it


class ProductTimer:
    """Times the products of a step, in the thread that runs it and between its passes."""

    def __init__(self, step: DecoderStep, products: Sequence[Product]) -> None:
        self._step = step
        self._products = {product.shape: product for product in products}
        self._capture: CudaGraphCapture | None = None
        self._buffers: ProductBuffers | None = None
        self._expected: list[Tensor] = []
        """The default's results."""
        self._launches = 1
        """How many products one measurement computes, each with the weights of another layer."""
        self._replay_default: Callable[[], object] = lambda: None

    def prepare(self, product: ProductShape, default: TileShape) -> None:
        self.allocate(product)
        self._expected = self.compute(product, default)
        self._launches = 1
        (seconds,) = self._measure(self._series(product, default))
        layers = len(self._products[product.with_rows(0)].projections)
        self._launches = max(1, min(layers, int(SERIES_S / max(seconds, 1e-6))))
        self._replay_default = self._series(product, default)

    def allocate(self, product: ProductShape) -> None:
        """Makes room for the input and the results of this product alone."""
        self.release()
        known = self._products[product.with_rows(0)]
        self._buffers = ProductBuffers(known, product.rows or ROWS, self._step.model.embedding)

    def compute(self, product: ProductShape, tile: TileShape) -> list[Tensor]:
        """The results with the weights of the first layer, and always the same input."""
        assert self._buffers is not None, "nothing was allocated"
        self._buffers.reset()
        self._launch(product, tile)
        return self._buffers.results(tile)

    def compile(self, product: ProductShape, tile: TileShape) -> None:
        with torch.cuda.device(self._step.device), torch.inference_mode():
            self._launch(product, tile, compile_only=True)

    def time(self, product: ProductShape, tile: TileShape) -> Timing | None:
        try:
            results = self.compute(product, tile)
        except OutOfResources:
            return None
        if not all(map(torch.equal, results, self._expected)):
            return None
        default, seconds = self._measure(self._replay_default, self._series(product, tile))
        return Timing(seconds / self._launches, default / self._launches)

    def release(self) -> None:
        self._buffers = None
        self._expected = []
        self._replay_default = lambda: None

    def _launch(self, product: ProductShape, tile: TileShape, layer: int = 0, compile_only: bool = False) -> None:
        known, buffers = self._products[product.with_rows(0)], self._buffers
        assert buffers is not None, "nothing was allocated"
        prefill = product.has_prompts
        tiles = {"prefill_tiles": ((0, tile),)} if prefill else {"few_tile" if product.rows else "tile": tile}
        projection = replace(known.projections[layer], **tiles)
        self._step._linear(
            projection,
            buffers.x,
            buffers.out,
            squares=buffers.squares,
            residual=buffers.residual(tile),
            gated=product.gated,
            softcap=known.softcap,
            prefill=prefill,
            compile_only=compile_only,
        )

    def _series(self, product: ProductShape, tile: TileShape) -> Callable[[], object]:
        """A graph: launching products one by one takes longer than computing them."""

        def run() -> Tensor:
            assert self._buffers is not None, "nothing was allocated"
            for layer in range(self._launches):
                self._launch(product, tile, layer)
            return self._buffers.out

        self._capture = self._capture or CudaGraphCapture(self._step.device)
        return self._capture(run)

    def _measure(self, *series: Callable[[], object]) -> list[float]:
        """The seconds of each: the shortest of a few. They take turns, so that the device's clock is the same."""
        for replay in series:
            replay()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(len(series) + 1)] for _ in range(REPEATS)]
        for marks in events:
            marks[0].record()
            for replay, mark in zip(series, marks[1:], strict=True):
                replay()
                mark.record()
        events[-1][-1].synchronize()
        return [min(marks[i].elapsed_time(marks[i + 1]) for marks in events) / 1e3 for i in range(len(series))]
