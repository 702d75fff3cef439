"""LoRA adapters on vLLM: which files are refused before it starts, and replies beside those of the merged weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="NOTHING IS SHOWN HERE: peft is not installed")

from safetensors.torch import load_file, save_file

from palaver.engines.core.checkpoint import open_checkpoint
from palaver.engines.core.options import EngineOptions
from palaver.engines.host.supervisor import HostedEngine
from palaver.engines.torch import load
from palaver.engines.vllm.adapter import lora_arguments
from palaver.engines.vllm.engine import VllmSource
from palaver.errors import BrokenModel, UnsafeWeights
from palaver.sampling import Sampling
from tests.adapter_files import write_peft_adapter
from tests.engines.engine_cases import EngineCases, missing
from tests.engines.generate import Run, continued, run

ROUNDING = 1e-3
"""How much log-probabilities of one token may differ: two float32 computations in another order."""
SAMPLINGS = (
    Sampling(temperature=0, max_tokens=24, logprobs=3),
    Sampling(temperature=1.2, top_p=0.95, repetition_penalty=1.1, min_tokens=24, max_tokens=24, seed=4, logprobs=3),
)
Change = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any] | None]
"""Changes the settings of an adapter; returns its tensors, if they are others."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> EngineCases:
    return EngineCases(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def adapter(cases: EngineCases) -> Path:
    return write_peft_adapter(cases.sprout, cases.folder / "adapter")


def changed(adapter: Path, folder: Path, change: Change) -> Path:
    shutil.copytree(adapter, folder)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors = change(settings, tensors) or tensors
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def test_room_is_made_for_the_largest_rank(adapter: Path, cases: EngineCases, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(cases.sprout)
    assert lora_arguments(adapter, checkpoint) == {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    larger = changed(adapter, tmp_path / "larger", lambda settings, _: settings["rank_pattern"].update(q_proj=24))
    assert lora_arguments(larger, checkpoint)["max_lora_rank"] == 32


def rename(old: str, new: str) -> Change:
    return lambda _, tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def cut(part: str, axis: int) -> Change:
    return lambda _, tensors: {
        name: tensor.narrow(axis, 0, tensor.shape[axis] - 1) if part in name else tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (rename("layers.1.", "layers.99."), r"there is no layer 'model\.layers\.99\.\S+'\.$"),
        (cut("q_proj.lora_A", 1), r"the layer 'model\.layers\.\d+\.self_attn\.q_proj' has another size\.$"),
        (cut("q_proj.lora_B", 0), r"the layer 'model\.layers\.\d+\.self_attn\.q_proj' has another size\.$"),
        (cut("q_proj.lora_A", 0), r"the matrices of \S+ don't belong together\.$"),
        (rename("q_proj.lora_A.weight", "q_proj.magnitude"), "vLLM doesn't compute '.+' of an adapter"),
        (lambda settings, _: settings.update(r=513), "has the rank 513: vLLM takes ranks up to 512"),
        (lambda settings, _: settings.update(peft_type="IA3"), "isn't a LoRA adapter"),
        (lambda settings, _: settings.pop("r") and None, "isn't a LoRA adapter"),
    ],
)
def test_what_vllm_would_not_apply_as_it_is_is_refused(
    change: Change, reason: str, adapter: Path, cases: EngineCases, tmp_path: Path
) -> None:
    wrong = changed(adapter, tmp_path / "wrong", change)
    with pytest.raises(BrokenModel, match=reason) as refused:
        lora_arguments(wrong, open_checkpoint(cases.sprout))
    assert "\n" not in str(refused.value)


def test_what_is_no_adapter_is_refused(cases: EngineCases, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(cases.sprout)
    for path in (tmp_path, cases.sprout / "config.json"):
        with pytest.raises(BrokenModel, match=r"contains no adapter \(adapter_model\.safetensors\)"):
            lora_arguments(path, checkpoint)
    (tmp_path / "adapter_model.pt").write_bytes(b"x")
    with pytest.raises(UnsafeWeights, match=r"adapter_model\.pt"):
        lora_arguments(tmp_path, checkpoint)
    save_file({}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    with pytest.raises(BrokenModel, match="has no matrices"):
        lora_arguments(tmp_path, checkpoint)


async def test_the_error_of_a_worker_is_the_sentence() -> None:
    class Llm:
        async def add_lora(self, request: object) -> None:
            words = "Worker failed with error 'vLLM does not yet support DoRA.', please check the stack trace above"
            raise RuntimeError(f"Call to add_lora method failed: {words} for the root cause")

    source = VllmSource(Llm(), info=None, workers=None, make_parameters=dict, lora_request=1)  # type: ignore[arg-type]
    with pytest.raises(BrokenModel) as refused:
        await source.open()
    assert str(refused.value) == "vLLM can't load the adapter: vLLM does not yet support DoRA."


async def replies_of_torch(cases: EngineCases, adapter: Path | None) -> list[Run]:
    options = EngineOptions(compiled=False, threads=1)
    engine = load(cases.sprout, vocabulary=cases.vocabulary, device="cpu", adapter=adapter, options=options)
    try:
        return [await run(engine, cases.prompt("Tell me a story."), sampling) for sampling in SAMPLINGS]
    finally:
        await engine.close()


@pytest.mark.slow  # vLLM starts
async def test_replies_are_those_of_the_merged_weights(adapter: Path, cases: EngineCases) -> None:
    if reason := missing("vllm"):
        pytest.skip(reason)
    plain, merged = [await replies_of_torch(cases, one) for one in (None, adapter)]
    prompt = cases.prompt("Tell me a story.")
    async with HostedEngine(replace(cases.spec("vllm"), adapter=adapter)) as engine:
        replies = [await run(engine, prompt, sampling) for sampling in SAMPLINGS]
        rests = [
            await run(engine, continued(prompt, reply.ids[:9]), sampling)
            for reply, sampling in zip(replies, SAMPLINGS, strict=True)
        ]
    for reply, rest, expected, other in zip(replies, rests, merged, plain, strict=True):
        assert reply.ids == expected.ids != other.ids
        assert reply.ids[:9] + rest.ids == reply.ids
        for step, torch_step in zip(reply.steps, expected.steps, strict=True):
            assert step.logprob == pytest.approx(torch_step.logprob, abs=ROUNDING)
            likeliest, torch_likeliest = ([one.logprob for one in both.alternatives] for both in (step, torch_step))
            assert likeliest == pytest.approx(torch_likeliest, abs=ROUNDING)


@pytest.mark.slow  # vLLM starts
async def test_an_adapter_that_vllm_refuses_is_a_sentence(adapter: Path, cases: EngineCases, tmp_path: Path) -> None:
    """When the model is loaded. The first request would end vLLM's process again and again."""
    if reason := missing("vllm"):
        pytest.skip(reason)
    dora = changed(adapter, tmp_path / "dora", lambda settings, _: settings.update(use_dora=True))
    with pytest.raises(BrokenModel) as refused:
        async with HostedEngine(replace(cases.spec("vllm"), adapter=dora)):
            pass
    assert str(refused.value).startswith("vLLM can't load the adapter: ")
    assert "DoRA" in str(refused.value)
    assert "\n" not in str(refused.value)
