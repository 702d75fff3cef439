"""From a name to a model in its engine host: a folder, or a training configuration with its adapter."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from palaver.chat.engine_choice import LoadOptions
from palaver.chat.interface import ModelState
from palaver.chat.model import Model, extend_limit, load_model_format
from palaver.chat.model_loader import ModelLoader
from palaver.chat.model_pool import ModelPool
from palaver.chat.reply_stream import ReplyRequest
from palaver.errors import BadParameter, BrokenModel, NoTemplate, UnknownModel
from palaver.formats.base import RenderOptions
from palaver.messages import user
from palaver.models.axolotl import TEMPLATES
from palaver.models.resolver import ResolvedModel
from palaver.sampling import MAX_TOKENS, Sampling, check_sampling
from tests.chat.scripted_service import model as scripted_model
from tests.tiny import PREOPENED


async def test_a_trained_model_is_loaded_by_its_configuration(tiny_model: Path, tmp_path: Path) -> None:
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
    received: list[str] = []
    loaded = await ModelLoader(LoadOptions()).load(str(configuration), lambda _, note: received.append(note))
    try:
        assert loaded.engine.info.context_length == 256
        prompt = loaded.prompt(ReplyRequest((user("Hello"),), Sampling()))
        assert loaded.vocabulary[prompt.context_ids[-2]] == b"<think>"
        reply = await loaded.reply(ReplyRequest((user("Hello"),), Sampling(temperature=0, max_tokens=4)))
        assert len(reply.token_ids) == 4
        counted = await loaded.engine.metrics()
        assert counted["prompt_tokens"] > 0
    finally:
        await loaded.engine.close()
    assert "loading the weights" in received


def bare(model: Path, folder: Path) -> Path:
    """The model without a chat template."""
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def opening(model: ResolvedModel) -> str:
    """What the model would read of a greeting."""
    tokenizer, format = load_model_format(model, LoadOptions())
    ids = format.render((user("Hi"),), (), RenderOptions(), ()).context_ids
    return b"".join(tokenizer.vocabulary[id] for id in ids).decode()


def test_which_template_a_training_configuration_means(tiny_model: Path, tmp_path: Path) -> None:
    base = bare(tiny_model, tmp_path / "base")
    saved = tmp_path / "saved"
    saved.mkdir()
    named = ResolvedModel(base, output_folder=saved, template_name="mistral_v3_tekken")
    assert opening(named).endswith("[INST]Hi[/INST]")
    fallback = opening(ResolvedModel(base, fallback_template="phi_35"))
    assert fallback.endswith("<|user|>\nHi<|end|>\n<|assistant|>\n")
    own = opening(ResolvedModel(tiny_model, fallback_template="phi_35"))
    assert own == opening(ResolvedModel(tiny_model))
    (saved / "chat_template.jinja").write_text(TEMPLATES["alpaca"])
    assert opening(named).endswith("### Instruction:\nHi\n\n### Response:\n"), "what it was trained with comes first"
    assert opening(replace(named, template=TEMPLATES["phi_35"])).startswith("<|user|>")


def test_an_unknown_template_is_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    trained = ResolvedModel(tiny_model, template_name="made-up")
    with pytest.raises(BrokenModel, match="'made-up'"):
        opening(trained)
    base = bare(tiny_model, tmp_path / "base")
    with pytest.raises(BrokenModel, match="'made-up'"):
        opening(ResolvedModel(base, fallback_template="made-up"))
    with pytest.raises(NoTemplate):
        opening(ResolvedModel(base))
    file = tmp_path / "given.jinja"
    file.write_text(TEMPLATES["phi_35"])
    load_model_format(trained, LoadOptions(template=file))


def test_a_template_of_an_installed_axolotl(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    templates = tmp_path / "axolotl" / "utils" / "chat_templates" / "templates"
    templates.mkdir(parents=True)
    (tmp_path / "axolotl" / "__init__.py").write_text("raise RuntimeError('it must not be imported')")
    (templates / "made-up.jinja").write_text(TEMPLATES["phi_35"])
    (templates / "chatml.jinja").write_text(TEMPLATES["alpaca"])
    monkeypatch.syspath_prepend(tmp_path)
    assert opening(ResolvedModel(tiny_model, template_name="made-up")).startswith("<|user|>")
    assert opening(ResolvedModel(tiny_model, template_name="chatml")).endswith("### Response:\n"), "before our own"
    with pytest.raises(BrokenModel, match="templates/made-up"):
        opening(ResolvedModel(tiny_model, template_name="../templates/made-up"))


def test_a_named_template_of_the_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    base = bare(tiny_model, tmp_path / "base")
    path = base / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    named = {"default": TEMPLATES["chatml"], "made-up": TEMPLATES["phi_35"]}
    listed = [{"name": name, "template": text} for name, text in named.items()]
    path.write_text(json.dumps(config | {"chat_template": listed}))
    assert opening(ResolvedModel(base, template_name="made-up")).startswith("<|user|>")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "second.jinja").write_text(TEMPLATES["alpaca"])
    assert opening(ResolvedModel(base, template_name="second")).endswith("### Response:\n")


async def test_a_missing_model_and_an_invalid_template() -> None:
    with pytest.raises(UnknownModel):
        await ModelLoader(LoadOptions()).load("no such thing", lambda *_: None)
    with pytest.raises(BadParameter, match="--template"):
        LoadOptions(Path("no-such.jinja"))


async def test_the_card_of_a_starting_engine_is_loading() -> None:
    gate = asyncio.Event()

    async def load(name: str, _: object) -> Model:
        await gate.wait()
        raise UnknownModel(name, "there is none.")

    models = ModelPool(load)
    models.load("one")
    assert models.card().state == "loading"
    models.load("two")
    assert models.card().name == "two"
    gate.set()
    with pytest.raises(UnknownModel):
        await models.ready()
    await models.unload()


async def test_the_current_model_serves_until_the_other_is_checked() -> None:
    gate, requested = asyncio.Event(), []

    async def load(name: str, _: object) -> Model:
        requested.append(name)
        return scripted_model(name=name)

    async def measure(name: str, _: object) -> int:
        await gate.wait()
        if name == "wrong":
            raise UnknownModel(name, "there is none.")
        return 0

    models = ModelPool(load, measure=measure)
    gate.set()
    models.load("first")
    await models.ready()
    gate.clear()
    models.load("second")
    await asyncio.sleep(0)
    assert models.current().name == models.card().name == "first"
    assert (models.loading_card().name, models.loading_card().state) == ("second", ModelState.LOADING)
    gate.set()
    assert (await models.loaded()).name == "second"
    models.load("wrong")
    with pytest.raises(UnknownModel, match=r"there is none\. second is still in use\."):
        await models.loaded()
    assert models.current().name == "second"
    assert models.card().note.endswith("second is still in use.")
    assert requested == ["first", "second"]
    await models.unload()


async def test_a_model_that_fails_to_start_is_replaced_by_the_previous_one() -> None:
    async def load(name: str, _: object) -> Model:
        if name == "broken":
            raise BrokenModel("Its weights are damaged.")
        return scripted_model(name=name)

    models = ModelPool(load)
    models.load("good")
    await models.ready()
    models.load("broken")
    with pytest.raises(BrokenModel, match=r"damaged\. good is still in use\."):
        await models.loaded()
    assert (await models.ready()).name == "good"
    assert models.card().state is ModelState.READY
    await models.unload()
    assert models.card().state is ModelState.NONE


@pytest.mark.parametrize(("limit", "extended"), [(None, None), (10, 17), (MAX_TOKENS, MAX_TOKENS)])
def test_an_extended_limit_is_a_limit_that_may_be_set(limit: int | None, extended: int | None) -> None:
    sampling = extend_limit(Sampling(max_tokens=limit), 7)
    assert sampling.max_tokens == extended
    check_sampling(sampling)
