"""Reply tokens to events. Emitted events are final, and a delta never holds half a character."""

from __future__ import annotations

import codecs
import copy
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from palaver.events import AnswerDelta, Notice, PhaseOpened, ReadEvent, ThinkingDelta, ToolCallOpened
from palaver.formats.markers import CONTROL_LIKE, looks_special, visible_text
from palaver.formats.reply_states import ELSEWHERE, FIRST_LINE, HEADER
from palaver.formats.tool_calls.call_reader import CallReader, CallRegistry
from palaver.generation import Prompt
from palaver.messages import Tool
from palaver.phases import Phase, State, StateEntered, StateText, StopMatched, Tracker, TrackerEvent, Vocabulary

_FENCE_START = re.compile(r"\s*```[a-zA-Z]*[ \t]*\n")
_MAY_START_FENCE = re.compile(r"\s*(`{0,3}|```[a-zA-Z]*[ \t]*)\Z")
_FENCE_END = re.compile(r"\s*(`{1,3}\s*)?\Z")


class CodeFenceFilter:
    """Removes a Markdown code fence around the complete text of a stream."""

    def __init__(self) -> None:
        self._text = ""
        self._decided = False
        self._fenced = False

    def feed(self, text: str) -> str:
        self._text += text
        if not self._decided and not self._decide():
            return ""
        if not self._fenced:
            out, self._text = self._text, ""
            return out
        match = _FENCE_END.search(self._text)
        at = match.start() if match else len(self._text)
        out, self._text = self._text[:at], self._text[at:]
        return out

    def end(self) -> str:
        """The text that was held back, without the closing fence."""
        rest, self._text = self._text, ""
        return "" if self._fenced and re.fullmatch(r"\s*```\s*", rest) else rest

    def _decide(self) -> bool:
        if match := _FENCE_START.match(self._text):
            self._fenced, self._text = True, self._text[match.end() :]
        elif _MAY_START_FENCE.match(self._text):
            return False
        self._decided = True
        return True


CallReaderFactory = Callable[[CallRegistry], CallReader]


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """Options of a `ReplyReader`."""

    stops: Sequence[str] = ()
    tools: Sequence[Tool] = ()
    call_reader: CallReaderFactory | None = None
    unsplit: bool = False
    """Thinking and its markers stay in the answer, as the model wrote them."""
    opening: str = ""
    """The text that opens a thought in the prompt; with `unsplit` it is part of the answer."""
    closer: str = ""
    """The marker that closes a thought."""
    answer_closers: tuple[bytes, ...] = ()
    """The markers that close an answer. White space beside them is no part of it."""
    trim_start: bool = False
    """Remove line breaks before an answer even if no thought was read: the prompt may have closed one."""
    strip_fence: bool = False
    """The answer is JSON: remove a code fence around it."""
    one_call: bool = False
    """The reply ends before a second call."""


class ReplyReader:
    """Reads one reply. The events fold to the same message however the text is split into tokens."""

    def __init__(self, prompt: Prompt, vocabulary: Vocabulary, options: ReaderOptions = ReaderOptions()) -> None:  # noqa: B008
        self._prompt = prompt
        self._options = options
        self._vocabulary = vocabulary
        self._states = prompt.phases.states
        self._text_states = frozenset(
            place
            for place, state in enumerate(self._states)
            if state.phase in (Phase.THINKING, Phase.ANSWER) and state.slot not in (HEADER, ELSEWHERE)
        )
        """The states whose text is text of the message."""
        self._tracker = Tracker(prompt.phases, vocabulary, options.stops)
        self._thought = False
        self._opening = b""
        self._block = self._new_block(prompt.phases.opens_in)
        self._region: _CallRegion | None = None
        self._pending: list[bytes] = []
        self._strays = _StrayText()
        self._in_header = False
        self._answer_tokens = _AnswerTokens(self._states)
        self.thinking_tokens = 0
        self.stop: str | None = None
        """The stop string that ended the answer."""
        self.complete = False
        """Whether the reply ended before a second call (`one_call`). Further tokens are ignored."""

    @cached_property
    def _registry(self) -> CallRegistry:
        return CallRegistry(self._prompt.context_ids, self._options.tools)

    @property
    def phase(self) -> Phase:
        return self._tracker.phase

    def open(self) -> list[ReadEvent]:
        """The events before the first token: the phase the reply opens in, and the events of a partial reply."""
        events: list[ReadEvent] = []
        if self.phase is Phase.THINKING and self._options.unsplit:
            self._thought, self._opening = True, self._options.opening.encode()
        elif self.phase is Phase.THINKING:
            first_line = self._options.opening if self._states[self._tracker.state].slot == FIRST_LINE else ""
            events = [*self._announce(), *self._block.feed(first_line.encode())]
        return [*events, *(event for token_id in self._prompt.reply_ids for event in self.feed(token_id))]

    def feed(self, token_id: int) -> list[ReadEvent]:
        if self.complete:
            return []
        tracker = self._tracker
        phase = self._states[tracker.state].phase
        if phase is Phase.THINKING:
            self.thinking_tokens += 1
        text = tracker.plain_text(token_id)
        if text is not None and tracker.state in self._text_states and not self._opening:  # most tokens
            self._answer_tokens.feed_text(text, phase is Phase.ANSWER)
            return self._block.feed(text, self.thinking_tokens)
        found = tracker.feed(token_id)
        size = len(self._vocabulary[token_id]) if token_id < len(self._vocabulary) else 0
        self._answer_tokens.feed(size, found, tracker.holds_text)
        events = self._with_token_count(self._read(found))
        return self._limit_calls(events) if self._options.one_call else events

    def draft_texts(self, token_ids: Sequence[int | None]) -> tuple[str | None, ...]:
        """The texts of tokens that are not final. Those of control tokens are empty."""
        return tuple(None if id is None else "" if id in self._control_ids else self._text(id) for id in token_ids)

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        markers = {trigger.marker for state in self._states for trigger in state.triggers}
        return self._prompt.phases.ends | {marker for marker in markers if isinstance(marker, int)}

    def _text(self, token_id: int) -> str:
        return self._vocabulary[token_id].decode(errors="replace") if token_id < len(self._vocabulary) else ""

    def pop_answer_tokens(self) -> list[int]:
        """The positions in the reply of the tokens that are known since the last call to be text of the answer."""
        found = self._answer_tokens.found
        if found:
            self._answer_tokens.found = []
        return found

    def close(self) -> list[ReadEvent]:
        """The end of the stream: events for text that was held back."""
        return [] if self.complete else self._limit_calls(self._flush())

    def held_back(self) -> list[ReadEvent]:
        """The events that `close` would return now."""
        shared = (self._vocabulary, self._prompt, self._prompt.phases, self._options)
        return copy.deepcopy(self, {id(value): value for value in shared}).close()

    def _flush(self) -> list[ReadEvent]:
        flushed = self._tracker.flush()
        self._answer_tokens.assign(flushed)
        events = self._read(flushed)
        if self._options.unsplit and self._thought and self._pending:
            events += self._pass_unsplit(Phase.ANSWER, self._pop_pending(lambda _: False))
        if self._states[self._tracker.state].slot not in (HEADER, ELSEWHERE):
            events += self._block.feed(self._pop_pending(CONTROL_LIKE.fullmatch))
        events += self._strays.notices()
        if self._region is not None:  # white space before calls belongs to their marker
            return self._with_token_count([*events, *self._region.truncate()])
        return self._with_token_count([*events, *self._block.close()])

    def _limit_calls(self, events: list[ReadEvent]) -> list[ReadEvent]:
        """The events up to a second call, if only one is allowed."""
        if not self._options.one_call:
            return events
        for place, event in enumerate(events):
            if isinstance(event, ToolCallOpened) and event.index > 0:
                self.complete = True
                before = events[:place]
                return before[:-1] if before and before[-1] == PhaseOpened(Phase.TOOL_CALL) else before
        return events

    def _with_token_count(self, events: list[ReadEvent]) -> list[ReadEvent]:
        """The events with the number of thinking tokens so far."""
        count = self.thinking_tokens
        for place, event in enumerate(events):
            if isinstance(event, ThinkingDelta):
                events[place] = ThinkingDelta(event.text, count)
            elif isinstance(event, PhaseOpened):
                events[place] = PhaseOpened(event.phase, count)
        return events

    def _read(self, tracker_events: Iterable[TrackerEvent]) -> list[ReadEvent]:
        events: list[ReadEvent] = []
        for tracker_event in tracker_events:
            if type(tracker_event) is StateText:  # most tokens: a plain comparison is the fastest
                events += self._feed_text(self._states[tracker_event.state], tracker_event.data)
                continue
            match tracker_event:
                case StateEntered(state, marker):
                    events += self._enter(self._states[state], marker)
                case StopMatched(stop):
                    self.stop = stop
        return events

    def _feed_text(self, state: State, data: bytes) -> list[ReadEvent]:
        if state.phase is Phase.TOOL_CALL:
            assert self._region is not None
            return self._region.feed(state.slot, data)
        if state.slot in (HEADER, ELSEWHERE):
            self._strays.add(data)
            return []
        if state.phase is Phase.CONTROL:
            self._pending.append(data)
            return []
        return self._block.feed(self._pop_opening() + data)

    def _pop_opening(self) -> bytes:
        """With `unsplit`, the marker of a thought that the prompt has opened. It stands before the thought's text."""
        opening, self._opening = self._opening, b""
        return opening

    def _enter(self, state: State, marker: bytes) -> list[ReadEvent]:
        if state.phase is Phase.CONTROL:
            self._in_header = self._in_header or state.slot == HEADER
            self._pending.append(marker)
            return []
        strays = self._strays.notices()
        if state.phase is Phase.TOOL_CALL:
            return [*strays, *self._enter_call(state, marker)]
        return [*strays, *self._enter_text(state.phase, marker)]

    def _enter_call(self, state: State, marker: bytes) -> list[ReadEvent]:
        raw, self._pending = b"".join(self._pending) + marker, []
        if self._region is None:
            assert self._options.call_reader is not None
            self._registry.in_thought = self._block.phase is Phase.THINKING and not self._in_header
            self._region = _CallRegion(self._options.call_reader(self._registry), self._registry)
        return self._region.enter(state.slot, raw)

    def _enter_text(self, phase: Phase, marker: bytes) -> list[ReadEvent]:
        """Enters a thought or an answer. An incomplete chain of markers was text; a complete one opens a block."""
        self._in_header = False
        same = (phase is Phase.THINKING) is self._thought if self._options.unsplit else phase is self._block.phase
        if not marker and same and self._region is None:
            return self._block.feed(self._pop_opening() + self._pop_pending())
        events, called = self._leave_calls(marker)
        pending, self._pending = b"".join(self._pending) + marker, []
        if self._options.unsplit:
            return [*events, *self._pass_unsplit(phase, pending)]
        if events and not called:
            return events if phase is self._block.phase else [*events, *self._open_block(phase, False)]
        if pending.endswith(self._options.answer_closers or (b"\0",)) and phase is Phase.ANSWER:
            self._block = self._new_block(phase)
        return [*events, *self._open_block(phase, called)]

    def _open_block(self, phase: Phase, after_call: bool) -> list[ReadEvent]:
        """Opens a new block. White space that the last block held back belongs to the marker and is dropped."""
        same = phase is self._block.phase and not after_call
        self._thought = self._thought or self._block.phase is Phase.THINKING or after_call
        if same:  # an unpaired marker
            return []
        inserted = phase is Phase.THINKING and not after_call and self._block.started
        events = self._block.close() if inserted else []  # white space before a thought is text of the answer
        self._block = self._new_block(phase)
        return events if phase is not Phase.THINKING or after_call else [*events, *self._announce()]

    def _pass_unsplit(self, phase: Phase, marker: bytes) -> list[ReadEvent]:
        """With `unsplit` the markers of a thought are text; other markers are not, nor is a thought without text that
        was not closed."""
        thinks, was_thinking = phase is Phase.THINKING, self._thought
        self._thought = thinks
        opening = self._pop_opening()
        if thinks:
            return [] if was_thinking else self._block.feed(marker)
        before, closer, _ = marker.partition(self._options.closer.encode() or b"\0")
        return self._block.feed(opening + before + closer) if was_thinking and closer else []

    def _leave_calls(self, marker: bytes) -> tuple[list[ReadEvent], bool]:
        """Ends the calls. Markup that is no call becomes text."""
        region, self._region = self._region, None
        if region is None:
            return [], False
        events = region.leave()
        if region.recognised:
            return events, True
        raw = region.raw + b"".join(self._pending) + marker
        self._pending = []
        text = raw.decode("utf-8", "replace").strip()
        notice = Notice("The model wrote what looks like a tool call but can't be read as one; it is shown as text.")
        return [*events, notice, *self._block.feed(text.encode())], False

    def _pop_pending(self, is_marker: Callable[[str], object] = looks_special) -> bytes:
        """The text of an incomplete chain of markers, without control strings."""
        pending, self._pending = self._pending, []
        return b"".join(p for p in pending if not is_marker(p.decode("utf-8", "replace")))

    def _announce(self) -> list[ReadEvent]:
        self._block.announced = True
        return [PhaseOpened(Phase.THINKING)]

    def _new_block(self, phase: Phase) -> _Block:
        if self._options.unsplit:
            phase = Phase.ANSWER
        trim_start = phase is Phase.THINKING or self._thought or self._options.trim_start
        strip_fence = self._options.strip_fence and phase is Phase.ANSWER
        return _Block(phase, trim_start, CodeFenceFilter() if strip_fence else None)


class _AnswerTokens:
    """Finds the tokens whose text belongs to the answer: no thinking and no markers."""

    def __init__(self, states: Sequence[State]) -> None:
        self._states = states
        self._fed = 0
        self._held: deque[tuple[int | None, int]] = deque()
        """Tokens with bytes that are not assigned to a phase yet: the position, None once it is found, and how many."""
        self._started = False
        self.found: list[int] = []

    def feed_text(self, text: bytes, is_answer: bool) -> None:
        """The next token is plain text, and none before it is held back."""
        if is_answer and (self._started or text.strip()):
            self._started = True
            self.found.append(self._fed)
        self._fed += 1

    def feed(self, size: int, events: Sequence[TrackerEvent], holds_text: bool) -> None:
        """As `feed_text` for any token. It has `size` bytes; `holds_text` is whether the tracker holds some back."""
        position = self._fed
        self._fed += 1
        if not self._held and not holds_text and len(events) == 1:  # the token is one text
            event = events[0]
            if isinstance(event, StateText) and len(event.data) == size:
                if self._is_answer(event):
                    self.found.append(position)
                return
        self._held.append((position, size))
        self.assign(events)
        if not holds_text:
            self._held.clear()

    def assign(self, events: Sequence[TrackerEvent]) -> None:
        for event in events:
            match event:
                case StateText(_, data):
                    self._consume(len(data), self._is_answer(event))
                case StateEntered(_, marker):
                    self._consume(len(marker), False)
                case StopMatched():
                    self._held.clear()

    def _is_answer(self, text: StateText) -> bool:
        """Whether the text belongs to the answer. White space before its first text does not."""
        if self._states[text.state].phase is not Phase.ANSWER:
            return False
        self._started = self._started or bool(text.data.strip())
        return self._started

    def _consume(self, size: int, answer: bool) -> None:
        """Assigns the next `size` bytes. A token that is partly answer is found once."""
        while size > 0 and self._held:
            position, left = self._held.popleft()
            if answer and position is not None:
                self.found.append(position)
                position = None
            if left > size:
                self._held.appendleft((position, left - size))
            size -= left


class _CallRegion:
    """A part of the reply that holds tool calls."""

    def __init__(self, call_reader: CallReader, registry: CallRegistry) -> None:
        self._call_reader = call_reader
        self._registry = registry
        self._calls_before = registry.count
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._announced = False
        self._raw: list[bytes] = []

    @property
    def raw(self) -> bytes:
        """The raw text of the region, as long as no call was recognised."""
        return b"".join(self._raw)

    @property
    def recognised(self) -> bool:
        return self._registry.count > self._calls_before

    def enter(self, slot: str, marker: bytes) -> list[ReadEvent]:
        self._store_raw(marker)
        return self._announce(self._call_reader.enter(slot))

    def feed(self, slot: str, data: bytes) -> list[ReadEvent]:
        self._store_raw(data)
        return self._announce(self._call_reader.feed(slot, self._decoder.decode(data)))

    def leave(self) -> list[ReadEvent]:
        return [*self._announce(self._call_reader.leave()), *self._ignored_notice()]

    def _store_raw(self, data: bytes) -> None:
        if not self.recognised:
            self._raw.append(data)

    def _ignored_notice(self) -> list[ReadEvent]:
        text = self._registry.pop_ignored()
        notice = Notice(f"The model wrote text beside its tool calls: {text}")
        return [notice] if text and self.recognised else []

    def truncate(self) -> list[ReadEvent]:
        """The reply stops inside the calls. Text that could not be read as a call is reported in a notice."""
        events = [*self._announce(self._call_reader.truncate()), *self._ignored_notice()]
        if self.recognised:
            return events
        text = self.raw.decode("utf-8", "replace")
        return [*events, Notice(f"The reply stopped inside of a tool call: {text}")]

    def _announce(self, events: list[ReadEvent]) -> list[ReadEvent]:
        if not events or self._announced:
            return events
        self._announced = True
        return [PhaseOpened(Phase.TOOL_CALL), *events]


class _StrayText:
    """Stray words in message headers, and messages to unknown recipients: reported in a notice."""

    def __init__(self) -> None:
        self._data: list[bytes] = []

    def add(self, data: bytes) -> None:
        self._data.append(data)

    def notices(self) -> list[ReadEvent]:
        if not self._data:
            return []
        data, self._data = b"".join(self._data), []
        text = visible_text(data.decode("utf-8", "replace"))
        return [Notice(f"The model wrote to an unknown recipient: {text}")] if text else []


class _Block:
    """The text of one phase: decodes complete characters and holds white space back until more text follows."""

    def __init__(self, phase: Phase, trim_start: bool, fence_filter: CodeFenceFilter | None = None) -> None:
        self.phase = phase
        self._trim_start = trim_start
        self._fence_filter = fence_filter
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._splits_character = False
        """Whether the decoder holds a part of a character."""
        self._space = ""
        self.started = False
        self.announced = False

    def feed(self, data: bytes, thinking_tokens: int = 0) -> list[ReadEvent]:
        """`thinking_tokens`: how many there are up to here, for the events."""
        text = self._decode(data)
        if self._fence_filter is not None:
            text = self._fence_filter.feed(text)
        text = self._space + text
        visible = text.rstrip()
        self._space = text[len(visible) :]
        return self._emit(visible, thinking_tokens)

    def _decode(self, data: bytes) -> str:
        if not self._splits_character:
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self._splits_character = bool(self._decoder.getstate()[0])
        return text

    def close(self) -> list[ReadEvent]:
        """Trailing white space is part of the text; a block of white space only has no events."""
        rest = self._fence_filter.end() if self._fence_filter is not None else ""
        space, self._space = self._space + rest, ""
        return self._emit(space) if self.started or space.strip() else []

    def _emit(self, text: str, thinking_tokens: int = 0) -> list[ReadEvent]:
        if not text:
            return []
        opened: list[ReadEvent] = []
        if not self.started:
            self.started = True
            opened = [] if self.announced else [PhaseOpened(self.phase, thinking_tokens)]
            text = self._first(text)
        delta = ThinkingDelta(text, thinking_tokens) if self.phase is Phase.THINKING else AnswerDelta(text)
        return [*opened, delta]

    def _first(self, text: str) -> str:
        """The first text without the line breaks that separate it from a thought; indentation is kept."""
        if not self._trim_start:
            return text
        blank = text[: len(text) - len(text.lstrip())]
        return text[blank.rfind("\n") + 1 :]
