"""An answer is cut into clauses, the same whatever pieces it came in, and each is put into words."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaver.voice.speech import MAX_CLAUSE, Narration
from tests.voice.helpers import split_clauses, words

ANSWER = """# A heading
Hello, Dr. Smith! Pi is 3.14, and **this is bold.** See [the docs. All of them](https://a.example/b. c) now.
1. First thing
2. Second *thing*; done

- `print(x. y)` does it
```python
x = 1. Never said
```
| name | age |
|---|---|
| Ann | 7 |
你好，世界。今天是星期一！It costs $5.99, i.e. 1,234 cents… "Really?" she asked. J. R. R. Tolkien"""


def test_clauses_of_an_answer() -> None:
    assert words(ANSWER) == [
        "A heading",
        "Hello, Dr. Smith!",
        "Pi is three point one four, and this is bold.",
        "See the docs. All of them now.",
        "one, First thing",
        "two, Second thing; done",
        "print(x. y) does it",
        "name, age",
        "Ann, seven",
        "你好，世界。",
        "今天是星期一！",
        "It costs five dollars and ninety-nine cents, i.e. one thousand two hundred and thirty-four cents…",
        '"Really?"',
        "she asked.",
        "J. R. R. Tolkien",
    ]


def test_the_clauses_joined_are_the_answer() -> None:
    assert "".join(clause.text for clause in split_clauses(ANSWER)) == ANSWER


def test_chunk_boundaries_do_not_matter() -> None:
    whole = split_clauses(ANSWER)
    assert split_clauses(ANSWER, list(ANSWER)) == whole
    for at in range(len(ANSWER)):
        assert split_clauses(ANSWER, [ANSWER[:at], ANSWER[at:]]) == whole
    draw = random.Random(1)
    for _ in range(50):
        cuts = sorted(draw.sample(range(len(ANSWER)), 12))
        pieces = [ANSWER[a:b] for a, b in zip([0, *cuts], [*cuts, len(ANSWER)], strict=True)]
        assert split_clauses(ANSWER, pieces) == whole


@given(st.text(alphabet="ab. ,!?\n`~#*[]()$1。，", max_size=400), st.integers(0, 400))
def test_clauses_are_bounded_and_join_to_the_text(text: str, at: int) -> None:
    clauses = split_clauses(text)
    assert "".join(clause.text for clause in clauses) == text
    assert split_clauses(text, [text[:at], text[at:]]) == clauses
    assert all(len(clause.text) <= MAX_CLAUSE for clause in clauses if clause.words)


def test_a_clause_is_emitted_as_soon_as_it_is_complete() -> None:
    narration = Narration()
    assert narration.feed("Yes, of course I can") == []
    assert narration.feed(".") == []
    assert [clause.words for clause in narration.feed(" ")] == ["Yes, of course I can."]
    assert [clause.words for clause in narration.feed("好的。")] == ["好的。"]
    assert [clause.words for clause in narration.feed("A line\n")] == ["A line"]


def test_the_first_clause_may_end_with_a_comma_and_later_ones_are_longer() -> None:
    assert words("When the rain has stopped, we go out, and we look at the sky, and then we go home.") == [
        "When the rain has stopped,",
        "we go out, and we look at the sky, and then we go home.",
    ]


@pytest.mark.parametrize("fence", ["```", "~~~", "````", "  ```"])
def test_code_is_never_spoken(fence: str) -> None:
    text = f"Look:\n{fence}python\nprint('secret.')\n\n# secret!\n{fence.strip()}\nDone."
    assert words(text) == ["Look:", "Done."]
    assert words(text.removesuffix(f"{fence.strip()}\nDone.")) == ["Look:"], "a block that is never closed"


def test_displayed_formulas_are_not_spoken() -> None:
    assert words("So:\n$$\nx = y\n$$\nYes.\n$$a$$\nNo.") == ["So:", "Yes.", "No."]


def test_a_text_without_punctuation_is_split_at_spaces() -> None:
    clauses = words("word " * 200)
    assert all(len(clause) <= MAX_CLAUSE for clause in clauses)
    assert " ".join(clauses).split() == ["word"] * 200
    assert sum(map(len, words("长" * 1000))) == 1000
