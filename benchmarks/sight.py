"""Sprout Omni's evaluation through `palaver serve`: freshly drawn pictures and spoken words, sent to the API as files,
and Sprout's own questions in text.

    PYTHONPATH=src python3 -m benchmarks.sight [--cases 20] [--text-cases 20]

The training measures its own network; this measures what users have: their files decoded, the model's own processor,
the engine with eight requests at a time. Text abilities shall reach nine tenths of Sprout's figures. It exits with 1 if
a bar is missed.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import json
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
from palaver.models.resolver import resolve_folder
from training import bars as text_bars
from training import card
from training.checks import Reply, right
from training.conversations import Sample
from training.evaluate import table
from training.omni import bars, features
from training.omni.evaluate import SHARE_OF_SPROUT, sprout_shares
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


def text_messages(sample: Sample) -> list[Part]:
    """The conversation up to the reply. Thoughts are given where the template writes them: after the last question."""
    *history, _ = sample.messages
    asked = max(at for at, one in enumerate(history) if one.role == "user")
    found: list[Part] = []
    calls: list[str] = []
    for at, one in enumerate(history):
        message: Part = {"role": one.role, "content": one.content}
        if one.role == "tool":
            message["tool_call_id"] = calls.pop(0)
        if one.role == "assistant" and at > asked:
            message["reasoning_content"] = one.thinking
        if one.calls:
            calls = [f"call-{at}-{number}" for number in range(len(one.calls))]
            functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in one.calls]
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": function}
                for id, function in zip(calls, functions, strict=True)
            ]
        found.append(message)
    return found


def ask(url: str, model: str, messages: list[Part], sample: Sample) -> Reply:
    body: Part = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 1500}
    if sample.tools:
        body["tools"] = list(sample.tools)
    if not sample.thinks:
        body["chat_template_kwargs"] = {"enable_thinking": False}
    answer = httpx.post(url + CHAT, json=body, timeout=300)
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    called = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    calls = tuple({"name": one["name"], "arguments": json.loads(one["arguments"])} for one in called)
    text = (choice["message"]["content"] or "").strip()
    return Reply(text, calls, choice["finish_reason"] in ("stop", "tool_calls"), bool(text or calls))


Case = tuple[Sample, list[Part]]


def all_cases(given: argparse.Namespace) -> Iterator[tuple[str, float | None, list[Case]]]:
    """The name of each bar, the share that is wanted, and its cases with the messages that ask them."""
    for bar in bars.BARS:
        if given.bar in bar.name and given.cases:
            found = drawn(bar, given.cases, given.seed)
            yield bar.name, bar.wanted, [(case.sample, messages) for case, messages in found]
    of_sprout = sprout_shares()
    for text_bar in text_bars.BARS:
        name = f"text: {text_bar.name}"
        if given.bar in name and given.text_cases:
            samples = text_bars.cases(text_bar, given.text_cases, given.seed)
            wanted = SHARE_OF_SPROUT * of_sprout[text_bar.name]
            yield name, wanted, [(sample, text_messages(sample)) for sample in samples]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20, help="cases of each bar with media")
    parser.add_argument("--text-cases", type=int, default=20, help="cases of each bar of text")
    parser.add_argument("--model", default=MODEL, help="Sprout answers text only: --cases 0")
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--bar", default="", help="only bars whose name contains this")
    parser.add_argument("--card", action="store_true", help="write the figures into the model's card")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with server_process("--model", given.model) as server, ThreadPoolExecutor(STREAMS) as streams:
        for name, wanted, cases in all_cases(given):
            samples, messages = [sample for sample, _ in cases], [asked for _, asked in cases]
            where, model = itertools.repeat(server.url), itertools.repeat(given.model)
            replies = streams.map(ask, where, model, messages, samples)
            found = [
                sample.expect is not None and right(reply, sample.expect)
                for sample, reply in zip(samples, replies, strict=True)
            ]
            rows.append({"bar": name, "sampling": "greedy", "right": sum(found), "of": len(found), "wanted": wanted})
            print(table(rows[-1:]), flush=True)
    text = [row for row in rows if row["bar"].startswith("text: ")]
    if text:
        total = {name: sum(row[name] for row in text) for name in ("right", "of")}
        wanted = sum(row["wanted"] * row["of"] for row in text) / total["of"]
        rows.append({"bar": "text abilities together", "sampling": "greedy", **total, "wanted": wanted})
        print(table(rows[-1:]), flush=True)
    if given.card:
        card.fill(resolve_folder(given.model) / "README.md", {"figures": rows}, "served")
    return int(any(row["wanted"] is not None and row["right"] < row["wanted"] * row["of"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
