"""Makes the logits processors of replies: compiles their grammars and looks up their strings ahead, then builds them.

`LocalEngine` uses it for its scheduler, and an engine of another project inside of its own sampler."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace

from palaver.constraints import Constraint
from palaver.engines.base import Capability, EngineInfo, check_prompt
from palaver.engines.core.generation import ReplyState
from palaver.engines.core.grammar import AnswerGrammar, ReplyGrammar, control_ids, reply_constraints
from palaver.engines.core.logits_processors import (
    BannedStrings,
    SpokenText,
    TokenHealing,
    UnspeakableTokens,
    VocabularyIndex,
)
from palaver.engines.core.processor import LogitsProcessor, RepetitionPenalty
from palaver.engines.grammars import CompiledGrammar, GrammarCache, missing_package
from palaver.generation import Prompt
from palaver.phases import Vocabulary
from palaver.sampling import Sampling

Grammars = Mapping[Constraint, CompiledGrammar]


def with_grammars(info: EngineInfo) -> EngineInfo:
    """The description of an engine that uses the factory: it lacks constraints where their package is missing."""
    no_grammars = missing_package()
    return replace(info, lacks={**info.lacks, Capability.CONSTRAINTS: no_grammars}) if no_grammars else info


class ProcessorFactory:
    """Makes the logits processors of one model's replies. Safe to use from several threads."""

    def __init__(self, info: EngineInfo, vocabulary: Vocabulary) -> None:
        self._info = info
        self._vocabulary = vocabulary
        self._index = VocabularyIndex(vocabulary)
        self._unspeakable: UnspeakableTokens | None = None
        self._grammars = GrammarCache(vocabulary)

    def needs_preparation(self, prompt: Prompt, sampling: Sampling) -> bool:
        unspoken = sampling.spoken and self._unspeakable is None
        return bool(reply_constraints(prompt.phases, sampling) or _strings(sampling) or unspoken)

    async def prepare(self, prompt: Prompt, sampling: Sampling) -> dict[Constraint, CompiledGrammar]:
        """Does what takes long, outside of the thread that computes: returns the compiled grammars for `build`."""
        constraints = reply_constraints(prompt.phases, sampling)
        grammars = {constraint: await self._grammars.compile(constraint) for constraint in constraints}
        if sampling.spoken and self._unspeakable is None:
            await asyncio.to_thread(self._unspeakable_tokens)
        if strings := _strings(sampling):
            await asyncio.to_thread(self._index_strings, strings)
        return grammars

    def build(self, prompt: Prompt, sampling: Sampling, choice: int, grammars: Grammars) -> LogitsProcessor:
        """The processor before its partial reply is replayed. Raises a RequestError if the model can't take the
        prompt."""
        check_prompt(self._info, prompt)
        size = self._info.vocabulary_size
        reply = ReplyState(
            replace(prompt, reply_ids=()), sampling, self._vocabulary, self._info.end_ids, self._info.context_length
        )
        dry = RepetitionPenalty(sampling, self._index, size) if sampling.dry_multiplier else None
        return LogitsProcessor(
            prompt,
            sampling,
            choice,
            reply,
            size,
            self._banned(prompt, sampling),
            self._grammar(prompt, sampling, grammars),
            self._spoken_text(prompt, sampling),
            dry,
        )

    def token_healing(self, prompt: Prompt) -> TokenHealing | None:
        return TokenHealing(prompt.healing, self._index, self._control_ids(prompt)) if prompt.healing else None

    def warm(self) -> None:
        """Prepares the grammar compiler. Takes up to a second: don't call it in the event loop."""
        if Capability.CONSTRAINTS not in self._info.lacks:
            self._grammars.warm()

    def close(self) -> None:
        self._grammars.close()

    def _control_ids(self, prompt: Prompt) -> frozenset[int]:
        return control_ids(prompt.phases) | self._info.end_ids

    def _index_strings(self, strings: Iterable[str]) -> None:
        """Computes the tokens that complete banned strings; the index caches them."""
        for string in strings:
            self._index.completions(string.encode())

    def _banned(self, prompt: Prompt, sampling: Sampling) -> BannedStrings | None:
        if not sampling.banned_strings:
            return None
        return BannedStrings(sampling.banned_strings, self._index, self._control_ids(prompt))

    def _grammar(self, prompt: Prompt, sampling: Sampling, grammars: Grammars) -> AnswerGrammar | ReplyGrammar | None:
        if prompt.phases.held is not None:
            return ReplyGrammar(prompt.phases, grammars, self._index)
        if sampling.constraint is None:
            return None
        return AnswerGrammar(prompt.phases, grammars[sampling.constraint], self._index)

    def _spoken_text(self, prompt: Prompt, sampling: Sampling) -> SpokenText | None:
        if not sampling.spoken:
            return None
        return SpokenText(prompt.phases, self._control_ids(prompt), self._unspeakable_tokens())

    def _unspeakable_tokens(self) -> UnspeakableTokens:
        if self._unspeakable is None:
            self._unspeakable = UnspeakableTokens(self._index)
        return self._unspeakable


def _strings(sampling: Sampling) -> tuple[str, ...]:
    """Strings that are looked up in the vocabulary."""
    return (*sampling.banned_strings, *(sampling.dry_sequence_breakers if sampling.dry_multiplier else ()))
