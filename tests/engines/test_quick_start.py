"""The embedded model with compiled steps answers without torch and transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from palaver.engines import loader
from palaver.engines.core.options import EngineOptions
from palaver.engines.loader import has_accelerator
from tests.engines.compiler import needs_a_compiler

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
print([name for name in ("torch", "transformers", "sqlalchemy") if name in sys.modules])
"""


PLAIN = ASK.replace('"--device"', '"--no-compile", "--device"')


@needs_a_compiler
@pytest.mark.parametrize("program", [ASK, HOST], ids=["ask", "host"])
def test_neither_is_imported(program: str) -> None:
    assert imported_by(program) == "[]"


def test_a_plain_decoder_on_torch_needs_no_transformers() -> None:
    assert imported_by(PLAIN) == "['torch']"


def test_a_process_can_be_started_before_the_slow_imports() -> None:
    code = "import sys, palaver.cli, palaver.chat.engine_spec, palaver.engines.host.process; print(*sys.modules)"
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
    monkeypatch.setattr(loader, "ACCELERATOR_FILES", ("/dev/null",))
    assert has_accelerator()
    assert not loader._may_skip_torch(None, None, EngineOptions(), None)
    assert loader._may_skip_torch("cpu", None, EngineOptions(), None)
    assert not loader._may_skip_torch("cpu", "bfloat16", EngineOptions(), None)
    assert not loader._may_skip_torch("cpu", None, EngineOptions(compiled=False), None)
