"""The errors of the server, their HTTP statuses in one table, and errors as responses.

Responses have OpenAI's format, or Anthropic's for its clients.
"""

from __future__ import annotations

import json
import logging
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import Scope

from palaver import errors
from palaver.errors import BadParameter, ContextOverflow, PalaverError, QueueFull, RequestError, ShuttingDown
from palaver.store import errors as store
from palaver.tools.servers import ToolServerFailed
from palaver.wire import ErrorBody, error_fields

_log = logging.getLogger("palaver.server")
MAX_FIELD_ERRORS = 100
"""How many errors of one body are looked at."""
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
    """A request for a voice or a transcriber that is not loaded."""


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
    errors.ModelNotOffered: ErrorStatus(404, code="model_not_found"),
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
    ToolServerFailed: ErrorStatus(502, _SERVER, "tool_server_failed"),
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
    param = error.name if isinstance(error, errors.BadParameter) else None
    return {
        "error": {
            "message": _message(error),
            "type": entry.type,
            "param": param,
            "code": entry.code,
            **error_fields(error),
        }
    }


def _message(error: BaseException) -> str:
    return str(error) if isinstance(error, PalaverError) else INTERNAL


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


OVERLOADED = 529
_ANTHROPIC_TYPES = {
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
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error_info = error_fields(error)
    details = {"error_code": error_info["name"], **error_info["details"]} if error_info else {}
    inner = {"type": kind, "message": _anthropic_message(error), **({"details": details} if details else {})}
    return {"type": "error", "error": inner, "request_id": request_id}


def _anthropic_message(error: BaseException) -> str:
    if isinstance(error, ContextOverflow):  # clients recognise this sentence and shorten the conversation
        return f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
    return _message(error)


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    status: int
    value: dict[str, Any]
    headers: dict[str, str]


def error_response(error: BaseException, scope: Scope) -> ErrorResponse:
    headers = error_headers(error)
    if not speaks_anthropic(scope):
        return ErrorResponse(error_status(error).status, error_value(error), headers)
    status = anthropic_status(error)
    if status == OVERLOADED:
        headers = {"retry-after": "1", **headers}
    return ErrorResponse(status, anthropic_error(error, scope["state"]["request_id"]), headers)


def speaks_anthropic(scope: Scope) -> bool:
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return is_anthropic(path, dict(scope["headers"]))


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ClientDisconnected, _client_disconnected)
    app.add_exception_handler(PalaverError, _error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _error)


async def _client_disconnected(request: Request, error: Exception) -> Response:
    """The client does not read it: the status is for the log."""
    return Response(status_code=499)


async def _error(request: Request, error: Exception) -> JSONResponse:
    log_unexpected(error)
    response = error_response(error, request.scope)
    return JSONResponse(response.value, response.status, response.headers)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = error.errors()[:MAX_FIELD_ERRORS]
    first: dict[str, Any] = found[0] if found else {}
    if first.get("type") == "json_invalid":
        return await _error(request, NotJson(f"The body is not JSON: {first.get('ctx', {}).get('error', '')}"))
    if len(first.get("loc", ())) < 2 and first.get("type") == "missing":
        return await _error(request, NotJson("The request has no body."))
    if isinstance(first.get("input"), bytes):
        return await _error(request, NotJson("The body must be sent as Content-Type: application/json."))
    return await _error(request, _bad_field(found, error.body))


def _bad_field(found: Sequence[Mapping[str, Any]], body: Any) -> BadParameter:
    """The first field that is wrong. If it may have several types, each of them has errors: the innermost one is of the
    type that the value comes closest to."""
    paths = [_field_path(error, body) for error in found]
    inside = [index for index, path in enumerate(paths) if path[: len(paths[0])] == paths[0]]
    at = max(inside, key=lambda index: len(paths[index]))
    error = found[at]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in paths[at]).removeprefix(".")
    if error["type"] == "missing":
        return BadParameter(name, None, "is needed here")
    return BadParameter(name or "body", _shortened(error["input"]), error["msg"])


def _field_path(error: Mapping[str, Any], body: Any) -> list[str | int]:
    """The names and indexes of the request that lead to the error, without the names of our types among them."""
    source, *parts = error["loc"]
    if source != "body":
        return [*parts]
    path: list[str | int] = []
    value = body
    for place, part in enumerate(parts):
        is_index = isinstance(part, int) and isinstance(value, list) and part < len(value)
        if is_index or (isinstance(value, Mapping) and part in value):  # a form is no dict
            value = value[part]
        elif error["type"] != "missing" or place < len(parts) - 1:
            continue
        path.append(part)
    return path


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    match error.status_code:
        case 404:
            http_error: PalaverError = NoRoute(f"There is nothing at {request.method} {request.url.path}.")
        case 405:
            http_error = WrongMethod(f"{request.url.path} does not take {request.method}.")
        case _:
            http_error = NotJson(str(error.detail))
    response = await _error(request, http_error)
    response.headers.update(error.headers or {})
    return response


def _shortened(value: Any) -> Any:
    """The value, or its beginning if it is long. `repr` is never made of a large value."""
    if isinstance(value, str):
        return value if len(value) <= 80 else value[:77] + "..."
    text = reprlib.repr(value) if isinstance(value, list | dict) else repr(value)
    return value if len(text) <= 80 and "..." not in text else text[:77].rstrip(".") + "..."


_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": why}
    for status, why in (
        (400, "what was asked can't be done as it was asked"),
        (401, "a key is needed"),
        (403, "not allowed"),
        (404, "not there, or not yours"),
        (409, "something else happened first"),
        (413, "too large"),
        (429, "too much at once"),
        (500, "the server failed"),
        (503, "not now"),
        (507, "no room left"),
    )
}


def api_router(tag: str) -> APIRouter:
    """A router of Palaver's own API, whose document has the errors of all of its routes."""
    return APIRouter(prefix="/api", tags=[tag], responses=_RESPONSES)
