"""A turn's events in the words of the protocol. Not streaming is folding them into the last message."""

from __future__ import annotations

import base64
from typing import Any, assert_never

import numpy as np

from palaver.errors import PalaverError
from palaver.events import (
    AnswerDelta,
    Event,
    Failed,
    Finished,
    Notice,
    PhaseOpened,
    Snapshot,
    Started,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallOpened,
    Waiting,
)
from palaver.generation import Finish
from palaver.phases import Phase
from palaver.server.errors import INTERNAL
from palaver.server.socket.turn import TurnRecord
from palaver.voice.base import Samples, silence

_REASONS = {
    Finish.END: "stop",
    Finish.STOP_STRING: "stop",
    Finish.LENGTH: "length",
    Finish.STOPPED: "stopped",
}


class TurnEncoder:
    """Writes one turn into its record."""

    def __init__(self, turn_id: str, record: TurnRecord, streaming: bool, spoken: bool = False) -> None:
        self._turn = turn_id
        self._record = record
        self._streaming = streaming
        self._spoken = spoken
        self.place: dict[str, str] = {}
        """Where the reply is kept, if anywhere."""
        self._prefilled = False
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._notices: list[str] = []
        self._sound: list[Samples] = []

    def take(self, event: Event) -> None:
        match event:
            case Waiting(position, seconds):
                self._waiting(position, seconds)
            case Started(prompt_tokens, cached_tokens):
                self._started(prompt_tokens, cached_tokens)
            case ThinkingDelta(text):
                self._piece("thinking_delta", text, self._thinking)
            case AnswerDelta(text):
                self._piece("text_delta", text, self._text)
            case Notice(text):
                self._notices.append(text)
            case PhaseOpened(Phase.THINKING):
                self._opened_thought()
            case PhaseOpened() | ToolCallOpened() | ToolCallDelta():
                pass  # without tools all that is said is text, and a delta says whose it is
            case Finished():
                self._finished(event)
            case Failed() | Snapshot():
                raise AssertionError("an utterance tells of no such thing")
            case _:
                assert_never(event)

    def sound(self, samples: Samples) -> None:
        """The sound of a clause."""
        if self._streaming:
            self._record.tell({"type": "chunk", "audio_data": audio_data(samples)})
        else:
            self._sound.append(samples)

    def fail(self, error: Exception) -> None:
        """The last message of a turn that can't go on. A turn that has ended keeps its end."""
        if self._record.ended:
            return
        said = str(error) if isinstance(error, PalaverError) else INTERNAL
        self._record.tell({"type": "error", "error": said, "turn_id": self._turn}, last=True)

    def _waiting(self, position: int, seconds: float | None) -> None:
        about = {"position": position, "estimated_wait_s": seconds, "turn_id": self._turn}
        self._record.stand({"type": "queued", **about})

    def _started(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Once: an engine that had to be started again reads the prompt a second time."""
        if not self._prefilled:
            self._prefilled = True
            counts = {"input_tokens": prompt_tokens, "cached_tokens": cached_tokens}
            self._record.tell({"type": "prefill_done", **counts, **self.place, "turn_id": self._turn})

    def _opened_thought(self) -> None:
        """A thought that begins is told before its first token, as an empty piece of it."""
        if self._streaming:
            self._record.tell({"type": "chunk", "thinking_delta": ""})

    def _piece(self, name: str, text: str, whole: list[str]) -> None:
        whole.append(text)
        if self._streaming and text:
            self._record.tell({"type": "chunk", name: text})

    def _finished(self, finished: Finished) -> None:
        for event in finished.tail:
            self.take(event)
        told: dict[str, Any] = {
            "type": "done",
            "text": "".join(self._text),
            "thinking": "".join(self._thinking),
            "generated_tokens": finished.usage.reply_tokens,
            "input_tokens": finished.usage.prompt_tokens,
            "cached_tokens": finished.usage.cached_tokens,
            "finish_reason": _REASONS[finished.finish],
            **self.place,
            "turn_id": self._turn,
        }
        if self._spoken and not self._streaming:
            told["audio_data"] = audio_data(np.concatenate([silence(), *self._sound]))
        if self._notices:
            told["notices"] = self._notices
        self._record.tell(told, last=True)


def audio_data(samples: Samples) -> str:
    """Base64 of raw float32, little end first."""
    return base64.b64encode(samples.astype("<f4").tobytes()).decode()
