"""Audio formats: PCM, WAV and compressed containers, and resampling."""

from __future__ import annotations

import io
import struct
from collections.abc import AsyncIterable
from dataclasses import dataclass

import numpy as np

from palaver.errors import BadParameter
from palaver.voice.base import SAMPLE_RATE, Samples, silence

UNKNOWN_LENGTH = 0xFFFFFFFF
_MAX_SAMPLE = 32767.0


@dataclass(frozen=True, slots=True)
class AudioFormat:
    name: str
    media_type: str
    streams: bool = False
    """Whether the audio can be sent in chunks while it is synthesized."""


FORMATS = {
    format.name: format
    for format in (
        AudioFormat("wav", "audio/wav", streams=True),
        AudioFormat("pcm", "audio/pcm", streams=True),
        AudioFormat("pcm16", "audio/pcm", streams=True),
        AudioFormat("flac", "audio/flac"),
        AudioFormat("mp3", "audio/mpeg"),
        AudioFormat("opus", "audio/ogg"),
    )
}
_CONTAINERS = {"flac": ("FLAC", "PCM_16"), "mp3": ("MP3", "MPEG_LAYER_III"), "opus": ("OGG", "OPUS")}


def audio_format(name: str, field: str = "response_format") -> AudioFormat:
    if name not in FORMATS:
        raise BadParameter(field, name, f"must be one of {', '.join(FORMATS)}")
    return FORMATS[name]


def pcm(samples: Samples) -> bytes:
    """16-bit little-endian samples."""
    return (np.clip(samples, -1.0, 1.0) * _MAX_SAMPLE).round().astype("<i2").tobytes()


def wav_header(data_bytes: int | None = None) -> bytes:
    """The header for `data_bytes` bytes of PCM; None for a stream of unknown length."""
    size = UNKNOWN_LENGTH if data_bytes is None else data_bytes
    riff_size = UNKNOWN_LENGTH if data_bytes is None else size + 36
    head = struct.pack(
        "<4sI4s4sIHHIIHH", b"RIFF", riff_size, b"WAVE", b"fmt ", 16, 1, 1, SAMPLE_RATE, SAMPLE_RATE * 2, 2, 16
    )
    return head + struct.pack("<4sI", b"data", size)


def encode_audio(samples: Samples, format: AudioFormat) -> bytes:
    """Encodes complete audio."""
    match format.name:
        case "wav":
            data = pcm(samples)
            return wav_header(len(data)) + data
        case "pcm" | "pcm16":
            return pcm(samples)
        case _:
            return _encode_container(samples, *_CONTAINERS[format.name])


def _encode_container(samples: Samples, container: str, subtype: str) -> bytes:
    import soundfile

    out = io.BytesIO()
    soundfile.write(out, samples, SAMPLE_RATE, format=container, subtype=subtype)
    return out.getvalue()


async def join_audio(sounds: AsyncIterable[Samples]) -> Samples:
    """Collects a stream of audio."""
    pieces = [samples async for samples in sounds]
    return np.concatenate(pieces) if pieces else silence()


def resample(samples: Samples, rate: int, target_rate: int) -> Samples:
    if rate == target_rate or not len(samples):
        return samples
    import soxr

    resampled = soxr.resample(samples, rate, target_rate)
    return np.clip(resampled, -1.0, 1.0).astype(np.float32, copy=False)
