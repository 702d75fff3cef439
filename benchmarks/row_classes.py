"""Prints which numbers of rows round alike in a linear layer, and whether a row's place among them matters.

The first row of a product has the same bits for all row counts of one class. A processor in disguise shows other
classes, for example:

    MKL_CBWR=COMPATIBLE python benchmarks/row_classes.py
    ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/row_classes.py
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

SHAPES = ((64, 96), (256, 768), (1024, 3072))
"""Inputs and outputs of the layers."""


def classes_of(weight: Tensor, most: int) -> list[list[int]]:
    """Row counts by the bits of their first row, in the order they appear."""
    x = torch.randn(most, weight.shape[0], dtype=weight.dtype, device=weight.device)
    found: list[tuple[Tensor, list[int]]] = []
    for rows in range(1, most + 1):
        first = torch.mm(x[:rows], weight)[0]
        same = next((counts for bits, counts in found if torch.equal(bits, first)), None)
        if same is None:
            found.append((first, [rows]))
        else:
            same.append(rows)
    return [counts for _, counts in found]


def places_matter(weight: Tensor, rows: int) -> bool:
    """Whether equal rows of one product differ."""
    row = torch.randn(1, weight.shape[0], dtype=weight.dtype, device=weight.device)
    out = torch.mm(row.expand(rows, -1).contiguous(), weight)
    return not torch.equal(out, out[:1].expand_as(out))


def _ranges(counts: list[int]) -> str:
    parts: list[list[int]] = []
    for count in counts:
        if parts and count == parts[-1][1] + 1:
            parts[-1][1] = count
        else:
            parts.append([count, count])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=40, help="The greatest number of rows tried.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {asked.device}, {asked.dtype}")
    for inputs, outputs in SHAPES:
        weight = torch.randn(inputs, outputs, dtype=getattr(torch, asked.dtype), device=asked.device)
        classes = "; ".join(f"{{{_ranges(counts)}}}" for counts in classes_of(weight, asked.most))
        moved = [rows for rows in (2, 4, 8, 16, 32) if places_matter(weight, rows)]
        print(f"{inputs} to {outputs}: {classes}; a row's place matters among: {_ranges(moved) or 'none of 2 to 32'}")


if __name__ == "__main__":
    main()
