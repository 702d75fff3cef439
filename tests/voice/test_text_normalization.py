from __future__ import annotations

import pytest

from tests.voice.helpers import split_clauses, words

MILLIONS = "one million two hundred and thirty-four thousand five hundred and sixty-seven"
DIGITS = "one two three four five six seven eight nine".split()


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("12 + 30 = 42", "twelve plus thirty equals forty-two"),
        ("50% of 1,234,567", "fifty percent of " + MILLIONS),
        ("-5°C", "minus five degrees Celsius"),
        ("7 * 8, 10 - 3, 5-10", "seven times eight, ten minus three, five to ten"),
        ("the 21st, at 10:30 on 2024-05-01", "the twenty-first, at ten thirty on May first, twenty twenty-four"),
        (
            "on 1905-12-31, 2001-01-20 and 0000-01-12",
            "on December thirty-first, nineteen oh-five, January twentieth, "
            "two thousand and one and January twelfth, zero",
        ),
        ("$1, €2.50, £3 million", "one dollar, two euros and fifty cents, three million pounds"),
        ("0.05 and 1.2.3 and 007", "zero point zero five and one point two point three and zero zero seven"),
        ("the 1,000th and the 2,000,001st", "the one thousandth and the two million and first"),
        ("the 1990s, 1900s, 2010's", "the nineteen nineties, nineteen hundreds, twenty tens"),
        ("1e6 and 6.02E+23", "one times ten to the six and six point zero two times ten to the twenty-three"),
        (
            "from -1e-5 to 2.5e+3.",
            "from minus one times ten to the minus five to two point five times ten to the three.",
        ),
        ("1.5k of 10,000k", "one point five thousand of ten thousand thousand"),
        ("an 8B model for $5M, 5-10k", "an eight billion model for five million dollars, five to ten thousand"),
        ("It cost $1.5M last year.", "It cost one point five million dollars last year."),
        (
            "€2.5B, £1.5 million, $0.5",
            "two point five billion euros, one point five million pounds, zero point five dollars",
        ),
        (
            "¥1.255 and $1,500.5k",
            "one point two five five yen and one thousand five hundred point five thousand dollars",
        ),
        ("$5-10, $1.5-2M, €3-€4", "five to ten dollars, one point five to two million dollars, three to four euros"),
        ("US$1.5M, US$1.99", "US one point five million dollars, US one dollar and ninety-nine cents"),
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
def test_numbers_and_symbols_are_spelled_out(text: str, spoken: str) -> None:
    assert " ".join(words(text)) == spoken


def test_other_languages_keep_their_numbers() -> None:
    assert words("**3** Äpfel & 50%", "de") == ["3 Äpfel & 50%"]
    assert [clause.language for clause in split_clauses("Привет. 你好。こんにちは。Hi.")] == ["ru", "cmn", "ja", "en"]
    assert [clause.language for clause in split_clauses("Привіт.", language="uk")] == ["uk"]
