"""The `Chat` interface over HTTP, to a Palaver server: event streams reconnect and continue after the last number."""

from __future__ import annotations

import re
import secrets
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from palaver import wire
from palaver.chat.interface import (
    CallDecision,
    Column,
    ContextUsage,
    ConversationChange,
    ImportReport,
    ModelCard,
    ModelState,
    ReplyToken,
    SentMessage,
)
from palaver.chat.turn_log import LogEntry
from palaver.client.connection import ConnectionLost, Query, ServerConnection, parse_event, parse_response
from palaver.client.errors import NoServer
from palaver.client.proof import Prove
from palaver.client.sse import ServerSentEvent
from palaver.errors import BadParameter
from palaver.events import DraftBlock, Failed, Finished, Snapshot, Started, Waiting
from palaver.messages import Message, Part
from palaver.store import Blob, Conversation, Cursor, NotFound, Preset, SearchHit, StoredMessage, TreeNode
from palaver.store.comparisons import Comparison, TallyRow
from palaver.store.records import ConversationDefaults
from palaver.store.tool_rounds import ToolRound
from palaver.store.tool_rules import ToolRule
from palaver.tools.config import BadToolServer, ServerConfig
from palaver.tools.servers import ServerCard, ServerResource

if TYPE_CHECKING:
    from palaver.transcripts.preferences import PreferenceFile

MISSED = ConversationChange("", "missed")
"""Sent after reconnecting: changes may have been missed."""


class Reconnected:
    """Marks a new connection in the stream, including the first."""


RECONNECTED = Reconnected()


async def resumable_stream(
    connection: ServerConnection, path: str, query: Callable[[], Query]
) -> AsyncGenerator[ServerSentEvent | Reconnected]:
    """The events of all connections. It has no end: the consumer closes it."""
    retry = connection.retry_policy()
    while True:
        reason = "it closed the stream"
        try:
            async with connection.stream(path, query()) as stream:
                yield RECONNECTED
                async for event in stream:
                    retry = connection.retry_policy()
                    if event.event == "closing":
                        break
                    yield event
        except ConnectionLost as lost:
            reason = str(lost)
        if retry.expired:
            raise NoServer(connection.url, reason)
        await retry.pause()


@dataclass
class StreamPosition:
    """The position of a subscriber in a turn's events."""

    number: int
    status: Waiting | Started | Snapshot | None = None

    def advance(self, entry: LogEntry) -> bool:
        """Moves on to the entry. Returns False if it was seen before: the status is sent again after reconnecting."""
        match entry.event:
            case Waiting() | Started() | Snapshot() as status:
                if isinstance(status, Started):  # its time grows while the model thinks
                    status = replace(status, thinking_seconds=None)
                seen = status == self.status
                self.status = status
                self.number = max(self.number, entry.number)
                return not seen
            case Finished() | Failed() | DraftBlock():
                return True
            case _:
                seen = entry.number <= self.number
                self.number = max(self.number, entry.number)
                return not seen


async def log_entries(
    stream: AsyncIterator[ServerSentEvent | Reconnected], position: StreamPosition
) -> AsyncGenerator[LogEntry]:
    """The turn's entries, each once, up to its end."""
    async for event in stream:
        if isinstance(event, Reconnected):
            continue
        entry: LogEntry = parse_event(event, LogEntry)
        if position.advance(entry):
            yield entry
        if isinstance(entry.event, Finished | Failed):
            return


async def conversation_changes(
    stream: AsyncIterator[ServerSentEvent | Reconnected],
) -> AsyncGenerator[ConversationChange]:
    async for event in stream:
        if isinstance(event, Reconnected):
            yield MISSED
            continue
        item = parse_event(event, wire.StreamItem)
        if isinstance(item, wire.StreamChange):
            yield item.change


B = TypeVar("B", bound=BaseModel)
READY_WAIT_S = 25.0
_ID = re.compile(r"[A-Za-z0-9_-]{1,200}")


class HttpChat:
    """Enter it, or call `close` when done.

    Every write gets an idempotency key, so that it can be retried after a lost connection. Streams reconnect and
    continue after the last number.
    """

    def __init__(
        self,
        url: str,
        key: str = "",
        *,
        patience: float = 60.0,
        verify: bool | str | ssl.SSLContext = True,
        transport: httpx.AsyncBaseTransport | None = None,
        prove: Prove | None = None,
    ) -> None:
        """`verify`: how to verify a server's certificate: by the usual authorities, by a file of others, or by an
        `SSLContext` such as `palaver.client.discovery.pinned_context` makes. `prove`: as for
        `ServerConnection`."""
        self._connection = ServerConnection(
            url, key, patience=patience, verify=verify, transport=transport, prove=prove
        )

    async def __aenter__(self) -> HttpChat:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._connection.close()

    @property
    def url(self) -> str:
        return self._connection.url

    # the model

    async def model(self, name: str = "") -> ModelCard:
        return await self._connection.get(ModelCard, "model", **({"name": name} if name else {}))

    async def model_cards(self) -> tuple[ModelCard, ...]:
        return await self._connection.get(tuple[ModelCard, ...], "models/cards")

    async def models(self) -> tuple[str, ...]:
        return await self._connection.get(tuple[str, ...], "models")

    async def load_model(self, name: str) -> ModelCard:
        body = _request_body(wire.LoadModelRequest, name=name)
        return await self._connection.post(ModelCard, "model/load", body)

    async def unload_model(self) -> ModelCard:
        return await self._connection.post(ModelCard, "model/unload")

    async def wait_until_ready(self) -> ModelCard:
        while True:
            card = await self._connection.get(ModelCard, "model/ready", wait=READY_WAIT_S)
            if card.state is not ModelState.LOADING:
                return card

    # conversations

    async def create_conversation(
        self,
        *,
        title: str = "",
        system: str = "",
        parameters: Mapping[str, Any] | None = None,
        tags: Iterable[str] = (),
        key: str | None = None,
    ) -> Conversation:
        body = _request_body(
            wire.CreateConversationRequest,
            title=title,
            system=system,
            parameters=dict(parameters or {}),
            tags=list(tags),
            key=_idempotency_key(key),
        )
        return await self._connection.post(Conversation, "conversations", body, idempotent=True)

    async def conversation(self, id: str) -> Conversation:
        return await self._connection.get(Conversation, _conversation(id))

    async def conversations(
        self,
        *,
        limit: int = 50,
        before: str | None = None,
        tag: str | None = None,
        title: str = "",
        deleted: bool = False,
        pinned: bool | None = None,
    ) -> tuple[Conversation, ...]:
        found = await self._connection.get(
            list[Conversation],
            "conversations",
            limit=limit,
            before=before,
            tag=tag,
            title=title,
            deleted=deleted,
            pinned=pinned,
        )
        return tuple(found)

    async def update_conversation(
        self,
        id: str,
        *,
        title: str | None = None,
        system: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        tags: Iterable[str] | None = None,
        pinned: bool | None = None,
    ) -> Conversation:
        body = _request_body(
            wire.UpdateConversationRequest,
            title=title,
            system=system,
            parameters=None if parameters is None else dict(parameters),
            tags=None if tags is None else list(tags),
            pinned=pinned,
        )
        response = await self._connection.send("PATCH", _conversation(id), body=body, idempotent=True)
        return parse_response(response, Conversation)

    async def delete_conversation(self, id: str) -> None:
        await self._connection.send("DELETE", _conversation(id))

    async def restore_conversation(self, id: str) -> Conversation:
        return await self._connection.post(Conversation, f"{_conversation(id)}/undelete", idempotent=True)

    async def clear_cache(self, id: str) -> None:
        await self._connection.send("POST", f"{_conversation(id)}/forget", idempotent=True)

    async def tags(self) -> tuple[str, ...]:
        return await self._connection.get(tuple[str, ...], "tags")

    async def search(self, query: str, limit: int = 20) -> tuple[SearchHit, ...]:
        return await self._connection.get(tuple[SearchHit, ...], "search", query=query, limit=limit)

    @asynccontextmanager
    async def changes(self) -> AsyncIterator[AsyncIterator[ConversationChange]]:
        """After reconnecting, a change of kind "missed" is sent: changes may have been lost."""
        async with aclosing(resumable_stream(self._connection, "events", lambda: {"changes": True})) as stream:
            await anext(stream)  # connected
            await anext(stream)  # and subscribed: no change is missed from now on
            async with aclosing(conversation_changes(stream)) as changes:
                yield changes

    # presets

    async def presets(self) -> tuple[Preset, ...]:
        return await self._connection.get(tuple[Preset, ...], "presets")

    async def save_preset(self, name: str, system: str, parameters: Mapping[str, Any]) -> Preset:
        body = _request_body(wire.SavePresetRequest, name=name, system=system, parameters=dict(parameters))
        return parse_response(await self._connection.send("PUT", "presets", body=body, idempotent=True), Preset)

    async def delete_preset(self, name: str) -> None:
        await self._connection.send("POST", "presets/delete", body=_request_body(wire.DeletePresetRequest, name=name))

    async def defaults(self) -> ConversationDefaults:
        return await self._connection.get(ConversationDefaults, "defaults")

    async def save_defaults(self, system: str, parameters: Mapping[str, Any]) -> ConversationDefaults:
        body = _request_body(wire.SaveDefaultsRequest, system=system, parameters=dict(parameters))
        response = await self._connection.send("PUT", "defaults", body=body, idempotent=True)
        return parse_response(response, ConversationDefaults)

    # the tree

    async def message(self, id: str) -> StoredMessage:
        return await self._connection.get(StoredMessage, _message(id))

    async def path(self, leaf: str) -> tuple[StoredMessage, ...]:
        return await self._connection.get(tuple[StoredMessage, ...], f"{_message(leaf)}/path")

    async def siblings(self, id: str) -> tuple[StoredMessage, ...]:
        return await self._connection.get(tuple[StoredMessage, ...], f"{_message(id)}/siblings")

    async def nodes(self, conversation_id: str) -> tuple[TreeNode, ...]:
        return await self._connection.get(tuple[TreeNode, ...], f"{_conversation(conversation_id)}/nodes")

    async def previews(self, conversation_id: str) -> Mapping[str, str]:
        return await self._connection.get(dict[str, str], f"{_conversation(conversation_id)}/previews")

    async def newest_leaf(self, conversation_id: str, start: str | None = None) -> str | None:
        path = f"{_conversation(conversation_id)}/newest-leaf"
        return (await self._connection.get(wire.LeafSchema, path, start=start)).id

    async def append_message(
        self, conversation_id: str, parent: str | None, message: Message, *, key: str | None = None
    ) -> StoredMessage:
        path = f"{_conversation(conversation_id)}/messages"
        body = _request_body(
            wire.AppendMessageRequest, parent=parent, message=_new_message(message), key=_idempotency_key(key)
        )
        return await self._connection.post(StoredMessage, path, body, idempotent=True)

    async def edit_message(
        self, message_id: str, parts: Iterable[Part | Blob], *, key: str | None = None
    ) -> StoredMessage:
        body = _request_body(wire.EditMessageRequest, parts=list(parts), key=_idempotency_key(key))
        return await self._connection.post(StoredMessage, f"{_message(message_id)}/edit", body, idempotent=True)

    # cursors

    async def cursor(self, conversation_id: str, client: str) -> Cursor:
        path = f"{_conversation(conversation_id)}/cursor"
        return await self._connection.get(Cursor, path, client=client)

    async def move_cursor(self, conversation_id: str, client: str, to: str | None) -> Cursor:
        body = _request_body(wire.MoveCursorRequest, client=client, to=to)
        path = f"{_conversation(conversation_id)}/cursor"
        return parse_response(await self._connection.send("PUT", path, body=body, idempotent=True), Cursor)

    async def undo(self, conversation_id: str, client: str) -> Cursor:
        return await self._step_cursor(conversation_id, client, "undo")

    async def redo(self, conversation_id: str, client: str) -> Cursor:
        return await self._step_cursor(conversation_id, client, "redo")

    async def _step_cursor(self, conversation_id: str, client: str, direction: str) -> Cursor:
        path = f"{_conversation(conversation_id)}/cursor/{direction}"
        return await self._connection.post(Cursor, path, _request_body(wire.CursorRequest, client=client))

    # turns

    async def send_message(
        self,
        conversation_id: str,
        parent: str | None,
        message: Message,
        *,
        parameters: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> SentMessage:
        body = _request_body(
            wire.SendMessageRequest,
            parent=parent,
            message=_new_message(message),
            parameters=dict(parameters or {}),
            key=_idempotency_key(key),
        )
        path = f"{_conversation(conversation_id)}/say"
        return await self._connection.post(SentMessage, path, body, idempotent=True)

    async def start_reply(
        self,
        conversation_id: str,
        parent: str,
        *,
        parameters: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> StoredMessage:
        body = _request_body(
            wire.StartReplyRequest, parent=parent, parameters=dict(parameters or {}), key=_idempotency_key(key)
        )
        path = f"{_conversation(conversation_id)}/replies"
        return await self._connection.post(StoredMessage, path, body, idempotent=True)

    async def continue_reply(self, reply_id: str, *, key: str | None = None) -> StoredMessage:
        body = _request_body(wire.ContinueReplyRequest, key=_idempotency_key(key))
        return await self._connection.post(StoredMessage, f"{_turn(reply_id)}/continue", body, idempotent=True)

    async def fork_reply(
        self, reply_id: str, tokens: int, instead: int | None = None, *, key: str | None = None
    ) -> StoredMessage:
        body = _request_body(wire.ForkReplyRequest, tokens=tokens, instead=instead, key=_idempotency_key(key))
        return await self._connection.post(StoredMessage, f"{_turn(reply_id)}/fork", body, idempotent=True)

    @asynccontextmanager
    async def events(self, reply_id: str, after: int = 0) -> AsyncIterator[AsyncIterator[LogEntry]]:
        position = StreamPosition(after)
        path = f"{_turn(reply_id)}/events"
        async with aclosing(resumable_stream(self._connection, path, lambda: {"after": position.number})) as stream:
            await anext(stream)  # raises the error if the server refuses
            async with aclosing(log_entries(stream, position)) as entries:
                yield entries

    async def stop_reply(self, reply_id: str) -> None:
        await self._connection.send("POST", f"{_turn(reply_id)}/stop", idempotent=True)

    async def answer_now(self, reply_id: str) -> None:
        await self._connection.send("POST", f"{_turn(reply_id)}/answer-now", idempotent=True)

    # comparisons

    async def compare(
        self,
        conversation_id: str,
        parent: str | None,
        message: Message | None,
        columns: Sequence[Column],
        *,
        blind: bool = False,
        key: str | None = None,
    ) -> Comparison:
        body = _request_body(
            wire.CompareRequest,
            parent=parent,
            message=None if message is None else _new_message(message),
            columns=[asdict(column) for column in columns],
            blind=blind,
            key=_idempotency_key(key),
        )
        path = f"{_conversation(conversation_id)}/compare"
        return await self._connection.post(Comparison, path, body, idempotent=True)

    async def comparison(self, id: str) -> Comparison:
        return await self._connection.get(Comparison, _comparison(id))

    async def comparisons(self, conversation_id: str) -> tuple[Comparison, ...]:
        path = f"{_conversation(conversation_id)}/comparisons"
        return await self._connection.get(tuple[Comparison, ...], path)

    async def choose_reply(self, comparison_id: str, reply_id: str | None) -> Comparison:
        body = _request_body(wire.ChooseReplyRequest, reply=reply_id)
        return await self._connection.post(Comparison, f"{_comparison(comparison_id)}/choose", body, idempotent=True)

    async def tally(self) -> tuple[TallyRow, ...]:
        return await self._connection.get(tuple[TallyRow, ...], "comparisons/tally")

    async def export_preferences(self, conversation_id: str | None = None) -> PreferenceFile:
        from palaver.transcripts.preferences import PreferenceFile

        query = {"conversation": conversation_id}
        response = await self._connection.send("GET", "comparisons/preferences", query=query, idempotent=True)
        counts = (int(response.headers[name]) for name in ("palaver-pairs", "palaver-skipped"))
        return PreferenceFile(response.content.decode(), *counts)

    # tools

    async def tool_servers(self, connect: bool = True) -> tuple[ServerCard, ...]:
        return await self._connection.get(tuple[ServerCard, ...], "/tools", connect=connect)

    async def add_tool_server(self, config: ServerConfig) -> ServerCard:
        if config.command:
            raise BadToolServer("A command is code that runs on the server: only its operator can add one.")
        body = _request_body(wire.AddToolServerRequest, name=config.name, url=config.url, headers=dict(config.headers))
        return await self._connection.post(ServerCard, "/tools", body)

    async def remove_tool_server(self, name: str) -> None:
        body = _request_body(wire.RemoveToolServerRequest, name=name)
        await self._connection.send("POST", "/tools/remove", body=body)

    async def start_sign_in(self, server: str, redirect_uri: str) -> str:
        body = _request_body(wire.StartSignInRequest, server=server, redirect_uri=redirect_uri)
        return (await self._connection.post(wire.SignInSchema, "/tools/sign-in", body)).url

    async def finish_sign_in(self, state: str, code: str, issuer: str | None = None) -> ServerCard:
        body = _request_body(wire.FinishSignInRequest, state=state, code=code, issuer=issuer)
        return await self._connection.post(ServerCard, "/tools/sign-in/finish", body)

    async def tool_rules(self) -> tuple[ToolRule, ...]:
        return await self._connection.get(tuple[ToolRule, ...], "/tools/rules")

    async def forget_tool_rules(self, name: str | None = None, conversation_id: str | None = None) -> int:
        query = {"name": name, "conversation": conversation_id}
        response = await self._connection.send("DELETE", "/tools/rules", query=query)
        return parse_response(response, wire.ForgottenSchema).forgotten

    async def tool_resources(self, server: str) -> tuple[ServerResource, ...]:
        return await self._connection.get(tuple[ServerResource, ...], "/tools/resources", server=server)

    async def read_tool_resource(self, server: str, name: str, arguments: Mapping[str, str] | None = None) -> bytes:
        body = _request_body(wire.ReadToolResourceRequest, server=server, name=name, arguments=dict(arguments or {}))
        return (await self._connection.send("POST", "/tools/resources/read", body=body, idempotent=True)).content

    async def tool_round(self, reply_id: str) -> ToolRound | None:
        return await self._connection.get(ToolRound | None, f"{_turn(reply_id)}/tools")  # type: ignore[arg-type]

    async def decide_calls(self, reply_id: str, decisions: Sequence[CallDecision]) -> ToolRound:
        body = _request_body(wire.DecideCallsRequest, decisions=[asdict(one) for one in decisions])
        return await self._connection.post(ToolRound, f"{_turn(reply_id)}/tools", body, idempotent=True)

    async def tokens(self, reply_id: str) -> tuple[ReplyToken, ...]:
        return await self._connection.get(tuple[ReplyToken, ...], f"{_turn(reply_id)}/tokens")

    async def raw_text(self, reply_id: str) -> str:
        return (await self._connection.get(wire.RawReplySchema, f"{_turn(reply_id)}/raw")).text

    async def context_usage(
        self, conversation_id: str, leaf: str | None, parameters: Mapping[str, Any] | None = None
    ) -> ContextUsage:
        body = _request_body(wire.ContextUsageRequest, leaf=leaf, parameters=dict(parameters or {}))
        path = f"{_conversation(conversation_id)}/gauge"
        return await self._connection.post(ContextUsage, path, body, idempotent=True)

    # files

    async def export_conversation(self, conversation_id: str, form: str, leaf: str | None = None) -> str:
        path = f"{_conversation(conversation_id)}/export"
        response = await self._connection.send("GET", path, query={"form": form, "leaf": leaf}, idempotent=True)
        return response.content.decode()

    async def import_conversations(self, file: bytes) -> ImportReport:
        kind = "application/octet-stream"
        response = await self._connection.send(
            "POST", "import", content=file, media_type=kind, idempotent=True, query={"report": True}
        )
        return parse_response(response, ImportReport)

    async def put_blob(self, data: bytes, name: str = "") -> Blob:
        response = await self._send_file("blobs", data, name)
        return parse_response(response, wire.BlobUploadSchema).to_value()

    async def blob(self, digest: str) -> bytes:
        return (await self._connection.send("GET", _path("blobs", "blob", digest), idempotent=True)).content

    async def read_document(self, data: bytes, name: str) -> str:
        return parse_response(await self._send_file("documents", data, name), wire.DocumentSchema).text

    async def transcribe(self, data: bytes, name: str = "", language: str = "") -> str:
        response = await self._send_file("transcriptions", data, name, language=language)
        return parse_response(response, wire.TranscriptionSchema).text

    async def _send_file(self, path: str, data: bytes, name: str, **query: str) -> httpx.Response:
        kind = "application/octet-stream"
        return await self._connection.send(
            "POST", path, content=data, media_type=kind, idempotent=True, query={"name": name, **query}
        )


def _conversation(id: str) -> str:
    return _path("conversations", "conversation", id)


def _message(id: str) -> str:
    return _path("messages", "message", id)


def _comparison(id: str) -> str:
    return _path("comparisons", "comparison", id)


def _turn(id: str) -> str:
    return _path("turns", "message", id)


def _path(collection: str, kind: str, id: str) -> str:
    """Raises NotFound for a string that can't be an id: it would change the path."""
    if not _ID.fullmatch(id):
        raise NotFound(kind, id)
    return f"{collection}/{id}"


def _idempotency_key(key: str | None) -> str:
    return secrets.token_hex(16) if key is None else key


def _new_message(message: Message) -> wire.MessageSchema:
    return wire.MessageSchema(role=message.role, parts=list(message.parts))


def _request_body(kind: type[B], **values: Any) -> B:
    """The body of a request. Raises BadParameter for an invalid field, as the server would."""
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(step) for step in first["loc"])
        raise BadParameter(name, first["input"], first["msg"]) from None
