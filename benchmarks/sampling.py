"""The sampler on the CPU: how long one row of logits takes, by settings.

PYTHONPATH=src python3 benchmarks/sampling.py [--vocabulary 151936] [--rows 32]
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from palaver.engines.core.logits_processor import LogitsProcessor
from palaver.engines.core.reply_state import ReplyState
from palaver.engines.core.sampler import HostLogits
from palaver.generation import Prompt
from palaver.sampling import Sampling

SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "greedy, 5 alternatives": Sampling(temperature=0, logprobs=5),
    "stored turn": Sampling(temperature=0.6, top_k=20, top_p=0.95, logprobs=5),
    "stored turn with penalties": Sampling(
        temperature=0.6, top_k=20, top_p=0.95, logprobs=5, repetition_penalty=1.1, presence_penalty=0.5
    ),
    "temperature 1": Sampling(temperature=1.0, logprobs=5),
    "temperature 0.7": Sampling(temperature=0.7, logprobs=5),
    "top_p": Sampling(temperature=1.0, top_p=0.9, logprobs=5),
    "min_p": Sampling(temperature=1.0, min_p=0.05, logprobs=5),
    "min_p and XTC": Sampling(temperature=1.0, min_p=0.02, xtc_probability=0.5, logprobs=5),
    "typical_p": Sampling(temperature=1.0, typical_p=0.9, logprobs=5),
    "dynamic temperature": Sampling(temperature=1.0, dynatemp_range=0.5, min_p=0.02, logprobs=5),
}
"""With the settings of a conversation, and each of the others by itself."""
ROUNDS = 15
CONTEXT = 2000


def measure(sampling: Sampling, rows: int, size: int) -> float:
    """The median of several rounds, in seconds of CPU time a row."""
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(rows, size)) * 3).astype(np.float32)
    prompt = Prompt(tuple(range(CONTEXT)))
    vocabulary = [b"x"] * size
    processors = [
        LogitsProcessor(prompt, sampling, choice, ReplyState(prompt, sampling, vocabulary), size)
        for choice in range(rows)
    ]
    seconds = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        HostLogits(logits).sample(processors)
        seconds.append((time.thread_time() - began) / rows)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--rows", type=int, default=32)
    arguments = parser.parse_args()
    for name, sampling in SAMPLINGS.items():
        print(f"{name:28} {measure(sampling, arguments.rows, arguments.vocabulary) * 1e3:7.3f} ms a row", flush=True)


if __name__ == "__main__":
    main()
