"""Video, and sound in MP4 and WebM files, by PyAV. Runs in the sandbox's process."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from typing import Any

import av
import numpy as np

from palaver.media import sound
from palaver.media.base import BadMedia, MediaInfo, MediaLimits, Picture, Sound
from palaver.media.headers import check_pixels, check_seconds

_DEMUXERS = {
    "video/mp4": "mp4",
    "audio/mp4": "mp4",
    "video/quicktime": "mov",
    "video/webm": "webm",
    "audio/webm": "webm",
}
"""The demuxer is fixed by the sniffed type: others, such as playlists, would open further files and addresses."""
_SEEK_SECONDS = 3.0
"""A frame further ahead than this is reached by a seek."""
_MAX_PACKETS = 2_000_000


def inspect(data: bytes, media_type: str, limits: MediaLimits) -> MediaInfo:
    with _open(data, media_type) as container:
        seconds = _seconds(container, limits)
        picture = _picture_stream(container, limits)
        if picture is None:
            _require_sound(container)
            return MediaInfo("audio", media_type.replace("video/", "audio/").replace("quicktime", "mp4"), 0, 0, seconds)
        width, height = picture.codec_context.width, picture.codec_context.height
        if _rotation(data, media_type) % 2:
            width, height = height, width
        return MediaInfo("video", media_type, width, height, seconds, bool(container.streams.audio))


def decode(
    data: bytes, media_type: str, rate: int, limits: MediaLimits
) -> tuple[dict[str, Any], list[Picture | Sound]]:
    """Frames with their times, and the sound."""
    with _open(data, media_type) as container:
        wanted = frame_times(_seconds(container, limits), limits)
        stream = _picture_stream(container, limits)
        if stream is None:
            raise BadMedia("", "has no pictures: it is sound only")
        found = list(_frames(container, stream, wanted, limits))
        has_sound = bool(container.streams.audio)
    if not found:
        raise BadMedia("", "has no frame that can be decoded")
    samples = decode_sound(data, media_type, rate, limits) if has_sound else np.zeros(0, np.float32)
    return {"times": [time for time, _ in found]}, [np.stack([frame for _, frame in found]), samples]


def decode_sound(data: bytes, media_type: str, rate: int, limits: MediaLimits) -> Sound:
    with _open(data, media_type) as container:
        _seconds(container, limits)
        stream = _require_sound(container)
        source_rate = stream.codec_context.sample_rate or rate
        return sound.resample(_sound_blocks(container, stream, source_rate), source_rate, rate, limits)


def frame_times(seconds: float, limits: MediaLimits) -> list[float]:
    """One time per frame: at the frame rate if that is few enough, else spread evenly."""
    count = max(1, math.ceil(seconds * limits.frames_per_second))
    if count <= limits.sampled_frames:
        return [index / limits.frames_per_second for index in range(count)]
    return [index * seconds / limits.sampled_frames for index in range(limits.sampled_frames)]


def _open(data: bytes, media_type: str) -> av.container.InputContainer:
    try:
        return av.open(io.BytesIO(data), format=_DEMUXERS[media_type], metadata_errors="replace")
    except (av.error.FFmpegError, ValueError):
        raise BadMedia("", "is damaged and can't be decoded") from None


def _picture_stream(container: av.container.InputContainer, limits: MediaLimits) -> Any:
    """The first video stream that is no cover picture; None if there is none."""
    cover = av.stream.Disposition.attached_pic
    stream = next((stream for stream in container.streams.video if not stream.disposition & cover), None)
    if stream is None:
        return None
    if stream.codec_context is None:
        raise BadMedia("", "is compressed in a way that is not supported")
    check_pixels(stream.codec_context.width, stream.codec_context.height, "", limits)
    if stream.frames > limits.frames:
        raise BadMedia("", f"has {stream.frames:,} frames, but at most {limits.frames:,} are accepted")
    stream.thread_type = "NONE"
    return stream


def _require_sound(container: av.container.InputContainer) -> Any:
    if not container.streams.audio or container.streams.audio[0].codec_context is None:
        raise BadMedia("", "has no sound that can be decoded")
    return container.streams.audio[0]


def _seconds(container: av.container.InputContainer, limits: MediaLimits) -> float:
    """The length that the header names. Recordings of browsers name none: their packets are read, without decoding."""
    lengths = [float(stream.duration * stream.time_base) for stream in container.streams if stream.duration]
    if container.duration:
        lengths.append(container.duration / av.time_base)
    seconds = max(lengths) if lengths else _packet_seconds(container, limits)
    check_seconds(seconds, "", limits)
    return seconds


def _packet_seconds(container: av.container.InputContainer, limits: MediaLimits) -> float:
    seconds = 0.0
    for index, packet in enumerate(container.demux()):
        if packet.pts is not None and packet.time_base is not None:
            seconds = max(seconds, float((packet.pts + (packet.duration or 0)) * packet.time_base))
        if index > _MAX_PACKETS:
            raise BadMedia("", "is cut into too many pieces")
        check_seconds(seconds, "", limits)
    container.seek(0)
    return seconds


def _rotation(data: bytes, media_type: str) -> int:
    """The quarter turns, counter-clockwise, that show the first frame upright."""
    with _open(data, media_type) as container:
        try:
            frame = next(container.decode(video=0), None)
        except av.error.FFmpegError:
            frame = None
        return _quarter_turns(frame) if frame is not None else 0


def _quarter_turns(frame: Any) -> int:
    return round((frame.rotation or 0) / 90) % 4


def _frames(
    container: av.container.InputContainer, stream: Any, wanted: list[float], limits: MediaLimits
) -> Iterator[tuple[float, Picture]]:
    """The first frame at or after each time; a frame is used once."""
    start = float((stream.start_time or 0) * stream.time_base)
    frames, position, last = container.decode(stream), 0.0, -1.0
    for target in wanted:
        if target - position > _SEEK_SECONDS:
            container.seek(int((target + start) / stream.time_base), stream=stream)
            frames = container.decode(stream)
        for frame in frames:
            position = (frame.time or 0.0) - start
            if position + 1e-3 >= target and position > last:
                last = position
                yield position, _pixels(frame, limits)
                break


def _pixels(frame: Any, limits: MediaLimits) -> Picture:
    check_pixels(frame.width, frame.height, "", limits)
    scale = min(1.0, math.sqrt(limits.frame_pixels / (frame.width * frame.height)))
    width, height = max(1, round(frame.width * scale)), max(1, round(frame.height * scale))
    pixels = frame.to_ndarray(width=width, height=height, format="rgb24")
    return np.ascontiguousarray(np.rot90(pixels, _quarter_turns(frame)))


def _sound_blocks(container: av.container.InputContainer, stream: Any, rate: int) -> Iterator[Sound]:
    resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
    for frame in container.decode(stream):
        frame.pts = None
        for block in resampler.resample(frame):
            yield block.to_ndarray().reshape(-1)
    for block in resampler.resample(None):
        yield block.to_ndarray().reshape(-1)
