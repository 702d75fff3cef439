"""Runs a chat template in a Jinja sandbox with fuel: loops, calls and output are bounded, attributes are guarded.

Published templates run unchanged. A template that loops for ever, allocates without end or accesses Python internals is
refused with the template's name and line.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from palaver.errors import TemplateError

MAX_SOURCE = 1_000_000
MAX_DEPTH = 100
MAX_TAGS = 3_000
MAX_STEPS = 2_000_000
MAX_TEXT = 50_000_000
MAX_ARGUMENT = 100_000
SCAN_UNIT = 1_000
"""Characters that may be scanned per step."""


class OutOfFuel(Exception):
    """The template exceeded a limit."""


class HostileTemplate(TemplateError):
    """The template exceeded a limit or broke out of the sandbox. Probing stops."""


class Fuel:
    """Counts the steps and the text of one rendering."""

    def __init__(self) -> None:
        self.steps = 0
        self.text = 0

    def step(self, count: int = 1) -> None:
        self.steps += count
        if self.steps > MAX_STEPS:
            raise OutOfFuel(f"it ran for more than {MAX_STEPS} steps")

    def scan(self, value: Any) -> Any:
        """Charges steps for scanning a long value; returns the value."""
        if isinstance(value, str | list | tuple) and len(value) > SCAN_UNIT:
            self.step(len(value) // SCAN_UNIT)
        return value

    def charge_text(self, value: Any) -> Any:
        """Charges the size of a created text or list; returns the value."""
        if isinstance(value, str | list | tuple | bytes):
            self.text += len(value)
            if self.text > MAX_TEXT:
                raise OutOfFuel(f"it made more than {MAX_TEXT} characters of text")
        return value


class Metered:
    """An iterable that charges a step per item. Has the length of its items, which `loop` needs."""

    def __init__(self, fuel: Fuel, items: Iterable[Any]) -> None:
        self._fuel = fuel
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._fuel.step()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]


class GenerationBlocks(Extension):
    """`{% generation %}...{% endgeneration %}` marks text of the assistant; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(SandboxedEnvironment):
    """The environment that templates run in. `fuel` belongs to the current rendering."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, GenerationBlocks])
        self.fuel = Fuel()
        self.filters |= {"tojson": tojson, "from_json": from_json, "fromjson": from_json}
        self.filters = {name: self._guarded(func) for name, func in self.filters.items()}
        self.filters |= {"__metered": self._metered, "__joined": self._joined, "__scanned": self._scanned}
        contains: Any = self.tests["in"]
        self.tests["in"] = self._guarded(contains)
        self.globals["raise_exception"] = _raise_exception

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_metered_tree(source), *args, **kwargs)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self.fuel.step()
        self._check(getattr(obj, "__self__", None), *args, *kwargs.values())
        return self.fuel.charge_text(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        text = getattr(value, "__self__", "")
        if isinstance(text, str) and re.search(r"\{[^}]*[0-9]{6}", text):
            raise OutOfFuel("it formats a text to a huge width")
        return super().wrap_str_format(value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.fuel.step()
        if operator == "*" and _repeats_too_often(left, right):
            raise OutOfFuel("it repeats a text too often")
        if operator == "**" and abs(right) > 64:
            raise OutOfFuel("it raises a number to a huge power")
        if operator == "%" and isinstance(left, str) and re.search(r"%[^a-zA-Z%]*([0-9]{6}|\*)", left):
            raise OutOfFuel("it formats a text to a huge width")
        return self.fuel.charge_text(super().call_binop(context, operator, left, right))

    def _guarded(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """A built-in filter that charges fuel. Keeps the attributes by which Jinja passes its context."""

        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.fuel.step()
            self._check(*args, *kwargs.values())
            return self.fuel.charge_text(func(*args, **kwargs))

        for name, value in getattr(func, "__dict__", {}).items():
            setattr(guarded, name, value)
        return guarded

    def _check(self, *values: Any) -> None:
        """Refuses arguments that would create a huge text, before the call."""
        texts = [value for value in values if isinstance(value, str)]
        for value in values:
            self.fuel.scan(value)
            if isinstance(value, int) and abs(value) > MAX_ARGUMENT:
                raise OutOfFuel(f"it calls something with the number {value}")
            times = value if isinstance(value, int) else len(value) if isinstance(value, list | tuple) else 0
            if texts and times * (1 + min(map(_line_breaks, texts))) > MAX_TEXT:
                raise OutOfFuel(f"it makes more than {MAX_TEXT} characters of text")
        if len(texts) > 2 and texts[0].count(texts[1]) * len(texts[2]) > MAX_TEXT:
            raise OutOfFuel(f"it makes more than {MAX_TEXT} characters of text")

    def _scanned(self, value: Any) -> Any:
        return self.fuel.scan(value)

    def _metered(self, items: Any) -> Metered:
        return Metered(self.fuel, items)

    def _joined(self, items: Sequence[Any]) -> str:
        text: str = self.fuel.charge_text("".join(str(item) for item in items))
        return text


def _metered_tree(tree: nodes.Template) -> nodes.Template:
    """The syntax tree with loops, comparisons, slices and `~` charged."""
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, "__metered", [], [], None, None, lineno=loop.lineno)
    for compared in tree.find_all(nodes.Compare):
        for operand in compared.ops:
            operand.expr = _scanned(operand.expr)
    for item in tree.find_all(nodes.Getitem):
        if isinstance(item.arg, nodes.Slice):
            item.node = _scanned(item.node)
    for parent in list(tree.find_all(nodes.Node)):
        for name, value in parent.iter_fields():
            setattr(parent, name, _replace_concat(value))
    return tree


def _scanned(value: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(value, "__scanned", [], [], None, None, lineno=value.lineno)


def _line_breaks(text: str) -> int:
    """The number of lines and tabs in a text: `indent` and `expandtabs` widen each of them."""
    return text.count("\n") + text.count("\t")


def _replace_concat(value: Any) -> Any:
    if isinstance(value, list):
        return [_replace_concat(item) for item in value]
    if isinstance(value, nodes.Concat):
        items = nodes.List(value.nodes, lineno=value.lineno)
        return nodes.Filter(items, "__joined", [], [], None, None, lineno=value.lineno)
    return value


def _repeats_too_often(left: Any, right: Any) -> bool:
    text, times = (left, right) if not isinstance(left, int | float) else (right, left)
    return isinstance(text, str | list | tuple) and isinstance(times, int) and len(text) * times > MAX_TEXT


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(value, jinja2.Undefined):
        raise jinja2.exceptions.UndefinedError("an undefined value can't be written as JSON")
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys, default=_listed
    )
    return _ascii(text) if ensure_ascii else text


def _listed(value: Any) -> list[Any]:
    """The items of a generator, which filters such as `map` and `select` return."""
    if isinstance(value, Iterator | Metered):
        return list(value)
    raise TypeError(f"a value of type {type(value).__name__} can't be written as JSON")


def _ascii(text: str) -> str:
    """Escapes characters beyond ASCII as JSON does, except private-use ones: they escape control text in contents."""
    return re.sub(r"[^\x00-\x7f\ue000-\uf8ff]", lambda m: json.dumps(m[0])[1:-1], text)


def from_json(text: str) -> Any:
    return json.loads(text)


class Template:
    """One compiled chat template. Rendering has no side effects and depends on its arguments only."""

    def __init__(self, source: str, name: str = "chat template") -> None:
        self.source = source
        self.name = name
        self._sandbox = Sandbox()
        self._compiled = self._compile()
        self._lists_contents: bool | None = None

    def render(self, variables: Mapping[str, Any], now: datetime | None = None) -> str:
        """Contents that are text become lists of one part for a template that takes nothing else."""
        if self._lists_contents is None:
            self._lists_contents = self._probe_contents(variables)
        if self._lists_contents and isinstance(variables.get("messages"), list):
            variables = {**variables, "messages": [_with_list(message) for message in variables["messages"]]}
        return self._render(variables, now)

    def _probe_contents(self, variables: Mapping[str, Any]) -> bool:
        """Whether the template drops or refuses a text, but writes a list with the same text."""

        def writes(content: Any) -> bool:
            messages = [{"role": "user", "content": content}]
            try:
                return _PROBE in self._render({**variables, "messages": messages}, None)
            except TemplateError:
                return False

        return not writes(_PROBE) and writes([{"type": "text", "text": _PROBE}])

    def _render(self, variables: Mapping[str, Any], now: datetime | None) -> str:
        self._sandbox.fuel = Fuel()
        day = now or datetime(2024, 1, 1)
        text = []
        try:
            for piece in self._compiled.generate({"strftime_now": day.strftime, **variables}):
                text.append(self._sandbox.fuel.charge_text(piece))
        except Exception as error:
            raise self._to_template_error(error) from None
        return "".join(text)

    @property
    def steps(self) -> int:
        """The steps of the last rendering."""
        return self._sandbox.fuel.steps

    @cached_property
    def tree(self) -> nodes.Template:
        """The syntax tree, for learning."""
        return Sandbox().parse(self.source)

    def _compile(self) -> jinja2.Template:
        try:
            _check_source(self.source)
            return self._sandbox.from_string(self.source)
        except Exception as error:
            raise self._to_template_error(error) from None

    def _to_template_error(self, error: Exception) -> TemplateError:
        why = str(error) or type(error).__name__
        if isinstance(error, RecursionError):
            why = "it is nested too deeply"
        line = getattr(error, "lineno", None) or _line_of(error)
        kind = HostileTemplate if isinstance(error, _HOSTILE) else TemplateError
        return kind(self.name, line, why.rstrip("."))


_PROBE = "Qzcontent"


def _with_list(message: Any) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


_HOSTILE = (OutOfFuel, SecurityError, RecursionError, MemoryError)


def _line_of(error: Exception) -> int | None:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return lines[-1] if lines else None


def _check_source(source: str) -> None:
    if len(source) > MAX_SOURCE:
        raise OutOfFuel(f"it is longer than {MAX_SOURCE} characters")
    depth = 0
    for kind in re.findall(r"\{%[-+]?\s*(end)?(?:if|for|macro|call|filter|set|block|with)\b|[(\[{]{20}", source):
        depth += -1 if kind else 1
        if depth > 20 * MAX_DEPTH:
            raise OutOfFuel("it is nested too deeply")
    if len(re.findall(r"\{[%{]", source)) > MAX_TAGS:
        raise OutOfFuel(f"it has more than {MAX_TAGS} tags")
