"""Constraints as llguidance runs them: compiled once, off the worker's thread, and copied for each reply."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from palaver.constraints import MAX_CONSTRAINT, Constraint, Grammar, Marked
from palaver.errors import BadParameter
from palaver.phases import Vocabulary

REMEMBERED = 64
TOKENIZERS = 8
"""Views of the vocabulary that are kept: one for each set of ids that grammars name."""


class Grammars:
    """The compiled constraints of one model. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiling = threading.Lock()
        self._lock = threading.Lock()
        self._tokenizers: OrderedDict[tuple[int, ...], Any] = OrderedDict()
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()

    def compile(self, constraint: Constraint) -> None:
        """May take long: not for the worker's thread. Raises BadParameter where the constraint makes no sense."""
        with self._compiling:
            if self._find(constraint) is not None:
                return
            compiled = self._compile(constraint)
            with self._lock:
                self._compiled[constraint] = compiled
                while len(self._compiled) > REMEMBERED:
                    self._compiled.popitem(last=False)

    def matcher(self, constraint: Constraint) -> Any:
        """A matcher at its beginning."""
        compiled = self._find(constraint)
        if compiled is None:
            self.compile(constraint)
            compiled = self._find(constraint)
        return compiled.deep_copy()

    def _find(self, constraint: Constraint) -> Any:
        with self._lock:
            if constraint in self._compiled:
                self._compiled.move_to_end(constraint)
            return self._compiled.get(constraint)

    def tokens(self, text: bytes, constraint: Constraint) -> list[int]:
        """Some tokens that spell this, none of them named by the constraint."""
        ids: list[int] = self._tokenizer(_library(constraint), _named(constraint)).tokenize_bytes(text)
        return ids

    def _tokenizer(self, llguidance: Any, named: tuple[int, ...]) -> Any:
        """To the library a token that is named by its id is no text."""
        with self._lock:
            if named not in self._tokenizers:
                spelled = llguidance.TokenizerWrapper(_Spelled(self._vocabulary, named))
                self._tokenizers[named] = llguidance.LLTokenizer(spelled, n_vocab=len(self._vocabulary) + 1)
            self._tokenizers.move_to_end(named)
            while len(self._tokenizers) > TOKENIZERS:
                self._tokenizers.popitem(last=False)
            return self._tokenizers[named]

    def _compile(self, constraint: Constraint) -> Any:
        llguidance = _library(constraint)
        tokenizer = self._tokenizer(llguidance, _named(constraint))
        matcher = llguidance.LLMatcher(tokenizer, _grammar(llguidance.LLMatcher, constraint), log_level=0)
        if matcher.is_error():
            raise _bad(constraint, _first_line(matcher.get_error()))
        return matcher


def _named(constraint: Constraint) -> tuple[int, ...]:
    return constraint.ids if isinstance(constraint, Marked) else ()


def _library(constraint: Constraint) -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise _bad(constraint, "constraints need the package llguidance, which isn't installed") from error
    return llguidance


def _grammar(matcher: Any, constraint: Constraint) -> str:
    if len(constraint.text) > MAX_CONSTRAINT:
        raise _bad(constraint, f"it is longer than {MAX_CONSTRAINT} characters")
    match constraint.grammar:
        case Grammar.JSON_SCHEMA:
            return str(matcher.grammar_from_json_schema(_schema(constraint)))
        case Grammar.REGEX:
            return str(matcher.grammar_from_regex(constraint.text))
        case Grammar.LARK:
            return str(matcher.grammar_from_lark(constraint.text))


def _schema(constraint: Constraint) -> str:
    try:
        schema = json.loads(constraint.text)
    except (ValueError, RecursionError) as error:
        raise _bad(constraint, f"it isn't JSON ({error})") from error
    if not isinstance(schema, dict | bool):
        raise _bad(constraint, "a JSON schema is an object")
    return constraint.text


def _bad(constraint: Constraint, why: str) -> BadParameter:
    shown = constraint.text if len(constraint.text) <= 80 else constraint.text[:77] + "..."
    if isinstance(constraint, Marked) and constraint.about:
        return BadParameter(constraint.about, "...", f"what they allow can't be held to by a grammar: {why}")
    return BadParameter(f"constraint ({constraint.grammar.value})", shown, why)


def _first_line(text: str) -> str:
    return (text.splitlines() or ["it can't be compiled"])[0][:300]


class _Spelled:
    """A vocabulary as llguidance wants to see it, with an end of its own that no model has."""

    def __init__(self, vocabulary: Vocabulary, named: Collection[int] = ()) -> None:
        self.tokens = [*vocabulary, b"<|end of grammar|>"]
        self.eos_token_id = len(vocabulary)
        self.bos_token_id = None
        self.special_token_ids = [self.eos_token_id, *named]
        no_text = frozenset(named)
        spelled = reversed(list(enumerate(vocabulary)))
        self._ids = {text: token_id for token_id, text in spelled if token_id not in no_text}
        self._longest = max((len(text) for text in vocabulary), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else bytes(text)
        ids: list[int] = []
        while data and (size := self._longest_at_start(data)):
            ids.append(self._ids[data[:size]])
            data = data[size:]
        return ids

    def _longest_at_start(self, data: bytes) -> int:
        return next((n for n in range(min(self._longest, len(data)), 0, -1) if data[:n] in self._ids), 0)
