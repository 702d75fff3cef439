"""Sound that is sent as it is made."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from palaver.server.streaming import EventStream


class SoundStream(EventStream):
    """Ends at once when its client leaves. Between two pieces nothing is sent: it would be heard."""

    def __init__(self, pieces: AsyncGenerator[bytes], media_type: str) -> None:
        self.media_type = media_type
        super().__init__(pieces, {"cache-control": "no-store"}, quiet=b"")
