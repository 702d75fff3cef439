"""The runner of compiled steps, without a framework: keys and values are numpy arrays."""

from __future__ import annotations

import time
from collections.abc import Sequence

from palaver.engines.compiled.decoder import CompiledDecoder, Rows
from palaver.engines.core.arrays import HostArray
from palaver.engines.core.logits import HostLogits
from palaver.engines.core.request import SequenceState
from palaver.engines.core.slot_runner import SlotRunner
from palaver.engines.core.threads import ThreadCounts


class CompiledRunner(SlotRunner[HostArray]):
    prefills_last_token = True

    def __init__(
        self,
        decoder: CompiledDecoder,
        cache_bytes: int,
        context_length: int,
        threads: ThreadCounts,
    ) -> None:
        super().__init__(decoder.layout, cache_bytes, context_length)
        self._decoder = decoder
        self._threads = threads
        self._decode_rows: Rows | None = None
        """The rows of the last decode pass, which the next pass of the same sequences reuses."""

    def _drop_decode_batch(self) -> None:
        self._decode_rows = None

    def _compute(self, sequences: Sequence[SequenceState], counts: Sequence[int], need_logits: bool) -> HostLogits:
        chunks = []
        for sequence, count in zip(sequences, counts, strict=True):
            start = sequence.computed_tokens
            chunks.append((self._slots[sequence], start, sequence.token_ids[start : start + count]))
        rows = self._decode_rows
        if not need_logits or rows is None or not rows.advance(chunks):
            rows = Rows(chunks, need_logits)
            if rows.is_decode:  # a prefill in between leaves the rows of the replies
                self._decode_rows = rows
        began = time.thread_time()
        logits = self._decoder.run(rows, self._threads.for_pairs(len(rows.array) * rows.max_position))
        self.forward_seconds += time.thread_time() - began
        return HostLogits(logits)
