"""Dependencies of the routes: the caller's `ServerChat`, and the idempotency key of writes."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header

from palaver.chat.interface import ServerChat
from palaver.errors import BadParameter
from palaver.server.auth import CallerDep
from palaver.server.state import ServiceDep


def caller_chat(caller: CallerDep, service: ServiceDep) -> ServerChat:
    return service.chat(caller.owner_id)


def _idempotency_header(idempotency_key: Annotated[str | None, Header()] = None) -> str | None:
    return idempotency_key


ChatDep = Annotated[ServerChat, Depends(caller_chat)]
IdempotencyKeyDep = Annotated[str | None, Depends(_idempotency_header)]


def idempotency_key(field: str | None, header: str | None) -> str | None:
    """The key from the body's field or the header. Raises BadParameter if they differ."""
    if field is not None and header is not None and field != header:
        raise BadParameter("key", field, "differs from the header Idempotency-Key")
    return header if field is None else field
