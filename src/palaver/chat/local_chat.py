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
from palaver.chat.comparisons import ReplyComparisons
from palaver.chat.continuation import is_same_tokenizer
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
    StartedReplies,
    TokenAlternative,
)
from palaver.chat.model import Model
from palaver.chat.reply_request import PartialReply
from palaver.chat.subscription import FollowedReply
from palaver.chat.turn_log import LogEntry
from palaver.chat.turns import NewTurn, Turn
from palaver.errors import BadParameter, ContextOverflow, EmptyMessage, NothingToContinue, PalaverError
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
from palaver.store.comparisons import Comparison, TallyRow
from palaver.store.encoding import store_media
from palaver.store.records import ConversationDefaults
from palaver.store.share_links import Share
from palaver.store.tool_rounds import ToolRound
from palaver.store.tool_rules import ToolRule
from palaver.tools.config import ServerConfig
from palaver.tools.servers import ServerCard, ServerResource
from palaver.transcripts import TranscriptFormat, read_conversation, read_file, store_transcript, write_transcript
from palaver.transcripts.preferences import PreferenceFile

if TYPE_CHECKING:
    from palaver.chat.service import Service

P = ParamSpec("P")
T = TypeVar("T")


class LocalChat:
    """The conversations of one user. Those of other users are not found."""

    def __init__(self, service: Service, owner: str, is_local: bool = False) -> None:
        """`is_local`: the user sits at this computer, and may add tool servers that are commands."""
        self._is_local = is_local
        self._service = service
        self._store = service.store
        self._turns = service.turns
        self._owner = owner
        self._comparisons = ReplyComparisons(self, service.store, service.changes, owner)

    # the model

    async def model(self, name: str = "") -> ModelCard:
        models = self._service.models
        card = models.card(name) if name else models.loading_card()
        return (await models.describe(name))[0] if name and card.state is ModelState.AVAILABLE else card

    async def models(self) -> tuple[str, ...]:
        return self._service.models.names

    async def model_cards(self) -> tuple[ModelCard, ...]:
        return await self._service.models.describe()

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
            parameters=self._check_parameters(parameters or {}),
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
        pinned: bool | None = None,
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
            pinned=pinned,
        )

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
        conversation = await self.conversation(id)
        conversations = self._store.conversations
        if parameters is not None:
            conversation = await _thread(conversations.set_parameters, id, self._check_parameters(parameters))
        if system is not None:
            conversation = await _thread(conversations.set_system, id, system)
        if tags is not None:
            conversation = await _thread(conversations.set_tags, id, tuple(tags))
        if pinned is not None:
            conversation = await _thread(conversations.set_pinned, id, pinned)
        if title is not None:
            conversation = await _thread(conversations.rename, id, title)
        return self._publish(conversation, "changed")

    async def delete_conversation(self, id: str) -> None:
        conversation = await self.conversation(id)
        for turn in self._turns.running:
            if turn.reply.conversation_id == id:
                turn.reply_stream.stop()
        for reply_id in await _thread(self._store.replies.running_in, id):
            if self._turns.get(reply_id) is None:
                await _thread(self._store.replies.request, reply_id, stop=True)
        for reply_id in await _thread(self._store.tool_rounds.list_open, id):
            await self._service.loop.stop(self._owner, reply_id)
        await _thread(self._store.conversations.delete, id)
        self._publish(conversation, "deleted")
        await self._service.clear_cache(id)

    async def restore_conversation(self, id: str) -> Conversation:
        await _thread(self._store.conversations.get, id, self._owner, True)
        return self._publish(await _thread(self._store.conversations.undelete, id), "created")

    async def clear_cache(self, id: str) -> None:
        await self.conversation(id)
        await self._service.clear_cache(id)

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

    async def defaults(self) -> ConversationDefaults:
        return await _thread(self._store.defaults.get, self._owner)

    async def save_defaults(self, system: str, parameters: Mapping[str, Any]) -> ConversationDefaults:
        checked = settings.check_parameters(parameters)
        return await _thread(self._store.defaults.save, self._owner, system, checked)

    # the tree

    async def message(self, id: str) -> StoredMessage:
        return await _thread(self._store.messages.get, id, self._owner)

    async def path(self, leaf: str) -> tuple[StoredMessage, ...]:
        await self.message(leaf)
        return await _thread(self._store.messages.path, leaf)

    async def siblings(self, id: str) -> tuple[StoredMessage, ...]:
        await self.message(id)
        return await _thread(self._store.messages.siblings, id)

    async def nodes(self, conversation_id: str) -> tuple[TreeNode, ...]:
        await self.conversation(conversation_id)
        return await _thread(self._store.messages.nodes, conversation_id)

    async def previews(self, conversation_id: str) -> Mapping[str, str]:
        await self.conversation(conversation_id)
        return await _thread(self._store.messages.previews, conversation_id)

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
        if message.is_blank:
            raise EmptyMessage
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
        draft = conversation or _draft_conversation(self._owner, system)
        models = [await self._model_for(draft, choice) for choice in choices]
        self._turns.check_open()
        path, build = await self._path(parent), self._service.requests.build
        for model in models:
            check_messages(messages, model.name, model.engine.info.media, model.text_only)
        messages = await self._describe(messages)
        prepared = []
        for model, choice in zip(models, choices, strict=True):
            parameters = await self._with_tools(draft, settings.check_parameters(choice))
            prepared.append(await _thread(build, model, draft, path, messages, parameters, partial))
        if conversation is None:
            conversation = await self.create_conversation(system=system, key=key)
        stored: list[StoredMessage] = []
        for number, message in enumerate(messages):
            message_key = key if number == len(messages) - 1 else _key(key, number)
            stored.append(await self._append(conversation, parent, message, message_key))
            parent = stored[-1].id
        replies: list[StoredMessage] = []
        for number, new in reversed(list(enumerate(prepared))):  # the first is started last, so that it is the head
            reply_key = _key(key, "reply") if messages else key
            new_turn = NewTurn(
                conversation.id,
                parent,
                replace(new.request, conversation=conversation.id),
                new.settings,
                key=_key(reply_key, number) if number else reply_key,
                prompt=new.prompt,
            )
            if replies or partial is not None or not messages:  # it becomes the head, also of another branch
                new_turn = replace(new_turn, expected_head=(await self.conversation(conversation.id)).head_id)
            replies.insert(0, await self._turns.start(models[number], new_turn))
        return StartedReplies(conversation.id, tuple(stored), tuple(replies))

    async def continue_reply(self, reply_id: str, *, key: str | None = None) -> StoredMessage:
        await self._turns.wait_ended(reply_id)
        reply = await self._get_reply(reply_id)
        if key is not None and (continued := await self._service.continuation.find_continued(reply, key)) is not None:
            return continued
        if self._running_turn(reply_id) is not None:
            return reply
        if (latest := await self._with_ending(reply)) is not reply and _is_done(latest):
            return latest  # it was complete: only its ending had not been written
        reply = await self._interrupt_waiting(latest)
        if _is_running(reply):
            return reply  # in another process
        if _is_done(reply):
            if await self._service.loop.resume(self._owner, reply_id) is not None:
                return reply
            raise NothingToContinue("The reply is complete: there is nothing to continue.")
        model = await self._model_of(reply)
        return await self._service.continuation.continue_reply(model, self._owner, reply, key)

    async def fork_reply(
        self, reply_id: str, tokens: int, instead: int | None = None, *, key: str | None = None
    ) -> StoredMessage:
        reply = await self._get_reply(reply_id)
        model = await self._model_of(reply)
        conversation = await self.conversation(reply.conversation_id)
        return await self._service.continuation.fork(model, conversation, reply, tokens, instead, key)

    @asynccontextmanager
    async def events(self, reply_id: str, after: int = 0) -> AsyncIterator[AsyncIterator[LogEntry]]:
        model, reply = await self._model_and_reply(reply_id)
        async with aclosing(await self._service.subscriptions.subscribe(model, reply, self._owner, after)) as entries:
            yield entries

    async def reply_stream(self, reply_id: str, *, raw: bool = False, wait: bool = True) -> FollowedReply:
        model, reply = await self._model_and_reply(reply_id, wait)
        return await self._service.subscriptions.stream(model, reply, self._owner, raw)

    async def stop_reply(self, reply_id: str) -> None:
        if await self._request_elsewhere(reply_id, stop=True):
            return
        reply = await self._interrupt_waiting(await self._with_ending(await self.message(reply_id)))
        if turn := self._running_turn(reply_id):
            turn.reply_stream.stop()
        elif not _is_running(reply) or await _thread(self._store.replies.request, reply_id, stop=True) is None:
            await self._service.loop.stop(self._owner, reply_id)

    async def answer_now(self, reply_id: str) -> None:
        if await self._request_elsewhere(reply_id, answer=True):
            return
        reply = await self._with_ending(await self.message(reply_id))
        if turn := self._running_turn(reply_id):
            turn.reply_stream.answer_now()
        elif _is_running(reply):
            await _thread(self._store.replies.request, reply_id, answer=True)

    async def _request_elsewhere(self, reply_id: str, *, stop: bool = False, answer: bool = False) -> bool:
        """Whether the reply runs in another process, which now has the command, with a model that is offered here."""
        if self._turns.get(reply_id) is not None:
            return False
        request, lease = self._store.replies.request, self._turns.lease
        model = await _thread(request, reply_id, stop=stop, answer=answer, owner=self._owner, not_held_by=lease.id)
        return model is not None and self._service.models.offers(model)

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
        return await self._comparisons.start(conversation_id, parent, message, columns, blind, key)

    async def comparison(self, id: str) -> Comparison:
        return await self._comparisons.get(id)

    async def comparisons(self, conversation_id: str) -> tuple[Comparison, ...]:
        return await self._comparisons.list(conversation_id)

    async def choose_reply(self, comparison_id: str, reply_id: str | None) -> Comparison:
        return await self._comparisons.choose(comparison_id, reply_id)

    async def tally(self) -> tuple[TallyRow, ...]:
        return await self._comparisons.tally()

    async def export_preferences(self, conversation_id: str | None = None) -> PreferenceFile:
        return await self._comparisons.preferences(conversation_id)

    # tools

    async def tool_servers(self, connect: bool = True) -> tuple[ServerCard, ...]:
        toolbox = self._service.loop.toolbox
        return await toolbox.connect(self._owner) if connect else toolbox.cards(self._owner)

    async def add_tool_server(self, config: ServerConfig) -> ServerCard:
        toolbox = self._service.loop.toolbox
        await _thread(toolbox.add, self._owner, config, is_local=self._is_local)
        return (await toolbox.connect(self._owner, [config.name]))[0]

    async def remove_tool_server(self, name: str) -> None:
        await self._service.loop.toolbox.remove(self._owner, name, is_local=self._is_local)
        await _thread(self._store.tool_rules.forget_server, self._owner, name)

    async def start_sign_in(self, server: str, redirect_uri: str) -> str:
        toolbox = self._service.loop.toolbox
        return await toolbox.start_sign_in(self._owner, server, redirect_uri, is_local=self._is_local)

    async def finish_sign_in(self, state: str, code: str, issuer: str | None = None) -> ServerCard:
        return await self._service.loop.toolbox.finish_sign_in(self._owner, state, code, issuer)

    async def tool_rules(self) -> tuple[ToolRule, ...]:
        return await _thread(self._store.tool_rules.list_all, self._owner)

    async def forget_tool_rules(self, name: str | None = None, conversation_id: str | None = None) -> int:
        return await _thread(self._store.tool_rules.forget, self._owner, name, conversation_id)

    async def tool_resources(self, server: str) -> tuple[ServerResource, ...]:
        return await self._service.loop.toolbox.list_resources(self._owner, server)

    async def read_tool_resource(self, server: str, name: str, arguments: Mapping[str, str] | None = None) -> bytes:
        return await self._service.loop.toolbox.read_resource(self._owner, server, name, arguments or {})

    async def tool_round(self, reply_id: str) -> ToolRound | None:
        await self.message(reply_id)
        return await _thread(self._store.tool_rounds.get, reply_id)

    async def decide_calls(self, reply_id: str, decisions: Sequence[CallDecision]) -> ToolRound:
        await self.message(reply_id)
        return await self._service.loop.decide(self._owner, reply_id, decisions)

    async def tokens(self, reply_id: str) -> tuple[ReplyToken, ...]:
        reply = await self._get_reply(reply_id)
        model = self._reader_for(reply) or await self._service.models.ready()
        if not is_same_tokenizer(model, reply):
            return ()
        steps = await _thread(self._store.replies.tokens, reply_id)
        return tuple(_reply_token(model, step) for step in steps)

    async def raw_text(self, reply_id: str) -> str:
        reply = await self._get_reply(reply_id)
        model = self._reader_for(reply) or await self._service.models.ready()
        if not is_same_tokenizer(model, reply):
            raise Conflict("The reply's tokens are not known to this model.")
        ids = await _thread(self._store.replies.token_ids, reply_id)
        return b"".join(model.vocabulary[id] for id in ids).decode("utf-8", "replace")

    async def load_messages(self, path: Sequence[StoredMessage]) -> tuple[Message, ...]:
        return await _thread(self._store.messages.load_path, path)

    async def past_replies(self, path: Sequence[StoredMessage], model: str = "") -> tuple[tuple[int, ...] | None, ...]:
        return await _thread(self._service.requests.past_replies, await self._service.models.get(model), path)

    async def all_messages(self, conversation_id: str) -> tuple[StoredMessage, ...]:
        await self.conversation(conversation_id)
        return await _thread(self._store.messages.all, conversation_id)

    async def annotate_reply(
        self, reply_id: str, note: Mapping[str, Any], next_parameters: Mapping[str, Any] | None = None
    ) -> StoredMessage:
        reply = await self.message(reply_id)
        changes: dict[str, Any] = {"note": dict(note)}
        if next_parameters is not None and reply.reply is not None:
            loop = reply.reply.settings.options[settings.LOOP]
            following = settings.loop_options(loop["servers"], settings.check_parameters(next_parameters))
            changes[settings.LOOP] = {**loop, "parameters": following["parameters"]}
        return await _thread(self._store.replies.annotate, reply_id, changes)

    async def share_branch(
        self, leaf_id: str, seconds: int, *, thoughts: bool = False, tools: bool = False
    ) -> tuple[Share, str]:
        leaf = await self.message(leaf_id)
        await self._check_parent(leaf_id)
        create, conversation_id = self._store.shares.create, leaf.conversation_id
        return await _thread(create, conversation_id, leaf_id, seconds, thoughts=thoughts, tools=tools)

    async def shares(self, conversation_id: str) -> tuple[Share, ...]:
        await self.conversation(conversation_id)
        return await _thread(self._store.shares.list, conversation_id)

    async def revoke_share(self, id: str) -> None:
        share = await _thread(self._store.shares.get, id)
        try:
            await self.conversation(share.conversation_id)
        except NotFound:
            raise NotFound("link", id) from None
        await _thread(self._store.shares.revoke, id)

    async def lend_tool_server(self, config: ServerConfig, name: str = "") -> str:
        return await self._service.loop.toolbox.lend(self._owner, config, name)

    async def context_usage(
        self, conversation_id: str, leaf: str | None, parameters: Mapping[str, Any] | None = None
    ) -> ContextUsage:
        conversation = await self.conversation(conversation_id)
        model = await self._model_for(conversation, parameters or {})
        path = await self._path(leaf)
        limit = model.engine.info.context_length
        usages = [stored.reply.usage for stored in path if stored.reply and stored.reply.usage]
        cached = usages[-1].cached_tokens if usages else 0
        if not path:
            return ContextUsage(0, limit)
        try:
            checked = await self._with_tools(conversation, _check_parameters(parameters), connect=False)
            prepared = await _thread(self._service.requests.build, model, conversation, path, (), checked)
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

    async def import_conversations(self, file: bytes) -> ImportReport:
        found = await _thread(read_file, file)
        stored = [
            await _thread(store_transcript, self._store, self._owner, transcript) for transcript in found.transcripts
        ]
        return ImportReport(tuple(self._publish(one.conversation, "created") for one in stored), found.skipped)

    async def put_blob(self, data: bytes, name: str = "") -> Blob:
        (part,) = await _thread(describe_parts, (Image("", data, name),), self._service.media.inspect)
        (blob,) = await _thread(store_media, (part,), self._store.blobs)
        assert isinstance(blob, Blob)
        await _thread(self._store.conversations.add_upload, self._owner, blob.digest)
        return blob

    async def blob(self, digest: str) -> bytes:
        if not await _thread(self._store.conversations.may_read_blob, self._owner, digest):
            raise NotFound("blob", digest)
        return await _thread(self._store.blobs.get, digest)

    async def read_document(self, data: bytes, name: str) -> str:
        return await _thread(AttachmentReader(self._service.media).read_document, data, name)

    async def transcribe(self, data: bytes, name: str = "", language: str = "") -> str:
        from palaver.voice.transcription import TranscriptionOptions

        transcriber, options = self._service.transcriber, TranscriptionOptions(language)
        rate = (await transcriber.check(options)).sample_rate
        async with transcriber.places:
            samples = await _thread(self._service.media.sound, data, rate, name)
            return (await transcriber.transcribe(samples, options)).text

    # helpers

    async def _with_tools(
        self, conversation: Conversation, parameters: Mapping[str, Any], connect: bool = True
    ) -> Mapping[str, Any]:
        """The parameters of a turn with the tools of its servers."""
        return await self._service.loop.offer_tools(self._owner, conversation.parameters, parameters, connect)

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
        turn = await self._turns.find(reply)
        orphan = turn is None and _is_running(reply)
        if not orphan and not self._turns.has_pending_ending(reply.id):
            return reply
        if orphan and (holder := await _thread(self._store.replies.holder, reply.id)) != self._turns.lease.id:
            return reply if holder is not None else await self.message(reply.id)  # it has ended
        await self._turns.write_pending_endings()
        return await self.message(reply.id)

    async def _model_and_reply(self, reply_id: str, wait: bool = True) -> tuple[Model | None, StoredMessage]:
        """The reply to follow, and the model that reads its tokens, if one is loaded."""
        await self._turns.wait_ended(reply_id)
        if (turn := self._running_turn(reply_id)) is not None and turn.owner == self._owner:
            return self._reader_for(turn.reply), turn.reply
        reply = await self.message(reply_id)
        if wait and _is_running(reply) and await self._turns.find(reply) is None:
            if await self._service.wait_recovered(_model_name(reply)):  # of a dead process: resumed once that is loaded
                reply = await self.message(reply_id)
            reply = await self._with_ending(reply)
            if self._reader_for(reply) is None and _is_running(reply):  # this server is starting
                with suppress(PalaverError):
                    await self._service.models.ready()
                reply = await self._with_ending(await self.message(reply_id))
        return self._reader_for(reply), reply

    def _reader_for(self, reply: StoredMessage) -> Model | None:
        """The model that reads the reply's tokens, if one was loaded."""
        if reply.reply is None:
            return None
        settings = reply.reply.settings
        return self._service.models.reader_for(settings.model, settings.tokenizer)

    async def _model_of(self, reply: StoredMessage) -> Model:
        """The model that continues the reply: its own if it is offered here, else the one in use."""
        return await self._service.models.for_reply(_model_name(reply))

    async def _model_for(self, conversation: Conversation, parameters: Mapping[str, Any]) -> Model:
        """The model that the parameters of a turn or its conversation name, else the one in use."""
        name = settings.merge_parameters(conversation.parameters, parameters).get("model")
        models = self._service.models
        return await models.get(settings.check_parameters({"model": name})["model"]) if name else await models.ready()

    def _check_parameters(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of a conversation. Raises for one that is not valid, and for a model that is not offered."""
        checked = settings.check_parameters(parameters)
        if checked.get("model"):
            self._service.models.resolve(checked["model"])
        return checked

    async def _interrupt_waiting(self, reply: StoredMessage) -> StoredMessage:
        """A running reply of a dead process that waits for a model which is not offered here becomes an interrupted
        one. Others stay as they are."""
        if not _is_running(reply) or self._turns.get(reply.id) is not None or reply.reply is None:
            return reply
        if self._service.models.offers(reply.reply.settings.model):
            return reply  # it is recovered soon
        interrupted = await self._turns.interrupt_abandoned(reply.id)
        return await self.message(reply.id) if interrupted else reply

    async def _get_reply(self, id: str) -> StoredMessage:
        stored = await self.message(id)
        if stored.role is not Role.ASSISTANT:
            raise NotFound("reply", id)
        return stored

    def _running_turn(self, reply_id: str) -> Turn | None:
        turn = self._turns.get(reply_id)
        return turn if turn is not None and not turn.log.ended else None


async def _thread(function: Callable[P, T], *values: P.args, **named: P.kwargs) -> T:
    return await asyncio.to_thread(function, *values, **named)


def _key(key: str | None, suffix: str | int) -> str | None:
    return None if key is None else f"{key} {suffix}"


def _draft_conversation(owner: str, system: str) -> Conversation:
    """A conversation that is not stored yet, to check the request before anything is written."""
    now = datetime.now(UTC)
    return Conversation("", owner, "", False, system, {}, (), None, now, now)


def _model_name(reply: StoredMessage) -> str:
    return reply.reply.settings.model if reply.reply is not None else ""


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
