"""A writer process to kill, and a check that everything it acknowledged is stored.

The writer sends one line per write after the store has returned. `find_lost` compares the lines with the store. Used
by the tests and, for longer, by benchmarks/store.py.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from palaver.messages import Text
from palaver.store import Lease, NotFound, ReplyEnding, ReplyStatus, Store, TokenFrame, open_store
from tests import forkserver
from tests.store.factories import SETTINGS, add_message, new_conversation, steps

_CONTEXT = forkserver.preload("tests.store.crash_writer")
Acknowledge = Callable[..., None]


def write_forever(folder: Path, database: str | None, sender: Connection) -> None:
    def acknowledge(*words: str) -> None:
        os.write(sender.fileno(), (" ".join(words) + "\n").encode())

    store = open_store(folder, database)
    lease = store.leases.open()
    while True:
        conversation = new_conversation(store)
        acknowledge("conversation", conversation.id)
        parent = None
        for turn in range(5):
            question = add_message(store, conversation.id, parent, f"question {turn}")
            acknowledge("message", question.id)
            parent = _reply(store, lease, conversation.id, question.id, acknowledge)


def _reply(store: Store, lease: Lease, conversation_id: str, parent: str, acknowledge: Acknowledge) -> str:
    replies = [store.replies.start(lease, conversation_id, parent, SETTINGS) for _ in range(3)]
    for place in range(8):
        store.replies.append(lease, [TokenFrame(reply.id, place, steps(place)) for reply in replies])
        for reply in replies:
            acknowledge("tokens", reply.id, str(place + 1))
    for reply in replies:
        store.replies.finish(lease, reply.id, ReplyEnding(ReplyStatus.DONE, (Text("answer"),)))
        acknowledge("done", reply.id)
    return replies[0].id


def run_killed_writer(folder: Path, database: str | None, after: Callable[[], float]) -> list[list[str]]:
    """Runs a writer, kills it after `after()` seconds of writing, and returns what it acknowledged."""
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=write_forever, args=(folder, database, sender))
    process.start()
    sender.close()
    with receiver, open(receiver.fileno(), "rb", closefd=False) as lines:
        first = lines.readline()
        time.sleep(after())
        process.kill()
        output = first + lines.read()
    process.join()
    process.close()
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
