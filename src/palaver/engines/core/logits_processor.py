"""The logits processor of one reply: what its sampling options change in the next logits.

Every state follows from the tokens alone, so that a reply can be restored. The factory compiles grammars and looks up
strings ahead. `LocalEngine` uses it for its scheduler, and an engine of another project inside of its own sampler."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from palaver.constraints import Constraint
from palaver.engines.base import Capability, EngineInfo, check_prompt
from palaver.engines.core.dry import DryPenalty
from palaver.engines.core.logits_changes import Ids, LogitsChanges, Scores, TokenCounts
from palaver.engines.core.reply_grammar import AnswerGrammar, ReplyGrammar, control_ids
from palaver.engines.core.reply_state import ReplyState
from palaver.engines.core.rng import XTC_STREAM, UniformStream
from palaver.engines.core.token_masks import BannedStrings, SpokenText, TokenHealing, UnspeakableTokens, VocabularyIndex
from palaver.engines.grammars import CompiledGrammar, GrammarCache, missing_package
from palaver.errors import BadParameter
from palaver.generation import Prompt
from palaver.phases import Phases, Vocabulary
from palaver.sampling import Sampling

Grammars = Mapping[Constraint, CompiledGrammar]


class LogitsProcessor:
    """Holds the sampling options of one reply. Its state follows from the reply's tokens."""

    def __init__(
        self,
        prompt: Prompt,
        sampling: Sampling,
        choice: int,
        reply: ReplyState,
        vocabulary_size: int,
        banned_strings: BannedStrings | None = None,
        grammar: AnswerGrammar | ReplyGrammar | None = None,
        spoken_text: SpokenText | None = None,
        dry: DryPenalty | None = None,
    ) -> None:
        """`dry` has seen no token yet."""
        _check_ids(sampling, vocabulary_size)
        self.sampling = sampling
        self.reply = reply
        self._uniforms = UniformStream(sampling.seed, choice)
        self._xtc_uniforms = UniformStream(sampling.seed, choice, XTC_STREAM)
        self._context_ids = prompt.context_ids
        self._banned_strings = banned_strings
        self._grammar = grammar
        self._spoken_text = spoken_text
        self._healing: TokenHealing | None = None
        self.vocabulary_size = vocabulary_size
        self._counts: TokenCounts | None = None
        self._stop_ids: dict[int, Ids] = {}
        """By the state of the reply."""
        self._dry = dry
        if dry is not None:
            dry.extend((*prompt.context_ids, *reply.token_ids))
        masks = (banned_strings, grammar, spoken_text, dry)
        self._always_active = _changes_logits(sampling) or any(mask is not None for mask in masks)
        self.has_penalties = bool(
            sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
        )
        self.has_biases = bool(sampling.logit_bias or sampling.banned_ids)

    @property
    def do_sample(self) -> bool:
        """Whether the next token is drawn; otherwise it is forced or the likeliest one."""
        return self.sampling.temperature > 0 and self.reply.forced_id is None

    @property
    def is_active(self) -> bool:
        """Whether `changes` would change the next token's scores."""
        return self._always_active or self._is_healing or len(self.reply.token_ids) < self.sampling.min_tokens

    @property
    def draws_freely(self) -> bool:
        """Whether the next token follows from the model's own logits and a random number alone."""
        return not self.is_active and self.reply.forced_id is None

    @property
    def _is_healing(self) -> bool:
        return self._healing is not None and bool(self._healing.remaining)

    def start_healing(self, healing: TokenHealing | None) -> None:
        """From the next token on the reply first writes the bytes that were cut off at its seam."""
        self._healing = healing

    def uniform(self, ahead: int = 0) -> float:
        """The random number of the next token, or of one that comes so many tokens later."""
        return self._uniforms[len(self.reply.token_ids) + ahead]

    @property
    def uniform_state(self) -> int:
        """The state from which `uniform` follows by position."""
        return self._uniforms.state

    def xtc_uniform(self) -> float:
        """The random number that decides whether XTC applies to the next token."""
        if not self.sampling.xtc_probability:
            return 1.0
        return self._xtc_uniforms[len(self.reply.token_ids)]

    def append_token(self, token_id: int) -> None:
        forced = self.reply.forced_id == token_id
        appended = self.reply.ended is None
        self.reply.append_token(token_id)
        if self._grammar is not None:
            self._grammar.accept_token(token_id, self.reply, forced)
        if self._healing is not None and self._healing.remaining:
            self._healing.accept_token(token_id)
        if self._counts is not None and appended:
            self._counts.append(token_id)
        if self._dry is not None and appended:
            self._dry.append(token_id)

    def changes(self) -> LogitsChanges:
        """What changes in the next token's logits. Raises RequestError if a grammar exceeds its limits."""
        changes, sampling = LogitsChanges(self.vocabulary_size), self.sampling
        if self._grammar is not None:
            self._grammar.apply_mask(changes, self.reply)
        if self.has_penalties:
            changes.counts = self._token_counts()
            changes.repetition_penalty = sampling.repetition_penalty
            changes.presence_penalty = sampling.presence_penalty
            changes.frequency_penalty = sampling.frequency_penalty
        if self._dry is not None:
            changes.repetitions = self._dry.penalties()
        if sampling.end_penalty != 1:
            changes.end_ids, changes.end_penalty = self._current_stop_ids(), sampling.end_penalty
        if sampling.logit_bias:
            changes.bias = self._bias
        self._add_bans(changes)
        return changes

    def _add_bans(self, changes: LogitsChanges) -> None:
        if self.sampling.banned_ids:
            changes.banned_always = self._banned_ids
        if self._banned_strings is not None:
            changes.banned.append(self._banned_strings.banned_ids(self.reply.token_ids))
        if self._spoken_text is not None and not self._is_healing:
            self._spoken_text.apply_mask(changes, self.reply)
        if len(self.reply.token_ids) < self.sampling.min_tokens:
            changes.banned.append(self._current_stop_ids())
        if self._healing is not None and self._healing.remaining:
            changes.allow_only_ids(self._healing.allowed_ids())

    def _token_counts(self) -> TokenCounts:
        if self._counts is None:
            self._counts = TokenCounts(self._context_ids, self.reply.token_ids, self.vocabulary_size)
        return self._counts

    @cached_property
    def _bias(self) -> tuple[Ids, Scores]:
        ids, biases = zip(*self.sampling.logit_bias, strict=True)
        unique, places = np.unique(np.array(ids, dtype=np.int64), return_inverse=True)
        values = np.zeros(len(unique), dtype=np.float32)
        np.add.at(values, places, np.array(biases, dtype=np.float32))
        return unique, values

    @cached_property
    def _banned_ids(self) -> Ids:
        return np.array(self.sampling.banned_ids, dtype=np.int64)

    def _current_stop_ids(self) -> Ids:
        """The token ids that would end the reply now."""
        state = self.reply.state
        if state not in self._stop_ids:
            ids = [token_id for token_id in self.reply.stop_token_ids if token_id < self.vocabulary_size]
            self._stop_ids[state] = np.array(ids, dtype=np.int64)
        return self._stop_ids[state]


def _changes_logits(sampling: Sampling) -> bool:
    neutral = Sampling()
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "end_penalty", "logit_bias", "banned_ids")
    return any(getattr(sampling, name) != getattr(neutral, name) for name in names)


def _check_ids(sampling: Sampling, size: int) -> None:
    ids_by_option: dict[str, Sequence[int]] = {
        "logit_bias": [i for i, _ in sampling.logit_bias],
        "banned_ids": sampling.banned_ids,
    }
    for name, ids in ids_by_option.items():
        for token_id in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token_id < size:
                raise BadParameter(name, token_id, f"token ids go from 0 to {size - 1}")


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
        return bool(_constraints(prompt.phases, sampling) or _strings(sampling) or unspoken)

    async def prepare(self, prompt: Prompt, sampling: Sampling) -> dict[Constraint, CompiledGrammar]:
        """Does what takes long, outside of the thread that computes: returns the compiled grammars for `build`."""
        constraints = _constraints(prompt.phases, sampling)
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
        dry = DryPenalty(sampling, self._index, size) if sampling.dry_multiplier else None
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
        """What the reply has not written yet of the bytes to heal; None if there is nothing."""
        if not prompt.healing:
            return None
        healing = TokenHealing(prompt.healing, self._index, self._control_ids(prompt))
        for token_id in prompt.reply_ids[prompt.healing_at :]:
            if not healing.remaining:
                return None
            healing.accept_token(token_id)
        return healing

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


def _constraints(phases: Phases, sampling: Sampling) -> list[Constraint]:
    """All constraints that a reply may need."""
    if phases.held is not None:  # such a reply has no answer
        return [phases.held.first, phases.held.later]
    return [sampling.constraint] if sampling.constraint is not None else []


def _strings(sampling: Sampling) -> tuple[str, ...]:
    """Strings that are looked up in the vocabulary."""
    return (*sampling.banned_strings, *(sampling.dry_sequence_breakers if sampling.dry_multiplier else ()))
