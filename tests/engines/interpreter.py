"""Triton's interpreter, which computes kernels where there is no GPU (`conftest.py`), made quicker."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

ALL_ASKED = os.environ.get("PALAVER_KERNELS") == "all"
EVERY_CASE = torch.cuda.is_available() or ALL_ASKED
"""Whether all cases of the tests of kernels run. Without a GPU that takes minutes more."""


class PatchOnce:
    """In place of the interpreter's `_patch_lang`, which gives the functions of Triton's language their meaning for
    numpy at each call of a kernel, and again at each call of a function inside of it."""

    def __init__(self, patch: Any) -> None:
        self._patch = patch
        self._patched: set[Any] = set()
        self._modules: dict[Any, frozenset[Any]] = {}

    def __call__(self, function: Any) -> Any:
        if function not in self._modules:
            found = function.__globals__.values()
            self._modules[function] = frozenset(one for one in (tl, tl.core) if any(value is one for value in found))
        modules, outermost = self._modules[function], not self._patched
        if modules <= self._patched:
            return None
        self._patched |= modules
        scope = self._patch(function)
        return _Scope(scope, self._patched) if outermost else scope


class _Scope:
    def __init__(self, scope: Any, patched: set[Any]) -> None:
        self._scope = scope
        self._patched = patched

    def restore(self) -> None:
        self._patched.clear()
        self._scope.restore()


def topk(x: Any, k: Any) -> Any:
    """Triton's own sorts by a network of hundreds of operations."""
    k = k.value if isinstance(k, tl.constexpr) else k
    largest = np.sort(x.handle.data)[..., ::-1][..., :k]
    return tl.tensor(interpreter.TensorHandle(np.ascontiguousarray(largest), x.dtype), tl.block_type(x.dtype, [k]))


def speed_up() -> None:
    """Spares the interpreter most of its work. Checks of overflows go, too: numbers of the tests are small."""
    if not isinstance(interpreter._patch_lang, PatchOnce):
        interpreter._patch_lang = PatchOnce(interpreter._patch_lang)
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
        tl.topk = topk
