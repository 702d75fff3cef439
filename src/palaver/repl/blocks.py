"""Cuts a stream of Markdown into blocks: those that are finished, and the one that still grows.

What is finished never changes again, so it can go to the scrollback. The open block is kept short (a paragraph, an
item of a list, a line of code, a table), so that the cost of showing a reply grows with its length and no faster.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise

from markdown_it import MarkdownIt
from markdown_it.token import Token

LONGEST = 2000
"""Characters after which an open block is cut where it can be."""
_UNDECIDED = re.compile(r"(^|\n)[ \t]*([-=*_#`~+>|: \t]*|[0-9]+[.)][ \t]*)$")
"""A last line that may still become a heading's underline, a fence, a marker of a list."""
_FENCE = re.compile(r"( {0,3})(`{3,}|~{3,})(.*)")
_LISTS = ("bullet_list_open", "ordered_list_open")
_ENDED_BY_BLANK = ("paragraph_open", "table_open", "blockquote_open")
_ENDED_AT_ONCE = ("heading_open", "hr")


def parser() -> MarkdownIt:
    """Markdown as people write it in chats: tables and strikethrough; HTML and link definitions are text."""
    return MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable("reference")


class Kind(Enum):
    PROSE = auto()
    """Any block that is rendered from its Markdown as a whole."""
    ITEM = auto()
    """One item of a list."""
    TABLE = auto()
    ROWS = auto()
    """Further rows of a table, under its head, which was shown before."""
    CODE_OPENED = auto()
    CODE = auto()
    """Lines of a code block."""
    CODE_CLOSED = auto()


@dataclass(frozen=True, slots=True)
class Block:
    kind: Kind
    text: str
    language: str = ""
    joined: bool = False
    """Whether it goes on from the block before, without a blank line between."""


@dataclass(frozen=True, slots=True)
class _Fence:
    """A code block that is open."""

    indent: int
    marks: str
    language: str

    @classmethod
    def opened_by(cls, line: str) -> _Fence | None:
        found = _FENCE.fullmatch(line.rstrip())
        return cls(len(found[1]), found[2], found[3].strip().partition(" ")[0]) if found else None

    def closed_by(self, line: str) -> bool:
        found = _FENCE.fullmatch(line.rstrip())
        return bool(found and found[2].startswith(self.marks) and not found[3])

    def code(self, lines: Sequence[str]) -> list[Block]:
        text = "\n".join(line[min(self.indent, len(line) - len(line.lstrip(" "))) :] for line in lines)
        return [Block(Kind.CODE, text, self.language, joined=True)] if lines else []


_CLOSED = Block(Kind.CODE_CLOSED, "", joined=True)


class Blocks:
    def __init__(self) -> None:
        self._parser = parser().disable("inline")  # where blocks begin and end is seen without it
        self._arrived: list[str] = []
        self._source = ""
        self._fence: _Fence | None = None
        self._table_head = ""
        """Of a table that grew too long and is shown in pieces."""
        self._joined = False

    def feed(self, text: str) -> None:
        self._arrived.append(text)

    def finished(self) -> list[Block]:
        """The blocks that became finished since the last call."""
        self._source += "".join(self._arrived)
        self._arrived.clear()
        done: list[Block] = []
        while found := self._code() if self._fence else self._rows() if self._table_head else self._prose():
            done += found
        return done

    def open(self) -> list[Block]:
        """What still grows: nothing or one block, without marks at its end that may become anything."""
        if self._fence:
            return self._fence.code([self._source]) if self._source else []
        text = _UNDECIDED.sub("", self._source)
        if self._table_head:
            return [Block(Kind.ROWS, self._table_head + text, joined=True)] if text.strip() else []
        return list(self._blocks(text)) if text.strip() else []

    def close(self) -> list[Block]:
        """Everything that is left, now that nothing more comes."""
        done = self.finished()
        if self._fence:
            if self._source and not self._fence.closed_by(self._source):
                done += self._fence.code([self._source])
            done.append(_CLOSED)
        elif self._table_head and self._source.strip():
            done.append(Block(Kind.ROWS, self._table_head + self._source, joined=True))
        elif self._source.strip():
            done += self._blocks(self._source)
        self._source, self._fence, self._table_head, self._joined = "", None, "", False
        return done

    def _code(self) -> list[Block]:
        """The finished lines of an open code block."""
        assert self._fence is not None
        *lines, last = self._source.split("\n")
        fence = self._fence
        for place, line in enumerate(lines):
            if fence.closed_by(line):
                self._source = "\n".join([*lines[place + 1 :], last])
                self._fence = None
                return [*fence.code(lines[:place]), _CLOSED]
        self._source = last
        return fence.code(lines)

    def _rows(self) -> list[Block]:
        """The finished rows of a long table; a line that is none ends it."""
        *lines, last = self._source.split("\n")
        head, rows = self._table_head, 0
        while rows < len(lines) and "|" in lines[rows]:
            rows += 1
        if rows < len(lines):
            self._table_head, self._joined = "", False
        self._source = "\n".join([*lines[rows:], last])
        found = [Block(Kind.ROWS, head + "\n".join(lines[:rows]), joined=True)] if rows else []
        return found or ([] if self._table_head else self._prose())

    def _prose(self) -> list[Block]:
        """All blocks but the last; of a list all items but the last; of what grew too long, a piece.

        Only whole lines are looked at: what a line is can change with its last character.
        """
        whole, _, rest = self._source.rpartition("\n")
        lines = whole.split("\n")
        tokens = self._tokens(whole)
        if tokens and tokens[-1].type == "fence":
            return [*self._cut(len(tokens) - 1, _start(tokens[-1])), *self._opened()]
        ended = len(tokens) if tokens and _is_ended(tokens[-1], lines) else len(tokens) - 1
        if ended > 0:
            return self._cut(ended, _start(tokens[ended]) if ended < len(tokens) else len(lines))
        if tokens and tokens[0].type in _LISTS and (done := self._items(whole, rest)):
            return done
        return self._shortened(tokens) if len(self._source) > LONGEST else []

    def _cut(self, count: int, end: int) -> list[Block]:
        """The first blocks, up to that line; the rest stays."""
        lines = self._source.split("\n")
        done = list(self._blocks("\n".join(lines[:end]), count))
        self._source = "\n".join(lines[end:])
        self._joined = self._joined and not done
        return done

    def _opened(self) -> list[Block]:
        line, _, rest = self._source.partition("\n")
        fence = _Fence.opened_by(line)
        assert fence is not None
        self._fence, self._source, self._joined = fence, rest, False
        return [Block(Kind.CODE_OPENED, "", fence.language)]

    def _items(self, whole: str, rest: str) -> list[Block]:
        starts = self._item_starts(whole)
        if len(starts) < 2:
            return []
        lines = whole.split("\n")
        done = [Block(Kind.ITEM, text, joined=joined) for text, joined in _pieces(lines, starts, self._joined)]
        self._source, self._joined = "\n".join([*lines[starts[-1] :], rest]), True
        return done

    def _shortened(self, tokens: list[Token]) -> list[Block]:
        """The block up to the end of a line, or else of a sentence or a word."""
        place = max(self._source.rfind("\n"), 0) or max(self._source.rfind(". ") + 1, 0) or self._source.rfind(" ")
        if place <= 0:
            place = len(self._source)
        text, self._source = self._source[:place], self._source[place + 1 :]
        done = list(self._blocks(text))
        self._joined = True
        if tokens and tokens[0].type == "table_open":
            self._table_head = "\n".join(text.strip("\n").split("\n")[:2]) + "\n"
        return done

    def _blocks(self, text: str, limit: int | None = None) -> Iterator[Block]:
        """The text's outermost blocks, or the first of them."""
        lines, joined = text.split("\n"), self._joined
        for token in self._tokens(text)[:limit]:
            start, end = token.map or (0, len(lines))
            block = lines[start:end]
            if token.type == "fence" and (fence := _Fence.opened_by(block[0])):
                yield Block(Kind.CODE_OPENED, "", fence.language)
                yield from fence.code(block[1:-1] if fence.closed_by(block[-1]) else block[1:])
                yield _CLOSED
            elif token.type in _LISTS:
                starts = [*self._item_starts("\n".join(block)), len(block)]
                for item, follows in _pieces(block, starts, joined):
                    yield Block(Kind.ITEM, item, joined=follows)
            else:
                kind = Kind.TABLE if token.type == "table_open" else Kind.PROSE
                yield Block(kind, "\n".join(block).strip("\n"), joined=joined)
            joined = False

    def _tokens(self, text: str) -> list[Token]:
        """The outermost blocks of the text, each by its first token."""
        return [token for token in self._parser.parse(text) if token.level == 0 and token.nesting >= 0]

    def _item_starts(self, text: str) -> list[int]:
        tokens = self._parser.parse(text)
        return [_start(token) for token in tokens if token.type == "list_item_open" and token.level == 1]


def _pieces(lines: list[str], starts: list[int], joined: bool) -> Iterator[tuple[str, bool]]:
    """The items of a list, and whether each follows on one before."""
    for place, (start, end) in enumerate(pairwise(starts)):
        yield "\n".join(lines[start:end]).rstrip("\n"), joined or place > 0


def _is_ended(token: Token, lines: Sequence[str]) -> bool:
    """Whether nothing that comes can be a part of it any more."""
    assert token.map is not None
    after = lines[token.map[1] :]
    return token.type in _ENDED_AT_ONCE or (token.type in _ENDED_BY_BLANK and any(not line.strip() for line in after))


def _start(token: Token) -> int:
    return token.map[0] if token.map else 0
