"""Samples random replies under the grammar of forced calls, with the engine's own grammar and no model."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema_rs
import numpy as np

from palaver.constraints import Constraint
from palaver.engines.core.logits_changes import LogitsChanges, Mask
from palaver.engines.core.reply_grammar import ReplyGrammar
from palaver.engines.core.reply_state import ReplyState
from palaver.engines.core.token_masks import VocabularyIndex
from palaver.engines.grammars import CompiledGrammar, GrammarCompiler
from palaver.errors import TemplateError
from palaver.events import fold
from palaver.formats.base import RenderOptions
from palaver.formats.format import TemplateFormat
from palaver.generation import Prompt
from palaver.messages import Message, Tool, ToolCall, user
from palaver.phases import Phase
from palaver.sampling import Sampling

MAX_TOKENS = 4000
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "zip": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
NOW = Tool("now", "The time.", {"type": "object", "properties": {}})
TOOLS = (
    Tool(
        "get_weather",
        "The weather.",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "where"},
                "unit": {"type": "string", "enum": ["C", "F"], "description": "in what"},
                "days": {"type": "integer", "minimum": 1, "maximum": 14, "description": "how many"},
                "exact": {"type": "boolean", "description": "whether"},
                "near": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "description": "by what"},
            },
            "required": ["city", "days"],
        },
    ),
    Tool(
        "plan-trip.v2",
        "A trip.",
        {
            "type": "object",
            "$defs": {"place": PLACE},
            "properties": {
                "stops": {"type": "array", "items": {"$ref": "#/$defs/place"}, "minItems": 1, "maxItems": 2},
                "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{1,3}$"},
                "budget": {"type": ["number", "null"]},
                "name": {"type": "string", "minLength": 1, "maxLength": 12},
            },
            "required": ["stops", "code"],
            "additionalProperties": False,
        },
    ),
    NOW,
    Tool("note", "Counts.", {"type": "object", "additionalProperties": {"type": "integer"}}),
)
PLAIN = (
    Tool(
        "get_weather",
        "The weather.",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "where"},
                "days": {"type": "integer", "description": "how many"},
                "exact": {"type": "boolean", "description": "whether"},
            },
            "required": ["city"],
        },
    ),
    NOW,
)
"""For templates that fail with unusual schemas."""


class CallSampler:
    """Samples replies uniformly from the allowed tokens; tokens that may end something are more likely, so that replies
    end. The first 256 tokens are the bytes."""

    def __init__(self, format: TemplateFormat, end: int) -> None:
        vocabulary = format.tokenizer.vocabulary
        self._format = format
        self._compiler = GrammarCompiler(vocabulary)
        self._grammars: dict[Constraint, CompiledGrammar] = {}
        self._index = VocabularyIndex(vocabulary)
        self._end = end
        self.tools = TOOLS if self._accepts(TOOLS) else PLAIN
        self._end_tokens = np.zeros(len(vocabulary), dtype=np.bool_)
        for token_id, text in enumerate(vocabulary):
            self._end_tokens[token_id] = text in (b'"', b"}", b"]", b"<", b"\n", b")", b"/") or len(text) > 4

    def _accepts(self, tools: tuple[Tool, ...]) -> bool:
        try:
            self._format.render((user("Hi"),), tools)
        except TemplateError:
            return False
        return True

    def message(self, forced: Sequence[Tool], seed: int) -> tuple[Message, str]:
        """The message of a sampled reply, and its text."""
        options = RenderOptions(must_call=tuple(tool.name for tool in forced))
        prompt = self._format.render((user("Hi"),), self.tools, options)
        ids = self._ids(prompt, random.Random(seed))
        reader = self._format.reader(prompt, (), self.tools, options)
        events = [*reader.open(), *(event for one in ids for event in reader.feed(one)), *reader.close()]
        return fold(events).message, b"".join(self._index.vocabulary[i] for i in ids).decode("utf-8", "replace")

    def _ids(self, prompt: Prompt, rng: random.Random) -> list[int]:
        vocabulary = self._index.vocabulary
        reply = ReplyState(prompt, Sampling(), vocabulary, frozenset({self._end}))
        assert prompt.phases.held is not None
        for constraint in (prompt.phases.held.first, prompt.phases.held.later):
            if constraint not in self._grammars:
                self._grammars[constraint] = self._compiler.compile(constraint)
        grammar = ReplyGrammar(prompt.phases, self._grammars, self._index)
        spelled: list[int] = []
        while reply.ended is None:
            assert len(reply.token_ids) < MAX_TOKENS, f"no end: {self._reply_bytes(reply)[-300:]!r}"
            scores = np.zeros(len(vocabulary), dtype=np.float32)
            changes = LogitsChanges(len(vocabulary))
            grammar.apply_mask(changes, reply)
            changes.apply(scores)
            allowed = scores > -np.inf
            assert bool(allowed.any()), f"no token is allowed: {self._reply_bytes(reply)[-300:]!r}"
            begun = prompt.phases.states[reply.state].phase is Phase.CONTROL  # of a marker of several parts
            if not spelled and rng.random() < (0.6 if begun else 0.1):
                spelled = self._marker(prompt, reply, rng)
            spelled = spelled if spelled and allowed[spelled[0]] else []
            token_id = spelled.pop(0) if spelled else self._draw(allowed, rng)
            reply.append_token(token_id)
            grammar.accept_token(token_id, reply, False)
        return reply.token_ids

    def _marker(self, prompt: Prompt, reply: ReplyState, rng: random.Random) -> list[int]:
        """A trigger of the current state, byte by byte if it is text: random bytes hardly ever spell one."""
        triggers = prompt.phases.states[reply.state].triggers
        if not triggers:
            return []
        marker = rng.choice(triggers).marker
        if isinstance(marker, int):
            return [marker]
        space, as_tokens = rng.choice((b"", b"\n")), rng.random() < 0.5
        return [*space, *(self._with_tokens(marker) if as_tokens else marker)]

    def _with_tokens(self, marker: bytes) -> list[int]:
        """The marker with the tokenizer's control tokens in it as tokens."""
        control = self._format.tokenizer.control
        pattern = "|".join(map(re.escape, sorted(control, key=len, reverse=True)))
        runs = re.split(f"({pattern})", marker.decode())
        return [token for run in runs for token in ([control[run]] if run in control else run.encode())]

    def _draw(self, allowed: Mask, rng: random.Random) -> int:
        likely = allowed & self._end_tokens
        if bool(likely.any()) and rng.random() < 0.4:
            allowed = likely
        return int(rng.choice(np.flatnonzero(allowed).tolist()))

    def _reply_bytes(self, reply: ReplyState) -> bytes:
        return b"".join(self._index.vocabulary[i] for i in reply.token_ids)


def find_error(message: Message, tools: Sequence[Tool]) -> str:
    """The error in a reply that must call one of these tools; empty if there is none."""
    if not message.tool_calls:
        return "there is no call"
    if message.text.strip():
        return f"something is answered: {message.text!r}"
    schemas = {tool.name: dict(tool.parameters) for tool in tools}
    return next((why for call in message.tool_calls if (why := _find_call_error(call, schemas))), "")


def _find_call_error(call: ToolCall, schemas: Mapping[str, Any]) -> str:
    if call.name not in schemas:
        return f"{call.name!r} is called"
    try:
        jsonschema_rs.validate(schemas[call.name], json.loads(call.arguments))
    except (ValueError, jsonschema_rs.ValidationError) as error:
        return f"{call.name}({call.arguments}): {error}"
    return ""
