"""Pictures, sound, video and documents: recognised by their bytes, decoded in a separate process, within limits."""

from palaver.media.base import BadMedia, MediaInfo, MediaKind, MediaLimits, Picture, Sound, VideoFrames
from palaver.media.decoder import MediaDecoder

__all__ = ["BadMedia", "MediaDecoder", "MediaInfo", "MediaKind", "MediaLimits", "Picture", "Sound", "VideoFrames"]
