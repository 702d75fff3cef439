"""What is known of a file, the limits of what is decoded, and the results of decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from palaver.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Picture = NDArray[np.uint8]
    """RGB: height, width, 3."""
    Sound = NDArray[np.float32]
    """Mono samples from -1 to 1."""
else:
    Picture = Sound = object

MediaKind = Literal["image", "audio", "video", "document"]
RAW_RATE = 16_000
"""The sample rate of raw float32 sound, as the WebSocket's clients send it."""


class BadMedia(RequestError):
    """A file that is not decoded: unknown, damaged, dishonest or beyond the limits. The message is one sentence."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name or 'The file'} {why}.")
        self.name = name
        self.why = why


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What a file may claim in its header, and what decoding may produce."""

    bytes: int = 128 << 20
    pixels: int = 64_000_000
    """Of a picture, or of one frame of a video."""
    seconds: float = 3600.0
    """Of sound, or of a video."""
    frames: int = 500_000
    """That a video claims to have."""
    sampled_frames: int = 64
    """The most frames that are decoded of a video."""
    frames_per_second: float = 1.0
    """How many frames are decoded of each second, if `sampled_frames` allows it."""
    frame_pixels: int = 1_000_000
    """A frame of a video is scaled down to this size."""
    characters: int = 4 << 20
    """Of the text of a document."""
    pages: int = 5_000
    """Of a document."""


@dataclass(frozen=True, slots=True)
class MediaInfo:
    """What the header of a file says."""

    kind: MediaKind
    media_type: str
    width: int = 0
    height: int = 0
    seconds: float = 0.0
    has_sound: bool = False
    """Whether a video has sound."""


@dataclass(frozen=True, slots=True, eq=False)
class VideoFrames:
    """Frames of a video with their times in seconds, and its sound, which is empty if there is none."""

    frames: Picture
    """Frame, height, width, 3."""
    times: tuple[float, ...]
    sound: Sound
    sample_rate: int
