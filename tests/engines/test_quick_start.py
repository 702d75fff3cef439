"""The embedded model with compiled steps, and GGUF files, answer without torch and transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import palaver
from palaver.engines import loader, machine
from palaver.engines.core.options import EngineOptions
from palaver.engines.machine import has_accelerator
from palaver.models.resolver import resolve_folder
from tests.engines.compiler import needs_a_compiler
from tests.gguf_files import convert_qwen3

ASK = """
from palaver.cli import app
app(["ask", "What is the capital of France?", "--device", "cpu", "--set", "temperature=0"], standalone_mode=False)
"""
HOST = """
import asyncio
from palaver.engines.host.child import make_engine
from palaver.engines.host.frames import EngineSpec, LoadProgress
from palaver.formats.tokenizer import load_tokenizer
from palaver.generation import Prompt
from palaver.models.resolver import DEFAULT_MODEL, resolve_model
from palaver.sampling import Sampling

async def main():
    folder = resolve_model(DEFAULT_MODEL).folder
    spec = EngineSpec("torch", folder, tuple(load_tokenizer(folder).vocabulary), device="cpu")
    engine = make_engine(spec, LoadProgress())
    async with engine.generate(Prompt((5, 6, 7)), Sampling(temperature=1.0, max_tokens=8, logprobs=5)) as outputs:
        print(len([output async for output in outputs]), engine.info.steps)
    await engine.close()

asyncio.run(main())
"""
REPORT = """
import sys
print([name for name in ("torch", "transformers", "sqlalchemy", "pydantic") if name in sys.modules])
"""


RECORD = """
import os, sys

NAMES = (
    "torch", "transformers", "xllamacpp", "palaver.cli", "palaver.engines.llamacpp.engine", "palaver.engines.mlx.engine"
)

def record(event, arguments):
    if event == "import" and arguments[0] in NAMES:
        with open(os.environ["PALAVER_IMPORTS"], "a") as file:
            file.write(f"{os.getpid()} {arguments[0]}\\n")

sys.addaudithook(record)
"""
"""Run by each Python process at its start: writes which of these modules it imports."""
SOURCES = Path(palaver.__file__).parents[1]

PLAIN = ASK.replace('"--device"', '"--no-compile", "--device"')


@needs_a_compiler
@pytest.mark.parametrize(("program", "slow"), [(ASK, "[]"), (HOST, "['pydantic']")], ids=["ask", "host"])
def test_neither_is_imported(program: str, slow: str) -> None:
    """A host needs pydantic for its frames."""
    assert imported_by(program) == slow


@needs_a_compiler
def test_a_gguf_file_needs_no_library(tmp_path: Path) -> None:
    """Compiled steps run it in the command's own process."""
    imports = imported_for_gguf(tmp_path)
    assert set(imports) == {"palaver.cli"}


def test_llamacpp_needs_neither_in_any_process(tmp_path: Path) -> None:
    """In the command, and in the engine process."""
    pytest.importorskip("xllamacpp", reason="NOTHING IS SHOWN HERE: xllamacpp is not installed")
    imports = imported_for_gguf(tmp_path, "--engine", "llamacpp")
    assert set(imports) == {"palaver.cli", "palaver.engines.llamacpp.engine"}
    assert len(set(imports.values())) == 2, "the engine has a process of its own"


def test_mlx_needs_neither_in_any_process(tmp_path: Path) -> None:
    """mlx-lm imports transformers for tokenizers that Palaver doesn't use."""
    pytest.importorskip("mlx_lm", reason="NOTHING IS SHOWN HERE: mlx-lm is not installed")
    imports = imported_for("sprout", tmp_path, "--engine", "mlx")
    assert set(imports) == {"palaver.cli", "palaver.engines.mlx.engine"}


def imported_for_gguf(folder: Path, *flags: str) -> dict[str, str]:
    return imported_for(str(convert_qwen3(resolve_folder("sprout"), folder / "sprout.gguf")), folder, *flags)


def imported_for(model: str, folder: Path, *flags: str) -> dict[str, str]:
    """Which of some modules are imported to answer with a model, and in which process."""
    (folder / "sitecustomize.py").write_text(RECORD)
    search = os.pathsep.join(filter(None, (str(folder), str(SOURCES), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "palaver", "ask", "What is 12 + 30?", "--model", model, "--device", "cpu"]
    command += ["--set", "temperature=0", *flags]
    environment = os.environ | {"PYTHONPATH": search, "PALAVER_IMPORTS": str(folder / "imports")}
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment)
    assert done.returncode == 0, done.stderr
    assert "42" in done.stdout
    return dict(line.split()[::-1] for line in (folder / "imports").read_text().splitlines())


def test_a_plain_decoder_on_torch_needs_no_transformers() -> None:
    assert imported_by(PLAIN) == "['torch']"


def test_a_process_can_be_started_before_the_slow_imports() -> None:
    code = "import sys, palaver.cli, palaver.chat.engine_choice, palaver.engines.host.process; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    slow = {"asyncio", "pydantic", "numpy", "jinja2", "tokenizers", "palaver.formats.base", "palaver.engines.base"}
    assert not slow & set(done.stdout.split())


def imported_by(program: str) -> str:
    """The libraries that a program has imported at its end."""
    command = [sys.executable, "-c", program + REPORT]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    *printed, modules = done.stdout.splitlines()
    assert any(line.strip() for line in printed)
    return modules


def test_an_accelerator_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not loader._may_skip_torch("cuda", None, EngineOptions(), None)
    monkeypatch.setattr(machine, "ACCELERATOR_FILES", ("/dev/null",))
    assert has_accelerator()
    assert not loader._may_skip_torch(None, None, EngineOptions(), None)
    assert loader._may_skip_torch("cpu", None, EngineOptions(), None)
    assert not loader._may_skip_torch("cpu", "bfloat16", EngineOptions(), None)
    assert not loader._may_skip_torch("cpu", None, EngineOptions(compiled=False), None)
