"""Tool calls that run: asks the user for approval, waits for the results and shows them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from palaver.chat.interface import CallDecision, Remember
from palaver.chat.parameters import LOOP
from palaver.messages import Role
from palaver.repl import strings
from palaver.repl.reply_view import format_call
from palaver.repl.text import format_blob, format_count, sanitize
from palaver.store import StoredMessage
from palaver.store.tool_rounds import UNDECIDED, CallState, RoundCall, RoundState, ToolRound

if TYPE_CHECKING:
    from palaver.repl.session import Session

POLL_SECONDS = 0.1
MAX_LINES = 8
"""The lines of a result that are shown."""
MAX_CHARACTERS = 2000
"""The characters of a result that are shown."""
_WORDS = {"yes": "y", "no": "n", "always": "a", "server": "s", "never": "v", "edit": "e", "stop": "q", "quit": "q"}
"""Whole words count as well as letters. Any other answer is asked about again: "stop" must not be taken for "s"."""
_CHOICES = {
    "y": (True, Remember.ONCE),
    "a": (True, Remember.TOOL),
    "s": (True, Remember.SERVER),
    "n": (False, Remember.ONCE),
    "v": (False, Remember.TOOL),
}


async def follow_round(session: Session, reply: StoredMessage, is_shown: bool = True) -> StoredMessage | None:
    """Asks about the calls of a reply, waits for them and shows their results. Returns the next reply, if there is
    one. `is_shown`: the reply stands above with its calls, so that they are not shown again."""
    if reply.reply is None or LOOP not in reply.reply.settings.options:
        return None
    for server, why in reply.reply.settings.options[LOOP].get("failed", {}).items():
        session.screen.note(strings.TOOLS_MISSING.format(server=server, why=sanitize(why)))
    await _show_notices(session, reply)
    shown: set[int] = set()
    while (round := await session.chat.tool_round(reply.id)) is not None:
        await _show_results(session, round, shown)
        waiting = [call for call in round.calls if call.state in UNDECIDED]
        if any(call.state is CallState.NEW for call in round.calls):
            waiting = []  # their rules are still being looked up: one question is asked about all
        if round.state is RoundState.DONE:
            return await _next_reply(session, round)
        if round.state is not RoundState.OPEN:
            session.screen.note(round.error or strings.TOOLS_STOPPED)
            return None
        if waiting and not session.lines.is_interactive:
            session.screen.note(strings.TOOLS_WAIT)
            return None
        if waiting:
            await _ask(session, round, waiting, is_shown)
            is_shown = True
        else:
            await _wait(session, round)
    return None


async def _show_notices(session: Session, reply: StoredMessage) -> None:
    """Notices about the tools that were offered, with the first reply of a loop."""
    assert reply.reply is not None
    notices = reply.reply.settings.options[LOOP].get("notices", {})
    if not notices or reply.parent_id is None or (await session.chat.message(reply.parent_id)).role is Role.TOOL:
        return
    for server, texts in notices.items():
        for text in texts:
            session.screen.note(strings.TOOLS_NOTICE.format(server=server, text=sanitize(text)))


async def _next_reply(session: Session, round: ToolRound) -> StoredMessage | None:
    if round.next_id is None:
        await session.cursor.move(await session.chat.newest_leaf(round.conversation_id, round.reply_id))
        return None
    await session.cursor.move(round.next_id)
    return await session.chat.message(round.next_id)


async def _ask(session: Session, round: ToolRound, calls: Sequence[RoundCall], is_shown: bool) -> None:
    """One answer decides about all calls that wait. The question has the full names of their tools."""
    interrupted = [call for call in calls if call.state is CallState.INTERRUPTED]
    for call in calls:
        if not is_shown:
            session.screen.show(*format_call(call.name, call.arguments))
        if call in interrupted:
            session.screen.note(strings.CALL_INTERRUPTED)
    question = strings.CALL_AGAIN if interrupted else strings.APPROVE_CALLS if len(calls) > 1 else strings.APPROVE_CALL
    try:
        names = ", ".join(dict.fromkeys(sanitize(call.name) for call in calls))
        answer = (await session.lines.ask(question.format(names=names))).strip().lower()
        answer = _WORDS.get(answer, answer)
        edited: dict[int, str] = {}
        if answer == "e":
            edited = {call.position: await _edit(session, call) for call in calls}
            answer = "y"
    except EOFError:
        answer = "q"
        edited = {}
    if answer == "q":
        await session.chat.stop_reply(round.reply_id)
        return
    if answer not in _CHOICES:
        session.screen.note(strings.APPROVE_HELP)
        return
    allowed, remember = _CHOICES[answer]
    decisions = [CallDecision(call.position, allowed, edited.get(call.position), remember) for call in calls]
    await session.chat.decide_calls(round.reply_id, decisions)


async def _edit(session: Session, call: RoundCall) -> str:
    """Asks for the arguments until they are a JSON object."""
    while True:
        question = strings.EDIT_ARGUMENTS.format(name=sanitize(call.name), arguments=sanitize(call.arguments))
        text = (await session.lines.ask(question)).strip() or call.arguments
        try:
            if isinstance(json.loads(text), dict):
                return text
        except ValueError:
            pass
        session.screen.note(strings.NOT_AN_OBJECT)


async def _wait(session: Session, round: ToolRound) -> None:
    """Waits until the round changes. Ctrl+C stops it: its servers are told to cancel."""
    from palaver.repl.session import Interrupted

    names = ", ".join(sanitize(call.name) for call in round.calls if call.state is CallState.RUNNING)
    try:
        await session.wait_for(_changed(session, round), strings.TOOLS_RUN.format(names=names))
    except Interrupted:
        await session.chat.stop_reply(round.reply_id)


async def _changed(session: Session, round: ToolRound) -> None:
    while await session.chat.tool_round(round.reply_id) == round:
        await asyncio.sleep(POLL_SECONDS)


async def _show_results(session: Session, round: ToolRound, shown: set[int]) -> None:
    for call in round.calls:
        if call.result is None or call.position in shown:
            continue
        shown.add(call.position)
        result, more = _shorten(sanitize(call.result))
        style = "error" if call.is_error else "note"
        session.screen.show(Text.assemble((f"{sanitize(call.name)}: ", "call"), (result, style)))
        if more:
            session.screen.note(strings.MORE_LINES.format(lines=more))
        for blob in call.media:
            session.screen.note(strings.BLOB.format(about=format_blob(blob)))
            if blob.kind == "image":
                await session.show_picture(await session.chat.blob(blob.digest))


def _shorten(text: str) -> tuple[str, str]:
    """The first lines of a text, and how much is left out: characters if its lines are too long to be shown."""
    lines = text.splitlines() or [""]
    shown = "\n".join(lines[:MAX_LINES])
    if len(shown) > MAX_CHARACTERS:
        return shown[:MAX_CHARACTERS], format_count(len(text) - MAX_CHARACTERS, strings.CHARACTERS)
    return shown, format_count(len(lines) - MAX_LINES, strings.LINES) if len(lines) > MAX_LINES else ""
