"""The template variable `terminal`: which turns of a session have it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from palaver.chat.interface import Chat
from palaver.messages import Message, Role, user
from palaver.repl.terminal_variable import add_terminal_variable
from palaver.store import StoredMessage
from tests.chat import scripted_service
from tests.chat.scripted_service import read_entries
from tests.repl.scripted_session import ScriptedSession, open_session
from tests.repl.terminal import Terminal
from tests.repl.test_terminal import fresh
from tests.tiny import CHATML

AT_TERMINAL = {"terminal": True}
TEMPLATE = "{%- if terminal %}{{- '<|im_start|>system\\nAt a terminal.<|im_end|>\\n' }}{%- endif %}\n" + CHATML


@pytest.fixture
def terminal_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripted model's template has the variable."""
    monkeypatch.setattr(scripted_service, "CHATML", TEMPLATE)


async def variables(session: ScriptedSession) -> list[dict[str, Any]]:
    """The template variables of each reply of the branch."""
    return [dict(_settings(one)) for one in await session.session.cursor.path() if one.role is Role.ASSISTANT]


def _settings(reply: StoredMessage) -> dict[str, Any]:
    assert reply.reply is not None
    found: dict[str, Any] = reply.reply.settings.options.get("variables", {})
    return found


async def _reply_on_page(chat: Chat, conversation_id: str, parent: str | None, message: Message) -> StoredMessage:
    sent = await chat.send_message(conversation_id, parent, message)
    await read_entries(chat, sent.reply.id)
    return sent.reply


async def test_other_templates_do_not_get_it(tmp_path: Path) -> None:
    async with open_session(tmp_path) as session:
        await session.do("Hello")
        await session.do("/retry")
        assert await variables(session) == [{}]


@pytest.mark.usefixtures("terminal_template")
async def test_every_turn_of_a_conversation_that_begins_at_the_terminal_has_it(tmp_path: Path) -> None:
    async with open_session(tmp_path) as session:
        await session.do("Hello")
        await session.do("And again")
        assert await variables(session) == [AT_TERMINAL, AT_TERMINAL]
        await session.do("/retry")
        assert await variables(session) == [AT_TERMINAL, AT_TERMINAL]
        conversation = await session.session.cursor.conversation()
        assert conversation is not None
        assert conversation.parameters == {}  # the page's turns and other models go without it


@pytest.mark.usefixtures("terminal_template")
async def test_a_conversation_of_the_page_goes_on_without_it(tmp_path: Path) -> None:
    async with open_session(tmp_path) as session:
        chat = session.stage.chat
        conversation = await chat.create_conversation()
        await _reply_on_page(chat, conversation.id, None, user("Hello"))
        await session.session.open(conversation.id)
        await session.do("And here")
        assert await variables(session) == [{}, {}]


@pytest.mark.usefixtures("terminal_template")
async def test_a_conversation_that_moves_to_the_page_and_back_changes_once(tmp_path: Path) -> None:
    async with open_session(tmp_path) as session:
        chat = session.stage.chat
        await session.do("Hello")
        id = session.session.cursor.conversation_id
        assert id is not None
        last = (await session.session.cursor.path())[-1]
        reply = await _reply_on_page(chat, id, last.id, user("On the page"))
        await session.session.cursor.move(reply.id)
        await session.do("Back again")
        assert await variables(session) == [AT_TERMINAL, {}, {}]


@pytest.mark.usefixtures("terminal_template")
async def test_what_the_conversation_sets_is_kept(tmp_path: Path) -> None:
    async with open_session(tmp_path) as session:
        given = {"variables": {"enable_thinking": False, "terminal": False}}
        added = await add_terminal_variable(session.stage.chat, None, given, {"overflow": "shorten"})
        assert added == {"overflow": "shorten", **given}


@pytest.mark.usefixtures("terminal_template")
async def test_columns_of_a_comparison_have_it_and_keep_their_names(tmp_path: Path) -> None:
    async with open_session(tmp_path) as session:
        await session.do("/compare temperature=0 seed=3")
        await session.do("Hello")
        id = session.session.cursor.conversation_id
        assert id is not None
        (comparison,) = await session.stage.chat.comparisons(id)
        assert [one.name for one in comparison.replies] == ["scripted · temperature 0", "scripted · seed 3"]
        replies = [await session.stage.chat.message(one.reply_id) for one in comparison.replies]
        assert [_settings(one) for one in replies] == [AT_TERMINAL, AT_TERMINAL]


@pytest.mark.usefixtures("terminal_template")
async def test_a_message_does_not_wait_for_another_model_that_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_session(tmp_path) as session:
        loading = asyncio.Event()
        pool = session.stage.service.models
        load = pool._load

        async def load_later(*given: Any) -> Any:
            await loading.wait()
            return await load(*given)

        monkeypatch.setattr(pool, "_load", load_later)
        await session.stage.chat.load_model("another")
        async with asyncio.timeout(20):
            assert await add_terminal_variable(session.stage.chat, None, {}, {}) == {}
        loading.set()
        await session.stage.chat.wait_until_ready()
        assert await add_terminal_variable(session.stage.chat, None, {}, {}) == {"variables": AT_TERMINAL}


def test_sprout_tells_the_commands_of_the_terminal(terminal: Terminal) -> None:
    fresh(terminal)
    terminal.do("/temperature 0")
    assert "Type /continue in the terminal" in terminal.do("How do I continue a stopped reply?")
    assert "Ctrl+C in the terminal" in terminal.do("How do I stop a reply?")
    assert re.search(r" [1-9]\d* cached", terminal.do("/context"))
