"""Errors as JSON and back: the same type with the same attributes is raised on the other side.

The shape is OpenAI's, whose `type` and `code` are for its clients; `name` is our class, `details` its attributes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from palaver.errors import PalaverError
from palaver.wire.base import Told

_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class Error(Told):
    message: str
    type: str
    param: str | None
    code: str | None
    name: str | None = None
    details: dict[str, Any] | None = None

    def value(self) -> PalaverError | None:
        """The error as it was raised; None where this program knows none of that name."""
        kind = next((kind for kind in _kinds(PalaverError) if name(kind) == self.name), None)
        if kind is None:
            return None
        error = kind.__new__(kind, self.message)
        error.__dict__.update(self.details or {})
        return error


class ErrorBody(Told):
    error: Error


def name(kind: type[BaseException]) -> str:
    """`ContextOverflow` is context_overflow."""
    return _CAPITAL.sub("_", kind.__name__).lower()


def named(error: BaseException) -> dict[str, Any]:
    """What lets the other side raise the same error; nothing for what is no error of ours."""
    if not isinstance(error, PalaverError):
        return {}
    details = {name: value for name, value in vars(error).items() if _is_json(value)}
    return {"name": name(type(error)), "details": details}


def _kinds(kind: type[PalaverError]) -> Iterator[type[PalaverError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True
