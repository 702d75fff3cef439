"""Chat over HTTP, put through the same suite as the one in-process: a live server, a real connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from palaver.client.http_chat import HttpChat
from tests.chat.conformance import *  # noqa: F403
from tests.chat.scripted_service import Stage, open_stage
from tests.client.live import TOKEN, served


@asynccontextmanager
async def over_http(folder: Path, held: bool) -> AsyncIterator[Stage]:
    async with open_stage(folder, held=held) as stage, served(stage.service) as url, HttpChat(url, TOKEN) as chat:
        yield replace(stage, chat=chat)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with over_http(tmp_path, held=False) as stage:
        yield stage


@pytest.fixture
async def held(tmp_path: Path) -> AsyncIterator[Stage]:
    async with over_http(tmp_path, held=True) as stage:
        yield stage
