"""Loads speakers by name."""

from __future__ import annotations

import asyncio

from palaver.voice.base import Speaker
from palaver.voice.espeak import Espeak
from palaver.voice.hosted import HostedSpeaker

DEFAULT_SPEAKER = "espeak"


def load_speaker(name: str = DEFAULT_SPEAKER) -> Speaker:
    """`espeak`, or the folder or hub id of a text-to-speech model. May take a while."""
    return Espeak() if name == DEFAULT_SPEAKER else HostedSpeaker(name)


class SpeakerCache:
    """The speaker in use, loaded on first use."""

    def __init__(self, name: str = DEFAULT_SPEAKER) -> None:
        self.name = name
        self._speaker: Speaker | None = None
        self._lock = asyncio.Lock()

    async def current(self) -> Speaker:
        """Raises VoiceMissing or another ModelError if the speaker cannot be loaded."""
        async with self._lock:
            if self._speaker is None:
                self._speaker = await asyncio.to_thread(load_speaker, self.name)
            return self._speaker

    async def close(self) -> None:
        """May be called twice. `current` loads the speaker again."""
        async with self._lock:
            if self._speaker is not None:
                await asyncio.to_thread(self._speaker.close)
                self._speaker = None
