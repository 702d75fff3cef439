"""The command line with a GGUF file: inspect, ask, chat, replay and formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("xllamacpp", reason="NOTHING IS SHOWN HERE: xllamacpp is not installed")

from palaver.engines.base import BY_BATCH, BY_CACHE, BY_TEXT
from palaver.models.resolver import resolve_folder
from palaver.store import open_store
from tests.adapter_files import write_peft_adapter
from tests.engines.compiler import needs_a_compiler
from tests.gguf_files import convert_adapter, convert_qwen3
from tests.mmproj_files import make_projector
from tests.test_cli import run

pytestmark = needs_a_compiler


@pytest.fixture(scope="module")
def sprout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_qwen3(resolve_folder("sprout"), tmp_path_factory.mktemp("gguf") / "sprout-F16.gguf", "f16")


def test_inspect_says_which_engine_why_and_how_fast(sprout: Path) -> None:
    found = inspected(sprout, "--device", "cpu")
    assert found["engine"] == "compiled, because the model is a GGUF file of a model that compiled steps know"
    assert found["computation"] == "compiled steps"
    assert found["exact results"] == BY_TEXT
    llamacpp = inspected(sprout, "--no-compile")
    assert llamacpp["engine"] == "llamacpp, because the model is a GGUF file"
    assert llamacpp["exact results"] in (BY_CACHE, BY_BATCH)
    assert inspected(sprout, "--engine", "llamacpp")["engine"] == "llamacpp, by --engine; the model is a GGUF file"


def inspected(file: Path, *flags: str) -> dict[str, str]:
    """What every engine has in common is checked."""
    result = run("inspect", file, *flags)
    assert result.exit_code == 0, result.output
    first, *lines = result.stdout.splitlines()
    assert first.startswith("needs about 0.02 GB on cpu")
    found = dict(line.split(": ", 1) for line in lines)
    assert found["runs on"] == "cpu, F16"
    assert found["sampling defaults"] == "temperature 0.6, top_k 20, top_p 0.95"
    assert found["speed"].endswith("tokens a second in one reply, measured now")
    assert found["and ends with"] == "'<|im_end|>'"
    return found


def test_options_of_the_other_engine_are_refused(sprout: Path) -> None:
    refused = run("inspect", sprout, "--engine", "torch")
    assert refused.exit_code == 2
    assert "--engine 'torch': a GGUF file is run by llamacpp" in refused.stderr
    both = run("ask", "Hi", "-m", sprout, "--compile", "--engine", "llamacpp")
    assert "--compile True: needs --engine compiled" in both.stderr
    assert "--gpu-layers 3: needs --engine llamacpp" in run("inspect", sprout, "--compile", "--gpu-layers", "3").stderr
    assert "is run by torch" in run("ask", "Hi", "-m", "sprout", "--engine", "llamacpp").stderr
    assert "is run by torch" in run("ask", "Hi", "-m", "sprout", "--engine", "compiled").stderr


def test_compiled_steps_may_be_required(sprout: Path, tmp_path: Path) -> None:
    """An error is one sentence."""
    assert inspected(sprout, "--compile")["engine"].startswith("compiled")
    other = convert_qwen3(resolve_folder("sprout"), tmp_path / "other.gguf", extra={"qwen3.logit_scale": 2.0})
    assert "42" in run("ask", "What is 12 + 30?", "-m", other, "--set", "temperature=0").stdout
    for command in (("inspect", other), ("ask", "Hi", "-m", other)):
        refused = run(*command, "--compile")
        assert refused.exit_code == 1
        assert "Compiled steps can't be used: it has the unknown setting logit_scale." in refused.stderr
        assert refused.stderr.count("\n") == 1


def test_a_projector_is_named(sprout: Path, tmp_path: Path) -> None:
    mmproj = make_projector(tmp_path / "mmproj.gguf", "mlp", 256)
    seeing = run("inspect", sprout, "--mmproj", mmproj)
    assert seeing.exit_code == 0, seeing.output
    assert "accepts: text, image, video" in seeing.stdout
    refused = run("inspect", sprout, "--mmproj", sprout)
    assert (refused.exit_code, "is not a projector for pictures or sound" in refused.stderr) == (1, True)
    assert "there is no such file" in run("inspect", sprout, "--mmproj", tmp_path / "missing.gguf").stderr
    assert "is for a GGUF file" in run("inspect", "sprout", "--mmproj", mmproj).stderr


def test_an_adapter_is_applied_by_llama_cpp(tmp_path: Path) -> None:
    """Compiled steps, which run such a file otherwise, have no adapters. The answer is that of the merged weights."""
    pytest.importorskip("peft", reason="NOTHING IS SHOWN HERE: peft is not installed")
    model = convert_qwen3(resolve_folder("sprout"), tmp_path / "sprout.gguf")
    folder = write_peft_adapter(resolve_folder("sprout"), tmp_path / "adapter")
    adapter = convert_adapter(folder, tmp_path / "adapter.gguf")

    def ask(*flags: str | Path) -> str:
        result = run("ask", "Tell me a story.", *flags, "--json", "--set", "temperature=0", "--set", "max_tokens=24")
        assert result.exit_code == 0, result.output
        return str(json.loads(result.stdout)["answer"])

    merged = ask("-m", "sprout", "--adapter", folder)
    assert ask("-m", model, "--adapter", adapter) == merged != ask("-m", model)
    assert ask("-m", model, "--adapter", adapter, "--engine", "llamacpp") == merged
    for flags in (("--compile",), ("--engine", "compiled")):
        refused = run("ask", "Hi", "-m", model, "--adapter", adapter, *flags)
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
        assert "--adapter" in refused.stderr
        assert "needs --engine llamacpp" in refused.stderr
    refused = run("ask", "Hi", "-m", model, "--adapter", folder)
    assert "A GGUF file takes an adapter in a GGUF file" in refused.stderr


@pytest.mark.parametrize("engine", ["auto", "llamacpp"])
def test_ask_answers(engine: str, sprout: Path) -> None:
    flags = ("-m", sprout, "--engine", engine, "--json")
    reply = json.loads(run("ask", "What is 12 + 30?", "--set", "temperature=0", *flags).stdout)
    assert reply["answer"].endswith(" 42.")
    raw = run("ask", "Once upon", "--raw", "--set", "max_tokens=4", *flags)
    assert json.loads(raw.stdout)["usage"]["reply_tokens"] == 4


@pytest.mark.parametrize(("flag", "engine"), [("--compile", "compiled/"), ("--no-compile", "llama.cpp/b10566")])
def test_a_stored_reply_is_replayed(flag: str, engine: str, sprout: Path, tmp_path: Path) -> None:
    """By the engine that generated it."""
    data = ("--data", tmp_path)
    settings = ("--set", "max_tokens=12", "--set", "seed=1")
    said = run("chat", sprout, "--local", flag, *data, *settings, input="Tell me a long story.\n")
    assert said.exit_code == 0, said.output
    with open_store(tmp_path) as store:
        (conversation,) = store.conversations.list(store.users.ensure().id)
    first, *lines = run("replay", conversation.id, *data).stdout.splitlines()
    assert first.startswith(f"Generated by: {engine}")
    assert lines == ["Replayed by: the same", "Identical: 12 tokens"]


def test_formats_are_learned_from_the_file(sprout: Path) -> None:
    shown = run("formats", "show", sprout)
    assert shown.exit_code == 0, shown.output
    assert "<think>" in shown.stdout
