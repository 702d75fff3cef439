"""A small model that drafts the next tokens of a large one, both in compiled code. Its own keys and values are cached
like those of the large one. A draft is what it finds likeliest."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from palaver.engines.compiled.decoder import CompiledDecoder, RowChunk, Rows
from palaver.engines.core.kv_cache import HostArray, Slot
from palaver.engines.core.prefix_cache import PrefixCache
from palaver.engines.core.request import SequenceState
from palaver.engines.core.runner import HEADROOM, ThreadCounts
from palaver.errors import CacheFull

CHUNK = 128
"""Tokens of a prompt that it computes in a step: the replies that run wait for it."""


@dataclass(slots=True)
class _Text:
    """What the draft model has computed of a sequence."""

    slot: Slot[HostArray]
    space: Hashable
    computed: int
    """Tokens in the slot."""
    confirmed: int
    """Of these, the first ones that the sequence is known to have."""
    drafted: list[int] = field(default_factory=list)
    """The tokens behind them, computed or not."""

    def follow(self, token_ids: Sequence[int]) -> None:
        """Drops what the sequence has gone on without."""
        for token_id in self.drafted:
            if self.confirmed >= min(self.computed, len(token_ids)) or token_ids[self.confirmed] != token_id:
                break
            self.confirmed += 1
        self.computed, self.drafted = self.confirmed, []


class CompiledDraftModel:
    def __init__(
        self, decoder: CompiledDecoder, cache_bytes: int, context_length: int, threads: ThreadCounts, tokens: int
    ) -> None:
        """`tokens`: the size of the vocabulary that both models share."""
        self._decoder = decoder
        self._cache = PrefixCache(decoder.layout, cache_bytes)
        self._context_length = context_length
        self._threads = threads
        self._tokens = tokens
        self._texts: dict[SequenceState, _Text | None] = {}
        """None for those that there is no memory for."""

    def propose(self, sequences: Sequence[SequenceState], lengths: Sequence[int]) -> list[list[int]]:
        """Drafts of at most so many tokens. Empty where more than a chunk of earlier tokens is still to be computed."""
        wanted = {one: length for one, length in zip(sequences, lengths, strict=True) if length > 0}
        chunks = {one: chunk for one in wanted if (chunk := self._pending(one))}
        drafts: dict[SequenceState, list[int]] = {one: [] for one in wanted}
        while chunks:
            best = self._compute(chunks)
            following: dict[SequenceState, list[int]] = {}
            for one, token_id in best.items():
                text = self._texts[one]
                if text is None or token_id >= self._tokens or self._lacks(one, text):
                    continue
                drafts[one].append(token_id)
                text.drafted.append(token_id)
                if len(drafts[one]) < wanted[one]:
                    following[one] = [token_id]
            chunks = following
        return [drafts.get(one, []) for one in sequences]

    def release(self, sequence: SequenceState) -> None:
        text = self._texts.pop(sequence, None)
        if text is None:
            return
        text.follow(sequence.token_ids)
        keys = sequence.token_ids[: text.computed]
        try:
            self._cache.insert(text.slot, text.space, keys, sequence.conversation)
        finally:
            self._cache.free(text.slot, text.space, keys, sequence.conversation)

    def forget(self, conversation: str) -> None:
        self._cache.forget(conversation)

    def _pending(self, sequence: SequenceState) -> list[int]:
        """The next tokens to compute; none where the sequence gets no drafts."""
        ids = sequence.token_ids
        if len(ids) + HEADROOM > self._context_length or sequence.prefix_keys is not ids:  # it does not see media
            return []
        if sequence not in self._texts:
            self._texts[sequence] = self._begin(sequence)
        text = self._texts[sequence]
        if text is None:
            return []
        text.follow(ids)
        return ids[text.computed : text.computed + CHUNK]

    def _begin(self, sequence: SequenceState) -> _Text | None:
        ids = sequence.token_ids
        try:
            slot, cached = self._cache.allocate(sequence.space, ids[:-1], len(ids) + HEADROOM)
        except CacheFull:
            return None
        return _Text(slot, sequence.space, cached, cached)

    def _lacks(self, sequence: SequenceState, text: _Text) -> bool:
        """Whether tokens of the sequence are still to be computed."""
        return text.computed < len(sequence.token_ids)

    def _compute(self, chunks: dict[SequenceState, list[int]]) -> dict[SequenceState, int]:
        """Computes the next tokens of each. Returns which token is the likeliest one behind them."""
        rows: dict[SequenceState, RowChunk] = {}
        for one, ids in chunks.items():
            text = self._texts[one]
            assert text is not None
            try:
                self._cache.grow(text.slot, text.computed + len(ids), text.computed)
            except CacheFull:
                self._cache.free(text.slot, text.space, one.token_ids[: text.confirmed], one.conversation)
                self._texts[one] = None
                continue
            rows[one] = RowChunk(text.slot, text.computed, ids)
        if not rows:
            return {}
        batch = Rows(list(rows.values()), need_logits=True)
        logits = self._decoder.run(batch, self._threads.for_pairs(len(batch.array) * batch.max_position))
        for one, chunk in rows.items():
            text = self._texts[one]
            assert text is not None
            text.computed += len(chunk.ids)
            text.confirmed = min(text.computed, len(one.token_ids))
        return dict(zip(rows, np.argmax(logits, axis=1).tolist(), strict=True))
