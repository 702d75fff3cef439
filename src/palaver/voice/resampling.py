"""Sound at another rate. Each clause is resampled by itself, so that where it is joined to others changes nothing."""

from __future__ import annotations

import numpy as np

from palaver.voice.base import Samples
from palaver.voice.errors import VoiceMissing


def resampled(samples: Samples, rate: int, wanted: int) -> Samples:
    if rate == wanted or not len(samples):
        return samples
    try:
        import soxr
    except ImportError:
        raise VoiceMissing("Sound at another rate", "soxr") from None
    changed = soxr.resample(samples, rate, wanted)
    return np.clip(changed, -1.0, 1.0).astype(np.float32, copy=False)
