"""Everyday tools with the requests people make of them, under names that change from conversation to conversation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from training.abilities.schemas import Function, Parameter
from training.phrasings import Draw
from training.words import ANIMALS, CITIES, FOODS, NAMES, QUALITIES, THINGS, anything, made_up

ROOMS = ("kitchen", "hall", "bedroom", "cellar", "garden", "bathroom", "office", "attic", "living room", "garage")
MONEY = ("euros", "dollars", "pounds", "yen", "francs", "crowns", "rupees", "pesos", "dinars", "lira")
LANGUAGES = ("French", "German", "Spanish", "Italian", "Polish", "Dutch", "Greek", "Turkish", "Latin", "Swedish")
MONTHS = tuple(range(1, 13))


@dataclass(frozen=True, slots=True)
class Kind:
    """A sort of tool: names it goes by, what it says of itself, and its parameters with how their values are drawn."""

    bank: str
    names: tuple[str, ...]
    description: str
    parameters: tuple[tuple[str, str, Callable[[Draw], Any]], ...]


def _place(draw: Draw) -> str:
    return draw.pick(CITIES) if draw.chance(0.7) else made_up(draw).capitalize()


def _person(draw: Draw) -> str:
    return draw.pick(NAMES) if draw.chance(0.7) else made_up(draw).capitalize()


def _clock(draw: Draw) -> str:
    return f"{draw.between(0, 23):02}:{draw.between(0, 59):02}"


def _date(draw: Draw) -> str:
    return f"20{draw.between(20, 39)}-{draw.pick(MONTHS):02}-{draw.between(1, 28):02}"


def _sentence(draw: Draw) -> str:
    return draw.say(
        "I am late", "the {x} is {q}", "buy {f}", "bring the {x}", "see you at {n}", "{x} and {y}", "call {p}", "the {a} is hungry",
        x=anything(draw), y=anything(draw), q=draw.pick(QUALITIES), f=draw.pick(FOODS), n=draw.between(1, 12), p=draw.pick(NAMES), a=draw.pick(ANIMALS),
    )  # fmt: skip


def _topic(draw: Draw) -> str:
    return draw.say("{x}", "{q} {x}s", "{x} and {y}", x=anything(draw), y=draw.pick(THINGS), q=draw.pick(QUALITIES))


def _song(draw: Draw) -> str:
    return f"{draw.pick(QUALITIES).capitalize()} {anything(draw).capitalize()}"


def _path(draw: Draw) -> str:
    return f"{draw.pick(('', 'notes/', 'docs/', '/tmp/'))}{anything(draw)}.{draw.pick(('txt', 'md', 'csv', 'py', 'json'))}"


def _symbol(draw: Draw) -> str:
    return "".join(draw.pick("ABCDEFGHKLMNOPRSTVXZ") for _ in range(draw.between(3, 4)))


def _small(draw: Draw) -> int:
    return draw.between(2, 90)


def _from(options: tuple[str, ...]) -> Callable[[Draw], str]:
    return lambda draw: draw.pick(options)


KINDS = (
    Kind("weather", ("get_weather", "weather", "forecast", "current_weather"), "Weather at a place.", (("city", "string", _place),)),
    Kind("timer", ("set_timer", "timer", "start_timer"), "Starts a timer.", (("minutes", "integer", _small),)),
    Kind("alarm", ("set_alarm", "alarm", "wake_up"), "Sets an alarm.", (("time", "string", _clock),)),
    Kind("message", ("send_message", "send_text", "notify"), "Sends a message to a person.", (("person", "string", _person), ("text", "string", _sentence))),
    Kind("search", ("web_search", "search", "search_web", "lookup"), "Searches the web.", (("query", "string", _topic),)),
    Kind("music", ("play_music", "play_song", "player"), "Plays a song.", (("song", "string", _song),)),
    Kind("light", ("set_light", "switch_light", "lamp_control"), "Turns a light on or off.", (("room", "string", _from(ROOMS)), ("state", "enum", _from(("on", "off"))))),
    Kind("convert", ("convert_currency", "exchange", "currency"), "Converts money.", (("amount", "integer", _small), ("from", "string", _from(MONEY)), ("to", "string", _from(MONEY)))),
    Kind("table", ("book_table", "reserve_table", "restaurant_booking"), "Books a table.", (("people", "integer", _small), ("time", "string", _clock))),
    Kind("note", ("add_note", "take_note", "save_note"), "Keeps a note.", (("text", "string", _sentence),)),
    Kind("event", ("create_event", "add_event", "calendar_add"), "Adds an event to the calendar.", (("title", "string", _song), ("date", "string", _date))),
    Kind("stock", ("get_stock_price", "stock_price", "quote"), "The price of a share.", (("symbol", "string", _symbol),)),
    Kind("translate", ("translate", "translate_text", "translator"), "Translates text.", (("text", "string", _sentence), ("language", "string", _from(LANGUAGES)))),
    Kind("file", ("read_file", "open_file", "cat_file"), "Reads a file.", (("path", "string", _path),)),
    Kind("time", ("get_time", "current_time", "clock"), "The time at a place.", (("city", "string", _place),)),
)  # fmt: skip


def drawn(draw: Draw) -> tuple[Function, str, dict[str, Any]]:
    """A tool, a request for it, and the arguments of the call."""
    kind = draw.pick(KINDS)
    arguments = {name: pick(draw) for name, _, pick in kind.parameters}
    names = {name: _renamed(draw, name) for name in arguments}
    parameters = tuple(Parameter(names[n], how, True, ("on", "off") if how == "enum" else ()) for n, how, _ in kind.parameters)
    called = draw.pick(kind.names) if draw.chance(0.8) else f"{draw.pick(kind.names)}_{made_up(draw)}"
    properties = {p.name: p.schema(_about(draw, p)) for p in parameters}
    body = {"type": "object", "properties": properties, "required": [p.name for p in parameters]}
    schema = {"type": "function", "function": {"name": called, "description": kind.description, "parameters": body}}
    request = draw.ask(f"known_tools/{kind.bank}", **arguments)
    return Function(called, kind.bank, parameters, schema), request, {names[n]: v for n, v in arguments.items()}


def _renamed(draw: Draw, name: str) -> str:
    others = {"city": "location", "person": "recipient", "text": "content", "query": "q", "minutes": "duration", "room": "place"}
    return others.get(name, name) if draw.chance(0.3) else name


def _about(draw: Draw, parameter: Parameter) -> str:
    return f"The {parameter.spoken}" if draw.chance(0.5) else ""


