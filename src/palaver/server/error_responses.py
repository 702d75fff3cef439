"""Errors as HTTP responses, in the format of the API that was called: OpenAI's or Anthropic's."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import Scope

from palaver.errors import BadParameter, PalaverError
from palaver.server.anthropic.errors import OVERLOADED, anthropic_error, anthropic_status, is_anthropic
from palaver.server.errors import (
    ClientDisconnected,
    NoRoute,
    NotJson,
    WrongMethod,
    error_headers,
    error_status,
    error_value,
    log_unexpected,
)


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
    first: dict[str, Any] = next(iter(error.errors()), {})
    parts = (str(part) for part in first.get("loc", ())[1:])
    path = ".".join(part for part in parts if not part.startswith("list["))  # one of several types of a field
    if first.get("type") == "json_invalid":
        return await _error(request, NotJson(f"The body is not JSON: {first.get('ctx', {}).get('error', '')}"))
    if isinstance(first.get("input"), bytes):
        return await _error(request, NotJson("The body must be sent as Content-Type: application/json."))
    return await _error(request, BadParameter(path or "body", _shortened(first.get("input")), first.get("msg", "")))


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
