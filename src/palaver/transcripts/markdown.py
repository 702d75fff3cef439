"""Markdown for people: a heading for each speaker. What was written here can be read again, texts to the letter."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from palaver.messages import Audio, Image, Message, Part, Role, Text, Thinking, ToolCall, ToolResult, Video
from palaver.transcripts.transcript import ReadResult, Transcript, linear

_HEADINGS = {"System": Role.SYSTEM, "User": Role.USER, "Assistant": Role.ASSISTANT, "Tool": Role.TOOL}
_NAMES = {role: name for name, role in _HEADINGS.items()}
_OPEN, _CLOSE = "<details><summary>Thinking</summary>", "</details>"
_OURS = re.compile(r"\\*(## (System|User|Assistant|Tool)|<details><summary>Thinking</summary>|</details>)")
"""Lines that mean something to the reader; where a text has one, a backslash is put before it."""
_HEADING = re.compile(r"## (System|User|Assistant|Tool)")


def write(transcript: Transcript) -> str:
    """The head's branch."""
    pieces = [f"# {transcript.title or 'Conversation'}"]
    if transcript.system:
        pieces += ["## System", _escaped(transcript.system)]
    for entry in transcript.main():
        pieces.append(f"## {_NAMES[entry.message.role]}")
        pieces += [_written(part) for part in entry.message.parts]
    return "\n\n".join(pieces) + "\n"


def recognised(text: str) -> bool:
    return any(_HEADING.fullmatch(line) for line in text.split("\n"))


def read(text: str) -> ReadResult:
    lines = text.removesuffix("\n").split("\n")
    title = lines[0].removeprefix("# ") if lines[0].startswith("# ") else ""
    messages = [Message(role, tuple(_parts(body))) for role, body in _sections(lines)]
    return ReadResult((linear(messages, title="" if title == "Conversation" else title),))


def _written(part: Part) -> str:
    match part:
        case Text(text):
            return _escaped(text)
        case Thinking(text):
            return f"{_OPEN}\n\n{_escaped(text)}\n\n{_CLOSE}"
        case ToolCall(_, name, arguments):
            return f"Calls `{name}`:\n\n{_fenced(arguments)}"
        case ToolResult(_, content):
            return _fenced(content)
        case Image(media_type, data) | Audio(media_type, data) | Video(media_type, data):
            return f"*({media_type}, {len(data)} bytes)*"


def _escaped(text: str) -> str:
    return "\n".join(f"\\{line}" if _OURS.fullmatch(line) else line for line in text.split("\n"))


def _plain(lines: Iterable[str]) -> str:
    return "\n".join(line[1:] if line.startswith("\\") and _OURS.fullmatch(line) else line for line in lines)


def _fenced(text: str) -> str:
    longest = max((len(run) for run in re.findall("`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _sections(lines: list[str]) -> Iterator[tuple[Role, list[str]]]:
    starts = [number for number, line in enumerate(lines) if _HEADING.fullmatch(line)]
    for start, end in zip(starts, [*starts[1:], len(lines) + 1], strict=True):
        yield _HEADINGS[lines[start].removeprefix("## ")], lines[start + 2 : end - 1]


def _parts(lines: list[str]) -> Iterator[Part]:
    while _OPEN in lines and _CLOSE in lines[lines.index(_OPEN) :]:
        start = lines.index(_OPEN)
        end = lines.index(_CLOSE, start)
        if start:
            yield Text(_plain(lines[: start - 1]))
        yield Thinking(_plain(lines[start + 2 : end - 1]))
        lines = lines[end + 2 :]
    if lines:
        yield Text(_plain(lines))
