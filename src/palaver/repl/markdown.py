"""Streaming Markdown for the terminal: BlockSplitter finds finished blocks, MarkdownStream renders them.

A finished block is rendered once; the open block is rendered at every update.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import dropwhile, pairwise
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import CodeBlock, Heading, HorizontalRule, Markdown, MarkdownElement, TableElement
from rich.rule import Rule
from rich.segment import Segment
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from palaver.repl.text import sanitize

MAX_OPEN_BLOCK = 2000
"""Characters after which an open block is split."""
CODE_THEME = "ansi_dark"
CODE_CONTEXT_LINES = 40
"""Earlier lines of a code block that are highlighted together with new ones, for context."""
_MIN_COLUMN_WIDTH = 4
_UNDECIDED = re.compile(r"(^|\n)[ \t]*([-=*_#`~+>|: \t]*|[0-9]+[.)][ \t]*)$")
"""An unfinished last line that may still become a heading underline, a fence or a list marker."""
_FENCE = re.compile(r"( {0,3})(`{3,}|~{3,})(.*)")
_LISTS = ("bullet_list_open", "ordered_list_open")
_CLOSED_BY_BLANK_LINE = ("paragraph_open", "table_open", "blockquote_open")
_CLOSED_AT_ONCE = ("heading_open", "hr")


def markdown_parser() -> MarkdownIt:
    """CommonMark with tables and strikethrough; HTML and link definitions are text."""
    return MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable("reference")


class BlockKind(Enum):
    PROSE = auto()
    """Any block that is rendered as a whole."""
    ITEM = auto()
    """One item of a list."""
    TABLE = auto()
    ROWS = auto()
    """Further rows of a table whose head was shown before."""
    CODE_OPENED = auto()
    CODE = auto()
    """Lines of a code block."""
    CODE_CLOSED = auto()


@dataclass(frozen=True, slots=True)
class MarkdownBlock:
    kind: BlockKind
    text: str
    language: str = ""
    joined: bool = False
    """Whether it continues the previous block without a blank line."""


@dataclass(frozen=True, slots=True)
class _Fence:
    """An open code block."""

    indent: int
    marks: str
    language: str

    @classmethod
    def parse(cls, line: str) -> _Fence | None:
        found = _FENCE.fullmatch(line.rstrip())
        return cls(len(found[1]), found[2], found[3].strip().partition(" ")[0]) if found else None

    def is_closed_by(self, line: str) -> bool:
        found = _FENCE.fullmatch(line.rstrip())
        return bool(found and found[2].startswith(self.marks) and not found[3])

    def code(self, lines: Sequence[str]) -> list[MarkdownBlock]:
        text = "\n".join(line[min(self.indent, len(line) - len(line.lstrip(" "))) :] for line in lines)
        return [MarkdownBlock(BlockKind.CODE, text, self.language, joined=True)] if lines else []


_EMPTY_ITEM = re.compile(r"\s*(\d{1,9}[.)]|[-+*])\s*")
"""An item without text, such as the answer "42.", of which Markdown would show nothing."""
_CLOSED = MarkdownBlock(BlockKind.CODE_CLOSED, "", joined=True)


class BlockSplitter:
    def __init__(self) -> None:
        self._parser = markdown_parser().disable("inline")  # block boundaries do not depend on inline markup
        self._buffer: list[str] = []
        self._source = ""
        self._fence: _Fence | None = None
        self._table_head = ""
        """The head of a table that is too long and shown in pieces."""
        self._joined = False

    def feed(self, text: str) -> None:
        self._buffer.append(text)

    def finished(self) -> list[MarkdownBlock]:
        """The blocks that were finished since the last call."""
        self._source += "".join(self._buffer)
        self._buffer.clear()
        done: list[MarkdownBlock] = []
        while (
            blocks := self._code_lines() if self._fence else self._table_rows() if self._table_head else self._prose()
        ):
            done += blocks
        return done

    def open(self) -> list[MarkdownBlock]:
        """The unfinished block, if any, without trailing characters whose meaning is undecided."""
        if self._fence:
            return self._fence.code([self._source]) if self._source else []
        text = _UNDECIDED.sub("", self._source)
        if self._table_head:
            return [MarkdownBlock(BlockKind.ROWS, self._table_head + text, joined=True)] if text.strip() else []
        return list(self._blocks(text)) if text.strip() else []

    def close(self) -> list[MarkdownBlock]:
        """The remaining blocks at the end of the text."""
        done = self.finished()
        if self._fence:
            if self._source and not self._fence.is_closed_by(self._source):
                done += self._fence.code([self._source])
            done.append(_CLOSED)
        elif self._table_head and self._source.strip():
            done.append(MarkdownBlock(BlockKind.ROWS, self._table_head + self._source, joined=True))
        elif self._source.strip():
            done += self._blocks(self._source)
        self._source, self._fence, self._table_head, self._joined = "", None, "", False
        return done

    def _code_lines(self) -> list[MarkdownBlock]:
        """The finished lines of an open code block."""
        assert self._fence is not None
        *lines, last = self._source.split("\n")
        fence = self._fence
        for index, line in enumerate(lines):
            if fence.is_closed_by(line):
                self._source = "\n".join([*lines[index + 1 :], last])
                self._fence = None
                return [*fence.code(lines[:index]), _CLOSED]
        self._source = last
        return fence.code(lines)

    def _table_rows(self) -> list[MarkdownBlock]:
        """The finished rows of a long table. A line that is not a row ends it."""
        *lines, last = self._source.split("\n")
        head, rows = self._table_head, 0
        while rows < len(lines) and "|" in lines[rows]:
            rows += 1
        if rows < len(lines):
            self._table_head, self._joined = "", False
        self._source = "\n".join([*lines[rows:], last])
        found = [MarkdownBlock(BlockKind.ROWS, head + "\n".join(lines[:rows]), joined=True)] if rows else []
        return found or ([] if self._table_head else self._prose())

    def _prose(self) -> list[MarkdownBlock]:
        """All blocks but the last; of a list all items but the last; of a block that is too long, a piece.

        Only complete lines are parsed: the last character of a line can change its meaning.
        """
        whole, _, rest = self._source.rpartition("\n")
        lines = whole.split("\n")
        tokens = self._tokens(whole)
        if tokens and tokens[-1].type == "fence":
            return [*self._take_blocks(len(tokens) - 1, _start(tokens[-1])), *self._open_fence()]
        ended = len(tokens) if tokens and _is_closed(tokens[-1], lines) else len(tokens) - 1
        if ended > 0:
            return self._take_blocks(ended, _start(tokens[ended]) if ended < len(tokens) else len(lines))
        if tokens and tokens[0].type in _LISTS and (done := self._items(whole, rest)):
            return done
        return self._split_long_block(tokens) if len(self._source) > MAX_OPEN_BLOCK else []

    def _take_blocks(self, count: int, end: int) -> list[MarkdownBlock]:
        """Removes and returns the first `count` blocks, which end before line `end`."""
        lines = self._source.split("\n")
        done = list(self._blocks("\n".join(lines[:end]), count))
        self._source = "\n".join(lines[end:])
        self._joined = self._joined and not done
        return done

    def _open_fence(self) -> list[MarkdownBlock]:
        line, _, rest = self._source.partition("\n")
        fence = _Fence.parse(line)
        assert fence is not None
        self._fence, self._source, self._joined = fence, rest, False
        return [MarkdownBlock(BlockKind.CODE_OPENED, "", fence.language)]

    def _items(self, whole: str, rest: str) -> list[MarkdownBlock]:
        starts = self._item_starts(whole)
        if len(starts) < 2:
            return []
        lines = whole.split("\n")
        done = [
            MarkdownBlock(BlockKind.ITEM, text, joined=joined)
            for text, joined in _list_items(lines, starts, self._joined)
        ]
        self._source, self._joined = "\n".join([*lines[starts[-1] :], rest]), True
        return done

    def _split_long_block(self, tokens: list[Token]) -> list[MarkdownBlock]:
        """Splits the block at the end of a line, or else of a sentence or a word."""
        place = max(self._source.rfind("\n"), 0) or max(self._source.rfind(". ") + 1, 0) or self._source.rfind(" ")
        if place <= 0:
            place = len(self._source)
        text, self._source = self._source[:place], self._source[place + 1 :]
        done = list(self._blocks(text))
        self._joined = True
        if tokens and tokens[0].type == "table_open":
            self._table_head = "\n".join(text.strip("\n").split("\n")[:2]) + "\n"
        return done

    def _blocks(self, text: str, limit: int | None = None) -> Iterator[MarkdownBlock]:
        """The top-level blocks of the text, at most `limit`."""
        lines, joined = text.split("\n"), self._joined
        for token in self._tokens(text)[:limit]:
            start, end = token.map or (0, len(lines))
            block = lines[start:end]
            if token.type == "fence" and (fence := _Fence.parse(block[0])):
                yield MarkdownBlock(BlockKind.CODE_OPENED, "", fence.language)
                yield from fence.code(block[1:-1] if fence.is_closed_by(block[-1]) else block[1:])
                yield _CLOSED
            elif token.type in _LISTS:
                starts = [*self._item_starts("\n".join(block)), len(block)]
                for item, follows in _list_items(block, starts, joined):
                    yield MarkdownBlock(BlockKind.ITEM, item, joined=follows)
            else:
                kind = BlockKind.TABLE if token.type == "table_open" else BlockKind.PROSE
                yield MarkdownBlock(kind, "\n".join(block).strip("\n"), joined=joined)
            joined = False

    def _tokens(self, text: str) -> list[Token]:
        """The first token of each top-level block."""
        return [token for token in self._parser.parse(text) if token.level == 0 and token.nesting >= 0]

    def _item_starts(self, text: str) -> list[int]:
        tokens = self._parser.parse(text)
        return [_start(token) for token in tokens if token.type == "list_item_open" and token.level == 1]


def _list_items(lines: list[str], starts: list[int], joined: bool) -> Iterator[tuple[str, bool]]:
    """The items of a list, and whether each one continues the previous block."""
    for place, (start, end) in enumerate(pairwise(starts)):
        yield "\n".join(lines[start:end]).rstrip("\n"), joined or place > 0


def _is_closed(token: Token, lines: Sequence[str]) -> bool:
    """Whether no further text can belong to the block."""
    assert token.map is not None
    after = lines[token.map[1] :]
    return token.type in _CLOSED_AT_ONCE or (
        token.type in _CLOSED_BY_BLANK_LINE and any(not line.strip() for line in after)
    )


def _start(token: Token) -> int:
    return token.map[0] if token.map else 0


class MarkdownStream:
    """A streaming answer: `done` returns what was finished since the last call, `live` the unfinished block."""

    def __init__(self) -> None:
        self._blocks = BlockSplitter()
        self._has_output = False
        self._code_lines: list[str] = []
        self._widths: list[int] = []

    def feed(self, text: str) -> None:
        self._blocks.feed(sanitize(text))

    def done(self) -> list[RenderableType]:
        return list(self._render_all(self._blocks.finished()))

    def live(self) -> list[RenderableType]:
        return [shown for block in self._blocks.open() for shown in (*self._gap(block), self._render(block))]

    def close(self) -> list[RenderableType]:
        return list(self._render_all(self._blocks.close()))

    def _render_all(self, blocks: Iterable[MarkdownBlock]) -> Iterator[RenderableType]:
        for block in blocks:
            yield from self._gap(block)
            yield self._render(block)
            self._has_output = True
            self._update_context(block)

    def _gap(self, block: MarkdownBlock) -> Iterator[RenderableType]:
        if self._has_output and not block.joined:
            yield Text()

    def _render(self, block: MarkdownBlock) -> RenderableType:
        match block.kind:
            case BlockKind.CODE_OPENED:
                return Text(f"─── {block.language}".rstrip(), style="dim")
            case BlockKind.CODE_CLOSED:
                return Text("───", style="dim")
            case BlockKind.CODE:
                return highlight_code(block.text, block.language, self._code_lines)
            case BlockKind.TABLE:
                self._widths = []
                return ChatMarkdown(block.text, self._widths)
            case BlockKind.ROWS:
                return ChatMarkdown(block.text, self._widths)
            case BlockKind.ITEM if _EMPTY_ITEM.fullmatch(block.text):
                return Text(block.text.strip())
            case _:
                return ChatMarkdown(block.text)

    def _update_context(self, block: MarkdownBlock) -> None:
        if block.kind is BlockKind.CODE:
            self._code_lines = [*self._code_lines, *block.text.split("\n")][-CODE_CONTEXT_LINES:]
        elif block.kind is BlockKind.CODE_CLOSED:
            self._code_lines = []


def render_markdown(text: str) -> list[RenderableType]:
    """Renders a complete text."""
    stream = MarkdownStream()
    stream.feed(text)
    return stream.close()


def highlight_code(code: str, language: str, before: Sequence[str] = ()) -> Text:
    """Highlighted code. `before` gives the lexer context. Long lines are folded, never truncated."""
    syntax = Syntax("", language or "text", theme=CODE_THEME, background_color="default")
    whole = syntax.highlight("\n".join([*before, code]))
    lines = whole.split("\n", allow_blank=True)[len(before) :]
    text = Text("\n").join(lines[: code.count("\n") + 1])
    text.overflow = "fold"
    return text


class _Heading(Heading):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text.assemble((f"{'#' * int(self.tag[1:])} ", "dim"), self.text)


class _Code(CodeBlock):
    """Code inside a list or a quotation."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield highlight_code(str(self.text).rstrip("\n"), self.lexer_name)


class _Rule(HorizontalRule):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Rule(style="dim")


class _Table(TableElement):
    def __init__(self, markdown: ChatMarkdown) -> None:
        super().__init__()
        self._markdown = markdown

    @classmethod
    def create(cls, markdown: Markdown, token: Token) -> MarkdownElement:
        assert isinstance(markdown, ChatMarkdown)
        return cls(markdown)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head = [cell.content for cell in self.header.row.cells] if self.header and self.header.row else []
        rows = [[cell.content for cell in row.cells] for row in self.body.rows] if self.body else []
        widths = self._markdown.widths
        further = len(widths) == len(head)  # the head was shown with the first rows
        widths[:] = widths if further else fit_columns([head, *rows], options.max_width)
        table = Table(
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            show_edge=False,
            border_style="dim",
            show_header=not further,
        )
        for cell, width in zip(head, widths, strict=True):
            table.add_column(cell, width=width, header_style="bold", overflow="fold", justify=cell.justify or "default")
        for row in rows:
            table.add_row(*row)
        yield table


class ChatMarkdown(Markdown):
    """Markdown for a scrollback: nothing is centred or boxed, and newlines are kept."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _Heading,
        "fence": _Code,
        "code_block": _Code,
        "hr": _Rule,
        "table_open": _Table,
    }

    def __init__(self, text: str, widths: list[int] | None = None) -> None:
        """`widths` are a table's column widths: the first piece of a long table fills them in for the others."""
        super().__init__("", hyperlinks=False)
        self.parsed = markdown_parser().parse(text)
        self.widths = [] if widths is None else widths
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Renders without surrounding blank lines and trailing spaces."""
        shown = [part for part in super().__rich_console__(console, options) if isinstance(part, Segment)]
        lines = [_trim(line) for line in Segment.split_lines(shown)]
        while lines and not lines[-1]:
            lines.pop()
        for line in dropwhile(lambda line: not line, lines):
            yield from line
            yield Segment.line()


def _trim(line: list[Segment]) -> list[Segment]:
    while line and not line[-1].text.rstrip():
        line = line[:-1]
    return [*line[:-1], Segment(line[-1].text.rstrip(), line[-1].style)] if line else []


def fit_columns(rows: Sequence[Sequence[Text]], width: int) -> list[int]:
    """Column widths: each as wide as its widest cell, the widest ones narrowed until all fit."""
    columns = max(map(len, rows), default=0)
    cells = [[cell_len(row[place].plain) for row in rows if place < len(row)] for place in range(columns)]
    widths = [max(1, *lengths) for lengths in cells]
    room = width - 3 * (columns - 1)
    while sum(widths) > room and max(widths) > _MIN_COLUMN_WIDTH:
        widths[widths.index(max(widths))] -= 1
    return widths
