from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from httpx import create_ssl_context
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are too small for more threads, and tests run side by side

from tests.models import make_model

gc.disable()  # until all is imported and collected: looking for garbage in it takes a quarter of that time
settings.register_profile("palaver", deadline=None)  # a test must not depend on the processor's speed
settings.load_profile("palaver")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session", autouse=True)
def shared_certificates() -> Iterator[None]:
    """Reads the certificates of the authorities once, and not for each HTTP client: that takes 20 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", cache(create_ssl_context))
        yield


TESTS = Path(__file__).parent
COMPUTING = ("engines", "formats", "training")
LONGEST = TESTS / "web" / "test_never_lost.py"
"""Of the files with a browser: were it among the last, the other workers would wait for it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets files that compute and files that wait for processes take turns, so that no processor is idle for long.

    The browser tests come last: their driver holds an event loop, and no other test can run one beside it."""
    browsing = {item.path for item in items if isinstance(item, pytest.Function) and "playwright" in item.fixturenames}
    groups: dict[tuple[bool, bool], list[Path]] = {}
    for path in sorted(dict.fromkeys(item.path for item in items), key=lambda path: path != LONGEST):
        computes = path.relative_to(TESTS).parts[0] in COMPUTING
        groups.setdefault((path in browsing, computes), []).append(path)
    order = {
        path: (browses, number / len(paths))
        for (browses, _), paths in groups.items()
        for number, path in enumerate(paths)
    }
    items.sort(key=lambda item: order[item.path])


def pytest_collection_finish() -> None:
    """What was imported stays, and is not looked through again."""
    gc.freeze()
    gc.enable()
