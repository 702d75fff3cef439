"""BlockSplitter: the blocks do not depend on how the stream is cut."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palaver.repl.markdown import MAX_OPEN_BLOCK, BlockKind, BlockSplitter, MarkdownBlock

TEXT = """# Title

Some *text* here
two lines

- a
- b
  more of b

  a paragraph of b
- c

1. one
2. two

```python
def f():
    return 1

x = "```"
```
after

| a | b |
|---|---|
| 1 | 2 |

> quoted
> more

---
  ~~~
  indented
  ~~~
Heading
=======
    code
the end"""


TABLE = "| a | b |\n|---|---|\n"


def blocks(text: str, cuts: Iterable[int] = ()) -> list[tuple[BlockKind, str, bool]]:
    stream, done, at = BlockSplitter(), list[MarkdownBlock](), 0
    for cut in (*cuts, len(text)):
        stream.feed(text[at:cut])
        at = cut
        done += stream.finished()
        stream.open()
    merged: list[tuple[BlockKind, str, bool]] = []
    for one in [*done, *stream.close()]:
        if one.kind is BlockKind.CODE and merged and merged[-1][0] is BlockKind.CODE:
            merged[-1] = (BlockKind.CODE, f"{merged[-1][1]}\n{one.text}", True)
        else:
            merged.append((one.kind, one.text, one.joined))
    return merged


def test_the_blocks_of_a_text() -> None:
    found = blocks(TEXT)
    assert [kind for kind, _, _ in found] == [
        BlockKind.PROSE,
        BlockKind.PROSE,
        *[BlockKind.ITEM] * 3,
        *[BlockKind.ITEM] * 2,
        *[BlockKind.CODE_OPENED, BlockKind.CODE, BlockKind.CODE_CLOSED],
        BlockKind.PROSE,
        BlockKind.TABLE,
        BlockKind.PROSE,
        BlockKind.PROSE,
        *[BlockKind.CODE_OPENED, BlockKind.CODE, BlockKind.CODE_CLOSED],
        BlockKind.PROSE,
        BlockKind.PROSE,
        BlockKind.PROSE,
    ]
    assert ('def f():\n    return 1\n\nx = "```"') in [text for kind, text, _ in found if kind is BlockKind.CODE]
    assert [joined for kind, _, joined in found if kind is BlockKind.ITEM] == [False, True, True, False, True]


def test_cut_at_every_character_the_blocks_are_the_same() -> None:
    assert blocks(TEXT, range(1, len(TEXT))) == blocks(TEXT)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([*"abc \n-*#>|`~=_[]()1.", "```", "\n\n", "- ", TABLE, "  "]), max_size=60),
    st.lists(st.integers(0, 200), max_size=8),
)
def test_cuts_never_matter(pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    assert blocks(text, sorted(cut for cut in cuts if cut < len(text))) == blocks(text)


@pytest.mark.parametrize(
    "text",
    ["word " * 5000, "A sentence of words. " * 1000, "line\n" * 5000, "- item\n" * 3000, "> quoted\n" * 2000,
     "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 3000, "x" * 20_000, "```\n" + "code\n" * 5000],
    ids=["words", "sentences", "lines", "items", "quotation", "table", "no space", "code"],
)  # fmt: skip
def test_the_open_block_stays_short(text: str) -> None:
    """The cost of a repaint does not grow with the reply, and no text is lost."""
    stream, done, longest = BlockSplitter(), list[MarkdownBlock](), 0
    for at in range(0, len(text), 50):
        stream.feed(text[at : at + 50])
        done += stream.finished()
        longest = max(longest, *(len(block.text) for block in stream.open()), 0)
    done += stream.close()
    assert longest <= MAX_OPEN_BLOCK + 100
    rendered = "".join(block.text.removeprefix(TABLE) if block.kind is BlockKind.ROWS else block.text for block in done)
    expected = "".join(text.removeprefix("```\n").split())
    assert "".join(rendered.split()) == expected


def test_marks_that_may_become_anything_are_held_back() -> None:
    stream = BlockSplitter()
    stream.feed("A line\n-")
    assert stream.finished() == []
    assert [block.text for block in stream.open()] == ["A line"]
    stream.feed("-")
    stream.feed(" and more")
    stream.finished()
    assert [block.text for block in stream.open()] == ["A line\n-- and more"]
