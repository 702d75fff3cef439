from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from types import CodeType

import pytest

from palaver.formats.template import Sandbox

compile_source = Sandbox.compile


@lru_cache(maxsize=512)
def _compile_once(source: str) -> CodeType:
    return compile_source(Sandbox(), source)


@pytest.fixture(scope="session", autouse=True)
def templates_are_compiled_once() -> Iterator[None]:
    """Many tests make a format of the same template, and most of that time is its compilation. The code is the same
    for every sandbox."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sandbox, "compile", lambda sandbox, source: _compile_once(source))
        yield
