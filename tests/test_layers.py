"""The import contracts hold, and detect violations."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGINES = ROOT / "src" / "palaver" / "engines"


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    command = [
        str(Path(sys.executable).with_name("lint-imports")),
        "--no-cache",
        "--config",
        str(root / "pyproject.toml"),
    ]
    return subprocess.run(
        command,
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(root / "src"), "PATH": ""},
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_contracts_hold(copy: Path) -> None:
    result = lint(copy)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("errors.py", "import palaver.chat"),
        ("formats/reader.py", "import palaver.engines.base"),
        ("engines/base.py", "import palaver.messages"),
        ("chat/model.py", "import palaver.cli"),
        ("chat/model.py", "import torch"),
        ("events.py", "import transformers"),
        ("engines/core/sampler.py", "import torch"),
        ("engines/host/frames.py", "import transformers"),
    ],
)
def test_a_planted_violation_is_found(copy: Path, module: str, line: str) -> None:
    path = copy / "src" / "palaver" / module
    path.write_text(path.read_text() + f"\n{line}\n")
    result = lint(copy)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "BROKEN" in result.stdout


def test_the_core_of_the_engines_imports_no_framework() -> None:
    modules = [
        "base",
        "grammars",
        "host.supervisor",
        *(f"core.{path.stem}" for path in (ENGINES / "core").glob("[a-z]*.py")),
    ]
    imports = "; ".join(f"import palaver.engines.{module}" for module in modules)
    check = "import sys; sys.exit(str({'torch', 'transformers'} & set(sys.modules) or ''))"
    result = subprocess.run([sys.executable, "-c", f"{imports}; {check}"], capture_output=True, text=True, check=False)
    assert result.stderr.strip() == ""
