"""Sets of parameters under a name, which the page has too."""

from __future__ import annotations

from palaver.chat.interface import Chat
from palaver.errors import RequestError
from palaver.store import Preset


class NoPreset(RequestError):
    def __init__(self, name: str, names: tuple[str, ...]) -> None:
        known = f"there are {', '.join(names)}" if names else "there are none yet: /preset save NAME makes one"
        super().__init__(f"There is no preset {name!r}; {known}.")


async def preset(chat: Chat, name: str) -> Preset:
    """The one of that name; where there is none, those that there are are told."""
    known = {one.name: one for one in await chat.presets()}
    if name not in known:
        raise NoPreset(name, tuple(known))
    return known[name]
