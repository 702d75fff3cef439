"""A text-to-speech model as a speaker: it runs in a process of its own, which is begun again where it ended."""

from __future__ import annotations

import itertools
import json
import queue
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import numpy as np

from palaver.errors import BadParameter, BrokenModel
from palaver.voice.base import OPENAI_VOICES, Samples, SpeechModelInfo, Stopped, VoiceFailed, VoiceSettings, silence


def write_frame(stream: IO[bytes], value: dict[str, Any], data: bytes = b"") -> None:
    stream.write(json.dumps({**value, "bytes": len(data)}).encode() + b"\n" + data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """None at the end."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    value: dict[str, Any] = json.loads(line)
    data = stream.read(value["bytes"])
    return (value, data) if len(data) == value["bytes"] else None


_PATIENCE = 0.02
"""Seconds between two looks at whether anybody still listens."""

_Answer = tuple[dict[str, Any], bytes] | None


class HostedSpeaker:
    """Starting it loads the model, which takes a while. BrokenModel where that can't be done."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.thread = ThreadPoolExecutor(1, "voice")
        self._one_at_a_time = threading.Lock()
        self._numbers = itertools.count()
        self._start()

    @property
    def voices(self) -> tuple[str, ...]:
        return (*OPENAI_VOICES, *self._about.voices)

    @property
    def follows(self) -> bool:
        return self._about.follows

    def language(self, voice: VoiceSettings) -> str:
        self._named(voice)
        return self._about.language

    def say(self, words: str, language: str, voice: VoiceSettings, stopped: Stopped) -> Samples:
        if voice.reference and not self.follows:
            raise BadParameter("reference", "a recording", f"{self.name} can't follow another voice")
        if voice.speed != 1.0 and not self._about.speeds:
            raise BadParameter("speed", voice.speed, f"{self.name} has one pace")
        asked = {"words": words, "voice": self._named(voice), "speed": voice.speed}
        with self._one_at_a_time:
            if stopped():
                return silence()
            if self._process.poll() is not None:
                self._end()
                self._start()
            return self._answer(asked, voice.reference, stopped)

    def close(self) -> None:
        self.thread.shutdown(wait=False)
        self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reading.join()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "palaver.voice.child", self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._answers: queue.Queue[_Answer] = queue.Queue()
        self._reading = threading.Thread(target=_read, args=(self._process, self._answers), daemon=True)
        self._reading.start()
        began = self._answers.get()
        if began is None or "error" in began[0]:
            why = began[0]["error"] if began is not None else "its process ended"
            self._end()
            raise BrokenModel(f"The voice {self.name!r} can't be loaded: {why}.")
        about = began[0]["about"]
        self._about = SpeechModelInfo(tuple(about["voices"]), about["language"], about["follows"], about["speeds"])

    def _answer(self, asked: dict[str, Any], reference: bytes, stopped: Stopped) -> Samples:
        number = next(self._numbers)
        assert self._process.stdin is not None
        write_frame(self._process.stdin, {**asked, "id": number}, reference)
        while not stopped():
            try:
                answer = self._answers.get(timeout=_PATIENCE)
            except queue.Empty:
                continue
            if answer is None:
                raise VoiceFailed(f"The voice {self.name!r} ended in the midst of a clause.")
            if answer[0]["id"] != number:  # of a clause that nobody waited for
                continue
            if "error" in answer[0]:
                raise VoiceFailed(f"The voice {self.name!r} failed: {answer[0]['error']}.")
            return np.frombuffer(answer[1], dtype=np.float32)
        return silence()

    def _named(self, voice: VoiceSettings) -> str:
        """The model's own voice; those that OpenAI's clients name are spread over what it has."""
        own = self._about.voices
        if voice.name in own or not voice.name:
            return voice.name
        if voice.name in OPENAI_VOICES:
            return own[OPENAI_VOICES.index(voice.name) % len(own)] if own else ""
        raise BadParameter("voice", voice.name, f"there is no such voice; known are {', '.join(self.voices)}")


def _read(process: subprocess.Popen[bytes], answers: queue.Queue[_Answer]) -> None:
    assert process.stdout is not None
    while (answer := read_frame(process.stdout)) is not None:
        answers.put(answer)
    answers.put(None)
