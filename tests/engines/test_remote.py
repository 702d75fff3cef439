"""Engines on other servers: llama.cpp's server of the package xllamacpp, by token ids, and vLLM's own where it is."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from palaver.engines.base import Capability
from palaver.engines.core.token_stream import TokenStreamEngine
from palaver.engines.remote.engine import load
from palaver.errors import BadParameter, BrokenModel
from palaver.generation import AnswerRequested, Ended, Finish, Step
from palaver.sampling import Sampling
from tests.engines.cycles import SETTINGS, prompt_for
from tests.engines.engine_cases import VLLM_VARIABLE, EngineCases, missing
from tests.engines.generate import Run, continued, run

GREEDY = Sampling(temperature=0, max_tokens=70)
LLAMA_SERVER = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.n_ctx, params.n_parallel, params.verbosity = 4 * 512, 4, -1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
sys.stdin.read()
"""
VLLM_SERVER = "from vllm.entrypoints.cli.main import main; main()"
KEY = "a key"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def served(command: list[str], port: int, **variables: str) -> Iterator[str]:
    """A server, once it is healthy. Yields its address."""
    url, environment = f"http://127.0.0.1:{port}", os.environ | variables
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    try:
        while True:
            assert process.poll() is None, "the server has ended"
            try:
                if httpx.get(f"{url}/health", trust_env=False, timeout=5).is_success:
                    break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.communicate()


def llama_command(cases: EngineCases, port: int) -> list[str]:
    return [sys.executable, "-c", LLAMA_SERVER, str(cases.gguf), str(port)]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> EngineCases:
    return EngineCases(tmp_path_factory.mktemp("remote"))


@pytest.fixture(scope="module")
def llama_url(cases: EngineCases) -> Iterator[str]:
    if reason := missing("llamacpp"):
        pytest.skip(reason)
    port = free_port()
    with served(llama_command(cases, port), port) as url:
        yield url


def connect(cases: EngineCases, address: str, key: str | None = None) -> TokenStreamEngine:
    return load(cases.sprout, address=address, vocabulary=cases.vocabulary, key=key)


async def check_replies(engine: TokenStreamEngine, cases: EngineCases) -> None:
    """Greedy replies continue at every token; budgets, stop strings and log-probabilities are obeyed."""
    prompt = prompt_for(cases, 0, "greedy")
    whole = await run(engine, prompt, GREEDY)
    assert whole.ended == Ended(Finish.END)
    assert whole.ids[-1] in engine.info.end_ids
    rests = [await run(engine, continued(prompt, whole.ids[:cut]), GREEDY) for cut in range(0, len(whole.ids), 5)]
    assert all(rest.ids == whole.ids[cut * 5 :] for cut, rest in enumerate(rests))
    thought = prompt_for(cases, 0, "budget")
    closed = await run(engine, thought, replace(SETTINGS["budget"], min_tokens=0))
    assert b"".join(cases.vocabulary[i] for i in closed.ids[4:]).startswith(b"\n</think>\n\n")
    stopped = await run(engine, prompt, replace(SETTINGS["stop"], min_tokens=0))
    assert stopped.ended is not None
    assert stopped.ended.finish is Finish.STOP_STRING
    reported = await run(engine, prompt, replace(GREEDY, logprobs=3, max_tokens=4))
    for step in reported.steps:
        assert len(step.alternatives) == 3
        assert step.alternatives[0].token_id == step.token_id
        assert step.alternatives[0].logprob == pytest.approx(step.logprob, abs=1e-4)


async def test_llama_server_replies_by_token_ids(cases: EngineCases, llama_url: str) -> None:
    engine = await asyncio.to_thread(connect, cases, f"llamacpp+{llama_url}")
    assert engine.info.context_length == 512
    assert set(engine.info.lacks) >= {Capability.EXACT_CONTINUATION, Capability.OWNER_ISOLATION}
    await check_replies(engine, cases)
    await engine.close()


async def test_answer_now_submits_the_reply_again(cases: EngineCases, llama_url: str) -> None:
    engine = await asyncio.to_thread(connect, cases, f"llamacpp+{llama_url}")
    ids: list[int] = []
    position = None
    async with engine.generate(prompt_for(cases, 0, "budget"), GREEDY) as outputs:
        async for output in outputs:
            if isinstance(output, Step):
                ids.append(output.token_id)
                if len(ids) == 3:
                    outputs.answer_now()
            elif isinstance(output, AnswerRequested):
                position = output.position - 1  # its first token was given
    assert position is not None
    text = [cases.vocabulary[i] for i in ids]
    assert b"".join(text[position:]).startswith(b"\n</think>\n\n")
    await engine.close()


async def test_a_reply_goes_on_when_the_server_is_started_again(cases: EngineCases) -> None:
    if reason := missing("llamacpp"):
        pytest.skip(reason)
    port, prompt, whole = free_port(), prompt_for(cases, 0, "greedy"), Run()
    command = llama_command(cases, port)
    first, again = served(command, port), served(command, port)
    url = await asyncio.to_thread(first.__enter__)
    engine = await asyncio.to_thread(connect, cases, f"llamacpp+{url}")
    expected = await run(engine, prompt, GREEDY)
    starting: asyncio.Task[str] | None = None
    async with engine.generate(prompt, GREEDY) as outputs:
        async for output in outputs:
            whole.add(output)
            if len(whole.ids) == 3 and starting is None:
                await asyncio.to_thread(first.__exit__, None, None, None)
                starting = asyncio.create_task(asyncio.to_thread(again.__enter__))
    assert starting is not None
    await starting
    await asyncio.to_thread(again.__exit__, None, None, None)
    assert (whole.ids, whole.ended) == (expected.ids, expected.ended)
    await engine.close()


async def test_what_the_server_can_not_do_is_refused_by_name(cases: EngineCases, llama_url: str) -> None:
    engine = await asyncio.to_thread(connect, cases, f"llamacpp+{llama_url}")
    prompt = prompt_for(cases, 0, "schema")
    with pytest.raises(BadParameter, match=r"^constraints "):
        await run(engine, prompt, SETTINGS["schema"])
    assert not any("vLLM" in why for why in engine.info.lacks.values())
    refused: dict[str, Any] = {"presence_penalty": 0.5, "dry_multiplier": 1.0, "banned_strings": ("a",)}
    for name, value in refused.items():
        with pytest.raises(BadParameter, match=f"^{name} .*the server's sampler chooses .*over a continued reply"):
            await run(engine, prompt, replace(GREEDY, **{name: value}))
    await engine.close()


def test_a_server_that_can_not_be_used_is_refused_in_one_sentence(cases: EngineCases, llama_url: str) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(BrokenModel, match=f"^The server at {nowhere} can't be reached: .*[.]$"):
        connect(cases, f"llamacpp+{nowhere}")
    with pytest.raises(BrokenModel, match=r"^The server at .*vLLM.*[.]$"):
        connect(cases, f"vllm+{llama_url}")
    with pytest.raises(BrokenModel, match=r"has another tokenizer than the model here"):
        load(cases.sprout, address=f"llamacpp+{llama_url}", vocabulary=cases.vocabulary[::-1])


@pytest.mark.slow  # vLLM starts
async def test_vllm_server_replies_by_token_ids(cases: EngineCases) -> None:
    if reason := missing("vllm"):
        pytest.skip(reason)
    port = free_port()
    options = ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "512"]
    options += ["--enable-scale-out", "--enforce-eager", "--api-key", KEY, "--max-num-seqs", "8"]
    command = [os.environ[VLLM_VARIABLE], "-c", VLLM_SERVER, "serve", str(cases.sprout), *options]
    context = served(command, port, VLLM_CPU_KVCACHE_SPACE="1")
    url = await asyncio.to_thread(context.__enter__)
    try:
        with pytest.raises(BrokenModel, match="PALAVER_ENGINE_KEY"):
            await asyncio.to_thread(connect, cases, f"vllm+{url}", "another key")
        engine = await asyncio.to_thread(connect, cases, f"vllm+{url}", KEY)
        assert engine.info.context_length == 512
        assert Capability.OWNER_ISOLATION not in engine.info.lacks
        await check_replies(engine, cases)
        await engine.close()
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


def test_folders_of_the_tokenizer_are_enough(cases: EngineCases, llama_url: str, tmp_path: Path) -> None:
    """The weights are on the server alone."""
    for path in cases.sprout.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    engine = load(tmp_path, address=f"llamacpp+{llama_url}", vocabulary=cases.vocabulary)
    assert engine.info.end_ids
    assert Capability.MEDIA not in engine.info.lacks
    asyncio.run(engine.close())
    (tmp_path / "processor_config.json").write_text("{}")
    engine = load(tmp_path, address=f"llamacpp+{llama_url}", vocabulary=cases.vocabulary)
    assert engine.info.lacks[Capability.MEDIA] == "only token ids are sent to a server elsewhere"
    asyncio.run(engine.close())
