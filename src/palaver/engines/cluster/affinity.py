"""The routing policy: each conversation has its own order of replicas (rendezvous hashing), and goes to the first one
whose load is below a bound. A replica that dies moves only its own conversations.

`benchmarks/scale.py` simulates the same functions with 1,000 replicas."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from palaver.generation import Prompt

LOAD_BOUND = 1.25
"""A replica takes new turns up to so many times the mean load."""
PREFIX_TOKENS = 64
"""Tokens of a prompt without a conversation that decide where it goes."""


def hash_key(text: str) -> int:
    """64 bits, the same in every process."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def routing_key(prompt: Prompt) -> int:
    """Equal for the turns of a conversation. Without one, for prompts of the same owner that begin alike."""
    if prompt.conversation:
        return hash_key(prompt.conversation)
    return hash_key(f"{prompt.owner} {prompt.context_ids[:PREFIX_TOKENS]}")


def rendezvous_weights(seeds: np.ndarray, key: int) -> np.ndarray:
    """A weight of each replica for this key, from the replicas' own seeds (uint64). The highest one comes first."""
    mixed = (seeds ^ np.uint64(key * 0x9E3779B97F4A7C15 % 2**64)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(29)
    return mixed


def load_bound(loads: np.ndarray, slots: float) -> float:
    """The load from which on a replica takes no new turns: while it has a free slot it does."""
    return max(LOAD_BOUND * float(loads.mean()), slots)


class LoadTracker:
    """The load of replicas: as they reported it, with what was sent from here and has ended here since."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[int, float]] = {}
        self._since: dict[str, int] = {}
        self._open: dict[str, str] = {}
        """The replicas of the requests that run, by the id of the request."""

    def report(self, replica: str, number: int, load: float) -> None:
        """Reports are numbered. One that is known already changes nothing."""
        if self._reports.get(replica, (0, 0.0))[0] != number:
            self._reports[replica], self._since[replica] = (number, load), 0

    def start(self, request: str, replica: str) -> None:
        self._open[request] = replica
        self._since[replica] = self._since.get(replica, 0) + 1

    def end(self, request: str) -> None:
        replica = self._open.pop(request, None)
        if replica is not None:
            self._since[replica] = self._since.get(replica, 0) - 1

    def load(self, replica: str) -> float:
        running = sum(one == replica for one in self._open.values())
        return max(self._reports.get(replica, (0, 0.0))[1] + self._since.get(replica, 0), float(running))

    def keep(self, replicas: Iterable[str]) -> None:
        """Forgets all other replicas."""
        alive = set(replicas)
        for known in (self._reports, self._since):
            for replica in known.keys() - alive:
                del known[replica]


def replica_order(names: list[str], key: int, loads: list[float], slots: float) -> list[int]:
    """The replicas in the order in which a request tries them: those below the bound as the key orders them, then the
    others, the least loaded first."""
    weights = rendezvous_weights(np.array([hash_key(name) for name in names], dtype=np.uint64), key)
    bound = load_bound(np.array(loads), slots)
    return sorted(
        range(len(names)),
        key=lambda place: (False, -int(weights[place])) if loads[place] < bound else (True, loads[place]),
    )
