"""The checks of `palaver formats`, without a model: recorded replies in published formats, replayed with different
token splits, and round trips.

A round trip truncates replies at every event, writes the partial reply from its message and compares the bytes. The
template itself renders the replies, in a history; `write_partial_reply` is what is tested."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, overload

from palaver.errors import PalaverError
from palaver.events import ReadEvent, fold
from palaver.formats.base import RenderOptions
from palaver.formats.format import TemplateFormat
from palaver.formats.learn.learner import CONVENTION
from palaver.formats.learn.probes import QUESTION
from palaver.formats.markers import CONTROL_LIKE, looks_special, match_any
from palaver.formats.reply_states import find_headers
from palaver.formats.template import Template
from palaver.formats.tokenizer import Run
from palaver.formats.tool_calls.samples import OTHER_NAME, TEXT_KEY, sample_calls, sample_tools
from palaver.messages import Message, Role, Text, Thinking, Tool, ToolCall, ToolResult, user
from palaver.phases import Phase


class PieceTokenizer(Sequence[bytes]):
    """A tokenizer for trials without a model: control strings are one token each, and any other text can be a token.
    It is its own vocabulary, which grows with every new piece."""

    def __init__(self, control: Iterable[str] = ()) -> None:
        self._pieces: list[bytes] = []
        self._ids: dict[str, int] = {}
        self.control: Mapping[str, int] = {text: self.piece(text) for text in sorted(set(control))}
        self.special_ids = frozenset(i for text, i in self.control.items() if looks_special(text))
        self.fingerprint = "pieces"
        self.prefix: tuple[int, ...] = ()
        self._pattern = match_any(self.control) if self.control else None

    @property
    def vocabulary(self) -> Sequence[bytes]:
        return self

    @overload
    def __getitem__(self, place: int) -> bytes: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[bytes]: ...
    def __getitem__(self, place: int | slice) -> bytes | Sequence[bytes]:
        return self._pieces[place]

    def __len__(self) -> int:
        return len(self._pieces)

    def piece(self, text: str | bytes) -> int:
        """The id of a token with this text; it is added if it is new."""
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        key = data.decode("latin-1")
        if key not in self._ids:
            self._ids[key] = len(self._pieces)
            self._pieces.append(data)
        return self._ids[key]

    def encode(self, runs: Iterable[Run]) -> list[int]:
        return [i for run in runs for i in ([run] if isinstance(run, int) else map(self.piece, run))]

    def text(self, ids: Iterable[int]) -> str:
        return b"".join(self._pieces[i] for i in ids).decode("utf-8", "replace")

    def runs(self, text: str) -> Iterator[Run]:
        """The control tokens in the text, and the text between them."""
        at = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            if text[at : match.start()]:
                yield text[at : match.start()]
            yield self.control[match[0]]
            at = match.end()
        if text[at:]:
            yield text[at:]


def control_strings(source: str) -> set[str]:
    """Texts in a template's source that look like control tokens, without placeholders in examples."""
    return {tag for tag in CONTROL_LIKE.findall(source) if not re.search(r"[={}'\"\\,;()]", tag) and len(tag) > 2} | {
        '<|"|>'
    }.intersection(re.findall(r'<\|"\|>', source))


STRINGS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>", "unk_token": "<|unk|>"}
SPLITS = ("whole", "by character", "random cuts")


@dataclass(frozen=True)
class CaseResult:
    template: str
    case: int
    tokens: bool
    """Whether the control strings were tokens."""
    split: str
    """How the text was split into tokens; one of `SPLITS`."""
    error: str
    """Empty if the message was read as expected."""


def load_cases(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


class CaseReplay:
    """Replays cases against the templates of a folder."""

    def __init__(self, templates: Path) -> None:
        self._templates = templates
        self.format = cache(self._make_format)

    def _make_format(self, name: str, tokens: bool, splits_thinking: bool) -> tuple[TemplateFormat, PieceTokenizer]:
        source = (self._templates / f"{name}.jinja").read_text(encoding="utf-8")
        tokenizer = PieceTokenizer(control_strings(source) | set(STRINGS.values()) if tokens else ())
        format = TemplateFormat(Template(source, name), tokenizer, STRINGS)
        if splits_thinking and format.facts.thinking is None:
            format = format.with_thinking(CONVENTION)
        return format, tokenizer

    def results(self, case: Mapping[str, Any], number: int) -> Iterator[CaseResult]:
        for tokens in (True, False):
            for split in SPLITS:
                yield CaseResult(case["template"], number, tokens, split, self._try(case, tokens, split, number))

    def _try(self, case: Mapping[str, Any], tokens: bool, split: str, seed: int) -> str:
        try:
            return _difference(case, self.message(case, tokens, split, seed))
        except PalaverError as error:
            return str(error)

    def message(self, case: Mapping[str, Any], tokens: bool, split: str, seed: int = 0) -> Message:
        """The message that the recorded reply is read as."""
        splits_thinking = case["reasoning_format"] != "none"
        format, tokenizer = self.format(case["template"], tokens, splits_thinking)
        messages = [read_message(m) for m in case["messages"]]
        partial = messages.pop() if case["continue"] else None
        if partial is not None and not splits_thinking:
            partial = Message(partial.role, tuple(p for p in partial.parts if not isinstance(p, Thinking)))
        tools = tuple(read_tool(tool) for tool in case["tools"] or ())
        options = RenderOptions(
            thinking=case["enable_thinking"] if has_boolean_switch(format) else None,
            calls=case["tool_choice"] != 2,
            unsplit=not splits_thinking,
            json_answer=bool(case["json_schema"]),
        )
        prompt = format.render(messages, tools, options, partial_reply=partial)
        reader = format.reader(prompt, (), tools, options)
        events: list[ReadEvent] = reader.open()
        for token_id in _split(tokenizer, case["input"], split, random.Random(seed)):
            events += reader.feed(token_id)
        return fold([*events, *reader.close()]).message


def has_boolean_switch(format: TemplateFormat) -> bool:
    """Whether thinking is switched by true and false. Recorded requests set no other switches."""
    return format.thinking_switch is not None and isinstance(format.thinking_switch.off, bool)


def _split(tokenizer: PieceTokenizer, text: str, split: str, rng: random.Random) -> Iterator[int]:
    for run in tokenizer.runs(text):
        if isinstance(run, int):
            yield run
        elif split == "whole":
            yield tokenizer.piece(run)
        else:
            data = run.encode()
            while data:
                size = 1 if split == "by character" else rng.randint(1, 7)
                yield tokenizer.piece(data[:size])
                data = data[size:]


def read_message(message: Mapping[str, Any]) -> Message:
    """A message from its OpenAI JSON."""
    role = Role(message["role"])
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    if role is Role.TOOL:
        return Message(role, (ToolResult(message.get("tool_call_id", ""), content, message.get("name", "")),))
    parts: list[Any] = [Thinking(message["reasoning_content"])] if message.get("reasoning_content") else []
    parts += [Text(content)] if content else []
    parts += [
        ToolCall(call.get("id") or "", call["function"]["name"], _arguments(call["function"].get("arguments")))
        for call in message.get("tool_calls") or ()
    ]
    return Message(role, tuple(parts))


def _arguments(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps(given or {})


def read_tool(tool: Mapping[str, Any]) -> Tool:
    function = tool["function"]
    return Tool(function["name"], function.get("description") or "", function.get("parameters") or {})


def _difference(case: Mapping[str, Any], message: Message) -> str:
    """The difference to the expected message; empty if there is none."""
    message_json = case["expect"][0]
    expected = (message_json.get("reasoning_content") or "").strip(), (message_json.get("content") or "").strip()
    got = message.thinking.strip(), message.text.strip()
    if expected != got:
        return f"thinking and answer are {got!r}, expected {expected!r}"
    calls = [(call.name, _value(call.arguments)) for call in message.tool_calls]
    calls_json = message_json.get("tool_calls") or ()
    expected_calls = [(c["function"]["name"], _value(c["function"]["arguments"])) for c in calls_json]
    if calls != expected_calls:
        return f"calls are {calls!r}, expected {expected_calls!r}"
    ids = [(call.id, c["id"]) for call, c in zip(message.tool_calls, calls_json, strict=True) if c.get("id")]
    return next(
        (f"a call's id is {id_!r}, expected {expected_id!r}" for id_, expected_id in ids if id_ != expected_id), ""
    )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # the call was cut off
        return text.strip()


THOUGHT = "Let me see: 2 + 2.\n\nThat is *four*, I think. Élan 👋🏽"
ANSWER = "It is **4**.\n\n- one\n- two `x < y`\n\n    indented"
INSIDE = "INSIDE"


@dataclass(frozen=True)
class ReplyKind:
    """One kind of reply: the parts of its message, and the thinking option."""

    name: str
    thought: str = ""
    answer: str = ""
    calls: int = 0
    thinking: bool | None = None


KINDS = tuple(
    ReplyKind(f"{name}{suffix}", thought, answer, count, thinking)
    for thinking, suffix in ((None, ""), (True, ", thinking on"), (False, ", thinking off"))
    for name, thought, answer, count in (
        ("thinking only", THOUGHT, "", 0),
        ("thinking and answer", THOUGHT, ANSWER, 0),
        ("answer only", "", ANSWER, 0),
        ("tool call", "", "", 1),
        ("two calls", "", "", 2),
        ("answer and call", "", ANSWER, 1),
        ("thinking and call", THOUGHT, "", 1),
        ("call inside thought", THOUGHT, INSIDE, 1),
    )
)


@dataclass(frozen=True)
class RoundtripResult:
    template: str
    kind: str
    tokens: bool
    exact: int
    """The number of byte-exact continuations."""
    count: int
    why: str = ""
    """The first difference, or why the template can't express the reply."""
    expressed: bool = True


class Roundtrip:
    """The round trips of one template."""

    def __init__(self, path: Path, tokens: bool) -> None:
        source = path.read_text(encoding="utf-8")
        self._name = path.stem
        self._tokens = tokens
        self._tokenizer = PieceTokenizer(control_strings(source) | set(STRINGS.values()) if tokens else ())
        self._template = Template(source, path.stem)
        self._format = TemplateFormat(self._template, self._tokenizer, STRINGS)
        self._tools = tuple(read_tool(tool) for tool in sample_tools())

    def trials(self) -> Iterator[RoundtripResult]:
        for kind in KINDS:
            if (trial := self._trial(kind)) is not None:
                yield trial

    def _trial(self, kind: ReplyKind) -> RoundtripResult | None:
        if kind.thinking is not None and self._format.facts.switch is None:
            return None  # the same as without a switch
        written = self._call_inside_thought(kind) if kind.answer == INSIDE else self._render_reply(kind)
        if isinstance(written, str) and self._lacks_thought(kind, written):
            written = _Inexpressible(_THINKS_FIRST)
        if isinstance(written, _Inexpressible):
            return RoundtripResult(self._name, kind.name, self._tokens, 0, 0, written.why, expressed=False)
        return self._compare(kind.name, written, self._tools if kind.calls else (), self._options(kind))

    def _lacks_thought(self, kind: ReplyKind, written: str) -> bool:
        """Whether the template writes an answer without the thought that the model starts with."""
        bare = bool(kind.answer) and not kind.thought and written.lstrip().startswith(kind.answer)
        return bare and self._format.prefills_empty_thought(self._options(kind))

    def _options(self, kind: ReplyKind) -> RenderOptions:
        return RenderOptions(thinking=kind.thinking)

    def _render_reply(self, kind: ReplyKind) -> str | _Inexpressible:
        """The reply as the template writes it after its generation prompt."""
        facts = self._format.facts
        opens_in = self._format.render([user(QUESTION)], (), self._options(kind)).phases.opens_in
        if kind.name.startswith("thinking only") and facts.reasoning_field is None and opens_in is Phase.THINKING:
            return THOUGHT  # the generation prompt opens the thought
        if kind.thought and (facts.thinking is None or facts.reasoning_field is None):
            return _Inexpressible("it renders no thinking")
        if kind.calls and facts.calls is None:
            return _Inexpressible("it renders no tool calls")
        message: dict[str, Any] = {"role": "assistant", "content": kind.answer or _END_OF_THOUGHT * bool(kind.thought)}
        if kind.calls:
            message |= {"content": kind.answer, "tool_calls": sample_calls(kind.calls, facts.arguments_as_text)}
        if kind.thought and facts.reasoning_field == "content":
            text = [{"type": "text", "text": message["content"]}] if message["content"] else []
            message["content"] = [{"type": "thinking", "thinking": kind.thought}, *text]
        elif kind.thought:
            message[str(facts.reasoning_field)] = kind.thought
        return self._extract_reply(kind, message)

    def _call_inside_thought(self, kind: ReplyKind) -> str | _Inexpressible:
        """A call inside a thought: the template's open thought and its call, joined."""
        facts = self._format.facts
        if facts.calls is not None and not facts.calls_in_thought and find_headers(facts) is None:
            return _Inexpressible("the markup of a call inside a thought is text of the thought")
        thought = self._render_reply(ReplyKind("thinking only", THOUGHT, thinking=kind.thinking))
        call = self._render_reply(ReplyKind("answer and call", "", ANSWER, 1, kind.thinking))
        if isinstance(thought, _Inexpressible):
            return thought
        if isinstance(call, _Inexpressible):
            return call
        after = call[call.rindex(ANSWER) + len(ANSWER) :]
        return thought + after.removeprefix(self._format.facts.answer_closing)

    def _extract_reply(self, kind: ReplyKind, message: dict[str, Any]) -> str | _Inexpressible:
        tools = self._format.facts.tool_variables(sample_tools() if kind.calls else [])
        variables = {
            **STRINGS,
            **tools,
            **self._format.switch_variables(self._options(kind)),
            **self._format.date_variables(RenderOptions()),
        }
        question = {"role": "user", "content": QUESTION}
        try:
            prompt = self._template.render({**variables, "messages": [question], "add_generation_prompt": True})
            whole = self._template.render(
                {**variables, "messages": [question, message], "add_generation_prompt": False}
            )
        except PalaverError as error:
            return _Inexpressible(f"it refuses: {error}")
        last = message_text(kind)
        if (last and last not in whole) or kind.thought not in whole:
            return _Inexpressible("it does not render this reply as it is")
        if not whole.startswith(prompt):
            return _Inexpressible("its history does not begin with its own generation prompt")
        return self._without_end(whole[len(prompt) :], kind)

    def _without_end(self, text: str, kind: ReplyKind) -> str | _Inexpressible:
        if kind.name.startswith("thinking only"):
            at = text.find(THOUGHT)
            return text[: at + len(THOUGHT)] if at >= 0 else _Inexpressible("it does not render this reply as it is")
        last = max(text.rfind(message_text(kind)), 0)
        ends = [at for end in self._format.facts.turn_ends if (at := text.find(end, last)) >= 0]
        return text[: min(ends)].rstrip("\n") if ends else text.rstrip("\n")

    def recorded(self, cases: Sequence[Mapping[str, Any]]) -> Iterator[RoundtripResult]:
        """Round trips of recorded replies, for templates that do not render thinking."""
        if self._format.facts.reasoning_field is not None or self._format.facts.thinking is None:
            return
        for number, case in enumerate(cases):
            if case["continue"] or case["is_partial"] or case["reasoning_format"] == "none" or case["json_schema"]:
                continue
            tools = tuple(read_tool(tool) for tool in case["tools"] or ())
            options = RenderOptions(thinking=case["enable_thinking"] if has_boolean_switch(self._format) else None)
            yield self._compare(f"recorded {number}", case["input"], tools, options)

    def _compare(self, kind: str, written: str, tools: Sequence[Tool], options: RenderOptions) -> RoundtripResult:
        """Reads the reply token by token. After every event, the message so far must write a prefix of the reply."""
        prompt = self._format.render([user(QUESTION)], tools, options)
        reader = self._format.reader(prompt, (), tools, options)
        events: list[ReadEvent] = reader.open()
        exact, count, why = 0, 0, ""
        for token_id in self._pieces(written):
            new_events = reader.feed(token_id)
            events += new_events
            message = fold(events).message
            if not new_events or self._may_be_called_text(message, tools):
                continue
            count += 1
            difference = self._difference(message, options, prompt.phases.opens_in, written)
            exact += not difference
            why = why or difference
        if written and not count:
            return RoundtripResult(self._name, kind, self._tokens, 0, 1, "nothing was read")
        return RoundtripResult(self._name, kind, self._tokens, exact, count, why)

    def _may_be_called_text(self, message: Message, tools: Sequence[Tool]) -> bool:
        """Whether the answer so far would be written in another way if calls follow, which the message does not say."""
        return bool(tools and self._format.facts.called_text_opening and message.text and not message.tool_calls)

    def _pieces(self, text: str) -> Iterator[int]:
        for run in self._tokenizer.runs(text):
            if isinstance(run, int):
                yield run
            else:
                yield from (self._tokenizer.piece(character) for character in run)

    def _difference(self, message: Message, options: RenderOptions, opens_in: Phase, written: str) -> str:
        if not message.parts:
            return ""
        try:
            ids = self._format.partial_reply_ids(message, options, opens_in)
        except PalaverError as error:
            return str(error)
        text = self._tokenizer.text(ids)
        same_ids = self._tokenizer.encode(self._tokenizer.runs(written))[: len(ids)]
        if written.startswith(text) and tuple(same_ids) == ids:
            return ""
        at = next((i for i, (a, b) in enumerate(zip(text, written, strict=False)) if a != b), len(written))
        return f"wrote {text[max(0, at - 30) : at + 30]!r} for {written[max(0, at - 30) : at + 30]!r}"


@dataclass(frozen=True)
class _Inexpressible:
    """The reason why a template can't express a reply."""

    why: str


_END_OF_THOUGHT = "END-OF-THOUGHT"
_THINKS_FIRST = "the model thinks first, so that an answer without a thought is continued behind an empty one"


def message_text(kind: ReplyKind) -> str:
    if kind.answer:
        return kind.answer
    if kind.calls == 2:
        return OTHER_NAME
    return TEXT_KEY if kind.calls else kind.thought


def run_roundtrips(folder: Path, cases: Sequence[Mapping[str, Any]] = ()) -> Iterator[RoundtripResult]:
    """The round trips of every template in the folder, with control strings as tokens and as text."""
    for path in sorted(folder.glob("*.jinja")):
        own = [case for case in cases if case["template"] == path.stem]
        for tokens in (True, False):
            try:
                roundtrip = Roundtrip(path, tokens)
                yield from roundtrip.trials()
                yield from roundtrip.recorded(own)
            except PalaverError as error:
                yield RoundtripResult(path.stem, "all", tokens, 0, 0, f"it can't chat: {error}", expressed=False)
