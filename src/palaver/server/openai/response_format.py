"""Constraints on the answer: `response_format`, and the short forms of other servers.

llama.cpp's server takes `json_schema` and `grammar`, vLLM `guided_json` and its like, later `structured_outputs`."""

from __future__ import annotations

import json
from typing import Any

from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from palaver.constraints import MAX_CONSTRAINT, Constraint, Grammar
from palaver.errors import BadParameter
from palaver.server.openai.schemas import ChatRequest, CompletionRequest, ResponseFormat, StructuredOutputs

CONSTRAINT_FIELDS = frozenset(
    "response_format json_schema regex grammar guided_json guided_regex guided_choice guided_grammar "
    "structured_outputs".split()
)


def parse_response_format(request: ChatRequest | CompletionRequest) -> Constraint | None:
    """The constraint on the answer. At most one of the fields may be set."""
    found = {
        "response_format": _format_constraint(request.response_format),
        "json_schema": _schema_constraint("json_schema", request.json_schema),
        "regex": _regex("regex", request.regex),
        "grammar": _grammar("grammar", request.grammar),
        "guided_json": _schema_constraint("guided_json", request.guided_json),
        "guided_regex": _regex("guided_regex", request.guided_regex),
        "guided_choice": _choice_constraint("guided_choice", request.guided_choice),
        "guided_grammar": _grammar("guided_grammar", request.guided_grammar),
        **_structured_outputs(request.structured_outputs),
    }
    given = {name: constraint for name, constraint in found.items() if constraint is not None}
    if len(given) > 1:
        raise BadParameter(list(given)[1], "...", f"contradicts {next(iter(given))}: use only one of them")
    return next(iter(given.values()), None)


def _format_constraint(format: ResponseFormat | None) -> Constraint | None:
    match format:
        case None | ResponseFormat(type="text"):
            return None
        case ResponseFormat(type="json_object"):
            return _schema_constraint("response_format", {"type": "object"})
        case ResponseFormat(type="json_schema", json_schema=inner):
            if inner is None or inner.schema_ is None:
                raise BadParameter("response_format.json_schema", None, "must contain a schema")
            return _schema_constraint("response_format.json_schema", inner.schema_)
        case ResponseFormat(type="regex", regex=text):
            return _constraint("response_format.regex", Grammar.REGEX, text)
        case ResponseFormat(grammar=text):
            return _grammar("response_format.grammar", text or "")


def _structured_outputs(outputs: StructuredOutputs | None) -> dict[str, Constraint | None]:
    """The constraints in vLLM's `structured_outputs`."""
    if outputs is None:
        return {}
    name = "structured_outputs"
    return {
        f"{name}.json": _schema_constraint(f"{name}.json", outputs.json_),
        f"{name}.json_object": _schema_constraint(
            f"{name}.json_object", {"type": "object"} if outputs.json_object else None
        ),
        f"{name}.regex": _regex(f"{name}.regex", outputs.regex),
        f"{name}.choice": _choice_constraint(f"{name}.choice", outputs.choice),
        f"{name}.grammar": _grammar(f"{name}.grammar", outputs.grammar),
    }


def _schema_constraint(name: str, schema: Any) -> Constraint | None:
    """A JSON schema as an object, or as text."""
    if schema is None:
        return None
    return _constraint(
        name, Grammar.JSON_SCHEMA, schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    )


def _regex(name: str, text: str | None) -> Constraint | None:
    return None if text is None else _constraint(name, Grammar.REGEX, text)


def _choice_constraint(name: str, texts: list[str] | None) -> Constraint | None:
    """The answer is one of these texts."""
    if texts is None:
        return None
    if not texts or not all(texts):
        raise BadParameter(name, texts, "must be a list of texts, none of them empty")
    return _constraint(
        name, Grammar.LARK, "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    )


def _grammar(name: str, text: str | None) -> Constraint | None:
    """In Lark's notation, or in llama.cpp's GBNF, whose rules are written with `::=`."""
    if text is None:
        return None
    if not is_lark_syntax(_constraint(name, Grammar.LARK, text).text):
        try:
            text = gbnf_to_lark(text)
        except Exception as error:  # the converter raises plain ones
            raise BadParameter(name, "...", f"can't be read as GBNF: {error}") from None
    return _constraint(name, Grammar.LARK, text)


def _constraint(name: str, grammar: Grammar, text: str | None) -> Constraint:
    if not text:
        raise BadParameter(name, text, "must not be empty")
    if len(text) > MAX_CONSTRAINT:
        raise BadParameter(name, f"{len(text)} characters", f"at most {MAX_CONSTRAINT} are taken")
    return Constraint(grammar, text)
