"""Engines of replicas for tests, and a conversation with them. Ray's processes import this module."""

from __future__ import annotations

from collections.abc import Callable

from palaver.chat.model import Model
from palaver.chat.reply_stream import ReplyRequest
from palaver.engines.base import Engine
from palaver.events import Usage
from palaver.messages import Message, Role, Text, user
from palaver.phases import Vocabulary
from palaver.sampling import Sampling
from tests.chat.scripted_service import TOKENIZER, reply
from tests.scripted_engine import PacedEngine

SCRIPT = reply("1 2 3 4 5 6 7 8 9 " * 40, "a word and another " * 60)
PACE_S = 0.002
SLOTS = 8


async def load_paced() -> tuple[Engine, Vocabulary]:
    """Replies with the script, two milliseconds a token."""
    return PacedEngine([SCRIPT], TOKENIZER.vocabulary, PACE_S), TOKENIZER.vocabulary


async def load_with_slots() -> tuple[Engine, Vocabulary]:
    """The same, for eight requests at once."""
    return PacedEngine([SCRIPT], TOKENIZER.vocabulary, PACE_S, SLOTS), TOKENIZER.vocabulary


async def converse(
    model: Model, turns: int, after_turn: Callable[[int], object] | None = None, system: str = ""
) -> list[Usage]:
    """One conversation, each turn with the tokens of the replies before it. Returns the usage of each turn."""
    messages: tuple[Message, ...] = (Message(Role.SYSTEM, (Text(system),)),) if system else ()
    replies: tuple[tuple[int, ...], ...] = ()
    usage = []
    for turn in range(turns):
        messages = (*messages, user(f"Tell me something about the number {turn}."))
        sampling = Sampling(temperature=1.0, seed=turn, max_tokens=40)
        found = await model.reply(ReplyRequest(messages, sampling, conversation="one", past_replies=replies))
        assert found.folded.finished is not None
        usage.append(found.folded.finished.usage)
        messages, replies = (*messages, found.message), (*replies, found.token_ids)
        if after_turn is not None:
            after_turn(turn)
    return usage
