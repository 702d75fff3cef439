"""Tokens to events. What was emitted is never taken back; half a character is never emitted."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from palaver.events import AnswerDelta, Notice, PhaseOpened, ReadEvent, ThinkingDelta, ToolCallOpened
from palaver.formats.markers import CONTROL_LIKE, looks_special, visible_text
from palaver.formats.reply_states import ELSEWHERE, HEADER
from palaver.formats.tool_calls.call_reader import CallReader, CallRegistry
from palaver.generation import Prompt
from palaver.messages import Tool
from palaver.phases import Entered, Happening, Phase, Said, State, Stopped, Tracker, Vocabulary

_START = re.compile(r"\s*```[a-zA-Z]*[ \t]*\n")
_MAY_START = re.compile(r"\s*(`{0,3}|```[a-zA-Z]*[ \t]*)\Z")
_END = re.compile(r"\s*(`{1,3}\s*)?\Z")


class CodeFenceFilter:
    """Lets text through but for a fence around all of it."""

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
        match = _END.search(self._text)
        at = match.start() if match else len(self._text)
        out, self._text = self._text[:at], self._text[at:]
        return out

    def end(self) -> str:
        """What was held back and is no fence."""
        rest, self._text = self._text, ""
        return "" if self._fenced and re.fullmatch(r"\s*```\s*", rest) else rest

    def _decide(self) -> bool:
        if match := _START.match(self._text):
            self._fenced, self._text = True, self._text[match.end() :]
        elif _MAY_START.match(self._text):
            return False
        self._decided = True
        return True


Calls = Callable[[CallRegistry], CallReader]


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """How a reply is to be read."""

    stops: Sequence[str] = ()
    tools: Sequence[Tool] = ()
    calls: Calls | None = None
    unsplit: bool = False
    """Thinking stays in the answer as the model wrote it; `opening` is what the prompt wrote of it."""
    opening: str = ""
    trims: bool = False
    """Line breaks before an answer are nobody's, even where no thought was read: the prompt may have closed it."""
    unfenced: bool = False
    """The answer is JSON: a code fence around it is no part of it."""
    one_call: bool = False
    """The reply is whole where it would begin a second call."""


class ReplyReader:
    """Reads one reply. The events depend on the tokens alone, not on how they arrive."""

    def __init__(self, prompt: Prompt, vocabulary: Vocabulary, reading: ReaderOptions = ReaderOptions()) -> None:  # noqa: B008
        self._prompt = prompt
        self._reading = reading
        self._states = prompt.phases.states
        self._tracker = Tracker(prompt.phases, vocabulary, reading.stops)
        self._opened = CallRegistry(prompt.context_ids, reading.tools)
        self._thought = False
        self._block = self._new_block(prompt.phases.opens_in)
        self._region: _Region | None = None
        self._pending: list[bytes] = []
        self._strays = _Strays()
        self._between = False
        self.thinking_tokens = 0
        self.stop: str | None = None
        """The stop string that was met."""
        self.whole = False
        """Whether it began a second call, where it may make only one: nothing from there on is part of it."""

    @property
    def phase(self) -> Phase:
        return self._tracker.phase

    def open(self) -> list[ReadEvent]:
        """What is known before the first token: the phase the reply opens in, and all it has said so far."""
        events: list[ReadEvent] = []
        if self.phase is Phase.THINKING:
            self._thought = self._reading.unsplit
            events = self._block.say(self._reading.opening.encode()) if self._reading.unsplit else self._announce()
        return [*events, *(event for token_id in self._prompt.reply_ids for event in self.feed(token_id))]

    def feed(self, token_id: int) -> list[ReadEvent]:
        if self.whole:
            return []
        self.thinking_tokens += self.phase is Phase.THINKING
        return self._one_call(self._counted(self._read(self._tracker.feed(token_id))))

    def close(self) -> list[ReadEvent]:
        """What was held back, now that nothing more comes."""
        return [] if self.whole else self._one_call(self._rest())

    def _rest(self) -> list[ReadEvent]:
        events = self._read(self._tracker.flush())
        if self._states[self._tracker.state].slot not in (HEADER, ELSEWHERE):
            events += self._block.say(self._let_go(CONTROL_LIKE.fullmatch))
        events += self._strays.told()
        if self._region is not None:  # white space before calls belongs to their marker
            return self._counted([*events, *self._region.cut()])
        return self._counted([*events, *self._block.close()])

    def _one_call(self, events: list[ReadEvent]) -> list[ReadEvent]:
        """Without a second call, where there may be only one."""
        if not self._reading.one_call:
            return events
        for place, event in enumerate(events):
            if isinstance(event, ToolCallOpened) and event.index > 0:
                self.whole = True
                before = events[:place]
                return before[:-1] if before and before[-1] == PhaseOpened(Phase.TOOL_CALL) else before
        return events

    def _counted(self, events: list[ReadEvent]) -> list[ReadEvent]:
        """With how much was thought so far, where that is of interest."""
        count = self.thinking_tokens
        return [replace(e, tokens=count) if isinstance(e, PhaseOpened | ThinkingDelta) else e for e in events]

    def _read(self, happenings: Iterable[Happening]) -> list[ReadEvent]:
        events: list[ReadEvent] = []
        for happening in happenings:
            match happening:
                case Said(state, data):
                    events += self._say(self._states[state], data)
                case Entered(state, marker):
                    events += self._enter(self._states[state], marker)
                case Stopped(stop):
                    self.stop = stop
        return events

    def _say(self, state: State, data: bytes) -> list[ReadEvent]:
        if state.phase is Phase.TOOL_CALL:
            assert self._region is not None
            return self._region.say(state.slot, data)
        if state.slot in (HEADER, ELSEWHERE):
            self._strays.add(data)
            return []
        if state.phase is Phase.CONTROL:
            self._pending.append(data)
            return []
        return self._block.say(data)

    def _enter(self, state: State, marker: bytes) -> list[ReadEvent]:
        if state.phase is Phase.CONTROL:
            self._between = self._between or state.slot == HEADER
            return self._enter_control(marker)
        strays = self._strays.told()
        if state.phase is Phase.TOOL_CALL:
            return [*strays, *self._enter_call(state, marker)]
        return [*strays, *self._enter_text(state.phase, marker)]

    def _enter_control(self, marker: bytes) -> list[ReadEvent]:
        if self._reading.unsplit and self._thought:
            self._thought = False
            return self._block.say(marker)
        self._pending.append(marker)
        return []

    def _enter_call(self, state: State, marker: bytes) -> list[ReadEvent]:
        raw, self._pending = b"".join(self._pending) + marker, []
        if self._region is None:
            assert self._reading.calls is not None
            self._opened.in_thought = self._block.phase is Phase.THINKING and not self._between
            self._region = _Region(self._reading.calls(self._opened), self._opened)
        return self._region.enter(state.slot, raw)

    def _enter_text(self, phase: Phase, marker: bytes) -> list[ReadEvent]:
        """A chain of markers that broke off was text; one that did not led to a new phase."""
        self._between = False
        if not marker and phase is self._block.phase and self._region is None:
            return self._block.say(self._let_go())
        events, called = self._leave_calls(marker)
        pending, self._pending = b"".join(self._pending) + marker, []
        if self._reading.unsplit:
            return [*events, *self._pass_unsplit(phase, pending)]
        if events and not called:
            return events if phase is self._block.phase else [*events, *self._open_block(phase, False)]
        return [*events, *self._open_block(phase, called)]

    def _open_block(self, phase: Phase, after_call: bool) -> list[ReadEvent]:
        """White space before a marker belongs to the marker, so what the last block held back is let go."""
        same = phase is self._block.phase and not after_call and not self._block.begun
        self._thought = self._thought or self._block.phase is Phase.THINKING or after_call
        if same and phase is Phase.ANSWER:
            return []
        self._block = self._new_block(phase)
        return [] if phase is not Phase.THINKING or after_call else self._announce()

    def _pass_unsplit(self, phase: Phase, marker: bytes) -> list[ReadEvent]:
        """The markers of a thought are text here, those of anything else are not."""
        thinks, thought = phase is Phase.THINKING, self._thought
        self._thought = thinks
        return self._block.say(marker) if thinks or thought else []

    def _leave_calls(self, marker: bytes) -> tuple[list[ReadEvent], bool]:
        """What is left of the calls; what was none is text again."""
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
        return [*events, notice, *self._block.say(text.encode())], False

    def _let_go(self, is_marker: Callable[[str], object] = looks_special) -> bytes:
        """The text of a chain of markers that broke off; what nobody means as text stays out of it."""
        pending, self._pending = self._pending, []
        return b"".join(p for p in pending if not is_marker(p.decode("utf-8", "replace")))

    def _announce(self) -> list[ReadEvent]:
        self._block.begun_by_marker = True
        return [PhaseOpened(Phase.THINKING)]

    def _new_block(self, phase: Phase) -> _Block:
        if self._reading.unsplit:
            phase = Phase.ANSWER
        trims = phase is Phase.THINKING or self._thought or self._reading.trims
        return _Block(phase, trims, CodeFenceFilter() if self._reading.unfenced and phase is Phase.ANSWER else None)


class _Region:
    """A stretch of the reply in which tools are called."""

    def __init__(self, calls: CallReader, opened: CallRegistry) -> None:
        self._calls = calls
        self._opened = opened
        self._before = opened.count
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._announced = False
        self._raw: list[bytes] = []

    @property
    def raw(self) -> bytes:
        """All of it, while none of it is a call."""
        return b"".join(self._raw)

    @property
    def recognised(self) -> bool:
        return self._opened.count > self._before

    def enter(self, slot: str, marker: bytes) -> list[ReadEvent]:
        self._keep(marker)
        return self._told(self._calls.enter(slot))

    def say(self, slot: str, data: bytes) -> list[ReadEvent]:
        self._keep(data)
        return self._told(self._calls.say(slot, self._decoder.decode(data)))

    def leave(self) -> list[ReadEvent]:
        return [*self._told(self._calls.leave()), *self._left_out()]

    def _keep(self, data: bytes) -> None:
        if not self.recognised:
            self._raw.append(data)

    def _left_out(self) -> list[ReadEvent]:
        text = self._opened.take_ignored()
        notice = Notice(f"What the model wrote beside its tool calls is no part of them: {text}")
        return [notice] if text and self.recognised else []

    def cut(self) -> list[ReadEvent]:
        """The reply stops inside the calls: what could not be read as a call yet is told as it is."""
        events = [*self._told(self._calls.cut()), *self._left_out()]
        if self.recognised:
            return events
        text = self.raw.decode("utf-8", "replace")
        return [*events, Notice(f"The reply stopped inside of a tool call: {text}")]

    def _told(self, events: list[ReadEvent]) -> list[ReadEvent]:
        if not events or self._announced:
            return events
        self._announced = True
        return [PhaseOpened(Phase.TOOL_CALL), *events]


class _Strays:
    """Words in the head of a message that mean nothing there, and what is written to nobody that is here."""

    def __init__(self) -> None:
        self._said: list[bytes] = []

    def add(self, data: bytes) -> None:
        self._said.append(data)

    def told(self) -> list[ReadEvent]:
        said, self._said = b"".join(self._said).decode("utf-8", "replace"), []
        text = visible_text(said)
        return [Notice(f"The model wrote what is meant for nobody here: {text}")] if text else []


class _Block:
    """The text of one phase: whole characters, and white space held back until something follows it."""

    def __init__(self, phase: Phase, trims: bool, unfenced: CodeFenceFilter | None = None) -> None:
        self.phase = phase
        self._trims = trims
        self._unfenced = unfenced
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._space = ""
        self.begun = False
        self.begun_by_marker = False

    def say(self, data: bytes) -> list[ReadEvent]:
        text = self._decoder.decode(data)
        if self._unfenced is not None:
            text = self._unfenced.feed(text)
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return self._emit(shown)

    def close(self) -> list[ReadEvent]:
        """Trailing white space is part of what was said; of nothing but white space nothing is told."""
        rest = self._unfenced.end() if self._unfenced is not None else ""
        space, self._space = self._space + rest, ""
        return self._emit(space) if self.begun or space.strip() else []

    def _emit(self, text: str) -> list[ReadEvent]:
        if not text:
            return []
        if self.begun:
            return [self._delta(text)]
        self.begun = True
        opened: list[ReadEvent] = [] if self.begun_by_marker else [PhaseOpened(self.phase)]
        return [*opened, self._delta(self._first(text))]

    def _first(self, text: str) -> str:
        """After a thought the line breaks that part it from the answer are nobody's; indentation is kept."""
        if not self._trims:
            return text
        blank = text[: len(text) - len(text.lstrip())]
        return text[blank.rfind("\n") + 1 :]

    def _delta(self, text: str) -> ReadEvent:
        return ThinkingDelta(text) if self.phase is Phase.THINKING else AnswerDelta(text)
