"""Speculation: draft tokens are looked up in the text so far and verified in one pass.

The next token of a sequence depends on its text, its settings and its seed alone. So a draft never changes a reply: it
is accepted where it is the token that is sampled anyway, and the tokens behind the first other one are dropped. What
is gained is time, since a pass over a few tokens costs little more than one over a single token.

How much more it costs is measured while passes run, and how often drafts hold is counted for each reply. A draft has
the length from which most is to be expected, and a reply may lose no more time by drafts than it has gained by them, a
hundredth of its own time and half a pass."""

from __future__ import annotations

from collections.abc import Sequence

NGRAM = 2
"""Tokens that must stand elsewhere in the text for those behind them to be a draft."""
MAX_INDEXED = 16_384
"""Tokens of a prompt that are searched, the last ones."""
MAX_PLACES, MAX_MATCH = 8, 32
"""How many earlier places of the last tokens are compared, the latest first, and how many tokens before each."""
MAX_ROWS = 16
"""Rows of a pass with drafts: a larger pass costs more for each row than it gains."""
DRAFT_LENGTHS = (1, 3, 7, 15)
"""Tokens of a draft. With the token before them multiples of four rows, which compiled steps compute together."""

FIRST_CREDIT, MAX_CREDIT = 0.5, 8.0
ALLOWANCE = 0.01
"""The time that a reply may lose by drafts, in passes without drafts: at first, at most, and more for each token."""

MATCH_SIZES = (5, 9)
"""Longer matches hold more often: they are counted apart from each of these sizes on."""
FIRST_SHARES = (0.5, 0.7, 0.9)
"""By size of the match, the share of tokens that is expected to hold before any was verified."""
SHARE_WEIGHT = 0.15
"""The weight of the last token in the share of those that held."""
RECOVERY = 0.01
"""By how much a share goes back to the first one whenever a draft is left out."""
PROMISING_MATCH = MATCH_SIZES[0]

GUESSED_EXTRA = 0.1
"""The cost of a further row before it was measured, as a share of a pass."""
TIME_WEIGHT = 0.2
MAX_OUTLIER = 2.0
"""A pass that took more than so many times its usual time counts as one that took so long: the machine was busy."""


class PassCosts:
    """The times of passes by what they compute, each with the sampling of its first tokens or, where passes run ahead
    while the host samples, of all."""

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}
        """By the number of sequences: the seconds of a pass with one token of each."""
        self._ratios: dict[int, dict[int, float]] = {}
        """By the numbers of sequences and of draft tokens: the time of a pass with them over that of one without."""

    def record_plain(self, sequences: int, seconds: float) -> None:
        """A pass with one token of each sequence."""
        self._plain[sequences] = _average(self._plain.get(sequences, seconds), seconds)

    def record_drafting(self, sequences: int, drafted: int, seconds: float) -> float:
        """A pass with so many draft tokens. Returns what each of them costs, in tokens that come without drafts."""
        ratio = min(1.0 + drafted, seconds / self._plain.get(sequences, seconds))
        ratios = self._ratios.setdefault(sequences, {})
        ratios[drafted] = _average(ratios.get(drafted, ratio), ratio)
        return self.extra(sequences, drafted)

    def extra(self, sequences: int, drafted: int) -> float:
        """What each draft token is expected to cost: that of the pass of the nearest size."""
        ratios = self._ratios.get(sequences)
        if not ratios:
            return GUESSED_EXTRA
        nearest = min(ratios, key=lambda size: abs(size - drafted))
        return max(0.0, sequences * (ratios[nearest] - 1) / nearest)


def _average(known: float, now: float) -> float:
    return known + TIME_WEIGHT * (min(now, MAX_OUTLIER * known) - known)


class DraftLookup:
    """The drafts of one sequence: what followed the last tokens where they stood before."""

    def __init__(self, token_ids: list[int]) -> None:
        """`token_ids` of the sequence, which grow."""
        self._token_ids = token_ids
        self._first = max(0, len(token_ids) - MAX_INDEXED)
        self._following: dict[tuple[int, ...], int] = {}
        """By the tokens before it, the latest position behind them."""
        self._earlier: list[int] = []
        """By position, from the first indexed one on: the position before that is behind the same tokens, or 0."""
        self._distance = 0
        """How far back the source of the last draft lies, if it held; a text with one change goes on there."""
        self._shares = list(FIRST_SHARES)
        self._credit = FIRST_CREDIT
        self._credited = len(token_ids)
        """The tokens up to which there was an allowance."""
        self._match = 0
        """The size of the match of the last draft."""

    def is_promising(self, max_tokens: int, costs: PassCosts, sequences: int = 1) -> bool:
        """Whether the tokens before the next one stood in the text before, so that drafts are likely, and as many as
        `max_tokens` would pay."""
        place, match = self._find()
        if not place or match < PROMISING_MATCH:
            return False
        self._match = match
        self._allow()
        return self._best_length(max_tokens, costs, sequences) > 0

    def propose(self, max_tokens: int, costs: PassCosts, sequences: int = 1) -> Sequence[int]:
        """The tokens that may come next, at most `max_tokens`; none where it is better to do without. `sequences` share
        the pass."""
        ids = self._token_ids
        self._allow()
        place, self._match = self._find()
        if not place:
            return ()
        length = self._best_length(max_tokens, costs, sequences)
        self._distance = period = len(ids) - place
        return [ids[place + offset % period] for offset in range(length)]

    def record(self, proposed: int, accepted: int, extra: float) -> None:
        """Call after a draft was verified, which cost `extra` for each of its tokens."""
        self._credit = min(MAX_CREDIT, self._credit + accepted - proposed * extra)
        kind = self._kind
        for place in range(min(proposed, accepted + 1)):
            self._shares[kind] += SHARE_WEIGHT * ((place < accepted) - self._shares[kind])
        if not accepted:
            self._distance = 0

    def _allow(self) -> None:
        """Adds the allowance for the tokens since the last call."""
        tokens = len(self._token_ids)
        self._credit = min(MAX_CREDIT, self._credit + ALLOWANCE * (tokens - self._credited))
        self._credited = tokens

    @property
    def _kind(self) -> int:
        return sum(self._match >= size for size in MATCH_SIZES)

    def _best_length(self, max_tokens: int, costs: PassCosts, sequences: int) -> int:
        share, best, length = self._shares[self._kind], 1.0, 0
        for size in DRAFT_LENGTHS:
            size = min(size, max_tokens)
            cost = size * costs.extra(sequences, size * sequences)
            if cost <= self._credit:
                expected = sum(share**place for place in range(size + 1)) / (1 + cost)
                if expected > best:
                    best, length = expected, size
        if not length:
            self._shares[self._kind] += RECOVERY * (FIRST_SHARES[self._kind] - share)
        return length

    def _find(self) -> tuple[int, int]:
        """The position behind the longest earlier match of the last tokens, and its size; 0 where there is none."""
        self._index()
        ids, end = self._token_ids, len(self._token_ids)
        best, size = 0, 0
        if self._distance and end > self._distance and ids[end - self._distance - 1] == ids[-1]:
            best, size = end - self._distance, max(NGRAM, self._match_size(end - self._distance))
        place = self._following.get(tuple(ids[-NGRAM:]), 0)
        for _ in range(MAX_PLACES):
            if not place or size >= MAX_MATCH:
                break
            match = self._match_size(place)
            if match > size:
                best, size = place, match
            place = self._earlier[place - self._first]
        return best, size

    def _match_size(self, place: int) -> int:
        """How many tokens before this position are those that the text ends with."""
        ids, end = self._token_ids, len(self._token_ids)
        size, most = 0, min(MAX_MATCH, place)
        while size < most and ids[place - 1 - size] == ids[end - 1 - size]:
            size += 1
        return size

    def _index(self) -> None:
        """Adds the positions of new tokens. The end of the text is not one of them: nothing follows there yet."""
        ids, earlier = self._token_ids, self._earlier
        for position in range(self._first + len(earlier), len(ids)):
            key = tuple(ids[max(0, position - NGRAM) : position])
            earlier.append(self._following.get(key, 0))
            self._following[key] = position
