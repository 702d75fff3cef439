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
CONNECTORS = "tools/connectors"
THEN_NOTE = "tools/then_note"
AROUND = "tools/around"
NUMBERS = {2: "Two", 3: "Three", 4: "Four"}
RESULT_WORDS = ("status", "result", "value", "total", "name", "state", "level", "answer", "place", "price", "message", "count", "id", "time", "temperature", "code", "place", "colour")
NO_TOOL = (
    "None of my tools can do that, and I'm only a tiny demo model. A real model may know more.",
    "I have no tool for that. I'm a tiny demo model; a real one may help.",
)
EDITED = "[The user changed the arguments to {arguments}]\n"
"""As Palaver writes it before a result."""
DONE = ("done", "ok", "OK", "success", "finished", "sent", "started", "saved")


def _listed_tools(draw: Draw, wanted: list[Function], extra: int) -> tuple[Json, ...]:
    """What is offered: the wanted functions and others, each name once."""
    unique = {f.name: f.schema for f in wanted}
    for other in (function(draw) for _ in range(extra)):
        unique.setdefault(other.name, other.schema)
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
    """The tool's own name, then the whole one where a server's name comes before it: whose tool it is, is looked up last."""
    given = ", ".join(f"{k} {json.dumps(v, ensure_ascii=False)}" for k, v in call.arguments.items())
    own = _own_name(call)
    named = own if own == call.name else f'{own}: "{call.name}"'
    return f"{named} fits" + (f": {given}." if given else ", without arguments.")


def _own_name(call: Call) -> str:
    """The name without that of its server."""
    return call.name.rsplit("__", 1)[-1]


def _quoted(*calls: Call) -> tuple[str, ...]:
    """The own names in quotes, as the prompt has them: in quotes a name has the same tokens everywhere."""
    return tuple(f'"{_own_name(call)}"' for call in calls)


def _called(user: str, calls: tuple[Call, ...]) -> Exchange:
    wanted = [{"name": c.name, "arguments": dict(c.arguments)} for c in calls]
    plan = f"{NUMBERS[len(calls)]} calls: {', '.join(_quoted(*calls))}.\n" if len(calls) > 1 else ""
    return Exchange(user, plan + "\n".join(_thought(c) for c in calls), "", Expect("tool calls", "calls", wanted), calls)


def one_call(draw: Draw) -> tuple[Exchange, tuple[Json, ...]]:
    if draw.chance(0.3) and not unseen(draw):
        return known_call(draw)
    wanted = function(draw)
    arguments = _arguments(draw, wanted)
    exchange = _called(_request(draw, wanted, arguments), (wanted.call(arguments),))
    return exchange, _listed_tools(draw, [wanted], draw.between(0, 4))


def known_call(draw: Draw) -> tuple[Exchange, tuple[Json, ...]]:
    kind, server = draw.pick(known_tools.KINDS), known_tools.servers(draw)
    wanted, user, arguments = known_tools.drawn(draw, kind, server())
    beside = draw.sample(known_tools.apart(known_tools.KINDS, [kind]), draw.between(0, 5))
    others = known_tools.schemas(draw, beside, server)
    exchange = _called(user, (wanted.call(arguments),))
    return exchange, _listed_tools(draw, [wanted, *others], draw.between(0, 2))


def one_string(draw: Draw) -> tuple[Exchange, tuple[Json, ...]]:
    """A function of an invented name with one parameter, a text."""
    wanted = function(draw, only="string")
    arguments = _arguments(draw, wanted)
    exchange = _called(_request(draw, wanted, arguments), (wanted.call(arguments),))
    return exchange, _listed_tools(draw, [wanted], draw.between(0, 3))


Wish = tuple[Function, str, dict[str, Any], known_tools.Kind]


def _wishes(draw: Draw, kinds: tuple[known_tools.Kind, ...], count: int) -> tuple[list[Wish], tuple[Json, ...]]:
    """Requests for different everyday tools, and the tools that are offered: those, and others of the same server."""
    server = known_tools.servers(draw)
    chosen = draw.sample(kinds, count)
    while any(known_tools.apart([kind], [other]) == [] for at, kind in enumerate(chosen) for other in chosen[:at]):
        chosen = draw.sample(kinds, count)
    found = [(*known_tools.drawn(draw, kind, server(), count > 1), kind) for kind in chosen]
    if draw.chance(0.2):
        again = draw.pick([kind for kind in chosen if kind.parameters] or chosen)
        schema = next(wish[0] for wish in found if wish[3] is again)
        if again.parameters and len(found) < 4:
            _, asked, given = known_tools.drawn(draw, again, plain=True)
            renamed = dict(zip((p.name for p in schema.parameters), given.values(), strict=True))
            found.append((schema, asked, renamed, again))
    beside = known_tools.apart(kinds, chosen)
    others = known_tools.schemas(draw, draw.sample(beside, min(len(beside), draw.between(0, 5))), server)
    return found, _listed_tools(draw, [wish[0] for wish in found] + others, draw.pick((0, 0, 1)))


def several_calls(draw: Draw) -> tuple[Exchange, tuple[Json, ...]]:
    """Several everyday requests in one message; in training more often three, and of all kinds."""
    demo, counts = ((known_tools.DEMO,) * 2, (2, 2, 2, 3, 3)) if unseen(draw) else ((known_tools.DEMO,), (2, 2, 3, 3, 3))
    wishes, listed = _wishes(draw, draw.pick((*demo, known_tools.KINDS)), draw.pick(counts))
    asked = _all_at_once(draw, wishes)
    if draw.chance(0.2) and not unseen(draw):
        asked = draw.plain(AROUND, r=asked, w=_within(asked), n="\n")
    return _called(asked, _calls(wishes)), listed


def _calls(wishes: list[Wish]) -> tuple[Call, ...]:
    return tuple(wanted.call(arguments) for wanted, _, arguments, _ in wishes)


def _all_at_once(draw: Draw, wishes: list[Wish]) -> str:
    """Requests joined to one sentence, as sentences, or as a list. A text ends in one sentence where its quotes do."""
    requests = [wish[1] for wish in wishes]
    if len(requests) == 1:
        return requests[0]
    texts = [(asked, str(given)) for _, asked, arguments, kind in wishes if kind.said is None for given in arguments.values()]
    clear = all(" " not in given or f'"{given}"' in asked for asked, given in texts)
    kind = draw.random.random()
    if kind < 0.55 and clear:
        parts = [one.rstrip(".?! =") for one in requests]
        joined = parts[0] + "".join((draw.form(CONNECTORS) if at == len(parts) - 1 else ", ") + _within(one) for at, one in enumerate(parts) if at)
        return joined + (requests[-1][-1] if requests[-1][-1] in ".?!" else draw.pick((".", "?", "")))
    ended = [one if one[-1] in ".?!" else one + "." for one in requests]
    if kind < 0.68:
        sign = draw.pick(("- ", "* ", "", "#. "))
        return "\n".join(sign.replace("#", str(at)) + one for at, one in enumerate(ended, 1))
    said = ended[:1]
    for one in ended[1:]:
        opener = draw.pick(("", "", "And ", "Also, ", "Then "))
        said.append(opener + (_within(one) if opener else one))
    return " ".join(said)


def told(draw: Draw) -> Sample:
    """Everyday calls, one or several, with their results; the reply tells them."""
    wishes, listed = _wishes(draw, known_tools.TELLING, draw.pick((1, 1, 2, 2, 3)))
    exchange = _called(_all_at_once(draw, wishes), _calls(wishes))
    user, called = exchange.messages()
    results, sentences, wanted = [], [], []
    for _, _, arguments, kind in wishes:
        content, sentence, _ = _returned(draw, kind, arguments)
        if draw.chance(0.06):
            content = draw.pick(("Error: timed out", "The server is not reachable.", "Error: no access"))
            sentence = f"That didn't work: {content}"
        results.append(Message("tool", content))
        sentences.append(sentence)
        wanted.append(sentence)
    reply = Message("assistant", ("\n" if any("\n" in one for one in sentences) else " ").join(sentences), _gathered(results))
    return Sample((user, called, *results, reply), listed, True, Expect("answers from results", "contains_all", wanted))


def _returned(draw: Draw, kind: known_tools.Kind, arguments: dict[str, Any]) -> tuple[str, str, str]:
    """What a tool returns, the sentence that tells it, and the result alone. Sometimes the user has changed the arguments: then
    Palaver writes that before the result."""
    assert kind.result is not None
    before = ""
    if kind.parameters and draw.chance(0.06):
        arguments = dict(zip(arguments, known_tools.drawn(draw, kind)[2].values(), strict=True))
        before = EDITED.format(arguments=json.dumps(arguments, ensure_ascii=False))
    content, sentence = kind.result(draw, arguments)
    return before + content, sentence, content


def _gathered(results: list[Message]) -> str:
    thought = {1: "The result is there.", 2: "Both results are there."}.get(len(results), "All results are there.")
    return thought + " " + " ".join(one.content.replace("\n", " ") for one in results)


def chained(draw: Draw) -> Sample:
    """A call whose result is needed for the next one: the first call, the second, or the answer is to be learned."""
    first_kind = draw.pick(tuple(kind for kind in known_tools.TELLING if kind.bank in ("now", "calculate", "dice", "notes")))
    note = next(kind for kind in known_tools.TELLING if kind.bank == "note")
    server = known_tools.servers(draw)
    first, asked, arguments = known_tools.drawn(draw, first_kind, server(), True)
    second, _, _ = known_tools.drawn(draw, note, server())
    returned, sentence, content = _returned(draw, first_kind, arguments)
    then = draw.plain(THEN_NOTE)
    user = Message("user", asked.rstrip(".?!") + then)
    call, noted = first.call(arguments), second.call({second.parameters[0].name: content.replace("\n", ", ")})
    own, then_own = _quoted(call, noted)
    others = known_tools.schemas(draw, tuple(kind for kind in known_tools.DEMO if kind not in (first_kind, note)), server) if draw.chance(0.6) else []
    listed = _listed_tools(draw, [first, second, *others], 0)
    opening = Message("assistant", "", f"First {own}, then {then_own} with its result.\n{_thought(call)}", (call,))
    following = Message("assistant", "", f"The result is there. {returned.replace(chr(10), ' ')}\n{_thought(noted)}", (noted,))
    closing = Message("assistant", f"{sentence} I noted it.", "The result is there. Noted.")
    history = (user, opening, Message("tool", returned), following, Message("tool", draw.pick((f"Noted: {content}", "ok", "saved"))), closing)
    last = draw.pick((1, 3, 3, 5))
    if last == 5:
        return Sample(history, listed, True, Expect("chained calls", "contains", "noted"))
    wanted = [{"name": c.name, "arguments": dict(c.arguments)} for c in history[last].calls]
    return Sample(history[: last + 1], listed, True, Expect("chained calls", "calls", wanted))


def no_demo_tool(draw: Draw, other: Callable[[Draw], Exchange]) -> tuple[Exchange, tuple[Json, ...]]:
    """The everyday tools are there and the question needs none of them."""
    found = other(draw)
    listed = _listed_tools(draw, known_tools.schemas(draw, known_tools.DEMO, known_tools.servers(draw)), draw.pick((0, 0, 1)))
    return Exchange(found.user, found.thinking, found.answer, Expect("no call", "no_call")), listed


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
    server = known_tools.servers(draw)
    first, asked, arguments = known_tools.drawn(draw, server=server())
    second, also_asked, more = known_tools.drawn(draw, server=server()) if draw.chance(0.5) else _wish(draw)
    if second.task == first.task or second.name == first.name:
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
    missing = draw.pick(known_tools.KINDS)
    _, user, _ = known_tools.drawn(draw, missing)
    others = [kind for kind in known_tools.apart(known_tools.KINDS, [missing]) if kind.bank != "search"]
    tools = _listed_tools(draw, known_tools.schemas(draw, draw.sample(others, 3), known_tools.servers(draw)), 1)
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
