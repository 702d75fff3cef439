"""What reading costs: microseconds a token by family and length of the reply. `python -m benchmarks.reading`

The bar is 20 µs a token, the same for long replies as for short ones.
"""

from __future__ import annotations

import json
import time
from itertools import pairwise

from palaver.events import fold
from palaver.formats.format import TemplateFormat
from palaver.messages import user
from tests.formats.families import FAMILIES, TOOLS, Kind, make_format

LENGTHS = (1_000, 10_000, 50_000)
BAR = 20.0
_WORDS = ' the quick (brown) fox, it\'s < 3 and\n\n jumps over a `lazy` dog; "so" what?'.split(" ")


def _text(count: int) -> list[str]:
    return [f" {_WORDS[place % len(_WORDS)]}" for place in range(count)]


def _quoted(count: int) -> list[str]:
    return [json.dumps(piece)[1:-1] for piece in _text(count)]


REPLIES = {
    "tags, self-opened": lambda n: ["<think>", "\n", *_text(n // 2), "\n", "</think>", "\n\n", *_text(n // 2)],
    "no thinking": _text,
    "JSON in tags": lambda n: ["<tool_call>", '\n{"name": "look_up", "arguments": {"word": "', *_quoted(n), '"}}\n',
                               "</tool_call>"],
    "bare JSON": lambda n: ['{"name": "look_up", "parameters": {"word": "', *_quoted(n), '"}}'],
    "function XML": lambda n: ["<tool_call>", "\n<function=look_up>\n<parameter=word>\n", *_text(n), "\n</parameter>\n",
                               "</function>\n", "</tool_call>"],
    "key and value tags": lambda n: ["<tool_call>", "look_up\n", "<arg_key>", "word", "</arg_key>", "\n", "<arg_value>",
                                     *_text(n), "</arg_value>", "\n", "</tool_call>"],
    "sections with counted ids": lambda n: ["<|section|>", "<|call|>", "functions.look_up:0", "<|args|>", '{"word": "',
                                            *_quoted(n), '"}', "<|/call|>", "<|/section|>"],
    "Python calls": lambda n: ["<|calls|>", '[look_up(word="', *_quoted(n), '")]', "<|/calls|>"],
    "braces with own quotes": lambda n: ["<|call>", "call:look_up{word:", '<|"|>', *_text(n), '<|"|>', "}", "<call|>"],
    "typed headers": lambda n: ["<|channel|>", "analysis", "<|message|>", *_text(n // 2), "<|end|>", "<|start|>",
                                "assistant", "<|channel|>", "final", "<|message|>", *_text(n // 2)],
}  # fmt: skip


def seconds(format: TemplateFormat, tokens: list[int]) -> float:
    """The best of three in processor time, folding included."""
    best = float("inf")
    tools = TOOLS if format.facts.calls else ()
    prompt = format.render([user("q")], tools)
    for _ in range(3):
        started = time.process_time()
        reader = format.reader(prompt, ("###", "\n\nUser:"), tools)
        events = reader.open()
        for token in tokens:
            events += reader.feed(token)
        fold([*events, *reader.close()])
        best = min(best, time.process_time() - started)
    return best


def main() -> None:
    worst, growth = 0.0, 0.0
    print(f"{'µs a token, by tokens':40}" + "".join(f"{length:>10,}" for length in LENGTHS))
    for name, reply in REPLIES.items():
        for kind in (Kind.ADDED, Kind.TEXT):
            format, pieces = make_format(FAMILIES[name], kind)
            costs = []
            for length in LENGTHS:
                tokens = [pieces.piece(piece) for piece in reply(length)]
                costs.append(seconds(format, tokens) / len(tokens) * 1e6)
            worst, growth = max(worst, *costs), max(growth, *(b / a for a, b in pairwise(costs)))
            print(f"{name + ', markers ' + kind:40}" + "".join(f"{cost:10.1f}" for cost in costs))
    print(
        f"worst {worst:.1f} µs a token (bar {BAR:.0f}); a longer reply costs at most {growth:.2f} times as much a token"
    )


if __name__ == "__main__":
    main()
