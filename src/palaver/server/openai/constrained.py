"""What the answer must look like: `response_format` and its short forms as a constraint of the engine."""

from __future__ import annotations

import json
from typing import Any

from palaver.constraints import MAX_CONSTRAINT, Constraint, Grammar
from palaver.errors import BadParameter
from palaver.server.openai.fields import ChatRequest, CompletionRequest, ResponseFormat


def constraint_of(request: ChatRequest | CompletionRequest) -> Constraint | None:
    """At most one may be asked for."""
    found = {
        "response_format": _of_format(request.response_format),
        "json_schema": _schema("json_schema", request.json_schema) if request.json_schema is not None else None,
        "regex": _text("regex", Grammar.REGEX, request.regex) if request.regex is not None else None,
        "grammar": _text("grammar", Grammar.LARK, request.grammar) if request.grammar is not None else None,
    }
    asked = {name: constraint for name, constraint in found.items() if constraint is not None}
    if len(asked) > 1:
        raise BadParameter(list(asked)[1], "...", f"contradicts {next(iter(asked))}: only one of them can hold")
    return next(iter(asked.values()), None)


def _of_format(format: ResponseFormat | None) -> Constraint | None:
    match format:
        case None | ResponseFormat(type="text"):
            return None
        case ResponseFormat(type="json_object"):
            return _schema("response_format", {"type": "object"})
        case ResponseFormat(type="json_schema", json_schema=inner):
            if inner is None or inner.schema_ is None:
                raise BadParameter("response_format.json_schema", None, "must hold a schema")
            return _schema("response_format.json_schema", inner.schema_)
        case ResponseFormat(type="regex", regex=text):
            return _text("response_format.regex", Grammar.REGEX, text)
        case ResponseFormat(grammar=text):
            return _text("response_format.grammar", Grammar.LARK, text)


def _schema(name: str, schema: Any) -> Constraint:
    return _text(name, Grammar.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))


def _text(name: str, grammar: Grammar, text: str | None) -> Constraint:
    if not text:
        raise BadParameter(name, text, "must not be empty")
    if len(text) > MAX_CONSTRAINT:
        raise BadParameter(name, f"{len(text)} characters", f"at most {MAX_CONSTRAINT} are taken")
    return Constraint(grammar, text)
