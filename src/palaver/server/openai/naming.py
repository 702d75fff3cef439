"""Parameters have names of our own inside; whoever asked is told of them by the names they were sent under."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from palaver.errors import BadParameter

_THEIRS = {
    "think": "enable_thinking",
    "effort": "reasoning_effort",
    "budget": "thinking_budget",
    "stop_ids": "stop_token_ids",
    "banned_ids": "banned_token_ids",
    "constraint (json_schema)": "response_format",
    "constraint (regex)": "response_format.regex",
    "constraint (lark)": "response_format.grammar",
    "constraint": "response_format",
}


@contextmanager
def in_their_words(theirs: Mapping[str, str] = _THEIRS) -> Iterator[None]:
    """Inside, a BadParameter is raised under the name of the request's field."""
    try:
        yield
    except BadParameter as error:
        if error.name not in theirs:
            raise
        raise BadParameter(theirs[error.name], error.value, error.why) from error
