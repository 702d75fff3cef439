"""How soon the embedded model answers: its load, the first token of `palaver ask "What is 17 + 25?"`, the whole reply.

    PYTHONPATH=src python3 benchmarks/sprout.py

Nothing is measured twice: every run is a process of its own, as it is for a person; the import of torch is told apart.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

RUNS = 5
SPROUT = Path(__file__).resolve().parent.parent / "src" / "palaver" / "models" / "sprout"
QUESTION = "What is 17 + 25?"


async def once() -> dict[str, float]:
    """Seconds of each part, in a process that has done nothing yet."""
    began = time.perf_counter()
    from palaver.chat.model import Model
    from palaver.chat.reply_stream import ReplyRequest
    from palaver.engines.torch import load
    from palaver.formats.loader import load_format
    from palaver.formats.tokenizer import load_tokenizer
    from palaver.messages import user
    from palaver.sampling import Sampling

    imported = time.perf_counter()
    tokenizer = load_tokenizer(SPROUT)
    engine = load(SPROUT, vocabulary=tokenizer.vocabulary)
    chat = Model(engine, load_format(SPROUT, tokenizer))
    loaded = time.perf_counter()
    first = 0.0
    async with chat.stream_reply(ReplyRequest((user(QUESTION),), Sampling(temperature=0, max_tokens=400))) as turn:
        async for _ in turn:
            first = first or (time.perf_counter() if turn.steps else 0.0)
        reply = turn.reply()
    done = time.perf_counter()
    await engine.close()
    assert "42" in reply.message.text, reply.message.text
    return {
        "import": imported - began,
        "load": loaded - imported,
        "first token after load": first - loaded,
        "whole reply": done - loaded,
        "tokens a second": len(reply.token_ids) / (done - loaded),
    }


def main() -> None:
    if "--once" in sys.argv:
        print(json.dumps(asyncio.run(once())))
        return
    command = [sys.executable, __file__, "--once"]
    found = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(RUNS)]
    for name in found[0]:
        values = [run[name] for run in found]
        unit, worst = ("", min) if name == "tokens a second" else (" s", max)
        print(f"{name:<24}{statistics.median(values):8.2f}{unit}   worst {worst(values):.2f}{unit}")


if __name__ == "__main__":
    main()
