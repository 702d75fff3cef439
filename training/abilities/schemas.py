"""Functions nobody has seen before: names, parameters and values for them, and how a user would say those."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from training.conversations import Call, Json
from training.phrasings import Draw, Split
from training.words import ACTIONS, ANIMALS, CITIES, COLOURS, FOODS, NAMES, QUALITIES, THINGS, anything, made_up, word

TEXT_PARAMETERS = tuple(
    "city name title word text message query place person recipient subject topic label street country song artist path file note user item product room "
    "language genre team brand destination origin owner author keyword comment address".split()
)
NUMBER_PARAMETERS = tuple(
    "count amount age size limit number width height weight price level minutes hours days seconds temperature volume distance speed page rank quantity score "
    "year port floor seats budget".split()
)
FLAG_PARAMETERS = tuple("urgent loud bright fast private public silent active visible verbose strict sorted repeat fresh warm".split())
CHOICE_PARAMETERS = tuple("unit mode colour style format priority direction shape status category season kind quality theme order".split())
VERBS = tuple("get find set make send show start stop open close check list add remove book order play move turn read write count search update create delete measure convert fetch load print".split())


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    kind: str
    required: bool
    choices: tuple[str, ...] = ()

    @property
    def spoken(self) -> str:
        return self.name.replace("_", " ")

    def schema(self, description: str) -> Json:
        found: dict[str, Any] = {"type": "string" if self.kind == "enum" else self.kind}
        if description:
            found["description"] = description
        if self.choices:
            found["enum"] = list(self.choices)
        return found


@dataclass(frozen=True, slots=True)
class Function:
    """A function with the words a user would ask for it: `task` is "plant a lamp" for `plant_lamp`."""

    name: str
    task: str
    parameters: tuple[Parameter, ...]
    schema: Json

    def call(self, arguments: dict[str, Any]) -> Call:
        return Call(self.name, arguments)


def unseen(draw: Draw) -> bool:
    """Whether names must be ones that training never saw: each then has a made-up word that was kept back."""
    return draw.split is Split.HELD_OUT


def function(draw: Draw, bare: bool = False, only: str = "") -> Function:
    """A function of a new name; `bare` is one without parameters, `only` the kind of its single one."""
    verb = draw.pick(VERBS) if draw.chance(0.55) else draw.pick(ACTIONS) if draw.chance(0.5) else made_up(draw)
    noun = draw.pick(THINGS + ANIMALS + FOODS) if draw.chance(0.6) and not unseen(draw) else made_up(draw)
    quality = (draw.pick(QUALITIES) if draw.chance(0.5) else made_up(draw)) if draw.chance(0.25) else ""
    words = [verb, *([quality] if quality else []), noun]
    parameters = () if bare else (_parameter(draw, only, required=True),) if only else _parameters(draw)
    task = f"{verb} {draw.pick(('the', 'a', 'the', 'my'))} {quality + ' ' if quality else ''}{noun}"
    name = _joined(draw, words)
    return Function(name, task, parameters, _schema(draw, name, _described(draw, verb, quality, noun), parameters))


def _joined(draw: Draw, words: list[str]) -> str:
    kind = draw.random.random()
    if kind < 0.65:
        return "_".join(words)
    return words[0] + "".join(w.capitalize() for w in words[1:]) if kind < 0.9 else "-".join(words)


def _described(draw: Draw, verb: str, quality: str, noun: str) -> str:
    what = f"{quality} {noun}" if quality else noun
    return draw.say("{v} the {n}.", "{v} a {n}.", "{v} {n}", "Use this to {w} the {n}.", "{v} the {n} for the user.", v=verb.capitalize(), w=verb, n=what)


def _schema(draw: Draw, name: str, description: str, parameters: tuple[Parameter, ...]) -> Json:
    about = draw.chance(0.5)
    properties = {p.name: p.schema(_about(draw, p) if about else "") for p in parameters}
    body: dict[str, Any] = {"type": "object", "properties": properties}
    if any(p.required for p in parameters) or draw.chance(0.3):
        body["required"] = [p.name for p in parameters if p.required]
    return {"type": "function", "function": {"name": name, "description": description, "parameters": body}}


def _about(draw: Draw, parameter: Parameter) -> str:
    return draw.say("The {p}", "the {p}", "{P}", "The {p} to use", "Which {p}", p=parameter.spoken, P=parameter.spoken.capitalize())


def _parameters(draw: Draw) -> tuple[Parameter, ...]:
    found: dict[str, Parameter] = {}
    for _ in range(draw.pick((0, 1, 1, 1, 2, 2, 2, 3, 3, 4))):
        parameter = _parameter(draw)
        found.setdefault(parameter.name, parameter)
    return tuple(found.values())


def _parameter(draw: Draw, only: str = "", required: bool = False) -> Parameter:
    kind = only or draw.pick(("string", "string", "string", "integer", "integer", "number", "boolean", "enum"))
    known = {"string": TEXT_PARAMETERS, "boolean": FLAG_PARAMETERS, "enum": CHOICE_PARAMETERS}.get(kind, NUMBER_PARAMETERS)
    name = draw.pick(known) if draw.chance(0.6) else made_up(draw)
    if draw.chance(0.2) and not (unseen(draw) and name in known):
        name = f"{draw.pick(QUALITIES) if draw.chance(0.5) else made_up(draw)}_{name}"
    if unseen(draw) and name in known:
        name = f"{made_up(draw)}_{name}"
    return Parameter(name, kind, required or draw.chance(0.75), _choices(draw) if kind == "enum" else ())


def _choices(draw: Draw) -> tuple[str, ...]:
    count = draw.between(2, 5)
    if draw.chance(0.5):
        return tuple(draw.sample(draw.pick((COLOURS, QUALITIES, ANIMALS, FOODS)), count))
    return tuple(dict.fromkeys(made_up(draw) if draw.chance(0.4) else anything(draw) for _ in range(count)))


def value(draw: Draw, parameter: Parameter) -> Any:
    match parameter.kind:
        case "integer":
            found = draw.between(0, draw.pick((9, 99, 999, 9999)))
            return -found if draw.chance(0.06) else found
        case "number":
            return round(draw.random.uniform(0, draw.pick((9, 99, 999))), draw.pick((1, 1, 2))) if draw.chance(0.7) else draw.between(0, 999)
        case "boolean":
            return draw.chance(0.5)
        case "enum":
            return draw.pick(parameter.choices)
        case _:
            return text(draw)


def text(draw: Draw) -> str:
    """What a string parameter may hold."""
    kind = draw.random.random()
    if kind < 0.3:
        return draw.pick(NAMES + CITIES)
    if kind < 0.5:
        return anything(draw)
    if kind < 0.65:
        return made_up(draw).capitalize()
    if kind < 0.85:
        return " ".join(word(draw) for _ in range(draw.between(2, 4)))
    return draw.pick((_date, _time, _code, _mail))(draw)


def _date(draw: Draw) -> str:
    return f"20{draw.between(20, 39)}-{draw.between(1, 12):02}-{draw.between(1, 28):02}"


def _time(draw: Draw) -> str:
    return f"{draw.between(0, 23):02}:{draw.between(0, 59):02}"


def _code(draw: Draw) -> str:
    return f"{draw.pick('ABCDEFGHKLMNPRSTXZ')}{draw.pick('ABCDEFGHKLMNPRSTXZ')}-{draw.between(10, 9999)}"


def _mail(draw: Draw) -> str:
    return f"{made_up(draw)}@{made_up(draw)}.{draw.pick(('com', 'org', 'net'))}"
