"""What the Triton kernels of a decoder's passes share."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment"

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(bool(os.environ.get("TRITON_INTERPRET")))
"""Triton's interpreter has no assembly."""


def shared_memory(device: torch.device) -> int:
    """Bytes that one program may take."""
    if device.type != "cuda":
        return 1 << 30
    bytes_: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return bytes_


@triton.jit
def prefetch(pointers):
    """Asks the L2 cache for these addresses."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def rounded(x):
    """The same numbers. The compiler would start the sum of a single product of tiles with what is added to it later,
    which rounds differently."""
    if INTERPRETED:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


def next_power(n: int) -> int:
    power: int = triton.next_power_of_2(n)
    return power


def launch_options(pdl: bool, **options: Any) -> dict[str, Any]:
    """Products and sums are never contracted: the same formula gives the same bits in every kernel."""
    return options | {"enable_fp_fusion": False, "PDL": pdl} | ({"launch_pdl": True} if pdl else {})
