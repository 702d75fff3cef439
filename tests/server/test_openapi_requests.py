"""Requests made from the OpenAPI document: whatever is sent, nothing is an error of the server."""

from __future__ import annotations

import os
import re
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.server.live_server import LiveServer

EXAMPLES = int(os.environ.get("PALAVER_EXAMPLES", "10"))
LEFT_OUT = re.compile(r"/(events|changes|stream|load|unload)")
"""Streams without an end, and what would take the model away."""
SPEAKING = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


def test_nothing_is_an_error_of_the_server(live: LiveServer) -> None:
    document = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    tried = []
    operations: list[Any] = list(document.get_all_operations())
    for found in operations:
        operation = found.ok()
        if not LEFT_OUT.search(operation.path):
            tried.append(operation.path)
            _try(operation)
    assert len(tried) > 20
    assert set(SPEAKING) <= set(tried)


def _try(operation: Any) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def one(case: Any) -> None:
        if isinstance(case.body, dict) and operation.path in SPEAKING:
            most = "max_output_tokens" if operation.path == "/v1/responses" else "max_tokens"
            case.body[most] = 4  # what is tried is the request, not the model
        answer = case.call(timeout=60)
        assert answer.status_code < 500, (operation.path, answer.text)
        assert answer.status_code != 422

    one()
