"""A server in a process of its own, to be killed: `python -m tests.client.server_process FOLDER PORT [held] [slow]`.

Its model is scripted. `held`: it stops after a few tokens. `slow`: it is loaded when a line is written to stdin.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from palaver.chat.model import Model
from palaver.chat.model_pool import ModelPool
from palaver.chat.service import Service
from palaver.engines.host.supervisor import ReportProgress
from palaver.store import open_store
from tests.chat.scripted_service import WAVE, model
from tests.client.live import served
from tests.scripted_engine import HoldScript


async def main(folder: Path, port: int, held: bool, slow: bool) -> None:
    async def load(name: str, report: ReportProgress) -> Model:
        if slow:
            await _line()
        return model([[*WAVE[:4], HoldScript(asyncio.Event()), *WAVE[4:]]] if held else [WAVE], name)

    with open_store(folder) as store:
        models = ModelPool(load, ("scripted",))
        models.load("scripted")
        async with Service(store, models, resume=True) as service, served(service, port=port) as url:
            print(url, flush=True)
            await asyncio.Event().wait()


async def _line() -> None:
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), "held" in sys.argv, "slow" in sys.argv))
