"""Builds the request of a reply from a branch in the store, and rebuilds it from a stored reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from palaver.chat.model import Model, draw_seed, extend_limit, offset_limits, text_size
from palaver.chat.parameters import (
    LOGPROBS,
    LOOP,
    OFFER,
    Overflow,
    loop_options,
    merge_parameters,
    options_from_json,
    options_to_json,
    resolve_parameters,
)
from palaver.chat.reply_stream import ReplyRequest
from palaver.errors import BadParameter, ContextOverflow, NothingToContinue
from palaver.formats.base import Format
from palaver.generation import Prompt
from palaver.messages import Message, Role, Text, Thinking
from palaver.phases import Phase
from palaver.store import Conversation, ReplySettings, ReplyStatus, Store, StoredMessage, prompt_messages
from palaver.tools.toolbox import server_of

_HEALING_BYTES, _HEALING_AT = "healing_bytes", "healing_at"
"""The entries in the options of a stored reply that `Prompt.healing` and `Prompt.healing_at` are read from."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    request: ReplyRequest
    settings: ReplySettings
    prompt: Prompt
    """The request, rendered."""


@dataclass(frozen=True, slots=True)
class PartialReply:
    """The beginning of a reply, to be continued as a new message."""

    message: Message
    token_ids: tuple[int, ...] = ()
    """Its token ids. Without them its text is tokenized."""
    is_stored: bool = False
    """Whether the token ids are those of a stored reply. Others are checked."""


Adjust = Callable[[Mapping[str, Any], Format], Mapping[str, Any]]


class RequestBuilder:
    """Reads the store; may be used from any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.adjust: Adjust | None = None
        """Applies an operator's own parameters to those of a turn."""

    def build(
        self,
        model: Model,
        conversation: Conversation,
        path: Sequence[StoredMessage],
        new_messages: Sequence[Message],
        parameters: Mapping[str, Any],
        partial: PartialReply | None = None,
    ) -> PreparedRequest:
        """The request of a new reply to the path and to `new_messages`, which are not stored yet.

        Raises ContextOverflow if the prompt is too long and `overflow` is "refuse".
        """
        now = conversation.created_at.replace(tzinfo=None)
        turn_parameters = parameters
        parameters = merge_parameters(conversation.parameters, parameters)
        if self.adjust is not None:
            parameters = self.adjust(parameters, model.format)
        resolved = resolve_parameters(model.engine.info.defaults, parameters, draw_seed(), now)
        sampling = replace(resolved.sampling, logprobs=max(resolved.sampling.logprobs, LOGPROBS))
        path = without_empty_replies(path)
        history = (*self._store.messages.load_path(path), *new_messages)
        system = conversation.system if resolved.system is None else resolved.system
        request = ReplyRequest(
            prompt_messages(system, history),
            sampling,
            resolved.tools,
            resolved.options,
            resolved.choice,
            conversation.owner_id,
            self.past_replies(model, path),
            conversation.id,
        )
        offer = turn_parameters.get(OFFER, {})
        try:
            dropped, rendered = fit_prompt(model, request, resolved.overflow)
        except BadParameter as error:
            if error.name != "tools" or error.value not in offer.get("tools", ()):
                raise
            turn_parameters = {**turn_parameters, OFFER: _with_notice(offer, str(error.value), error.why)}
            request = replace(request, options=replace(request.options, must_call=()))
            dropped, rendered = fit_prompt(model, request, resolved.overflow)
        request = without_oldest(request, dropped)
        settings = _settings(model, request, system, dropped, resolved.note)
        if resolved.tool_servers:
            loop = loop_options(resolved.tool_servers, turn_parameters)
            settings = replace(settings, options={**settings.options, LOOP: loop})
        return _continue_partial(model, PreparedRequest(request, settings, rendered), partial)

    def rebuild(self, model: Model, reply: StoredMessage, owner: str) -> ReplyRequest:
        """The request of a stored reply, from its settings and the branch above it."""
        assert reply.reply is not None
        settings = reply.reply.settings
        path = without_empty_replies(self._store.messages.path(reply.parent_id)) if reply.parent_id else ()
        messages = prompt_messages(settings.options.get("system", ""), self._store.messages.load_path(path))
        request = ReplyRequest(
            messages,
            extend_limit(settings.sampling, settings.limit_from),
            settings.tools,
            options_from_json(settings.options),
            settings.choice,
            owner,
            self.past_replies(model, path),
            reply.conversation_id,
            settings.answer_at,
            *_read_healing(settings.options),
        )
        return without_oldest(request, settings.options.get("dropped", 0))

    def past_replies(self, model: Model, path: Sequence[StoredMessage]) -> tuple[tuple[int, ...] | None, ...]:
        """The token ids of the replies on a path `without_empty_replies`; None for those of another tokenizer."""
        return tuple(self._ids(model, stored) for stored in path if stored.role is Role.ASSISTANT)

    def _ids(self, model: Model, stored: StoredMessage) -> tuple[int, ...] | None:
        if stored.reply is None or stored.reply.settings.tokenizer != model.tokenizer:
            return None
        return self._store.replies.token_ids(stored.id)


def _with_notice(offer: Mapping[str, Any], tool: str, why: str) -> dict[str, Any]:
    """The offer with a notice about a tool of a server, whose schema no grammar can hold: its call is not forced."""
    server = server_of(offer["tools"][tool])
    notices = offer.get("notices", {})
    return {**offer, "notices": {**notices, server: [*notices.get(server, ()), f"The tool {tool!r}: {why}."]}}


def _continue_partial(model: Model, prepared: PreparedRequest, partial: PartialReply | None) -> PreparedRequest:
    """The request for the rest of a partial reply, or of one that starts with a given text. Its limits count the new
    tokens only: `max_tokens` is stored as it was asked for, with the token from which it counts."""
    request, prompt = prepared.request, prepared.prompt
    if partial is not None:
        ids = partial.token_ids
        if ids and not partial.is_stored:
            check_token_ids(ids, model, request)
        prompt = model.prompt(request, ids, None if ids else partial.message)
    given = len(prompt.reply_ids)
    sampling, settings = offset_limits(request.sampling, given), prepared.settings
    if given:
        stored_sampling = replace(sampling, max_tokens=request.sampling.max_tokens)
        settings = replace(settings, sampling=stored_sampling).extended_at(given)
    if prompt.healing:
        request = replace(request, healing=prompt.healing, healing_at=prompt.healing_at)
        stored = {_HEALING_BYTES: prompt.healing.hex(), _HEALING_AT: prompt.healing_at}
        settings = replace(settings, options={**settings.options, **stored})
    return PreparedRequest(replace(request, sampling=sampling), settings, prompt)


def _read_healing(options: Mapping[str, Any]) -> tuple[bytes, int]:
    return bytes.fromhex(options.get(_HEALING_BYTES, "")), options.get(_HEALING_AT, 0)


def without_healing(settings: ReplySettings) -> ReplySettings:
    """The settings of a reply that need not write the bytes of token healing."""
    options = {name: value for name, value in settings.options.items() if name not in (_HEALING_BYTES, _HEALING_AT)}
    return replace(settings, options=options)


def check_token_ids(ids: tuple[int, ...], model: Model, request: ReplyRequest) -> tuple[int, ...]:
    """Checks the token ids that a client sent for a reply. Of control tokens only those of a reply are allowed."""
    prompt = model.prompt(request)
    markers = _markers(prompt)
    size = len(model.vocabulary) or model.engine.info.vocabulary_size
    for place, token_id in enumerate(ids):
        if not 0 <= token_id < size:
            raise BadParameter("token_ids", token_id, f"token ids go from 0 to {size - 1}")
        if token_id in prompt.phases.hidden and token_id not in prompt.phases.ends | markers:
            raise BadParameter("token_ids", token_id, "a reply can't hold this control token")
        if token_id in prompt.phases.ends and token_id not in markers:
            if place == len(ids) - 1:
                raise NothingToContinue("The reply is complete: there is nothing to continue.")
            raise BadParameter("token_ids", token_id, "the reply ends here, but there is more of it")
    return ids


def _markers(prompt: Prompt) -> frozenset[int]:
    """Control tokens that change the phase, without those that are merely skipped in an answer."""
    states = prompt.phases.states
    found = {t.marker for state in states for t in state.triggers if isinstance(t.marker, int)}
    strays = {
        t.marker
        for place, state in enumerate(states)
        for t in state.triggers
        if state.phase is Phase.ANSWER and state.other is None and t.to == place
    }
    return frozenset(marker for marker in found if marker not in strays)


def without_empty_replies(path: Sequence[StoredMessage]) -> tuple[StoredMessage, ...]:
    """The path without replies that were cut before their first text: a model would read empty turns."""
    return tuple(stored for stored in path if not _is_empty(stored))


def _is_empty(stored: StoredMessage) -> bool:
    if stored.reply is None or stored.reply.status is ReplyStatus.DONE:
        return False
    return all(isinstance(part, Text | Thinking) and not part.text for part in stored.parts)


def without_oldest(request: ReplyRequest, dropped: int) -> ReplyRequest:
    """The request without that many of its oldest messages; the system prompt stays."""
    if not dropped:
        return request
    start = _conversation_start(request.messages)
    removed = request.messages[start : start + dropped]
    messages = (*request.messages[:start], *request.messages[start + dropped :])
    replies = sum(message.role is Role.ASSISTANT for message in removed)
    return replace(request, messages=messages, past_replies=request.past_replies[replies:])


def fit_prompt(model: Model, request: ReplyRequest, overflow: Overflow) -> tuple[int, Prompt]:
    """How many of the oldest messages to drop, in whole exchanges, so that the prompt fits; and the shortened prompt.

    Rendering is what takes time: the position is interpolated from the sizes of the messages, and every third probe
    bisects, so that a few probes suffice for any conversation.
    """
    starts, sizes = _exchange_starts(request.messages)
    below, above = (-1, 0), (len(starts), 0)
    """The last exchange from which on the prompt is too long, and the first from which on it fits; their tokens."""
    fitting: Prompt | None = None
    probe, probes = 0, 1
    while below[0] + 1 < above[0]:
        try:
            fitting = model.prompt(without_oldest(request, starts[probe]))
        except ContextOverflow as error:
            if overflow == "refuse" or probe + 1 == len(starts):
                raise
            below = (probe, error.tokens)
        else:
            above = (probe, len(fitting))
        target = _interpolate(sizes, below, above, model.engine.info.context_length)
        middle = (below[0] + above[0]) // 2
        probe = max(below[0] + 1, min(above[0] - 1, middle if probes % 3 == 0 else target, len(starts) - 1))
        probes += 1
    assert fitting is not None
    return starts[above[0]], fitting


def _conversation_start(messages: Sequence[Message]) -> int:
    return 1 if messages and messages[0].role is Role.SYSTEM else 0


def _exchange_starts(messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    """The numbers of messages that may be dropped, and for each the characters of the messages that are left."""
    turns = messages[_conversation_start(messages) :]
    starts = [0, *(index for index, message in enumerate(turns) if message.role is Role.USER and index > 0)]
    left = [*accumulate((text_size([message]) for message in reversed(turns)), initial=0)][::-1]
    return starts, [left[start] for start in starts]


def _interpolate(sizes: Sequence[int], below: tuple[int, int], above: tuple[int, int], limit: int) -> int:
    """The first exchange from which on the prompt probably fits, by its characters: tokens grow in proportion."""
    (long, long_tokens), (short, short_tokens) = below, above
    short_size = sizes[short] if short < len(sizes) else 0
    if long < 0 or long_tokens <= short_tokens:
        return short - 1
    share = (limit - short_tokens) / (long_tokens - short_tokens)
    wanted = short_size + share * (sizes[long] - short_size)
    return next((index for index in range(long + 1, len(sizes)) if sizes[index] <= wanted), len(sizes) - 1)


def _settings(model: Model, request: ReplyRequest, system: str, dropped: int, note: Mapping[str, Any]) -> ReplySettings:
    options = options_to_json(request.options)
    if system:
        options["system"] = system
    if dropped:
        options["dropped"] = dropped
    if note:
        options["note"] = dict(note)
    settings = ReplySettings(model.name, request.sampling, model.tokenizer, options, request.tools, request.choice)
    return settings.continued_by(model.engine.info.fingerprint, 0)
