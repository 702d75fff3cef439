"""A text-to-speech model in a process of its own: `python -m palaver.voice.child MODEL`, spoken to by `hosted`.

So torch stays out of the server's process, and a model that crashes takes nothing down.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

import numpy as np

from palaver.voice import frames
from palaver.voice.base import RATE
from palaver.voice.model import Asked, SpeechModel
from palaver.voice.resampling import resampled

KNOWN = ("vits", "pocket_tts")


def load(name: str) -> SpeechModel:
    folder = _folder(name)
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    match kind:
        case "vits":
            from palaver.voice.vits import Vits

            return Vits(folder)
        case "pocket_tts":
            from palaver.voice.pocket import Pocket

            return Pocket(folder)
        case _:
            raise ValueError(f"it is of the kind {kind!r}, and known are {', '.join(KNOWN)}")


def _folder(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, ignore_patterns=["*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack"]))


def serve(name: str, asking: BinaryIO, answering: BinaryIO) -> None:
    """Answers until nobody asks any more."""
    try:
        model = load(name)
    except Exception as error:
        frames.write(answering, {"error": _sentence(error)})
        return
    frames.write(answering, {"about": asdict(model.about)})
    while (asked := frames.read(asking)) is not None:
        value, reference = asked
        try:
            sound = model.say(_asked(value, reference))
            samples = resampled(np.clip(sound.samples, -1.0, 1.0).astype(np.float32), sound.rate, RATE)
            frames.write(answering, {"id": value["id"]}, samples.tobytes())
        except Exception as error:
            frames.write(answering, {"id": value["id"], "error": _sentence(error)})


def _asked(value: dict[str, object], reference: bytes) -> Asked:
    recorded = np.frombuffer(reference, dtype=np.float32) if reference else None
    return Asked(str(value["words"]), str(value["voice"]), float(str(value["speed"])), recorded)


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"


def main() -> None:
    """What libraries print goes to the log, not between the frames."""
    answering = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin.buffer, answering)


if __name__ == "__main__":
    main()
