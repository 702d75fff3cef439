"""Dropping the oldest exchanges: as few as needed, found with few renderings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from palaver.chat.model import Model
from palaver.chat.reply_request import fit_prompt, without_oldest
from palaver.chat.reply_stream import ReplyRequest
from palaver.errors import ContextOverflow
from palaver.generation import Prompt
from palaver.messages import Message, assistant, system, user
from palaver.sampling import Sampling
from tests.chat.scripted_service import TOKENIZER, model


@dataclass
class CountedFormat:
    """A format that counts how often it renders."""

    format: Any
    renderings: int = 0
    past_replies: list[int] = field(default_factory=list)

    def render(self, *arguments: Any) -> Prompt:
        self.renderings += 1
        _messages, _tools, _options, _reply, _partial, past_replies, _expand = arguments
        self.past_replies.append(len(past_replies))
        prompt: Prompt = self.format.render(*arguments)
        return prompt


def counted_model(context: int) -> tuple[Model, CountedFormat]:
    loaded = model(context=context)
    counted = CountedFormat(loaded.format)
    return replace(loaded, format=counted), counted  # type: ignore[arg-type]


def request(messages: Sequence[Message]) -> ReplyRequest:
    replies = tuple(tuple(TOKENIZER.encode([one.text])) for one in messages if one.role == "assistant")
    return ReplyRequest(tuple(messages), Sampling(), past_replies=replies)


def exchanges(count: int, length: int) -> list[Message]:
    pairs = [(user(f"Question {n}?"), assistant(f"Answer {n}. " + "word " * length)) for n in range(count)]
    return [message for pair in pairs for message in pair]


def drop_one_by_one(loaded: Model, whole: ReplyRequest) -> int:
    """The reference: drops exchange after exchange until the prompt fits."""
    for dropped in range(0, len(whole.messages), 2):
        try:
            loaded.prompt(without_oldest(whole, dropped))
        except ContextOverflow:
            continue
        return dropped
    raise AssertionError("nothing fits")


@pytest.mark.parametrize("context", [200, 1000, 4096, 20_000])
def test_a_long_conversation_is_fitted_with_few_renderings(context: int) -> None:
    loaded, counted = counted_model(context)
    whole = request([system("Be brief."), *exchanges(300, 20), user("And now?")])
    dropped, prompt = fit_prompt(loaded, whole, "shorten")
    assert counted.renderings <= 10
    shortened = without_oldest(whole, dropped)
    assert prompt == loaded.prompt(shortened)
    assert len(prompt) < context
    assert shortened.messages[0] == whole.messages[0]
    assert shortened.messages[1].role == "user"
    assert counted.past_replies[-1] == sum(one.role == "assistant" for one in shortened.messages)
    if dropped:
        with pytest.raises(ContextOverflow):
            loaded.prompt(without_oldest(whole, dropped - 2))


@pytest.mark.parametrize("seed", range(8))
def test_exchanges_of_all_sizes_are_dropped_as_one_by_one(seed: int) -> None:
    dice = random.Random(seed)
    loaded, counted = counted_model(dice.randint(150, 2500))
    turns = [one for _ in range(40) for one in exchanges(1, int(dice.paretovariate(0.8)) % 60)]
    whole = request([*turns, user("And now?")])
    dropped, _ = fit_prompt(loaded, whole, "shorten")
    assert counted.renderings <= 10
    assert dropped == drop_one_by_one(loaded, whole)


def test_what_does_not_fit_at_all_is_refused() -> None:
    loaded, _ = counted_model(100)
    with pytest.raises(ContextOverflow):
        fit_prompt(loaded, request([*exchanges(5, 3), user("word " * 200)]), "shorten")
    with pytest.raises(ContextOverflow):
        fit_prompt(loaded, request([*exchanges(50, 3), user("Hi")]), "refuse")
