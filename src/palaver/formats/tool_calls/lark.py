"""Lark grammars of tool calls: built from literals (control tokens in them as token ids), JSON schemas, and text up to
a marker. For syntaxes that write arguments one by one instead of as JSON, schemas are taken apart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palaver.constraints import without_other_formats
from palaver.errors import BadParameter
from palaver.formats.markers import split_marker
from palaver.messages import Tool

ANYTHING = "(?s:.*)"
_META = re.compile(r"[\\.+*?()|\[\]{}^$/]")
_CONTROL = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_SPACE = {"whitespace_pattern": r"[ \n\t]{0,24}"}
"""White space between the tokens of JSON is bounded, so that a model can't write it for ever."""


def escape_regex(text: str) -> str:
    """A pattern that matches exactly this text."""
    plain = _META.sub(r"\\\g<0>", text)
    return "".join(_CONTROL.get(character, character) for character in plain)


def join_expressions(*expressions: str) -> str:
    return " ".join(filter(None, expressions))


def _either(expression: str, other: str) -> str:
    return f"({expression} | {other})" if other else f"({expression})?"


def one_of(expressions: Sequence[str]) -> str:
    return expressions[0] if len(expressions) == 1 else f"({' | '.join(expressions)})"


class LarkBuilder:
    """Collects the rules of one grammar. Equal rules are written once."""

    def __init__(self, control: Mapping[str, int]) -> None:
        self._control = control
        longest_first = sorted(control, key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if control else None
        self._texts = {token_id: text for text, token_id in control.items()}
        self._names: dict[str, str] = {}
        self._rules: dict[str, str] = {}
        self.ids: set[int] = set()
        """The token ids that the grammar refers to."""

    def build(self, start: str) -> str:
        """The text of the grammar with this start expression."""
        rules = (f"{name}: {body}" for name, body in self._rules.items())
        return "\n".join([f"start: {start}", *rules])

    def rule(self, body: str, name: str = "") -> str:
        return self._add_rule(body, name or f"r{len(self._rules)}")

    def declare_rule(self) -> str:
        """The name of a rule that is defined later, for recursive rules."""
        name = f"r{len(self._rules)}"
        self._rules[name] = ""
        return name

    def define_rule(self, name: str, body: str) -> None:
        self._rules[name] = body

    def pattern(self, *patterns: str, excluding: Sequence[str] = ()) -> str:
        """Text that fully matches all patterns and none of `excluding`."""
        bodies = [*(f"/{one}/" for one in patterns), *(f"~/{one}/" for one in excluding)]
        return self._add_rule(" & ".join(bodies), f"T{len(self._rules)}")

    def json(self, schema: Any) -> str:
        if isinstance(schema, Mapping):
            schema = {**without_other_formats(dict(schema)), "x-guidance": _SPACE}
        return self._add_rule(f"%json {json.dumps(schema, ensure_ascii=False)}", f"j{len(self._rules)}")

    def literal(self, text: str) -> str:
        return join_expressions(*(self._piece(run) for run in self._runs(text)))

    def until(self, close: str, *contents: str, excluding: str = "") -> str:
        """Text that matches the patterns and not `excluding`, then the marker, which the text itself can't contain."""
        first = next(iter(split_marker(close, self._control)), "")
        runs = list(self._runs(close))
        head = runs.pop(0) if runs and isinstance(runs[0], str) else ""
        assert isinstance(head, str)
        at = head.find(first) + len(first) if first and first not in self._control and first in head else len(head)
        head, rest = head[:at], head[at:]
        never = [f"{excluding}{escape_regex(head)}"] if excluding else []
        if head.strip() and not rest and runs:  # the token after it decides; the text can't spell both
            spelled = close[: len(head)] + self._texts[int(runs[0])]
            never.append(f"(?s:.*){escape_regex(spelled)}(?s:.*)")
        elif head.strip() and head.endswith(first):
            never.append(f"(?s:.*){escape_regex(first)}(?s:.+)")
        text = self.pattern(*(f"{content}{escape_regex(head)}" for content in contents), excluding=never)
        return join_expressions(text, self.literal(rest), *(self._piece(run) for run in runs))

    def sequence(self, items: Sequence[tuple[str, bool]], separator: str, more: str = "") -> str:
        """Items in order, each with whether it is required; then `more`, any number of times."""
        between = self.literal(separator)
        after = f"({join_expressions(between, more)})*" if more else ""
        first = f"({join_expressions(more, after)})?" if more else ""
        for item, required in reversed(items):
            further, fresh = join_expressions(between, item, after), join_expressions(item, after)
            after = self.rule(further if required else _either(further, after))
            first = self.rule(fresh if required else _either(fresh, first))
        return first

    def text_marker_start(self, marker: str) -> str:
        """The first character of a marker that is ordinary text, so that text before it could spell it; else empty."""
        first = next(iter(split_marker(marker, self._control)), "")
        return "" if first in self._control else first[:1]

    def _add_rule(self, body: str, name: str) -> str:
        if body not in self._names:
            self._names[body] = name
            self._rules[name] = body
        return self._names[body]

    def _piece(self, run: str | int) -> str:
        if isinstance(run, str):
            return json.dumps(run, ensure_ascii=False)
        self.ids.add(run)
        return f"<[{run}]>"

    def _runs(self, text: str) -> Iterator[str | int]:
        at = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            if match.start() > at:
                yield text[at : match.start()]
            yield self._control[match[0]]
            at = match.end()
        if at < len(text):
            yield text[at:]


TOOL_NAME = re.compile(r"[\w.:/-]{1,128}")
"""Tool names that every syntax can write."""
ARGUMENT_NAME = re.compile(r"[\w.$:/@-]+( [\w.$:/@-]+)*")
"""Argument names that can stand between markers."""
ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "format"),
        *("$defs", "definitions", "$schema", "$id", "$comment", "strict"),
    )
)
"""Keywords that do not constrain a value."""
ARRAY_KEYWORDS = frozenset(("type", "items", "minItems", "maxItems"))
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
    """The properties of an object in the order in which they are written."""

    properties: tuple[SchemaArgument, ...]
    additional: Any
    """The schema of additional properties; False if there are none."""


def unsupported_schema(tool: Tool, why: str) -> BadParameter:
    return BadParameter("tools", tool.name, f"this model can't be forced to call it: {why}")


def check_tool_name(tool: Tool) -> str:
    if not TOOL_NAME.fullmatch(tool.name):
        raise unsupported_schema(tool, "its name has characters that a call can't have")
    return tool.name


def check_argument_name(tool: Tool, key: str, allowed: re.Pattern[str] = ARGUMENT_NAME) -> str:
    if not allowed.fullmatch(key):
        raise unsupported_schema(tool, f"{key!r} can't be the name of an argument in its syntax of calls")
    return key


class ToolGrammar:
    """Writes the grammar of calls to one tool, in a syntax that writes its arguments one by one."""

    def __init__(self, tool: Tool, lark: LarkBuilder) -> None:
        self._tool = tool
        self._lark = lark
        self._root = arguments_schema(tool)


def additional_keys(lark: LarkBuilder, members: ObjectMembers) -> str:
    """The pattern of names of additional properties."""
    names = "|".join(escape_regex(one.key) for one in members.properties)
    return lark.pattern("[A-Za-z_][A-Za-z0-9_]{0,31}", excluding=[f"({names})"] if names else [])


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of the arguments object."""
    schema = dict(tool.parameters)
    if schema.get("type", "object") != "object":
        raise unsupported_schema(tool, "its arguments must be an object")
    return {**schema, "type": "object"}


def object_members(tool: Tool, schema: Mapping[str, Any], root: Mapping[str, Any]) -> ObjectMembers:
    """The members of an object schema. BadParameter for keywords that only arguments written as JSON can follow."""
    schema = resolve_schema(tool, schema, root)
    check_schema(tool, schema, _OBJECT)
    properties = schema.get("properties") or {}
    required = [*(schema.get("required") or ())]
    members = [SchemaArgument(key, value, key in required) for key, value in properties.items()]
    members += [SchemaArgument(key, {}, True) for key in required if key not in properties]
    additional = schema.get("additionalProperties", "properties" not in schema)
    return ObjectMembers(tuple(members), {} if additional is True else additional)


def resolve_schema(tool: Tool, schema: Any, root: Mapping[str, Any]) -> Any:
    """Follows `$ref` inside the tool's own schema."""
    seen = set()
    while isinstance(schema, Mapping) and "$ref" in schema:
        place = schema["$ref"]
        if place in seen or not isinstance(place, str) or not place.startswith("#/"):
            raise unsupported_schema(tool, f"the reference {place!r} has no target")
        seen.add(place)
        schema = resolve_pointer(tool, root, place)
    return schema


def resolve_pointer(tool: Tool, root: Mapping[str, Any], place: str) -> Any:
    at: Any = root
    for step in place.removeprefix("#/").split("/"):
        at = at.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(at, Mapping) else None
    if at is None:
        raise unsupported_schema(tool, f"the reference {place!r} has no target")
    return at


def check_schema(tool: Tool, schema: Any, supported: frozenset[str]) -> None:
    if not isinstance(schema, Mapping):
        raise unsupported_schema(tool, "a schema is neither an object nor true")
    for keyword in schema:
        if keyword not in supported and keyword not in ANNOTATIONS:
            raise unsupported_schema(tool, f"{keyword!r} is not supported in its syntax of calls")


def is_string(schema: Mapping[str, Any]) -> bool:
    """Whether a value can only be a string."""
    kinds = schema.get("type")
    return kinds == "string" or kinds == ["string"] or (kinds is None and _only_strings(schema.get("enum")))


def _only_strings(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)


def accepts_type(schema: Any, kind: str) -> bool:
    """Whether the schema accepts every value of this type. Looks only at `type` and `anyOf`."""
    if schema is True or schema == {}:
        return True
    if not isinstance(schema, Mapping):
        return False
    rest = set(schema) - ANNOTATIONS
    kinds = schema.get("type")
    if rest == {"type"}:
        return kind == kinds or (isinstance(kinds, list) and kind in kinds)
    return rest == {"anyOf"} and any(accepts_type(one, kind) for one in schema["anyOf"])


def text_patterns(tool: Tool, schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The patterns that a string must fully match."""
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
    """The pattern for a full match; JSON schema searches for a pattern anywhere in the string."""
    before = "" if pattern.startswith("^") else ANYTHING
    after = "" if re.search(r"(?<!\\)(\\\\)*\$\Z", pattern) else ANYTHING
    core = pattern.removeprefix("^")
    core = core[:-1] if not after else core
    core = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], core, flags=re.DOTALL)
    return f"{before}({core}){after}".replace("\n", r"\n")


def with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    """A subschema with the definitions of its root."""
    if schema is True:
        return {}
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return {**definitions, **schema} if isinstance(schema, Mapping) else schema


def without_character(schema: Any, character: str) -> Any:
    """The schema for values whose strings do not contain the character, so that no string can spell a marker."""
    if not character:
        return schema
    restriction = _StringRestriction(f"^[^{re.escape(character)}]*$")
    restricted = restriction.schema(schema)
    return {**restricted, "$defs": {**restricted.get("$defs", {}), _ANY: restriction.anything()}}


class _StringRestriction:
    """Rewrites a schema so that all strings, keys included, match a pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def anything(self) -> dict[str, Any]:
        here = {"$ref": f"#/$defs/{_ANY}"}
        return {
            "anyOf": [
                {"type": ["null", "boolean", "number"]},
                {"type": "string", "pattern": self._pattern},
                {"type": "array", "items": here},
                {"type": "object", "patternProperties": {self._pattern: here}, "additionalProperties": False},
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
            found = self._string(found)
        if "array" in listed:
            found.setdefault("items", {"$ref": f"#/$defs/{_ANY}"})
        return self._members(found) if "object" in listed else found

    def _keyword(self, key: str, value: Any) -> Any:
        if key in ("properties", "$defs", "definitions", "patternProperties") and isinstance(value, Mapping):
            return {name: self.schema(one) for name, one in value.items()}
        if key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            return [self.schema(one) for one in value]
        return self.schema(value) if key in ("items", "additionalProperties") else value

    def _string(self, schema: dict[str, Any]) -> dict[str, Any]:
        if "pattern" not in schema:
            return {**schema, "pattern": self._pattern}
        return {**schema, "allOf": [{"type": "string", "pattern": self._pattern}]}

    def _members(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Only named properties, or any whose names match the pattern."""
        if schema.get("properties"):
            return {**schema, "additionalProperties": False}
        others = schema.get("additionalProperties", {"$ref": f"#/$defs/{_ANY}"})
        if others is False:
            return schema
        return {**schema, "patternProperties": {self._pattern: others}, "additionalProperties": False}
