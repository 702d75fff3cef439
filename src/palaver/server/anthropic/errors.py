"""Error bodies and statuses of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palaver.errors import ContextOverflow, PalaverError, QueueFull
from palaver.server.errors import INTERNAL, error_status
from palaver.wire import error_fields

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
    """Whether the client expects errors of this API: by the path, or by the version header that its clients send."""
    return path == "/v1/messages" or path.startswith("/v1/messages/") or b"anthropic-version" in headers


def anthropic_status(error: BaseException) -> int:
    """The HTTP status. A temporary refusal (full queue, no model yet) is 529, which clients retry."""
    status = error_status(error).status
    return OVERLOADED if status == 503 or isinstance(error, QueueFull) else status


def anthropic_error(error: BaseException, request_id: str) -> dict[str, Any]:
    status = anthropic_status(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error_info = error_fields(error)
    details = {"error_code": error_info["name"], **error_info["details"]} if error_info else {}
    inner = {"type": kind, "message": _message(error), **({"details": details} if details else {})}
    return {"type": "error", "error": inner, "request_id": request_id}


def _message(error: BaseException) -> str:
    if isinstance(error, ContextOverflow):  # clients recognise this sentence and shorten the conversation
        return f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
    return str(error) if isinstance(error, PalaverError) else INTERNAL
