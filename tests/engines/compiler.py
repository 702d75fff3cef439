"""Skips tests of compiled steps on machines without a C compiler."""

from __future__ import annotations

import shutil

import pytest

needs_a_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")),
    reason="NO C COMPILER: compiled steps are not tested; install gcc or clang",
)
