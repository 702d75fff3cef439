"""Which models MLX runs, its engine process, and the command line with a folder for MLX."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from palaver.engines.mlx.loader import is_apple_silicon, is_installed

if not is_installed():
    pytest.skip("NOTHING IS SHOWN HERE: mlx and mlx-lm are not installed", allow_module_level=True)

from palaver.chat import engine_choice
from palaver.chat.engine_choice import LoadOptions, check_engine_options, make_spec, pick_engine
from palaver.chat.model import load_model_format
from palaver.engines.host.supervisor import HostedEngine
from palaver.errors import BadParameter, BrokenModel
from palaver.generation import Prompt
from palaver.models.resolver import ResolvedModel, resolve_model
from palaver.sampling import Sampling
from palaver.store import open_store
from tests.engines.generate import Run, continued
from tests.engines.generate import run as generate
from tests.mlx_files import convert_sprout
from tests.models import make_model
from tests.test_cli import run

SAMPLED = Sampling(temperature=0.8, seed=3, max_tokens=12, banned_ids=(0, 2))
PROMPT = Prompt((400, 500, 600, 700))


@pytest.fixture(scope="module")
def sprout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_sprout(tmp_path_factory.mktemp("mlx") / "sprout")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ResolvedModel:
    """A folder with safetensors as transformers writes them."""
    return resolve_model(str(make_model(tmp_path_factory.mktemp("plain"))))


@pytest.mark.skipif(is_apple_silicon(), reason="MLX is for this machine")
def test_a_folder_for_mlx_is_refused_on_other_machines(sprout: Path) -> None:
    with pytest.raises(BrokenModel, match=r"original weights or a GGUF file of it. --engine mlx runs them on any CPU"):
        pick_engine(resolve_model(str(sprout)))
    refused = run("ask", "Hi", "-m", sprout)
    assert refused.exit_code == 1
    assert "which runs on Apple silicon" in refused.stderr


def test_the_files_say_which_engines_can_run_them(sprout: Path, plain: ResolvedModel) -> None:
    mlx = resolve_model(str(sprout))
    assert pick_engine(mlx, LoadOptions(engine="mlx")) == pick_engine(plain, LoadOptions(engine="mlx")) == "mlx"
    assert pick_engine(plain, LoadOptions(engine="torch")) == "torch"
    for wanted in ("torch", "llamacpp"):
        with pytest.raises(BadParameter, match="a folder for MLX is run by mlx"):
            pick_engine(mlx, LoadOptions(engine=wanted))
    with pytest.raises(BadParameter, match="--compile True: needs --engine torch"):
        make_spec(plain, (), LoadOptions(engine="mlx", compiled=True))
    with pytest.raises(BadParameter, match=r"--compile True: is for a folder with config.json"):
        make_spec(mlx, (), LoadOptions(engine="mlx", compiled=True))
    with pytest.raises(BadParameter, match="--gpu-layers 3: is for a GGUF file"):
        make_spec(mlx, (), LoadOptions(engine="mlx", gpu_layers=3))
    with pytest.raises(BadParameter, match="--threads 3"):
        make_spec(mlx, (), LoadOptions(engine="mlx", threads=3))
    spec = make_spec(plain, (), LoadOptions(engine="mlx", dtype="float16", exact=True, adapter=sprout))
    assert (spec.engine, spec.dtype, spec.exact, spec.adapter) == ("mlx", "float16", True, sprout)


def test_on_apple_silicon_mlx_is_the_default_for_folders(
    sprout: Path, plain: ResolvedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pick_engine(plain) == ("mlx" if is_apple_silicon() else "torch")
    monkeypatch.setattr(engine_choice, "is_apple_silicon", lambda: True)
    assert pick_engine(resolve_model(str(sprout))) == "mlx"
    assert check_engine_options(plain, LoadOptions()) == check_engine_options(plain, LoadOptions(device="gpu")) == "mlx"
    for needs_torch in (LoadOptions(compiled=False), LoadOptions(adapter=sprout), LoadOptions(device="mps")):
        assert check_engine_options(plain, needs_torch) == "torch"
    assert pick_engine(resolve_model("sprout")) == "torch", "the compiled decoder is quicker for it"
    assert pick_engine(ResolvedModel(plain.folder, adapter=sprout)) == "torch"
    monkeypatch.setattr(engine_choice, "is_installed", lambda: False)
    assert pick_engine(plain) == "torch"
    assert pick_engine(resolve_model(str(sprout))) == "mlx", "which says what to install"


async def test_a_reply_goes_on_after_the_process_is_killed(sprout: Path) -> None:
    resolved = resolve_model(str(sprout))
    tokenizer, _ = load_model_format(resolved, LoadOptions())
    spec = make_spec(resolved, tokenizer.vocabulary, LoadOptions(engine="mlx", max_running=2))
    async with HostedEngine(spec) as engine:
        assert engine.info.fingerprint.startswith("mlx/mlx-")
        uncut = await generate(engine, PROMPT, SAMPLED)
        killed = Run()
        async with engine.generate(PROMPT, SAMPLED) as outputs:
            async for output in outputs:
                killed.add(output)
                if len(killed.ids) == 5:
                    assert engine.process_id is not None
                    os.kill(engine.process_id, signal.SIGKILL)
        assert killed.ids == uncut.ids
        assert (await generate(engine, continued(PROMPT, uncut.ids[:9]), SAMPLED)).ids == uncut.ids[9:]


def test_inspect_says_which_engine_and_why(sprout: Path) -> None:
    result = run("inspect", sprout, "--engine", "mlx", "--device", "cpu")
    assert result.exit_code == 0, result.output
    first, *lines = result.stdout.splitlines()
    assert first.startswith("needs about 0.03 GB on cpu")
    found = dict(line.split(": ", 1) for line in lines)
    assert found["engine"] == "mlx, by --engine; the model is a folder for MLX"
    assert found["runs on"] == "cpu, float32"
    assert found["prompt cache"] == "to the token"
    assert found["and ends with"] == "'<|im_end|>'"


def test_ask_and_replay(sprout: Path, tmp_path: Path) -> None:
    asked = run("ask", "What is 12 + 30?", "-m", sprout, "--engine", "mlx", "--set", "temperature=0", "--json")
    assert json.loads(asked.stdout)["answer"].endswith(" 42.")
    data = ("--data", tmp_path)
    settings = ("--set", "max_tokens=8", "--set", "seed=1")
    said = run("chat", sprout, "--local", "--engine", "mlx", *data, *settings, input="Tell me a long story.\n")
    assert said.exit_code == 0, said.output
    with open_store(tmp_path) as store:
        (conversation,) = store.conversations.list(store.users.ensure().id)
    replayed = run("replay", conversation.id, *data).stdout
    assert "mlx/mlx-" in replayed
    assert replayed.splitlines()[-1] == "Identical: 8 tokens"
