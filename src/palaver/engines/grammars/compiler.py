"""Compiles a constraint to an llguidance matcher, under the library's own limits."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from palaver.constraints import MAX_CONSTRAINT, Constraint, Grammar, MarkerConstraint, without_other_formats
from palaver.errors import BadParameter, RequestError
from palaver.phases import Vocabulary

MAX_TOKENIZERS = 8
"""Cached tokenizers, one for each set of special token ids."""
MAX_ROW_ITEMS = 500
MAX_SCHEMA_ROW_ITEMS = 2_000
"""Earley items of one row. In an ambiguous grammar the time of a step grows with their cube: 5 ms for 500, 300 ms for
2,000. JSON schemas are not ambiguous, and one of 400 optional properties has 1,600 items."""
WHITE_SPACE = r"[ \t]{0,2}(\r?\n[ \t]{0,40})?"
"""Between two signs of a JSON text: enough to indent it, and no more, since some models would never stop writing it. A
schema may set another pattern by `x-guidance`."""
MAX_LEXER_STATES = 50_000
"""States that the lexer of one grammar may build, at 1 to 2 kB each."""


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
        """Some tokens that spell this text, none of them named by id in the constraint."""
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
        import llguidance

        tokenizer = self.tokenizer(special_ids(constraint))
        grammar = _grammar(llguidance.LLMatcher, constraint)
        limits = llguidance.LLParserLimits(
            max_items_in_row=_row_items(constraint), max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
        )
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(first_line(matcher.get_error()))
        return CompiledGrammar(constraint, len(self._vocabulary), matcher, tokenizer)

    def tokenizer(self, special: tuple[int, ...]) -> Any:
        """The library's tokenizer of this vocabulary. Special tokens are no text to it."""
        with self._lock:
            found = self._tokenizers.get(special)
            if found is not None:
                self._tokenizers.move_to_end(special)
                return found
        import llguidance

        wrapped = llguidance.TokenizerWrapper(_TokenizerView(self._vocabulary, special))
        built = llguidance.LLTokenizer(wrapped, n_vocab=len(self._vocabulary) + 1)
        with self._lock:
            self._tokenizers[special] = built
            while len(self._tokenizers) > MAX_TOKENIZERS:
                self._tokenizers.popitem(last=False)
        return built


def check_matcher(matcher: Any) -> None:
    """Raises RequestError if a step of the grammar exceeded the library's limits. Call after each mask."""
    if matcher.is_error():
        why = first_line(matcher.get_error())
        raise RequestError(f"The grammar of this request became too complex for the next token: {why}")


def special_ids(constraint: Constraint) -> tuple[int, ...]:
    """The token ids that the grammar names by id. They are no text to it."""
    return constraint.ids if isinstance(constraint, MarkerConstraint) else ()


def _row_items(constraint: Constraint) -> int:
    made_of_schemas = constraint.grammar is Grammar.JSON_SCHEMA or isinstance(constraint, MarkerConstraint)
    return MAX_SCHEMA_ROW_ITEMS if made_of_schemas else MAX_ROW_ITEMS


def bad_constraint(constraint: Constraint, why: str) -> BadParameter:
    shown = constraint.text if len(constraint.text) <= 80 else constraint.text[:77] + "..."
    if isinstance(constraint, MarkerConstraint) and constraint.about:
        return BadParameter(constraint.about, "...", f"what they allow can't be held to by a grammar: {why}")
    return BadParameter(f"constraint ({constraint.grammar.value})", shown, why)


def first_line(text: str) -> str:
    return (text.splitlines() or ["it can't be compiled"])[0][:300]


def missing_package() -> str:
    """Why no grammar can be compiled; empty if it can."""
    return "" if find_spec("llguidance") is not None else "the package llguidance isn't installed"


def _grammar(matcher: Any, constraint: Constraint) -> str:
    if len(constraint.text) > MAX_CONSTRAINT:
        raise GrammarError(f"it is longer than {MAX_CONSTRAINT} characters")
    text = constraint.text
    if constraint.grammar is Grammar.JSON_SCHEMA:
        text = _schema_text(text)
    convert = {
        Grammar.JSON_SCHEMA: partial(matcher.grammar_from_json_schema, defaults={"whitespace_pattern": WHITE_SPACE}),
        Grammar.REGEX: matcher.grammar_from_regex,
        Grammar.LARK: matcher.grammar_from_lark,
    }
    try:
        return str(convert[constraint.grammar](text))
    except ValueError as error:  # lone surrogates, too
        raise GrammarError(first_line(str(error))) from error


def _schema_text(text: str) -> str:
    """The schema as the library takes it, which refuses formats that it doesn't know. Raises GrammarError."""
    try:
        schema = json.loads(text)
        if not isinstance(schema, dict | bool):
            raise GrammarError("a JSON schema is an object")
        if '"format"' not in text:
            return text
        return json.dumps(without_other_formats(schema), ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"it isn't JSON ({error})") from error


class _TokenizerView:
    """The tokenizer interface that llguidance expects, with an end token of its own that no model has."""

    def __init__(self, vocabulary: Vocabulary, special: Collection[int] = ()) -> None:
        self.tokens = [*vocabulary, b"<|end of grammar|>"]
        self.eos_token_id = len(vocabulary)
        self.bos_token_id = None
        self.special_token_ids = [self.eos_token_id, *special]
        excluded = frozenset(special)
        by_id = reversed(list(enumerate(vocabulary)))
        self._ids = {text: token_id for token_id, text in by_id if token_id not in excluded}
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
