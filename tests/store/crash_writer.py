"""A writer process to kill, and a check that everything it acknowledged is stored.

The writer prints one line per write after the store has returned. `find_lost` compares the lines with the store. Used
by the tests and, for longer, by benchmarks/store.py.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from palaver.messages import Text
from palaver.store import Lease, NotFound, ReplyEnding, ReplyStatus, Store, TokenFrame, open_store
from tests.store.factories import SETTINGS, add_message, new_conversation, steps

ROOT = Path(__file__).parents[2]


def write_forever(folder: Path, database: str | None) -> None:
    store = open_store(folder, database)
    lease = store.leases.open()
    while True:
        conversation = new_conversation(store)
        acknowledge("conversation", conversation.id)
        parent = None
        for turn in range(5):
            question = add_message(store, conversation.id, parent, f"question {turn}")
            acknowledge("message", question.id)
            parent = _reply(store, lease, conversation.id, question.id)


def _reply(store: Store, lease: Lease, conversation_id: str, parent: str) -> str:
    replies = [store.replies.start(lease, conversation_id, parent, SETTINGS) for _ in range(3)]
    for place in range(8):
        store.replies.append(lease, [TokenFrame(reply.id, place, steps(place)) for reply in replies])
        for reply in replies:
            acknowledge("tokens", reply.id, str(place + 1))
    for reply in replies:
        store.replies.finish(lease, reply.id, ReplyEnding(ReplyStatus.DONE, (Text("answer"),)))
        acknowledge("done", reply.id)
    return replies[0].id


def acknowledge(*words: str) -> None:
    os.write(1, (" ".join(words) + "\n").encode())


def run_killed_writer(folder: Path, database: str | None, after: Callable[[], float]) -> list[list[str]]:
    """Runs a writer, kills it after `after()` seconds of writing, and returns what it acknowledged."""
    code = "import sys, pathlib; from tests.store.crash_writer import write_forever as w; "
    code += "w(pathlib.Path(sys.argv[1]), sys.argv[2] or None)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, folder, database or ""],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(after())
    process.send_signal(signal.SIGKILL)
    output = first + process.stdout.read()
    process.wait()
    process.stdout.close()
    complete_lines = output[: output.rfind(b"\n") + 1]
    return [line.split() for line in complete_lines.decode().splitlines()]


def find_lost(store: Store, acknowledged: list[list[str]]) -> list[str]:
    """Acknowledged writes that are not stored. Interrupts the killed writer's replies first."""
    store.replies.interrupt_orphans()
    missing = []
    for kind, id, *rest in acknowledged:
        try:
            if not _is_there(store, kind, id, rest):
                missing.append(f"{kind} {id} {rest}")
        except NotFound:
            missing.append(f"{kind} {id}")
    return missing


def _is_there(store: Store, kind: str, id: str, rest: list[str]) -> bool:
    if kind == "conversation":
        return store.conversations.get(id).id == id
    reply = store.messages.get(id).reply
    if kind == "message":
        return True
    ids = store.replies.token_ids(id)
    if kind == "tokens":
        return ids == tuple(range(len(ids))) and len(ids) >= int(rest[0])
    return reply is not None and reply.status is ReplyStatus.DONE


def random_delays(seed: int, maximum: float) -> Callable[[], float]:
    rng = random.Random(seed)
    return lambda: rng.random() * maximum
