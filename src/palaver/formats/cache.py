"""What was learned of a template, kept between runs by the template's hash. A cache that can't be used is no error."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from platformdirs import user_cache_path

from palaver import __version__
from palaver.errors import PalaverError
from palaver.formats.facts import Facts
from palaver.formats.serial import from_values, to_values

_VERSION = 2
"""Of what facts are written as."""


def remembered(
    source: str, strings: Mapping[str, str], control: Mapping[str, int], learn: Callable[[], Facts]
) -> Facts:
    """The facts from the cache, or learned now and kept."""
    key = json.dumps([_VERSION, __version__, _code_version(), source, sorted(strings.items()), sorted(control)])
    path = user_cache_path("palaver") / "formats" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    known = _read(path)
    if known is not None:
        return known
    facts = learn()
    with suppress(OSError):
        _write(path, json.dumps(to_values(facts), ensure_ascii=False))
    return facts


def _code_version() -> int:
    """Changes with the code that learns, so that work on it is never hidden by what an older version learned."""
    return max(path.stat().st_mtime_ns for path in Path(__file__).parent.rglob("*.py"))


def _read(path: Path) -> Facts | None:
    try:
        return from_values(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, PalaverError, KeyError, TypeError):
        return None


def _write(path: Path, text: str) -> None:
    """In one step, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
