"""Errors as JSON: the client raises the same type with the same attributes as the server.

The shape is OpenAI's. `type` and `code` are for its clients; `name` is the error's type, `details` its attributes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from palaver.errors import PalaverError
from palaver.wire.values import ValueModel

_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class ErrorSchema(ValueModel):
    message: str
    type: str
    param: str | None
    code: str | None
    name: str | None = None
    details: dict[str, Any] | None = None

    def to_value(self) -> PalaverError | None:
        """The error that the server raised; None if this program has no error type of that name."""
        kind = next((kind for kind in _error_types(PalaverError) if error_name(kind) == self.name), None)
        if kind is None:
            return None
        error = kind.__new__(kind, self.message)
        error.__dict__.update(self.details or {})
        return error


class ErrorBody(ValueModel):
    error: ErrorSchema


def error_name(kind: type[BaseException]) -> str:
    """The name of an error type in JSON: `ContextOverflow` is context_overflow."""
    return _CAPITAL.sub("_", kind.__name__).lower()


def error_fields(error: BaseException) -> dict[str, Any]:
    """The fields from which the client raises the same error; empty for errors that are not Palaver's."""
    if not isinstance(error, PalaverError):
        return {}
    details = {name: value for name, value in vars(error).items() if _is_json(value)}
    return {"name": error_name(type(error)), "details": details}


def _error_types(kind: type[PalaverError]) -> Iterator[type[PalaverError]]:
    yield kind
    for subtype in kind.__subclasses__():
        yield from _error_types(subtype)


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True
