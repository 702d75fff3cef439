"""A writer that is killed, and the count of what it had been told was safe.

The writer acknowledges on its standard output after the store has returned, one line a thing. `check` compares what
was acknowledged with what is there. Used by the tests and, for longer, by benchmarks/store.py.
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
from tests.store.making import SETTINGS, conversation, said, steps

ROOT = Path(__file__).parents[2]


def write_for_ever(folder: Path, database: str | None) -> None:
    store = open_store(folder, database)
    lease = store.leases.open()
    while True:
        made = conversation(store)
        tell("conversation", made.id)
        parent = None
        for turn in range(5):
            question = said(store, made.id, parent, f"question {turn}")
            tell("message", question.id)
            parent = _reply(store, lease, made.id, question.id)


def _reply(store: Store, lease: Lease, conversation_id: str, parent: str) -> str:
    replies = [store.replies.start(lease, conversation_id, parent, SETTINGS) for _ in range(3)]
    for place in range(8):
        store.replies.append(lease, [TokenFrame(reply.id, place, steps(place)) for reply in replies])
        for reply in replies:
            tell("tokens", reply.id, str(place + 1))
    for reply in replies:
        store.replies.finish(lease, reply.id, ReplyEnding(ReplyStatus.DONE, (Text("answer"),)))
        tell("done", reply.id)
    return replies[0].id


def tell(*words: str) -> None:
    os.write(1, (" ".join(words) + "\n").encode())


def killed_writer(folder: Path, database: str | None, after: Callable[[], float]) -> list[list[str]]:
    """Runs a writer, kills it after so many seconds of writing, and gives what it had acknowledged."""
    code = "import sys, pathlib; from tests.store.killing import write_for_ever as w; "
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
    said_by_then = first + process.stdout.read()
    process.wait()
    process.stdout.close()
    whole = said_by_then[: said_by_then.rfind(b"\n") + 1]
    return [line.split() for line in whole.decode().splitlines()]


def lost(store: Store, acknowledged: list[list[str]]) -> list[str]:
    """What is not there although its writer was told that it is; the killed writer's replies are interrupted."""
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


def moments(seed: int, most: float) -> Callable[[], float]:
    chance = random.Random(seed)
    return lambda: chance.random() * most
