"""An engine's process that dies: what caused it is failed alone and logged, everything else goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from palaver.constraints import Constraint, Grammar
from palaver.engines.base import Engine, EngineState
from palaver.engines.host.frames import EngineSpec
from palaver.engines.host.supervisor import HostedEngine, PendingRequest
from palaver.engines.torch.library_engine import model_engine
from palaver.errors import EngineError
from palaver.generation import Ended, Finish, Prompt, Step
from palaver.sampling import Sampling
from tests.engines import tiny

pytestmark = pytest.mark.slow  # each process imports torch

KILLER, RAISER = 201, 202
"""Tokens. While a prompt with the first one runs, each process ends; with the second, one worker's thread raises."""
FAULTS = f"""
import builtins, os, signal, sys

once = os.path.join(os.path.dirname(__file__), "once")
original = builtins.__import__

def patched(name, *rest, **named):
    module = original(name, *rest, **named)
    scheduler = sys.modules.get("palaver.engines.core.scheduler")
    if hasattr(scheduler, "Scheduler") and not hasattr(scheduler.Scheduler, "faulty"):
        step = scheduler.Scheduler.step
        def faulty(self):
            for generation in self._running:
                token_count = len(generation.prompt.reply_ids) + generation.token_count
                if {KILLER} in generation.prompt.context_ids and token_count >= 5:
                    os.kill(os.getpid(), signal.SIGSEGV)
                if {RAISER} in generation.prompt.context_ids and os.path.exists(once):
                    os.remove(once)
                    raise RuntimeError("the device is gone")
            step(self)
        scheduler.Scheduler.step = scheduler.Scheduler.faulty = faulty
    cache = sys.modules.get("palaver.engines.grammars.cache")
    if hasattr(cache, "GrammarCache") and not hasattr(cache.GrammarCache, "faulty"):
        async def compile(self, constraint):
            os.kill(os.getpid(), signal.SIGSEGV)
        cache.GrammarCache.compile = cache.GrammarCache.faulty = compile
    return module

builtins.__import__ = patched
"""
LONG = Sampling(temperature=1.0, seed=7, min_tokens=60, max_tokens=60)


@pytest.fixture
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HostedEngine]:
    """One whose process has faults put into it."""
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "sitecustomize.py").write_text(FAULTS)
    (tmp_path / "faults" / "once").touch()
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "faults"), *([path] if path else [])]))
    async with HostedEngine(
        EngineSpec("torch", tiny.make("qwen3", tmp_path / "model"), tuple(tiny.VOCABULARY))
    ) as hosted:
        yield hosted


def state(engine: Engine) -> EngineState:
    return engine.status.state


async def reply(engine: Engine, first: int, sampling: Sampling = LONG) -> list[int]:
    async with engine.generate(Prompt((first, 20, 30)), sampling) as outputs:
        return [output.token_id async for output in outputs if isinstance(output, Step)]


async def test_a_request_that_kills_the_engine_is_failed_alone(
    engine: HostedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed = [await reply(engine, first) for first in (10, 11, 12)]
    others = [asyncio.create_task(reply(engine, first)) for first in (10, 11)]
    killer = asyncio.create_task(reply(engine, KILLER))
    others.append(asyncio.create_task(reply(engine, 12)))
    with pytest.raises(EngineError, match="was killed by SIGSEGV 2 times at this request"):
        await killer
    assert await asyncio.gather(*others) == undisturbed
    assert "the engine's process was killed by SIGSEGV" in caplog.text
    assert "Fatal Python error" in caplog.text
    assert "the engine was started again" in caplog.text


async def test_a_request_that_kills_the_engine_alone_is_sent_twice(engine: HostedEngine) -> None:
    with pytest.raises(EngineError, match="2 times at this request"):
        await reply(engine, KILLER)
    assert len(await reply(engine, 10)) == 60


async def test_a_request_that_was_prepared_when_the_engine_died_is_not_sent_again(engine: HostedEngine) -> None:
    undisturbed = await reply(engine, 10)
    first = asyncio.Event()

    async def other() -> list[int]:
        ids = []
        async with engine.generate(Prompt((10, 20, 30)), LONG) as outputs:
            async for output in outputs:
                if isinstance(output, Step):
                    ids.append(output.token_id)
                    first.set()
        return ids

    running = asyncio.create_task(other())
    await first.wait()
    process = engine.process_id
    constrained = Sampling(max_tokens=5, constraint=Constraint(Grammar.REGEX, "[0-9]+"))
    with pytest.raises(EngineError, match="while it prepared this request"):
        await reply(engine, 11, constrained)
    assert await running == undisturbed
    assert engine.process_id != process


def test_only_a_request_that_compiles_is_blamed_for_a_death_while_it_is_prepared() -> None:
    """Others may wait for a busy process when it is killed: they go on."""
    prompt = Prompt((10, 20, 30))
    constrained = Sampling(constraint=Constraint(Grammar.REGEX, "[0-9]+"))
    assert not PendingRequest(prompt, LONG, 0).compiles
    assert PendingRequest(prompt, constrained, 0).compiles
    assert PendingRequest(prompt, Sampling(banned_strings=("a",)), 0).compiles
    assert PendingRequest(prompt, Sampling(dry_multiplier=1.0), 0).compiles


async def test_a_worker_that_dies_ends_its_process_and_replies_go_on(
    engine: HostedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    process = engine.process_id
    assert len(await reply(engine, RAISER)) == 60
    assert engine.process_id != process
    assert f"ended with status {os.EX_SOFTWARE}" in caplog.text
    assert "RuntimeError: the device is gone" in caplog.text


async def test_a_model_whose_files_are_gone_fails_requests_until_they_are_back(tmp_path: Path) -> None:
    folder = tiny.make("qwen3", tmp_path / "model")
    async with HostedEngine(EngineSpec("torch", folder, tuple(tiny.VOCABULARY))) as engine:
        undisturbed = await reply(engine, 10)
        folder.rename(tmp_path / "away")
        async with engine.generate(Prompt((10, 20, 30)), LONG) as outputs:
            assert engine.process_id is not None
            os.kill(engine.process_id, signal.SIGKILL)
            with pytest.raises(EngineError, match="can't be started again"):
                async for _ in outputs:
                    pass
        assert state(engine) is EngineState.FAILED
        with pytest.raises(EngineError, match="can't be started again"):
            await reply(engine, 10)
        (tmp_path / "away").rename(folder)
        while state(engine) is not EngineState.READY:
            await asyncio.sleep(0.05)
        assert await reply(engine, 10) == undisturbed


async def test_stop_works_while_the_engine_starts_again(engine: HostedEngine) -> None:
    longer = replace(LONG, min_tokens=400, max_tokens=400)  # it must not end before it is stopped
    async with engine.generate(Prompt((10, 20, 30)), longer) as outputs:
        assert isinstance(await anext(outputs), object)
        killed = engine.process_id
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        while state(engine) is EngineState.READY and engine.process_id == killed:
            await asyncio.sleep(0.01)
        outputs.stop()
        assert [output async for output in outputs][-1] == Ended(Finish.STOPPED)


async def test_an_engine_in_this_process_says_that_its_thread_died(tmp_path: Path) -> None:
    died: list[BaseException] = []
    engine = model_engine("tiny", tiny.build("qwen3"), tiny.VOCABULARY, on_failure=died.append)
    try:
        assert state(engine) is EngineState.READY
        engine._scheduler.step = lambda: 1 / 0  # type: ignore[method-assign, assignment]
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            await reply(engine, 10)
        assert state(engine) is EngineState.FAILED
        assert "ZeroDivisionError" in engine.status.reason
        assert isinstance(died[0], ZeroDivisionError)
    finally:
        await engine.close()
