"""The in-process Chat: the conformance suite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.chat.conformance import *  # noqa: F403
from tests.chat.scripted_service import Stage, open_stage


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with open_stage(tmp_path) as stage:
        yield stage


@pytest.fixture
async def held(tmp_path: Path) -> AsyncIterator[Stage]:
    async with open_stage(tmp_path, held=True) as stage:
        yield stage
