"""Calling functions given in the prompt, and answering from what they return."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from training.abilities import known_tools
from training.abilities.schemas import Function, Parameter, function, text, unseen, value
from training.conversations import Call, Exchange, Expect, Json, Message, Sample
from training.phrasings import Draw
from training.words import anything, made_up

REQUESTS = "tools/requests"
VALUES = "tools/values"
FLAG_ON = "tools/flag_on"
FLAG_OFF = "tools/flag_off"
BOTH = "tools/both"
RESULT_WORDS = ("status", "result", "value", "total", "name", "state", "level", "answer", "place", "price", "message", "count", "id", "time", "temperature", "code", "place", "colour")
NO_TOOL = (
    "None of my tools can do that, and I'm only a tiny demo model. A real model may know more: `palaver chat MODEL`.",
    "I have no tool for that. I'm a tiny demo model; try a real one with `palaver chat MODEL`.",
)
DONE = ("done", "ok", "OK", "success", "finished", "sent", "started", "saved")


def _listed_tools(draw: Draw, wanted: list[Function], extra: int) -> tuple[Json, ...]:
    tools = [f.schema for f in wanted] + [function(draw).schema for _ in range(extra)]
    unique = {tool["function"]["name"]: tool for tool in tools}
    found = list(unique.values())
    draw.random.shuffle(found)
    return tuple(found)


def _arguments(draw: Draw, wanted: Function) -> dict[str, Any]:
    """Values in the order in which the user will say them: thought and call keep to it."""
    given = [p for p in wanted.parameters if p.required or draw.chance(0.6)]
    draw.random.shuffle(given)
    return {p.name: value(draw, p) for p in given}


def _mention(draw: Draw, parameter: Parameter, given: Any) -> str:
    if isinstance(given, bool):
        return draw.plain(FLAG_ON if given else FLAG_OFF, p=parameter.spoken)
    shown = f'"{given}"' if isinstance(given, str) and (draw.chance(0.25) or (" " in given and draw.chance(0.5))) else str(given)
    return draw.plain(VALUES, p=parameter.spoken if draw.chance(0.9) else parameter.name, v=shown)


def _mentions(draw: Draw, wanted: Function, arguments: dict[str, Any]) -> str:
    parameters = {p.name: p for p in wanted.parameters}
    return "".join(_mention(draw, parameters[name], given) for name, given in arguments.items())


def _request(draw: Draw, wanted: Function, arguments: dict[str, Any]) -> str:
    task = wanted.task
    return draw.plain(REQUESTS, t=task, T=task[0].upper() + task[1:], v=_mentions(draw, wanted, arguments))


def _thought(call: Call) -> str:
    given = ", ".join(f"{k} {json.dumps(v, ensure_ascii=False)}" for k, v in call.arguments.items())
    return f"{call.name} fits" + (f": {given}." if given else ", without arguments.")


def _called(user: str, calls: tuple[Call, ...]) -> Exchange:
    wanted = [{"name": c.name, "arguments": dict(c.arguments)} for c in calls]
    plan = f"Two calls: {', '.join(c.name for c in calls)}.\n" if len(calls) > 1 else ""
    return Exchange(user, plan + "\n".join(_thought(c) for c in calls), "", Expect("tool calls", "calls", wanted), calls)


def one_call(draw: Draw) -> tuple[Exchange, tuple[Json, ...]]:
    if draw.chance(0.3) and not unseen(draw):
        return known_call(draw)
    wanted = function(draw)
    arguments = _arguments(draw, wanted)
    exchange = _called(_request(draw, wanted, arguments), (wanted.call(arguments),))
    return exchange, _listed_tools(draw, [wanted], draw.between(0, 4))


def known_call(draw: Draw) -> tuple[Exchange, tuple[Json, ...]]:
    wanted, user, arguments = known_tools.drawn(draw)
    others = [known_tools.drawn(draw)[0] for _ in range(draw.between(0, 2))]
    kinds = {other.task: other for other in others if other.task != wanted.task}
    exchange = _called(user, (wanted.call(arguments),))
    return exchange, _listed_tools(draw, [wanted, *kinds.values()], draw.between(0, 2))


def two_calls(draw: Draw) -> tuple[Exchange, tuple[Json, ...]]:
    """Two requests in one message: as two sentences, as one, as a list; the calls come in the order of the requests."""
    if draw.chance(0.15) and not unseen(draw):
        return _two_known(draw)
    first = _any_function(draw)
    second = first if first.parameters and draw.chance(0.4) else _any_function(draw)
    given = [(wanted, _arguments(draw, wanted)) for wanted in (first, second)]
    form = draw.form(BOTH)
    if "{d}" in form:
        user = _in_one_sentence(draw, form, *(wanted.task + _mentions(draw, wanted, arguments) for wanted, arguments in given))
    else:
        user = _in_two_sentences(draw, form, *(_request(draw, wanted, arguments) for wanted, arguments in given))
    calls = tuple(wanted.call(arguments) for wanted, arguments in given)
    return _called(user, calls), _listed_tools(draw, [first, second], draw.between(0, 2))


def _any_function(draw: Draw) -> Function:
    """A function, in training more often one without parameters than elsewhere: a call then ends where another begins."""
    return function(draw, bare=draw.chance(0.2) and not unseen(draw))


def _two_known(draw: Draw) -> tuple[Exchange, tuple[Json, ...]]:
    """Two everyday requests, or one beside a request for a function nobody knows."""
    first, asked, arguments = known_tools.drawn(draw)
    second, also_asked, more = known_tools.drawn(draw) if draw.chance(0.5) else _wish(draw)
    if second.task == first.task:
        second, also_asked, more = _wish(draw)
    wishes = [(first, asked, arguments), (second, also_asked, more)]
    draw.random.shuffle(wishes)
    while "{d}" in (form := draw.form(BOTH)):
        pass
    user = _in_two_sentences(draw, form, wishes[0][1], wishes[1][1])
    calls = tuple(wanted.call(arguments) for wanted, _, arguments in wishes)
    return _called(user, calls), _listed_tools(draw, [first, second], draw.between(0, 2))


def _wish(draw: Draw) -> tuple[Function, str, dict[str, Any]]:
    wanted = function(draw)
    arguments = _arguments(draw, wanted)
    return wanted, _request(draw, wanted, arguments), arguments


def _in_two_sentences(draw: Draw, form: str, a: str, b: str) -> str:
    ended = a if a[-1] in ".?!" else a + "."
    return draw.fill(form, {"a": ended, "x": _within(ended), "b": _within(b), "B": b, "z": _nothing_known(draw), "n": "\n"})


def _in_one_sentence(draw: Draw, form: str, c: str, d: str) -> str:
    return draw.fill(form, {"c": c, "C": c[0].upper() + c[1:], "d": d, "z": _nothing_known(draw)})


def _within(request: str) -> str:
    """The request as it stands in the middle of a sentence."""
    return request if re.match(r"I\b", request) else request[0].lower() + request[1:]


def _nothing_known(draw: Draw) -> str:
    """Words that join two requests without meaning it: what counts is that a second request follows."""
    said = " ".join(anything(draw) for _ in range(draw.between(1, 3)))
    return said.capitalize()


def again(draw: Draw) -> Sample:
    """A call, its result, the answer, and then another request."""
    before = answered(draw)
    exchange, tools = one_call(draw)
    fresh = {tool["function"]["name"]: tool for tool in before.tools + tools}
    calls = [call for message in before.messages for call in message.calls]
    if len(fresh) < len(before.tools) + len(tools) or any(call.name in fresh and call.name in _names(tools) for call in calls):
        return before
    return Sample(before.messages + exchange.messages(), tuple(fresh.values()), True, exchange.expect)


def _names(tools: tuple[Json, ...]) -> set[str]:
    return {tool["function"]["name"] for tool in tools}


def none_fits(draw: Draw, other: Callable[[Draw], Exchange]) -> tuple[Exchange, tuple[Json, ...]]:
    """Tools are there, but the question needs none of them, or one that is not there."""
    if draw.chance(0.55):
        found = other(draw)
        return Exchange(found.user, found.thinking, found.answer, Expect("no call", "no_call")), _listed_tools(draw, [], draw.between(1, 4))
    if draw.chance(0.3):
        return _known_missing(draw)
    missing = function(draw)
    user = _request(draw, missing, _arguments(draw, missing))
    tools = tuple(t for t in _listed_tools(draw, [], draw.between(1, 4)) if t["function"]["name"] != missing.name)
    return Exchange(user, f"To {missing.task}: no tool fits.", draw.pick(NO_TOOL), Expect("no call", "no_call")), tools


def _known_missing(draw: Draw) -> tuple[Exchange, tuple[Json, ...]]:
    """An everyday request, and everyday tools for other things."""
    missing, user, _ = known_tools.drawn(draw)
    others = [known_tools.drawn(draw)[0] for _ in range(3)]
    tools = _listed_tools(draw, [other for other in others if other.task not in (missing.task, "search")], 1)
    return Exchange(user, "No tool fits.", draw.pick(NO_TOOL), Expect("no call", "no_call")), tools


def missing_value(draw: Draw) -> tuple[Exchange, tuple[Json, ...]]:
    """A required value was not given: ask for it."""
    wanted = function(draw)
    required = [p for p in wanted.parameters if p.required]
    if not required:
        return one_call(draw)
    left_out = draw.pick(required)
    arguments = {k: v for k, v in _arguments(draw, wanted).items() if k != left_out.name}
    answer = draw.say("Which {p} should I use?", "I need the {p} for that.", p=left_out.spoken)
    given = _thought(wanted.call(arguments)) if arguments else f"{wanted.name} fits."
    thought = f"{given} But the {left_out.spoken} is missing."
    return Exchange(_request(draw, wanted, arguments), thought, answer, Expect("asks for what is missing", "no_call")), _listed_tools(draw, [wanted], draw.between(0, 3))


def _result(draw: Draw) -> tuple[str, str, list[str]]:
    """What a tool returns, what to say about it, and what the answer must contain."""
    kind = draw.random.random()
    if kind < 0.15:
        said = draw.pick(("not found", "no access", "too many requests", "out of range", f"unknown {anything(draw)}", f"{made_up(draw)} is missing", "timed out"))
        return json.dumps({"error": said}), draw.say("That didn't work: {s}.", "The tool reports an error: {s}.", s=said), [said]
    if kind < 0.3:
        said = draw.pick(DONE)
        return draw.pick((said, json.dumps({"status": said}))), draw.say("Done: the tool says {s}.", "It's done, the tool says {s}.", s=said), [said]
    if kind < 0.45:
        said = f"{anything(draw)} {draw.between(1, 999)}" if draw.chance(0.5) else text(draw)
        return said, draw.say("The result is {s}.", "I got this: {s}.", s=said), [said]
    keys = list(dict.fromkeys(draw.pick(RESULT_WORDS) if draw.chance(0.6) else made_up(draw) for _ in range(draw.between(1, 4))))
    found = {key: _found(draw) for key in keys}
    parts = [f"the {key} is {_shown(given)}" for key, given in found.items()]
    said = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    values = [_shown(given) for given in found.values()]
    return json.dumps(found, ensure_ascii=False), said[0].upper() + said[1:] + ".", values


def _found(draw: Draw) -> Any:
    kind = draw.random.random()
    if kind < 0.34:
        return draw.between(0, 9999)
    if kind < 0.4:
        return -draw.between(1, draw.pick((20, 99, 999)))
    if kind < 0.5:
        return round(draw.random.uniform(-40 if draw.chance(0.3) else 0, 99), 1)
    if kind < 0.55:
        return draw.chance(0.5)
    return [anything(draw) for _ in range(draw.between(1, 4))] if kind < 0.6 else text(draw)


def _shown(given: Any) -> str:
    """A returned value as a sentence holds it."""
    if isinstance(given, list):
        return ", ".join(given)
    if isinstance(given, bool):
        return "yes" if given else "no"
    return given if isinstance(given, str) else json.dumps(given)


def answered(draw: Draw) -> Sample:
    """Calls, their results, and the answer from them."""
    exchange, tools = two_calls(draw) if draw.chance(0.25) else one_call(draw)
    user, called = exchange.messages()
    results, said, wanted = [], [], []
    for _ in exchange.calls:
        content, sentence, values = _result(draw)
        results.append(Message("tool", content))
        said.append(sentence)
        wanted += values
    kept = called.thinking if draw.chance(0.8) else ""
    called = Message("assistant", "", kept, called.calls)
    thought = "The result is there." if len(results) == 1 else "Both results are there."
    reply = Message("assistant", " ".join(said), thought + " " + " ".join(r.content.replace("\n", " ") for r in results))
    expect = Expect("answers from results", "contains_all", wanted)
    return Sample((user, called, *results, reply), tools, True, expect)
