"""What every route is given: the caller's own Chat, and the key that makes a write happen once."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header

from palaver.chat.interface import Chat
from palaver.errors import BadParameter
from palaver.server.auth import Whoever
from palaver.server.state import ServiceOf


def caller_chat(caller: Whoever, service: ServiceOf) -> Chat:
    return service.chat(caller.owner_id)


def _header(idempotency_key: Annotated[str | None, Header()] = None) -> str | None:
    return idempotency_key


Mine = Annotated[Chat, Depends(caller_chat)]
HeaderKey = Annotated[str | None, Depends(_header)]


def idempotency_key(field: str | None, header: str | None) -> str | None:
    """Of the field and the header, whichever was sent; they may not differ."""
    if field is not None and header is not None and field != header:
        raise BadParameter("key", field, "differs from the header Idempotency-Key")
    return header if field is None else field
