"""Starting, quitting and resuming sessions; dumb terminals and pipes."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from palaver.cli import app
from palaver.errors import RequestError
from palaver.messages import Role
from palaver.repl.commands.branches import edit_text
from palaver.repl.input import StreamLineSource
from palaver.repl.terminal_mode import KeyMode
from palaver.store import ReplyStatus, StoredMessage, open_store
from tests.models import make_model
from tests.repl.conftest import Door, HeldEngine, local_door
from tests.repl.terminal import CTRL_BACKSLASH, CTRL_C, CTRL_D, CTRL_L, Terminal

QUESTION = "What is 246810 + 135791?"
ANSWER = "382601"
FIRST_SCREEN = (
    r"palaver \S+ · sprout\nsprout is a tiny demo model.*\n.*\n\nTry:  What is .*\n"
    r"(Load|Use) a real model:.*\n(.*\n)?\n/help .*\n\n"
)
READY = r"sprout is ready · context 8,192 · thinks.*\n\n"
"""The whole screen at the start: no output of libraries."""


def replies(folder: Path) -> list[tuple[StoredMessage, tuple[int, ...]]]:
    """The replies to the question, the oldest first."""
    with open_store(folder) as store:
        owner = store.users.ensure().id
        found = [one for id in store.conversations.ids(owner) for one in store.messages.all(id)]
        question_ids = {one.id for one in found if one.text == QUESTION}
        answers = [one for one in found if one.role is Role.ASSISTANT and one.parent_id in question_ids]
        return [(one, tuple(store.replies.token_ids(one.id))) for one in answers]


def ready(terminal: Terminal) -> None:
    terminal.until(" is ready · ", 120)
    terminal.prompt()


def test_stopped_in_a_thought_left_and_gone_on_with(door: Door, tmp_path: Path) -> None:
    """The continued reply has the tokens of the uninterrupted one."""
    held = HeldEngine(tmp_path)
    with door.open("--set", "seed=5", environment=held.environment) as terminal:
        if door.name == "local":
            _interrupt_while_loading(terminal)
        held.release()
        ready(terminal)
        assert re.search(rf"\A{FIRST_SCREEN}(› Hello\nCancelled.\n)?{READY}›\Z", terminal.transcript())
        assert ANSWER in terminal.do(QUESTION)
        terminal.do("/new")
        with door.crawling():
            terminal.enter(QUESTION)
            terminal.wait(r"^│ \d")
            terminal.stop()
        terminal.type(CTRL_D)
        assert terminal.wait_for_exit() == 0
    with door.open("--resume") as terminal:
        ready(terminal)
        assert re.search(
            rf"1 You\n{re.escape(QUESTION)}\n\n2 Model\nThought.*\nStopped. /continue", terminal.transcript()
        )
        assert ANSWER in terminal.do("/continue")
        terminal.type(CTRL_D)
        assert terminal.wait_for_exit() == 0
    (whole, first), (_, second) = replies(door.folder)
    assert whole.reply is not None
    assert whole.reply.status is ReplyStatus.DONE
    assert first == second


def _interrupt_while_loading(terminal: Terminal) -> None:
    """A message sent while the model loads waits for it; Ctrl+C puts it back into the prompt."""
    terminal.wait("(?s)^›.*Loading sprout")
    terminal.enter("Hello")
    terminal.wait(r"› Hello\nLoading sprout.* · [\d.]+ s")
    terminal.type(CTRL_C)
    terminal.wait(r"Cancelled.\n› Hello$|Cancelled.\n› Hello\n\n")
    terminal.type(CTRL_C)
    terminal.wait(r"Cancelled.\n›(\n\n|$)")


def test_lines_that_are_typed_before_the_prompt_are_sent(tmp_path: Path) -> None:
    with local_door(tmp_path).open(echo=True) as terminal:
        terminal.type("\r/think off\rWhat is 2 + 2?\rWhat is 3 ")
        terminal.wait(r"tokens/s[^›]*\n› What is 3\Z")
        assert "Thinking: off" in terminal.transcript()
        assert terminal.transcript().count("tokens/s") == 1


def test_a_line_that_is_typed_while_a_command_runs_is_sent(tmp_path: Path) -> None:
    """The command reads a named pipe, which opens once it does. The typed line is not shown before the prompt."""
    notes = tmp_path / "notes"
    os.mkfifo(notes)
    with local_door(tmp_path).open(echo=True) as terminal:
        ready(terminal)
        terminal.enter(f"/attach {notes}")
        with notes.open("w") as opened:
            terminal.type("What is 2 + 2?\rWhat is 3 ")
            opened.write("Hello")
        terminal.wait(r"tokens/s[^›]*\n› What is 3\Z")
        assert terminal.transcript().count("tokens/s") == 1
        assert terminal.transcript().count("What is 2 + 2?") == 1


def test_an_editor_reads_whole_lines_from_the_terminal(tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nprintf "Text: "\nread line\necho "$line" > "$1"\n')
    editor.chmod(0o755)
    with local_door(tmp_path).open(echo=True, environment={"EDITOR": str(editor)}) as terminal:
        ready(terminal)
        terminal.do("What is 1 + 1?")
        terminal.enter("/edit")
        terminal.wait("Text:$")
        terminal.type("What is 2 + 2?\r")
        terminal.until(r"(?s)tokens/s.*tokens/s")
        terminal.prompt()
        assert "1 You · 2 versions\nWhat is 2 + 2?\n" in terminal.do("/history")


@pytest.mark.parametrize(("key", "name"), [(CTRL_C, "INT"), (CTRL_BACKSLASH, "QUIT")])
def test_a_signal_key_in_an_editor_is_a_key_of_the_editor(tmp_path: Path, key: str, name: str) -> None:
    """The editor keeps its file and the terminal."""
    editor = tmp_path / "editor"
    editor.write_text(
        f'#!/bin/sh\ntrap "printf Again:" {name}\nprintf "Text: "\nuntil read line; do :; done\necho "$line" > "$1"\n'
    )
    editor.chmod(0o755)
    with local_door(tmp_path).open(echo=True, environment={"EDITOR": str(editor)}) as terminal:
        ready(terminal)
        terminal.do("What is 1 + 1?")
        terminal.enter("/edit")
        terminal.wait("Text:$")
        terminal.type(key)
        terminal.wait("Again:$")
        terminal.type("What is 2 + 2?\r")
        terminal.until(r"(?s)tokens/s.*tokens/s")
        terminal.prompt()
        assert "1 You · 2 versions\nWhat is 2 + 2?\n" in terminal.do("/history")
        assert "Cancelled." not in terminal.transcript()


def test_the_terminal_is_left_as_it_was() -> None:
    main, side = pty.openpty()
    before = termios.tcgetattr(side)
    mode = KeyMode(side)
    with mode.active():
        os.write(main, b"one\r\n\x1a\x1c")  # Ctrl+Z and Ctrl+\ are keys
        assert os.read(side, 100) == b"one\r\n\x1a\x1c"
        with mode.suspended():
            assert termios.tcgetattr(side) == before
        assert termios.tcgetattr(side) != before
    assert termios.tcgetattr(side) == before
    for end in (main, side):
        os.close(end)


def test_the_terminal_is_left_as_it_was_at_sigterm() -> None:
    code = """
import os, signal
from palaver.repl.terminal_mode import KeyMode
with KeyMode(0).active():
    print(f"process {os.getpid()}.", flush=True)
    signal.pause()
"""
    script = f"stty -g; {sys.executable} -c '{code}'; echo status $?; stty -g"
    with Terminal(["/bin/sh", "-c", script], 200, echo=True) as terminal:
        found = re.search(r"process (\d+)\.", terminal.wait(r"process \d+\."))
        assert found is not None
        os.kill(int(found[1]), signal.SIGTERM)
        assert terminal.wait_for_exit() == 0
        before, after = re.findall(r"^[\da-f:]{20,}$", terminal.transcript(), re.MULTILINE)
        assert f"status {128 + signal.SIGTERM}" in terminal.transcript()
        assert after == before


@pytest.mark.parametrize("context", [KeyMode.active, KeyMode.suspended])
def test_a_terminal_that_is_gone_hides_no_error(context: Callable[[KeyMode], AbstractContextManager[None]]) -> None:
    main, side = pty.openpty()

    def fail() -> None:
        with context(KeyMode(side)):
            os.close(main)
            raise RuntimeError("the real error")

    with pytest.raises(RuntimeError, match="the real error"):
        fail()
    os.close(side)


def test_the_first_screen_and_control_l_while_the_model_loads(tmp_path: Path) -> None:
    """Ctrl+L clears the screen. The terminal's answer about its cursor is never shown as text."""
    held = HeldEngine(tmp_path)
    with local_door(tmp_path).open(echo=True, environment=held.environment) as terminal:
        shown = terminal.wait(r"(?s)^›.*Loading sprout")
        assert re.match(FIRST_SCREEN, shown)
        assert "/model Qwen/Qwen3-0.6B" in shown
        terminal.enter("What is 2 + 2?")
        terminal.wait(r"› What is 2 \+ 2\?\nLoading")
        terminal.type(CTRL_L)
        terminal.wait(lambda shown: "What is 2" not in shown)
        held.release()
        terminal.until("tokens/s")
        terminal.prompt()
        assert "^[" not in terminal.transcript()


def test_killed_in_the_midst_of_a_reply(door: Door) -> None:
    with door.open("--set", "seed=5") as terminal:
        ready(terminal)
        with door.crawling():
            terminal.enter(QUESTION)
            terminal.wait(r"^│ \d")
            terminal.kill()
    with door.open("--resume", "--expand") as terminal:
        ready(terminal)
        if door.name == "local":
            terminal.until("Interrupted. /continue picks up")
            terminal.do("/continue")
        terminal.until(ANSWER)
        terminal.prompt()
    ids = {ids for _, ids in replies(door.folder)}
    assert len(ids) == 1


def test_without_colours(server: Door) -> None:
    with server.open("--set", "seed=1", environment={"NO_COLOR": "1"}) as terminal:
        ready(terminal)
        assert "6912" in terminal.do("What is 1234 + 5678?")
        colours = re.findall(rb"\x1b\[(?:[\d;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[\d;]*m", terminal.written)
        assert colours == []


def test_in_a_dumb_terminal(server: Door) -> None:
    with server.open("--set", "seed=1", environment={"TERM": "dumb"}) as terminal:
        terminal.wait("^>$")
        terminal.type("What is 1234 + 5678?\n")
        terminal.until("6912")
        terminal.wait(r"^>$")
        terminal.type("/context\n")
        terminal.wait(r"of 8,192")
        terminal.type(CTRL_D)
        assert terminal.wait_for_exit() == 0
        assert b"\x1b" not in terminal.written


def test_in_forty_columns(server: Door) -> None:
    with server.open("--set", "seed=1", columns=40) as terminal:
        ready(terminal)
        assert re.search(r"n +n²", terminal.do("Make a table of the squares from 1 to 8."))
        for line in ("/params", "/help", "/status", "/tokens"):
            terminal.do(line)
        assert all(len(line) <= 40 for line in terminal.transcript().splitlines())


def test_plain_text(server: Door) -> None:
    with server.open("--set", "seed=1", "--plain") as terminal:
        ready(terminal)
        shown = terminal.do("Make a table of the squares from 1 to 8.")
        assert "| 1 | 1 |" in shown
        assert "| 8 | 64 |" in shown


def test_a_pipe(server: Door) -> None:
    """One line per turn, only answers on stdout, exit status 1 if a line failed."""
    command = [sys.executable, "-m", "palaver", "chat", *server.arguments, "--set", "seed=1"]
    environment = {**server.environment, "PATH": "/usr/bin:/bin", "HOME": str(server.folder)}
    succeeded = subprocess.run(
        command, input="What is 1234 + 5678?\n\n/think off\n//hi\n", capture_output=True, text=True, env=environment
    )
    assert succeeded.returncode == 0, succeeded.stderr
    assert "6912" in succeeded.stdout
    assert len(succeeded.stdout.strip().splitlines()) == 2
    assert "\x1b" not in succeeded.stdout + succeeded.stderr
    failed = subprocess.run(command, input="/continue\nHello\n", capture_output=True, text=True, env=environment)
    assert failed.returncode == 1
    assert "no reply to continue" in failed.stderr
    assert failed.stdout.strip()


@pytest.mark.parametrize("variable", [{"PYTHONIOENCODING": "utf-8:strict"}, {"LC_ALL": "C"}])
def test_a_line_that_is_not_utf8_is_refused_alone(server: Door, variable: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "palaver", "chat", *server.arguments, "--set", "seed=1", "--no-thinking"],
        input=b"What is 2+2?\ncaf\xe9\nWhat is 3+3?\n",
        capture_output=True,
        env={**server.environment, "PATH": "/usr/bin:/bin", "HOME": str(server.folder), **variable},
    )
    assert [number in line for number, line in zip(b"46", done.stdout.splitlines(), strict=True)] == [True, True]
    assert done.stderr == b"Line 2 of the standard input is not UTF-8 (byte 3).\n"
    assert done.returncode == 1


async def test_joined_lines_that_are_not_utf8_are_refused_together() -> None:
    stream = io.TextIOWrapper(io.BytesIO(b"one\\\ntw\xe9\\\nthree\ncaf\xc3\xa9\n\xe9"), encoding="utf-8")
    lines = StreamLineSource(stream)
    with pytest.raises(RequestError, match=r"^Line 2 of the standard input is not UTF-8 \(byte 2\)\."):
        await lines.read()
    assert (await lines.read()).text == "café"
    with pytest.raises(RequestError, match=r"^Line 5 "):
        await lines.read()
    with pytest.raises(EOFError):
        await lines.read()


async def test_a_backslash_joins_lines_in_a_pipe() -> None:
    lines = StreamLineSource(io.StringIO("one \\\ntwo\\\nthree\nfour\nfive\\"))
    assert [(await lines.read()).text for _ in range(3)] == ["one \ntwo\nthree", "four", "five"]
    with pytest.raises(EOFError):
        await lines.read()


def test_a_context_that_is_full(tmp_path: Path) -> None:
    """The user is warned before the context is full, and then offered choices."""
    folder = make_model(tmp_path / "tiny")
    door = local_door(tmp_path)
    with door.open(str(folder), "--set", "max_tokens=8", "--set", "seed=1") as terminal:
        ready(terminal)
        assert "The context is 8" in terminal.do("x" * 400)
        terminal.enter("y" * 300)
        terminal.wait(r"(?s)maximum\s+context\s+length\s+is\s+512.*\ns  Send it without the oldest.*Your choice\?")
        terminal.type("\r")
        terminal.wait(r"(?s)Your choice\?.*› yyyy.*y$")
        terminal.type("\r")
        terminal.wait(r"(?s)Your choice\?.*› yyyy.*Your choice\? \(Enter: edit the message\)$")
        terminal.type("s\r")
        terminal.until(r"(?s)Your choice\? .* s\n.*tokens/s")
        terminal.prompt()
        assert terminal.do("/history").count(" You") == 2
        assert "overflow = shorten" in terminal.do("/set overflow shorten")
        assert "tokens/s" in terminal.do("z" * 300)


def test_a_model_that_fails(tmp_path: Path) -> None:
    """The session survives failures of loading and of the template; another model can be loaded."""
    folder = make_model(tmp_path / "raising", template="{{ raise_exception('roles must alternate') }}")
    with local_door(tmp_path).open("nowhere") as terminal:
        terminal.until("Can't load nowhere. Can't find the model 'nowhere'")
        terminal.prompt()
        assert "Can't find the model 'nowhere'" in terminal.do("Hello")
        terminal.do(f"/model {folder}")
        assert "roles must alternate" in " ".join(terminal.do("Hello").split())
        assert "context 8,192" in terminal.do("/model sprout")
        assert "tokens/s" in terminal.do("What is 2 + 2?")


async def test_the_editor(tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nsed -i 's/one/two/' \"$2\"\n")
    editor.chmod(0o700)
    assert await edit_text(f"{editor} --wait", "  one\n\nline") == "  two\n\nline"
    assert await edit_text("false", "one") == "one"
    with pytest.raises(RequestError, match="missing-editor"):
        await edit_text("missing-editor", "one")


@pytest.mark.parametrize("script", [r"printf '\344' >$1", "rm $1"])
async def test_an_editor_that_leaves_no_text(tmp_path: Path, script: str) -> None:
    editor = tmp_path / "editor"
    editor.write_text(f"#!/bin/sh\n{script}\n")
    editor.chmod(0o700)
    with pytest.raises(RequestError, match=r"UTF-8\. The message is unchanged"):
        await edit_text(str(editor), "one")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--resume", "--conversation", "x"], ["--resume", "--conversation"]),
        (["--expand", "--no-thinking"], ["--expand", "--no-thinking"]),
        (["--server", "http://127.0.0.1:1", "--device", "cpu"], ["--server", "--device"]),
    ],
)
def test_flags_that_contradict_each_other(flags: list[str], named: list[str]) -> None:
    done = CliRunner().invoke(app, ["chat", *flags])
    assert done.exit_code == 2
    assert all(name in done.stderr for name in named)
