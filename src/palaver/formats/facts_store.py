"""Facts to JSON values and back, the cache of learned facts, and the overrides in `palaver-format.toml`."""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from platformdirs import user_cache_path

from palaver import __version__
from palaver.errors import BadParameter, PalaverError
from palaver.formats.facts import Confidence, Evidence, Facts
from palaver.formats.switches import TYPES, Switch
from palaver.formats.tool_calls import braces, json_calls, named_json, parameters, python_calls, syntaxes

_FAMILIES: dict[str, Any] = {
    module.__name__.rpartition(".")[2]: module.Syntax
    for module in (json_calls, named_json, parameters, python_calls, braces)
}


_OPEN_TABLES = ("calls.", "switches.")
"""Tables that accept new keys."""
FILE_NAME = "palaver-format.toml"
_VERSION = 2
"""The version of the cached JSON."""


def facts_to_json(facts: Facts) -> dict[str, Any]:
    """The facts as JSON values. The syntax of tool calls has a `family`; switches are keyed by name."""
    values = asdict(facts)
    values["switches"] = {switch.pop("name"): switch for switch in values["switches"]}
    if facts.calls is not None:
        values["calls"] = {"family": syntaxes.syntax_name(facts.calls), **values["calls"]}
    return values


def facts_from_json(values: Mapping[str, Any], base: Facts | None = None) -> Facts:
    """Facts from JSON values, on top of `base`. An unknown key is an error."""
    merged = _merge(facts_to_json(base or Facts()), dict(values), "")
    calls = merged.pop("calls")
    evidence = tuple(_evidence(item) for item in merged.pop("evidence"))
    switches = _switches(merged.pop("switches"))
    built: Facts = _build(Facts, {**merged, "calls": None}, "")
    return _with_calls(replace(built, evidence=evidence, switches=switches), calls)


def _switches(values: Any) -> tuple[Switch, ...]:
    if not isinstance(values, Mapping):
        raise BadParameter("switches", values, "must be a table for each variable")
    out = []
    for name in sorted(values):
        if not isinstance(values[name], Mapping):
            raise BadParameter(f"switches.{name}", values[name], "must be a table")
        switch: Switch = _build(Switch, {**values[name], "name": name}, f"switches.{name}.")
        if switch.type not in TYPES:
            raise BadParameter(f"switches.{name}.type", switch.type, f"must be one of {', '.join(TYPES)}")
        out.append(switch)
    return tuple(out)


def _evidence(item: Mapping[str, Any]) -> Evidence:
    return Evidence(item["fact"], item["seen"], Confidence(item["confidence"]), item["about"])


def _with_calls(facts: Facts, calls: Mapping[str, Any] | None) -> Facts:
    if not calls:
        return facts
    family = calls.get("family")
    if family not in _FAMILIES:
        raise BadParameter("calls.family", family, f"must be one of {', '.join(sorted(_FAMILIES))}")
    rest = {key: value for key, value in calls.items() if key != "family"}
    return replace(facts, calls=_build(_FAMILIES[family], rest, "calls."))


def _merge(base: dict[str, Any], values: dict[str, Any], place: str) -> dict[str, Any]:
    unknown = sorted(set(values) - set(base)) if base and place not in _OPEN_TABLES else []
    if unknown:
        raise BadParameter(
            f"{place}{unknown[0]}", values[unknown[0]], f"there is no such fact; known are {', '.join(base)}"
        )
    out = dict(base)
    for key, value in values.items():
        inner = base.get(key)
        if (
            isinstance(value, dict)
            and isinstance(inner, dict)
            and value.get("family", inner.get("family")) == inner.get("family")
        ):
            out[key] = _merge(inner, value, f"{place}{key}.")
        else:
            out[key] = value
    return out


def _build(kind: Any, values: Mapping[str, Any], place: str) -> Any:
    hints = get_type_hints(kind)
    known = {field.name for field in fields(kind)}
    for key in values:
        if key not in known:
            raise BadParameter(
                f"{place}{key}", values[key], f"there is no such fact; known are {', '.join(sorted(known))}"
            )
    try:
        return kind(**{key: _build_value(hints[key], value, f"{place}{key}.") for key, value in values.items()})
    except TypeError as error:
        raise BadParameter(place.rstrip(".") or "facts", dict(values), str(error)) from None


def _build_value(hint: Any, value: Any, place: str) -> Any:
    arms = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and type(None) in arms:
        return None
    words = next((arm for arm in arms if isinstance(arm, type) and issubclass(arm, StrEnum)), None)
    if words is not None:
        if value not in list(words):
            raise BadParameter(place.rstrip("."), value, f"must be one of {', '.join(words)}")
        return words(value)
    kind = next((arm for arm in arms if is_dataclass(arm)), None)
    if kind is not None and isinstance(value, Mapping):
        return _build(kind, value, place)
    if hint is Any or (kind is None and any(_is_instance(arm, value) for arm in arms)):
        return tuple(value) if isinstance(value, list) else value
    raise BadParameter(place.rstrip("."), value, f"must be {' or '.join(map(_type_name, arms))}")


def _is_instance(hint: Any, value: Any) -> bool:
    if get_origin(hint) is tuple:
        item_type = get_args(hint)[0]
        return isinstance(value, list | tuple) and (item_type is Any or all(isinstance(i, item_type) for i in value))
    return isinstance(hint, type) and isinstance(value, hint)


def _type_name(hint: Any) -> str:
    names = {str: "a text", bool: "true or false", type(None): "nothing"}
    if get_origin(hint) is tuple:
        return "a list" if get_args(hint)[0] is Any else "a list of texts"
    return names.get(hint, "a table")


def apply_overrides(facts: Facts, path: Path) -> Facts:
    """The facts with those of the file on top. An unknown key is an error that names it."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadParameter(path.name, "...", f"can't be read as TOML: {error}") from None
    merged = facts_from_json(values, facts)
    note = Evidence(f"corrected by {path.name}", ", ".join(values), Confidence.GIVEN)
    return replace(merged, evidence=(*merged.evidence, note))


def cached_facts(
    source: str, strings: Mapping[str, str], control: Mapping[str, int], learn: Callable[[], Facts]
) -> Facts:
    """The facts from the cache; if there are none, they are learned and cached."""
    key = json.dumps([_VERSION, __version__, _code_version(), source, sorted(strings.items()), sorted(control)])
    path = user_cache_path("palaver") / "formats" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    cached = _read(path)
    if cached is not None:
        return cached
    facts = learn()
    with suppress(OSError):
        _write(path, json.dumps(facts_to_json(facts), ensure_ascii=False))
    return facts


def _code_version() -> int:
    """Changes with the code of this package, so that changed code never reads facts of older code."""
    return max(path.stat().st_mtime_ns for path in Path(__file__).parent.rglob("*.py"))


def _read(path: Path) -> Facts | None:
    try:
        return facts_from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, PalaverError, KeyError, TypeError):
        return None


def _write(path: Path, text: str) -> None:
    """Writes the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
