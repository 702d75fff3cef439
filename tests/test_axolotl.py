"""Training configurations of axolotl as names of models."""

from __future__ import annotations

from pathlib import Path

import pytest

from palaver.errors import BrokenModel
from palaver.models.axolotl import CHATML, Trained, is_configuration, read


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
    assert read(path) == Trained("owner/name", out, None, 2048)


def test_a_model_that_was_trained_whole(tmp_path: Path) -> None:
    path = config(tmp_path, "base_model: owner/name\noutput_dir: out\n")
    before = read(path)
    assert before.model == "owner/name"
    assert "no trained model yet" in before.notes[0]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    assert read(path) == Trained(str(tmp_path / "out"))


def test_a_base_model_in_a_folder_beside_it(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    assert read(config(tmp_path, "base_model: ./base\n")).model == str(tmp_path / "base")


@pytest.mark.parametrize(
    ("text", "template"),
    [
        ("chat_template: tokenizer_default", None),
        ("chat_template: chatml", CHATML),
        ("chat_template: jinja\nchat_template_jinja: '{{ messages[0].content }}'", "{{ messages[0].content }}"),
        ("chat_template: jinja\nchat_template_jinja: own.jinja", "{% own %}"),
        ("chat_template: '{{ messages }}'", "{{ messages }}"),
        ("datasets:\n  - {path: a, type: chat_template, chat_template: chatml}", CHATML),
        ("datasets:\n  - {path: a, type: chatml.argilla}", CHATML),
        ("datasets:\n  - {path: a, type: alpaca}", None),
        ("", None),
    ],
)
def test_the_template(tmp_path: Path, text: str, template: str | None) -> None:
    (tmp_path / "own.jinja").write_text("{% own %}")
    found = read(config(tmp_path, f"base_model: owner/name\n{text}\n"))
    assert found.template == template


def test_a_template_that_is_not_at_hand_is_told(tmp_path: Path) -> None:
    found = read(config(tmp_path, "base_model: owner/name\nchat_template: llama3\n"))
    assert found.template is None
    assert any("'llama3' is not at hand" in note for note in found.notes)


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
        ("- a\n- b", "holds no settings"),
        ("a: [", "can't be read as YAML"),
    ],
)
def test_what_is_wrong_is_told_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(BrokenModel, match=sentence) as error:
        read(config(tmp_path, text))
    assert "\n" not in str(error.value)


def test_other_files_are_none(tmp_path: Path) -> None:
    assert not is_configuration(str(tmp_path / "missing.yml"))
    assert not is_configuration("sprout")


def test_the_template_of_its_own_is_one_that_formats_learn(tmp_path: Path) -> None:
    from jinja2 import Environment

    messages = [{"role": "user", "content": "Hi"}]
    text = Environment().from_string(CHATML).render(messages=messages, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
