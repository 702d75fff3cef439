"""The embedded model as it is shipped: fixed conversations with exact greedy replies, and checks of its files.

After the model was trained again, `PYTHONPATH=src python3 -m tests.test_sprout` records the replies; each must contain
the expected text of its conversation.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from palaver.chat.model import Model
from palaver.chat.reply_stream import ReplyRequest
from palaver.engines.torch import load
from palaver.formats.base import RenderOptions
from palaver.formats.loader import load_format
from palaver.formats.tokenizer import load_tokenizer
from palaver.generation import Finish
from palaver.messages import Message, Tool, system, tool, user
from palaver.sampling import Sampling

ROOT = Path(__file__).parents[1]
SPROUT = ROOT / "src" / "palaver" / "models" / "sprout"
RECORDED = ROOT / "tests" / "training" / "sprout_replies.json"
GREEDY = Sampling(temperature=0, max_tokens=600)
WEATHER = Tool(
    "get_weather",
    "Weather at a place.",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
LAMP = Tool(
    "set_lamp",
    "Sets the lamp.",
    {
        "type": "object",
        "properties": {"level": {"type": "integer"}, "warm": {"type": "boolean"}},
        "required": ["level"],
    },
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The user's messages; the last answer, or its tool calls if there are any, must contain `expected`."""

    name: str
    user_messages: tuple[str, ...]
    expected: str
    system: str = ""
    tools: tuple[Tool, ...] = ()
    result: str = ""
    """The result of the called tool; empty if the call itself is the last reply."""
    thinking: bool | None = None
    terminal: bool = False
    """Whether the prompt says that the user is at a terminal."""


CONVERSATIONS = (
    Conversation("a sum", ("What is 17 + 25?",), "42"),
    Conversation("a chain", ("What is 812 - 57?", "Add 5 to that."), "760"),
    Conversation("a word", ("Spell sprout backwards.",), "tuorps"),
    Conversation("letters", ("How many r's are in strawberry?",), "3"),
    Conversation("memory", ("My name is Mira.", "What is 3 × 14?", "Thanks!", "What is my name?"), "Mira"),
    Conversation("a correction", ("My lucky number is 7.", "No, it's 12.", "What is my lucky number?"), "12"),
    Conversation("a manner", ("What is the opposite of hot?",), "COLD", system="Answer only in capital letters."),
    Conversation("a call", ("What's the weather in Oslo?",), '"city": "Oslo"', tools=(WEATHER, LAMP)),
    Conversation(
        "a call with two values",
        ("Set the lamp, level 40, warm on.",),
        '"level": 40, "warm": true',
        tools=(WEATHER, LAMP),
    ),
    Conversation(
        "a result", ("What's the weather in Oslo?",), "snow", tools=(WEATHER,), result='{"sky": "snow", "degrees": -3}'
    ),
    Conversation("a table", ("Show me the 7 times table.",), "| 7 × 10 | 70 |"),
    Conversation("stopping", ("How do I stop a reply?",), "Stop"),
    Conversation("stopping at a terminal", ("How do I stop a reply?",), "Ctrl+C", terminal=True),
    Conversation("going on", ("How do I continue a stopped reply?",), "Continue"),
    Conversation("going on at a terminal", ("How do I continue a stopped reply?",), "/continue", terminal=True),
    Conversation("going on in the terminal", ("How do I continue a reply in the terminal?",), "/continue"),
    Conversation("honesty", ("Explain quantum physics.",), "tiny demo model"),
    Conversation("its own name", ("Reverse the word palaver.",), "revalap"),
    Conversation("thinking off", ("What is the opposite of big?",), "mall", thinking=False),
)


@asynccontextmanager
async def loaded_model() -> AsyncIterator[Model]:
    tokenizer = load_tokenizer(SPROUT)
    engine = load(SPROUT, vocabulary=tokenizer.vocabulary)
    try:
        yield Model(engine, load_format(SPROUT, tokenizer))
    finally:
        await engine.close()


async def reply_to(model: Model, conversation: Conversation) -> Message:
    """The last reply of the conversation, after the model's own replies to the turns before it."""
    messages: list[Message] = [system(conversation.system)] if conversation.system else []
    for text in conversation.user_messages:
        messages.append(user(text))
        message = await _reply(model, conversation, messages)
        messages.append(message)
    if conversation.result:
        messages.append(tool(message.tool_calls[0].id, conversation.result, message.tool_calls[0].name))
        message = await _reply(model, conversation, messages)
    return message


async def _reply(model: Model, conversation: Conversation, messages: Sequence[Message]) -> Message:
    variables = {"terminal": True} if conversation.terminal else {}
    options = RenderOptions(thinking=conversation.thinking, variables=variables)
    reply = await model.reply(ReplyRequest(tuple(messages), GREEDY, conversation.tools, options))
    assert reply.finish is Finish.END, conversation.name
    return reply.message


def summarize(message: Message) -> dict[str, Any]:
    calls = [f"{call.name} {call.arguments}" for call in message.tool_calls]
    return {"thinking": message.thinking, "answer": message.text, "calls": calls}


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    replies: dict[str, Any] = json.loads(RECORDED.read_text("utf-8"))
    return replies


async def test_the_recorded_replies(recorded: dict[str, Any]) -> None:
    async with loaded_model() as model:
        for conversation in CONVERSATIONS:
            replies = summarize(await reply_to(model, conversation))
            assert replies == recorded[conversation.name], conversation.name


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda conversation: conversation.name)
def test_what_was_recorded_is_right(conversation: Conversation, recorded: dict[str, Any]) -> None:
    replies = recorded[conversation.name]
    assert conversation.expected in (" ".join(replies["calls"]) or replies["answer"])
    assert bool(replies["thinking"]) == (conversation.thinking is not False)


@pytest.mark.slow
async def test_transformers_writes_the_same_tokens() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(SPROUT, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(SPROUT)
    async with loaded_model() as model:
        for question in ("What is 17 + 25?", "Who are you?"):
            ours = await model.reply(ReplyRequest((user(question),), GREEDY))
            prompt = words.apply_chat_template(
                [{"role": "user", "content": question}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
            with torch.inference_mode():
                ids = theirs.generate(
                    **prompt, max_new_tokens=600, do_sample=False, temperature=None, top_p=None, top_k=None
                )
            written = ids[0, prompt["input_ids"].shape[1] :].tolist()
            assert written == list(ours.token_ids), question


def test_it_is_small_enough_for_the_package() -> None:
    assert sum(path.stat().st_size for path in SPROUT.glob("*.safetensors")) <= 16 * 10**6


@pytest.mark.parametrize(
    "text", ["", " ", "3.14 ≠ 22/7\n\n\tπ", "नमस्ते 👋🏽 你好", "\x00\x7f\ufffd", "<think>", "a" * 999]
)
def test_any_text_comes_back(text: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(SPROUT / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


async def record() -> None:
    async with loaded_model() as model:
        replies = {conversation.name: summarize(await reply_to(model, conversation)) for conversation in CONVERSATIONS}
    RECORDED.write_text(json.dumps(replies, ensure_ascii=False, indent=1) + "\n", "utf-8")
    for conversation in CONVERSATIONS:
        reply = replies[conversation.name]
        answer = " ".join(reply["calls"]) or reply["answer"]
        print(f"{'ok  ' if conversation.expected in answer else 'LOOK'} {conversation.name}: {answer!r}")


if __name__ == "__main__":
    asyncio.run(record())
