"""Errors in Anthropic's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palaver.errors import ContextOverflow, PalaverError, QueueFull
from palaver.server.errors import INTERNAL, error_status
from palaver.wire.errors import named

OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}


def is_anthropic(path: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether whoever asks reads errors in this shape: by the path, or by the version that all their clients send."""
    return path == "/v1/messages" or path.startswith("/v1/messages/") or b"anthropic-version" in headers


def status_of(error: BaseException) -> int:
    """What is over in a moment is an overload to them."""
    status = error_status(error).status
    return OVERLOADED if status == 503 or isinstance(error, QueueFull) else status


def anthropic_error(error: BaseException, request_id: str) -> dict[str, Any]:
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    about = named(error)
    details = {"error_code": about["name"], **about["details"]} if about else {}
    inner = {"type": kind, "message": _message(error), **({"details": details} if details else {})}
    return {"type": "error", "error": inner, "request_id": request_id}


def _message(error: BaseException) -> str:
    if isinstance(error, ContextOverflow):  # in the words by which their clients know that they must shorten
        return f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
    return str(error) if isinstance(error, PalaverError) else INTERNAL
