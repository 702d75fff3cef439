"""Sound as bytes, in the forms that clients ask for."""

from __future__ import annotations

import io
import struct
from collections.abc import AsyncIterable
from dataclasses import dataclass

import numpy as np

from palaver.errors import BadParameter
from palaver.voice.base import RATE, Samples, VoiceMissing, silence

UNKNOWN_LENGTH = 0xFFFFFFFF
_LIMIT = 32767.0


@dataclass(frozen=True, slots=True)
class AudioFormat:
    name: str
    media_type: str
    streams: bool = False
    """Whether a piece can be sent before the next is there."""


FORMS = {
    form.name: form
    for form in (
        AudioFormat("wav", "audio/wav", streams=True),
        AudioFormat("pcm", "audio/pcm", streams=True),
        AudioFormat("pcm16", "audio/pcm", streams=True),
        AudioFormat("flac", "audio/flac"),
        AudioFormat("mp3", "audio/mpeg"),
        AudioFormat("opus", "audio/ogg"),
    )
}
_FILES = {"flac": ("FLAC", "PCM_16"), "mp3": ("MP3", "MPEG_LAYER_III"), "opus": ("OGG", "OPUS")}


def audio_format(name: str, field: str = "response_format") -> AudioFormat:
    if name not in FORMS:
        raise BadParameter(field, name, f"must be one of {', '.join(FORMS)}")
    return FORMS[name]


def pcm(samples: Samples) -> bytes:
    """16 bits a sample, little end first."""
    return (np.clip(samples, -1.0, 1.0) * _LIMIT).round().astype("<i2").tobytes()


def wav_header(data_bytes: int | None = None) -> bytes:
    """For so many bytes of `pcm`; None for sound whose end is not known yet."""
    size = UNKNOWN_LENGTH if data_bytes is None else data_bytes
    whole = UNKNOWN_LENGTH if data_bytes is None else size + 36
    head = struct.pack("<4sI4s4sIHHIIHH", b"RIFF", whole, b"WAVE", b"fmt ", 16, 1, 1, RATE, RATE * 2, 2, 16)
    return head + struct.pack("<4sI", b"data", size)


def encode_audio(samples: Samples, form: AudioFormat) -> bytes:
    """All of a sound at once."""
    match form.name:
        case "wav":
            data = pcm(samples)
            return wav_header(len(data)) + data
        case "pcm" | "pcm16":
            return pcm(samples)
        case _:
            return _as_file(samples, *_FILES[form.name])


def _as_file(samples: Samples, kind: str, subtype: str) -> bytes:
    try:
        import soundfile
    except ImportError:
        raise VoiceMissing(f"Sound as {kind}", "soundfile") from None
    out = io.BytesIO()
    soundfile.write(out, samples, RATE, format=kind, subtype=subtype)
    return out.getvalue()


async def join_audio(sounds: AsyncIterable[Samples]) -> Samples:
    """All of it, once it has come."""
    pieces = [samples async for samples in sounds]
    return np.concatenate(pieces) if pieces else silence()


def resample(samples: Samples, rate: int, wanted: int) -> Samples:
    if rate == wanted or not len(samples):
        return samples
    try:
        import soxr
    except ImportError:
        raise VoiceMissing("Sound at another rate", "soxr") from None
    changed = soxr.resample(samples, rate, wanted)
    return np.clip(changed, -1.0, 1.0).astype(np.float32, copy=False)
