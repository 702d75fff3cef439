"""Routing conversations to many replicas: a simulation of what can't run on one machine.

python -m benchmarks.scale                        1,000 replicas, 100,000 conversations an hour, all policies
python -m benchmarks.scale --replicas 100 --conversations 10000 --minutes 20
python -m benchmarks.scale --markdown             the table of docs/scale.md

Simulated are arrivals, heavy-tailed lengths, queues, the prefix cache of each replica, load reports that are old when
they are read, and replicas that die. Not simulated are networks and the slowing of streams by a prefill beside them.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from palaver.engines.cluster.affinity import load_bound, rendezvous_weights

SLOTS = 8
"""Replies that a replica generates at once."""
STEP = 0.04
"""Seconds a token of each of them, as of a large model."""
PREFILL_RATE = 3_000.0
"""Prompt tokens a second, one prompt after the other."""
CACHE_TOKENS = 200_000
"""Tokens whose keys and values a replica keeps."""
REPORT_INTERVAL = 0.5
"""Seconds between two reports of the replicas' load."""
FRONTS = 16
"""Servers that route, each with its own view of the load."""
MEAN_LIFE = 24 * 3600.0
"""Seconds until a replica dies, on average."""
DETECTION, RESTART = 2.0, 90.0
"""Seconds until a death is noticed, and until the replica is back."""
ASSISTANTS = 200
"""System prompts, used as often as Zipf's law says."""
WARM_UP = 0.25
"""The share of the time that is not counted, while the caches fill."""


@dataclass(slots=True)
class SimulatedConversation:
    """A conversation whose text only grows."""

    id: int
    assistant: int
    front: int
    turns: int
    tokens: int = 0
    """The tokens of all messages so far."""


@dataclass(slots=True)
class SimulatedTurn:
    conversation: SimulatedConversation
    prompt: int
    reply: int
    asked_at: float
    first_token_at: float | None = None
    generated: int = 0
    """Tokens of the reply that were generated before its replica died."""
    replica: int = -1
    started_at: float = 0.0


@dataclass(slots=True)
class Replica:
    number: int
    is_alive: bool = True
    life: int = 0
    """Counts its deaths: what was scheduled in an earlier life doesn't happen."""
    running: set[int] = field(default_factory=set)
    queue: deque[int] = field(default_factory=deque)
    prefill_free_at: float = 0.0
    cache: OrderedDict[tuple[str, int], int] = field(default_factory=OrderedDict)
    cached_tokens: int = 0

    @property
    def outstanding(self) -> int:
        return len(self.running) + len(self.queue)

    def cached(self, turn: SimulatedTurn, system_tokens: int) -> int:
        """The tokens of the prompt that are in the cache: of this conversation, or of the system prompt alone."""
        own = self.cache.get(("conversation", turn.conversation.id), 0)
        shared = system_tokens if ("system", turn.conversation.assistant) in self.cache else 0
        return min(max(own, shared), turn.prompt - 1)

    def keep(self, key: tuple[str, int], tokens: int) -> None:
        self.cached_tokens += tokens - self.cache.pop(key, 0)
        self.cache[key] = tokens
        while self.cached_tokens > CACHE_TOKENS:
            self.cached_tokens -= self.cache.popitem(last=False)[1]

    def die(self) -> list[int]:
        """Loses everything; returns the turns that were here."""
        lost = [*self.running, *self.queue]
        self.is_alive, self.life = False, self.life + 1
        self.running.clear()
        self.queue.clear()
        self.cache.clear()
        self.cached_tokens, self.prefill_free_at = 0, 0.0
        return lost


class Router:
    """What the fronts know: the replicas that are alive, and their load as it was reported last plus what they sent."""

    def __init__(self, replicas: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.alive = np.ones(replicas, dtype=bool)
        self.reported = np.zeros(replicas)
        self.sent = np.zeros((FRONTS, replicas))
        self.seeds = np.random.default_rng(seed).integers(1, 2**63, replicas, dtype=np.uint64)
        self.turns = itertools.count()

    def load(self, front: int) -> np.ndarray:
        return self.reported + self.sent[front]

    def weights(self, key: int) -> np.ndarray:
        """Rendezvous hashing: a weight of each replica for this key. The dead have none."""
        mixed = rendezvous_weights(self.seeds, key)
        return np.where(self.alive, mixed, np.uint64(0))


Policy = Callable[[Router, SimulatedConversation], int]


def round_robin(router: Router, _: SimulatedConversation) -> int:
    while True:
        replica = next(router.turns) % len(router.alive)
        if router.alive[replica]:
            return replica


def two_choices(router: Router, conversation: SimulatedConversation) -> int:
    """The less loaded of two at random, as Ray Serve's own router does."""
    load = router.load(conversation.front)
    found: list[int] = []
    while len(found) < 2:
        replica = router.random.randrange(len(router.alive))
        if router.alive[replica]:
            found.append(replica)
    return min(found, key=lambda replica: float(load[replica]))


def least_loaded(router: Router, conversation: SimulatedConversation) -> int:
    return int(np.argmin(np.where(router.alive, router.load(conversation.front), np.inf)))


def prefix_affinity(router: Router, conversation: SimulatedConversation) -> int:
    """By the beginning of the prompt, which is the system prompt: all who share it go to one replica."""
    return int(np.argmax(router.weights(conversation.assistant + 1)))


def conversation_affinity(router: Router, conversation: SimulatedConversation) -> int:
    """By conversation, whatever the load is."""
    return int(np.argmax(router.weights(conversation.id + ASSISTANTS + 1)))


def bounded_affinity(router: Router, conversation: SimulatedConversation) -> int:
    """Ours: by conversation, to the first replica in the conversation's own order that has a free slot, or whose load
    is below the bound if that is more."""
    weights, load = router.weights(conversation.id + ASSISTANTS + 1), router.load(conversation.front)
    bound = load_bound(load[router.alive], SLOTS)
    return int(np.argmax(np.where(load < bound, weights, np.uint64(0))))


POLICIES: dict[str, Policy] = {
    "round robin": round_robin,
    "two choices": two_choices,
    "least loaded": least_loaded,
    "prefix affinity": prefix_affinity,
    "conversation affinity": conversation_affinity,
    "ours: affinity with a load bound": bounded_affinity,
}


@dataclass
class Figures:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_tokens: list[float] = field(default_factory=list)
    busiest: list[float] = field(default_factory=list)
    """The load of the busiest replica over the mean, sampled every report."""
    deaths: int = 0
    failovers: int = 0
    turns: int = 0
    tokens: int = 0

    def row(self, name: str) -> list[str]:
        hits = 100 * self.cached_tokens / max(1, self.prompt_tokens)
        first = [np.percentile(self.first_tokens, share) for share in (50, 99, 99.9)]
        busiest = np.mean(self.busiest)
        return [name, f"{hits:.1f}%", f"{busiest:.1f}", *(f"{seconds:.2f} s" for seconds in first), str(self.failovers)]


HEADINGS = ("policy", "prompt tokens from the cache", "busiest / mean", "first token 50%", "99%", "99.9%", "failovers")


class Simulation:
    """Events in the order of time. Each policy sees the same conversations and the same deaths."""

    def __init__(self, policy: Policy, replicas: int, conversations: float, seconds: float, seed: int) -> None:
        self._policy, self._seconds = policy, seconds
        self._rate = conversations / 3600
        self._people = random.Random(seed)
        self._deaths = random.Random(seed + 1)
        self._router = Router(replicas, seed + 2)
        self._replicas = [Replica(number) for number in range(replicas)]
        self._turns: dict[int, SimulatedTurn] = {}
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._system = [int(self._people.uniform(400, 4_000)) for _ in range(ASSISTANTS)]
        self._popularity = list(itertools.accumulate(1 / (rank + 1) ** 1.1 for rank in range(ASSISTANTS)))
        self.now = 0.0
        self.figures = Figures()

    def run(self) -> Figures:
        self._at(0.0, self._arrive)
        self._at(0.0, self._report)
        for replica in self._replicas:
            self._schedule_death(replica)
        while self._events and (event := heapq.heappop(self._events))[0] < self._seconds:
            self.now = event[0]
            event[2]()
        return self.figures

    @property
    def _counts(self) -> bool:
        return self.now >= WARM_UP * self._seconds

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), action))

    def _arrive(self) -> None:
        self._at(self.now + self._people.expovariate(self._rate), self._arrive)
        (assistant,) = self._people.choices(range(ASSISTANTS), cum_weights=self._popularity)
        turns = min(200, int(2 * self._people.paretovariate(1.5)))
        front = self._people.randrange(FRONTS)
        self._ask(SimulatedConversation(next(self._numbers), assistant, front, turns, self._system[assistant]))

    def _ask(self, conversation: SimulatedConversation) -> None:
        chance = self._people
        asked = (
            _lognormal(chance, 6_000, 0.8, 30_000) if chance.random() < 0.03 else _lognormal(chance, 60, 1.3, 16_000)
        )
        turn = SimulatedTurn(conversation, conversation.tokens + asked, _lognormal(chance, 350, 1.0, 8_000), self.now)
        self._route(next(self._numbers), turn)

    def _route(self, number: int, turn: SimulatedTurn) -> None:
        replica = self._replicas[self._policy(self._router, turn.conversation)]
        self._router.sent[turn.conversation.front, replica.number] += 1
        self._turns[number], turn.replica = turn, replica.number
        if not replica.is_alive:  # it died, and the fronts don't know it yet
            self._at(self.now + DETECTION, lambda: self._route(number, turn))
        elif len(replica.running) < SLOTS:
            self._start(number, turn, replica)
        else:
            replica.queue.append(number)

    def _start(self, number: int, turn: SimulatedTurn, replica: Replica) -> None:
        replica.running.add(number)
        system = self._system[turn.conversation.assistant]
        known, prompt = replica.cached(turn, system), turn.prompt + turn.generated
        if self._counts:
            self.figures.prompt_tokens += prompt
            self.figures.cached_tokens += known
        replica.prefill_free_at = max(self.now, replica.prefill_free_at) + (prompt - known) / PREFILL_RATE
        turn.started_at = replica.prefill_free_at + STEP
        if turn.first_token_at is None:
            turn.first_token_at = turn.started_at
        replica.keep(("system", turn.conversation.assistant), system)
        replica.keep(("conversation", turn.conversation.id), prompt)
        life, end = replica.life, turn.started_at + (turn.reply - turn.generated) * STEP
        self._at(end, lambda: self._end(number, turn, replica, life))

    def _end(self, number: int, turn: SimulatedTurn, replica: Replica, life: int) -> None:
        if replica.life != life:
            return
        conversation = turn.conversation
        replica.running.discard(number)
        del self._turns[number]
        conversation.tokens = turn.prompt + turn.reply
        conversation.turns -= 1
        replica.keep(("conversation", conversation.id), conversation.tokens)
        if self._counts:
            self.figures.turns += 1
            self.figures.tokens += turn.reply
            self.figures.first_tokens.append((turn.first_token_at or self.now) - turn.asked_at)
        if replica.queue:
            waiting = replica.queue.popleft()
            self._start(waiting, self._turns[waiting], replica)
        if conversation.turns > 0:
            pause = _lognormal(self._people, 25, 1.2, 3_600)
            self._at(self.now + pause, lambda: self._ask(conversation))

    def _report(self) -> None:
        self._at(self.now + REPORT_INTERVAL, self._report)
        loads = np.fromiter((replica.outstanding for replica in self._replicas), float, len(self._replicas))
        self._router.reported, self._router.sent[:] = loads, 0
        if self._counts and loads.mean() > 0:
            self.figures.busiest.append(float(loads.max() / loads.mean()))

    def _schedule_death(self, replica: Replica) -> None:
        self._at(self.now + self._deaths.expovariate(1 / MEAN_LIFE), lambda: self._die(replica))

    def _die(self, replica: Replica) -> None:
        lost = replica.die()
        self.figures.deaths += self._counts
        self.figures.failovers += len(lost) * self._counts
        self._at(self.now + DETECTION, lambda: self._notice(replica, lost))
        self._at(self.now + RESTART, lambda: self._revive(replica))
        for number in lost:
            turn = self._turns[number]
            done = int((self.now - turn.started_at) / STEP) if turn.started_at else 0
            turn.generated = max(turn.generated, min(turn.reply - 1, turn.generated + max(0, done)))

    def _notice(self, replica: Replica, lost: Sequence[int]) -> None:
        self._router.alive[replica.number] = replica.is_alive
        for number in lost:
            self._route(number, self._turns[number])

    def _revive(self, replica: Replica) -> None:
        replica.is_alive = True
        self._router.alive[replica.number] = True
        self._schedule_death(replica)


def _lognormal(chance: random.Random, median: float, sigma: float, most: int) -> int:
    return max(1, min(most, int(chance.lognormvariate(math.log(median), sigma))))


def simulate(options: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    for name, policy in POLICIES.items():
        yield (
            name,
            Simulation(policy, options.replicas, options.conversations, options.minutes * 60, options.seed).run(),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1_000)
    parser.add_argument("--conversations", type=float, default=100_000, help="that begin in an hour")
    parser.add_argument("--minutes", type=float, default=40, help="simulated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", action="store_true", help="print a table for the documents")
    options = parser.parse_args()
    if options.markdown:
        print(f"| {' | '.join(HEADINGS)} |\n|{' --- |' * len(HEADINGS)}")
    for name, figures in simulate(options):
        row = figures.row(name)
        if options.markdown:
            print(f"| {' | '.join(row)} |", flush=True)
        else:
            print(", ".join(f"{heading} {value}" for heading, value in zip(HEADINGS, row, strict=True)), flush=True)
    counted = options.minutes * 60 * (1 - WARM_UP)
    print(
        f"\n{figures.turns / counted:.0f} turns and {figures.tokens / counted:.0f} tokens of replies a second, "
        f"{figures.deaths} deaths, in the {counted / 60:.0f} minutes that count"
    )


if __name__ == "__main__":
    begun = time.perf_counter()
    main()
    print(f"simulated in {time.perf_counter() - begun:.0f} s")
