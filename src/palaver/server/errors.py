"""The errors of the server, and the table from error types to HTTP statuses, in OpenAI's format."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

from palaver import errors
from palaver.errors import PalaverError, RequestError, ShuttingDown
from palaver.store import errors as store
from palaver.wire import error_fields

_log = logging.getLogger("palaver.server")
INTERNAL = "Something went wrong inside of the server: its log has the details."


class ClientDisconnected(Exception):
    """The client disconnected before its request was complete or its answer began."""


class NoKey(RequestError):
    def __init__(self, given: bool) -> None:
        super().__init__(
            "The key is not known, or was revoked."
            if given
            else "A key is needed: send it as `Authorization: Bearer KEY`."
        )


class NotAllowed(RequestError):
    """The caller has no permission for this."""


class ForeignCaller(NotAllowed):
    """A Host or Origin header that is not allowed: a page of another site calls this server."""


class DuplicateHeader(RequestError):
    """A header that may come once: a proxy might use the other one of two."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The header {name!r} was sent more than once.")


class TooLarge(RequestError):
    def __init__(self, limit: int) -> None:
        super().__init__(f"The body is larger than {limit} bytes.")


class TooSlow(RequestError):
    def __init__(self, seconds: float) -> None:
        super().__init__(f"The body did not arrive within {seconds:g} s.")


class TooMany(RequestError):
    """Too many requests. `seconds` is when to try again."""

    def __init__(self, message: str, seconds: int = 1) -> None:
        super().__init__(message)
        self.seconds = seconds


class NotJson(RequestError):
    """A body that is not valid JSON."""


class NoRoute(RequestError):
    """An unknown path."""


class WrongMethod(RequestError):
    """A known path with another method."""


class NotSupported(RequestError):
    """An endpoint that this server does not have."""


class OtherModel(RequestError):
    """A request for a model that is not loaded."""


class NoPreviousResponse(errors.BadParameter):
    def __init__(self, id: str) -> None:
        super().__init__("previous_response_id", id[:200], "there is no such response")


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """The HTTP status of an error, and its type and code in OpenAI's format."""

    status: int
    type: str = "invalid_request_error"
    code: str | None = None


_SERVER = "server_error"
_TABLE: dict[type[BaseException], ErrorStatus] = {
    RequestError: ErrorStatus(400),
    NoKey: ErrorStatus(401, "authentication_error", "invalid_api_key"),
    NotAllowed: ErrorStatus(403, "permission_error"),
    ForeignCaller: ErrorStatus(403, "permission_error", "foreign_caller"),
    NoRoute: ErrorStatus(404, code="unknown_url"),
    WrongMethod: ErrorStatus(405),
    OtherModel: ErrorStatus(404, code="model_not_found"),
    store.NotFound: ErrorStatus(404, code="not_found"),
    TooSlow: ErrorStatus(408),
    store.Conflict: ErrorStatus(409, code="conflict"),
    store.NotEmpty: ErrorStatus(409, code="conflict"),
    TooLarge: ErrorStatus(413),
    TooMany: ErrorStatus(429, "rate_limit_error", "rate_limit_exceeded"),
    errors.QueueFull: ErrorStatus(429, "rate_limit_error", "queue_full"),
    errors.CacheFull: ErrorStatus(400, code="context_length_exceeded"),
    NotSupported: ErrorStatus(400, code="not_supported"),
    NoPreviousResponse: ErrorStatus(400, code="previous_response_not_found"),
    errors.ModelError: ErrorStatus(400, code="model_error"),
    errors.ContextOverflow: ErrorStatus(400, code="context_length_exceeded"),
    errors.UnknownModel: ErrorStatus(400, code="model_not_found"),
    errors.NoModel: ErrorStatus(503, _SERVER, "no_model"),
    errors.ModelLoading: ErrorStatus(503, _SERVER, "model_loading"),
    ShuttingDown: ErrorStatus(503, _SERVER, "shutting_down"),
    errors.EngineClosed: ErrorStatus(503, _SERVER, "engine_closed"),
    errors.EngineError: ErrorStatus(503, _SERVER, "engine_failed"),
    store.Locked: ErrorStatus(503, _SERVER, "storage_busy"),
    store.Unreachable: ErrorStatus(503, _SERVER, "storage_unreachable"),
    store.DiskFull: ErrorStatus(507, _SERVER, "storage_full"),
    store.StoreError: ErrorStatus(500, _SERVER, "storage_failed"),
}
_UNKNOWN = ErrorStatus(500, _SERVER)
_RETRY_STATUSES = (429, 503)


def error_status(error: BaseException) -> ErrorStatus:
    """The status of the nearest base class in the table."""
    return next((_TABLE[kind] for kind in type(error).__mro__ if kind in _TABLE), _UNKNOWN)


def error_value(error: BaseException) -> dict[str, Any]:
    """The error in OpenAI's format. The message of an unexpected error is in the log alone."""
    entry = error_status(error)
    message = str(error) if isinstance(error, PalaverError) else INTERNAL
    param = error.name if isinstance(error, errors.BadParameter) else None
    return {
        "error": {"message": message, "type": entry.type, "param": param, "code": entry.code, **error_fields(error)}
    }


def error_body(error: BaseException) -> bytes:
    return json.dumps(error_value(error)).encode()


def error_headers(error: BaseException) -> dict[str, str]:
    status = error_status(error).status
    if status == 401:
        return {"www-authenticate": "Bearer"}
    return {"retry-after": str(getattr(error, "seconds", 1))} if status in _RETRY_STATUSES else {}


def log_unexpected(error: BaseException) -> None:
    """Logs an unexpected error with its traceback, and the cause of a database failure, which clients do not see."""
    if not isinstance(error, PalaverError):
        _log.error("a request failed", exc_info=error)
    elif isinstance(error, store.Unreachable):
        _log.error("the database can't be reached: %s", error.__cause__ or error)
