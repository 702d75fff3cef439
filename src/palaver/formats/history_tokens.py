"""Past replies as they were generated: their own token ids, where the template writes what they say.

A text can be spelled by other tokens than the model once chose; with the ids of old, a conversation's next prompt
begins with exactly what the model has computed already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from palaver.phases import Vocabulary

Said = str | tuple[int, ...]
"""A piece of the prompt: text to be encoded, or ids to be taken as they are."""


def match_history(
    text: str, header: str, opening: str, past: Sequence[Sequence[int] | None], vocabulary: Vocabulary
) -> Iterator[Said]:
    """The prompt's text with each past reply's ids in its place.

    A reply stands behind the header that opens an assistant's turn (no content can spell that: control text in contents
    carries a mark), whole, without the thought it began with, or with a thought that the prompt had opened. Where the
    text behind no header is what a reply said, it stays text. The search is bounded: where too many replies are not
    what the template writes, the rest stays text.
    """
    size = len(vocabulary)
    replies = [tuple(ids) for ids in past if ids and all(0 <= token_id < size for token_id in ids)]
    at = 0
    budget = _BUDGET
    while header and replies and budget > 0 and (found := text.find(header, at)) >= 0:
        place = found + len(header)
        matched = _matched(text, place, opening, replies, vocabulary)
        budget -= sum(map(len, replies if matched is None else replies[: matched[3]]))
        if matched is None:
            yield text[at:place]
            at = place
            continue
        begin, ids, end, used = matched
        yield text[at:begin]
        yield ids
        at = end
        del replies[: used + 1]
    yield text[at:]


def _matched(
    text: str, place: int, opening: str, replies: Sequence[tuple[int, ...]], vocabulary: Vocabulary
) -> tuple[int, tuple[int, ...], int, int] | None:
    """Where the ids begin, the ids, where they end, and whose they are: the next reply's, or that of a later one."""
    begins = [place, place + len(opening)] if opening and text.startswith(opening, place) else [place]
    for number, ids in enumerate(replies):
        for begin in begins:
            if (kept := _kept(text, begin, ids, vocabulary)) is not None:
                return begin, ids[kept[0] :], kept[1], number
    return None


def _kept(text: str, begin: int, ids: tuple[int, ...], vocabulary: Vocabulary) -> tuple[int, int] | None:
    """From which token on the reply stands there, and where it ends."""
    pieces = [vocabulary[token_id] for token_id in ids]
    whole = b"".join(pieces)
    target = text[begin : begin + len(whole)].encode("utf-8", "surrogatepass")
    offset = 0
    for first, piece in enumerate(pieces[:-1]):
        if target.startswith(whole[offset : offset + _PEEK]) and target.startswith(whole[offset:]):
            return _ended(begin, first, whole[offset:])
        offset += len(piece)
    return None


_BUDGET = 1_000_000
"""Tokens of replies that may be looked at in vain, in all places together."""
_PEEK = 16
"""Bytes that are compared before all are: most places differ at once."""


def _ended(begin: int, first: int, said: bytes) -> tuple[int, int] | None:
    try:
        return first, begin + len(said.decode())
    except UnicodeDecodeError:  # the reply was cut inside of a character
        return None
