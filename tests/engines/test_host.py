"""The engine host beside what all engines do (test_conformance.py): starts, deaths, errors and the end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from palaver.engines.base import Engine, EngineState
from palaver.engines.host.child import LogFrames
from palaver.engines.host.frames import EngineSpec, Frame, decode_frames, encode_frame
from palaver.engines.host.process import ChildProcess, environment, shorten_waits
from palaver.engines.host.supervisor import HostedEngine
from palaver.errors import (
    BadParameter,
    BrokenModel,
    ContextOverflow,
    EngineClosed,
    EngineError,
    NoWeights,
    UnsupportedContent,
)
from palaver.generation import Ended, Finish, Prompt, Step
from palaver.models.resolver import resolve_folder
from palaver.sampling import Sampling
from tests.engines import tiny

pytestmark = pytest.mark.slow  # each process imports torch
LENGTH = 60
SAMPLED = Sampling(temperature=1.0, max_tokens=LENGTH, seed=4, repetition_penalty=1.1, logprobs=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("qwen3", tmp_path_factory.mktemp("hosted"))


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[HostedEngine]:
    async with HostedEngine(EngineSpec("torch", model, tuple(tiny.VOCABULARY))) as hosted:
        yield hosted


def prompt(number: int = 0) -> Prompt:
    return Prompt(tuple((7 * number + place * 3) % 90 + 3 for place in range(12)))


async def generate_ids(
    engine: Engine, number: int = 0, sampling: Sampling = SAMPLED, request: Prompt | None = None
) -> list[int]:
    async with engine.generate(request or prompt(number), sampling) as outputs:
        return [output.token_id async for output in outputs if isinstance(output, Step)]


async def until_ready(engine: HostedEngine) -> None:
    while engine.status.state is not EngineState.READY:
        await asyncio.sleep(0.05)


DEATH = """
import os, signal
if os.path.exists(os.path.join(os.path.dirname(__file__), "deadly")):
    os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_a_process_that_only_dies_is_given_up_and_the_next_request_is_served(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(DEATH)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    async with HostedEngine(EngineSpec("torch", model, tuple(tiny.VOCABULARY))) as engine:
        (tmp_path / "deadly").touch()
        assert engine.process_id is not None
        os.kill(engine.process_id, signal.SIGKILL)
        for _ in range(2):  # the first may be sent before the death is known
            with pytest.raises(EngineError, match=r"died \d+ times in a row"):
                await generate_ids(engine)
        (tmp_path / "deadly").unlink()
        await until_ready(engine)
        assert await generate_ids(engine)


async def test_errors_keep_their_type(engine: HostedEngine, tmp_path: Path) -> None:
    with pytest.raises(ContextOverflow) as overflow:
        await generate_ids(engine, request=Prompt((5,) * 100_000))
    assert overflow.value.tokens == 100_000
    with pytest.raises(BadParameter, match="top_p"):
        await generate_ids(engine, sampling=Sampling(top_p=9.0))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(NoWeights):
        await HostedEngine(EngineSpec("torch", tmp_path, tuple(tiny.VOCABULARY))).start()


async def test_stop_and_leaving_end_a_generation(engine: HostedEngine) -> None:
    endless = Sampling(temperature=0, min_tokens=400, max_tokens=400)
    async with engine.generate(prompt(), endless) as outputs:
        async for output in outputs:
            if isinstance(output, Step):
                outputs.stop()
            if isinstance(output, Ended):
                assert output.finish is Finish.STOPPED
    async with engine.generate(prompt(), endless) as outputs:
        async for _ in outputs:
            break
    assert await generate_ids(engine)


async def test_a_conversation_is_forgotten_in_the_process(engine: HostedEngine) -> None:
    await generate_ids(engine, request=replace(prompt(), conversation="a talk"))
    assert (await engine.metrics())["kept_bytes"] > 0
    await engine.forget("a talk")
    assert (await engine.metrics())["kept_bytes"] == 0


async def test_a_closed_engine_says_so(model: Path) -> None:
    engine = HostedEngine(EngineSpec("torch", model, tuple(tiny.VOCABULARY)))
    await engine.start()
    process = engine.process_id
    await engine.close()
    await engine.close()
    assert process is not None
    assert not alive(process)
    with pytest.raises(EngineClosed):
        async with engine.generate(prompt(), SAMPLED):
            pass


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


async def test_a_start_that_fails_says_why(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(model / "no such python"))
    with pytest.raises(EngineError, match="couldn't be started"):
        await HostedEngine(EngineSpec("torch", model, tuple(tiny.VOCABULARY))).start()


async def test_a_load_that_is_cancelled_ends_its_process_at_once(model: Path) -> None:
    engine = HostedEngine(EngineSpec("torch", model, tuple(tiny.VOCABULARY)))
    loading = asyncio.create_task(engine.start())
    while engine.process_id is None:
        await asyncio.sleep(0)
    process = engine.process_id
    loading.cancel()
    async with asyncio.timeout(5):  # a process that ends by itself gets twice as long
        await asyncio.wait([loading])
    assert loading.cancelled()
    assert not alive(process)


PARENT = """
import asyncio, sys
from pathlib import Path
from palaver.engines.host.frames import EngineSpec
from palaver.engines.host.supervisor import HostedEngine

async def main():
    vocabulary = tuple(bytes([number % 256]) for number in range(int(sys.argv[2])))
    engine = HostedEngine(EngineSpec("torch", Path(sys.argv[1]), vocabulary))
    await engine.start()
    print(engine.process_id, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_no_orphan_is_left_when_the_parent_is_killed(model: Path) -> None:
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root / "src")}
    command = [sys.executable, "-c", PARENT, str(model), str(tiny.SIZE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
    deadline = time.monotonic() + 30
    while alive(child) and time.monotonic() < deadline:
        os.sched_yield()
    assert not alive(child)


async def test_a_process_that_was_started_ahead_is_used_and_replaced_when_it_dies(model: Path) -> None:
    with ChildProcess() as child:
        async with HostedEngine(EngineSpec("torch", model, tuple(tiny.VOCABULARY)), child=child) as engine:
            assert engine.process_id == child.popen.pid
            whole = await generate_ids(engine)
            child.popen.kill()
            assert await generate_ids(engine) == whole
            assert engine.process_id not in (None, child.popen.pid)
    assert child.popen.poll() == -signal.SIGKILL


def test_a_process_that_was_started_ahead_ends_if_it_is_not_used() -> None:
    with ChildProcess() as child:
        assert child.popen.poll() is None
    assert child.popen.poll() == -signal.SIGKILL


INTERRUPTED = """
import os, runpy, sys

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == "palaver.engines.host.child":
            os.kill(os.getpid(), %d)

sys.meta_path.insert(0, Interrupter())
runpy.run_module("palaver.engines.host", run_name="__main__")
"""


@pytest.mark.parametrize("key", [signal.SIGINT, signal.SIGQUIT])
def test_a_signal_key_during_the_imports_does_not_end_the_process(key: signal.Signals) -> None:
    ours, its = socket.socketpair()
    ours.close()  # the process ends by itself when it reads its connection
    with its:
        command = [sys.executable, "-c", INTERRUPTED % key, str(its.fileno())]
        done = subprocess.run(command, pass_fds=[its.fileno()], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_users_own_settings_of_threads_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert environment().keys() - os.environ.keys() == {"GOMP_SPINCOUNT"}
    monkeypatch.setenv("GOMP_SPINCOUNT", environment()["GOMP_SPINCOUNT"])
    shorten_waits()
    assert os.environ["GOMP_SPINCOUNT"] == "2000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    shorten_waits()
    assert environment() == os.environ
    assert os.environ["GOMP_SPINCOUNT"] == "7"


async def test_a_text_that_cannot_be_sent_fails_its_request_alone(engine: HostedEngine) -> None:
    with pytest.raises(UnsupportedContent, match="half of a character"):
        await generate_ids(engine, sampling=replace(SAMPLED, stop=("\ud800",)))
    assert await generate_ids(engine)


async def test_a_python_without_vllm_is_refused_in_one_sentence(tmp_path: Path) -> None:
    venv.create(tmp_path / "empty", symlinks=True)
    python = tmp_path / "empty" / "bin" / "python"
    spec = EngineSpec("vllm", resolve_folder("sprout"), (b"a",), python=python)
    before = set(Path(tempfile.gettempdir()).glob("palaver-engine-*"))
    with pytest.raises(BrokenModel) as refused:
        await HostedEngine(spec).start()
    assert str(refused.value).startswith(f"The Python of the engine ({python}) has no vllm, ")
    assert str(refused.value).endswith(" or name a Python that has it with --engine-python.")
    assert set(Path(tempfile.gettempdir()).glob("palaver-engine-*")) <= before, "the links to the package are removed"


async def test_a_python_that_is_none_is_refused_in_one_sentence(tmp_path: Path) -> None:
    spec = EngineSpec("vllm", resolve_folder("sprout"), (b"a",), python=tmp_path / "python")
    with pytest.raises(EngineError, match=r"couldn't be started \(.*No such file.*\) while it loaded the model"):
        await HostedEngine(spec).start()


async def test_the_log_of_the_process_is_in_the_log_of_its_supervisor(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Frame] = []
    handler = LogFrames(sent.append)
    log = logging.getLogger("palaver.engines.some")
    log.addHandler(handler)
    try:
        await asyncio.to_thread(log.warning, "a replica was lost turn=%s", "abc")
        await asyncio.sleep(0)
    finally:
        log.removeHandler(handler)
    (frame,) = decode_frames(b"".join(map(encode_frame, sent)))
    caplog.clear()
    HostedEngine(EngineSpec("torch", Path(), ()))._handle_frame(frame, None)  # type: ignore[arg-type]
    assert [(one.name, one.levelname, one.message) for one in caplog.records] == [
        ("palaver.engines.some", "WARNING", "a replica was lost turn=abc")
    ]
