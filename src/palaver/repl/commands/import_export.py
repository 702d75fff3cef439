"""Commands that take conversations and replies out of Palaver, and bring them in: save, export, import, copy."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from palaver.errors import RequestError
from palaver.messages import Role
from palaver.repl import strings
from palaver.repl.command_table import ArgumentChoice, CommandGroup, complete_paths, fixed_choices
from palaver.repl.commands.attachments import check_file, parse_path
from palaver.repl.text import format_count, one_line
from palaver.store import Conversation

if TYPE_CHECKING:
    from palaver.repl.session import Session

commands = CommandGroup(strings.GROUP_FILES)
EXPORT_FORMATS = {
    "jsonl": "jsonl",
    "md": "markdown",
    "markdown": "markdown",
    "tree": "tree",
    "branches": "branches",
    "sharegpt": "sharegpt",
}
_SUFFIXES = {"markdown": ".md", "tree": ".json", "sharegpt": ".jsonl"}
_MAX_SKIPPED = 10
"""Parts of an imported file that could not be imported and are listed."""
_CLIPBOARD_COMMANDS = (["wl-copy"], ["xclip", "-selection", "clipboard"], ["pbcopy"], ["clip.exe"])
_CLIPBOARD_SECONDS = 5
"""After that time the next program is tried."""


@commands.command("save", choices=complete_paths)
async def save(session: Session, arguments: str) -> None:
    conversation = await _current_conversation(session)
    path = parse_path(arguments.strip() or f"{_file_stem(conversation)}.jsonl")
    text = await session.chat.export_conversation(
        conversation.id, "jsonl", (await session.cursor.position()).message_id
    )
    replies = [one for line in text.splitlines() for one in json.loads(line)["messages"] if one["role"] == "assistant"]
    if not replies:
        raise RequestError(strings.NOTHING_TO_SAVE)
    with path.open("a", encoding="utf-8") as file:
        file.write(text if text.endswith("\n") else text + "\n")
    line = strings.SAVED.format(path=path)
    if stopped := sum(reply.get("weight") == 0 for reply in replies):
        line = strings.SAVED_STOPPED.format(line=line, replies=format_count(stopped, strings.REPLIES))
    session.screen.note(line)


async def _format_choices(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
    _, space, rest = arguments.partition(" ")
    if not space:
        return [ArgumentChoice(one) for one in ("jsonl", "md", "tree", "branches", "sharegpt")]
    return [ArgumentChoice(one.text) for one in await complete_paths(session, rest)]


@commands.command("export", choices=_format_choices)
async def export(session: Session, arguments: str) -> None:
    word, _, rest = arguments.strip().partition(" ")
    format = EXPORT_FORMATS.get(word)
    if format is None:
        raise RequestError(strings.EXPORT_USAGE.format(formats=", ".join(EXPORT_FORMATS)))
    conversation = await _current_conversation(session)
    path = parse_path(rest.strip() or _file_stem(conversation) + _SUFFIXES.get(format, ".jsonl"))
    text = await session.chat.export_conversation(conversation.id, format, (await session.cursor.position()).message_id)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text if text.endswith("\n") else text + "\n")
    except FileExistsError:
        raise RequestError(strings.FILE_EXISTS.format(path=path)) from None
    session.screen.note(strings.EXPORTED.format(path=path))


@commands.command("import", ("load",), complete_paths)
async def import_(session: Session, arguments: str) -> None:
    path = parse_path(arguments.strip())
    check_file(path)
    report = await session.chat.import_conversations(await asyncio.to_thread(path.read_bytes))
    imported = report.conversations
    for skipped in report.skipped[:_MAX_SKIPPED]:
        session.screen.note(strings.NOT_IMPORTED.format(item=skipped.item, reason=one_line(skipped.reason, 200)))
    if len(report.skipped) > _MAX_SKIPPED:
        session.screen.note(strings.MORE_NOT_IMPORTED.format(count=f"{len(report.skipped) - _MAX_SKIPPED:,}"))
    if not imported:
        raise RequestError(strings.IMPORTED_NONE.format(path=path))
    titles = ", ".join(one_line(one.title, 40) or one.id for one in imported[:5])
    count = format_count(len(imported), strings.CONVERSATIONS)
    session.screen.note(strings.IMPORTED.format(conversations=count, titles=titles))
    await session.open(imported[0].id)


@commands.command("copy", choices=fixed_choices("code", "thought"))
async def copy(session: Session, arguments: str) -> None:
    reply = await session.cursor.last_message(Role.ASSISTANT)
    if reply is None:
        raise RequestError(strings.NOTHING_TO_COPY)
    match arguments.strip():
        case "":
            text = reply.text
        case "thought":
            text = reply.thinking
        case "code":
            found = re.findall(r"^(`{3,}|~{3,})[^\n]*\n(.*?)^\1", reply.text, re.MULTILINE | re.DOTALL)
            text = found[-1][1] if found else ""
        case _:
            raise RequestError(strings.COPY_USAGE)
    if not text:
        missing = {"thought": strings.NO_THOUGHT, "code": strings.NO_CODE_TO_COPY}
        raise RequestError(missing.get(arguments.strip(), strings.NOTHING_TO_COPY))
    program = await _copy(session, text)
    session.screen.note(strings.COPIED.format(characters=format_count(len(text), strings.CHARACTERS), program=program))


async def _copy(session: Session, text: str) -> str:
    """Copies with a desktop program, or else with an OSC 52 sequence, which also works over SSH."""
    for command in _CLIPBOARD_COMMANDS:
        if shutil.which(command[0]) is not None and await asyncio.to_thread(_run_clipboard, command, text):
            return command[0]
    if not session.screen.is_live:
        raise RequestError(strings.NO_CLIPBOARD)
    session.screen.console.file.write(f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\a")
    session.screen.console.file.flush()
    return strings.CLIPBOARD_TERMINAL


def _run_clipboard(command: Sequence[str], text: str) -> bool:
    """Whether the program took the text. It gets no pipe for its output: those of Wayland and X11 leave a process that
    would hold it open."""
    quiet = subprocess.DEVNULL
    try:
        done = subprocess.run(
            command, input=text.encode(), stdout=quiet, stderr=quiet, timeout=_CLIPBOARD_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


async def _current_conversation(session: Session) -> Conversation:
    conversation = await session.cursor.conversation()
    if conversation is None:
        raise RequestError(strings.EMPTY_CONVERSATION)
    return conversation


def _file_stem(conversation: Conversation) -> str:
    """A file name without suffix, made from the title."""
    return re.sub(r"[^\w-]+", "-", conversation.title).strip("-").lower()[:60] or conversation.id
