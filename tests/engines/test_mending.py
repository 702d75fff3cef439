"""A seam inside a token is healed: the bytes that were cut off come again, and the reply goes on from there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from palaver.engines.core.logits_processors import TokenHealing, VocabularyIndex
from palaver.engines.torch import load
from palaver.formats.base import RenderOptions
from palaver.formats.loader import load_format
from palaver.formats.tokenizer import load_tokenizer
from palaver.generation import Prompt, Step
from palaver.messages import assistant, user
from palaver.sampling import Sampling

SPROUT = Path(__file__).parents[2] / "src" / "palaver" / "models" / "sprout"
VOCABULARY = [b"c", b"co", b"cont", b"<co>", b"d", b""]


def test_only_tokens_that_write_the_bytes_are_allowed() -> None:
    mending = TokenHealing(b"co", VocabularyIndex(VOCABULARY), frozenset({3}))
    assert mending.allowed() == [0, 1, 2]
    mending.take(0)
    assert mending.left == b"o"
    mending = TokenHealing(b"co", VocabularyIndex(VOCABULARY), frozenset())
    mending.take(2)
    assert mending.left == b""


@pytest.mark.parametrize("sampling", [Sampling(temperature=0, max_tokens=80), Sampling(max_tokens=80, seed=3)])
async def test_a_reply_begun_as_text_goes_on_through_its_seam(sampling: Sampling) -> None:
    tokenizer = load_tokenizer(SPROUT)
    format = load_format(SPROUT, tokenizer)
    engine = load(SPROUT, vocabulary=tokenizer.vocabulary)
    question = [user("How do I go on with a stopped reply?")]

    async def said(prompt: Prompt) -> bytes:
        async with engine.generate(prompt, sampling) as outputs:
            ids = [output.token_id async for output in outputs if isinstance(output, Step)]
        return b"".join(tokenizer.vocabulary[i] for i in (*prompt.reply_ids, *ids))

    try:
        begun = assistant("Use /cont", thinking="Going on is /continue.")
        prompt = format.render(question, options=RenderOptions(healing=True), begun=begun)
        assert prompt.healing
        plain = format.render(question, begun=begun)
        whole = b"".join(tokenizer.vocabulary[i] for i in plain.reply_ids)
        assert b"".join(tokenizer.vocabulary[i] for i in prompt.reply_ids) + prompt.healing == whole
        reply = await said(prompt)
        assert reply.startswith(whole)
        assert reply == await said(prompt)
        assert await said(replace(plain, healing=b"")) == await said(plain)
    finally:
        await engine.close()
