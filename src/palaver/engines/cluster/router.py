"""Ray Serve's request router of engine deployments. It runs wherever there is a handle: in the process of each front.

Ray pickles this module by value; what it imports is imported there."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from palaver.engines.cluster.affinity import replica_order

DEFAULT_SLOTS = 8


class AffinityRouter(RequestRouter):
    """Sends a request to the replica that has its prefix, as `affinity` says. The load of a replica is what it reported
    last (`EngineReplica.record_routing_stats`) plus what was sent from here since."""

    def initialize_state(self, slots: int = DEFAULT_SLOTS, **_: Any) -> None:
        self._slots = slots
        self._reports: dict[ReplicaID, int] = {}
        self._sent: dict[ReplicaID, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Requests have `key`, which orders the replicas. Those with `place` go to the replica at that place, whatever
        its load is: one request for each place reaches all of them."""
        if not candidate_replicas or pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        options = pending_request.kwargs
        loads = [self._load(replica) for replica in candidate_replicas]
        place = options.get("place")
        if place is not None:
            loads = [0.0] * len(loads)
        names = [replica.replica_id.unique_id for replica in candidate_replicas]
        order = replica_order(names, options.get("key", 0), loads, self._slots)
        if place is not None:
            order = [order[place % len(order)]]
        return [[candidate_replicas[one]] for one in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if pending_request.metadata.is_streaming:
            self._sent[replica_id] = self._sent.get(replica_id, 0) + 1

    def _load(self, replica: RunningReplica) -> float:
        report = replica.routing_stats or {}
        number, name = report.get("report", 0), replica.replica_id
        if self._reports.get(name) != number:
            self._reports[name], self._sent[name] = number, 0
        load: float = report.get("load", 0.0) + self._sent.get(name, 0)
        return load
