"""Types of columns that mean the same in every database."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import BigInteger, Dialect, Integer, Text
from sqlalchemy.types import TypeDecorator

Number = BigInteger().with_variant(Integer(), "sqlite")
"""A 64-bit whole number; SQLite counts a key up only when it is called INTEGER."""


class Json(TypeDecorator[Any]):
    """A value as JSON text. Any string survives, NUL and lone surrogates too."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json_text(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


def json_text(value: Any) -> str:
    """Readable where it can be, escaped where a database could not hold it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text
