"""Models of the engine tests, made once a session."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported, and transformers may do that

from palaver.engines.torch import EngineOptions, TorchEngine, load
from palaver.generation import Prompt
from palaver.sampling import Sampling
from tests.engines import tiny
from tests.engines.reference import Reference, reference

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def interpreter() -> None:
    """Without a GPU kernels run in Triton's interpreter."""
    if not torch.cuda.is_available():
        from tests.engines.interpreter import speed_up

        speed_up()


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


@pytest.fixture(scope="session")
def oracle(qwen3: Any) -> Callable[..., Reference]:
    """Replies of that model, computed plainly."""
    references: dict[Any, Reference] = {}

    def say(prompt: Prompt, sampling: Sampling, choice: int) -> Reference:
        key = (prompt.context_ids, sampling, choice)
        if key not in references:
            references[key] = reference(qwen3, prompt, sampling, choice)
        return references[key]

    return say


@pytest.fixture
async def engine(folder_of: Callable[[str], Path]) -> AsyncIterator[TorchEngine]:
    """Not compiled: that is tried in test_compiled.py, and by all tests of the commands and the server."""
    opened = load(folder_of("qwen3"), vocabulary=tiny.VOCABULARY, options=EngineOptions(compiled=False))
    yield opened
    await opened.close()
