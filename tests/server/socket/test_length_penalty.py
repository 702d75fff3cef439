"""A length penalty belongs to one reply: others of the same batch keep theirs, and a cut reply goes on with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from palaver.chat.engine_choice import LoadOptions
from palaver.chat.model import Model, build_model, load_model_format
from palaver.chat.reply_stream import ReplyRequest
from palaver.engines.torch import EngineOptions, load
from palaver.messages import user
from palaver.models.resolver import resolve_model
from palaver.sampling import Sampling

PENALTIES = (0.3, 1.0, 1.1, 1.6, 5.0)


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    model = resolve_model("sprout")
    tokenizer, format = load_model_format(model, LoadOptions())
    engine = await asyncio.to_thread(
        load, model.folder, vocabulary=tokenizer.vocabulary, options=EngineOptions(exact=True)
    )
    yield build_model("sprout", engine, format, tokenizer)
    await engine.close()


def request(penalty: float) -> ReplyRequest:
    sampling = Sampling(temperature=1.0, seed=4, max_tokens=80, end_penalty=penalty)
    return ReplyRequest((user("Tell me about the moon."),), sampling)


async def test_each_reply_of_a_batch_has_its_own(model: Model) -> None:
    alone = [(await model.reply(request(penalty))).token_ids for penalty in PENALTIES]
    together = await asyncio.gather(*(model.reply(request(penalty)) for penalty in PENALTIES))
    assert [reply.token_ids for reply in together] == alone
    assert len(alone[0]) <= len(alone[-1])
    assert len(set(alone)) > 1, "it makes a difference"


async def test_a_reply_that_was_cut_goes_on_with_it(model: Model) -> None:
    penalized = request(1.6)
    whole = await model.reply(penalized)
    for cut in range(1, len(whole.token_ids)):
        assert (await model.reply(penalized, whole.token_ids[:cut])).token_ids == whole.token_ids, cut
