"""An error as the answer to a request, in the shape that whoever asked reads."""

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
from palaver.server.anthropic.errors import OVERLOADED, anthropic_error, is_anthropic, status_of
from palaver.server.errors import (
    NoRoute,
    NotJson,
    WrongMethod,
    error_headers,
    error_status,
    error_value,
    log_unexpected,
)
from palaver.server.request_body import ClientDisconnected


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    status: int
    value: dict[str, Any]
    headers: dict[str, str]


def error_response(error: BaseException, scope: Scope) -> ErrorResponse:
    headers = error_headers(error)
    if not speaks_anthropic(scope):
        return ErrorResponse(error_status(error).status, error_value(error), headers)
    status = status_of(error)
    if status == OVERLOADED:
        headers = {"retry-after": "1", **headers}
    return ErrorResponse(status, anthropic_error(error, scope["state"]["request_id"]), headers)


def speaks_anthropic(scope: Scope) -> bool:
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return is_anthropic(path, dict(scope["headers"]))


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ClientDisconnected, _left)
    app.add_exception_handler(PalaverError, _answer)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _answer)


async def _left(request: Request, error: Exception) -> Response:
    """Nobody reads it: the status is for the log."""
    return Response(status_code=499)


async def _answer(request: Request, error: Exception) -> JSONResponse:
    log_unexpected(error)
    answer = error_response(error, request.scope)
    return JSONResponse(answer.value, answer.status, answer.headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first: dict[str, Any] = next(iter(error.errors()), {})
    places = (str(part) for part in first.get("loc", ())[1:])
    where = ".".join(place for place in places if not place.startswith("list["))  # one of several forms of a field
    if first.get("type") == "json_invalid":
        return await _answer(request, NotJson(f"The body is not JSON: {first.get('ctx', {}).get('error', '')}"))
    if isinstance(first.get("input"), bytes):
        return await _answer(request, NotJson("The body must be sent as Content-Type: application/json."))
    return await _answer(request, BadParameter(where or "body", _shown(first.get("input")), first.get("msg", "")))


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    match error.status_code:
        case 404:
            found: PalaverError = NoRoute(f"There is nothing at {request.method} {request.url.path}.")
        case 405:
            found = WrongMethod(f"{request.url.path} does not take {request.method}.")
        case _:
            found = NotJson(str(error.detail))
    answer = await _answer(request, found)
    answer.headers.update(error.headers or {})
    return answer


def _shown(value: Any) -> Any:
    """The value, or the beginning of it where it is long; a large one is never written out as a whole."""
    if isinstance(value, str):
        return value if len(value) <= 80 else value[:77] + "..."
    text = reprlib.repr(value) if isinstance(value, list | dict) else repr(value)
    return value if len(text) <= 80 and "..." not in text else text[:77].rstrip(".") + "..."
