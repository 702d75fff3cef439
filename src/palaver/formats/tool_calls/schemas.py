"""What a tool's JSON schema says of its arguments, for syntaxes that write them one by one and not as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from palaver.errors import BadParameter
from palaver.formats.tool_calls.lark import ANYTHING, LarkBuilder, escape_regex
from palaver.messages import Tool

NAME = re.compile(r"[\w.:/-]{1,128}")
"""Names that every syntax can write."""
KEY = re.compile(r"[\w.$:/@-]+( [\w.$:/@-]+)*")
"""Names of arguments that can stand between markers."""
NOTES = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "format"),
        *("$defs", "definitions", "$schema", "$id", "$comment", "strict"),
    )
)
"""Keywords that a value need not follow."""
_OBJECT = frozenset(("type", "properties", "required", "additionalProperties"))
_STRING = frozenset(("type", "enum", "const", "pattern", "minLength", "maxLength"))
_ANY = "palaver_anything"


@dataclass(frozen=True, slots=True)
class SchemaArgument:
    key: str
    schema: Any
    required: bool


@dataclass(frozen=True, slots=True)
class ObjectMembers:
    """The members of an object in the order in which they are written."""

    listed: tuple[SchemaArgument, ...]
    others: Any
    """The schema of any further one; False where there can be none."""


def unsupported_schema(tool: Tool, why: str) -> BadParameter:
    return BadParameter("tools", tool.name, f"a call of it can't be forced with this model: {why}")


def check_tool_name(tool: Tool) -> str:
    if not NAME.fullmatch(tool.name):
        raise unsupported_schema(tool, "its name has letters that a call can't hold")
    return tool.name


def check_argument_name(tool: Tool, key: str, allowed: re.Pattern[str] = KEY) -> str:
    if not allowed.fullmatch(key):
        raise unsupported_schema(tool, f"{key!r} can't be the name of an argument in the way it writes them")
    return key


def other_keys(lark: LarkBuilder, found: ObjectMembers) -> str:
    """Names of members that are not listed."""
    listed = "|".join(escape_regex(one.key) for one in found.listed)
    return lark.pattern("[A-Za-z_][A-Za-z0-9_]{0,31}", but=[f"({listed})"] if listed else [])


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of all arguments together: always an object."""
    schema = dict(tool.parameters)
    if schema.get("type", "object") != "object":
        raise unsupported_schema(tool, "its arguments are no object")
    return {**schema, "type": "object"}


def object_members(tool: Tool, schema: Mapping[str, Any], root: Mapping[str, Any]) -> ObjectMembers:
    """Of an object. BadParameter for what only JSON written as such could be held to."""
    schema = resolve_schema(tool, schema, root)
    check_schema(tool, schema, _OBJECT)
    properties = schema.get("properties") or {}
    required = [*(schema.get("required") or ())]
    listed = [SchemaArgument(key, value, key in required) for key, value in properties.items()]
    listed += [SchemaArgument(key, {}, True) for key in required if key not in properties]
    further = schema.get("additionalProperties", "properties" not in schema)
    return ObjectMembers(tuple(listed), {} if further is True else further)


def resolve_schema(tool: Tool, schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema itself where it only refers to one of the tool's own."""
    seen = set()
    while isinstance(schema, Mapping) and "$ref" in schema:
        place = schema["$ref"]
        if place in seen or not isinstance(place, str) or not place.startswith("#/"):
            raise unsupported_schema(tool, f"the reference {place!r} leads nowhere")
        seen.add(place)
        schema = resolve_pointer(tool, root, place)
    return schema


def resolve_pointer(tool: Tool, root: Mapping[str, Any], place: str) -> Any:
    at: Any = root
    for step in place.removeprefix("#/").split("/"):
        at = at.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(at, Mapping) else None
    if at is None:
        raise unsupported_schema(tool, f"the reference {place!r} leads nowhere")
    return at


def check_schema(tool: Tool, schema: Any, known: frozenset[str]) -> None:
    if not isinstance(schema, Mapping):
        raise unsupported_schema(tool, "there is a value that can't be")
    for keyword in schema:
        if keyword not in known and keyword not in NOTES:
            raise unsupported_schema(tool, f"{keyword!r} can't be held in the way it writes arguments")


def is_text(schema: Mapping[str, Any]) -> bool:
    """Whether a value can be nothing but text."""
    kinds = schema.get("type")
    return kinds == "string" or kinds == ["string"] or (kinds is None and _only_text(schema.get("enum")))


def _only_text(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)


def admits(schema: Any, kind: str) -> bool:
    """Whether any value of this type is one of the schema's: seen from the outside only."""
    if schema is True or schema == {}:
        return True
    if not isinstance(schema, Mapping):
        return False
    rest = set(schema) - NOTES
    kinds = schema.get("type")
    if rest == {"type"}:
        return kind == kinds or (isinstance(kinds, list) and kind in kinds)
    return rest == {"anyOf"} and any(admits(one, kind) for one in schema["anyOf"])


def text_patterns(tool: Tool, schema: Mapping[str, Any]) -> tuple[str, ...]:
    """What a text must match, each as a whole."""
    check_schema(tool, schema, _STRING)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        return (f"({'|'.join(escape_regex(value) for value in values if isinstance(value, str))})",)
    found = []
    if "pattern" in schema:
        found.append(_anchored(schema["pattern"]))
    if "minLength" in schema or "maxLength" in schema:
        found.append(f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})")
    return tuple(found) or (ANYTHING,)


def _anchored(pattern: str) -> str:
    """The pattern for a whole text, which JSON schema looks for anywhere in it."""
    before = "" if pattern.startswith("^") else ANYTHING
    after = "" if re.search(r"(?<!\\)(\\\\)*\$\Z", pattern) else ANYTHING
    core = pattern.removeprefix("^")
    core = core[:-1] if not after else core
    core = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], core, flags=re.DOTALL)
    return f"{before}({core}){after}".replace("\n", r"\n")


def with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    """A part of the schema that can stand alone."""
    if schema is True:
        return {}
    kept = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return {**kept, **schema} if isinstance(schema, Mapping) else schema


def without_letter(schema: Any, letter: str) -> Any:
    """The same for values in whose texts the letter does not occur, so that no text can spell a marker."""
    if not letter:
        return schema
    walk = _Without(f"^[^{re.escape(letter)}]*$")
    found = walk.schema(schema)
    return {**found, "$defs": {**found.get("$defs", {}), _ANY: walk.anything()}}


class _Without:
    def __init__(self, plain: str) -> None:
        self._plain = plain
        """The pattern of texts without the letter."""

    def anything(self) -> dict[str, Any]:
        here = {"$ref": f"#/$defs/{_ANY}"}
        return {
            "anyOf": [
                {"type": ["null", "boolean", "number"]},
                {"type": "string", "pattern": self._plain},
                {"type": "array", "items": here},
                {"type": "object", "patternProperties": {self._plain: here}, "additionalProperties": False},
            ]
        }

    def schema(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return {"$ref": f"#/$defs/{_ANY}"} if schema is True else schema
        found = {key: self._keyword(key, value) for key, value in schema.items()}
        if {"enum", "const", "$ref", "anyOf", "oneOf", "allOf"} & set(schema):
            return found
        kinds = schema.get("type")
        listed = [kinds] if isinstance(kinds, str) else kinds
        if listed is None:
            return {**found, "$ref": f"#/$defs/{_ANY}"}
        if "string" in listed:
            found = self._text(found)
        if "array" in listed:
            found.setdefault("items", {"$ref": f"#/$defs/{_ANY}"})
        return self._members(found) if "object" in listed else found

    def _keyword(self, key: str, value: Any) -> Any:
        if key in ("properties", "$defs", "definitions", "patternProperties") and isinstance(value, Mapping):
            return {name: self.schema(one) for name, one in value.items()}
        if key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            return [self.schema(one) for one in value]
        return self.schema(value) if key in ("items", "additionalProperties") else value

    def _text(self, schema: dict[str, Any]) -> dict[str, Any]:
        if "pattern" not in schema:
            return {**schema, "pattern": self._plain}
        return {**schema, "allOf": [{"type": "string", "pattern": self._plain}]}

    def _members(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Only named members, or any whose names are without the letter."""
        if schema.get("properties"):
            return {**schema, "additionalProperties": False}
        others = schema.get("additionalProperties", {"$ref": f"#/$defs/{_ANY}"})
        if others is False:
            return schema
        return {**schema, "patternProperties": {self._plain: others}, "additionalProperties": False}
