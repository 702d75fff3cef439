"""From a name to a model in its engine host: a folder, or a training configuration with its adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from palaver.chat.loading import Loading, hosted
from palaver.chat.model import Model
from palaver.chat.models import Models
from palaver.chat.utterance import Request
from palaver.errors import BadParameter, UnknownModel
from palaver.messages import user
from palaver.sampling import Sampling
from tests.tiny import PREOPENED


async def test_what_a_training_configuration_made_is_loaded(tiny_model: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: adapters are not tested")
    from transformers import AutoModelForCausalLM

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "out")
    (tmp_path / "own.jinja").write_text(PREOPENED)
    configuration = tmp_path / "run.yml"
    configuration.write_text(
        f"base_model: {tiny_model}\nadapter: lora\noutput_dir: ./out\nsequence_len: 256\n"
        "chat_template: jinja\nchat_template_jinja: own.jinja\nlearning_rate: 0.0002\n"
    )
    told: list[str] = []
    loaded = await hosted(Loading())(str(configuration), lambda _, note: told.append(note))
    try:
        assert loaded.engine.info.context_length == 256
        prompt = loaded.prompt(Request((user("Hello"),), Sampling()))
        assert loaded.vocabulary[prompt.context_ids[-2]] == b"<think>"
        reply = await loaded.reply(Request((user("Hello"),), Sampling(temperature=0, max_tokens=4)))
        assert len(reply.token_ids) == 4
        counted = await loaded.engine.counted()
        assert counted["prompt_tokens"] > 0
    finally:
        await loaded.engine.close()
    assert "loading the weights" in told


async def test_a_model_that_is_not_there_and_a_template_that_is_none() -> None:
    with pytest.raises(UnknownModel):
        await hosted(Loading())("no such thing", lambda *_: None)
    with pytest.raises(BadParameter, match="--template"):
        Loading(Path("no-such.jinja"))


async def test_a_model_on_its_way_is_told_as_loading() -> None:
    import asyncio

    gate = asyncio.Event()

    async def load(name: str, _: object) -> Model:
        await gate.wait()
        raise UnknownModel(name, "there is none.")

    models = Models(load)
    models.load("one")
    assert models.card().state == "loading"
    models.load("two")
    assert models.card().name == "two"
    gate.set()
    with pytest.raises(UnknownModel):
        await models.ready()
    await models.unload()
