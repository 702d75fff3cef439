"""Models of the voice in child processes: the frames between both sides, the parent's side, which restarts a process
that died, the loop of the child, and the speaker that runs a text-to-speech model in this way."""

from __future__ import annotations

import itertools
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np

from palaver.errors import BadParameter, BrokenModel
from palaver.voice.base import OPENAI_VOICES, IsStopped, Samples, SpeechModelInfo, VoiceFailed, VoiceSettings, silence

Frame: TypeAlias = tuple[dict[str, Any], bytes]
"""A JSON object, and bytes such as audio."""


def write_frame(stream: IO[bytes], value: dict[str, Any], data: bytes = b"") -> None:
    stream.write(json.dumps({**value, "bytes": len(data)}).encode() + b"\n" + data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> Frame | None:
    """Returns None at the end of the stream."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    value: dict[str, Any] = json.loads(line)
    data = stream.read(value["bytes"])
    return (value, data) if len(data) == value["bytes"] else None


_POLL_SECONDS = 0.02
"""Interval at which a waiting request checks whether it was stopped."""


class ModelProcess:
    """A model in the process `python -m MODULE NAME`. Answers one request at a time; others wait. Blocking: call it in
    a thread."""

    def __init__(self, module: str, name: str, role: str) -> None:
        """Loads the model, which takes a while. `role` is what errors call it. Raises BrokenModel."""
        self.name = name
        self.info: dict[str, Any]
        """What the child says about the model."""
        self._module = module
        self._role = role
        self._lock = threading.Lock()
        self._request_ids = itertools.count()
        self._start()

    def request(self, value: dict[str, Any], data: bytes, is_stopped: IsStopped) -> Frame | None:
        """The answer, or None if it was stopped. Starts the process again if it has died. Raises VoiceFailed."""
        with self._lock:
            if is_stopped():
                return None
            if self.process.poll() is not None:
                self._stop()
                self._start()
            return self._exchange(value, data, is_stopped)

    def close(self) -> None:
        """May be called twice."""
        self._stop()

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", self._module, self.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._responses: queue.Queue[Frame | None] = queue.Queue()
        self._reader = threading.Thread(target=_read_responses, args=(self.process, self._responses), daemon=True)
        self._reader.start()
        greeting = self._responses.get()
        if greeting is None or "error" in greeting[0]:
            reason = greeting[0]["error"] if greeting is not None else "its process ended"
            self._stop()
            raise BrokenModel(f"The {self._role} {self.name!r} can't be loaded: {reason}.")
        self.info = greeting[0]["info"]

    def _stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def _exchange(self, value: dict[str, Any], data: bytes, is_stopped: IsStopped) -> Frame | None:
        request_id = next(self._request_ids)
        assert self.process.stdin is not None
        try:
            write_frame(self.process.stdin, {**value, "id": request_id}, data)
        except OSError:
            raise self._ended() from None
        while not is_stopped():
            try:
                response = self._responses.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if response is None:
                raise self._ended()
            if response[0]["id"] != request_id:  # the response of a stopped request
                continue
            if "error" in response[0]:
                raise VoiceFailed(f"The {self._role} {self.name!r} failed: {response[0]['error']}.")
            return response
        return None

    def _ended(self) -> VoiceFailed:
        self.process.kill()
        self.process.wait()  # its pipes may close before it ends: the next request must start it again
        return VoiceFailed(f"The {self._role} {self.name!r} ended while it was working.")


def _read_responses(process: subprocess.Popen[bytes], responses: queue.Queue[Frame | None]) -> None:
    assert process.stdout is not None
    while (response := read_frame(process.stdout)) is not None:
        responses.put(response)
    responses.put(None)


Handler: TypeAlias = Callable[[dict[str, Any], bytes], Frame]
"""Answers one request in the child."""


def serve_requests(load: Callable[[Path], tuple[dict[str, Any], Handler]]) -> None:
    """The child: loads the model that its argument names, describes it, and answers requests until stdin ends.

    The prints of libraries go to stderr: stdout carries frames only."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    responses = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        info, handle = load(_model_folder(sys.argv[1]))
    except Exception as error:
        write_frame(responses, {"error": _sentence(error)})
        return
    write_frame(responses, {"info": info})
    while (request := read_frame(sys.stdin.buffer)) is not None:
        value, data = request
        try:
            answer, result = handle(value, data)
            write_frame(responses, {**answer, "id": value["id"]}, result)
        except Exception as error:
            write_frame(responses, {"id": value["id"], "error": _sentence(error)})


def _model_folder(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, ignore_patterns=["*.bin", "*.pth", "*.ckpt", "*.h5", "*.msgpack"]))


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), 'no reason given')}"


class ModelSpeaker:
    """A text-to-speech model. Loads it on construction, which takes a while. Raises BrokenModel if that fails."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.executor = ThreadPoolExecutor(1, "voice")
        self._model = ModelProcess("palaver.voice.speech_child", name, "voice")
        info = self._model.info
        self._info = SpeechModelInfo(tuple(info["voices"]), info["language"], info["can_clone"], info["variable_speed"])

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
        response = self._model.request(request, voice.reference, is_stopped)
        return silence() if response is None else np.frombuffer(response[1], dtype=np.float32)

    def close(self) -> None:
        self.executor.shutdown(wait=False)
        self._model.close()

    def _resolve_voice(self, voice: VoiceSettings) -> str:
        """The model's voice for a name. OpenAI's voice names are distributed over the model's voices."""
        own_voices = self._info.voices
        if voice.name in own_voices or not voice.name:
            return voice.name
        if voice.name in OPENAI_VOICES:
            return own_voices[OPENAI_VOICES.index(voice.name) % len(own_voices)] if own_voices else ""
        raise BadParameter("voice", voice.name, f"there is no such voice; available: {', '.join(self.voices)}")
