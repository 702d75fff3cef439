"""A server in a process of its own, to be killed and started again: `python -m tests.web.served FOLDER --port N ...`.

With `--script FILE` (JSON: a list of thoughts and answers) the model says just that at a fixed rate; else it is sprout.
At a `HOLD` in a script a reply waits while the file `held` in the folder has its number, or that of one before it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from palaver.address_guard import AddressGuard
from palaver.chat.engine_choice import STATES, LoadOptions
from palaver.chat.model import Model
from palaver.chat.model_loader import ModelLoader
from palaver.chat.model_pool import ModelPool
from palaver.chat.service import Service
from palaver.engines.core.reply_state import ReplyState
from palaver.engines.host.supervisor import ReportProgress
from palaver.formats.format import TemplateFormat
from palaver.formats.template import Template
from palaver.generation import Draft, Ended, Finish, Output, Prompt, Step
from palaver.server.app import Server, UvicornServer, run_server
from palaver.server.settings import ServerSettings
from palaver.store import open_store
from palaver.tools.toolbox import OperatorServers, Toolbox
from tests.chat.scripted_service import TOKENIZER, reply
from tests.scripted_engine import HoldScript, Script, ScriptedEngine
from tests.tiny import CHATML, STRINGS
from tests.web.forked import HELD, HOLD


class Released(asyncio.Event):
    """Is set while the file holds nothing, or only marks after this one."""

    def __init__(self, file: Path, mark: int) -> None:
        super().__init__()
        self._file = file
        self._mark = mark

    async def wait(self) -> Literal[True]:
        while self._is_held():
            await asyncio.sleep(0.02)
        return True

    def _is_held(self) -> bool:
        try:
            return int(self._file.read_text()) <= self._mark
        except FileNotFoundError:
            return False


class PacedEngine(ScriptedEngine):
    """Says its scripts at so many tokens a second, in the time that passes, however late a single one is."""

    def __init__(self, scripts: Sequence[Script], rate: float, context: int, media: tuple[str, ...]) -> None:
        super().__init__(scripts, TOKENIZER.vocabulary, context_length=context)
        self._info = replace(self._info, media=media)
        self._rate = rate

    async def _outputs(
        self, prompt: Prompt, reply: ReplyState, own_ids: list[int], stopped: asyncio.Event
    ) -> AsyncGenerator[Output]:
        loop = asyncio.get_running_loop()
        begun, said = loop.time(), 0
        async for output in super()._outputs(prompt, reply, own_ids, stopped):
            if isinstance(output, Step):
                said += 1
                await asyncio.sleep(max(0.0, begun + said / self._rate - loop.time()))
            yield output


class DraftingEngine(PacedEngine):
    """Says them block by block, as a diffusion model does: each token of a block is first shown in a draft."""

    def __init__(self, scripts: Sequence[Script], rate: float, context: int, block_length: int) -> None:
        super().__init__(scripts, rate, context, ())
        self._block_length = block_length
        self._info = replace(self._info, block_length=block_length)

    async def _outputs(
        self, prompt: Prompt, reply: ReplyState, own_ids: list[int], stopped: asyncio.Event
    ) -> AsyncGenerator[Output]:
        block: list[Step] = []
        start = len(prompt.reply_ids)
        async for output in super()._outputs(prompt, reply, own_ids, stopped):
            if not isinstance(output, Step):
                if not (isinstance(output, Ended) and output.finish is Finish.STOPPED):
                    for step in block:
                        yield step
                yield output
                continue
            block.append(output)
            masked = self._block_length - len(block)
            shown = tuple(step.token_id for step in block)
            yield Draft(start, (*shown, *[None] * masked), (*[1.0] * len(block), *[0.3] * masked))
            if not masked:
                for step in block:
                    yield step
                start, block = start + len(block), []


def held_at_marks(ids: list[int], file: Path) -> Script:
    mark = TOKENIZER.encode([HOLD])
    items: list[int | HoldScript] = []
    place = marks = 0
    while place < len(ids):
        if ids[place : place + len(mark)] == mark:
            items.append(HoldScript(Released(file, marks)))
            marks += 1
            place += len(mark)
        else:
            items.append(ids[place])
            place += 1
    return items


def scripted(
    script: Path, rate: float, context: int, media: tuple[str, ...], blocks: int, name: str = "scripted"
) -> Model:
    held = script.parent / HELD
    scripts = [held_at_marks(reply(one["thought"], one["answer"]), held) for one in json.loads(script.read_text())]
    format = TemplateFormat(Template(CHATML), TOKENIZER, STRINGS)
    engine = DraftingEngine(scripts, rate, context, blocks) if blocks else PacedEngine(scripts, rate, context, media)
    return Model(engine, format, name, TOKENIZER.fingerprint, TOKENIZER.vocabulary)


LOGIN = "as-it-is-printed"
SECOND = "second"
"""A further model, which takes text only and is loaded once there is a file `loaded` in the folder."""


async def serve(asked: argparse.Namespace) -> None:
    async def load(name: str, told: ReportProgress) -> Model:
        told(0.3, "warming up")
        if asked.calling:
            from tests.chat.tool_service import make_model

            return make_model(name)
        if asked.script:
            while name == SECOND and not (asked.folder / "loaded").exists():
                await asyncio.sleep(0.05)
            media = () if name == SECOND else tuple(asked.media)
            return scripted(asked.script, asked.rate, asked.context, media, asked.blocks, name)
        if asked.gguf:
            return await ModelLoader(LoadOptions(states=asked.folder / STATES)).load(name, told)
        from tests.server.live_server import sprout  # torch is not for servers that only recite

        return await sprout(name, told)

    settings = ServerSettings(
        host=asked.host,
        port=asked.port,
        prefix=asked.prefix,
        hosts=("127.0.0.1",) if asked.host != "127.0.0.1" else (),
        secret="the-token-of-the-data-folder",
        login_code=LOGIN,
        share=asked.share,
    )
    with open_store(asked.folder) as store:
        name = "scripted" if asked.script else "calling" if asked.calling else asked.gguf or "sprout"
        models = ModelPool(load, (name, SECOND) if asked.second else (name,))
        toolbox = tool_servers(asked) if asked.calling or asked.demo else None
        async with Service(store, models, resume=True, transcriber=asked.transcriber, toolbox=toolbox) as service:
            models.load(name)
            server = Server(service, settings)
            listening = socket.create_server(("127.0.0.1", asked.port))
            await run_server(UvicornServer(server, grace=0), listening, server)


def tool_servers(asked: argparse.Namespace) -> Toolbox:
    from tests.chat.tool_service import misbehaving
    from tests.tools.demo_server import demo_config

    server = misbehaving(asked.folder / "record") if asked.calling else demo_config(asked.folder)
    guard = AddressGuard(is_allowed=lambda one: True) if asked.private else AddressGuard()
    return Toolbox(OperatorServers((server,)), asked.folder / "tools", guard=guard)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1", help="what the server believes it listens on")
    parser.add_argument("--prefix", default="")
    parser.add_argument("--script", type=Path)
    parser.add_argument("--rate", type=float, default=1000.0)
    parser.add_argument("--context", type=int, default=200_000, help="of the model that only recites")
    parser.add_argument("--media", nargs="*", default=(), help="what that model says that it accepts")
    parser.add_argument("--blocks", type=int, default=0, help="it writes blocks of so many tokens, with drafts")
    parser.add_argument("--calling", action="store_true", help="a model that calls the tools that a message names")
    parser.add_argument("--demo", action="store_true", help="offers the demo's tools to conversations")
    parser.add_argument("--private", action="store_true", help="users may add tool servers at any address")
    parser.add_argument("--share", action="store_true", help="users may share conversations")
    parser.add_argument("--gguf", help="a file or a model's name to load as `palaver serve` does")
    parser.add_argument("--second", action="store_true", help="offers a second model that only recites")
    parser.add_argument("--transcriber", default="")
    asyncio.run(serve(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
