from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from palaver.errors import EmptyMessage
from palaver.server.openai.completions import encode_prompt


def model(prefix: tuple[int, ...]) -> Any:
    tokenizer = SimpleNamespace(prefix=prefix, encode=lambda texts: [], special_ids=frozenset(prefix))
    info = SimpleNamespace(vocabulary_size=8, context_length=16, end_ids=frozenset())
    return SimpleNamespace(
        format=SimpleNamespace(tokenizer=tokenizer), engine=SimpleNamespace(info=info), check_size=lambda size: None
    )


def test_an_empty_text_is_the_token_that_begins_texts() -> None:
    assert encode_prompt(model((1,)), "", "ann").context_ids == (1,)
    with pytest.raises(EmptyMessage):
        encode_prompt(model(()), "", "ann")
