"""Tiles of a model's products: they change no bit, and what a search finds is used at the next start. Without a GPU the
products run in Triton's interpreter, over whole numbers, whose sums are exact in any order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton", reason="Triton is not installed: tiles are not tested")

from palaver.engines.torch import tile_cache, tile_timer  # noqa: E402
from palaver.engines.torch.cuda_graphs import CudaGraphCapture  # noqa: E402
from palaver.engines.torch.cuda_step import DecoderStep  # noqa: E402
from palaver.engines.torch.plain_decoder import PlainDecoder  # noqa: E402
from palaver.engines.torch.step_weights import FeedForward, StepModel  # noqa: E402
from palaver.engines.torch.tile_shapes import (  # noqa: E402
    BLOCK_WEIGHTS,
    FEW_ROWS,
    ROWS,
    SEARCHED_ROWS,
    DeviceLimits,
    ProductShape,
    TileShape,
    candidates,
    fit_tile,
    refinements,
)
from palaver.engines.torch.tile_timer import (  # noqa: E402
    ProductTimer,
    list_products,
    product_shape,
    search_tiles,
    with_known_tiles,
    with_tiles,
)

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),  # the interpreter's
]
ON_GPU = DEVICE.type == "cuda"
NEEDS_GPU = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
H200 = DeviceLimits("NVIDIA H200", (9, 0), 232448, 132)


def build_model(
    hidden: int, intermediate: int, dtype: torch.dtype, layers: int = 2, vocabulary: int = 300
) -> StepModel:
    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=vocabulary,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    model = transformers.Qwen3ForCausalLM(config).eval().to(DEVICE, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, hidden**-0.5) if ON_GPU else parameter.copy_(torch.randint(-2, 3, parameter.shape))
    return StepModel.of(PlainDecoder.from_model(model, 256))


def build_step(model: StepModel) -> DecoderStep:
    pdl = ON_GPU and torch.cuda.get_device_capability() >= (9, 0)
    return DecoderStep(model, True, CudaGraphCapture(DEVICE) if ON_GPU else None, 4, pdl)


def limits() -> DeviceLimits:
    return tile_timer.device_limits(DEVICE) if ON_GPU else H200


def tiles_of(product: ProductShape, start: TileShape) -> list[TileShape]:
    first = candidates(product, start, limits())
    later = [tile for better in (start, *first[:2]) for tile in refinements(product, better, limits())]
    return list(dict.fromkeys((*first, *later)))


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tile_cache, "_default_folder", lambda: tmp_path)
    return tmp_path


def test_products_of_one_shape_are_listed_once_with_all_layers() -> None:
    model = build_model(128, 192, torch.float32, layers=3)
    products = {product.shape: product for product in list_products(model)}
    layer = model.layers[0]
    assert isinstance(layer.feed_forward, FeedForward)
    assert list(products) == [
        product_shape(layer.qkv),
        product_shape(layer.output),
        product_shape(layer.feed_forward.gate_up, gated=True),
        product_shape(layer.feed_forward.down),
        product_shape(model.head),
    ]
    assert [len(product.projections) for product in products.values()] == [3, 3, 3, 3, 1]
    assert [product.residual for product in products.values()] == [False, True, False, True, False]
    assert [product.prefills for product in products.values()] == [True, True, True, True, False]


def test_tiles_are_replaced_everywhere_and_others_stay() -> None:
    model = build_model(128, 192, torch.float32)
    same = with_tiles(model, lambda _, tile: tile)
    for before, after in zip(_projections(model), _projections(same), strict=True):
        assert after.tile == before.tile
        assert after.few_tile == before.few_tile
        assert after.weight is before.weight
        for rows in (1, *SEARCHED_ROWS, 129, 300, 5000):
            assert after.prefill_tile(rows) == before.prefill_tile(rows)
    marked = with_tiles(model, lambda product, tile: tile._replace(stages=product.rows + 1))
    for projection in _projections(marked):
        assert projection.tile.stages == 1
        assert projection.decode_tile(FEW_ROWS).stages == FEW_ROWS + 1
        assert projection.decode_tile(FEW_ROWS + 1) == projection.tile
        for rows, taken in ((7, 128), (128, 128), (129, 256), (1024, 1024), (5000, 1024)):
            assert projection.prefill_tile(rows).stages == taken + 1


def _projections(model: StepModel) -> Iterator[Any]:
    for layer in model.layers:
        assert isinstance(layer.feed_forward, FeedForward)
        yield from (layer.qkv, layer.output, layer.feed_forward.gate_up, layer.feed_forward.down)
    yield model.head


@pytest.mark.parametrize("rows", [0, FEW_ROWS, 256, 512] if ON_GPU else [0, FEW_ROWS, 128])
def test_no_candidate_changes_a_bit(rows: int) -> None:
    model = build_model(*(1024, 3072, torch.bfloat16) if ON_GPU else (128, 1536, torch.float32))
    step = build_step(model)
    products = list_products(model)
    assert any(product.shape.split > 1 for product in products)
    timer = ProductTimer(step, products)
    with torch.inference_mode():
        for product in products:
            if rows <= FEW_ROWS or product.prefills:
                _check_bits(timer, product.shape.with_rows(rows), product.projections[0])


def _check_bits(timer: ProductTimer, product: ProductShape, projection: Any) -> None:
    start = (
        projection.prefill_tile(product.rows) if product.has_prompts else projection.decode_tile(product.rows or ROWS)
    )
    start = fit_tile(start, product, limits())
    tiles = tiles_of(product, start)
    assert tiles
    if product.has_prompts and product.split == 1 and product.outputs % BLOCK_WEIGHTS == 0:
        assert any(tile.has_blocks for tile in tiles)
    timer.allocate(product)
    if ON_GPU:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda tile: timer.compile(product, tile), tiles))
    else:
        buffers = timer._buffers
        assert buffers is not None
        for tensor in (buffers.x, buffers._added):
            if tensor is not None:
                tensor.copy_(torch.randint(-2, 3, tensor.shape))
    expected = timer.compute(product, start)
    assert expected[0].abs().sum() > 0
    for tile in tiles:
        for one, other in zip(timer.compute(product, tile), expected, strict=True):
            assert torch.equal(one, other), (product, tile)


def test_all_products_that_are_summed_in_parts_have_room_for_their_sums() -> None:
    model = build_model(1536, 192, torch.float32, layers=1, vocabulary=1000)
    step, head = build_step(model), model.head
    others = [one.outputs * one.split for one in model.layers[0].projections if one.split > 1]
    sums = head.outputs * head.split
    assert head.split > 1
    assert sums > 2 * max(others)  # the small vocabulary of a wide model
    assert step._partials.numel() >= sums * head.decode_tile(step.max_rows).rows
    assert step._counters.numel() >= head.outputs // head.tile.outputs


@pytest.mark.parametrize(("gated", "outputs"), [(False, 96), (True, 192)])
def test_a_tile_of_the_other_kind_of_product_is_refused(gated: bool, outputs: int) -> None:
    """It would write past the end of the results."""
    step = build_step(build_model(192, 192, torch.float32))
    found = (product for product in list_products(step.model) if product.shape.outputs == BLOCK_WEIGHTS)
    product = next(product for product in found if product.shape.gated == gated)
    timer = ProductTimer(step, [product])
    shape = product.shape.with_rows(128)
    timer.allocate(shape)
    with pytest.raises(AssertionError, match="the other kind"):
        timer.compute(shape, TileShape(64, outputs, 64, 3))


class HostEvent:
    """The host's clock in place of the device's."""

    def __init__(self, enable_timing: bool) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: HostEvent) -> float:
        return (end._at - self._at) * 1e3


@pytest.mark.skipif(ON_GPU, reason="the same with the device's clock is another test")
def test_a_search_without_a_device(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    other = DeviceLimits("NVIDIA H100", (9, 0), 232448, 132)
    monkeypatch.setattr(tile_timer, "device_limits", lambda _: other)
    monkeypatch.setattr(tile_timer, "CudaGraphCapture", lambda _: lambda run: run)
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    monkeypatch.setattr(ProductTimer, "compile", lambda *_: None)
    model = build_model(128, 192, torch.float32)
    with torch.inference_mode():
        found = []
        for one in search_tiles(build_step(with_known_tiles(model)), seconds=60).run():
            found.append(one)
            if len(found) == 3:
                break
        after = build_step(with_known_tiles(model))
    known = {one.product: one.tile for one in found}
    assert list(known) == [product.shape for product in list_products(model)][:3]
    assert all(one.tried > 2 and one.default_seconds > 0 and one.ratio <= 1 for one in found)
    for product in list_products(after.model)[:3]:
        assert {projection.tile for projection in product.projections} == {known[product.shape]}
    assert len(list(cache_folder.rglob("*.json"))) == 3


@NEEDS_GPU
def test_what_is_found_is_used_at_the_next_start_and_changes_no_logit(cache_folder: Path) -> None:
    torch.manual_seed(2)
    model = build_model(1024, 3072, torch.bfloat16)
    with torch.inference_mode():
        before = build_step(with_known_tiles(model))
        search = search_tiles(before, everything=True, seconds=40, compilers=8)
        found = list(search.run())
        assert not any(one.rejected for one in found)
        assert found
        after = build_step(with_known_tiles(model))
        known = {one.product: one.tile for one in found}
        for product in list_products(after.model):
            if product.shape in known:
                assert {projection.tile for projection in product.projections} == {known[product.shape]}
        x = torch.randn(ROWS, 1024, device=DEVICE, dtype=torch.bfloat16)
        logits = []
        for step in (before, after):
            squares = torch.zeros(ROWS, 1, dtype=torch.float64, device=DEVICE)
            squares[:, 0] = x.double().square().sum(1)
            out = torch.zeros(ROWS, step.model.head.outputs, device=DEVICE)
            step._linear(step.model.head, x, out, squares=squares)
            logits.append(out)
        assert torch.equal(*logits)
        left = search_tiles(after, compilers=8, seconds=0.1)
        assert not {one.product for one in left.run()} & set(known)
    assert len(list(cache_folder.rglob("*.json"))) >= len(found)


@NEEDS_GPU
def test_a_part_of_a_search_is_short() -> None:
    model = build_model(1024, 3072, torch.bfloat16, layers=8)
    with torch.inference_mode():
        step = build_step(with_known_tiles(model))
        search = search_tiles(step, everything=True, seconds=20)
        parts = []
        for _ in range(60):
            began = time.perf_counter()
            more = search.advance()
            parts.append(time.perf_counter() - began)
            if not more:
                break
            if search._awaited is not None:
                search._awaited.exception()
    parts.sort()
    assert parts[len(parts) // 2] < 0.02, parts
