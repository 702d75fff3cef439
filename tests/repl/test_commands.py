"""Commands in a session with a scripted model: what they understand and what they say."""

from __future__ import annotations

import asyncio
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from palaver.chat.interface import ModelState
from palaver.chat.local_chat import LocalChat
from palaver.chat.model_pool import PooledEngine
from palaver.messages import Role
from palaver.repl import strings
from palaver.repl.commands import table
from palaver.repl.input import KeyActions, LastMessage, TypedLine
from palaver.repl.session import Interrupted
from palaver.store import Conflict, DiskFull, StoredMessage
from tests.chat.scripted_service import OTHER, WAVE
from tests.repl.scripted_session import PLAIN, TypedLines, open_session
from tests.store.exports import CLAUDE, archive


@pytest.mark.parametrize(
    ("lines", "shown", "stored"),
    [
        (["/seed 7", "/seed none"], "seed = random", {}),
        (["/seed 7", "/seed null"], "seed = random", {}),
        (["/seed -1"], "seed = random", {}),
        (["/min_p 0.1", "/min_p null"], "min_p = 0", {"min_p": 0.0}),
        (["/top_k 5", "/top_k off"], "top_k = 0", {"top_k": 0}),
        (["/temperature 0.5", "/temperature none"], "the model's default", {}),
        (["/top_p 0"], "top_p = 0 ", {"top_p": 0.0}),
        (["/max_tokens 9", "/max_tokens null"], "max_tokens = none", {}),
        (["/think true"], "Thinking: on", {"thinking": True}),
        (["/think False"], "Thinking: off", {"thinking": False}),
        (["/think off", "/think null"], "Thinking: the model's default", {}),
        (["/think budget 5", "/think budget null"], "Thinking: the model's default", {}),
        (["/collapse false"], "Thoughts are shown in full.", {}),
        (["/collapse true"], "Thoughts are collapsed", {}),
        (["/stop END", "/stop null"], "stop: none", {}),
        (["/system Be brief.", "/system none"], "No system prompt", {}),
        (
            ["/set max_frames 8", "/set stack_frames 2"],
            "stack_frames = 2",
            {"media": {"max_frames": 8, "stack_frames": 2}},
        ),
        (["/set max_frames 8", "/set max_frames default"], "max_frames = default", {}),
    ],
)
async def test_the_words_that_users_type(
    tmp_path: Path, lines: list[str], shown: str, stored: dict[str, object]
) -> None:
    async with open_session(tmp_path) as session:
        for line in lines:
            last = await session.do(line)
        assert shown in last
        assert (await session.session.cursor.settings()).parameters == stored


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("/set max_frames 0", "max_frames must be from 1 to 256 (got '0')."),
        ("/set foo 1", "Unknown parameter 'foo'. Known parameters: temperature,"),
        ("/set temprature 1", "Unknown parameter 'temprature'. Did you mean 'temperature'?"),
        ("/top_p 7", "top_p must be between 0 and 1 (got 7.0)."),
        ("/seed 1.5", "seed must be a whole number (got '1.5')."),
        ("/collapse maybe", "collapse must be on or off (got 'maybe')."),
        ("/hepl", "Unknown command /hepl. Did you mean /help? To send it as a message, type //hepl."),
        ("/search", "What should I search for?"),
        ("/search kiwi", 'No results for "kiwi", neither'),
        ("/list kiwi", 'No conversation title contains "kiwi".'),
        ("/open kiwi", 'No conversation matches "kiwi".'),
        ("/expand", "There is no reply yet."),
        ("/thought", "There is no reply yet."),
        ("/tree", "No branches yet."),
    ],
)
async def test_what_is_not_understood(tmp_path: Path, line: str, shown: str) -> None:
    async with open_session(tmp_path) as session:
        assert shown in await session.do(line)


@pytest.mark.parametrize(
    "command",
    ["/attach {}", "/import {}", "/save {}", "/export md {}", "/listen {}", "/voice save {}"],
)
async def test_a_file_in_the_home_folder_of_an_unknown_user(tmp_path: Path, command: str) -> None:
    file = "~nobody-here/file"
    async with open_session(tmp_path) as session:
        await session.do("Hello")
        assert await session.do(command.format(file)) == f"Can't find the home folder that {file} begins with."


async def test_import_reads_no_pipe(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe.json")
    async with open_session(tmp_path / "data") as session:
        shown = await asyncio.wait_for(session.do(f"/import {pipe}"), 10)
        assert shown == f"{pipe} is a pipe or a device, not a file."


async def test_leaving_does_not_wait_for_a_pipe_that_was_cancelled(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe.txt")
    async with open_session(tmp_path / "data") as session:
        reading = asyncio.ensure_future(session.do(f"/attach {pipe}"))
        await asyncio.sleep(0.2)
        reading.cancel()
    await asyncio.wait_for(asyncio.get_running_loop().shutdown_default_executor(), 10)


async def test_a_device_without_an_end_is_too_large(tmp_path: Path) -> None:
    async with open_session(tmp_path) as session:
        assert await session.do("/attach /dev/zero") == "/dev/zero is larger than 50 MB."


async def test_a_path_with_a_null_byte_is_an_error(tmp_path: Path) -> None:
    async with open_session(tmp_path) as session:
        assert "null byte" in await asyncio.wait_for(session.do("/attach a\0b"), 10)


async def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("\n")
    async with open_session(tmp_path) as session:
        assert await session.do(f"/attach {tmp_path}/notes.txt") == "notes.txt is empty."


async def test_a_model_that_does_not_exist_leaves_the_current_one(tmp_path: Path) -> None:
    async with open_session(tmp_path) as session:
        shown = await session.do("/model test/missing")
        assert shown.startswith("Can't find the model 'test/missing'")
        assert shown.endswith("scripted is still in use.")
        await session.do("Hello")
        path = await session.session.cursor.path()
        assert path[0].text == "Hello"
        assert path[1].text
        assert (await session.stage.chat.model()).state is ModelState.READY


async def test_a_message_that_was_refused_leaves_no_conversation(tmp_path: Path) -> None:
    async with open_session(tmp_path, context=64) as session:
        await session.do("/system Be brief.")
        assert "maximum context length is 64" in await session.do("word " * 200)
        assert await session.stage.chat.conversations() == ()
        assert (await session.session.cursor.settings()).system == "Be brief."
        await session.do("Hello")
        (one,) = await session.stage.chat.conversations()
        assert (one.title, one.system) == ("Hello", "Be brief.")


DELETED = "This conversation was deleted elsewhere: /new starts another one, `palaver undelete {id}` brings it back."


@pytest.mark.parametrize("error", [DiskFull(), Conflict("The reply is still running.")])
async def test_a_message_that_can_not_be_stored_stays_in_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def refuse(*arguments: Any, **fields: Any) -> None:
        raise error

    async with open_session(tmp_path) as session:
        await session.do("Hello")
        with monkeypatch.context() as patch:
            patch.setattr(LocalChat, "send_message", refuse)
            assert await session.do("//etc is a folder") == str(error)
        assert session.session.initial_line == TypedLine("//etc is a folder")


async def test_control_c_does_not_wait_for_a_server_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing answers for a minute: neither what is being sent nor what is asked for the line below."""

    async def stay_silent(*arguments: Any, **fields: Any) -> Any:
        await asyncio.sleep(60)

    async with open_session(tmp_path) as session:
        await session.do("Hello")
        actions: list[KeyActions] = []

        def watch_keys(found: KeyActions) -> AbstractContextManager[None]:
            actions.append(found)
            return nullcontext()

        monkeypatch.setattr(session.session.lines, "watch_keys", watch_keys)
        with monkeypatch.context() as patch:
            for name in ("conversation", "cursor", "model"):
                patch.setattr(LocalChat, name, stay_silent)
            sending = asyncio.ensure_future(session.do("Are you there?"))
            while len(actions) < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(1)
            actions[-1].on_interrupt()
            with pytest.raises(Interrupted):
                await asyncio.wait_for(sending, 5)
        assert session.session.initial_line == TypedLine("Are you there?")


@pytest.mark.parametrize(
    ("typed", "silent"),
    [
        (TypedLine("Hello"), ("send_message", "nodes", "delete_conversation")),  # its new conversation is discarded
        (TypedLine("Bye", "edited"), ("message",)),
        (TypedLine("Bye", "edited"), ("edit_message",)),
    ],
)
async def test_no_typed_line_waits_for_a_server_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: TypedLine, silent: tuple[str, ...]
) -> None:
    async def stay_silent(*arguments: Any, **fields: Any) -> Any:
        called.set()
        await asyncio.sleep(60)

    async with open_session(tmp_path) as session:
        if typed.edited_id:
            await session.do("Hello")
            message = await session.session.cursor.last_message(Role.USER)
            assert message is not None
            typed = TypedLine(typed.text, message.id)
        called, actions = asyncio.Event(), list[KeyActions]()

        def watch_keys(found: KeyActions) -> AbstractContextManager[None]:
            actions.append(found)
            return nullcontext()

        monkeypatch.setattr(session.session.lines, "watch_keys", watch_keys)
        with monkeypatch.context() as patch:
            for name in silent:
                patch.setattr(LocalChat, name, stay_silent)
            sending = asyncio.ensure_future(session.session.handle_line(typed))
            await called.wait()
            assert actions, "no key is watched"
            actions[-1].on_interrupt()
            with pytest.raises(Interrupted):
                await asyncio.wait_for(sending, 10)
        assert session.session.initial_line == typed


async def test_the_prompt_does_not_wait_for_a_server_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stay_silent(*arguments: Any, **fields: Any) -> Any:
        await asyncio.sleep(60)

    class Prompted(TypedLines):
        async def read(self, initial: TypedLine | None = None, last: LastMessage | None = None) -> TypedLine:
            assert last is None
            raise EOFError

    async with open_session(tmp_path) as session:
        await session.do("Hello")
        session.session.lines = Prompted()
        with monkeypatch.context() as patch:
            patch.setattr(LocalChat, "cursor", stay_silent)
            await asyncio.wait_for(session.session.run(), 10)


async def test_a_conversation_that_is_deleted_elsewhere_keeps_the_typed_message(tmp_path: Path) -> None:
    async with open_session(tmp_path) as session:
        await session.do("/system Be brief.")
        await session.do("Hello")
        asked = await session.session.cursor.last_message(Role.USER)
        id = session.session.cursor.conversation_id
        assert asked is not None
        assert id is not None
        await session.stage.chat.delete_conversation(id)
        expected = DELETED.format(id=id)

        for line in ("And now?", "//help"):
            assert await session.do(line) == expected
            assert session.session.initial_line == TypedLine(line)
        edited = TypedLine("Hello again", asked.id)
        await session.session.handle_line(edited)
        assert session.session.initial_line == edited
        session.session.initial_line = None
        for command in ("/history", "/retry", "/continue", "/undo", "/title", "/delete", "/status", "/set top_k 5"):
            assert await session.do(command) == expected
        assert session.session.initial_line is None
        assert await session.do("/open kiwi") == 'No conversation matches "kiwi". /list shows the newest ones.'

        await session.stage.chat.restore_conversation(id)
        assert "1 You\nHello" in await session.do("/history")
        await session.stage.chat.delete_conversation(id)
        assert await session.do("/new") == "New conversation."
        assert (await session.session.cursor.settings()).system == "Be brief."
        await session.do("And now?")
        assert "1 You\nAnd now?" in await session.do("/history")


@pytest.mark.parametrize("mode", ["/compare off", "/compare temperature=0 temperature=1"])
async def test_a_message_that_was_sent_does_not_go_back_to_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The conversation is deleted elsewhere before the reply is shown."""
    async with open_session(tmp_path, OTHER, OTHER, OTHER) as opened:
        session, follow = opened.session, opened.session.follow
        await opened.do("Hello")
        await opened.do(mode)
        id = session.cursor.conversation_id
        assert id is not None

        async def follow_deleted(reply: StoredMessage, last_event: int = 0) -> None:
            await session.chat.delete_conversation(id)
            await follow(reply, last_event)

        monkeypatch.setattr(session, "follow", follow_deleted)
        assert DELETED.format(id=id) in await opened.do("And now?")
        assert session.initial_line is None
        await session.chat.restore_conversation(id)
        assert "3 You\nAnd now?" in await opened.do("/history")


async def test_another_conversation_can_be_opened_after_one_was_deleted_elsewhere(tmp_path: Path) -> None:
    async with open_session(tmp_path, WAVE, OTHER) as session:
        await session.do("First")
        await session.do("/new")
        await session.do("Second")
        assert session.session.cursor.conversation_id is not None
        await session.stage.chat.delete_conversation(session.session.cursor.conversation_id)
        assert "First" in await session.do("/list")
        assert "1 You\nFirst" in await session.do("/open First")


async def test_expand_shows_the_last_reply_or_says_that_it_has_no_thoughts(tmp_path: Path) -> None:
    async with open_session(tmp_path, WAVE, PLAIN) as session:
        await session.do("Wave!")
        assert await session.do("/expand") == "│ think 👋"
        await session.do("And now?")
        assert await session.do("/expand") == "The last reply has no thoughts."
        assert await session.do("/expand 2") == "│ think 👋"
        assert await session.do("/expand 4") == "Message 4 has no thoughts."


async def test_history_shows_the_system_prompt_and_the_thoughts(tmp_path: Path) -> None:
    async with open_session(tmp_path) as session:
        assert "Nothing here yet." in await session.do("/history")
        await session.do("/system You are a lighthouse.")
        await session.do("Wave!")
        shown = await session.do("/history")
        assert shown.startswith("System prompt\nYou are a lighthouse.\n\n1 You\nWave!\n\n2 Model\nThought for ")
        assert "│ think 👋\nWave: 👋🏽" in shown
        assert "lighthouse" not in await session.do("/history 1")


async def test_switch_names_the_branch_number(tmp_path: Path) -> None:
    async with open_session(tmp_path) as session:
        await session.do("Wave!")
        assert await session.do("/switch 7") == "branch number must be between 1 and 1 (got '7')."
        assert await session.do("/history 7") == "message number must be between 1 and 2 (got '7')."


@pytest.mark.parametrize(
    ("typed", "title"),
    [
        ('"Trip"', "Trip"),
        ("'A trip'", "A trip"),
        ("Trip", "Trip"),
        ('"Heat" and "Dust"', '"Heat" and "Dust"'),
        ("The 'best' trip", "The 'best' trip"),
        ('5"', '5"'),
    ],
)
async def test_quotes_around_a_title_are_not_part_of_it(tmp_path: Path, typed: str, title: str) -> None:
    async with open_session(tmp_path) as session:
        assert await session.do(f"/title {typed}") == f'Title: "{title}"'


@pytest.mark.parametrize("command", ["/edit", "/edit inline"])
async def test_an_edited_message_that_begins_with_a_slash_is_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    for name in ("VISUAL", "EDITOR"):
        monkeypatch.delenv(name, raising=False)
    async with open_session(tmp_path, OTHER, OTHER) as session:
        await session.do("//delete")
        await session.do(command)
        line = session.session.initial_line
        assert line is not None
        await session.session.handle_line(TypedLine(f"{line.text} it", line.edited_id))
        assert "1 You · 2 versions\n/delete it" in await session.do("/history")


async def test_undo_says_where_it_went(tmp_path: Path) -> None:
    async with open_session(tmp_path) as session:
        await session.do("Wave!")
        assert await session.do("/undo") == "Undone. Now at the start of the conversation."
        assert await session.do("/redo") == 'Redone. Now at: "Wave: 👋🏽 <think"'


async def test_voice_says_where_the_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("espeakng_loader", reason="NOTHING IS SHOWN HERE: there is no espeak")
    monkeypatch.setattr("palaver.repl.voice.find_player", lambda: None)
    async with open_session(tmp_path) as session:
        shown = await session.do("/voice on")
        assert str(tmp_path / "spoken") in shown
        await session.session.close()


async def test_an_import_says_what_it_left_out(tmp_path: Path) -> None:
    file = tmp_path / "export.zip"
    file.write_bytes(archive(CLAUDE))
    async with open_session(tmp_path) as session:
        shown = await session.do(f"/import {file}")
        assert "Imported 1 conversation: Sums" in shown
        assert "Not imported: conversation 1, file of message 1: b.png is not in the export" in " ".join(shown.split())


async def test_help_shows_ten_commands_and_all_of_them_on_request(tmp_path: Path) -> None:
    async with open_session(tmp_path) as session:
        shown = (await session.do("/help")).splitlines()
        listed = [line.split()[0] for line in shown if line.startswith("  /")]
        assert listed == [f"/{name}" for name in strings.ESSENTIAL]
        assert len(listed) == 10
        assert any("Ctrl+C" in line for line in shown)
        assert any("/help all" in line for line in shown)
        assert len(shown) <= 19  # and the prompt: a small terminal shows all of it
        assert max(len(line.rstrip()) for line in shown) <= 60
        everything = await session.do("/help all")
        assert everything.count(strings.GROUP_BRANCHES) == 1
        assert all(f"  /{command.name}" in everything for command in table())
        assert "(also /temp)" in await session.do("/help temperature")


async def test_numbers_are_written_alike(tmp_path: Path) -> None:
    async with open_session(tmp_path) as session:
        assert "4,096 tokens" in await session.do("/context")
        assert "context 4,096" in await session.do("/model")
        await session.do("Wave!")
        assert " of 4,096 tokens (2%)" in await session.do("/context")
        assert "0 to 1,000,000" in await session.do("/top_k")
        assert "0 to 9,223,372,036,854,775,807" in await session.do("/seed")
        assert "seed = 12345678" in await session.do("/seed 12345678")


async def test_tokens_with_a_number_limit_the_replies_of_a_diffusion_model(tmp_path: Path) -> None:
    async with open_session(tmp_path) as session:
        engine = session.stage.service.models.current().engine
        assert isinstance(engine, PooledEngine)
        engine._entry.info = replace(engine.info, block_length=32)
        shown = [await session.do(line) for line in ("/steps 12", "/tokens 64", "/set remasking entropy")]
        assert (await session.stage.chat.model()).block_length == 32
        assert ["steps = 12" in shown[0], "max_tokens = 64" in shown[1], "remasking = entropy" in shown[2]] == [
            True
        ] * 3
        expected = {"steps": 12, "max_tokens": 64, "remasking": "entropy"}
        assert (await session.session.cursor.settings()).parameters == expected
        assert "There is no reply yet" in await session.do("/tokens")
        assert "remasking must be confidence or entropy" in await session.do("/set remasking luck")
