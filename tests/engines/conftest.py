"""Models of the engine tests, made once a session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from palaver.engines.torch import EngineOptions, TorchEngine, load
from tests.engines import tiny

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The files of a family's tiny model."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tiny.make(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


@pytest.fixture(scope="session")
def qwen3() -> Any:
    """The model itself, for the oracle."""
    return tiny.build("qwen3")


@pytest.fixture
async def engine(folder_of: Callable[[str], Path]) -> AsyncIterator[TorchEngine]:
    """Not compiled: that is tried in test_compiled.py, and by all tests of the commands and the server."""
    opened = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=EngineOptions(compiled=False))
    yield opened
    await opened.close()
