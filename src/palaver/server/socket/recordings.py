"""A recording as a client sends it: base64 of raw float32 at 16 kHz, or of a sound file."""

from __future__ import annotations

import base64
import binascii
import io

import numpy as np

from palaver.errors import BadParameter
from palaver.voice.audio_format import resample
from palaver.voice.base import RATE, Samples, VoiceMissing

RAW_RATE = 16_000
MAX_SECONDS = 60
_FIELD = "tts.ref_audio_data"
_FILES = (b"RIFF", b"fLaC", b"OggS", b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2")


def recorded(text: str) -> bytes:
    """As a `Voice` takes it: float32 at `RATE`. May take a while."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _wrong("must be base64") from None
    if not data:
        return b""
    samples, rate = _file(data) if data.startswith(_FILES) else (_raw(data), RAW_RATE)
    if not np.isfinite(samples).all():
        raise _wrong("holds values that are no numbers")
    return resample(samples, rate, RATE).tobytes()


def _raw(data: bytes) -> Samples:
    if len(data) % 4:
        raise _wrong("must be float32 samples at 16 kHz, or a WAV, FLAC, OGG or MP3 file")
    _check_length(len(data) // 4, RAW_RATE)
    return np.frombuffer(data, dtype="<f4").astype(np.float32)


def _file(data: bytes) -> tuple[Samples, int]:
    """By its header first, so that a small file can't become a long sound."""
    try:
        import soundfile
    except ImportError:
        raise VoiceMissing("A recording in a file", "soundfile") from None
    try:
        about = soundfile.info(io.BytesIO(data))
        _check_length(about.frames, about.samplerate)
        most = MAX_SECONDS * about.samplerate
        channels, rate = soundfile.read(io.BytesIO(data), most, dtype="float32", always_2d=True)
    except soundfile.SoundFileError:
        raise _wrong("is no sound file that can be read") from None
    return channels.mean(axis=1, dtype=np.float32), rate


def _check_length(frames: int, rate: int) -> None:
    if frames > MAX_SECONDS * rate:
        raise _wrong(f"is longer than {MAX_SECONDS} s")


def _wrong(why: str) -> BadParameter:
    return BadParameter(_FIELD, "...", why)
