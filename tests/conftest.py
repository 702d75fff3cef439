from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import make_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The browser's tests come last: their driver holds an event loop for as long as it lives, beside which no other
    test can have one. The longest of them goes first, so that nobody waits for it alone at the end."""
    items.sort(key=lambda item: ("web" in item.path.parts, item.path.name != "test_long_reply.py"))
