"""Answers in JSON are learned where the model has a choice: not what a grammar writes."""

from __future__ import annotations

import json
from random import Random

import pytest

from training.conversations import Sample
from training.mixture import as_json, without_thinking
from training.phrasings import Draw, Split
from training.rendering import END
from training.shards import LEARNED, TOKEN, encoded
from training.tokenizer import SPROUT, load

CALL, CALL_END = "<tool_call>\n", "\n</tool_call>"


@pytest.fixture(scope="module")
def drawn() -> list[Sample]:
    draw = Draw(Random(5), Split.TRAIN)
    return [as_json(draw) for _ in range(600)]


def test_what_grammar_and_model_write_together_is_json(drawn: list[Sample]) -> None:
    contents = [sample.messages[-1].content for sample in drawn]
    assert ["".join(piece.text for piece in sample.pieces) for sample in drawn] == contents
    calls = [content.removeprefix(CALL).removesuffix(CALL_END) for content in contents if content.startswith(CALL)]
    assert {tuple(json.loads(call)) for call in calls} == {("name", "arguments")}
    values = [json.loads(content) for content in contents if not content.startswith(CALL)]
    assert {type(value) for value in values} == {dict, list, str}
    fields = [field for value in values if isinstance(value, dict) for field in value.values()]
    assert {type(field) for field in fields} == {str, int, bool, list, dict}


def test_how_an_answer_begins_is_not_learned_and_how_it_ends_is(drawn: list[Sample]) -> None:
    for sample in drawn:
        assert not sample.pieces[0].learned
        assert sample.pieces[-1].learned
        assert sample.pieces[-1].text.endswith(("}", "]", '"', CALL_END))


def test_the_marks_of_tokens_are_those_of_their_pieces(drawn: list[Sample]) -> None:
    tokenizer = load(SPROUT)
    samples = [*drawn[:100], *(without_thinking(sample) for sample in drawn[100:200])]
    for sample, row in zip(samples, encoded(tokenizer, samples), strict=True):
        learned = tokenizer.decode([int(token & TOKEN) for token in row if token & LEARNED], skip_special_tokens=False)
        written = "".join(piece.text for piece in sample.pieces if piece.learned) + END
        assert learned.endswith(written)
        thought = learned.removesuffix(written)
        assert thought == (f"<think>\n{sample.messages[-1].thinking}\n</think>\n\n" if sample.thinks else "")
