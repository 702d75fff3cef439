"""How quick the store is when it is full, and whether it keeps what it promised when it is killed.

python -m benchmarks.store                        100,000 messages: open, append, search, list, frames of tokens
python -m benchmarks.store --database postgresql://...
python -m benchmarks.store --kills 1000           kill -9 of a writer at random moments, then count what is lost
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from palaver.messages import assistant, user
from palaver.store import Store, TokenFrame, open_store
from palaver.store.messages import NewMessage
from tests.store.crash_writer import find_lost, random_delays, run_killed_writer
from tests.store.factories import SETTINGS, steps

LENGTH = 50
"""Messages in a conversation."""
LIMIT = 20.0
"""Milliseconds at the median."""
QUERIES = (
    *("zeppelin", "water", "wat", "the water", "the zeppelin", "green w4711", "w4711", "nothinglikeit"),
    *('"of the"', '"of the water"', "水", "東京", "東京大", "東京大阪", "大きい 山"),
)
WORDS = "the of and to in water fire stone river house light work time year people day night small great green".split()
CHARACTERS = "水火山川東京大阪人日本語学生先生時間今日明日行来見食飲話書読大小高い低い新しい古い"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--database", help="a PostgreSQL URL; SQLite in a temporary folder by default")
    parser.add_argument("--kills", type=int, default=0, help="only kill writers, so many times")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.kills:
            kill(Path(folder), options.database, options.kills, options.seed)
        else:
            measure(Path(folder), options.database, options.messages, options.seed)


def measure(folder: Path, database: str | None, messages: int, seed: int) -> None:
    chance = random.Random(seed)
    with open_store(folder, database) as store:
        begun = time.perf_counter()
        ids = fill(store, messages, chance)
        long = fill_one(store, 2000, chance)
        print(f"{messages} messages in {len(ids)} conversations, written in {time.perf_counter() - begun:.0f} s")
        settle(store)
        owner = store.users.ensure().id
        report("open a conversation", timed(lambda: open_one(store, chance.choice(ids)), 200))
        report("open one of 2,000 messages", timed(lambda: open_one(store, long), 20), None)
        report("append a message", timed(lambda: append(store, chance.choice(ids)), 200))
        for query in QUERIES:
            found = len(store.search.find(owner, query))
            report(f"search {query!r} ({found} shown)", timed(lambda q=query: store.search.find(owner, q), 20))  # type: ignore[misc]
        every = [lambda q=query: store.search.find(owner, q) for query in QUERIES]
        report("search, all of these", timed(lambda: chance.choice(every)(), 200))
        other = fill_others(store, chance)
        for query in ("water", "the water", "東京", "w4711"):
            found = len(store.search.find(other, query))
            report(f"another user's {query!r} ({found} shown)", timed(lambda q=query: store.search.find(other, q), 20))  # type: ignore[misc]
        report("list 50 conversations", timed(lambda: store.conversations.list(owner), 50))
        for streams in (1, 8, 64):
            report(f"a frame of {streams} tokens", frames(store, ids[0], streams), None)


def settle(store: Store) -> None:
    """What a server does by itself within a minute: the planner's statistics."""
    if not store.database.is_sqlite:
        with store.database.write_transaction() as connection:
            connection.exec_driver_sql("ANALYZE")


def fill(store: Store, messages: int, chance: random.Random) -> list[str]:
    owner = store.users.ensure().id
    ids = []
    for number in range(messages // LENGTH):
        made = store.conversations.create(owner, title=f"Conversation {number}")
        store.messages.append_all(made.id, list(talk(LENGTH, chance)))
        ids.append(made.id)
    return ids


def fill_one(store: Store, messages: int, chance: random.Random) -> str:
    made = store.conversations.create(store.users.ensure().id, title="A long one")
    store.messages.append_all(made.id, list(talk(messages, chance)))
    return made.id


def fill_others(store: Store, chance: random.Random) -> str:
    """A user with one conversation, and after it much of somebody else's; gives who."""
    owner = store.users.ensure("other").id
    made = store.conversations.create(owner, title="Somebody else's")
    store.messages.append_all(made.id, list(talk(LENGTH, chance)))
    fill_one(store, 2000, chance)
    return owner


def talk(count: int, chance: random.Random) -> Iterable[NewMessage]:
    for place in range(count):
        said = user(text(chance)) if place % 2 == 0 else assistant(text(chance), thinking=text(chance))
        yield NewMessage(str(place), str(place - 1) if place else None, said)


def text(chance: random.Random) -> str:
    if chance.random() < 0.3:
        return "".join(chance.choices(CHARACTERS, k=120))
    rare = ["zeppelin"] if chance.random() < 0.001 else []
    return " ".join((*chance.choices(WORDS, k=60), *rare, f"w{chance.randrange(20_000)}"))


def open_one(store: Store, id: str) -> None:
    head = store.conversations.get(id).head_id
    assert head is not None
    store.messages.path(head)


def append(store: Store, id: str) -> None:
    store.messages.append(id, store.conversations.get(id).head_id, user("one more, with water and 東京"))


def frames(store: Store, id: str, streams: int) -> list[float]:
    lease = store.leases.open()
    replies = [store.replies.start(lease, id, None, SETTINGS) for _ in range(streams)]
    times = []
    for place in range(100):
        pieces = [TokenFrame(reply.id, place, steps(place)) for reply in replies]
        begun = time.perf_counter()
        store.replies.append(lease, pieces)
        times.append((time.perf_counter() - begun) * 1000)
    lease.close()
    store.replies.interrupt_orphans()
    return times


def timed(act: Callable[[], object], times: int) -> list[float]:
    """Milliseconds of each."""
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        act()
        found.append((time.perf_counter() - begun) * 1000)
    return found


def report(what: str, times: list[float], limit: float | None = LIMIT) -> None:
    times = sorted(times)
    median, late = statistics.median(times), times[int(len(times) * 0.95)]
    verdict = "" if limit is None else "ok" if median < limit else f"OVER {limit:g} ms"
    print(f"{what:40} median {median:8.2f} ms   95% {late:8.2f} ms   {verdict}")


def kill(folder: Path, database: str | None, times: int, seed: int) -> None:
    after = random_delays(seed, 0.3)
    acknowledged = missing = 0
    for number in range(1, times + 1):
        told = run_killed_writer(folder, database, after)
        with open_store(folder, database) as store:
            missing += len(find_lost(store, told))
            acknowledged += len(told)
            if store.database.is_sqlite and number % 10 == 0:
                with store.database.read_transaction() as connection:
                    assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
    print(f"killed {times} times: {acknowledged} things acknowledged, {missing} lost, the database is whole")


if __name__ == "__main__":
    main()
