"""The declared dependencies are exactly the distributions that the code imports."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN_PACKAGES = {"palaver", "tests", "training", "benchmarks"}

LOADED_BY_NAME = {
    "python-multipart": "Starlette parses forms with it",
    "httptools": "uvicorn parses HTTP with it",
    "websockets": "uvicorn speaks the WebSocket protocol with it",
    "xllamacpp": "engines/llamacpp opens its shared library with ctypes",
    "psycopg": "SQLAlchemy loads the driver of a postgresql:// URL",
}
"""Runtime dependencies that no module of the package imports itself."""
TOOLS = {
    "import-linter", "mypy", "pre-commit", "ruff",
    "pytest-timeout", "pytest-xdist",
    "types-cachetools", "types-pexpect", "types-psutil", "types-pyyaml",
    "protobuf", "sentencepiece",
}  # fmt: skip
"""Development dependencies that no module imports: commands, plugins of pytest, types, and tokenizer libraries that
transformers loads by name."""
UNDECLARED = {
    "hatchling": "the build backend",
    "mlx-vlm": "the Makefile installs it without its dependencies, which are not imported",
    "ray": "`make test-cluster` installs it: a cluster for the tests needs minutes",
}


WITH_TORCH = {"triton"}
"""Imported by the package only where torch brings it: on Linux, with its CUDA build. The pinned version is the one that
the pinned torch requires there."""
ELSEWHERE = {"vllm"}
"""Imported only by processes that run in an environment of the user's own."""


SHARED_NAMES = {"opentelemetry": {"opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"}}
"""Packages that many distributions share, and those of them that are used."""


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(requirements: Iterable[str]) -> set[str]:
    return {normalize(re.split(r"[^\w.-]", requirement, maxsplit=1)[0]) for requirement in requirements}


def imported(files: Iterable[Path]) -> set[str]:
    """The distributions that the files import, inside functions too. Where several provide a package, the one of the
    same name counts."""
    modules = {name.partition(".")[0] for file in files for name in imported_modules(file.read_text(encoding="utf-8"))}
    distributions = packages_distributions()
    shared = set().union(*(SHARED_NAMES[module] for module in modules & SHARED_NAMES.keys()))
    modules -= OWN_PACKAGES | sys.stdlib_module_names | SHARED_NAMES.keys()
    found = {module: distributions.get(module, [module]) for module in modules}
    return shared | {normalize(module if module in names else names[0]) for module, names in found.items()}


def imported_modules(source: str) -> Iterable[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


RUNTIME = declared(PROJECT["dependencies"])
EXTRAS = {name: declared(requirements) for name, requirements in PROJECT["optional-dependencies"].items()}
DEVELOPMENT = EXTRAS.pop("dev")
PACKAGE = imported((ROOT / "src").rglob("*.py"))


def test_every_import_of_the_package_is_declared() -> None:
    assert PACKAGE - RUNTIME.union(*EXTRAS.values()) == WITH_TORCH | ELSEWHERE


def test_every_dependency_of_the_package_is_imported() -> None:
    assert RUNTIME.union(*EXTRAS.values()) - PACKAGE == LOADED_BY_NAME.keys()


def test_every_dependency_of_the_tests_is_declared_and_used() -> None:
    folders = [ROOT / name for name in ("tests", "training", "benchmarks", "docs")]
    files = [*(file for folder in folders for file in folder.rglob("*.py")), ROOT / "hatch_build.py"]
    used = imported(files)
    assert used - RUNTIME - DEVELOPMENT == UNDECLARED.keys()
    optional = set().union(*EXTRAS.values())
    assert DEVELOPMENT - used - optional == TOOLS
    assert optional <= DEVELOPMENT | UNDECLARED.keys(), "the tests of an extra need its packages"


def test_every_dependency_is_pinned() -> None:
    pinned = declared((ROOT / "constraints.txt").read_text().splitlines())
    assert (RUNTIME | DEVELOPMENT).union(*EXTRAS.values()) - pinned == set()
