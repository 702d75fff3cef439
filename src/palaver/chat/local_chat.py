"""The `Chat` interface in this process, on top of the store, the turns and the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from palaver.chat import parameters as settings
from palaver.chat.attachments import AttachmentReader, check_messages, describe_parts
from palaver.chat.continuation import is_same_tokenizer
from palaver.chat.interface import (
    ContextUsage,
    ConversationChange,
    ModelCard,
    ReplyToken,
    SentMessage,
    StartedReplies,
    TokenAlternative,
)
from palaver.chat.model import Model
from palaver.chat.reply_request import PartialReply
from palaver.chat.subscription import FollowedReply
from palaver.chat.turn_log import LogEntry
from palaver.chat.turns import NewTurn, Turn
from palaver.errors import BadParameter, ContextOverflow, NothingToContinue, PalaverError
from palaver.generation import Step
from palaver.messages import Image, MediaPart, Message, Part, Role
from palaver.store import (
    Blob,
    Conflict,
    Conversation,
    Cursor,
    NotFound,
    Preset,
    ReplyStatus,
    SearchHit,
    StoredMessage,
    TreeNode,
)
from palaver.store.encoding import store_media
from palaver.transcripts import TranscriptFormat, read_conversation, read_file, store_transcript, write_transcript

if TYPE_CHECKING:
    from palaver.chat.service import Service

P = ParamSpec("P")
T = TypeVar("T")


class LocalChat:
    """The conversations of one user. Those of other users are not found."""

    def __init__(self, service: Service, owner: str) -> None:
        self._service = service
        self._store = service.store
        self._turns = service.turns
        self._owner = owner

    # the model

    async def model(self) -> ModelCard:
        return self._service.models.loading_card()

    async def models(self) -> tuple[str, ...]:
        return self._service.models.names

    async def load_model(self, name: str) -> ModelCard:
        self._service.models.load(name)
        return self._service.models.loading_card()

    async def unload_model(self) -> ModelCard:
        await self._service.models.unload()
        return self._service.models.card()

    async def wait_until_ready(self) -> ModelCard:
        await self._service.models.settled()
        return self._service.models.card()

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
        conversation = await _thread(
            self._store.conversations.create,
            self._owner,
            title=title,
            system=system,
            parameters=settings.check_parameters(parameters or {}),
            tags=tuple(tags),
            key=key,
        )
        return self._publish(conversation, "created")

    async def conversation(self, id: str) -> Conversation:
        return await _thread(self._store.conversations.get, id, self._owner)

    async def conversations(
        self,
        *,
        limit: int = 50,
        before: str | None = None,
        tag: str | None = None,
        title: str = "",
        deleted: bool = False,
    ) -> tuple[Conversation, ...]:
        last = None
        if before is not None:
            last = await _thread(self._store.conversations.get, before, self._owner, True)
        return await _thread(
            self._store.conversations.list,
            self._owner,
            limit=limit,
            before=last,
            tag=tag,
            title=title,
            deleted=deleted,
        )

    async def update_conversation(
        self,
        id: str,
        *,
        title: str | None = None,
        system: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        tags: Iterable[str] | None = None,
    ) -> Conversation:
        conversation = await self.conversation(id)
        conversations = self._store.conversations
        if parameters is not None:
            conversation = await _thread(conversations.set_parameters, id, settings.check_parameters(parameters))
        if system is not None:
            conversation = await _thread(conversations.set_system, id, system)
        if tags is not None:
            conversation = await _thread(conversations.set_tags, id, tuple(tags))
        if title is not None:
            conversation = await _thread(conversations.rename, id, title)
        return self._publish(conversation, "changed")

    async def delete_conversation(self, id: str) -> None:
        conversation = await self.conversation(id)
        for turn in self._turns.running:
            if turn.reply.conversation_id == id:
                turn.reply_stream.stop()
        await _thread(self._store.conversations.delete, id)
        self._publish(conversation, "deleted")
        await self._service.models.forget(id)

    async def restore_conversation(self, id: str) -> Conversation:
        await _thread(self._store.conversations.get, id, self._owner, True)
        return self._publish(await _thread(self._store.conversations.undelete, id), "created")

    async def clear_cache(self, id: str) -> None:
        await self.conversation(id)
        await self._service.models.forget(id)

    async def tags(self) -> tuple[str, ...]:
        return await _thread(self._store.conversations.tags, self._owner)

    async def search(self, query: str, limit: int = 20) -> tuple[SearchHit, ...]:
        return await _thread(self._store.search.find, self._owner, query, limit)

    @asynccontextmanager
    async def changes(self) -> AsyncIterator[AsyncIterator[ConversationChange]]:
        async with self._service.changes.subscribe(self._owner) as changes:
            yield changes

    # presets

    async def presets(self) -> tuple[Preset, ...]:
        return await _thread(self._store.presets.all, self._owner)

    async def save_preset(self, name: str, system: str, parameters: Mapping[str, Any]) -> Preset:
        return await _thread(self._store.presets.save, self._owner, name, system, settings.check_parameters(parameters))

    async def delete_preset(self, name: str) -> None:
        await _thread(self._store.presets.delete, self._owner, name)

    # the tree

    async def message(self, id: str) -> StoredMessage:
        stored = await _thread(self._store.messages.get, id)
        try:
            await self.conversation(stored.conversation_id)
        except NotFound:
            raise NotFound("message", id) from None
        return stored

    async def path(self, leaf: str) -> tuple[StoredMessage, ...]:
        await self.message(leaf)
        return await _thread(self._store.messages.path, leaf)

    async def siblings(self, id: str) -> tuple[StoredMessage, ...]:
        await self.message(id)
        return await _thread(self._store.messages.siblings, id)

    async def nodes(self, conversation_id: str) -> tuple[TreeNode, ...]:
        await self.conversation(conversation_id)
        return await _thread(self._store.messages.nodes, conversation_id)

    async def newest_leaf(self, conversation_id: str, start: str | None = None) -> str | None:
        await self.conversation(conversation_id)
        if start is not None:
            await self.message(start)
        return await _thread(self._store.messages.newest_leaf, conversation_id, start)

    async def append_message(
        self, conversation_id: str, parent: str | None, message: Message, *, key: str | None = None
    ) -> StoredMessage:
        conversation = await self.conversation(conversation_id)
        await self._check_parent(parent)
        (message,) = await self._describe([message])
        return await self._append(conversation, parent, message, key)

    async def edit_message(
        self, message_id: str, parts: Iterable[Part | Blob], *, key: str | None = None
    ) -> StoredMessage:
        old = await self.message(message_id)
        described = await _thread(describe_parts, tuple(parts), self._service.media.inspect)
        stored = await _thread(self._store.messages.edit, message_id, described, key=key)
        self._publish(await self.conversation(old.conversation_id), "message", stored.id)
        return stored

    # cursors

    async def cursor(self, conversation_id: str, client: str) -> Cursor:
        await self.conversation(conversation_id)
        return await _thread(self._store.cursors.get, conversation_id, client)

    async def move_cursor(self, conversation_id: str, client: str, to: str | None) -> Cursor:
        conversation = await self.conversation(conversation_id)
        cursor = await _thread(self._store.cursors.move, conversation_id, client, to)
        with suppress(Conflict):  # the head is a hint for clients without a cursor
            await _thread(self._store.conversations.move_head, conversation_id, conversation.head_id, to)
        return cursor

    async def undo(self, conversation_id: str, client: str) -> Cursor:
        await self.conversation(conversation_id)
        return await _thread(self._store.cursors.undo, conversation_id, client)

    async def redo(self, conversation_id: str, client: str) -> Cursor:
        await self.conversation(conversation_id)
        return await _thread(self._store.cursors.redo, conversation_id, client)

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
        conversation = await self.conversation(conversation_id)
        started = await self.start_replies(conversation, parent, (message,), (parameters or {},), key=key)
        return SentMessage(started.messages[-1], started.replies[0])

    async def start_reply(
        self,
        conversation_id: str,
        parent: str,
        *,
        parameters: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> StoredMessage:
        conversation = await self.conversation(conversation_id)
        return (await self.start_replies(conversation, parent, (), (parameters or {},), key=key)).replies[0]

    async def start_replies(
        self,
        conversation: Conversation | None,
        parent: str | None,
        messages: Sequence[Message],
        choices: Sequence[Mapping[str, Any]],
        *,
        system: str = "",
        partial: PartialReply | None = None,
        key: str | None = None,
    ) -> StartedReplies:
        await self._check_parent(parent)
        model = await self._service.models.ready()
        self._turns.check_open()
        path, build = await self._path(parent), self._service.requests.build
        check_messages(messages, model.name, model.engine.info.media)
        messages = await self._describe(messages)
        draft = conversation or _draft_conversation(self._owner, system)
        prepared = [
            await _thread(build, model, draft, path, messages, settings.check_parameters(parameters), partial)
            for parameters in choices
        ]
        if conversation is None:
            conversation = await self.create_conversation(system=system, key=key)
        stored: list[StoredMessage] = []
        for number, message in enumerate(messages):
            message_key = key if number == len(messages) - 1 else _key(key, number)
            stored.append(await self._append(conversation, parent, message, message_key))
            parent = stored[-1].id
        replies: list[StoredMessage] = []
        for choice, new in reversed(list(enumerate(prepared))):  # the first is started last, so that it is the head
            reply_key = _key(key, "reply") if messages else key
            new_turn = NewTurn(
                conversation.id,
                parent,
                replace(new.request, conversation=conversation.id),
                new.settings,
                key=_key(reply_key, choice) if choice else reply_key,
                prompt=new.prompt,
            )
            if replies or partial is not None or not messages:  # it becomes the head, wherever that is
                new_turn = replace(new_turn, expected_head=(await self.conversation(conversation.id)).head_id)
            replies.insert(0, await self._turns.start(model, new_turn))
        return StartedReplies(conversation.id, tuple(stored), tuple(replies))

    async def continue_reply(self, reply_id: str, *, key: str | None = None) -> StoredMessage:
        reply = await self._get_reply(reply_id)
        if key is not None and (continued := await self._service.continuation.find_continued(reply, key)) is not None:
            return continued
        running = self._turns.get(reply_id)
        if running is not None and not running.log.ended:
            return reply
        if (latest := await self._with_ending(reply)) is not reply and _is_done(latest):
            return latest  # it was complete: only its ending had not been written
        reply = latest
        if _is_done(reply):
            raise NothingToContinue("The reply is complete: there is nothing to continue.")
        model = await self._service.models.ready()
        conversation = await self.conversation(reply.conversation_id)
        return await self._service.continuation.continue_reply(model, conversation, reply, key)

    async def fork_reply(
        self, reply_id: str, tokens: int, instead: int | None = None, *, key: str | None = None
    ) -> StoredMessage:
        reply = await self._get_reply(reply_id)
        model = await self._service.models.ready()
        conversation = await self.conversation(reply.conversation_id)
        return await self._service.continuation.fork(model, conversation, reply, tokens, instead, key)

    @asynccontextmanager
    async def events(self, reply_id: str, after: int = 0) -> AsyncIterator[AsyncIterator[LogEntry]]:
        model, reply = await self._model_and_reply(reply_id)
        async with aclosing(await self._service.subscriptions.subscribe(model, reply, after)) as entries:
            yield entries

    async def reply_stream(self, reply_id: str, *, raw: bool = False, wait: bool = True) -> FollowedReply:
        model, reply = await self._model_and_reply(reply_id, wait)
        return await self._service.subscriptions.stream(model, reply, raw)

    async def stop_reply(self, reply_id: str) -> None:
        if turn := await self._running_turn(reply_id):
            turn.reply_stream.stop()

    async def answer_now(self, reply_id: str) -> None:
        if turn := await self._running_turn(reply_id):
            turn.reply_stream.answer_now()

    async def tokens(self, reply_id: str) -> tuple[ReplyToken, ...]:
        reply, model = await self._get_reply(reply_id), await self._service.models.ready()
        if not is_same_tokenizer(model, reply):
            return ()
        steps = await _thread(self._store.replies.tokens, reply_id)
        return tuple(_reply_token(model, step) for step in steps)

    async def raw_text(self, reply_id: str) -> str:
        reply, model = await self._get_reply(reply_id), await self._service.models.ready()
        if not is_same_tokenizer(model, reply):
            raise Conflict("The reply's tokens are not known to this model.")
        ids = await _thread(self._store.replies.token_ids, reply_id)
        return b"".join(model.vocabulary[id] for id in ids).decode("utf-8", "replace")

    async def load_messages(self, path: Sequence[StoredMessage]) -> tuple[Message, ...]:
        return await _thread(self._store.messages.load_path, path)

    async def past_replies(self, path: Sequence[StoredMessage]) -> tuple[tuple[int, ...] | None, ...]:
        return await _thread(self._service.requests.past_replies, self._service.models.current(), path)

    async def all_messages(self, conversation_id: str) -> tuple[StoredMessage, ...]:
        await self.conversation(conversation_id)
        return await _thread(self._store.messages.all, conversation_id)

    async def annotate_reply(self, reply_id: str, note: Mapping[str, Any]) -> StoredMessage:
        await self.message(reply_id)
        return await _thread(self._store.replies.annotate, reply_id, note)

    async def context_usage(
        self, conversation_id: str, leaf: str | None, parameters: Mapping[str, Any] | None = None
    ) -> ContextUsage:
        conversation = await self.conversation(conversation_id)
        model = await self._service.models.ready()
        path = await self._path(leaf)
        limit = model.engine.info.context_length
        usages = [stored.reply.usage for stored in path if stored.reply and stored.reply.usage]
        cached = usages[-1].cached_tokens if usages else 0
        if not path:
            return ContextUsage(0, limit)
        try:
            prepared = await _thread(
                self._service.requests.build, model, conversation, path, (), _check_parameters(parameters)
            )
            return ContextUsage(len(prepared.prompt), limit, cached)
        except ContextOverflow as error:
            return ContextUsage(error.tokens, limit, cached)

    # files

    async def export_conversation(self, conversation_id: str, form: str, leaf: str | None = None) -> str:
        await self.conversation(conversation_id)
        if form not in set(TranscriptFormat):
            raise BadParameter("form", form, f"must be one of {', '.join(TranscriptFormat)}")
        transcript = await _thread(read_conversation, self._store, conversation_id)
        if leaf is not None:
            await self.message(leaf)
            transcript = replace(transcript, head=leaf)
        return await _thread(write_transcript, transcript, TranscriptFormat(form))

    async def import_conversations(self, text: str) -> tuple[Conversation, ...]:
        file = await _thread(read_file, text)
        stored = [
            await _thread(store_transcript, self._store, self._owner, transcript) for transcript in file.transcripts
        ]
        return tuple(self._publish(one.conversation, "created") for one in stored)

    async def put_blob(self, data: bytes, name: str = "") -> Blob:
        (part,) = await _thread(describe_parts, (Image("", data, name),), self._service.media.inspect)
        (blob,) = await _thread(store_media, (part,), self._store.blobs)
        assert isinstance(blob, Blob)
        self._service.uploads.add((self._owner, blob.digest))
        return blob

    async def blob(self, digest: str) -> bytes:
        is_upload = (self._owner, digest) in self._service.uploads
        if not is_upload and not await _thread(self._store.conversations.references_blob, self._owner, digest):
            raise NotFound("blob", digest)
        return await _thread(self._store.blobs.get, digest)

    async def read_document(self, data: bytes, name: str) -> str:
        return await _thread(AttachmentReader(self._service.media).read_document, data, name)

    # helpers

    async def _describe(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Checks the media of the messages, and describes them by their bytes."""
        if not any(isinstance(part, MediaPart) for message in messages for part in message.parts):
            return messages
        inspect = self._service.media.inspect
        return [Message(message.role, await _thread(describe_parts, message.parts, inspect)) for message in messages]

    def _publish(self, conversation: Conversation, what: str, message: str | None = None) -> Conversation:
        self._service.changes.publish(self._owner, ConversationChange(conversation.id, what, message))
        return conversation

    async def _append(
        self, conversation: Conversation, parent: str | None, message: Message, key: str | None
    ) -> StoredMessage:
        stored = await _thread(self._store.messages.append, conversation.id, parent, message, key=key)
        self._publish(conversation, "message", stored.id)
        return stored

    async def _path(self, leaf: str | None) -> tuple[StoredMessage, ...]:
        return await self.path(leaf) if leaf is not None else ()

    async def _check_parent(self, parent: str | None) -> None:
        """Raises Conflict if the parent is a reply that is still running: its text is not complete."""
        if parent is None:
            return
        if _is_running(await self._with_ending(await self.message(parent))):
            raise Conflict("The reply is still running: wait for it, or stop it first.")

    async def _with_ending(self, reply: StoredMessage) -> StoredMessage:
        """The reply after its ending is written, if this process could not write it before."""
        turn = self._turns.get(reply.id)
        orphan = turn is None and _is_running(reply)
        if not orphan and not self._turns.has_pending_ending(reply.id):
            return reply
        await self._turns.write_pending_endings()
        return await self.message(reply.id)

    async def _model_and_reply(self, reply_id: str, wait: bool = True) -> tuple[Model | None, StoredMessage]:
        """The reply to follow, and the model that reads its tokens, if one is loaded."""
        reply = await self.message(reply_id)
        if wait and _is_running(reply) and self._turns.get(reply_id) is None:
            await self._service.recovered.wait()  # of a dead process: it is resumed once the model is loaded
            reply = await self._with_ending(await self.message(reply_id))
        try:
            return self._service.models.current(), reply
        except PalaverError:
            return None, reply

    async def _get_reply(self, id: str) -> StoredMessage:
        stored = await self.message(id)
        if stored.role is not Role.ASSISTANT:
            raise NotFound("reply", id)
        return stored

    async def _running_turn(self, reply_id: str) -> Turn | None:
        reply = await self._with_ending(await self.message(reply_id))
        turn = self._turns.get(reply_id)
        if turn is None and _is_running(reply):
            raise Conflict("The reply runs in another process: stop it there.")
        return turn if turn is not None and not turn.log.ended else None


async def _thread(function: Callable[P, T], *values: P.args, **named: P.kwargs) -> T:
    return await asyncio.to_thread(function, *values, **named)


def _key(key: str | None, suffix: str | int) -> str | None:
    return None if key is None else f"{key} {suffix}"


def _draft_conversation(owner: str, system: str) -> Conversation:
    """A conversation that is not stored yet, to check the request before anything is written."""
    now = datetime.now(UTC)
    return Conversation("", owner, "", False, system, {}, (), None, now, now)


def _is_running(stored: StoredMessage) -> bool:
    return stored.reply is not None and stored.reply.status is ReplyStatus.RUNNING


def _is_done(stored: StoredMessage) -> bool:
    return stored.reply is not None and stored.reply.status is ReplyStatus.DONE


def _check_parameters(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    return settings.check_parameters(parameters or {})


def _reply_token(model: Model, step: Step) -> ReplyToken:
    logprob = None if step.logprob != step.logprob else step.logprob
    others = tuple(
        TokenAlternative(one.token_id, _token_text(model, one.token_id), one.logprob) for one in step.alternatives
    )
    return ReplyToken(step.token_id, _token_text(model, step.token_id), logprob, others)


def _token_text(model: Model, token_id: int) -> str:
    return model.vocabulary[token_id].decode("utf-8", "replace")
