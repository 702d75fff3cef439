"""The JSON encoding of values, generated from their types by pydantic.

The HTTP API (`wire`), the database (`store.encoding`) and the engine host (`engines.host.frames`) use it. A union is
told apart by the field `type` of its members. pydantic is imported where a value is encoded or decoded: `palaver ask`
does neither, and begins a tenth sooner without it.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

from palaver.errors import BadParameter, PalaverError

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema


class Annotation:
    """Annotations of pydantic's, made when a schema of the annotated type is."""

    def __init__(self, make: Callable[[], tuple[Any, ...]]) -> None:
        self._make = make

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(Annotated[(source, *self._make())])


def _tag() -> tuple[Any, ...]:
    from pydantic import Field

    return (Field(discriminator="type"),)


Tagged = Annotation(_tag)
"""Marks a field that is a union of values: `Annotated[Text | Thinking, Tagged]`."""


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Encodes and decodes values of this type. Built at its first use."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _decode_base64(value: Any) -> Any:
    from pydantic_core import PydanticKnownError

    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise PydanticKnownError("string_type")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise BadParameter("data", value[:40], "must be base64") from None


def _encode_base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _base64() -> tuple[Any, ...]:
    from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

    return (
        BeforeValidator(_decode_base64),
        PlainSerializer(_encode_base64, when_used="json"),
        WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
    )


Base64Bytes = Annotated[bytes, Annotation(_base64)]
"""Bytes that are base64 in JSON. Decoding raises BadParameter for other text."""


def _encode_logprob(value: float | None) -> float | str | None:
    return "-Infinity" if value == float("-inf") else value


def _logprob() -> tuple[Any, ...]:
    from pydantic import PlainSerializer, WithJsonSchema

    schema = {"anyOf": [{"type": "number"}, {"const": "-Infinity", "type": "string"}]}
    return PlainSerializer(_encode_logprob, when_used="json"), WithJsonSchema(schema)


Logprob = Annotated[float, Annotation(_logprob)]
"""A log-probability. JSON has no infinity, so minus infinity is a string in it."""

_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def error_name(kind: type[BaseException]) -> str:
    """The name of an error type in JSON: `ContextOverflow` is context_overflow."""
    return _CAPITAL.sub("_", kind.__name__).lower()


def error_details(error: PalaverError) -> dict[str, Any]:
    """The error's attributes, as far as JSON can hold them."""
    return {name: value for name, value in vars(error).items() if _is_json(value)}


def decode_error(name: str | None, message: str, details: dict[str, Any] | None) -> PalaverError | None:
    """An error of the same type, message and attributes; None if this program has no error type of that name."""
    kind = next((kind for kind in _error_types(PalaverError) if error_name(kind) == name), None)
    if kind is None:
        return None
    error = kind.__new__(kind, message)
    error.__dict__.update(details or {})
    return error


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
