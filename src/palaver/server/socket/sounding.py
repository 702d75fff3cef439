"""The sound of one turn: made clause by clause beside the text, which never waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from palaver.errors import EngineError, PalaverError
from palaver.events import AnswerDelta, ReadEvent
from palaver.server.errors import note
from palaver.voice.base import Samples
from palaver.voice.speech import Speech


class Sounding:
    """Entered by the turn that is spoken; left, it is silent, whatever was still to be said."""

    def __init__(self, speech: Speech, heard: Callable[[Samples], None]) -> None:
        self._speech = speech
        self._heard = heard
        self._saying: asyncio.Task[None]

    async def __aenter__(self) -> Sounding:
        self._saying = asyncio.create_task(self._say())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._speech.stop()
        self._saying.cancel()
        await asyncio.gather(self._saying, return_exceptions=True)

    def take(self, event: ReadEvent) -> None:
        """Only what is answered is said."""
        if isinstance(event, AnswerDelta):
            self._speech.feed(event.text)

    def stop(self) -> None:
        self._speech.stop()

    async def finish(self) -> PalaverError | None:
        """Waits until all is said. Gives what went wrong: a voice that fails takes no word from the text."""
        self._speech.end()
        try:
            await self._saying
        except PalaverError as error:
            return error
        except Exception as error:
            note(error)
            return EngineError("The voice failed: the server's log has the details.")
        return None

    async def _say(self) -> None:
        async with aclosing(aiter(self._speech)) as pieces:
            async for piece in pieces:
                if len(piece.samples):
                    self._heard(piece.samples)
