"""Puts the generated token ids of past replies into the prompt, where the template renders the same text.

The tokenizer may encode a text into other tokens than the model sampled. With the sampled ids the next prompt of a
conversation starts with exactly the tokens that are in the KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from palaver.phases import Vocabulary

PromptPiece = str | tuple[int, ...]
"""A part of the prompt: text to encode, or token ids."""

_MAX_SEARCHED_TOKENS = 1_000_000
"""Tokens of replies that may be compared without a match, in all positions together."""
_PEEK = 16
"""Bytes to compare first: most positions differ there."""


def match_history(
    text: str, header: str, opening: str, past_replies: Sequence[Sequence[int] | None], vocabulary: Vocabulary
) -> Iterator[PromptPiece]:
    """The text of the prompt with the token ids of past replies in place of their text.

    A reply stands after a header that opens an assistant's turn: complete, without the thought it started with, or with
    a thought that its prompt had opened. (Contents can't contain a header: control text in them is escaped.) A reply
    that follows no header stays text. The search is bounded: if too many replies do not match, the rest stays text.
    """
    size = len(vocabulary)
    replies = [tuple(ids) for ids in past_replies if ids and all(0 <= token_id < size for token_id in ids)]
    at = 0
    budget = _MAX_SEARCHED_TOKENS
    while header and replies and budget > 0 and (found := text.find(header, at)) >= 0:
        place = found + len(header)
        match = _find_reply(text, place, opening, replies, vocabulary)
        budget -= sum(map(len, replies if match is None else replies[: match[3]]))
        if match is None:
            yield text[at:place]
            at = place
            continue
        begin, ids, end, used = match
        yield text[at:begin]
        yield ids
        at = end
        del replies[: used + 1]
    yield text[at:]


def _find_reply(
    text: str, place: int, opening: str, replies: Sequence[tuple[int, ...]], vocabulary: Vocabulary
) -> tuple[int, tuple[int, ...], int, int] | None:
    """The first reply that stands at this place: its start, its ids, its end and its index."""
    begins = [place, place + len(opening)] if opening and text.startswith(opening, place) else [place]
    for number, ids in enumerate(replies):
        for begin in begins:
            if (match := _match_reply(text, begin, ids, vocabulary)) is not None:
                first, end = match
                return begin, ids[first:], end, number
    return None


def _match_reply(text: str, begin: int, ids: tuple[int, ...], vocabulary: Vocabulary) -> tuple[int, int] | None:
    """The first token of the reply that stands at `begin`, and the position where the reply ends."""
    pieces = [vocabulary[token_id] for token_id in ids]
    whole = b"".join(pieces)
    target = text[begin : begin + len(whole)].encode("utf-8", "surrogatepass")
    offset = 0
    for first, piece in enumerate(pieces[:-1]):
        if target.startswith(whole[offset : offset + _PEEK]) and target.startswith(whole[offset:]):
            return _with_end(begin, first, whole[offset:])
        offset += len(piece)
    return None


def _with_end(begin: int, first: int, data: bytes) -> tuple[int, int] | None:
    try:
        return first, begin + len(data.decode())
    except UnicodeDecodeError:  # the reply was cut inside a character
        return None
