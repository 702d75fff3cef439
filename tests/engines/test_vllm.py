"""The parts of the vLLM engine that need no vLLM. `test_conformance.py` runs the whole where it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError, field_validator

from palaver.engines.base import Capability
from palaver.engines.core.token_stream import TokenRequest
from palaver.engines.vllm.engine import _reason
from palaver.engines.vllm.sampling_params import BAN, check_native, native_lacks, native_parameters, needs_own_sampling
from palaver.engines.vllm.startup_log import StartupLog, find_root_cause
from palaver.errors import BadParameter
from palaver.generation import Prompt
from palaver.processes import HOST_VARIABLE
from palaver.sampling import Sampling

PROMPT = Prompt((1, 2, 3), (4, 5))
GREEDY = Sampling(temperature=0)


def request(sampling: Sampling, choice: int = 0) -> TokenRequest:
    return TokenRequest(7, PROMPT, sampling, choice, max_tokens=20, stop_ids=frozenset({2, 0}), salt="Ann")


def test_limits_count_the_tokens_that_are_added() -> None:
    parameters = native_parameters(request(Sampling(min_tokens=10, max_tokens=22, logprobs=3)))
    assert parameters["max_tokens"] == 20
    assert parameters["min_tokens"] == 8
    assert parameters["stop_token_ids"] == [0, 2]
    assert parameters["ignore_eos"], "the engine knows the ends of a turn"
    assert parameters["logprobs"] == 3
    assert request(GREEDY).token_ids == [1, 2, 3, 4, 5]


def test_bans_are_the_lowest_bias() -> None:
    sampling = Sampling(logit_bias=((5, 2.5), (6, 500.0)), banned_ids=(7,))
    assert native_parameters(request(sampling))["logit_bias"] == {5: 2.5, 6: -BAN, 7: BAN}
    assert native_parameters(request(GREEDY))["logit_bias"] is None


def test_a_continued_reply_has_the_seed_of_the_uncut_one_and_choices_differ() -> None:
    seeds = [native_parameters(request(Sampling(seed=5), choice))["seed"] for choice in range(3)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("dry_multiplier", 1.0),
        ("xtc_probability", 0.5),
        ("typical_p", 0.5),
        ("banned_strings", ("a",)),
        ("spoken", True),
        ("end_penalty", 2.0),
        ("temperature", 2.5),
    ],
)
def test_what_vllm_would_ignore_or_refuse_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(BadParameter, match=f"^{name} "):
        check_native(PROMPT, replace(GREEDY, **{name: value}))


def test_messages_name_the_sampler() -> None:
    penalty = replace(GREEDY, presence_penalty=0.5)
    with pytest.raises(BadParameter, match="vLLM's own sampler chooses the tokens here"):
        check_native(PROMPT, penalty)
    with pytest.raises(BadParameter, match="this: the server's sampler chooses the tokens here"):
        check_native(PROMPT, penalty, sampler="the server's sampler")
    with pytest.raises(BadParameter, match="this: the server's sampler takes at most 1"):
        check_native(PROMPT, replace(GREEDY, temperature=1.5), 1.0, "the server's sampler")
    assert not any("vLLM" in why for why in native_lacks(False, "the server's sampler").values())


def test_top_p_of_0_is_the_likeliest_token_alone() -> None:
    assert 0 < native_parameters(request(Sampling(top_p=0)))["top_p"] < 1e-5
    assert native_parameters(request(Sampling(top_p=0.5)))["top_p"] == 0.5


def test_the_card_says_how_the_runner_draws() -> None:
    older, newer = (native_lacks(draws)[Capability.EXACT_CONTINUATION] for draws in (False, True))
    assert "draws anew" in older
    assert "never tried" in newer


def test_an_error_of_vllm_is_one_line() -> None:
    class Settings(BaseModel):
        runner: int

        @field_validator("runner")
        @classmethod
        def check(cls, value: int) -> int:
            raise ValueError("Model Runner V2 requires Triton.\nInstall it.")

    with pytest.raises(ValidationError) as invalid:
        Settings(runner=2)
    assert _reason(invalid.value) == "Model Runner V2 requires Triton."
    assert _reason(RuntimeError("no memory\nat all")) == "no memory"
    assert _reason(RuntimeError()) == "RuntimeError"


def test_the_cause_of_a_failed_start_is_the_first_error_of_its_log() -> None:
    where = "(Worker pid=7) ERROR 11-17 10:45:21 [multiproc_executor.py:953]"
    lines = [
        "(Worker pid=7) WARNING 11-17 10:44:20 [utils.py:255] errors are possible: see below",
        f"{where} Traceback (most recent call last):",
        f"{where}     raise ValueError(",
        f"{where} ValueError: Available memory on node 0 (9.0/18.96 GiB) is less than desired.",
        "Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace.",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ]
    assert find_root_cause(lines) == "ValueError: Available memory on node 0 (9.0/18.96 GiB) is less than desired."
    assert find_root_cause([lines[0], *lines[4:]]) == ""


def test_lines_of_started_processes_are_recorded_and_still_written(capfd: pytest.CaptureFixture[str]) -> None:
    log = StartupLog()
    program = "import sys; print('KeyError: no weights', file=sys.stderr)"
    with log.recording():
        subprocess.run([sys.executable, "-c", program], check=True)
    assert log.root_cause() == "KeyError: no weights"
    print("afterwards", file=sys.stderr)
    assert capfd.readouterr().err.splitlines() == ["KeyError: no weights", "afterwards"]
    assert log.root_cause() == "KeyError: no weights"


def test_greedy_tokens_need_no_processor_and_others_do() -> None:
    assert not needs_own_sampling(PROMPT, replace(GREEDY, max_tokens=5, stop=("a",), logprobs=2, top_p=0.5, seed=3))
    assert needs_own_sampling(PROMPT, Sampling())
    assert needs_own_sampling(PROMPT, replace(GREEDY, thinking_budget=3))
    assert needs_own_sampling(PROMPT, replace(GREEDY, min_tokens=3))
    assert needs_own_sampling(PROMPT, replace(GREEDY, repetition_penalty=1.1))
    assert needs_own_sampling(replace(PROMPT, healing=b"a"), GREEDY)
    assert needs_own_sampling(replace(PROMPT, answer_at=3), GREEDY)


def test_a_process_ends_with_the_engine_process_that_it_watches() -> None:
    host = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watch = "import time; from palaver.processes import exit_with_host; exit_with_host(); time.sleep(60)"
    environment = os.environ | {HOST_VARIABLE: str(host.pid)}
    watching = subprocess.Popen([sys.executable, "-c", watch], env=environment)
    with pytest.raises(subprocess.TimeoutExpired):
        watching.wait(2)
    host.kill()
    host.communicate()
    assert watching.wait(20) == 0
