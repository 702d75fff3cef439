"""Stop and continue leave no seam: a reply cut at any token and continued equals the uncut one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from palaver.chat.model import Model
from palaver.chat.reply_stream import ReplyRecord, ReplyRequest
from palaver.engines.torch import load
from palaver.formats.loader import load_format
from palaver.formats.tokenizer import Tokenizer, load_tokenizer
from palaver.messages import user
from palaver.sampling import Sampling
from tests.models import make_model
from tests.tiny import CHATML, PREOPENED, THINK

LENGTH = 48
GREEDY = Sampling(temperature=0, max_tokens=LENGTH)
SAMPLED = Sampling(
    temperature=1.3,
    top_k=200,
    top_p=0.98,
    min_p=0.001,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    min_tokens=20,
    max_tokens=LENGTH,
    stop=("zz", "\x01", "q"),
    seed=11,
)
BUDGET = Sampling(temperature=1.0, max_tokens=LENGTH, thinking_budget=6, seed=5)


@pytest.fixture(params=["markers are tokens", "markers are text"])
async def chat(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Model]:
    as_text = request.param == "markers are text"
    folder = make_model(
        tmp_path / "model", template=PREOPENED if as_text else CHATML, added=() if as_text else THINK, seed=3
    )
    tokenizer = load_tokenizer(folder)
    engine = load(folder, vocabulary=tokenizer.vocabulary)
    yield Model(engine, load_format(folder, tokenizer))
    await engine.close()


def with_marker_bias(sampling: Sampling, tokenizer: Tokenizer) -> Sampling:
    """Biases the thinking markers, so that thinking is opened and closed."""
    from dataclasses import replace

    return replace(sampling, logit_bias=tuple((tokenizer.control[t], 4.0) for t in THINK if t in tokenizer.control))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, BUDGET], ids=["greedy", "sampled", "budget"])
async def test_a_reply_cut_at_every_token_goes_on_as_the_uncut_one(chat: Model, sampling: Sampling) -> None:
    tokenizer = chat.format.tokenizer
    request = ReplyRequest((user("Wave 👋!"),), with_marker_bias(sampling, tokenizer))
    whole = await chat.reply(request)
    assert len(whole.token_ids) > 10
    assert _exercises(whole, tokenizer, sampling)
    for cut in range(1, len(whole.token_ids)):
        rest = await chat.reply(request, whole.token_ids[:cut])
        assert rest.token_ids == whole.token_ids, cut
        assert rest.message == whole.message
        assert rest.finish == whole.finish


def _exercises(reply: ReplyRecord, tokenizer: Tokenizer, sampling: Sampling) -> bool:
    """Whether some cut lies inside a character; with a budget, one inside the thought's closing too."""
    data = [tokenizer.vocabulary[token_id] for token_id in reply.token_ids]
    halves = any(piece and piece[0] >= 0x80 for piece in data)
    return halves and (sampling is not BUDGET or bool(reply.message.thinking))
