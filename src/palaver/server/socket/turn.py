"""A turn of the socket: a reply for whoever reads it, on whichever socket, as long as somebody may."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from palaver.server.socket.record import Record
from palaver.store.records import new_id


@dataclass(eq=False)
class Turn:
    owner: str
    lasting: bool = False
    """Whether the reply is a conversation's, which goes on when nobody reads it."""
    id: str = field(default_factory=new_id)
    record: Record = field(default_factory=Record)
    readers: int = 0
    halt: Callable[[], None] | None = None
    """Ends its making, while it is made."""

    def stop(self) -> None:
        """Ends it within one step, whatever it does just now; what was said stays. One that is over stays so."""
        if self.halt is not None:
            self.halt()
