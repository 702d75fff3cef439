"""An error as the answer to a request, in the shape that whoever asked reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from palaver.server.anthropic.refusals import OVERLOADED, is_theirs, refusal, status_of
from palaver.server.errors import error_headers, error_value, told


@dataclass(frozen=True, slots=True)
class Refused:
    status: int
    value: dict[str, Any]
    headers: dict[str, str]


def refused(error: BaseException, scope: Scope) -> Refused:
    headers = error_headers(error)
    if not speaks_anthropic(scope):
        return Refused(told(error).status, error_value(error), headers)
    status = status_of(error)
    if status == OVERLOADED:
        headers = {"retry-after": "1", **headers}
    return Refused(status, refusal(error, scope["state"]["request_id"]), headers)


def speaks_anthropic(scope: Scope) -> bool:
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return is_theirs(path, dict(scope["headers"]))
