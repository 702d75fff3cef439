"""Markdown for people: one heading per message. Texts survive writing and reading unchanged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from palaver.messages import Audio, Image, Message, Part, Role, Text, Thinking, ToolCall, ToolResult, Video
from palaver.transcripts.transcript import ReadResult, Transcript, linear_transcript

_HEADINGS = {"System": Role.SYSTEM, "User": Role.USER, "Assistant": Role.ASSISTANT, "Tool": Role.TOOL}
_NAMES = {role: name for name, role in _HEADINGS.items()}
_THINKING_OPEN, _THINKING_CLOSE = "<details><summary>Thinking</summary>", "</details>"
_MARKUP_LINE = re.compile(r"\\*(## (System|User|Assistant|Tool)|<details><summary>Thinking</summary>|</details>)")
"""Lines that `read` interprets. In texts they are escaped with a backslash."""
_HEADING = re.compile(r"## (System|User|Assistant|Tool)")


def write(transcript: Transcript) -> str:
    """Writes the main branch."""
    blocks = [f"# {transcript.title or 'Conversation'}"]
    if transcript.system:
        blocks += ["## System", _escape(transcript.system)]
    for entry in transcript.main_branch():
        blocks.append(f"## {_NAMES[entry.message.role]}")
        blocks += [_format_part(part) for part in entry.message.parts]
    return "\n\n".join(blocks) + "\n"


def matches(text: str) -> bool:
    return any(_HEADING.fullmatch(line) for line in text.split("\n"))


def read(text: str) -> ReadResult:
    lines = text.removesuffix("\n").split("\n")
    title = lines[0].removeprefix("# ") if lines[0].startswith("# ") else ""
    messages = [Message(role, tuple(_parts(body))) for role, body in _sections(lines)]
    return ReadResult((linear_transcript(messages, title="" if title == "Conversation" else title),))


def _format_part(part: Part) -> str:
    match part:
        case Text(text):
            return _escape(text)
        case Thinking(text):
            return f"{_THINKING_OPEN}\n\n{_escape(text)}\n\n{_THINKING_CLOSE}"
        case ToolCall(_, name, arguments):
            return f"Calls `{name}`:\n\n{_fence(arguments)}"
        case ToolResult(_, content):
            return _fence(content)
        case Image() | Audio() | Video():
            name = f"{part.name}, " if part.name else ""
            return f"*({name}{part.media_type}, {len(part.data)} bytes)*"


def _escape(text: str) -> str:
    return "\n".join(f"\\{line}" if _MARKUP_LINE.fullmatch(line) else line for line in text.split("\n"))


def _unescape(lines: Iterable[str]) -> str:
    return "\n".join(line[1:] if line.startswith("\\") and _MARKUP_LINE.fullmatch(line) else line for line in lines)


def _fence(text: str) -> str:
    longest = max((len(run) for run in re.findall("`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _sections(lines: list[str]) -> Iterator[tuple[Role, list[str]]]:
    starts = [number for number, line in enumerate(lines) if _HEADING.fullmatch(line)]
    for start, end in zip(starts, [*starts[1:], len(lines) + 1], strict=True):
        yield _HEADINGS[lines[start].removeprefix("## ")], lines[start + 2 : end - 1]


def _parts(lines: list[str]) -> Iterator[Part]:
    while _THINKING_OPEN in lines and _THINKING_CLOSE in lines[lines.index(_THINKING_OPEN) :]:
        start = lines.index(_THINKING_OPEN)
        end = lines.index(_THINKING_CLOSE, start)
        if start:
            yield Text(_unescape(lines[: start - 1]))
        yield Thinking(_unescape(lines[start + 2 : end - 1]))
        lines = lines[end + 2 :]
    if lines:
        yield Text(_unescape(lines))
