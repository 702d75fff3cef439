"""Who uses a piece of the cache: what the last conversation leaves is free, what others use stays."""

from __future__ import annotations

COMMON = 16
"""What more conversations than this use belongs to all, so that no list of them grows without bound."""


class Users:
    """The conversations a piece was computed or looked up for. A use without a name never ends."""

    __slots__ = ("_names",)

    def __init__(self, name: str = "") -> None:
        self._names: set[str] | None = {name} if name else None
        """None: everybody's."""

    def add(self, name: str) -> None:
        self.join(Users(name))

    def join(self, others: Users) -> None:
        if self._names is None or others._names is None:
            self._names = None
            return
        self._names |= others._names
        if len(self._names) > COMMON:
            self._names = None

    def leave(self, name: str) -> bool:
        """Whether that was the last one."""
        if self._names is None or name not in self._names:
            return False
        self._names.discard(name)
        return not self._names
