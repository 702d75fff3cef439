"""A chat request that names a conversation lands in it: what is new is kept there, and so is the reply.

A client may send the whole history, as OpenAI's clients do, or only what it says now. The history is looked for in
the conversation's tree from its root; what is not there begins a branch. One message alone is said where the
conversation was left. The turn belongs to the server: it goes on when the client leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from palaver.chat.interface import Chat
from palaver.chat.model import Model
from palaver.errors import BadParameter
from palaver.messages import Message
from palaver.server.metrics import Metrics
from palaver.server.openai.asking import Asked, Shown, check_model, ignored_of, shown
from palaver.server.openai.conversing import conversing
from palaver.server.openai.fields import ChatRequest
from palaver.server.openai.following import followed
from palaver.server.openai.naming import in_their_words
from palaver.server.openai.placing import Begun, Landed, begin, wanted_of
from palaver.server.openai.sounding import sounding_of
from palaver.server.openai.speaking import Speaking
from palaver.server.openai.streams import answer
from palaver.server.openai.unknown import check_all, ignored_header
from palaver.server.state import State

HEADER = "x-conversation"


def conversation_of(metadata: Mapping[str, Any] | None, headers: Mapping[str, str]) -> str | None:
    """The conversation that a request names."""
    inside = (metadata or {}).get("conversation")
    if inside is not None and not isinstance(inside, str):
        raise BadParameter("metadata.conversation", inside, "must be the id of a conversation, or new")
    return inside or headers.get(HEADER) or None


async def landed(request: Request, body: ChatRequest, name: str, owner: str, state: State) -> Response:
    chat, model = state.service.chat(owner), state.service.models.current()
    key, how = request.headers.get("idempotency-key"), shown(body)
    with in_their_words():
        check_all(body)
        check_model(body.model, model, state.settings)
        given = conversing(body, state.settings.limits.messages)
        sounding = await sounding_of(how, owner, state)
        begun = None
        if given.begun is not None:
            begun = Begun(given.begun, given.said, body.continue_final_message in (None, True))
        place = await begin(chat, model, wanted_of(body, model, state), given.messages, name, state, key, begun)
        unsplit = body.reasoning_format == "none"
        speaking = await turns_told(state, chat, model, place, how, body.top_logprobs or 0, unsplit, given.begun)
    stream = speaking.tell() if sounding is None else sounding.of(speaking.tell())
    ignored = ignored_header(ignored_of(body, state.settings, model.format))
    return await answer(request, speaking, stream, place.value(), {HEADER: place.conversation, **ignored})


async def turns_told(
    state: State,
    chat: Chat,
    model: Model,
    place: Landed,
    how: Shown,
    logprobs: int = 0,
    unsplit: bool = False,
    begun: Message | None = None,
) -> Speaking:
    """The replies that were begun, as replies without a conversation are told. The turns are counted already."""
    utterances = [
        await followed(state, chat, model, await chat.message(reply), logprobs, unsplit) for reply in place.replies
    ]
    asked = Asked(model, utterances[0].request, len(utterances), how, begun)
    return Speaking(asked, utterances, Metrics())
