"""A speaker that runs a text-to-speech model in a child process and restarts it when it dies; the frame protocol."""

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
from palaver.voice.base import OPENAI_VOICES, IsStopped, Samples, SpeechModelInfo, VoiceFailed, VoiceSettings, silence


def write_frame(stream: IO[bytes], value: dict[str, Any], data: bytes = b"") -> None:
    stream.write(json.dumps({**value, "bytes": len(data)}).encode() + b"\n" + data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """Returns None at the end of the stream."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    value: dict[str, Any] = json.loads(line)
    data = stream.read(value["bytes"])
    return (value, data) if len(data) == value["bytes"] else None


_POLL_SECONDS = 0.02
"""Interval at which a waiting request checks whether it was stopped."""

_Response = tuple[dict[str, Any], bytes] | None


class HostedSpeaker:
    """Loads the model on construction, which takes a while. Raises BrokenModel if that fails."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.executor = ThreadPoolExecutor(1, "voice")
        self._lock = threading.Lock()
        self._request_ids = itertools.count()
        self._start_process()

    @property
    def voices(self) -> tuple[str, ...]:
        return (*OPENAI_VOICES, *self._info.voices)

    @property
    def can_clone(self) -> bool:
        return self._info.can_clone

    def language(self, voice: VoiceSettings) -> str:
        self._resolve_voice(voice)
        return self._info.language

    def synthesize(self, words: str, language: str, voice: VoiceSettings, is_stopped: IsStopped) -> Samples:
        if voice.reference and not self.can_clone:
            raise BadParameter("reference", "a recording", f"{self.name} can't clone the voice of a recording")
        if voice.speed != 1.0 and not self._info.variable_speed:
            raise BadParameter("speed", voice.speed, f"{self.name} can't change its speed")
        request = {"words": words, "voice": self._resolve_voice(voice), "speed": voice.speed}
        with self._lock:
            if is_stopped():
                return silence()
            if self._process.poll() is not None:
                self._stop_process()
                self._start_process()
            return self._request_audio(request, voice.reference, is_stopped)

    def close(self) -> None:
        self.executor.shutdown(wait=False)
        self._stop_process()

    def _stop_process(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _start_process(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "palaver.voice.child", self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._responses: queue.Queue[_Response] = queue.Queue()
        self._reader = threading.Thread(target=_read_responses, args=(self._process, self._responses), daemon=True)
        self._reader.start()
        greeting = self._responses.get()
        if greeting is None or "error" in greeting[0]:
            reason = greeting[0]["error"] if greeting is not None else "its process ended"
            self._stop_process()
            raise BrokenModel(f"The voice {self.name!r} can't be loaded: {reason}.")
        info = greeting[0]["info"]
        self._info = SpeechModelInfo(tuple(info["voices"]), info["language"], info["can_clone"], info["variable_speed"])

    def _request_audio(self, request: dict[str, Any], reference: bytes, is_stopped: IsStopped) -> Samples:
        request_id = next(self._request_ids)
        assert self._process.stdin is not None
        write_frame(self._process.stdin, {**request, "id": request_id}, reference)
        while not is_stopped():
            try:
                response = self._responses.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if response is None:
                raise VoiceFailed(f"The voice {self.name!r} ended while it was speaking.")
            if response[0]["id"] != request_id:  # the response of a stopped request
                continue
            if "error" in response[0]:
                raise VoiceFailed(f"The voice {self.name!r} failed: {response[0]['error']}.")
            return np.frombuffer(response[1], dtype=np.float32)
        return silence()

    def _resolve_voice(self, voice: VoiceSettings) -> str:
        """The model's voice for a name. OpenAI's voice names are distributed over the model's voices."""
        own_voices = self._info.voices
        if voice.name in own_voices or not voice.name:
            return voice.name
        if voice.name in OPENAI_VOICES:
            return own_voices[OPENAI_VOICES.index(voice.name) % len(own_voices)] if own_voices else ""
        raise BadParameter("voice", voice.name, f"there is no such voice; available: {', '.join(self.voices)}")


def _read_responses(process: subprocess.Popen[bytes], responses: queue.Queue[_Response]) -> None:
    assert process.stdout is not None
    while (response := read_frame(process.stdout)) is not None:
        responses.put(response)
    responses.put(None)
