"""Ray Serve's autoscaling policy of engine deployments: by the queue, and by the pressure on the caches.

Ray pickles this module by value; what it imports is imported in Ray's controller."""

from __future__ import annotations

import math
from typing import Any

CACHE_TARGET = 0.7
"""The share of its cache that running requests of a replica may hold before more replicas are wanted."""


def desired_replicas(requests: float, per_replica: float, running: int, pressures: list[float]) -> int:
    """Replicas for so many requests, and for caches that are no fuller than the target."""
    by_queue = math.ceil(requests / per_replica)
    by_cache = math.ceil(sum(pressures) / CACHE_TARGET) if pressures and max(pressures) > CACHE_TARGET else 0
    return max(by_queue, min(by_cache, 2 * running))


def scale(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray applies the delays and the bounds of the configuration."""
    pressures = (context.aggregated_metrics or {}).get("cache_pressure", {})
    wanted = desired_replicas(
        context.total_num_requests,
        context.config.get_target_ongoing_requests(),
        context.current_num_replicas,
        list(pressures.values()),
    )
    return max(context.capacity_adjusted_min_replicas, min(wanted, context.capacity_adjusted_max_replicas)), {}
