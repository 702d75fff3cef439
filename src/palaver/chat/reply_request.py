"""From a branch in the store to what decides a reply, and back from a reply to what decided it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from palaver.chat.model import Model, draw_seed
from palaver.chat.parameters import (
    LOGPROBS,
    Overflow,
    merge_parameters,
    options_from_json,
    options_to_json,
    resolve_parameters,
)
from palaver.chat.reply_stream import ReplyRequest
from palaver.errors import ContextOverflow
from palaver.formats.base import Format
from palaver.generation import Prompt
from palaver.messages import Message, Role, Text, Thinking
from palaver.store import Conversation, ReplySettings, ReplyStatus, Store, StoredMessage, prompt_messages


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    request: ReplyRequest
    settings: ReplySettings
    prompt: Prompt
    """The request, rendered."""


Adjust = Callable[[Mapping[str, Any], Format], Mapping[str, Any]]


class RequestBuilder:
    """Reads the store; may be used from any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.adjust: Adjust | None = None
        """Applies an operator's own parameters to those of a turn."""

    def new(
        self,
        model: Model,
        conversation: Conversation,
        path: Sequence[StoredMessage],
        more: Sequence[Message],
        parameters: Mapping[str, Any],
    ) -> PreparedRequest:
        """What a new reply behind the path (and `more`, which isn't stored yet) is decided by.

        Raises whatever makes it impossible, such as ContextOverflow where shortening is not wanted.
        """
        now = conversation.created_at.replace(tzinfo=None)
        parameters = merge_parameters(conversation.parameters, parameters)
        if self.adjust is not None:
            parameters = self.adjust(parameters, model.format)
        decided = resolve_parameters(model.engine.info.defaults, parameters, draw_seed(), now)
        sampling = replace(decided.sampling, logprobs=max(decided.sampling.logprobs, LOGPROBS))
        path = spoken(path)
        said = (*self._store.messages.full_path(path), *more)
        system = conversation.system if decided.system is None else decided.system
        request = ReplyRequest(
            prompt_messages(system, said),
            sampling,
            decided.tools,
            decided.options,
            decided.choice,
            conversation.owner_id,
            self.past(model, path),
            conversation.id,
        )
        dropped, rendered = fit(model, request, decided.overflow)
        request = replace(request, messages=without_oldest(request.messages, dropped))
        return PreparedRequest(request, _settings(model, request, system, dropped, decided.note), rendered)

    def of(self, model: Model, reply: StoredMessage, owner: str) -> ReplyRequest:
        """What a reply was decided by, from its record and the branch above it."""
        assert reply.reply is not None
        made_by = reply.reply.settings
        path = spoken(self._store.messages.path(reply.parent_id)) if reply.parent_id else ()
        whole = prompt_messages(made_by.options.get("system", ""), self._store.messages.full_path(path))
        return ReplyRequest(
            without_oldest(whole, made_by.options.get("dropped", 0)),
            made_by.sampling,
            made_by.tools,
            options_from_json(made_by.options),
            made_by.choice,
            owner,
            self.past(model, path),
            reply.conversation_id,
            made_by.answer_at,
        )

    def past(self, model: Model, path: Sequence[StoredMessage]) -> tuple[tuple[int, ...] | None, ...]:
        """The ids of the replies on the path, where this model's tokenizer made them. The path is a `spoken` one."""
        return tuple(self._ids(model, stored) for stored in path if stored.role is Role.ASSISTANT)

    def _ids(self, model: Model, stored: StoredMessage) -> tuple[int, ...] | None:
        if stored.reply is None or stored.reply.settings.tokenizer != model.tokenizer:
            return None
        return self._store.replies.token_ids(stored.id)


def spoken(path: Sequence[StoredMessage]) -> tuple[StoredMessage, ...]:
    """The path without replies that were cut before they said anything: to a model they would be empty turns."""
    return tuple(stored for stored in path if not _is_empty(stored))


def _is_empty(stored: StoredMessage) -> bool:
    if stored.reply is None or stored.reply.status is ReplyStatus.DONE:
        return False
    return all(isinstance(part, Text | Thinking) and not part.text for part in stored.parts)


def without_oldest(messages: Sequence[Message], dropped: int) -> tuple[Message, ...]:
    """Without that many of the oldest messages; the system prompt stays."""
    kept = 1 if messages and messages[0].role is Role.SYSTEM else 0
    return (*messages[:kept], *messages[kept + dropped :])


def oldest_to_drop(model: Model, request: ReplyRequest, overflow: Overflow) -> int:
    """How many of the oldest messages have to go, whole exchanges at a time, so that the prompt fits."""
    return fit(model, request, overflow)[0]


def fit(model: Model, request: ReplyRequest, overflow: Overflow) -> tuple[int, Prompt]:
    """How many of the oldest messages have to go, and the prompt without them."""
    dropped = 0
    while True:
        try:
            prompt = model.prompt(replace(request, messages=without_oldest(request.messages, dropped)))
        except ContextOverflow:
            further = _next_exchange(without_oldest(request.messages, dropped))
            if overflow == "refuse" or further is None:
                raise
            dropped += further
        else:
            return dropped, prompt


def _next_exchange(messages: Sequence[Message]) -> int | None:
    """How many messages the oldest exchange has; None where it is the only one."""
    said = [message for message in messages if message.role is not Role.SYSTEM]
    later = [place for place, message in enumerate(said) if message.role is Role.USER and place > 0]
    return later[0] if later else None


def _settings(model: Model, request: ReplyRequest, system: str, dropped: int, note: Mapping[str, Any]) -> ReplySettings:
    options = options_to_json(request.options)
    if system:
        options["system"] = system
    if dropped:
        options["dropped"] = dropped
    if note:
        options["note"] = dict(note)
    made_by = ReplySettings(model.name, request.sampling, model.tokenizer, options, request.tools, request.choice)
    return made_by.continued_by(model.engine.info.fingerprint, 0)
