"""Replicas on a real Ray cluster. `test_cluster.py` runs these in a network namespace that has only the loopback: Ray
listens on the machine's own address otherwise."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import psutil
import pytest
import pytest_asyncio
import ray
from ray import serve

from palaver.chat.deployment import EngineDeployment, bind_replicas, build
from palaver.chat.engine_choice import LoadOptions
from palaver.chat.model import Model
from palaver.chat.model_loader import ModelLoader
from palaver.chat.reply_stream import ReplyRequest
from palaver.engines.cluster.engine import NAMESPACE, ClusterEngine, load
from palaver.engines.cluster.replica import _check_fingerprint
from palaver.engines.host.supervisor import HostedEngine
from palaver.errors import BrokenModel, EngineError
from palaver.generation import AnswerRequested, Ended, Finish, Prompt, Step
from palaver.messages import user
from palaver.sampling import Sampling
from tests.chat.scripted_service import CONTROL, TOKENIZER
from tests.chat.scripted_service import model as scripted_model
from tests.engines.cluster_engines import SCRIPT, converse, load_paced
from tests.engines.generate import run

pytestmark = [pytest.mark.asyncio(loop_scope="module")]
GREEDY = Sampling(temperature=0)
SAMPLED = Sampling(temperature=1.0, seed=7, max_tokens=120)
FRONT = """
import asyncio
from palaver.engines.cluster.engine import load
from palaver.generation import Prompt
from palaver.sampling import Sampling
from tests.chat.scripted_service import TOKENIZER

async def main():
    engine = await asyncio.to_thread(load, "ray://auto/scripted", TOKENIZER.vocabulary)
    async with engine.generate(Prompt((1, 2, 3)), Sampling(temperature=0)) as outputs:
        async for output in outputs:
            print("running", flush=True)

asyncio.run(main())
"""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, namespace=NAMESPACE, log_to_driver=False)
    try:
        scripted = bind_replicas(EngineDeployment(model="scripted", min_replicas=2, max_replicas=2), load_paced)
        sprout = build(EngineDeployment(model="sprout", min_replicas=2, max_replicas=2))
        serve.run_many([serve.RunTarget(scripted, "scripted", None), serve.RunTarget(sprout, "sprout", None)])
        yield
    finally:
        ray.shutdown()


@pytest.fixture(scope="module")
def engine(cluster: None) -> ClusterEngine:
    return load("ray://auto/scripted", TOKENIZER.vocabulary)


@dataclass
class Front:
    """A model as a front has it, and the same one without a cluster."""

    here: Model
    there: Model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(cluster: None) -> AsyncIterator[Front]:
    def report(fraction: float | None, note: str) -> None: ...

    here = await ModelLoader(LoadOptions()).load("sprout", report)
    there = await ModelLoader(LoadOptions(engine="ray://auto")).load("sprout", report)
    yield Front(here, there)
    await here.engine.close()
    await there.engine.close()


def replicas(application: str) -> list[psutil.Process]:
    title = f"ray::ServeReplica:{application}:"
    processes = psutil.process_iter(["cmdline"])
    return [one for one in processes if title in " ".join(one.info["cmdline"] or ())]


async def test_a_reply_comes_through_the_cluster(engine: ClusterEngine) -> None:
    found = await run(engine, Prompt((1, 2, 3)), GREEDY)
    assert found.ids == SCRIPT
    assert found.ended == Ended(Finish.END)
    assert engine.info.fingerprint == "scripted"


async def wait_until_cancelled(engine: ClusterEngine, before: float) -> None:
    async with asyncio.timeout(60):
        while (await engine.metrics())["open"]:
            await asyncio.sleep(0.02)
    assert (await engine.metrics())["cancelled"] == before + 1, "the reply ended by itself"


async def test_the_end_of_a_consumer_ends_the_request(engine: ClusterEngine) -> None:
    before = (await engine.metrics())["cancelled"]
    await run(engine, Prompt((1, 2, 3)), GREEDY, stop_after=5)
    await wait_until_cancelled(engine, before)


async def test_a_front_that_is_killed_leaves_no_request(engine: ClusterEngine) -> None:
    before = (await engine.metrics())["cancelled"]
    process = subprocess.Popen([sys.executable, "-c", FRONT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    await asyncio.to_thread(process.stdout.readline)
    process.kill()
    process.communicate()
    await wait_until_cancelled(engine, before)


async def test_stop_and_answer_now(engine: ClusterEngine) -> None:
    model = scripted_model([SCRIPT])
    prompt = model.prompt(ReplyRequest((user("Hello"),), GREEDY))
    ids: list[int] = []
    answers = []
    async with engine.generate(prompt, GREEDY) as outputs:
        async for output in outputs:
            if isinstance(output, Step):
                ids.append(output.token_id)
                if len(ids) == 5:
                    outputs.answer_now()
                if CONTROL["</think>"] in ids:
                    outputs.stop()
            if isinstance(output, AnswerRequested):
                answers.append(output.position)
            ended = output
    assert ended == Ended(Finish.STOPPED)
    assert ids[: answers[0]] == SCRIPT[: answers[0]]
    assert ids.index(CONTROL["</think>"]) < answers[0] + 3  # closed at once, long before the script does


async def test_replies_go_on_when_a_replica_is_killed(engine: ClusterEngine) -> None:
    prompts = [Prompt((1, 2, 3), conversation=f"conversation {number}") for number in range(6)]
    running = [asyncio.create_task(run(engine, prompt, GREEDY)) for prompt in prompts]
    await asyncio.sleep(0.5)
    replicas("scripted")[0].kill()
    for found in await asyncio.gather(*running):
        assert found.ids == SCRIPT
        assert found.ended == Ended(Finish.END)


async def test_replies_go_on_when_the_controller_is_killed(engine: ClusterEngine) -> None:
    running = asyncio.create_task(run(engine, Prompt((1, 2, 3)), GREEDY))
    (controller,) = [one for one in psutil.process_iter(["cmdline"]) if "ServeController" in str(one.info["cmdline"])]
    controller.kill()
    assert (await running).ids == SCRIPT
    assert (await run(engine, Prompt((1, 2, 3)), GREEDY)).ids == SCRIPT


async def test_a_conversation_stays_with_its_replica_and_moves_when_it_dies(front: Front) -> None:
    def kill_home(turn: int) -> None:
        """The replica whose engine has computed most."""
        if turn == 4:
            max(replicas("sprout"), key=lambda one: sum(one.children()[0].cpu_times()[:2])).kill()

    usage = await converse(front.there, 9, kill_home)
    for turn in (1, 2, 3, 4, 7, 8):  # the sixth turn finds nothing, the seventh may still come home to a new replica
        assert usage[turn].cached_tokens >= 0.9 * usage[turn - 1].prompt_tokens, usage


async def test_a_sampled_reply_is_the_same_after_deaths(front: Front) -> None:
    here, there = front.here, front.there
    assert isinstance(there.engine, HostedEngine)
    request = ReplyRequest((user("Write a long story about a house by the sea."),), SAMPLED)
    prompt = here.prompt(request)
    whole = await run(here.engine, prompt, SAMPLED)
    ids: list[int] = []
    async with there.engine.generate(prompt, SAMPLED) as outputs:
        async for output in outputs:
            if isinstance(output, Step):
                ids.append(output.token_id)
                if len(ids) == 10:
                    for one in replicas("sprout"):
                        one.kill()
                if len(ids) == 30:
                    assert there.engine.process_id is not None
                    os.kill(there.engine.process_id, signal.SIGKILL)  # the front's own connection to the cluster
    assert ids == whole.ids


async def test_another_tokenizer_and_another_fingerprint_are_refused(engine: ClusterEngine) -> None:
    with pytest.raises(BrokenModel, match="tokenizer"):
        await asyncio.to_thread(load, "ray://auto/scripted", TOKENIZER.vocabulary[:-1])
    _check_fingerprint("some", "1", "one")
    with pytest.raises(EngineError, match="in other replicas"):
        _check_fingerprint("some", "1", "two")
