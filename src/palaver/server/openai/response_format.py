"""What the answer must look like: `response_format` and its short forms as a constraint of the engine."""

from __future__ import annotations

import json
from typing import Any

from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from palaver.constraints import MAX_CONSTRAINT, Constraint, Grammar
from palaver.errors import BadParameter
from palaver.server.openai.schemas import ChatRequest, CompletionRequest, ResponseFormat, StructuredOutputs


def parse_response_format(request: ChatRequest | CompletionRequest) -> Constraint | None:
    """At most one may be asked for."""
    found = {
        "response_format": _of_format(request.response_format),
        "json_schema": _schema("json_schema", request.json_schema),
        "regex": _pattern("regex", request.regex),
        "grammar": _grammar("grammar", request.grammar),
        "guided_json": _schema("guided_json", request.guided_json),
        "guided_regex": _pattern("guided_regex", request.guided_regex),
        "guided_choice": _choice("guided_choice", request.guided_choice),
        "guided_grammar": _grammar("guided_grammar", request.guided_grammar),
        **_of_outputs(request.structured_outputs),
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
            return _grammar("response_format.grammar", text or "")


def _of_outputs(outputs: StructuredOutputs | None) -> dict[str, Constraint | None]:
    """vLLM's way to say the same."""
    if outputs is None:
        return {}
    name = "structured_outputs"
    return {
        f"{name}.json": _schema(f"{name}.json", outputs.json_),
        f"{name}.json_object": _schema(f"{name}.json_object", {"type": "object"} if outputs.json_object else None),
        f"{name}.regex": _pattern(f"{name}.regex", outputs.regex),
        f"{name}.choice": _choice(f"{name}.choice", outputs.choice),
        f"{name}.grammar": _grammar(f"{name}.grammar", outputs.grammar),
    }


def _schema(name: str, schema: Any) -> Constraint | None:
    """A schema as an object, or written as text."""
    if schema is None:
        return None
    return _text(
        name, Grammar.JSON_SCHEMA, schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    )


def _pattern(name: str, text: str | None) -> Constraint | None:
    return None if text is None else _text(name, Grammar.REGEX, text)


def _choice(name: str, texts: list[str] | None) -> Constraint | None:
    """One of these texts."""
    if texts is None:
        return None
    if not texts or not all(texts):
        raise BadParameter(name, texts, "must be a list of texts, none of them empty")
    return _text(name, Grammar.LARK, "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))


def _grammar(name: str, text: str | None) -> Constraint | None:
    """In Lark's notation, or in llama.cpp's GBNF, whose rules are written with `::=`."""
    if text is None:
        return None
    if not is_lark_syntax(_text(name, Grammar.LARK, text).text):
        try:
            text = gbnf_to_lark(text)
        except Exception as error:  # the converter raises plain ones
            raise BadParameter(name, "...", f"can't be read as GBNF: {error}") from None
    return _text(name, Grammar.LARK, text)


def _text(name: str, grammar: Grammar, text: str | None) -> Constraint:
    if not text:
        raise BadParameter(name, text, "must not be empty")
    if len(text) > MAX_CONSTRAINT:
        raise BadParameter(name, f"{len(text)} characters", f"at most {MAX_CONSTRAINT} are taken")
    return Constraint(grammar, text)
