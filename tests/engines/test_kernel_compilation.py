"""The CUDA kernels compile for GPUs that are not here, and fit them: in the sizes of real models, with the tiles that
their products have there."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import palaver.engines.torch as package

pytest.importorskip("triton", reason="Triton is not installed: no kernel is compiled")

from tests.engines.interpreter import ALL_ASKED

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = {"8.0": 166912, "9.0": 232448, "10.0": 232448, "12.0": 101376}
"""Bytes that a program may take, by the capability of the device."""
DECODE_ROWS = 32
SPILLED = {
    "_linear": 896,
    "_linear_blocks": 16,
    "_expert_linear": 16,
    "_attend_prefill": 64,
    "_solve_blocks": 3072,
    "_scan_blocks": 16,
    "_decay_and_write": 16,
}
"""Kernels with more numbers than a thread has registers, and how many bytes of them are in memory at most. Products
have them in passes with prompts alone."""


def kernel_names() -> set[str]:
    """All that are launched, and are no functions of others."""
    assert package.__file__ is not None
    return {
        function.name
        for path in Path(package.__file__).parent.glob("*_kernels.py")
        for function in ast.parse(path.read_text()).body
        if isinstance(function, ast.FunctionDef) and "program_id" in ast.unparse(function)
    }


def compile_kernels(capability: str, folder: Path) -> list[dict[str, Any]]:
    """Where the interpreter is on, nothing can be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "tests.engines.compile_kernels", capability, *([] if ALL_ASKED else ["few"])]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(3600 if ALL_ASKED else 300)
@pytest.mark.parametrize("capability", SHARED_MEMORY if ALL_ASKED else ["9.0", "12.0"])
def test_kernels_compile_and_fit_the_device(capability: str, tmp_path: Path) -> None:
    compiled = compile_kernels(capability, tmp_path)
    assert {one["kernel"] for one in compiled} == kernel_names()
    for one in compiled:
        assert not one["error"], one
        assert one["registers"], "what the assembler says of a kernel was not understood"
        assert one["shared"] <= SHARED_MEMORY[capability], one
        decodes = one["constants"].get("BM", DECODE_ROWS + 1) <= DECODE_ROWS
        assert one["spilled"] <= (0 if decodes else SPILLED.get(one["kernel"], 0)), one
