"""A file of any known format, read; a conversation, written in one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, assert_never

from palaver.errors import RequestError
from palaver.transcripts import llama_cpp, markdown, open_webui, sharegpt, training, whole
from palaver.transcripts.transcript import Read, Skipped, Transcript


class Format(StrEnum):
    """What can be written."""

    TRAINING = "jsonl"
    """The head's branch, ready for training."""
    BRANCHES = "branches"
    """The same for every branch, a line each."""
    WHOLE = "tree"
    """Everything, to be read again."""
    MARKDOWN = "markdown"
    SHAREGPT = "sharegpt"


class UnknownFormat(RequestError):
    def __init__(self) -> None:
        super().__init__(
            "The file is no conversation that is known: JSONL with messages, ShareGPT, Markdown, "
            "or an export of Palaver's, of Open WebUI's or of llama.cpp's page."
        )


_KINDS = (whole, open_webui, llama_cpp, sharegpt, training)
"""The most particular first: a line with `conv` has `messages` too."""


def write(transcript: Transcript, format: Format) -> str:
    match format:
        case Format.TRAINING:
            return training.write(transcript)
        case Format.BRANCHES:
            return training.write(transcript, all_branches=True)
        case Format.WHOLE:
            return whole.write(transcript)
        case Format.MARKDOWN:
            return markdown.write(transcript)
        case Format.SHAREGPT:
            return sharegpt.write(transcript)
        case _:
            assert_never(format)


def read(text: str) -> Read:
    """Every conversation in the file, and what was left out; UnknownFormat where there is none to be seen."""
    text = text.removeprefix("\ufeff")
    values = list(_values(text))
    if not any(isinstance(value, dict) for value in values):
        if markdown.recognised(text):
            return markdown.read(text)
        raise UnknownFormat
    transcripts: list[Transcript] = []
    skipped: list[Skipped] = []
    for number, value in enumerate(values, 1):
        found = _read_value(number, value)
        transcripts += [one for one in found.transcripts if one.entries]
        skipped += found.skipped
    if not transcripts and all(one.why == _UNKNOWN for one in skipped):
        raise UnknownFormat
    return Read(tuple(transcripts), tuple(skipped))


_UNKNOWN = "it is no conversation of a known kind"


def _read_value(number: int, value: Any) -> Read:
    where = f"conversation {number}"
    for kind in _KINDS:
        if kind.recognised(value):
            try:
                found = kind.read_line(value)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                return Read((), (Skipped(where, f"{type(error).__name__}: {error}"),))
            return Read(found.transcripts, tuple(Skipped(f"{where}, {one.what}", one.why) for one in found.skipped))
    return Read((), (Skipped(where, _UNKNOWN),))


def _values(text: str) -> Iterator[Any]:
    """One JSON value, a list of them, or one a line."""
    try:
        value = json.loads(text)
    except ValueError:
        yield from _lines(text)
    else:
        yield from value if isinstance(value, list) else (value,)


def _lines(text: str) -> Iterator[Any]:
    for line in text.split("\n"):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError:
                yield None
