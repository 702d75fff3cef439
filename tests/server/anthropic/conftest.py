from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from tests.server.live_server import LiveServer


@pytest.fixture
def client(live: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Another server with the same model and an empty reply index."""
    with LiveServer(tmp_path_factory.mktemp("elsewhere")) as server:
        yield server
