"""Rendered Markdown on the screen."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from palaver.repl.markdown import MarkdownStream, render_markdown
from tests.repl.emulator import TerminalEmulator, make_screen


def shown(text: str, columns: int = 80) -> str:
    emulator = TerminalEmulator(columns)
    make_screen(emulator).show(*render_markdown(text))
    return emulator.shown()


def test_headings_lists_code_tables_and_quotations() -> None:
    text = "# One\nText **bold** and `code`.\n\n- a\n- b\n\n3. c\n4. d\n\n```py\nx = 1\n\ny = 2\n```\n\n"
    text += "> said\n\n| n | sq |\n|--:|---|\n| 1 | one |"
    assert shown(text) == "\n".join(
        [
            "# One", "", "Text bold and code.", "", " • a", " • b", "", " 3 c", " 4 d", "",
            "─── py", "x = 1", "", "y = 2", "───", "", "▌ said", "", "n   sq", "───────", "1   one",
        ]
    )  # fmt: skip


def test_what_is_no_markdown_stays_text() -> None:
    assert shown("<b>[on|off]</b> :smile: [red]x[/red]\n[a]: http://b.c") == (
        "<b>[on|off]</b> :smile: [red]x[/red]\n[a]: http://b.c"
    )


@pytest.mark.parametrize("text", ["42.", "0.", "7)", "-"])
def test_an_answer_that_looks_like_an_empty_item_is_shown(text: str) -> None:
    assert shown(text) == text


def test_a_newline_is_a_newline() -> None:
    assert shown("roses\nviolets") == "roses\nviolets"


def test_links_tell_where_they_lead() -> None:
    assert shown("[here](http://example.com)") == "here (http://example.com)"


def test_control_characters_do_nothing() -> None:
    assert shown("a\x1b[2Jb\x07c\x9bd\r\ne") == "a␛[2Jb␇c�d\ne"


@pytest.mark.parametrize("columns", [12, 20, 40, 80])
@pytest.mark.parametrize(
    "text",
    ["日本語のテキスト。" * 10, "👩‍👩‍👧 and 🎉 " * 10, "שלום עולם " * 10,
     "| 名前 | value |\n|---|---|\n| 日本 | " + "x" * 50 + " |",
     "```\n" + "x" * 100 + "\n```", "- " + "word " * 30, "x" * 200],
    ids=["cjk", "emoji", "right to left", "table", "code", "list", "one word"],
)  # fmt: skip
def test_nothing_is_wider_than_the_terminal_and_nothing_is_lost(text: str, columns: int) -> None:
    screen = make_screen(TerminalEmulator(columns))
    screen.console.no_color = True
    screen.console._color_system = None
    lines = screen.lines(render_markdown(text))
    assert all(cell_len(line) <= columns for line in lines)
    letters = [one for one in text if one.isalnum()]
    assert [one for line in lines for one in line if one.isalnum()] == letters or "|" in text


def test_a_long_table_keeps_its_columns() -> None:
    """The pieces of a long table are aligned as one table."""
    stream, emulator = MarkdownStream(), TerminalEmulator(60, 2000)
    screen = make_screen(emulator)
    stream.feed("| number | word |\n|---|---|\n")
    for number in range(600):
        stream.feed(f"| {number} | word |\n")
        if number % 20 == 0:
            screen.update(stream.done(), stream.live())
    screen.update(stream.close())
    rows = emulator.shown().splitlines()
    assert rows[0] == "number   word"
    assert len(rows) == 602
    assert all(row.index("word") == 9 for row in rows[2:])


def test_code_is_coloured_by_what_came_before_it() -> None:
    stream = MarkdownStream()
    stream.feed('```python\nx = """first\n')
    stream.done()
    stream.feed("inside\n")
    (line,) = stream.done()
    inside = make_screen(TerminalEmulator()).lines([line])[0]
    stream.feed('"""\ny = 1\n')
    assert inside != "inside"
    assert "\x1b" in inside
