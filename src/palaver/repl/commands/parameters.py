"""Commands for parameters: sampling, stop strings, the system prompt, presets."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from rich.table import Table as Grid
from rich.text import Text

from palaver.chat.interface import ModelCard
from palaver.chat.parameters import MEDIA_LIMITS, NAMES
from palaver.errors import BadParameter, RequestError, UnknownParameter
from palaver.repl import strings
from palaver.repl.command_table import ArgumentChoice, CommandGroup
from palaver.repl.settings import find_preset
from palaver.repl.strings import CommandText
from palaver.repl.text import format_value, one_line, sanitize
from palaver.sampling import CHOICES, NUMBERS, OFF_WORDS, STRINGS, SamplingParameter, check_choice, check_strings

if TYPE_CHECKING:
    from palaver.repl.session import Session

commands = CommandGroup(strings.GROUP_PARAMETERS)

ALIASES = {"temperature": ("temp",), "max_tokens": ("max_new_tokens", "max"), "repetition_penalty": ("rep",)}
_RESET_WORDS = ("default", "reset")
_RANDOM_WORDS = ("random", "-1")
"""Words for a seed that is drawn for each reply."""


async def _names(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
    name, space, _ = arguments.partition(" ")
    if space:
        return await _values(name)(session, arguments)
    numbers = [ArgumentChoice(one.name, one.meaning) for one in NUMBERS.values()]
    return [
        *numbers,
        *(ArgumentChoice(one, meaning) for one, meaning in STRINGS.items()),
        *(ArgumentChoice(one, " · ".join(words)) for one, words in CHOICES.items()),
        ArgumentChoice("overflow", strings.OVERFLOW),
        *(ArgumentChoice(one, strings.MEDIA_PARAMETERS[one]) for one in MEDIA_LIMITS),
    ]


def _values(name: str) -> Callable[[Session, str], Awaitable[Iterable[ArgumentChoice]]]:
    async def values(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
        if name == "overflow":
            return [ArgumentChoice("refuse"), ArgumentChoice("shorten")]
        if name in CHOICES:
            return [ArgumentChoice(one) for one in CHOICES[name]]
        parameter = NUMBERS.get(full_name(name))
        if parameter is None:
            return []
        default = getattr((await session.chat.model()).defaults, parameter.name)
        none = [ArgumentChoice("none", strings.NO_LIMIT)] if parameter.nullable else []
        default_choice = strings.PARAMETER_DEFAULT_CHOICE.format(value=format_value(default))
        return [ArgumentChoice("default", default_choice), *none]

    return values


@commands.command("set", choices=_names)
async def set_(session: Session, arguments: str) -> None:
    name, value = _split_setting(arguments)
    if not name:
        await params(session, "")
    else:
        await _set(session, full_name(name), value)


@commands.command("params", ("parameters",))
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
            Text(strings.PARAMETER_SET if is_set else strings.PARAMETER_UNSET, style="note"),
            Text(f"{format_bounds(parameter)} · {parameter.meaning}", style="note"),
        )
    for name in sorted(set(given) - set(NUMBERS)):
        grid.add_row(
            Text(name, style="name"),
            one_line(format_value(given[name]), 40),
            Text(strings.PARAMETER_SET, style="note"),
            "",
        )
    session.screen.show(grid)


async def _set(session: Session, name: str, value: str) -> None:
    if name in NUMBERS:
        await set_number(session, NUMBERS[name], value)
    elif name in STRINGS:
        await _set_strings(session, name, value)
    elif name in CHOICES:
        await _set_choice(session, name, value.lower())
    elif name == "overflow":
        if value:
            await session.cursor.set_parameters(overflow=None if value.lower() in _RESET_WORDS else value)
        current = (await session.cursor.settings()).parameters.get("overflow", "refuse")
        line = strings.PARAMETER_VALUE.format(name="overflow", value=current)
        session.screen.note(f"{line} · {strings.OVERFLOW}")
    elif name in MEDIA_LIMITS:
        await _set_media(session, name, value.lower())
    elif name in NAMES:
        raise RequestError(strings.USE_THINK)
    else:
        raise UnknownParameter(name, value, (*NUMBERS, *STRINGS, *CHOICES, "overflow", *MEDIA_LIMITS))


async def _set_media(session: Session, name: str, value: str) -> None:
    """One of the numbers inside the parameter `media`."""
    given = dict((await session.cursor.settings()).parameters.get("media") or {})
    low, high = MEDIA_LIMITS[name]
    if value in _RESET_WORDS:
        given.pop(name, None)
    elif value:
        if not value.isascii() or not value.isdigit() or not low <= int(value) <= high:
            raise BadParameter(name, value, f"must be from {low} to {high}")
        given[name] = int(value)
    if value:
        await session.cursor.set_parameters(media=given or None)
    line = strings.PARAMETER_VALUE.format(name=name, value=given.get(name, strings.MODEL_DEFAULT))
    session.screen.note(f"{line} · {low}–{high} · {strings.MEDIA_PARAMETERS[name]}")


async def _set_choice(session: Session, name: str, value: str) -> None:
    if value:
        await session.cursor.set_parameters(**{name: None if value in _RESET_WORDS else check_choice(name, value)})
    default = getattr((await session.chat.model()).defaults, name)
    current = (await session.cursor.settings()).parameters.get(name, default)
    line = strings.PARAMETER_VALUE.format(name=name, value=current)
    session.screen.note(f"{line} · {' · '.join(CHOICES[name])}")


async def set_number(session: Session, parameter: SamplingParameter, value: str) -> None:
    word = value.lower()
    is_random = parameter.name == "seed" and word in (*_RANDOM_WORDS, *OFF_WORDS)
    if word in _RESET_WORDS or is_random or (parameter.name == "temperature" and word in OFF_WORDS):
        await session.cursor.set_parameters(**{parameter.name: None})
    elif value:
        parsed = parameter.parse(value)
        await session.cursor.set_parameters(**{parameter.name: parsed})
    card = await session.chat.model()
    given = (await session.cursor.settings()).parameters
    default = _default(card, parameter)
    current = given.get(parameter.name, default)
    line = strings.PARAMETER_VALUE.format(name=parameter.name, value=format_value(current))
    origin = strings.PARAMETER_IS_DEFAULT
    if parameter.name in given:
        origin = strings.PARAMETER_DEFAULT.format(value=format_value(default))
    session.screen.note(" · ".join((line, origin, format_bounds(parameter), parameter.meaning)))


async def _set_strings(session: Session, name: str, value: str) -> None:
    """Adds one string per call; a quoted one may contain `\\n`."""
    given = tuple((await session.cursor.settings()).parameters.get(name, ()))
    if value.lower() in ("clear", *OFF_WORDS, *_RESET_WORDS):
        await session.cursor.set_parameters(**{name: None})
    elif value:
        await session.cursor.set_parameters(**{name: list(check_strings(name, (*given, _unquote(name, value))))})
    current = (await session.cursor.settings()).parameters.get(name, ())
    shown = ", ".join(json.dumps(one, ensure_ascii=False) for one in current) or strings.NONE
    session.screen.note(strings.STRINGS_VALUE.format(name=name, values=sanitize(shown), meaning=STRINGS[name]))


@commands.command("stop")
async def stop(session: Session, arguments: str) -> None:
    await _set_strings(session, "stop", arguments.strip())


@commands.command("system")
async def system(session: Session, arguments: str) -> None:
    if arguments.strip():
        await session.cursor.set_system("" if arguments.strip().lower() in ("clear", *OFF_WORDS) else arguments)
    current = (await session.cursor.settings()).system
    session.screen.note(strings.SYSTEM_PROMPT.format(text=sanitize(current)) if current else strings.NO_SYSTEM_PROMPT)


async def _presets(session: Session, arguments: str) -> Iterable[ArgumentChoice]:
    if " " not in arguments:
        return [ArgumentChoice("save"), ArgumentChoice("load"), ArgumentChoice("delete")]
    verb = arguments.split()[0]
    return [ArgumentChoice(f"{verb} {one_line(one.name)}", replaces_all=True) for one in await session.chat.presets()]


@commands.command("preset", choices=_presets)
async def preset(session: Session, arguments: str) -> None:
    match arguments.split(maxsplit=1):
        case ["save", name]:
            current = await session.cursor.settings()
            await session.chat.save_preset(name, current.system, current.parameters)
            session.screen.note(strings.PRESET_SAVED.format(name=name))
        case ["load", name]:
            found = await find_preset(session.chat, name)
            await session.cursor.replace_parameters(found.parameters)
            if found.system:
                await session.cursor.set_system(found.system)
            await params(session, "")
        case ["delete", name]:
            await session.chat.delete_preset((await find_preset(session.chat, name)).name)
            session.screen.note(strings.PRESET_DELETED.format(name=name))
        case []:
            names = ", ".join(one_line(one.name) for one in await session.chat.presets())
            session.screen.note(strings.PRESETS.format(names=names) if names else strings.NO_PRESETS)
        case _:
            raise RequestError(strings.PRESET_USAGE)


def _parameter_command(parameter: SamplingParameter) -> Callable[[Session, str], Awaitable[None]]:
    async def run(session: Session, arguments: str) -> None:
        await set_number(session, parameter, arguments.strip())

    return run


for _parameter in NUMBERS.values():
    _usage = strings.PARAMETER_USAGE_NULLABLE if _parameter.nullable else strings.PARAMETER_USAGE
    commands.command(
        _parameter.name,
        ALIASES.get(_parameter.name, ()),
        _values(_parameter.name),
        CommandText(_parameter.meaning, _usage),
    )(_parameter_command(_parameter))


def format_bounds(parameter: SamplingParameter) -> str:
    low, high = map(parameter.format, parameter.bounds)
    text = strings.PARAMETER_RANGE_OR_NONE if parameter.nullable else strings.PARAMETER_RANGE
    return text.format(low=low, high=high)


def _default(card: ModelCard, parameter: SamplingParameter) -> Any:
    return strings.RANDOM_SEED if parameter.name == "seed" else getattr(card.defaults, parameter.name)


def full_name(name: str) -> str:
    """The parameter of that name or short name."""
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
        raise BadParameter(name, value, strings.BAD_QUOTES) from None
    return str(text)
