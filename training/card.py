"""The figures in the model card: written from the evaluation's JSON, never by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FIGURES = "figures"


def fill(path: Path, evaluation: dict[str, Any], name: str = FIGURES) -> None:
    """Writes the table between the marks of this name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = path.read_text()
    before, rest = text.split(begin)
    after = rest.split(end)[1]
    path.write_text(before + begin + "\n" + markdown(evaluation) + "\n" + end + after)


def markdown(evaluation: dict[str, Any]) -> str:
    """A row a bar, with what was right greedily and at the model's default sampling, or with other settings."""
    found = {(row["bar"], row["sampling"]): row for row in evaluation["figures"]}
    bars = dict.fromkeys(row["bar"] for row in evaluation["figures"])
    settings = tuple(dict.fromkeys(row["sampling"] for row in evaluation["figures"]))
    first, second = ("greedy", "default") if "greedy" in settings else settings
    rows = [_row(bar, found[bar, first], found.get((bar, second))) for bar in bars]
    shown = second if second != "default" else "default sampling"
    return "\n".join([f"| measured | wanted | {first} | {shown} |", "| --- | ---: | ---: | ---: |", *rows])


def _row(bar: str, greedy: dict[str, Any], default: dict[str, Any] | None) -> str:
    wanted = "" if greedy["wanted"] is None else f"{greedy['wanted']:.1%}"
    return f"| {bar} | {wanted} | {_share(greedy)} | {_share(default) if default else ''} |"


def _share(row: dict[str, Any]) -> str:
    share = row["right"] / max(1, row["of"])
    missed = row["wanted"] is not None and share < row["wanted"]
    return f"{row['right']} of {row['of']}: {share:.2%}" + (" (missed)" if missed else "")
