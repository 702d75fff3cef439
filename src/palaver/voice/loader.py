"""From a voice's name to its speaker."""

from __future__ import annotations

import asyncio

from palaver.voice.base import Speaker
from palaver.voice.espeak import Espeak
from palaver.voice.hosted import HostedSpeaker

DEFAULT = "espeak"


def load_speaker(name: str = DEFAULT) -> Speaker:
    """`espeak`, or the folder or hub id of a text-to-speech model. May take a while."""
    return Espeak() if name == DEFAULT else HostedSpeaker(name)


class SpeakerCache:
    """The speaker in use, loaded when it is first asked for."""

    def __init__(self, name: str = DEFAULT) -> None:
        self.name = name
        self._speaker: Speaker | None = None
        self._one_at_a_time = asyncio.Lock()

    async def current(self) -> Speaker:
        """Raises VoiceMissing, or another ModelError, where there is none."""
        async with self._one_at_a_time:
            if self._speaker is None:
                self._speaker = await asyncio.to_thread(load_speaker, self.name)
            return self._speaker

    async def close(self) -> None:
        """May be called twice; asking again loads again."""
        async with self._one_at_a_time:
            if self._speaker is not None:
                await asyncio.to_thread(self._speaker.close)
                self._speaker = None
