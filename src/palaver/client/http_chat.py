"""Chat over HTTP: the same interface as in-process, held with a server."""

from __future__ import annotations

import re
import secrets
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from palaver.chat.interface import ContextUsage, ConversationChange, ModelCard, ModelState, ReplyToken, SentMessage
from palaver.chat.turn_log import LogEntry
from palaver.client import streams
from palaver.client.connection import Connection, parse_response
from palaver.errors import BadParameter
from palaver.messages import Message, Part
from palaver.store import Blob, Conversation, Cursor, NotFound, Preset, SearchHit, StoredMessage, TreeNode
from palaver.store.errors import Unstorable
from palaver.wire import conversations as wire
from palaver.wire import messages, requests
from palaver.wire import model as cards
from palaver.wire import turns as seen

B = TypeVar("B", bound=BaseModel)
READY_S = 25.0
_ID = re.compile(r"[A-Za-z0-9_-]{1,200}")


class HttpChat:
    """Enter it, or close it when done. Writes are given a key of their own, so that after a cut they are sent again
    and still happen once; streams go on by themselves from the last number."""

    def __init__(
        self,
        url: str,
        key: str = "",
        *,
        patience: float = 60.0,
        verify: bool | str | ssl.SSLContext = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`verify` is what a server over TLS is known by, where the usual authorities don't vouch for it: the file of
        another one, or an `SSLContext` such as `palaver.client.trust` makes."""
        self._server = Connection(url, key, patience=patience, verify=verify, transport=transport)

    async def __aenter__(self) -> HttpChat:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._server.close()

    @property
    def url(self) -> str:
        return self._server.url

    # the model

    async def model(self) -> ModelCard:
        return (await self._server.get(cards.ModelCard, "model")).value()

    async def models(self) -> tuple[str, ...]:
        return tuple(await self._server.get(list[str], "models"))

    async def load(self, name: str) -> ModelCard:
        body = _asked(requests.Load, name=name)
        return (await self._server.post(cards.ModelCard, "model/load", body)).value()

    async def unload(self) -> ModelCard:
        return (await self._server.post(cards.ModelCard, "model/unload")).value()

    async def ready(self) -> ModelCard:
        while True:
            card = (await self._server.get(cards.ModelCard, "model/ready", wait=READY_S)).value()
            if card.state is not ModelState.LOADING:
                return card

    # conversations

    async def create(
        self,
        *,
        title: str = "",
        system: str = "",
        parameters: Mapping[str, Any] | None = None,
        tags: Iterable[str] = (),
        key: str | None = None,
    ) -> Conversation:
        body = _asked(
            requests.Create,
            title=title,
            system=system,
            parameters=dict(parameters or {}),
            tags=list(tags),
            key=_key(key),
        )
        return (await self._server.post(wire.Conversation, "conversations", body, again=True)).value()

    async def conversation(self, id: str) -> Conversation:
        return (await self._server.get(wire.Conversation, _conversation(id))).value()

    async def conversations(
        self,
        *,
        limit: int = 50,
        before: str | None = None,
        tag: str | None = None,
        title: str = "",
        deleted: bool = False,
    ) -> tuple[Conversation, ...]:
        found = await self._server.get(
            list[wire.Conversation], "conversations", limit=limit, before=before, tag=tag, title=title, deleted=deleted
        )
        return tuple(one.value() for one in found)

    async def change(
        self,
        id: str,
        *,
        title: str | None = None,
        system: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        tags: Iterable[str] | None = None,
    ) -> Conversation:
        body = _asked(
            requests.ChangeConversation,
            title=title,
            system=system,
            parameters=None if parameters is None else dict(parameters),
            tags=None if tags is None else list(tags),
        )
        answer = await self._server.send("PATCH", _conversation(id), body=body, again=True)
        return parse_response(answer, wire.Conversation).value()

    async def delete(self, id: str) -> None:
        await self._server.send("DELETE", _conversation(id))

    async def undelete(self, id: str) -> Conversation:
        return (await self._server.post(wire.Conversation, f"{_conversation(id)}/undelete", again=True)).value()

    async def forget(self, id: str) -> None:
        await self._server.send("POST", f"{_conversation(id)}/forget", again=True)

    async def tags(self) -> tuple[str, ...]:
        return tuple(await self._server.get(list[str], "tags"))

    async def search(self, query: str, limit: int = 20) -> tuple[SearchHit, ...]:
        found = await self._server.get(list[wire.Hit], "search", query=query, limit=limit)
        return tuple(hit.value() for hit in found)

    @asynccontextmanager
    async def changes(self) -> AsyncIterator[AsyncIterator[ConversationChange]]:
        """After a cut a Change says "missed": what happened meanwhile is not known."""
        async with aclosing(streams.resumable_stream(self._server, "events", lambda: {"changes": True})) as sent:
            await anext(sent)  # the connection is there
            await anext(sent)  # and the server listens: nothing is missed from now on
            async with aclosing(streams.conversation_changes(sent)) as told:
                yield told

    # what a user likes to set

    async def presets(self) -> tuple[Preset, ...]:
        return tuple(one.value() for one in await self._server.get(list[wire.Preset], "presets"))

    async def save_preset(self, name: str, system: str, parameters: Mapping[str, Any]) -> Preset:
        body = _asked(requests.SavePreset, name=name, system=system, parameters=dict(parameters))
        return parse_response(await self._server.send("PUT", "presets", body=body, again=True), wire.Preset).value()

    async def delete_preset(self, name: str) -> None:
        await self._server.send("POST", "presets/delete", body=_asked(requests.DeletePreset, name=name))

    # the tree

    async def message(self, id: str) -> StoredMessage:
        return (await self._server.get(wire.Stored, _message(id))).value()

    async def path(self, leaf: str) -> tuple[StoredMessage, ...]:
        return _stored(await self._server.get(list[wire.Stored], f"{_message(leaf)}/path"))

    async def siblings(self, id: str) -> tuple[StoredMessage, ...]:
        return _stored(await self._server.get(list[wire.Stored], f"{_message(id)}/siblings"))

    async def nodes(self, conversation_id: str) -> tuple[TreeNode, ...]:
        found = await self._server.get(list[wire.Node], f"{_conversation(conversation_id)}/nodes")
        return tuple(node.value() for node in found)

    async def newest_leaf(self, conversation_id: str, start: str | None = None) -> str | None:
        path = f"{_conversation(conversation_id)}/newest-leaf"
        return (await self._server.get(wire.Leaf, path, start=start)).id

    async def append(
        self, conversation_id: str, parent: str | None, message: Message, *, key: str | None = None
    ) -> StoredMessage:
        path = f"{_conversation(conversation_id)}/messages"
        body = _asked(requests.Append, parent=parent, message=_message_of(message), key=_key(key))
        return (await self._server.post(wire.Stored, path, body, again=True)).value()

    async def edit(self, message_id: str, parts: Iterable[Part | Blob], *, key: str | None = None) -> StoredMessage:
        told = [_part_of(part) for part in parts]
        body = _asked(requests.Edit, parts=told, key=_key(key))
        return (await self._server.post(wire.Stored, f"{_message(message_id)}/edit", body, again=True)).value()

    # where a client stands

    async def cursor(self, conversation_id: str, client: str) -> Cursor:
        path = f"{_conversation(conversation_id)}/cursor"
        return (await self._server.get(wire.Cursor, path, client=client)).value()

    async def move(self, conversation_id: str, client: str, to: str | None) -> Cursor:
        body = _asked(requests.Move, client=client, to=to)
        path = f"{_conversation(conversation_id)}/cursor"
        return parse_response(await self._server.send("PUT", path, body=body, again=True), wire.Cursor).value()

    async def undo(self, conversation_id: str, client: str) -> Cursor:
        return await self._walk(conversation_id, client, "undo")

    async def redo(self, conversation_id: str, client: str) -> Cursor:
        return await self._walk(conversation_id, client, "redo")

    async def _walk(self, conversation_id: str, client: str, way: str) -> Cursor:
        path = f"{_conversation(conversation_id)}/cursor/{way}"
        return (await self._server.post(wire.Cursor, path, _asked(requests.Client, client=client))).value()

    # turns

    async def say(
        self,
        conversation_id: str,
        parent: str | None,
        message: Message,
        *,
        parameters: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> SentMessage:
        body = _asked(
            requests.Say,
            parent=parent,
            message=_message_of(message),
            parameters=dict(parameters or {}),
            key=_key(key),
        )
        path = f"{_conversation(conversation_id)}/say"
        return (await self._server.post(wire.Said, path, body, again=True)).value()

    async def reply(
        self,
        conversation_id: str,
        parent: str,
        *,
        parameters: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> StoredMessage:
        body = _asked(requests.Reply, parent=parent, parameters=dict(parameters or {}), key=_key(key))
        path = f"{_conversation(conversation_id)}/replies"
        return (await self._server.post(wire.Stored, path, body, again=True)).value()

    async def go_on(self, reply_id: str, *, key: str | None = None) -> StoredMessage:
        body = _asked(requests.Continue, key=_key(key))
        return (await self._server.post(wire.Stored, f"{_turn(reply_id)}/continue", body, again=True)).value()

    async def fork(
        self, reply_id: str, tokens: int, instead: int | None = None, *, key: str | None = None
    ) -> StoredMessage:
        body = _asked(requests.Fork, tokens=tokens, instead=instead, key=_key(key))
        return (await self._server.post(wire.Stored, f"{_turn(reply_id)}/fork", body, again=True)).value()

    @asynccontextmanager
    async def events(self, reply_id: str, after: int = 0) -> AsyncIterator[AsyncIterator[LogEntry]]:
        place = streams.StreamPosition(after)
        path = f"{_turn(reply_id)}/events"
        async with aclosing(streams.resumable_stream(self._server, path, lambda: {"after": place.number})) as sent:
            await anext(sent)  # raises now what it would be refused with
            async with aclosing(streams.log_entries(sent, place)) as entries:
                yield entries

    async def stop(self, reply_id: str) -> None:
        await self._server.send("POST", f"{_turn(reply_id)}/stop", again=True)

    async def answer_now(self, reply_id: str) -> None:
        await self._server.send("POST", f"{_turn(reply_id)}/answer-now", again=True)

    async def tokens(self, reply_id: str) -> tuple[ReplyToken, ...]:
        found = await self._server.get(list[seen.Token], f"{_turn(reply_id)}/tokens")
        return tuple(token.value() for token in found)

    async def raw(self, reply_id: str) -> str:
        return (await self._server.get(seen.Raw, f"{_turn(reply_id)}/raw")).text

    async def gauge(
        self, conversation_id: str, leaf: str | None, parameters: Mapping[str, Any] | None = None
    ) -> ContextUsage:
        body = _asked(requests.MeasureContext, leaf=leaf, parameters=dict(parameters or {}))
        path = f"{_conversation(conversation_id)}/gauge"
        return (await self._server.post(seen.Gauge, path, body, again=True)).value()

    # in and out

    async def export(self, conversation_id: str, form: str, leaf: str | None = None) -> str:
        path = f"{_conversation(conversation_id)}/export"
        answer = await self._server.send("GET", path, query={"form": form, "leaf": leaf}, again=True)
        return answer.content.decode()

    async def take_in(self, text: str) -> tuple[Conversation, ...]:
        try:
            content = text.encode()
        except UnicodeEncodeError as error:
            raise Unstorable(error) from None
        answer = await self._server.send("POST", "import", content=content, media_type="text/plain", again=True)
        return tuple(one.value() for one in parse_response(answer, list[wire.Conversation]))

    async def put_blob(self, data: bytes) -> str:
        kind = "application/octet-stream"
        answer = await self._server.send("POST", "blobs", content=data, media_type=kind, again=True)
        return parse_response(answer, wire.BlobPut).digest

    async def blob(self, digest: str) -> bytes:
        return (await self._server.send("GET", _path("blobs", "blob", digest), again=True)).content


def _conversation(id: str) -> str:
    return _path("conversations", "conversation", id)


def _message(id: str) -> str:
    return _path("messages", "message", id)


def _turn(id: str) -> str:
    return _path("turns", "message", id)


def _path(place: str, kind: str, id: str) -> str:
    """What can't be an id is not looked for: it would be read as another path."""
    if not _ID.fullmatch(id):
        raise NotFound(kind, id)
    return f"{place}/{id}"


def _key(given: str | None) -> str:
    return secrets.token_hex(16) if given is None else given


def _asked(kind: type[B], **values: Any) -> B:
    """The body of a request. What can't be sent is refused as the server would."""
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(step) for step in first["loc"])
        raise BadParameter(name, first["input"], first["msg"]) from None


def _message_of(message: Message) -> messages.Message:
    try:
        return messages.Message.of(message)
    except ValidationError as error:
        raise Unstorable(error.errors(include_url=False)[0]["msg"]) from None


def _part_of(part: Part | Blob) -> messages.AnyPart:
    try:
        return messages.part_of(part)
    except ValidationError as error:
        raise Unstorable(error.errors(include_url=False)[0]["msg"]) from None


def _stored(found: Iterable[wire.Stored]) -> tuple[StoredMessage, ...]:
    return tuple(one.value() for one in found)
