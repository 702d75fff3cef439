"""Corrections of what was learned, in a small TOML file beside the model or named on the command line."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

from palaver.errors import BadParameter
from palaver.formats.facts import Confidence, Evidence, Facts
from palaver.formats.serial import from_values

FILE_NAME = "palaver-format.toml"


def corrected(facts: Facts, path: Path) -> Facts:
    """The facts with the file's on top. An unknown key is an error that names it."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadParameter(path.name, "...", f"can't be read as TOML: {error}") from None
    merged = from_values(values, facts)
    note = Evidence(f"corrected by {path.name}", ", ".join(values), Confidence.GIVEN)
    return replace(merged, evidence=(*merged.evidence, note))
