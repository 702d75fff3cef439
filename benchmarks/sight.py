"""Sprout Omni's evaluation through `palaver serve`: freshly drawn pictures and spoken words, sent to the API as files.

    PYTHONPATH=src python3 -m benchmarks.sight [--cases 20]

The training measures its own network; this measures what users have: their files decoded, the model's own processor,
the engine with eight requests at a time. It exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import soundfile
from PIL import Image

from benchmarks.server import CHAT, server_process
from training.checks import Reply, right
from training.evaluate import table
from training.omni import bars, features
from training.omni.questions import MediaSample
from training.omni.tokens import PICTURE_PART, SOUND_PART

MODEL = "sprout-omni"
STREAMS = 8
Part = dict[str, Any]
_PLACEHOLDERS = re.compile(f"({re.escape(PICTURE_PART)}|{re.escape(SOUND_PART)})")


@contextmanager
def files_kept() -> Iterator[list[Part]]:
    """Inside, every picture and sound that a case draws is kept as the part of a message that holds its file."""
    kept: list[Part] = []
    picture, sound = features.picture, features.sound

    def keep_picture(image: Image.Image) -> features.Picture:
        file = io.BytesIO()
        image.save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        kept.append({"type": "image_url", "image_url": {"url": url}})
        return picture(image)

    def keep_sound(wave: features.Wave) -> features.Sound:
        file = io.BytesIO()
        soundfile.write(file, wave, features.RATE, format="WAV")
        data = base64.b64encode(file.getvalue()).decode()
        kept.append({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
        return sound(wave)

    features.picture, features.sound = keep_picture, keep_sound
    try:
        yield kept
    finally:
        features.picture, features.sound = picture, sound


def drawn(bar: bars.MediaBar, count: int, seed: int) -> list[tuple[MediaSample, list[Part]]]:
    """Cases with the messages that ask them."""
    with files_kept() as files:
        cases = bars.cases(bar, count, seed)
    left = iter(files)
    return [(case, [_message(one.role, one.content, left) for one in case.sample.messages[:-1]]) for case in cases]


def _message(role: str, text: str, files: Iterator[Part]) -> Part:
    parts = [
        next(files) if piece in (PICTURE_PART, SOUND_PART) else {"type": "text", "text": piece}
        for piece in _PLACEHOLDERS.split(text)
        if piece
    ]
    return {"role": role, "content": parts if role == "user" else text}


def ask(url: str, messages: list[Part], thinks: bool) -> Reply:
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 600}
    if not thinks:
        body["chat_template_kwargs"] = {"enable_thinking": False}
    answer = httpx.post(url + CHAT, json=body, timeout=300)
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    return Reply(choice["message"]["content"] or "", (), choice["finish_reason"] == "stop", True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20, help="cases of each bar")
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--bar", default="", help="only bars whose name contains this")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with server_process("--model", MODEL) as server, ThreadPoolExecutor(STREAMS) as streams:
        for bar in bars.BARS:
            if given.bar not in bar.name:
                continue
            cases = drawn(bar, given.cases, given.seed)
            messages = [asked for _, asked in cases]
            replies = streams.map(
                ask, itertools.repeat(server.url), messages, [case.sample.thinks for case, _ in cases]
            )
            found = [
                case.sample.expect is not None and right(reply, case.sample.expect)
                for (case, _), reply in zip(cases, replies, strict=True)
            ]
            rows.append(
                {"bar": bar.name, "sampling": "greedy", "right": sum(found), "of": len(found), "wanted": bar.wanted}
            )
            print(table(rows[-1:]), flush=True)
    return int(any(row["wanted"] is not None and row["right"] < row["wanted"] * row["of"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
