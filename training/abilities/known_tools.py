"""Everyday tools with the requests people make of them, under names that change from conversation to conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from training.abilities.schemas import Function, Parameter
from training.phrasings import Draw
from training.words import ANIMALS, CITIES, FOODS, NAMES, QUALITIES, THINGS, anything, in_words, made_up

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
    said: Callable[[Draw, dict[str, Any]], dict[str, Any]] | None = None
    """What the user says in place of the arguments, where that is something else."""
    result: Callable[[Draw, dict[str, Any]], tuple[str, str]] | None = None
    """What the tool returns, and the sentence that tells it, where that is known."""
    others: tuple[str, ...] = ()
    """Other descriptions."""


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


_SIGNS = {"+": ("+", "plus"), "-": ("-", "minus", "−"), "*": ("*", "times", "x", "×", "multiplied by"), "/": ("/", "divided by", "÷", "over")}
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTH_NAMES = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December")
_DICE_WORDS = {4: "four-sided", 8: "eight-sided", 10: "ten-sided", 12: "twelve-sided", 20: "twenty-sided"}


def _expression(draw: Draw) -> str:
    """Two or three numbers with signs between them, as a calculator takes them."""
    numbers = [draw.between(2, draw.pick((9, 99, 999, 9999))) for _ in range(3 if draw.chance(0.2) else 2)]
    signs = [draw.pick("+-**/") for _ in numbers[1:]]
    return " ".join(str(one) for pair in zip(numbers, [*signs, ""], strict=True) for one in pair).strip()


def _said_expression(draw: Draw, arguments: dict[str, Any]) -> dict[str, Any]:
    """The expression as it is, or in the words and signs that people use for it."""
    shown = arguments["expression"]
    if draw.chance(0.15):
        return {"expression": shown.replace(" ", "")}
    if draw.chance(0.5):
        shown = " ".join(draw.pick(_SIGNS[one]) if one in _SIGNS else one for one in shown.split())
    return {"expression": shown}


def _computed(draw: Draw, arguments: dict[str, Any]) -> tuple[str, str]:
    found = eval(arguments["expression"])
    shown = f"{found:.12g}" if isinstance(found, float) else str(found)
    return shown, f"{arguments['expression']} is {shown}."


def _now(draw: Draw, arguments: dict[str, Any]) -> tuple[str, str]:
    at = f"{draw.between(0, 23):02}:{draw.between(0, 59):02}"
    day = f"{draw.between(1, 28):02} {draw.pick(MONTH_NAMES)} 20{draw.between(24, 39)}"
    shown = draw.pick((at, f"{draw.pick(WEEKDAYS)}, {day}, {at}", f"{day}, {at}", f"{_date(draw)} {at}", f"{_date(draw)}T{at}:{draw.between(0, 59):02}"))
    return shown, f"It is {shown}."


def _dice(draw: Draw) -> str:
    return f"{draw.pick((1, 1, 2, 2, 3, 4, 5))}d{draw.pick((6, 6, 6, 4, 8, 10, 12, 20, 100))}"


def _said_dice(draw: Draw, arguments: dict[str, Any]) -> dict[str, Any]:
    count, sides = (int(one) for one in arguments["dice"].split("d"))
    number = str(count) if draw.chance(0.4) else in_words(count)
    if draw.chance(0.35) or (sides != 6 and sides not in _DICE_WORDS):
        return {"dice": arguments["dice"]}
    if count == 1:
        return {"dice": draw.pick(("a die", "one die", "a dice") if sides == 6 else (f"a {_DICE_WORDS[sides]} die", f"a d{sides}"))}
    return {"dice": f"{number} dice" if sides == 6 else f"{number} {_DICE_WORDS[sides]} dice"}


def _rolled(draw: Draw, arguments: dict[str, Any]) -> tuple[str, str]:
    count, sides = (int(one) for one in arguments["dice"].split("d"))
    rolled = [draw.between(1, sides) for _ in range(count)]
    shown = str(rolled[0]) if count == 1 else f"{' + '.join(map(str, rolled))} = {sum(rolled)}"
    return shown, f"You rolled {shown}."


def _noted(draw: Draw, arguments: dict[str, Any]) -> tuple[str, str]:
    text = next(iter(arguments.values()))
    shown = draw.pick((f"Noted: {text}", f"Noted: {text}", "ok", "saved"))
    return shown, f"I noted: {text}."


def _notes(draw: Draw, arguments: dict[str, Any]) -> tuple[str, str]:
    if draw.chance(0.15):
        return "There are no notes.", "There are no notes."
    lines = [_sentence(draw) for _ in range(draw.between(1, 4))]
    return "\n".join(lines), "Your notes:\n" + "\n".join(f"- {line}" for line in lines)


KINDS = (
    Kind("now", ("clock", "clock", "now", "get_current_time", "date_and_time"), "Tells the date and the time of day.", (), None, _now, ("The current date and time.", "Tells the time.")),
    Kind("calculate", ("calculate", "calculate", "calculator", "compute", "evaluate"), "Computes an arithmetic expression, such as 17 * 23.", (("expression", "string", _expression),), _said_expression, _computed, ("Evaluates an expression.", "A calculator.")),
    Kind("dice", ("roll_dice", "roll_dice", "dice", "roll"), "Rolls dice, such as 2d6.", (("dice", "string", _dice),), _said_dice, _rolled, ("Rolls dice.",)),
    Kind("notes", ("read_notes", "read_notes", "list_notes", "get_notes"), "Reads all notes.", (), None, _notes, ("Shows the notes.",)),
    Kind("weather", ("get_weather", "weather", "forecast", "current_weather"), "Weather at a place.", (("city", "string", _place),)),
    Kind("timer", ("set_timer", "timer", "start_timer"), "Starts a timer.", (("minutes", "integer", _small),)),
    Kind("alarm", ("set_alarm", "alarm", "wake_up"), "Sets an alarm.", (("time", "string", _clock),)),
    Kind("message", ("send_message", "send_text", "notify"), "Sends a message to a person.", (("person", "string", _person), ("text", "string", _sentence))),
    Kind("search", ("web_search", "search", "search_web", "lookup"), "Searches the web.", (("query", "string", _topic),)),
    Kind("music", ("play_music", "play_song", "player"), "Plays a song.", (("song", "string", _song),)),
    Kind("light", ("set_light", "switch_light", "lamp_control"), "Turns a light on or off.", (("room", "string", _from(ROOMS)), ("state", "enum", _from(("on", "off"))))),
    Kind("convert", ("convert_currency", "exchange", "currency"), "Converts money.", (("amount", "integer", _small), ("from", "string", _from(MONEY)), ("to", "string", _from(MONEY)))),
    Kind("table", ("book_table", "reserve_table", "restaurant_booking"), "Books a table.", (("people", "integer", _small), ("time", "string", _clock))),
    Kind("note", ("add_note", "take_note", "save_note"), "Keeps a note.", (("text", "string", _sentence),), None, _noted, ("Writes a note into a file.",)),
    Kind("event", ("create_event", "add_event", "calendar_add"), "Adds an event to the calendar.", (("title", "string", _song), ("date", "string", _date))),
    Kind("stock", ("get_stock_price", "stock_price", "quote"), "The price of a share.", (("symbol", "string", _symbol),)),
    Kind("translate", ("translate", "translate_text", "translator"), "Translates text.", (("text", "string", _sentence), ("language", "string", _from(LANGUAGES)))),
    Kind("file", ("read_file", "open_file", "cat_file"), "Reads a file.", (("path", "string", _path),)),
    Kind("time", ("get_time", "current_time", "clock"), "The time at a place.", (("city", "string", _place),)),
)  # fmt: skip


TELLING = tuple(kind for kind in KINDS if kind.result is not None)
DEMO = tuple(kind for kind in KINDS if kind.bank in ("now", "calculate", "dice", "note", "notes"))
SERVERS = ("demo", "demo", "tools", "local", "home", "server", "mcp", "my", "everyday")


def drawn(draw: Draw, kind: Kind | None = None, server: str | None = None, plain: bool = False) -> tuple[Function, str, dict[str, Any]]:
    """A tool, a request for it, and the arguments of the call. A tool of a server has its name before its own; a `plain`
    request can be joined with others."""
    kind = kind or draw.pick(KINDS)
    arguments = {name: pick(draw) for name, _, pick in kind.parameters}
    names = {name: _renamed(draw, name) for name in arguments}
    parameters = tuple(Parameter(names[n], how, True, ("on", "off") if how == "enum" else ()) for n, how, _ in kind.parameters)
    if server is None:
        server = _server(draw) if draw.chance(0.25) else ""
    called = draw.pick(kind.names) if draw.chance(0.8) or server else f"{draw.pick(kind.names)}_{made_up(draw)}"
    called = f"{server}__{called}" if server else called
    properties = {p.name: p.schema(_about(draw, p)) for p in parameters}
    body = {"type": "object", "properties": properties, "required": [p.name for p in parameters]}
    about = draw.pick(kind.others) if kind.others and draw.chance(0.3) else kind.description
    schema = {"type": "function", "function": {"name": called, "description": about, "parameters": body}}
    request = (draw.plain if plain else draw.ask)(f"known_tools/{kind.bank}", **(kind.said(draw, arguments) if kind.said else arguments))
    return Function(called, kind.bank, parameters, schema), request, {names[n]: v for n, v in arguments.items()}


def apart(kinds: Sequence[Kind], chosen: Sequence[Kind]) -> list[Kind]:
    """The kinds whose tools can be offered beside the chosen ones: none has a name that one of those goes by."""
    taken = {name for kind in chosen for name in kind.names}
    return [kind for kind in kinds if not taken & set(kind.names)]


def servers(draw: Draw) -> Callable[[], str | None]:
    """Whose tools are offered: all of one server, of two or three, or each as it comes. A call gives the next tool's."""
    kind = draw.random.random()
    if kind < 0.45:
        only = _server(draw) if draw.chance(0.67) else ""
        return lambda: only
    if kind < 0.8:
        several = [_server(draw) for _ in range(draw.between(2, 3))] + [""] * draw.chance(0.4)
        return lambda: draw.pick(several)
    return lambda: None


def _server(draw: Draw) -> str:
    return draw.pick(SERVERS) if draw.chance(0.5) else made_up(draw)


def schemas(draw: Draw, kinds: Sequence[Kind], server: Callable[[], str | None] = lambda: None) -> list[Function]:
    """Tools of these kinds, to list beside those that a request needs."""
    return [drawn(draw, kind, server())[0] for kind in kinds]


def _renamed(draw: Draw, name: str) -> str:
    others = {"city": "location", "person": "recipient", "text": "content", "query": "q", "minutes": "duration", "room": "place"}
    return others.get(name, name) if draw.chance(0.3) else name


def _about(draw: Draw, parameter: Parameter) -> str:
    return f"The {parameter.spoken}" if draw.chance(0.5) else ""
