"""Products with weights in panels (products.h), as each kind of processor computes them; those that this one lacks are
skipped."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import palaver.engines.compiled
from palaver.engines.compiled.weights import FLOAT_ARRAYS, QUANTISED
from tests.engines.compiler import needs_a_compiler
from tests.gguf_quants import BLOCKS, dequantise, quantise

pytestmark = needs_a_compiler

Floats = NDArray[np.float32]
HEADERS = Path(palaver.engines.compiled.__file__).parent
CPU = Path("/proc/cpuinfo")
BUILDS = {
    "any": ((), ""),
    "avx2": (("-mavx2", "-mfma", "-mf16c"), "avx2"),
    "avx-vnni": (("-mavx2", "-mfma", "-mf16c", "-mavxvnni"), "avx_vnni"),
    "avx512": (("-march=skylake-avx512",), "avx512bw"),
    "avx512-vnni": (("-march=cascadelake",), "avx512_vnni"),
    "i8mm": (("-march=armv8.2-a+i8mm",), "i8mm"),
}
"""The compiler's flags, and what the processor must have."""
DTYPES = {name: number for number, name in enumerate((*FLOAT_ARRAYS, *QUANTISED))}
OUTPUTS = 100
ROWS = (1, 2, 3, 4, 5, 8, 9, 13)

Library = ctypes.CDLL


@pytest.fixture(scope="module", params=BUILDS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    flags, needed = BUILDS[request.param]
    if needed and needed not in cpu_features():
        pytest.skip(f"this processor has no {needed}")
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
    built = tmp_path_factory.mktemp("products") / "products.so"
    sources = (str(Path(__file__).with_name("products.c")), "-o", str(built), "-lm")
    common = ("-O3", "-std=gnu11", "-ffp-contract=fast", "-Wall", "-Wextra", "-Wno-psabi", "-shared", "-fPIC")
    result = subprocess.run((compiler, *common, *flags, f"-I{HEADERS}", *sources), capture_output=True, text=True)
    if result.returncode and flags and ("unrecognized" in result.stderr or "unknown" in result.stderr):
        pytest.skip("the compiler doesn't know this processor")
    assert not result.returncode, result.stderr
    return ctypes.CDLL(str(built))


@cache
def cpu_features() -> frozenset[str]:
    lines = CPU.read_text("utf-8").splitlines() if CPU.exists() else []
    return frozenset(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())


class Panels:
    """A matrix that is packed into panels."""

    def __init__(self, library: Library, kind: str, weights: Floats) -> None:
        self._library, self._dtype = library, ctypes.c_int64(DTYPES[kind.upper()])
        self._sizes = (ctypes.c_int64(weights.shape[1]), ctypes.c_int64(weights.shape[0]))
        outputs, inputs = reversed(self._sizes)
        if kind == "f32":
            data, self.weights = weights, weights
        else:
            data = quantise(kind, weights)
            self.weights = dequantise(kind, data).reshape(weights.shape)
        data = np.ascontiguousarray(data)
        library.palaver_packed_bytes.restype = ctypes.c_int64
        size = library.palaver_packed_bytes(self._dtype, outputs, inputs)
        memory = np.zeros(size + 64, np.uint8)
        self._packed = memory[-memory.ctypes.data % 64 :][:size]
        library.palaver_pack(self._dtype, pointer(data), outputs, inputs, pointer(self._packed))

    def multiply(self, x: Floats) -> Floats:
        inputs, outputs = self._sizes
        y = np.full((len(x), -(-outputs.value // 64) * 64), np.nan, np.float32)
        rows, x = ctypes.c_int64(len(x)), np.ascontiguousarray(x)
        assert self._library.multiply_rows(
            self._dtype, pointer(self._packed), inputs, outputs, pointer(x), rows, pointer(y)
        )
        assert not y[np.isfinite(x).all(1), outputs.value :].any(), "what fills up a panel has weights of 0"
        return y[:, : outputs.value]

    def read(self, output: int) -> Floats:
        inputs, outputs = self._sizes
        y = np.empty(inputs.value, np.float32)
        number = ctypes.c_int64(output)
        self._library.read_weights(self._dtype, pointer(self._packed), inputs, outputs, number, pointer(y))
        return y


def pointer(array: NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def drawn(seed: int, *shape: int, spread: Callable[[Floats], Floats] = lambda x: x) -> Floats:
    return spread(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def inputs_of(kind: str) -> int:
    """Whole blocks, of which the last lie in a shorter part of a panel where they can."""
    return 768 if BLOCKS.get(kind) == 256 else 800


def matrix_of(library: Library, kind: str) -> Panels:
    return Panels(library, kind, drawn(1, OUTPUTS, inputs_of(kind)))


def rounding_bound(x: Floats, weights: Floats) -> NDArray[np.float64]:
    """How far a product may be from the true one: half a unit of the integers for each number of a row."""
    groups = (len(x), -1, 32)
    unit = np.abs(x).reshape(groups).max(-1) / 32512
    return unit.astype(np.float64) @ np.abs(weights).reshape(len(weights), -1, 32).sum(-1).T / 2


@pytest.mark.parametrize("kind", [*BLOCKS, "f32"])
def test_weights_are_read_as_ggml_says(library: Library, kind: str) -> None:
    panels = matrix_of(library, kind)
    for output in (0, 17, 63, 64, OUTPUTS - 1):
        assert np.array_equal(panels.read(output), panels.weights[output])


@pytest.mark.parametrize("kind", BLOCKS)
def test_products_are_exact_but_for_the_rounding_of_rows(library: Library, kind: str) -> None:
    panels = matrix_of(library, kind)
    for spread in (lambda x: x, lambda x: x**5, lambda x: x * 1e-12, lambda x: x * 1e12):
        x = drawn(2, max(ROWS), inputs_of(kind), spread=spread)
        expected = x.astype(np.float64) @ panels.weights.astype(np.float64).T
        magnitude = np.abs(x).astype(np.float64) @ np.abs(panels.weights).astype(np.float64).T
        error = np.abs(panels.multiply(x) - expected)
        assert (error <= rounding_bound(x, panels.weights) + 1e-5 * magnitude).all()
        assert np.sqrt(np.square(error).mean()) < 1e-4 * np.sqrt(np.square(expected).mean())


@pytest.mark.parametrize("kind", [*BLOCKS, "f32"])
def test_the_number_of_rows_changes_no_bits(library: Library, kind: str) -> None:
    panels, x = matrix_of(library, kind), drawn(3, max(ROWS), inputs_of(kind))
    alone = np.concatenate([panels.multiply(row[None]) for row in x])
    for rows in ROWS:
        assert np.array_equal(panels.multiply(x[:rows]), alone[:rows])


@pytest.mark.parametrize("kind", BLOCKS)
def test_extreme_rows(library: Library, kind: str) -> None:
    """The largest integers of all signs, zeros, and numbers that are none."""
    panels = Panels(library, kind, np.sign(drawn(4, OUTPUTS, inputs_of(kind))) * np.float32(-3))
    x = np.sign(drawn(5, 4, inputs_of(kind)))
    expected = x.astype(np.float64) @ panels.weights.astype(np.float64).T
    np.testing.assert_allclose(panels.multiply(x), expected, rtol=1e-5, atol=1e-3)
    assert not panels.multiply(np.zeros_like(x)).any()
    small = Panels(library, kind, drawn(6, OUTPUTS, inputs_of(kind)) * np.float32(1e-3))
    assert np.isfinite(small.multiply(x * np.float32(1e37))).all()
    for bad in (np.nan, np.inf, -np.inf):
        broken = x.copy()
        broken[1, 40] = bad
        found = panels.multiply(broken)
        assert np.isnan(found[1]).all()
        assert np.array_equal(found[[0, 2, 3]], panels.multiply(x)[[0, 2, 3]])
