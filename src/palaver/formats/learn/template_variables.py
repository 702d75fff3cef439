"""Finds the variables of a template in its syntax tree: names that it reads and does not set itself, with the values
that it compares them with, their defaults and their uses.

A name that the template sets for itself is no variable, even if some path reads it unset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from jinja2 import nodes

from palaver.formats.template import OutOfFuel

GLOBALS = {"range", "dict", "lipsum", "cycler", "joiner", "namespace", "raise_exception", "strftime_now"}
MAX_NODES, MAX_INPUTS, MAX_VALUES = 20_000, 40, 12
_CASTS = {"default", "d", "lower", "upper", "trim", "string", "int", "float", "strip", "title", "capitalize"}


class VariableUse(StrEnum):
    """The use of a value in the template."""

    TRUTH = "truth"
    NUMBER = "number"
    TEXT = "text"
    LIST = "list"
    OBJECT = "object"
    MEMBERS = "members"


@dataclass(frozen=True, slots=True)
class TemplateVariable:
    name: str
    values: tuple[Any, ...] = ()
    """Constants that it is compared with, or keys that it is looked up by, in the order of the template."""
    bounds: tuple[int, ...] = ()
    """Numbers that it is compared with by order."""
    defaults: tuple[Any, ...] = ()
    """Constants that replace it if it is not set."""
    uses: frozenset[VariableUse] = frozenset()


def template_variables(tree: nodes.Template, standard: Iterable[str]) -> tuple[TemplateVariable, ...]:
    """The variables in alphabetical order. `standard` are the names that every template gets. Raises OutOfFuel for a
    template that is too large or has too many variables."""
    if sum(1 for _ in _all_nodes(tree)) > MAX_NODES:
        raise OutOfFuel(f"it has more than {MAX_NODES} pieces")
    free = sorted(set(_ReadNames().find(tree)) - set(standard) - GLOBALS)
    local = _local_names(tree)
    names = [name for name in free if name not in local]
    if len(names) > MAX_INPUTS:
        raise OutOfFuel(f"it asks for more than {MAX_INPUTS} variables")
    return tuple(_VariableUses(tree, name).collect() for name in names)


class _ReadNames:
    """Finds names that may be read before the template has set them."""

    def __init__(self) -> None:
        self._reads: dict[str, None] = {}
        self._macros: list[nodes.Macro] = []

    def find(self, tree: nodes.Template) -> list[str]:
        self._block(tree.body, frozenset())
        bound = frozenset(_targets(tree.body)) | {macro.name for macro in self._macros}
        for macro in self._macros:
            self._expressions(macro.defaults, bound)
            names = {argument.name for argument in macro.args} | {"caller", "varargs", "kwargs"}
            self._block(macro.body, bound | names)
        return list(self._reads)

    def _block(self, body: Iterable[nodes.Node], bound: frozenset[str]) -> frozenset[str]:
        for node in body:
            bound = self._statement(node, bound)
        return bound

    def _statement(self, node: nodes.Node, bound: frozenset[str]) -> frozenset[str]:
        match node:
            case nodes.If():
                return self._if(node, bound)
            case nodes.For():
                self._expressions([node.iter], bound)
                inner = bound | set(_names(node.target)) | {"loop"}
                self._expressions([node.test] if node.test else [], inner)
                self._block(node.body, inner)
                self._block(node.else_, bound)
            case nodes.Macro():
                self._macros.append(node)
                return bound | {node.name}
            case nodes.Assign():
                self._expressions([node.node], bound)
                return bound | set(_names(node.target))
            case nodes.AssignBlock():
                self._block(node.body, bound)
                return bound | set(_names(node.target))
            case nodes.With():
                self._expressions(node.values, bound)
                self._block(node.body, bound | {name for target in node.targets for name in _names(target)})
            case nodes.CallBlock():
                self._expressions([node.call], bound)
                self._block(node.body, bound | {argument.name for argument in node.args})
            case nodes.FilterBlock() | nodes.Scope() | nodes.Block():
                self._block(node.body, bound)
            case _:
                self._expressions([node], bound)
        return bound

    def _if(self, node: nodes.If, bound: frozenset[str]) -> frozenset[str]:
        self._expressions([node.test], bound)
        after = self._block(node.body, bound)
        for branch in node.elif_:
            self._expressions([branch.test], bound)
            after &= self._block(branch.body, bound)
        return after & self._block(node.else_, bound)

    def _expressions(self, expressions: Iterable[nodes.Node], bound: frozenset[str]) -> None:
        for expression in expressions:
            for name in _names(expression):
                if name not in bound:
                    self._reads[name] = None


def _names(node: nodes.Node) -> Iterator[str]:
    for found in _all_nodes(node):
        if isinstance(found, nodes.Name):
            yield found.name


def _all_nodes(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    yield from node.find_all(nodes.Node)


def _targets(body: Iterable[nodes.Node]) -> Iterator[str]:
    """Names that are set at the top level of a template, on any path."""
    for node in body:
        if isinstance(node, nodes.Assign | nodes.AssignBlock):
            yield from _names(node.target)
        elif isinstance(node, nodes.If):
            yield from _targets([*node.body, *node.elif_, *node.else_])


def _local_names(tree: nodes.Template) -> set[str]:
    """Names that the template sets independently of their value before."""
    local: set[str] = set()
    inputs: set[str] = set()
    for name, dependencies in _assignments(tree, frozenset()):
        (inputs if name in dependencies else local).add(name)
    return local - inputs


def _assignments(node: nodes.Node, guards: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Every name that is set, with the names that its value depends on."""
    if isinstance(node, nodes.If):
        guards |= set(_names(node.test))
    before: set[str] = set()
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.Assign):
            dependencies = (guards | set(_names(child.node))) - before
            yield from ((name, dependencies) for name in _names(child.target))
            before |= set(_names(child.target))
        yield from _assignments(child, guards)


@dataclass
class _VariableUses:
    """Collects the uses of one variable, and of every name that carries its value."""

    tree: nodes.Template
    name: str
    values: list[Any] = field(default_factory=list)
    bounds: list[int] = field(default_factory=list)
    defaults: list[Any] = field(default_factory=list)
    uses: set[VariableUse] = field(default_factory=set)

    def collect(self) -> TemplateVariable:
        self._constants = dict(_constants(self.tree))
        self._carriers = {self.name}
        for _ in range(3):
            self._find_carriers()
        for node in _all_nodes(self.tree):
            self._visit(node)
        self._find_guarded_defaults(self.tree, False)
        values, defaults = (_unique(values) for values in (self.values, self.defaults))
        return TemplateVariable(self.name, values, _unique(self.bounds), defaults, frozenset(self.uses))

    def _find_carriers(self) -> None:
        for node in self.tree.find_all(nodes.Assign):
            target = _path(node.target)
            if target and self._carries(node.node):
                self._carriers.add(target)
            made = node.node
            if isinstance(made, nodes.Call) and _path(made.node) == "namespace":
                self._carriers |= {f"{target}.{pair.key}" for pair in made.kwargs if self._carries(pair.value)}
        macros = {macro.name: [argument.name for argument in macro.args] for macro in self.tree.find_all(nodes.Macro)}
        for call in self.tree.find_all(nodes.Call):
            named = macros.get(_path(call.node), [])
            given = zip(named, call.args, strict=False)
            self._carriers |= {name for name, argument in given if self._carries(argument)}
            self._carriers |= {pair.key for pair in call.kwargs if pair.key in named and self._carries(pair.value)}

    def _carries(self, node: nodes.Node | None) -> bool:
        """Whether an expression is the value itself, possibly cast or with a default."""
        match node:
            case nodes.Name() | nodes.NSRef():
                return _path(node) in self._carriers
            case nodes.Getattr() if _path(node) in self._carriers:
                return True
            case nodes.Filter():
                return node.name in _CASTS and self._carries(node.node)
            case nodes.Call(node=nodes.Getattr() as method):
                return method.attr in _CASTS and self._carries(method.node)
            case nodes.CondExpr():
                return self._carries(node.expr1) or self._carries(node.expr2)
            case nodes.Or() | nodes.And():
                return self._carries(node.left) or self._carries(node.right)
        return False

    def _visit(self, node: nodes.Node) -> None:
        match node:
            case nodes.Compare():
                self._visit_compare(node)
            case nodes.Test():
                self._visit_test(node)
            case nodes.Filter():
                self._visit_filter(node)
            case nodes.Or() if self._carries(node.left):
                self.defaults += self._constant(node.right)
            case nodes.CondExpr():
                self._visit_conditional(node)
            case nodes.If() if self._tests_truth(node.test):
                self.uses.add(VariableUse.TRUTH)
            case nodes.For() if self._carries(node.iter):
                self.uses.add(VariableUse.LIST)
            case nodes.Add() | nodes.Sub() | nodes.Mul():
                self._visit_arithmetic(node)
            case nodes.Concat() if any(map(self._carries, node.nodes)):
                self.uses.add(VariableUse.TEXT)
            case nodes.Output() if any(map(self._carries, node.nodes)):
                self.uses.add(VariableUse.TEXT)
            case nodes.Getitem():
                self._visit_index(node)
            case nodes.Getattr() if _path(node) not in self._carriers and self._carries(node.node):
                self.uses.add(
                    VariableUse.TEXT
                    if node.attr in dir(str)
                    else VariableUse.LIST
                    if node.attr in dir(list)
                    else VariableUse.OBJECT
                )
            case nodes.Call(node=nodes.Getattr(attr="get") as method) if node.args and self._carries(node.args[0]):
                self._add_lookup(method.node)

    def _visit_compare(self, node: nodes.Compare) -> None:
        left: nodes.Expr = node.expr
        for operand in node.ops:
            right = operand.expr
            if operand.op in ("in", "notin"):
                if self._carries(left):
                    self._add_lookup(right)
                elif self._carries(right):
                    self.uses.add(VariableUse.MEMBERS)
            elif operand.op in ("eq", "ne"):
                other = right if self._carries(left) else left if self._carries(right) else None
                self.values += self._constant(other)
            elif self._carries(left) or self._carries(right):
                self.uses.add(VariableUse.NUMBER)
                other = right if self._carries(left) else left
                self.bounds += [value for value in self._constant(other) if isinstance(value, int)]
            left = right

    def _visit_test(self, node: nodes.Test) -> None:
        if not self._carries(node.node):
            return
        values = {"true": [True], "false": [False]}.get(node.name)
        if node.name in ("equalto", "eq", "==", "sameas", "ne", "!="):
            values = self._constant(node.args[0])
        elif node.name == "in":
            self._add_lookup(node.args[0])
        self.values += values or []
        kinds = {
            "string": VariableUse.TEXT,
            "number": VariableUse.NUMBER,
            "integer": VariableUse.NUMBER,
            "mapping": VariableUse.OBJECT,
            "sequence": VariableUse.LIST,
            "iterable": VariableUse.LIST,
            "boolean": VariableUse.TRUTH,
        }
        if node.name in kinds:
            self.uses.add(kinds[node.name])

    def _visit_filter(self, node: nodes.Filter) -> None:
        if not self._carries(node.node):
            return
        if node.name in ("default", "d"):
            self.defaults += self._constant(node.args[0]) if node.args else []
        kinds = {
            "int": VariableUse.NUMBER,
            "float": VariableUse.NUMBER,
            "join": VariableUse.LIST,
            "map": VariableUse.LIST,
            "select": VariableUse.LIST,
            "reject": VariableUse.LIST,
            "selectattr": VariableUse.LIST,
            "length": VariableUse.LIST,
            "items": VariableUse.OBJECT,
            "dictsort": VariableUse.OBJECT,
            "lower": VariableUse.TEXT,
            "upper": VariableUse.TEXT,
            "trim": VariableUse.TEXT,
        }
        if node.name in kinds:
            self.uses.add(kinds[node.name])

    def _visit_conditional(self, node: nodes.CondExpr) -> None:
        if self._tests_truth(node.test):
            self.uses.add(VariableUse.TRUTH)
        if self.name in _names(node.test):
            for one, other in ((node.expr1, node.expr2), (node.expr2, node.expr1)):
                self.defaults += self._constant(other) if self._carries(one) else []

    def _visit_arithmetic(self, node: nodes.BinExpr) -> None:
        for one, other in ((node.left, node.right), (node.right, node.left)):
            if self._carries(one):
                number = any(isinstance(value, int) for value in self._constant(other))
                self.uses.add(VariableUse.TEXT if isinstance(node, nodes.Add) and not number else VariableUse.NUMBER)

    def _visit_index(self, node: nodes.Getitem) -> None:
        if self._carries(node.arg):
            self._add_lookup(node.node, node)
        elif self._carries(node.node):
            key = self._constant(node.arg)
            self.uses.add(VariableUse.OBJECT if any(isinstance(value, str) for value in key) else VariableUse.LIST)

    def _add_lookup(self, table: nodes.Node, item: nodes.Getitem | None = None) -> None:
        """The value is looked up in a constant: it is a key, a member or an index."""
        for constant in self._constant(table):
            if isinstance(constant, dict) or (isinstance(constant, list | tuple) and item is None):
                self.values += list(constant)
            elif isinstance(constant, list | tuple):
                self.values += list(range(len(constant)))
                self.uses.add(VariableUse.NUMBER)

    def _tests_truth(self, test: nodes.Node) -> bool:
        """Whether a condition tests the truth of the value."""
        match test:
            case nodes.Not():
                return self._tests_truth(test.node)
            case nodes.And() | nodes.Or():
                return self._tests_truth(test.left) or self._tests_truth(test.right)
        return self._carries(test)

    def _find_guarded_defaults(self, node: nodes.Node, guarded: bool) -> None:
        """Constants that are assigned under a condition on the variable."""
        if isinstance(node, nodes.If):
            guarded = guarded or self.name in _names(node.test)
        if isinstance(node, nodes.Assign) and guarded and _path(node.target) in self._carriers:
            self.defaults += self._constant(node.node)
        for child in node.iter_child_nodes():
            self._find_guarded_defaults(child, guarded)

    def _constant(self, node: nodes.Node | None) -> list[Any]:
        """The constant value of an expression, as a list of at most one item."""
        if isinstance(node, nodes.Name) and node.name in self._constants:
            return [self._constants[node.name]]
        try:
            return [node.as_const()] if isinstance(node, nodes.Expr) else []
        except Exception:  # not a constant; folding one may fail in any way
            return []


def _constants(tree: nodes.Template) -> Iterator[tuple[str, Any]]:
    for node in tree.find_all(nodes.Assign):
        if isinstance(node.target, nodes.Name) and isinstance(node.node, nodes.Dict | nodes.List | nodes.Tuple):
            try:
                yield node.target.name, node.node.as_const()
            except Exception:  # holds something that is no constant
                continue


def _path(node: nodes.Node) -> str:
    match node:
        case nodes.Name():
            return str(node.name)
        case nodes.NSRef():
            return f"{node.name}.{node.attr}"
        case nodes.Getattr(node=nodes.Name() as owner):
            return f"{owner.name}.{node.attr}"
    return ""


def _unique(values: Iterable[Any]) -> tuple[Any, ...]:
    """The values without duplicates; true and 1 are different."""
    found = {repr(value): value for value in values if isinstance(value, str | int) or value is None}
    return tuple(found.values())[:MAX_VALUES]
