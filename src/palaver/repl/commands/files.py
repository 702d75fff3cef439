"""Commands for files: save, export, import, attachments, copy."""

from __future__ import annotations

import base64
import json
import mimetypes
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palaver.errors import RequestError, UnsupportedContent
from palaver.messages import Audio, Image, Role
from palaver.messages import Text as TextPart
from palaver.repl.command_table import ArgumentChoice, CommandGroup
from palaver.repl.completion import complete_paths, fixed_choices
from palaver.repl.sanitize import one_line
from palaver.store import Conversation

if TYPE_CHECKING:
    from palaver.repl.session import Session

commands = CommandGroup("Files")
EXPORT_FORMATS = {
    "jsonl": "jsonl",
    "md": "markdown",
    "markdown": "markdown",
    "tree": "tree",
    "branches": "branches",
    "sharegpt": "sharegpt",
}
_SUFFIXES = {"markdown": ".md", "tree": ".json", "sharegpt": ".jsonl"}
_MAX_ATTACHMENT_BYTES = 50_000_000
_MEDIA_NAMES = {"image": "pictures", "audio": "sound", "video": "video"}
_CLIPBOARD_COMMANDS = (["wl-copy"], ["xclip", "-selection", "clipboard"], ["pbcopy"], ["clip.exe"])


@commands.command("save", "append this branch to a file, for training (JSONL)", "[FILE]", (), complete_paths)
async def save(session: Session, arguments: str) -> None:
    conversation = await _current_conversation(session)
    path = _path(arguments.strip() or f"{_file_stem(conversation)}.jsonl")
    text = await session.chat.export_conversation(
        conversation.id, "jsonl", (await session.cursor.position()).message_id
    )
    replies = [one for line in text.splitlines() for one in json.loads(line)["messages"] if one["role"] == "assistant"]
    if not replies:
        raise RequestError("There is no reply on this branch yet: nothing to learn from.")
    with path.open("a", encoding="utf-8") as file:
        file.write(text if text.endswith("\n") else text + "\n")
    session.screen.note(f"Appended to {path}.{_stopped_note(replies)}")


def _stopped_note(replies: Iterable[Mapping[str, Any]]) -> str:
    count = sum(reply.get("weight") == 0 for reply in replies)
    if not count:
        return ""
    stopped = "1 reply was stopped and is" if count == 1 else f"{count} replies were stopped and are"
    return f' {stopped} saved up to there, with "weight": 0.'


async def _format_choices(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
    _, space, rest = arguments.partition(" ")
    if not space:
        return [ArgumentChoice(one) for one in ("jsonl", "md", "tree", "branches", "sharegpt")]
    return [ArgumentChoice(one.text) for one in await complete_paths(session, rest)]


@commands.command(
    "export",
    "write the conversation into a new file",
    "jsonl | md | tree | branches | sharegpt [FILE]",
    (),
    _format_choices,
)
async def export(session: Session, arguments: str) -> None:
    word, _, rest = arguments.strip().partition(" ")
    format = EXPORT_FORMATS.get(word)
    if format is None:
        raise RequestError(f"It is /export and one of {', '.join(EXPORT_FORMATS)}.")
    conversation = await _current_conversation(session)
    path = _path(rest.strip() or _file_stem(conversation) + _SUFFIXES.get(format, ".jsonl"))
    text = await session.chat.export_conversation(conversation.id, format, (await session.cursor.position()).message_id)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text if text.endswith("\n") else text + "\n")
    except FileExistsError:
        raise RequestError(f"{path} is there already: choose another name.") from None
    session.screen.note(f"Written to {path}.")


@commands.command(
    "import",
    "take in the conversations of a file, ours or another program's, and open the first",
    "FILE",
    ("load",),
    complete_paths,
)
async def import_(session: Session, arguments: str) -> None:
    path = _path(arguments.strip())
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise RequestError(f"{path} is no text.") from None
    imported = await session.chat.import_conversations(text)
    if not imported:
        raise RequestError(f"{path} holds no conversation.")
    session.screen.note(
        f"{len(imported)} taken in: {', '.join(one_line(one.title, 40) or one.id for one in imported[:5])}"
    )
    await session.open(imported[0].id)


@commands.command("image", "attach a picture to the next message", "FILE", (), complete_paths)
async def image(session: Session, arguments: str) -> None:
    await _attach(session, _path(arguments.strip()), "image")


@commands.command("audio", "attach sound to the next message", "FILE", (), complete_paths)
async def audio(session: Session, arguments: str) -> None:
    await _attach(session, _path(arguments.strip()), "audio")


@commands.command("file", "attach a file to the next message; text goes in as text", "FILE | clear", (), complete_paths)
async def file(session: Session, arguments: str) -> None:
    if arguments.strip() == "clear":
        session.attachments.clear()
        session.screen.note("Nothing is attached.")
        return
    path = _path(arguments.strip())
    kind = (mimetypes.guess_type(path.name)[0] or "").partition("/")[0]
    await _attach(session, path, kind if kind in ("image", "audio", "video") else "text")


async def _attach(session: Session, path: Path, kind: str) -> None:
    if path.stat().st_size > _MAX_ATTACHMENT_BYTES:
        raise RequestError(f"{path} is larger than {_MAX_ATTACHMENT_BYTES:,} bytes.")
    if kind == "text":
        session.attachments.append(TextPart(_as_text(path)))
    else:
        card = await session.wait_for(session.chat.wait_until_ready(), "waiting for the model")
        if kind not in card.media:
            raise UnsupportedContent(f"{card.name} takes no {_MEDIA_NAMES[kind]}.")
        media_type = mimetypes.guess_type(path.name)[0] or f"{kind}/*"
        data = path.read_bytes()
        session.attachments.append(Image(media_type, data) if kind == "image" else Audio(media_type, data))
    session.screen.note(f"{path.name} goes with the next message. /file clear takes it away.")


def _as_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UnsupportedContent(f"{path} is neither text nor of a kind that a model takes.") from None
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{path.name}:\n{fence}{path.suffix.removeprefix('.')}\n{text.rstrip()}\n{fence}\n\n"


@commands.command(
    "copy",
    "the last reply to the clipboard, or its last code block, or its thought",
    "[code | thought]",
    (),
    fixed_choices("code", "thought"),
)
async def copy(session: Session, arguments: str) -> None:
    reply = await session.cursor.last_message(Role.ASSISTANT)
    if reply is None:
        raise RequestError("There is no reply to copy.")
    match arguments.strip():
        case "":
            text = reply.text
        case "thought":
            text = reply.thinking
        case "code":
            found = re.findall(r"^(`{3,}|~{3,})[^\n]*\n(.*?)^\1", reply.text, re.MULTILINE | re.DOTALL)
            text = found[-1][1] if found else ""
        case other:
            raise RequestError(f"/copy {other}: it is /copy, /copy code or /copy thought.")
    if not text:
        raise RequestError("There is nothing of that to copy.")
    session.screen.note(f"{len(text):,} characters copied with {_copy(session, text)}.")


def _copy(session: Session, text: str) -> str:
    """Copies with a desktop program, or else with an OSC 52 sequence, which also works over SSH."""
    for command in _CLIPBOARD_COMMANDS:
        if shutil.which(command[0]):
            result = subprocess.run(command, input=text.encode(), capture_output=True, timeout=5, check=False)
            if result.returncode == 0:
                return command[0]
    if not session.screen.is_live:
        raise RequestError("There is no program for the clipboard here.")
    session.screen.console.file.write(f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\a")
    session.screen.console.file.flush()
    return "the terminal"


async def _current_conversation(session: Session) -> Conversation:
    conversation = await session.cursor.conversation()
    if conversation is None:
        raise RequestError("Nothing was said yet.")
    return conversation


def _path(text: str) -> Path:
    if not text:
        raise RequestError("Name a file.")
    return Path(text).expanduser()


def _file_stem(conversation: Conversation) -> str:
    """A file name without suffix, made from the title."""
    return re.sub(r"[^\w-]+", "-", conversation.title).strip("-").lower()[:60] or conversation.id
