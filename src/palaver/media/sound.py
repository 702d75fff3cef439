"""Sound by libsndfile, in blocks, so that a long file takes no more memory than its result. Runs in the sandbox's
process."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

import numpy as np
import soundfile
import soxr

from palaver.media.base import BadMedia, MediaInfo, MediaLimits, Sound
from palaver.media.headers import check_seconds

FILE_FORMATS = {
    "audio/wav": ("WAV", "WAVEX", "RF64"),
    "audio/flac": ("FLAC",),
    "audio/ogg": ("OGG",),
    "audio/mpeg": ("MPEG", "MP3"),
}
"""The names that libsndfile has for them."""
_BLOCK = 1 << 16
_MAX_CHANNELS = 32


def inspect(data: bytes, media_type: str, limits: MediaLimits) -> MediaInfo:
    with _open(data, media_type, limits) as file:
        return MediaInfo("audio", media_type, seconds=file.frames / file.samplerate)


def decode(data: bytes, media_type: str, rate: int, limits: MediaLimits) -> Sound:
    """Mono samples at this rate."""
    with _open(data, media_type, limits) as file:
        return resample(_mono_blocks(file), file.samplerate, rate, limits)


def resample(blocks: Iterable[Sound], source_rate: int, rate: int, limits: MediaLimits) -> Sound:
    """Joins mono blocks at another rate. Raises BadMedia if there is more sound than a header said."""
    stream = soxr.ResampleStream(source_rate, rate, 1, dtype="float32") if source_rate != rate else None
    pieces, samples = [], 0
    for block in blocks:
        samples += len(block)
        check_seconds(samples / source_rate, "", limits)
        pieces.append(block if stream is None else stream.resample_chunk(block))
    if stream is not None:
        pieces.append(stream.resample_chunk(np.zeros(0, np.float32), last=True))
    joined = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
    if not np.isfinite(joined).all():
        raise BadMedia("", "contains values that are not numbers")
    return joined


def _open(data: bytes, media_type: str, limits: MediaLimits) -> soundfile.SoundFile:
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except soundfile.SoundFileError:
        raise BadMedia("", "is not readable as sound") from None
    if file.format not in FILE_FORMATS[media_type] or not 0 < file.channels <= _MAX_CHANNELS or file.samplerate <= 0:
        raise BadMedia("", "is not readable as sound")
    check_seconds(file.frames / file.samplerate, "", limits)
    return file


def _mono_blocks(file: soundfile.SoundFile) -> Iterator[Sound]:
    while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
        yield block.mean(axis=1, dtype=np.float32)
