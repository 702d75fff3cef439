"""Commands for parameters: sampling, stop strings, the system prompt, presets."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from rich.table import Table as Grid
from rich.text import Text

from palaver.chat.interface import ModelCard
from palaver.chat.parameters import NAMES
from palaver.errors import BadParameter, RequestError
from palaver.repl.command_table import ArgumentChoice, CommandGroup
from palaver.repl.sanitize import one_line, sanitize
from palaver.repl.settings import find_preset
from palaver.sampling import NUMBERS, STRINGS, SamplingParameter, check_strings

if TYPE_CHECKING:
    from palaver.repl.session import Session

commands = CommandGroup("Parameters")

ALIASES = {"temperature": ("temp",), "max_tokens": ("max_new_tokens", "max"), "repetition_penalty": ("rep",)}
OVERFLOW = "what happens when the context is full: refuse, or shorten (the oldest turns are left out)"
_RESET_WORDS = ("default", "reset")


async def _names(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
    name, space, _ = arguments.partition(" ")
    if space:
        return await _values(name)(session, arguments)
    numbers = [ArgumentChoice(one.name, one.meaning) for one in NUMBERS.values()]
    return [
        *numbers,
        *(ArgumentChoice(one, meaning) for one, meaning in STRINGS.items()),
        ArgumentChoice("overflow", OVERFLOW),
    ]


def _values(name: str) -> Callable[[Session, str], Awaitable[Iterable[ArgumentChoice]]]:
    async def values(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
        if name == "overflow":
            return [ArgumentChoice("refuse"), ArgumentChoice("shorten")]
        parameter = NUMBERS.get(_full_name(name))
        if parameter is None:
            return []
        default = getattr((await session.chat.model()).defaults, parameter.name)
        none = [ArgumentChoice("none", "no limit")] if parameter.nullable else []
        return [ArgumentChoice("default", f"the model's: {format_value(default)}"), *none]

    return values


@commands.command("set", "show or set a parameter of the replies to come", "NAME [VALUE]", (), _names)
async def set_(session: Session, arguments: str) -> None:
    name, value = _split_setting(arguments)
    if not name:
        await params(session, "")
    else:
        await _set(session, _full_name(name), value)


@commands.command("params", "all parameters: what is set, the model's default, what they may be", "", ("parameters",))
async def params(session: Session, arguments: str) -> None:
    card = await session.chat.model()
    given = (await session.cursor.settings()).parameters
    grid = Grid.grid(padding=(0, 2, 0, 0))
    for parameter in NUMBERS.values():
        is_set = parameter.name in given
        value = given[parameter.name] if is_set else _default(card, parameter)
        grid.add_row(
            Text(parameter.name, style="name" if is_set else "none"),
            format_value(value),
            Text("set" if is_set else "default", style="note"),
            Text(f"{format_bounds(parameter)} · {parameter.meaning}", style="note"),
        )
    for name in sorted(set(given) - set(NUMBERS)):
        grid.add_row(Text(name, style="name"), one_line(format_value(given[name]), 40), Text("set", style="note"), "")
    session.screen.show(grid)


async def _set(session: Session, name: str, value: str) -> None:
    if name in NUMBERS:
        await _set_number(session, NUMBERS[name], value)
    elif name in STRINGS:
        await _set_strings(session, name, value)
    elif name == "overflow":
        if value:
            await session.cursor.set_parameters(overflow=None if value in _RESET_WORDS else value)
        current = (await session.cursor.settings()).parameters.get("overflow", "refuse")
        session.screen.note(f"overflow = {current} · {OVERFLOW}")
    else:
        known = ", ".join((*NUMBERS, *STRINGS, "overflow"))
        reason = "/think sets that" if name in NAMES else f"there is no such parameter; known are {known}"
        raise BadParameter(name, value, reason)


async def _set_number(session: Session, parameter: SamplingParameter, value: str) -> None:
    if value in _RESET_WORDS:
        await session.cursor.set_parameters(**{parameter.name: None})
    elif value:
        parsed = parameter.parse(value)
        await session.cursor.set_parameters(**{parameter.name: parsed})
    card = await session.chat.model()
    given = (await session.cursor.settings()).parameters
    default = _default(card, parameter)
    current = given.get(parameter.name, default)
    origin = f"the model's default is {format_value(default)}" if parameter.name in given else "the model's default"
    session.screen.note(
        f"{parameter.name} = {format_value(current)} · {origin} · {format_bounds(parameter)} · {parameter.meaning}"
    )


async def _set_strings(session: Session, name: str, value: str) -> None:
    """Adds one string per call; a quoted one may contain `\\n`."""
    given = tuple((await session.cursor.settings()).parameters.get(name, ()))
    if value in ("clear", "none", *_RESET_WORDS):
        await session.cursor.set_parameters(**{name: None})
    elif value:
        await session.cursor.set_parameters(**{name: list(check_strings(name, (*given, _unquote(name, value))))})
    current = (await session.cursor.settings()).parameters.get(name, ())
    shown = ", ".join(json.dumps(one, ensure_ascii=False) for one in current) or "none"
    session.screen.note(f"{name}: {sanitize(shown)} · {STRINGS[name]}")


@commands.command("stop", "show the stop strings, add one, or clear them", '["TEXT" | clear]')
async def stop(session: Session, arguments: str) -> None:
    await _set_strings(session, "stop", arguments.strip())


@commands.command("system", "show or set the system prompt", "[TEXT | clear]")
async def system(session: Session, arguments: str) -> None:
    if arguments.strip():
        await session.cursor.set_system("" if arguments.strip() == "clear" else arguments)
    current = (await session.cursor.settings()).system
    session.screen.show(
        Text(f"The system prompt is: {sanitize(current)}" if current else "There is no system prompt.", style="note")
    )


async def _presets(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
    if " " not in arguments:
        return [ArgumentChoice("save"), ArgumentChoice("load"), ArgumentChoice("delete")]
    verb = arguments.split()[0]
    return [ArgumentChoice(f"{verb} {one_line(one.name)}", replaces_all=True) for one in await session.chat.presets()]


@commands.command(
    "preset",
    "keep the system prompt and the parameters under a name, or take them from one",
    "save | load | delete NAME",
    (),
    _presets,
)
async def preset(session: Session, arguments: str) -> None:
    match arguments.split(maxsplit=1):
        case ["save", name]:
            current = await session.cursor.settings()
            await session.chat.save_preset(name, current.system, current.parameters)
            what = "The system prompt and the parameters" if current.system else "The parameters"
            session.screen.note(f"{what} are kept as {name!r}.")
        case ["load", name]:
            found = await find_preset(session.chat, name)
            await session.cursor.replace_parameters(found.parameters)
            if found.system:
                await session.cursor.set_system(found.system)
            await params(session, "")
        case ["delete", name]:
            await session.chat.delete_preset((await find_preset(session.chat, name)).name)
            session.screen.note(f"The preset {name!r} is gone.")
        case []:
            names = ", ".join(one_line(one.name) for one in await session.chat.presets())
            session.screen.note(f"Presets: {names or 'none yet: /preset save NAME makes one'}")
        case _:
            raise RequestError("It is /preset save NAME, load NAME or delete NAME.")


def _parameter_command(parameter: SamplingParameter) -> Callable[[Session, str], Awaitable[None]]:
    async def run(session: Session, arguments: str) -> None:
        await _set_number(session, parameter, arguments.strip())

    return run


for _parameter in NUMBERS.values():
    commands.command(
        _parameter.name,
        _parameter.meaning,
        f"[{'NUMBER | none' if _parameter.nullable else 'NUMBER'} | default]",
        ALIASES.get(_parameter.name, ()),
        _values(_parameter.name),
    )(_parameter_command(_parameter))


def format_bounds(parameter: SamplingParameter) -> str:
    low, high = (f"{int(one):,}" if parameter.read is int else f"{one:g}" for one in parameter.bounds)
    return f"from {low} to {high}{', or none' if parameter.nullable else ''}"


def format_value(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _default(card: ModelCard, parameter: SamplingParameter) -> Any:
    return "drawn anew" if parameter.name == "seed" else getattr(card.defaults, parameter.name)


def _full_name(name: str) -> str:
    return next((full for full, short in ALIASES.items() if name in short), name)


def _split_setting(arguments: str) -> tuple[str, str]:
    """`name value` or `name=value`."""
    text = arguments.strip()
    place = next((place for place, one in enumerate(text) if one.isspace() or one == "="), len(text))
    return text[:place].lower(), text[place + 1 :].strip()


def _unquote(name: str, value: str) -> str:
    if not value.startswith('"'):
        return value
    try:
        text = json.loads(value)
    except ValueError:
        raise BadParameter(name, value, "the quoted text is not closed, or holds an escape that is none") from None
    return str(text)
