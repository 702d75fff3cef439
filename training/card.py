"""The figures in the model card: written from the evaluation's JSON, never by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def fill(path: Path, evaluation: dict[str, Any]) -> None:
    text = path.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    path.write_text(before + BEGIN + "\n" + markdown(evaluation) + "\n" + END + after)


def markdown(evaluation: dict[str, Any]) -> str:
    rows = [_row(row) for row in evaluation["figures"]]
    return "\n".join(["| measured | right | of | share | wanted |", "| --- | ---: | ---: | ---: | ---: |", *rows])


def _row(row: dict[str, Any]) -> str:
    share = row["right"] / max(1, row["of"])
    wanted = "" if row["wanted"] is None else f"{row['wanted']:.1%}" + ("" if share >= row["wanted"] else " (missed)")
    return f"| {row['bar']} | {row['right']} | {row['of']} | {share:.2%} | {wanted} |"
