"""All texts are in the tables of strings, and each one there is used."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import palaver.commands.strings
import palaver.repl.strings

SOURCE = Path(__file__).parents[2] / "src" / "palaver"
SHOWING = ("note", "error", "RequestError", "NothingToContinue", "UnsupportedContent", "print")
"""Functions and errors whose text a user reads."""


def modules(package: str) -> list[Path]:
    return [path for path in (SOURCE / package).rglob("*.py") if path.name not in ("strings.py", "sanitize.py")]


def shown_literals(tree: ast.AST) -> Iterator[str]:
    """Texts with words that are passed to something that shows them, other than those of the table."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in SHOWING and isinstance(node.args[0], ast.Constant | ast.JoinedStr):
                yield ast.unparse(node.args[0])
            helps = (keyword.value for keyword in node.keywords if keyword.arg == "help")
            yield from (ast.unparse(value) for value in helps if isinstance(value, ast.Constant))


@pytest.mark.parametrize("package", ["repl", "commands"])
def test_texts_are_in_the_table(package: str) -> None:
    found = [
        f"{path.name}: {text}"
        for path in modules(package)
        for text in shown_literals(ast.parse(path.read_text(encoding="utf-8")))
        if re.search(r"[A-Za-z]{2}", re.sub(r"\{[^}]*\}|palaver: ", "", text))
    ]
    assert found == []


@pytest.mark.parametrize("strings", [palaver.repl.strings, palaver.commands.strings])
def test_every_text_is_used(strings: object) -> None:
    package = str(getattr(strings, "__name__", "")).split(".")[1]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in modules(package))
    sources += (SOURCE / "cli.py").read_text(encoding="utf-8")
    names = [name for name in vars(strings) if name.isupper()]
    assert [name for name in names if f"strings.{name}" not in sources] == []
