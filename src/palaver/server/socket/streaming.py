"""Encodes a turn's events as messages of the protocol. Without streaming they are folded into the last message."""

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
from palaver.server.socket.turn import MessageLog
from palaver.voice.base import Samples, silence

_FINISH_REASONS = {
    Finish.END: "stop",
    Finish.STOP_STRING: "stop",
    Finish.LENGTH: "length",
    Finish.STOPPED: "stopped",
}


class TurnEncoder:
    """Encodes one turn into its message log."""

    def __init__(self, turn_id: str, log: MessageLog, streaming: bool, spoken: bool = False) -> None:
        self._turn_id = turn_id
        self._log = log
        self._streaming = streaming
        self._spoken = spoken
        self.stored_ids: dict[str, str] = {}
        """The ids of the conversation and the reply, if it is stored."""
        self._prefilled = False
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._notices: list[str] = []
        self._audio: list[Samples] = []

    def feed(self, event: Event) -> None:
        match event:
            case Waiting(position, seconds):
                self._waiting(position, seconds)
            case Started(prompt_tokens, cached_tokens):
                self._started(prompt_tokens, cached_tokens)
            case ThinkingDelta(text):
                self._delta("thinking_delta", text, self._thinking)
            case AnswerDelta(text):
                self._delta("text_delta", text, self._text)
            case Notice(text):
                self._notices.append(text)
            case PhaseOpened(Phase.THINKING):
                self._open_thinking()
            case PhaseOpened() | ToolCallOpened() | ToolCallDelta():
                pass  # without tools there is only text, and the field of a delta names its phase
            case Finished():
                self._finished(event)
            case Failed() | Snapshot():
                raise AssertionError("a reply stream has no such event")
            case _:
                assert_never(event)

    def add_audio(self, samples: Samples) -> None:
        """Adds the audio of a clause."""
        if self._streaming:
            self._log.add({"type": "chunk", "audio_data": audio_data(samples)})
        else:
            self._audio.append(samples)

    def fail(self, error: Exception) -> None:
        """Ends the turn with an error, unless it has ended already."""
        if self._log.ended:
            return
        message = str(error) if isinstance(error, PalaverError) else INTERNAL
        self._log.add({"type": "error", "error": message, "turn_id": self._turn_id}, last=True)

    def _waiting(self, position: int, seconds: float | None) -> None:
        fields = {"position": position, "estimated_wait_s": seconds, "turn_id": self._turn_id}
        self._log.add_status({"type": "queued", **fields})

    def _started(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Only the first time: an engine that was restarted reads the prompt again."""
        if not self._prefilled:
            self._prefilled = True
            counts = {"input_tokens": prompt_tokens, "cached_tokens": cached_tokens}
            self._log.add({"type": "prefill_done", **counts, **self.stored_ids, "turn_id": self._turn_id})

    def _open_thinking(self) -> None:
        """Announces thinking before its first token, by an empty delta."""
        if self._streaming:
            self._log.add({"type": "chunk", "thinking_delta": ""})

    def _delta(self, name: str, text: str, texts: list[str]) -> None:
        texts.append(text)
        if self._streaming and text:
            self._log.add({"type": "chunk", name: text})

    def _finished(self, finished: Finished) -> None:
        for event in finished.tail:
            self.feed(event)
        done: dict[str, Any] = {
            "type": "done",
            "text": "".join(self._text),
            "thinking": "".join(self._thinking),
            "generated_tokens": finished.usage.reply_tokens,
            "input_tokens": finished.usage.prompt_tokens,
            "cached_tokens": finished.usage.cached_tokens,
            "finish_reason": _FINISH_REASONS[finished.finish],
            **self.stored_ids,
            "turn_id": self._turn_id,
        }
        if self._spoken and not self._streaming:
            done["audio_data"] = audio_data(np.concatenate([silence(), *self._audio]))
        if self._notices:
            done["notices"] = self._notices
        self._log.add(done, last=True)


def audio_data(samples: Samples) -> str:
    """Base64 of raw little-endian float32."""
    return base64.b64encode(samples.astype("<f4").tobytes()).decode()
