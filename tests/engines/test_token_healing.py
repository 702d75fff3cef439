"""A seam inside a token is healed: the bytes that were cut off come again, and the reply goes on from there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from palaver.engines.core.token_masks import TokenHealing, VocabularyIndex
from palaver.engines.torch import load
from palaver.formats.base import RenderOptions
from palaver.formats.loader import load_format
from palaver.formats.tokenizer import load_tokenizer
from palaver.generation import Prompt, Step
from palaver.messages import assistant, user
from palaver.sampling import Sampling
from tests.engines.generate import continued, run

SPROUT = Path(__file__).parents[2] / "src" / "palaver" / "models" / "sprout"
VOCABULARY = [b"c", b"co", b"cont", b"<co>", b"d", b""]


def test_only_tokens_that_write_the_bytes_are_allowed() -> None:
    healing = TokenHealing(b"co", VocabularyIndex(VOCABULARY), frozenset({3}))
    assert healing.allowed_ids() == [0, 1, 2]
    healing.accept_token(0)
    assert healing.remaining == b"o"
    healing = TokenHealing(b"co", VocabularyIndex(VOCABULARY), frozenset())
    healing.accept_token(2)
    assert healing.remaining == b""


async def test_a_stop_between_the_bytes_of_a_seam_leaves_no_trace() -> None:
    """The bytes are written by several tokens here, and the reply is continued after each of them."""
    tokenizer = load_tokenizer(SPROUT)
    engine = load(SPROUT, vocabulary=tokenizer.vocabulary)
    sampling = Sampling(max_tokens=12, seed=3)
    healing = b"qzqzqz"  # no token has more than one of these letters
    prompt = replace(load_format(SPROUT, tokenizer).render([user("Hi")]), healing=healing)
    try:
        whole = (await run(engine, prompt, sampling)).ids
        assert b"".join(tokenizer.vocabulary[i] for i in whole).startswith(healing)
        assert sum(bool(tokenizer.vocabulary[i]) for i in whole[:3]) == 3
        for cut in range(1, 9):
            assert (await run(engine, continued(prompt, whole[:cut]), sampling)).ids == whole[cut:]
    finally:
        await engine.close()


@pytest.mark.parametrize("sampling", [Sampling(temperature=0, max_tokens=80), Sampling(max_tokens=80, seed=3)])
async def test_a_reply_begun_as_text_goes_on_through_its_seam(sampling: Sampling) -> None:
    tokenizer = load_tokenizer(SPROUT)
    format = load_format(SPROUT, tokenizer)
    engine = load(SPROUT, vocabulary=tokenizer.vocabulary)
    question = [user("How do I go on with a stopped reply?")]

    async def reply_text(prompt: Prompt) -> bytes:
        async with engine.generate(prompt, sampling) as outputs:
            ids = [output.token_id async for output in outputs if isinstance(output, Step)]
        return b"".join(tokenizer.vocabulary[i] for i in (*prompt.reply_ids, *ids))

    try:
        partial = assistant("Use /cont", thinking="Going on is /continue.")
        prompt = format.render(question, options=RenderOptions(healing=True), partial_reply=partial)
        assert prompt.healing
        plain = format.render(question, partial_reply=partial)
        partial_text = b"".join(tokenizer.vocabulary[i] for i in plain.reply_ids)
        assert b"".join(tokenizer.vocabulary[i] for i in prompt.reply_ids) + prompt.healing == partial_text
        reply = await reply_text(prompt)
        assert reply.startswith(partial_text)
        assert reply == await reply_text(prompt)
        assert await reply_text(replace(plain, healing=b"")) == await reply_text(plain)
    finally:
        await engine.close()
