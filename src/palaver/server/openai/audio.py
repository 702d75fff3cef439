"""Replies that are spoken: `modalities: ["text", "audio"]`. The text is then the sound's transcript, as OpenAI has it.

Only the answer is spoken: thinking and calls are told as ever."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from palaver.errors import BadParameter
from palaver.server.openai.schemas import ChatMessage, ChatRequest, VoiceReference
from palaver.store.records import new_id
from palaver.voice.audio_format import AudioFormat, audio_format
from palaver.voice.base import VoiceSettings

AUDIO = "audio"
KEPT_SECONDS = 3600
MOST_KEPT = 1000
STREAMED = "pcm16"
_MODALITIES = ({"text"}, {"text", AUDIO}, {AUDIO})
_APART = ("response_format", "json_schema", "regex", "grammar", "logprobs")


@dataclass(frozen=True, slots=True)
class AudioRecording:
    """The sound of one reply, by the id under which it may be named in a later request."""

    form: AudioFormat
    voice: VoiceSettings
    id: str = field(default_factory=lambda: f"audio_{new_id()}")
    expires_at: int = field(default_factory=lambda: int(time.time()) + KEPT_SECONDS)

    def value(self, data: str, transcript: str) -> dict[str, Any]:
        return {"id": self.id, "data": data, "expires_at": self.expires_at, "transcript": transcript}


def is_spoken(request: ChatRequest) -> bool:
    return AUDIO in (request.modalities or ())


def audio_recording(request: ChatRequest) -> AudioRecording | None:
    """What is to be recorded, or None where the reply is text alone."""
    modalities = request.modalities or ["text"]
    if set(modalities) not in _MODALITIES:
        raise BadParameter("modalities", modalities, 'must be ["text"] or ["text", "audio"]')
    if not is_spoken(request):
        if request.audio is not None:
            raise BadParameter("audio", "...", 'needs modalities to be ["text", "audio"]')
        return None
    for name in _APART:
        if getattr(request, name):
            raise BadParameter(name, "...", "does not go with a reply that is spoken")
    if request.n not in (None, 1):
        raise BadParameter("n", request.n, "one reply at a time can be spoken")
    wanted = request.audio
    asked = wanted.format if wanted is not None else None
    if request.stream and asked not in (None, STREAMED):
        raise BadParameter("audio.format", asked, f"must be {STREAMED} where the reply is streamed")
    named = wanted.voice if wanted is not None else None
    voice = VoiceSettings(named.id if isinstance(named, VoiceReference) else named or "")
    return AudioRecording(audio_format(asked or (STREAMED if request.stream else "wav"), "audio.format"), voice)


class TranscriptIndex:
    """What was said in recordings, for when a client names one instead of its words."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], tuple[int, str]] = OrderedDict()

    def keep(self, owner: str, recording: AudioRecording, transcript: str) -> None:
        self._kept[owner, recording.id] = (recording.expires_at, transcript)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)

    def fill_in(self, owner: str, messages: Sequence[ChatMessage]) -> None:
        """Gives each message that names a recording its words."""
        for place, message in enumerate(messages):
            if message.audio is None:
                continue
            expires_at, transcript = self._kept.get((owner, message.audio.id), (0, ""))
            if expires_at < time.time():
                name = f"messages[{place}].audio.id"
                raise BadParameter(name, message.audio.id, "there is no such recording, or it has expired")
            if not message.content:
                message.content = transcript
            message.audio = None
