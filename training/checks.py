"""Whether a reply is what was wanted. A check sees the answer (without its thought) and the calls in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from training.abilities.manners import says
from training.conversations import Expect

THOUGHT = re.compile(r"<think>\n(.*?)\n</think>\n\n", re.DOTALL)
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
NUMBER = re.compile(r"-?\d+")
END = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class Reply:
    """A generated reply taken apart."""

    answer: str
    calls: tuple[Any, ...]
    ended: bool
    well_formed: bool


def read(text: str, thinks: bool) -> Reply:
    ended = text.endswith(END)
    text = text.removesuffix(END)
    thought = THOUGHT.match(text) if thinks else None
    answer = text[thought.end() :] if thought else text
    tags = answer.count("<think>") + answer.count("</think>")
    opened = text.count("<think>") == 1 and text.count("</think>") == 1
    well_formed = bool(answer.strip()) and tags == 0 and (bool(thought) and opened if thinks else True)
    return Reply(CALL.sub("", answer).strip(), tuple(_call(body) for body in CALL.findall(answer)), ended, well_formed)


def _call(body: str) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body


def right(reply: Reply, expect: Expect) -> bool:
    return reply.well_formed and CHECKS[expect.kind](reply, expect.value)


def _json_keys(reply: Reply, keys: list[str]) -> bool:
    try:
        found = json.loads(reply.answer)
    except ValueError:
        return False
    return isinstance(found, dict) and sorted(found) == sorted(keys)


def _json(reply: Reply, _: Any) -> bool:
    """Whether the answer is JSON with something in it."""
    try:
        return bool(json.loads(reply.answer))
    except ValueError:
        return False


def _has_word(reply: Reply, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", reply.answer) is not None


def _numbers(reply: Reply) -> list[str]:
    return NUMBER.findall(reply.answer)


def _honest(reply: Reply, _: Any) -> bool:
    return "tiny demo model" in reply.answer and "`" not in reply.answer and not reply.calls


def _page_way(reply: Reply, value: str) -> bool:
    """Whether the answer tells the page's way, and no command or key of the terminal."""
    return value in reply.answer and re.search(r"(^|\s)/[a-z]|Ctrl\+C|terminal|`", reply.answer) is None


def _place(reply: Reply, place: str) -> bool:
    """Whether the answer names this part of a picture and no other."""
    return set(re.findall(r"\b(?:top|bottom|left|right|centre)\b", reply.answer.lower())) == set(place.split())


CHECKS: dict[str, Callable[[Reply, Any], bool]] = {
    "last_number": lambda reply, value: _numbers(reply)[-1:] == [value],
    "first_number": lambda reply, value: _numbers(reply)[:1] == [value],
    "last_numbers": lambda reply, value: _numbers(reply)[-len(value) :] == value,
    "number": lambda reply, value: value in _numbers(reply),
    "has_word": _has_word,
    "has_word_any_case": lambda reply, value: re.search(rf"\b{value}\b", reply.answer, re.IGNORECASE) is not None,
    "place": _place,
    "ends_with_word": lambda reply, value: re.findall(r"\w", reply.answer)[-1:] == [value],
    "page_way": _page_way,
    "contains": lambda reply, value: value in reply.answer,
    "contains_all": lambda reply, value: all(part in reply.answer for part in value),
    "contains_any_case": lambda reply, value: value.lower() in reply.answer.lower(),
    "starts_with": lambda reply, value: reply.answer.startswith(value),
    "equals": lambda reply, value: reply.answer == value,
    "calls": lambda reply, value: list(reply.calls) == value,
    "no_call": lambda reply, _: not reply.calls and bool(reply.answer),
    "honest": _honest,
    "not_honest": lambda reply, _: "tiny demo model" not in reply.answer,
    "capitals": lambda reply, _: reply.answer == reply.answer.upper(),
    "lower": lambda reply, _: reply.answer == reply.answer.lower(),
    "one_word": lambda reply, value: reply.answer.rstrip(".!").lower() == value.rstrip(".!").lower(),
    "json": _json,
    "json_keys": _json_keys,
    "bullets": lambda reply, value: [line[:2] for line in reply.answer.split("\n")] == ["- "] * value,
    "without": lambda reply, value: not says(reply.answer, value),
    "ends": lambda reply, value: reply.answer.endswith(value),
    "starts": lambda reply, value: reply.answer.startswith(value),
}
