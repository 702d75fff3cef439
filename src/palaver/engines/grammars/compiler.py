"""From a constraint to an llguidance matcher, under the library's own limits."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from palaver.constraints import MAX_CONSTRAINT, Constraint, Grammar, Marked
from palaver.errors import BadParameter, RequestError
from palaver.phases import Vocabulary

TOKENIZERS = 8
"""Views of the vocabulary that are cached, one for each set of token ids that grammars name."""
ROW_ITEMS = 500
SCHEMA_ROW_ITEMS = 2_000
"""Earley items of one row. Where a grammar is ambiguous, a step takes time with the cube of them: 5 ms for 500, 300 ms
for 2,000. JSON schemas are not ambiguous, and one of 400 optional properties has 1,600 items."""
LEXER_STATES = 50_000
"""States the lexer of one grammar may build, at 1 to 2 kB each."""


class GrammarError(Exception):
    """Why a grammar can't be compiled, as one clause."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A compiled constraint. Matchers are copies of it, so it may be shared."""

    constraint: Constraint
    end_id: int
    """The grammar's own end token, which no model has."""
    _matcher: Any
    _tokenizer: Any

    def matcher(self) -> Any:
        """A matcher at the beginning of the grammar."""
        return self._matcher.deep_copy()

    def tokenize(self, text: bytes) -> list[int]:
        """Some tokens that spell this text, none of them named by the constraint."""
        ids: list[int] = self._tokenizer.tokenize_bytes(text)
        return ids


class GrammarCompiler:
    """Compiles constraints for one vocabulary. Safe to use from several threads, which don't wait for each other."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._tokenizers: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Raises GrammarError. May take seconds, and a hostile grammar may end the process: use the sandbox first."""
        llguidance = _library()
        tokenizer = self.tokenizer(named_ids(constraint))
        grammar = _grammar(llguidance.LLMatcher, constraint)
        limits = llguidance.LLParserLimits(
            max_items_in_row=_row_items(constraint), max_lexer_states=LEXER_STATES, verbose_errors=False
        )
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(first_line(matcher.get_error()))
        return CompiledGrammar(constraint, len(self._vocabulary), matcher, tokenizer)

    def tokenizer(self, named: tuple[int, ...]) -> Any:
        """The library's view of the vocabulary. Tokens that a grammar names by id are no text to it."""
        with self._lock:
            found = self._tokenizers.get(named)
            if found is not None:
                self._tokenizers.move_to_end(named)
                return found
        llguidance = _library()
        wrapped = llguidance.TokenizerWrapper(_TokenizerView(self._vocabulary, named))
        built = llguidance.LLTokenizer(wrapped, n_vocab=len(self._vocabulary) + 1)
        with self._lock:
            self._tokenizers[named] = built
            while len(self._tokenizers) > TOKENIZERS:
                self._tokenizers.popitem(last=False)
        return built


def check_matcher(matcher: Any) -> None:
    """Raises RequestError where a step of the grammar exceeded the library's limits. Call after each mask."""
    if matcher.is_error():
        why = first_line(matcher.get_error())
        raise RequestError(f"The grammar of this request became too complex for the next token: {why}")


def named_ids(constraint: Constraint) -> tuple[int, ...]:
    return constraint.ids if isinstance(constraint, Marked) else ()


def _row_items(constraint: Constraint) -> int:
    made_of_schemas = constraint.grammar is Grammar.JSON_SCHEMA or isinstance(constraint, Marked)
    return SCHEMA_ROW_ITEMS if made_of_schemas else ROW_ITEMS


def bad_constraint(constraint: Constraint, why: str) -> BadParameter:
    shown = constraint.text if len(constraint.text) <= 80 else constraint.text[:77] + "..."
    if isinstance(constraint, Marked) and constraint.about:
        return BadParameter(constraint.about, "...", f"what they allow can't be held to by a grammar: {why}")
    return BadParameter(f"constraint ({constraint.grammar.value})", shown, why)


def first_line(text: str) -> str:
    return (text.splitlines() or ["it can't be compiled"])[0][:300]


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise GrammarError("constraints need the package llguidance, which isn't installed") from error
    return llguidance


def _grammar(matcher: Any, constraint: Constraint) -> str:
    if len(constraint.text) > MAX_CONSTRAINT:
        raise GrammarError(f"it is longer than {MAX_CONSTRAINT} characters")
    if constraint.grammar is Grammar.JSON_SCHEMA:
        _check_schema(constraint.text)
    convert = {
        Grammar.JSON_SCHEMA: matcher.grammar_from_json_schema,
        Grammar.REGEX: matcher.grammar_from_regex,
        Grammar.LARK: matcher.grammar_from_lark,
    }
    try:
        return str(convert[constraint.grammar](constraint.text))
    except ValueError as error:  # lone surrogates, too
        raise GrammarError(first_line(str(error))) from error


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"it isn't JSON ({error})") from error
    if not isinstance(schema, dict | bool):
        raise GrammarError("a JSON schema is an object")


class _TokenizerView:
    """A vocabulary as llguidance wants to see it, with an end token of its own that no model has."""

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
