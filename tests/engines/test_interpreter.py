"""What `interpreter.py` puts in the place of Triton's own functions gives the same."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed: its interpreter is not tested")
import triton.language as tl  # noqa: E402

pytestmark = pytest.mark.usefixtures("interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _sort(x_ptr, own_ptr, quick_ptr, SIZE: tl.constexpr, KEEP: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(x_ptr + tl.arange(0, SIZE))
    place = tl.arange(0, KEEP)
    tl.store(own_ptr + place, tl.standard.topk(x, KEEP))
    tl.store(quick_ptr + place, tl.topk(x, KEEP))


def test_the_greatest_numbers_are_those_that_triton_sorts() -> None:
    numbers = torch.randint(-(2**62), 2**62, (64,), generator=torch.Generator().manual_seed(1), device="cpu")
    own, quick = (torch.zeros(8, dtype=torch.int64, device=DEVICE) for _ in range(2))
    _sort[(1,)](numbers.to(DEVICE), own, quick, SIZE=64, KEEP=8)
    assert own.tolist() == sorted(numbers.tolist(), reverse=True)[:8]
    assert torch.equal(own, quick)
