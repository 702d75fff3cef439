"""Tokens to events. What was emitted is never taken back; half a character is never emitted."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from palaver.events import AnswerDelta, PhaseOpened, ReadEvent, ThinkingDelta
from palaver.generation import Prompt
from palaver.phases import Entered, Happening, Phase, Said, Stopped, Tracker, Vocabulary


class Reader:
    """Reads one reply. The events depend on the tokens alone, not on how they arrive."""

    def __init__(self, prompt: Prompt, vocabulary: Vocabulary, stops: Sequence[str] = ()) -> None:
        self._prompt = prompt
        self._tracker = Tracker(prompt.phases, vocabulary, stops)
        self._block = _Block(prompt.phases.opens_in, after_thought=False)
        self._thought = False
        self.thinking_tokens = 0

    @property
    def phase(self) -> Phase:
        return self._tracker.phase

    def open(self) -> list[ReadEvent]:
        """What is known before the first token: the phase the reply opens in, and all it has said so far."""
        opened = self._opened(self._block.phase)
        return [*opened, *(event for token_id in self._prompt.reply_ids for event in self.feed(token_id))]

    def feed(self, token_id: int) -> list[ReadEvent]:
        self.thinking_tokens += self.phase is Phase.THINKING
        return self._read(self._tracker.feed(token_id))

    def close(self) -> list[ReadEvent]:
        """What was held back, now that nothing more comes."""
        events = self._read(self._tracker.flush())
        return [*events, *self._block.close()]

    def _read(self, happenings: Iterable[Happening]) -> list[ReadEvent]:
        events: list[ReadEvent] = []
        for happening in happenings:
            match happening:
                case Said(_, data):
                    events += self._block.say(data)
                case Entered(state, _):
                    events += self._enter(self._prompt.phases.states[state].phase)
                case Stopped():
                    pass
        return events

    def _enter(self, phase: Phase) -> list[ReadEvent]:
        """White space before a marker belongs to the marker, so what the last block held back is let go."""
        if self._block.phase is Phase.THINKING:
            self._thought = True
        self._block = _Block(phase, after_thought=self._thought)
        return self._opened(phase)

    def _opened(self, phase: Phase) -> list[ReadEvent]:
        """An answer is announced by its first visible character: until then the model may still think."""
        return [PhaseOpened(phase)] if phase is Phase.THINKING else []


class _Block:
    """The text of one phase: whole characters, and white space held back until something follows it."""

    def __init__(self, phase: Phase, after_thought: bool) -> None:
        self.phase = phase
        self._trims = phase is Phase.THINKING or after_thought
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._space = ""
        self._begun = False

    def say(self, data: bytes) -> list[ReadEvent]:
        text = self._space + self._decoder.decode(data)
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return self._emit(shown)

    def close(self) -> list[ReadEvent]:
        """Trailing white space is part of what was said; of nothing but white space nothing is told."""
        space, self._space = self._space, ""
        return self._emit(space) if self._begun else []

    def _emit(self, text: str) -> list[ReadEvent]:
        if not text:
            return []
        if self._begun:
            return [self._delta(text)]
        self._begun = True
        opened: list[ReadEvent] = [PhaseOpened(self.phase)] if self.phase is Phase.ANSWER else []
        return [*opened, self._delta(self._first(text))]

    def _first(self, text: str) -> str:
        """After a thought the line breaks that part it from the answer are nobody's; indentation is kept."""
        if not self._trims:
            return text
        blank = text[: len(text) - len(text.lstrip())]
        return text[blank.rfind("\n") + 1 :]

    def _delta(self, text: str) -> ReadEvent:
        return ThinkingDelta(text) if self.phase is Phase.THINKING else AnswerDelta(text)
