"""Training configurations of axolotl as names of models."""

from __future__ import annotations

import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from jinja2 import Environment

from palaver.chat.engine_choice import LoadOptions
from palaver.chat.interface import Column
from palaver.chat.service import Service
from palaver.commands.options import make_pool
from palaver.errors import BrokenModel
from palaver.events import Finished
from palaver.messages import user
from palaver.models.axolotl import (
    TEMPLATES,
    TrainedModel,
    is_configuration,
    list_checkpoints,
    read_configuration,
    split_checkpoint,
)
from palaver.models.catalog import Catalog, CatalogEntry
from palaver.models.resolver import resolve_folder, resolve_model
from palaver.store import open_store


def config(folder: Path, text: str) -> Path:
    path = folder / "config.yml"
    path.write_text(text)
    return path


def adapter(folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_an_adapter_with_its_output_folder(tmp_path: Path) -> None:
    out = adapter(tmp_path / "out")
    path = config(
        tmp_path,
        "base_model: owner/name\nadapter: lora\noutput_dir: ./out\nsequence_len: 2048\n"
        "learning_rate: 0.0002\nmicro_batch_size: 2\ndatasets:\n  - path: data.jsonl\n    type: chat_template\n",
    )
    assert is_configuration(str(path))
    assert read_configuration(path) == TrainedModel("owner/name", adapter=out, output_folder=out, context_length=2048)


def test_a_model_that_was_trained_whole(tmp_path: Path) -> None:
    path = config(tmp_path, "base_model: owner/name\noutput_dir: out\n")
    before = read_configuration(path)
    assert before.model == "owner/name"
    assert "no trained model yet" in before.notes[0]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    assert read_configuration(path) == TrainedModel(str(tmp_path / "out"), output_folder=tmp_path / "out")


def test_checkpoints_of_a_training(tmp_path: Path) -> None:
    path = config(tmp_path, "base_model: owner/name\nadapter: lora\noutput_dir: ./out\nsequence_len: 2048\n")
    assert list_checkpoints(path) == ()
    out = adapter(tmp_path / "out")
    for number in (1000, 200):
        adapter(out / f"checkpoint-{number}")
    (out / "checkpoint-300").mkdir()
    (out / "checkpoint-last").mkdir()
    assert list_checkpoints(path) == ("checkpoint-200", "checkpoint-300", "checkpoint-1000")
    name = f"{path}@checkpoint-200"
    assert is_configuration(name)
    assert split_checkpoint(name) == (path, "checkpoint-200")
    found = read_configuration(path, "checkpoint-200")
    cut = out / "checkpoint-200"
    assert found == TrainedModel("owner/name", adapter=cut, output_folder=out, context_length=2048)
    (out / "checkpoint-200" / "chat_template.jinja").write_text("{{ messages }}")
    assert read_configuration(path, "checkpoint-200").output_folder == out / "checkpoint-200"
    for missing in ("checkpoint-300", "checkpoint-7"):
        with pytest.raises(
            BrokenModel, match=rf"no {missing} in ./out \(there are: checkpoint-200, checkpoint-300, .*\)"
        ):
            read_configuration(path, missing)
    assert not is_configuration(f"{path}@last")


def test_checkpoints_are_offered_with_their_configuration(tmp_path: Path) -> None:
    path = config(tmp_path, "base_model: owner/name\noutput_dir: out\n")
    checkpoint = tmp_path / "out" / "checkpoint-20"
    shutil.copytree(resolve_folder("sprout"), checkpoint)
    run = CatalogEntry("run", str(path), {"exact": True})
    catalog = Catalog((str(path),), (run,))
    assert catalog.names() == (str(path), "run", f"{path}@checkpoint-20", "run@checkpoint-20")
    assert catalog.resolve("run@checkpoint-20") == "run@checkpoint-20"
    assert catalog.resolve("run@checkpoint-30") is None
    entry = catalog.entry("run@checkpoint-20")
    assert entry == CatalogEntry("run@checkpoint-20", f"{path}@checkpoint-20", {"exact": True})
    assert resolve_model(entry.source).folder == checkpoint


async def test_two_checkpoints_are_compared(tmp_path: Path) -> None:
    path = config(tmp_path, "base_model: owner/name\noutput_dir: out\n")
    for number in (20, 40):
        shutil.copytree(resolve_folder("sprout"), tmp_path / "out" / f"checkpoint-{number}")
    names = [f"{path}@checkpoint-{number}" for number in (20, 40)]
    pool = make_pool(LoadOptions(compiled=False), tmp_path, str(path))
    pool.load(names[0])
    with open_store(tmp_path / "data") as store:
        async with Service(store, pool) as service:
            chat = service.chat(store.users.ensure().id)
            assert set(names) <= set(await chat.models())
            talk = await chat.create_conversation(parameters={"max_tokens": 4, "temperature": 0})
            await chat.wait_until_ready()
            columns = [Column({"model": name}) for name in names]
            compared = await chat.compare(talk.id, None, user("Hello!"), columns)
            replies = []
            for one in compared.replies:
                async with chat.events(one.reply_id) as events:
                    assert isinstance([entry async for entry in events][-1].event, Finished)
                replies.append(await chat.message(one.reply_id))
            assert [one.reply.settings.model for one in replies if one.reply is not None] == names
            assert replies[0].parts == replies[1].parts, "they are copies of one model"


def test_a_base_model_in_a_folder_beside_it(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    assert read_configuration(config(tmp_path, "base_model: ./base\n")).model == str(tmp_path / "base")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("chat_template: tokenizer_default", {}),
        ("chat_template: tokenizer_default_fallback_llama3", {"fallback_template": "llama3"}),
        ("chat_template: chatml", {"template_name": "chatml"}),
        (
            "chat_template: jinja\nchat_template_jinja: '{{ messages[0].content }}'",
            {"template": "{{ messages[0].content }}"},
        ),
        ("chat_template: jinja\nchat_template_jinja: own.jinja", {"template": "{% own %}"}),
        ("chat_template: '{{ messages }}'", {"template": "{{ messages }}"}),
        ("datasets:\n  - {path: a, type: chat_template, chat_template: chatml}", {"template_name": "chatml"}),
        ("datasets:\n  - {path: a, type: chatml.argilla}", {"template_name": "chatml"}),
        ("datasets:\n  - {path: a, type: alpaca_chat.load_qa}", {"fallback_template": "alpaca"}),
        ("datasets:\n  - {path: a, type: completion}", {}),
        ("", {}),
    ],
)
def test_the_template(tmp_path: Path, text: str, expected: dict[str, str]) -> None:
    (tmp_path / "own.jinja").write_text("{% own %}")
    found = read_configuration(config(tmp_path, f"base_model: owner/name\n{text}\n"))
    assert replace(found, notes=()) == TrainedModel("owner/name", **expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("adapter: lora", "no base_model"),
        ("base_model: owner/name\nadapter: lora", "no adapter in ./model-out"),
        ("base_model: owner/name\nadapter: llama-adapter", "can't be loaded"),
        (
            "base_model: owner/name\nchat_template: jinja\nchat_template_jinja: missing.jinja",
            "no chat template missing",
        ),
        ("- a\n- b", "is no mapping of settings"),
        ("a: [", "can't be read as YAML"),
    ],
)
def test_what_is_wrong_is_told_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(BrokenModel, match=sentence) as error:
        read_configuration(config(tmp_path, text))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_take_bitsandbytes(tmp_path: Path, bits: int) -> None:
    path = config(tmp_path, f"base_model: owner/name\nload_in_{bits}bit: true\n")
    if find_spec("bitsandbytes") is not None:
        assert read_configuration(path).quantize_bits == bits
        return
    with pytest.raises(BrokenModel, match=f"load_in_{bits}bit needs the Python package bitsandbytes"):
        read_configuration(path)


def test_weights_that_are_not_quantised(tmp_path: Path) -> None:
    path = config(tmp_path, "base_model: owner/name\nload_in_8bit: false\nload_in_4bit: false\n")
    assert read_configuration(path).quantize_bits is None


def test_other_files_are_none(tmp_path: Path) -> None:
    assert not is_configuration(str(tmp_path / "missing.yml"))
    assert not is_configuration("sprout")


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "And you?"},
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "alpaca",
            "<s>Be brief.\n\n### Instruction:\nHi\n\n### Response:\nHello!</s>\n\n"
            "### Instruction:\nAnd you?\n\n### Response:\n",
        ),
        (
            "chatml",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!"
            "<|im_end|>\n<|im_start|>user\nAnd you?<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("deepseek_v2", "<s>Be brief.\n\n<｜User｜>Hi<｜Assistant｜>Hello!</s><｜User｜>And you?<｜Assistant｜>"),
        (
            "gemma",
            "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello!<end_of_turn>\n"
            "<start_of_turn>user\nAnd you?<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            "llama3",
            "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
            "<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|><|start_header_id|>user"
            "<|end_header_id|>\n\nAnd you?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("mistral_v1", "<s> [INST] Be brief.\n\nHi [/INST] Hello!</s> [INST] And you? [/INST]"),
        ("mistral_v2v3", "<s>[INST] Be brief.\n\nHi[/INST] Hello!</s>[INST] And you?[/INST]"),
        ("mistral_v3_tekken", "<s>[INST]Be brief.\n\nHi[/INST]Hello!</s>[INST]And you?[/INST]"),
        (
            "phi_35",
            "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello!<|end|>\n"
            "<|user|>\nAnd you?<|end|>\n<|assistant|>\n",
        ),
    ],
)
def test_templates_by_name(name: str, expected: str) -> None:
    variables = {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
    template = Environment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATES[name])
    assert template.render(messages=MESSAGES, **variables) == expected
    prompt = template.render(messages=MESSAGES[1:2], **variables)
    assert (template.render(messages=MESSAGES[1:3], **{**variables, "add_generation_prompt": False})).startswith(prompt)


def test_every_name_is_tried_above() -> None:
    tried = next(mark for mark in test_templates_by_name.pytestmark if mark.name == "parametrize")  # type: ignore[attr-defined]
    assert {name for name, _ in tried.args[1]} == set(TEMPLATES)


def test_the_settings_of_a_diffusion_training(tmp_path: Path) -> None:
    plain = read_configuration(config(tmp_path, "base_model: owner/name\n"))
    assert plain.diffusion is None
    plugin = "plugins:\n  - axolotl.integrations.diffusion.DiffusionPlugin\n"
    named = read_configuration(config(tmp_path, f"base_model: owner/name\n{plugin}"))
    assert named.diffusion == {}
    text = f"base_model: owner/name\n{plugin}diffusion:\n  num_diffusion_steps: 64\n  generation_temperature: 0.2\n"
    assert read_configuration(config(tmp_path, text)).diffusion == {
        "num_diffusion_steps": 64,
        "generation_temperature": 0.2,
    }
    with pytest.raises(BrokenModel, match="diffusion must be a mapping"):
        read_configuration(config(tmp_path, "base_model: owner/name\ndiffusion: 7\n"))
