"""Errors as HTTP: one table from types to statuses, and one shape, which is OpenAI's."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

from palaver import errors
from palaver.errors import PalaverError, RequestError, ShuttingDown
from palaver.store import errors as store
from palaver.wire.errors import named

_log = logging.getLogger("palaver.server")
INTERNAL = "Something went wrong inside of the server: its log has the details."


class NoKey(RequestError):
    def __init__(self, given: bool) -> None:
        super().__init__(
            "The key is not known, or was revoked."
            if given
            else "A key is needed: send it as `Authorization: Bearer KEY`."
        )


class NotAllowed(RequestError):
    """Whoever asks may not do this."""


class ForeignCaller(NotAllowed):
    """A Host or an Origin that is none of ours: a page elsewhere that reaches for this server."""


class DuplicateHeader(RequestError):
    """A header that may come once: which of two would count is anybody's guess, a proxy's too."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The header {name!r} was sent more than once.")


class TooLarge(RequestError):
    def __init__(self, limit: int) -> None:
        super().__init__(f"The body is larger than {limit} bytes.")


class TooSlow(RequestError):
    def __init__(self, seconds: float) -> None:
        super().__init__(f"The body did not arrive within {seconds:g} s.")


class TooMany(RequestError):
    """More requests than are taken; `seconds` is when to try again."""

    def __init__(self, why: str, seconds: int = 1) -> None:
        super().__init__(why)
        self.seconds = seconds


class NotJson(RequestError):
    """A body that can't be read."""


class NoRoute(RequestError):
    """A path or a method that is not there."""


class WrongMethod(RequestError):
    """A path that takes another method."""


class NotSupported(RequestError):
    """What this server does not do."""


class OtherModel(RequestError):
    """A request for a model that is not the one in use."""


class NoPreviousResponse(errors.BadParameter):
    def __init__(self, id: str) -> None:
        super().__init__("previous_response_id", id[:200], "there is no such response")


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """How an error is told: its status, and OpenAI's words for its kind."""

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
_LATER = (429, 503)


def error_status(error: BaseException) -> ErrorStatus:
    """By the nearest of its types."""
    return next((_TABLE[kind] for kind in type(error).__mro__ if kind in _TABLE), _UNKNOWN)


def error_value(error: BaseException) -> dict[str, Any]:
    """In OpenAI's shape. What is no error of ours is said in the log alone."""
    how = error_status(error)
    message = str(error) if isinstance(error, PalaverError) else INTERNAL
    param = error.name if isinstance(error, errors.BadParameter) else None
    return {"error": {"message": message, "type": how.type, "param": param, "code": how.code, **named(error)}}


def error_body(error: BaseException) -> bytes:
    return json.dumps(error_value(error)).encode()


def error_headers(error: BaseException) -> dict[str, str]:
    how = error_status(error)
    if how.status == 401:
        return {"www-authenticate": "Bearer"}
    return {"retry-after": str(getattr(error, "seconds", 1))} if how.status in _LATER else {}


def log_unexpected(error: BaseException) -> None:
    """Logs an unexpected error with its traceback, and of a failing database what clients are not shown."""
    if not isinstance(error, PalaverError):
        _log.error("a request failed", exc_info=error)
    elif isinstance(error, store.Unreachable):
        _log.error("the database can't be reached: %s", error.__cause__ or error)
