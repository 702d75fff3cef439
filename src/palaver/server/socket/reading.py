"""One text of a client read as what it asks for; whatever is wrong with it is said in one sentence."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import ValidationError

from palaver.errors import BadParameter
from palaver.server.bodies import check_json
from palaver.server.errors import NotJson
from palaver.server.settings import Limits
from palaver.server.socket.fields import Fields, Opening, Resume, Stop

Asked = Opening | Stop | Resume
_KINDS: dict[str, type[Stop | Resume]] = {"stop": Stop, "resume": Resume}
_ELSEWHERE = ("path", "file", "url")
NO_FILES = "files of the server are never read for a client: send the data itself"
UNKNOWN = "there is no such field"
T = TypeVar("T", bound=Fields)


def read(text: str, limits: Limits) -> Asked:
    """NotJson or BadParameter for what can't be read."""
    value = _value(text, limits)
    if not isinstance(value, dict):
        raise NotJson("A message must be a JSON object.")
    kind = value.get("type")
    if kind is None:
        return _checked(Opening, {name: one for name, one in value.items() if name != "type"})
    if not isinstance(kind, str) or kind not in _KINDS:
        raise BadParameter("type", _shown(kind), "must be stop or resume; a message without a type opens a turn")
    return _checked(_KINDS[kind], value)


def unknown_field(where: str, value: Any) -> BadParameter:
    """What is said of a field that nobody knows: above all of one that names a file."""
    name = where.rpartition(".")[2].lower()
    return BadParameter(where, _shown(value), NO_FILES if any(word in name for word in _ELSEWHERE) else UNKNOWN)


def _value(text: str, limits: Limits) -> Any:
    try:
        body = text.encode()
    except UnicodeEncodeError:
        raise NotJson("The message holds half of a character (a lone surrogate).") from None
    check_json(body, limits)
    try:
        return json.loads(text)
    except ValueError as error:
        raise NotJson(f"The message is not JSON: {error}.") from None


def _checked(kind: type[T], value: dict[str, Any]) -> T:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = _place(first["loc"])
        if first["type"] == "extra_forbidden":
            raise unknown_field(where, first["input"]) from None
        if first["type"] == "missing":
            raise BadParameter(where, None, "must be given") from None
        raise BadParameter(where, _shown(first["input"]), first["msg"]) from None


def _place(parts: tuple[int | str, ...]) -> str:
    named = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return "".join(named).removeprefix(".") or "message"


def _shown(value: Any) -> Any:
    text = repr(value)
    return value if len(text) <= 80 else text[:77] + "..."
