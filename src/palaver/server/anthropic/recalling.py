"""The tokens of a begun reply that its client sends back: remembered, or told by its signatures, or else its words'."""

from __future__ import annotations

from collections.abc import Collection

from palaver.errors import PalaverError
from palaver.events import fold
from palaver.messages import Message, Role
from palaver.phases import Vocabulary
from palaver.server.anthropic.conversing import Turn
from palaver.server.openai.asking import Asked, checked_ids
from palaver.server.openai.remembering import Remembered, spelled


def recalled(what: Asked, begun: Turn, remembered: Remembered) -> tuple[int, ...]:
    """The ids it goes on from; none where only its words are known."""
    request = what.request
    replies = sum(message.role is Role.ASSISTANT for message in request.messages) + 1
    kept = remembered.past(request.owner, (*request.messages, begun.message), [None] * replies)[-1]
    prompt = what.model.prompt(request, (), begun.message)
    for ids in (kept, _spliced(what.model.vocabulary, prompt.reply_ids, begun)):
        said = _open(ids or (), prompt.phases.ends)
        if said and _says(what, said, begun.message):
            return said
    return ()


def _spliced(vocabulary: Vocabulary, written: tuple[int, ...], begun: Turn) -> tuple[int, ...]:
    """What the thoughts were made of, then the rest as it is written; none where the two do not meet."""
    if not begun.ids or not all(token_id < len(vocabulary) for token_id in begun.ids):
        return ()
    signed = b"".join(vocabulary[token_id] for token_id in begun.ids)
    text = b"".join(vocabulary[token_id] for token_id in written)
    if not text.startswith(signed):
        return begun.ids if signed.startswith(text) else ()
    at, place = 0, 0
    while at < len(signed):
        at, place = at + len(vocabulary[written[place]]), place + 1
    return (*begun.ids, *written[place:]) if at == len(signed) else ()


def _open(ids: tuple[int, ...], ends: Collection[int]) -> tuple[int, ...]:
    """Without the end of the turn: whoever sends a reply back to go on wants more of it."""
    return ids[:-1] if ids and ids[-1] in ends else ids


def _says(what: Asked, ids: tuple[int, ...], message: Message) -> bool:
    """Whether these tokens are read as this reply, and are such as a reply may hold."""
    try:
        said = checked_ids(ids, what.model, what.request)
        reader = what.model.reader(what.request, said)
        found = fold([*reader.open(), *reader.close()]).message
    except PalaverError:
        return False
    return _words(found) == _words(message)


def _words(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [(call.name, spelled(call.arguments)) for call in message.tool_calls]
    return message.thinking.rstrip(), message.text, calls
