"""The embedded model with its voice on: what it says can be said."""

from __future__ import annotations

import asyncio

import pytest

from palaver.chat.reply_stream import ReplyRequest
from palaver.engines.core.token_masks import unspeakable_characters
from palaver.messages import Message, user
from palaver.sampling import Sampling
from tests.test_sprout import WEATHER, loaded_model

ASKED = (
    "Write a program that prints the first ten squares in Python.",
    "Write a haiku about rain.",
    "What is 17 + 25?",
    "What is 12 * 34?",
    "Show me the table of seven.",
    "List three fruits.",
    "How do I load a file in Palaver?",
    "Make a to-do list.",
    "Which commands are there?",
    "Who are you?",
)


async def replies(count: int, spoken: bool) -> list[Message]:
    async with loaded_model() as chat:
        requests = [
            ReplyRequest((user(ASKED[seed % len(ASKED)]),), Sampling(max_tokens=250, seed=seed, spoken=spoken))
            for seed in range(count)
        ]
        return [reply.message for reply in await asyncio.gather(*map(chat.reply, requests))]


def unfit(messages: list[Message]) -> set[str]:
    return {character for message in messages for character in message.text} & unspeakable_characters()


@pytest.mark.slow
async def test_spoken_replies_contain_no_unspeakable_characters() -> None:
    said = await replies(60, spoken=True)
    assert unfit(said) == set()
    assert sum(bool(message.text.strip()) for message in said) >= 57
    thoughts = {character for message in said for character in message.thinking}
    assert thoughts & unspeakable_characters(), "thinking is free"


async def test_without_voice_markdown_is_allowed() -> None:
    assert len(unfit(await replies(30, spoken=False))) >= 2


async def test_tool_calls_are_not_restricted() -> None:
    async with loaded_model() as chat:
        request = ReplyRequest((user("What's the weather in Oslo?"),), Sampling(temperature=0, spoken=True), (WEATHER,))
        message = (await chat.reply(request)).message
    assert message.tool_calls[0].arguments == '{"city": "Oslo"}'
