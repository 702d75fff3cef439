"""An answer is cut into clauses, the same whatever pieces it came in, and each is put into words."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaver.voice.clauses import LONGEST
from palaver.voice.speech import Narration, SpokenClause

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

MILLIONS = "one million two hundred and thirty-four thousand five hundred and sixty-seven"
DIGITS = "one two three four five six seven eight nine".split()


def narrated(text: str, pieces: list[str] | None = None, language: str = "en") -> list[SpokenClause]:
    narration = Narration(language)
    found = [clause for piece in pieces or [text] for clause in narration.feed(piece)]
    return found + narration.close()


def words(text: str, language: str = "en") -> list[str]:
    return [clause.words for clause in narrated(text, language=language) if clause.words]


def test_an_answer_in_words() -> None:
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
    assert "".join(clause.text for clause in narrated(ANSWER)) == ANSWER


def test_where_it_was_cut_makes_no_difference() -> None:
    whole = narrated(ANSWER)
    assert narrated(ANSWER, list(ANSWER)) == whole
    for at in range(len(ANSWER)):
        assert narrated(ANSWER, [ANSWER[:at], ANSWER[at:]]) == whole
    draw = random.Random(1)
    for _ in range(50):
        cuts = sorted(draw.sample(range(len(ANSWER)), 12))
        pieces = [ANSWER[a:b] for a, b in zip([0, *cuts], [*cuts, len(ANSWER)], strict=True)]
        assert narrated(ANSWER, pieces) == whole


@given(st.text(alphabet="ab. ,!?\n`~#*[]()$1。，", max_size=400), st.integers(0, 400))
def test_any_text_comes_through_whole_and_bounded(text: str, at: int) -> None:
    clauses = narrated(text)
    assert "".join(clause.text for clause in clauses) == text
    assert narrated(text, [text[:at], text[at:]]) == clauses
    assert all(len(clause.text) <= LONGEST for clause in clauses if clause.words)


def test_a_clause_is_there_as_soon_as_it_can_be_known() -> None:
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


def test_formulas_that_stand_alone_are_not_spoken() -> None:
    assert words("So:\n$$\nx = y\n$$\nYes.\n$$a$$\nNo.") == ["So:", "Yes.", "No."]


def test_a_text_without_any_end_is_cut_at_spaces() -> None:
    clauses = words("word " * 200)
    assert all(len(clause) <= LONGEST for clause in clauses)
    assert " ".join(clauses).split() == ["word"] * 200
    assert sum(map(len, words("长" * 1000))) == 1000


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("12 + 30 = 42", "twelve plus thirty equals forty-two"),
        ("50% of 1,234,567", "fifty percent of " + MILLIONS),
        ("-5°C", "minus five degrees Celsius"),
        ("7 * 8, 10 - 3, 5-10", "seven times eight, ten minus three, five to ten"),
        ("the 21st, at 10:30 on 2024-05-01", "the twenty-first, at ten thirty on May first, twenty twenty-four"),
        ("$1, €2.50, £3 million", "one dollar, two euros and fifty cents, three million pounds"),
        ("0.05 and 1.2.3 and 007", "zero point zero five and one point two point three and zero zero seven"),
        ("x^2 <= 9, a/b, 3/4", "x to the power of two is at most nine, a slash b, three over four"),
        ("snake_case and **bold** and ~~gone~~", "snake case and bold and gone"),
        ("![a cat](cat.png) and <b>tags</b>", "a cat and tags"),
        ("see https://www.example.com/a?b=c.", "see example dot com"),
        ("mail me@x.org", "mail me at x dot org"),
        ("> ## quoted", "quoted"),
        ("- [x] done 😀", "done"),
        ("co2 and 12345678901234567", "co two and " + " ".join([*DIGITS, "zero", *DIGITS[:7]])),
        ("a \\* b & c", "a b and c"),
        ("---", ""),
        ("\x01\x02", ""),
        ("", ""),
    ],
)
def test_numbers_and_symbols_become_words(text: str, spoken: str) -> None:
    assert " ".join(words(text)) == spoken


def test_other_languages_keep_their_numbers_for_their_own_voice() -> None:
    assert words("**3** Äpfel & 50%", "de") == ["3 Äpfel & 50%"]
    assert [clause.language for clause in narrated("Привет. 你好。こんにちは。Hi.")] == ["ru", "cmn", "ja", "en"]
    assert [clause.language for clause in narrated("Привіт.", language="uk")] == ["uk"]
