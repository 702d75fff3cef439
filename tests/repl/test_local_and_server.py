"""One conversation with a server and with a local model in turn, running replies included."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from palaver.messages import Role
from palaver.store import ReplyStatus, open_store
from tests.repl.conftest import Door, local_door, run_server
from tests.repl.terminal import CTRL_D, Terminal

COUNT = "Count from 1 to 30."
LAST = r"29,\s30"
COUNTED = rf"(?s){LAST}.*tokens/s"


def ready(terminal: Terminal) -> None:
    terminal.until(" is ready · ", 120)
    terminal.prompt()


def leave(terminal: Terminal) -> None:
    terminal.type(CTRL_D)
    assert terminal.wait_for_exit() == 0


def replies(folder: Path) -> list[tuple[ReplyStatus, tuple[int, ...]]]:
    """Status and tokens of each reply to the question, the oldest first."""
    with open_store(folder) as store:
        owner = store.users.ensure().id
        stored = [one for id in store.conversations.ids(owner) for one in store.messages.all(id)]
        question_ids = {one.id for one in stored if one.text == COUNT}
        found = [one for one in stored if one.role is Role.ASSISTANT and one.parent_id in question_ids and one.reply]
        return [(one.reply.status, tuple(store.replies.token_ids(one.id))) for one in found if one.reply]


def start_counting(terminal: Terminal) -> None:
    """Starts a long reply and waits for its first words."""
    terminal.enter(COUNT)
    terminal.wait(lambda shown: "1, 2, 3" in shown.rpartition(f"› {COUNT}")[2])


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[tuple[Door, subprocess.Popen[bytes]]]:
    with run_server(tmp_path, "--grace", "1") as started:  # it need not wait for a reply that crawls
        yield started


def test_a_running_reply_is_joined_at_the_server(server: Door) -> None:
    with server.open("--set", "seed=1") as first:
        ready(first)
        with ExitStack() as crawling:
            crawling.enter_context(server.crawling())
            start_counting(first)
            with server.open("--resume") as second:
                second.wait(rf"(?s)1 You\n{COUNT}.*1, 2, 3")
                crawling.close()
                second.until(LAST)
                ready(second)
        first.until(COUNTED)


@pytest.mark.parametrize("begins_here", [True, False])
def test_a_running_reply_is_joined_through_the_other_door(server: Door, begins_here: bool) -> None:
    here = local_door(server.folder)
    begins, joins = (here, server) if begins_here else (server, here)
    with begins.open("--set", "seed=1") as first, joins.open() as second:
        ready(first)
        ready(second)
        with server.crawling():
            start_counting(first)
            second.enter(f"/open {COUNT}")
            second.until(r"Open which number\?|1, 2, 3")
            if "Open which number?" in second.transcript():
                second.type("1\r")
            second.until("1, 2, 3")
        second.until(LAST)
        second.prompt()
        assert re.search(LAST, second.do("/history"))
        first.until(COUNTED)


def test_begun_here_gone_on_with_at_the_server(server: Door) -> None:
    with local_door(server.folder).open() as terminal:
        ready(terminal)
        terminal.do("My name is Ada.")
        leave(terminal)
    with server.open("--resume") as terminal:
        ready(terminal)
        assert "My name is Ada." in terminal.transcript()
        assert "Ada" in terminal.do("What is my name?")


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL], ids=["ended", "killed"])
def test_begun_at_a_server_that_is_gone_gone_on_with_here(
    fresh: tuple[Door, subprocess.Popen[bytes]], ending: signal.Signals
) -> None:
    """The local session has all messages and continues the interrupted reply."""
    door, process = fresh
    with door.open("--set", "seed=1") as terminal:
        ready(terminal)
        terminal.do("My name is Ada.")
        terminal.do("/new")
        assert re.search(LAST, terminal.do(COUNT))
        terminal.do("/new")
        with door.crawling():
            start_counting(terminal)
            process.send_signal(ending)
            process.wait(60)
    with local_door(door.folder).open("--resume") as terminal:
        ready(terminal)
        if "Interrupted. /continue picks up" in terminal.transcript():
            assert re.search(LAST, terminal.do("/continue"))
        assert re.search(LAST, terminal.transcript())
        terminal.do("/open My name is Ada.")
        assert "Ada" in terminal.do("What is my name?")
        leave(terminal)
    uncut, cut = replies(door.folder)
    assert uncut == cut
    assert uncut[0] is ReplyStatus.DONE


def test_begun_here_and_killed_it_goes_on_by_itself_at_a_server(tmp_path: Path) -> None:
    here = local_door(tmp_path)
    with here.open("--set", "seed=1") as terminal:
        ready(terminal)
        assert re.search(LAST, terminal.do(COUNT))
        terminal.do("/new")
        with here.crawling():
            start_counting(terminal)
            terminal.kill()
    with run_server(tmp_path) as (door, _), door.open("--resume") as terminal:
        terminal.until(LAST)
        ready(terminal)
    uncut, cut = replies(tmp_path)
    assert uncut == cut
