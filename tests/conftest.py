from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are too small for more threads, and tests run side by side

from tests.models import make_model

gc.disable()  # until all is imported and collected: looking for garbage in it takes a quarter of that time
settings.register_profile("palaver", deadline=None)  # a test must not depend on the processor's speed
settings.load_profile("palaver")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the browser tests last: their driver holds an event loop, and no other test can run one beside it."""
    items.sort(key=lambda item: "web" in item.path.parts)


def pytest_collection_finish() -> None:
    """What was imported stays, and is not looked through again."""
    gc.freeze()
    gc.enable()
