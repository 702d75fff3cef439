"""Errors as JSON: the client raises the same type with the same attributes as the server.

The shape is OpenAI's. `type` and `code` are for its clients; `name` is the error's type, `details` its attributes.
"""

from __future__ import annotations

from typing import Any

from palaver.encoding import decode_error, error_details, error_name
from palaver.errors import PalaverError
from palaver.wire.values import ValueModel


class ErrorSchema(ValueModel):
    message: str
    type: str
    param: str | None
    code: str | None
    name: str | None = None
    details: dict[str, Any] | None = None

    def to_value(self) -> PalaverError | None:
        """The error that the server raised; None if this program has no error type of that name."""
        return decode_error(self.name, self.message, self.details)


class ErrorBody(ValueModel):
    error: ErrorSchema


def error_fields(error: BaseException) -> dict[str, Any]:
    """The fields from which the client raises the same error; empty for errors that are not Palaver's."""
    if not isinstance(error, PalaverError):
        return {}
    return {"name": error_name(type(error)), "details": error_details(error)}
