"""Speculation: draft tokens are looked up in the text so far and verified in one pass.

The next token of a sequence depends on its text, its settings and its seed alone. So a draft never changes a reply: it
is accepted where it is the token that is sampled anyway, and the tokens behind the first other one are dropped. What
is gained is time, since a pass over a few tokens costs little more than one over a single token.

How much more it costs is measured while passes run, and how often drafts hold is counted for each reply. A draft has
the length from which most is to be expected. A reply drafts as long as what it may lose, times the chance that it does,
is no more than what it has gained by drafts, a two-hundredth of its own time and half a pass.

What a reply begins with is often known before it has a token: templates of thinking models open each reply with the
same marker. What the last two replies behind the same kind of prompt have begun with is a draft, too; it is computed in
the pass over the end of the prompt."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import takewhile
from statistics import median

from cachetools import LRUCache

NGRAM = 2
"""Tokens that must stand elsewhere in the text for those behind them to be a draft."""
MAX_INDEXED = 16_384
"""Tokens of a prompt that are searched, the last ones."""
MAX_PLACES, MAX_MATCH = 8, 32
"""How many earlier places of the last tokens are compared, the latest first, and how many tokens before each."""
RESUME_WINDOW, RESUME_TOKENS = 8, 16
"""After a change the text goes on in its source: so many tokens there may be the last one, if so many came since."""
MAX_ROWS = 16
"""Rows of a pass with drafts: a larger pass costs more for each row than it gains."""
DRAFT_LENGTHS = (1, 3, 7, 15)
"""Tokens of a draft. With the token before them multiples of four rows, which compiled steps compute together."""

OPENING_TOKENS = 3
"""Of the start of a reply, which are drafted."""
PROMPT_END = 4
"""Tokens at the end of a prompt by which its kind is known: whether the reply may think, or follows a tool's result."""
MAX_OPENINGS = 1024
"""Kinds of prompts, of all owners, whose openings are remembered."""

FIRST_CREDIT, MAX_CREDIT = 0.5, 8.0
ALLOWANCE = 0.005
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
SKIPPED_MATCHES = 4
"""Where short matches don't pay, so many are left out before the next one is looked at."""

FIRST_MODEL_SHARE, MODEL_SHARE_WEIGHT = 0.7, 0.1
"""The same shares for the drafts of a model."""
MAX_HALVINGS = 4
GUESSED_DRAFTING = 0.1
"""What a draft model takes for a token before it was measured, as a share of a pass; and how often what was measured is
halved."""

LEAST_GAIN = 1.1
"""What drafts must promise where passes without them run ahead of the host."""
GUESSED_EXTRA = 0.1
"""The cost of a further row before it was measured, as a share of a pass."""
RECENT_PASSES = 8
"""A pass takes as long as the quickest of so many recent ones: the others met a busy machine or a cold cache."""
FORGOTTEN_AFTER = 32
"""Passes without drafts, for each recent measurement, after which the cost of drafts is unknown again: what seems too
dear is not measured otherwise."""


class PassCosts:
    """The times of passes by what they compute, each with the sampling of its first tokens or, where passes run ahead
    while the host samples, of all. What further tokens take is known apart from that."""

    def __init__(self, waits_for_host: bool = False) -> None:
        """`waits_for_host`: only passes with drafts wait for the host, and what it takes differs from pass to pass. So
        their cost is that of the median pass, not of the quickest, and they must promise more."""
        self._choose = median if waits_for_host else min
        self._waits_for_host = waits_for_host
        self.least_gain = LEAST_GAIN if waits_for_host else 1.0
        """How many times the tokens of a pass without drafts are to be expected in the same time."""
        self._plain: dict[int, deque[float]] = {}
        """By the number of sequences: the seconds of recent passes with one token of each."""
        self._passes: Counter[int] = Counter()
        """By the number of sequences: how many such passes there were."""
        self._ratios: dict[int, dict[int, _Ratios]] = {}
        """By the numbers of sequences and of draft tokens: the time of a pass with them over that of one without."""
        self._last_drafts: tuple[int, _Ratios] | None = None
        """Of the last pass on the host, if it had drafts: the number of its sequences, and what is known of such."""
        self._drafts: dict[tuple[int, int], tuple[int, Sequence[tuple[int, float, float]]]] = {}
        """What `drafts` returned, and up to which pass it holds."""
        self._drafting: dict[int, tuple[int, deque[float]]] = {}
        """By the number of sequences: what a draft model took for one token of each, over a pass without drafts, and
        how many such passes there were then."""

    def record_plain(self, sequences: int, seconds: float) -> None:
        """A pass with one token of each sequence."""
        plain = self._plain.setdefault(sequences, deque(maxlen=RECENT_PASSES))
        if self._last_drafts is not None:
            size, ratios = self._last_drafts
            self._last_drafts = None
            if size == sequences and plain:
                ratios.record_next(seconds / min(plain))
                self._drafts.clear()
                return
        plain.append(seconds)
        self._passes[sequences] += 1

    def knows_plain(self, sequences: int) -> bool:
        """Whether there was a pass with one token of each sequence, which others are compared with."""
        return sequences in self._plain

    def record_drafting(
        self, sequences: int, drafted: int, seconds: float, accepted: int = 0, sampling: float = 0.0
    ) -> None:
        """A pass with so many draft tokens. `seconds`: to its first sampled tokens. `sampling`: further seconds, in
        which the accepted ones were sampled."""
        ratios = self._ratios.setdefault(sequences, {}).setdefault(drafted, _Ratios(self._choose))
        plain = min(self._plain.get(sequences, (seconds,)))
        ratios.record(min(1.0 + drafted, seconds / plain), self._passes[sequences])
        if accepted:
            ratios.record_sampling(min(1.0, sequences * sampling / accepted / plain))
        if not self._waits_for_host:
            self._last_drafts = (sequences, ratios)
        self._drafts.clear()

    def record_model(self, sequences: int, tokens: int, seconds: float) -> None:
        """A draft model took so long for at most so many tokens of each sequence."""
        _, recent = self._drafting.get(sequences, (0, deque[float](maxlen=RECENT_PASSES)))
        recent.append(seconds / tokens / min(self._plain.get(sequences, (seconds,))))
        self._drafting[sequences] = self._passes[sequences], recent

    def drafting(self, sequences: int) -> float:
        """What a token of a draft model is expected to take, in passes without drafts. The longer it was not measured,
        the less: what seems too dear is not measured otherwise."""
        if sequences not in self._drafting:
            return GUESSED_DRAFTING
        passes, recent = self._drafting[sequences]
        age = (self._passes[sequences] - passes) // (FORGOTTEN_AFTER * len(recent))
        return median(recent) * 0.5 ** min(age, MAX_HALVINGS)

    def drafts(self, sequences: int, max_tokens: int) -> Sequence[tuple[int, float, float]]:
        """The lengths of drafts of each sequence up to `max_tokens`, the shortest first, with what each would cost, and
        each token of it that is accepted."""
        passes, key = self._passes[sequences], (sequences, max_tokens)
        until, found = self._drafts.get(key, (-1, ()))
        if passes > until:
            sizes = [min(size, max_tokens) for size in DRAFT_LENGTHS]
            found = [
                (size, size * self.extra(sequences, size * sequences), self.sampling(sequences, size * sequences))
                for size in sizes
            ]
            self._drafts[key] = passes + RECENT_PASSES, found
        return found

    def extra(self, sequences: int, drafted: int) -> float:
        """What each draft token is expected to cost, in tokens that come without drafts: that of the pass of the
        nearest size. A pass that is smaller than all known ones may be cheaper, so it is guessed and tried."""
        known = self._known(sequences)
        if not known:
            return GUESSED_EXTRA
        size = min(known, key=lambda size: abs(size - drafted))
        nearest = max(0.0, sequences * (known[size].typical - 1 + known[size].aftermath) / size)
        return min(nearest, GUESSED_EXTRA) if drafted < min(known) else nearest

    def sampling(self, sequences: int, drafted: int) -> float:
        """What each accepted token is expected to cost beside the pass: sampling it saves no time."""
        known = self._known(sequences)
        return known[min(known, key=lambda size: abs(size - drafted))].sampling if known else 0.0

    def _known(self, sequences: int) -> dict[int, _Ratios]:
        """What was measured recently, by the number of draft tokens."""
        now = self._passes[sequences]
        return {size: one for size, one in self._ratios.get(sequences, {}).items() if one.is_recent(now)}


class _Ratios:
    def __init__(self, choose: Callable[[Iterable[float]], float]) -> None:
        """`choose`: the typical one of recent ratios."""
        self._choose = choose
        self._recent: deque[float] = deque(maxlen=RECENT_PASSES)
        self.typical = 0.0
        self._next: deque[float] = deque(maxlen=RECENT_PASSES)
        self.aftermath = 0.0
        """By how much the next pass takes longer than others, in such passes: the cache holds less of the weights."""
        self._accepted: deque[float] = deque(maxlen=RECENT_PASSES)
        self.sampling = 0.0
        """What an accepted token takes beside the pass, in passes without drafts."""
        self._last_pass = 0
        """How many passes without drafts there were at the last measurement."""

    def record(self, ratio: float, passes: int) -> None:
        self._recent.append(ratio)
        self.typical = self._choose(self._recent)
        self._last_pass = passes

    def record_next(self, ratio: float) -> None:
        """A pass without drafts came after one with them."""
        self._next.append(ratio - 1)
        self.aftermath = max(0.0, median(self._next))

    def record_sampling(self, ratio: float) -> None:
        self._accepted.append(ratio)
        self.sampling = median(self._accepted)

    def is_recent(self, passes: int) -> bool:
        return passes - self._last_pass <= FORGOTTEN_AFTER * len(self._recent)


class DraftLookup:
    """The drafts of one sequence: what followed the last tokens where they stood before."""

    def __init__(self, token_ids: list[int]) -> None:
        """`token_ids` of the sequence, which grow."""
        self._token_ids = token_ids
        self._first = max(0, len(token_ids) - MAX_INDEXED)
        self._following: dict[tuple[int, ...], int] = {}
        """By the tokens before it, the latest position behind them."""
        self._earlier: list[int] = []
        """By position, from the first indexed one on: the latest one before that is behind the same tokens, or 0."""
        self._source, self._resumable = 0, 0
        """Where the source of the text goes on behind the last draft that held, or might have; a text with one change
        goes on there. And the number of tokens up to which that is looked at."""
        self._place = 0
        """The position of the last draft in the text."""
        self._matched = 0
        """How many tokens in a row stood behind the token before them earlier in the text. A match is at most one
        token longer."""
        self._skipped = 0
        """How many short matches are still to be left out."""
        self._shares = list(FIRST_SHARES)
        self._credit = FIRST_CREDIT
        self._credited = len(token_ids)
        """The tokens up to which there was an allowance."""
        self._match = 0
        """The size of the match of the last draft."""

    def is_promising(self, max_tokens: int, costs: PassCosts, sequences: int = 1) -> bool:
        """Whether the tokens before the next one stood in the text before, so that drafts are likely, and as many as
        `max_tokens` would pay."""
        place = self._index()
        if self._is_short():
            return False
        place, match = self._find(place)
        if not place or match < PROMISING_MATCH:
            return False
        self._match = match
        self._allow()
        return self._best_length(max_tokens, costs, sequences) > 0

    def propose(self, max_tokens: int, costs: PassCosts, sequences: int = 1) -> Sequence[int]:
        """The tokens that may come next, at most `max_tokens`; none where it is better to do without. `sequences` share
        the pass."""
        place, ids = self._index(), self._token_ids
        if not place and len(ids) > self._resumable:
            return ()
        if self._skipped and self._is_short():
            self._skipped -= 1
            return ()
        self._allow()
        if self._credit <= 0:  # saves the search
            return ()
        place, self._match = self._find(place)
        length = self._best_length(max_tokens, costs, sequences) if place else 0
        if not length:
            self._skipped = SKIPPED_MATCHES
            return ()
        self._place, period = place, len(ids) - place
        return [ids[place + offset % period] for offset in range(length)]

    def record(self, proposed: int, accepted: int, extra: float, sampling: float = 0.0) -> None:
        """Call after a draft was verified, which cost `extra` for each of its tokens, and `sampling` for each accepted
        one."""
        self._credit = min(MAX_CREDIT, self._credit + accepted * (1 - sampling) - proposed * extra)
        kind = self._kind
        for place in range(min(proposed, accepted + 1)):
            self._shares[kind] += SHARE_WEIGHT * ((place < accepted) - self._shares[kind])
        if accepted or self._match >= PROMISING_MATCH:
            self._source = self._place + accepted
            self._resumable = len(self._token_ids) + RESUME_TOKENS

    def _allow(self) -> None:
        """Adds the allowance for the tokens since the last call."""
        tokens = len(self._token_ids)
        self._credit = min(MAX_CREDIT, self._credit + ALLOWANCE * (tokens - self._credited))
        self._credited = tokens

    @property
    def _kind(self) -> int:
        return sum(self._match >= size for size in MATCH_SIZES)

    def _best_length(self, max_tokens: int, costs: PassCosts, sequences: int) -> int:
        kind, best, length = self._kind, costs.least_gain, 0
        share = self._shares[kind]
        for size, cost, sampling in costs.drafts(sequences, max_tokens):
            if cost * (1 - share) <= self._credit:
                tokens = 1 + size if share == 1 else (1 - share ** (size + 1)) / (1 - share)
                expected = tokens / (1 + cost + sampling * (tokens - 1))
                if expected > best:
                    best, length = expected, size
        if not length:
            self._shares[kind] += RECOVERY * (FIRST_SHARES[kind] - share)
        return length

    def _is_short(self) -> bool:
        """Whether a match of the last tokens can only be a short one."""
        return self._matched + 1 < PROMISING_MATCH and len(self._token_ids) > self._resumable

    def _find(self, place: int) -> tuple[int, int]:
        """The position behind the longest earlier match of the last tokens, and its size; 0 where there is none.
        `place`: the latest position behind such tokens."""
        best, size = self._resume(), 0
        if best:
            size = max(NGRAM, self._match_size(best))
        for _ in range(MAX_PLACES):
            if not place or size >= MAX_MATCH:
                break
            match = self._match_size(place)
            if match > size:
                best, size = place, match
            place = self._earlier[place - self._first]
        return best, size

    def _resume(self) -> int:
        """The position behind the last token where the source of the last draft goes on; 0 if it is not there."""
        ids, end = self._token_ids, len(self._token_ids)
        if end > self._resumable:
            return 0
        for place in range(self._source, min(self._source + RESUME_WINDOW, end - 1)):
            if ids[place] == ids[-1]:
                return place + 1
        return 0

    def _match_size(self, place: int) -> int:
        """How many tokens before this position are those that the text ends with."""
        ids, end = self._token_ids, len(self._token_ids)
        size, most = 0, min(MAX_MATCH, place)
        while size < most and ids[place - 1 - size] == ids[end - 1 - size]:
            size += 1
        return size

    def _index(self) -> int:
        """Adds the positions of new tokens. Returns the latest earlier position behind the last tokens, or 0."""
        ids, earlier, following = self._token_ids, self._earlier, self._following
        position, end = self._first + len(earlier), len(ids)
        if position == end >= NGRAM:  # one token came
            key = (ids[end - 2], ids[end - 1])
            place = following.get(key, 0)
            earlier.append(place)
            following[key] = end
            self._matched = self._matched + 1 if place else 0
            return place
        if position <= end:
            self._index_all(position, end)
        return earlier[-1]

    def _index_all(self, position: int, end: int) -> None:
        """Adds several positions, up to the end."""
        ids, earlier, following = self._token_ids, self._earlier, self._following
        few = max(0, min(NGRAM, end + 1) - position)  # there too few tokens come before
        earlier += [0] * few
        position += few
        before = zip(*(ids[position - NGRAM + i : end - NGRAM + 1 + i] for i in range(NGRAM)), strict=True)
        for place, key in enumerate(before, position):
            earlier.append(following.get(key, 0))
            following[key] = place
        self._matched = MAX_MATCH


class ModelDrafts:
    """How many tokens a draft model drafts for one sequence."""

    def __init__(self) -> None:
        self._share = FIRST_MODEL_SHARE
        self.tokens = 0
        """Of the sequence when it got its last draft: what came since has to be computed by the draft model, too."""

    def length(self, max_tokens: int, costs: PassCosts, sequences: int) -> int:
        """From which most is to be expected; 0 where it is better to do without. `sequences` share the passes."""
        share, drafting = self._share, costs.drafting(sequences)
        best, length = costs.least_gain, 0
        for size, cost, sampling in costs.drafts(sequences, max_tokens):
            tokens = 1 + size if share == 1 else (1 - share ** (size + 1)) / (1 - share)
            expected = tokens / (1 + cost + size * drafting + sampling * (tokens - 1))
            if expected > best:
                best, length = expected, size
        if not length:
            self._share += RECOVERY * (FIRST_MODEL_SHARE - share)
        return length

    def record(self, proposed: int, accepted: int) -> None:
        for place in range(min(proposed, accepted + 1)):
            self._share += MODEL_SHARE_WEIGHT * ((place < accepted) - self._share)


class ReplyOpenings:
    """What replies begin with, remembered by owner: how soon a reply begins must not tell of those of others."""

    def __init__(self) -> None:
        self._last: LRUCache[Hashable, tuple[tuple[int, ...], tuple[int, ...]]] = LRUCache(MAX_OPENINGS)
        """By owner and kind of prompt: what the last two replies began with."""

    def record(self, space: Hashable, prompt_ids: Sequence[int], opening: tuple[int, ...]) -> None:
        """`space`: as of the sequence."""
        key = (space, *prompt_ids[-PROMPT_END:])
        _, last = self._last.get(key, ((), ()))
        self._last[key] = last, opening

    def expected(self, space: Hashable, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """What the next reply is expected to begin with; nothing where the last two began differently."""
        pair = self._last.get((space, *prompt_ids[-PROMPT_END:]), ((), ()))
        return tuple(one for one, _ in takewhile(lambda both: both[0] == both[1], zip(*pair, strict=False)))
