"""Ray Serve's request router of engine deployments. It runs in each process that has a handle: in each front.

Ray pickles this module by value; what it imports is imported there."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from palaver.engines.cluster.affinity import LoadTracker, replica_order

DEFAULT_SLOTS = 8


class AffinityRouter(RequestRouter):
    """Sends a request to the replica that has its prefix, as `affinity` says. Replicas report their load
    (`EngineReplica.record_routing_stats`)."""

    queue_len_response_deadline_s = 1.0
    max_queue_len_response_deadline_s = 5.0
    """How long the chosen replica may take to say whether it has room: another one has to compute the prompt again."""

    def initialize_state(self, slots: int = DEFAULT_SLOTS, **_: Any) -> None:
        self._slots = slots
        self._loads = LoadTracker()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Requests have `key`, which orders the replicas. Those with `place` go to the replica at that place, whatever
        its load is: one request for each place reaches all of them."""
        if not candidate_replicas or pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        options = pending_request.kwargs
        names = [replica.replica_id.unique_id for replica in candidate_replicas]
        for name, replica in zip(names, candidate_replicas, strict=True):
            report = replica.routing_stats or {}
            self._loads.report(name, report.get("report", 0), report.get("load", 0.0))
        self._loads.keep(names)
        place = options.get("place")
        loads = [0.0 if place is not None else self._loads.load(name) for name in names]
        order = replica_order(names, options.get("key", 0), loads, self._slots)
        if place is not None:
            order = [order[place % len(order)]]
        return [[candidate_replicas[one]] for one in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if pending_request.metadata.is_streaming:
            self._loads.start(pending_request.metadata.internal_request_id, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._loads.end(internal_request_id)
