"""Markdown on a terminal while it streams: finished blocks once, the open one again and again."""

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

from palaver.repl.sanitize import sanitize

LONGEST = 2000
"""Characters after which an open block is cut where it can be."""
_UNDECIDED = re.compile(r"(^|\n)[ \t]*([-=*_#`~+>|: \t]*|[0-9]+[.)][ \t]*)$")
"""A last line that may still become a heading's underline, a fence, a marker of a list."""
_FENCE = re.compile(r"( {0,3})(`{3,}|~{3,})(.*)")
_LISTS = ("bullet_list_open", "ordered_list_open")
_ENDED_BY_BLANK = ("paragraph_open", "table_open", "blockquote_open")
_ENDED_AT_ONCE = ("heading_open", "hr")


def markdown_parser() -> MarkdownIt:
    """Markdown as people write it in chats: tables and strikethrough; HTML and link definitions are text."""
    return MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable("reference")


class BlockKind(Enum):
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
class MarkdownBlock:
    kind: BlockKind
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

    def code(self, lines: Sequence[str]) -> list[MarkdownBlock]:
        text = "\n".join(line[min(self.indent, len(line) - len(line.lstrip(" "))) :] for line in lines)
        return [MarkdownBlock(BlockKind.CODE, text, self.language, joined=True)] if lines else []


_CLOSED = MarkdownBlock(BlockKind.CODE_CLOSED, "", joined=True)


class BlockSplitter:
    def __init__(self) -> None:
        self._parser = markdown_parser().disable("inline")  # where blocks begin and end is seen without it
        self._arrived: list[str] = []
        self._source = ""
        self._fence: _Fence | None = None
        self._table_head = ""
        """Of a table that grew too long and is shown in pieces."""
        self._joined = False

    def feed(self, text: str) -> None:
        self._arrived.append(text)

    def finished(self) -> list[MarkdownBlock]:
        """The blocks that became finished since the last call."""
        self._source += "".join(self._arrived)
        self._arrived.clear()
        done: list[MarkdownBlock] = []
        while found := self._code() if self._fence else self._rows() if self._table_head else self._prose():
            done += found
        return done

    def open(self) -> list[MarkdownBlock]:
        """What still grows: nothing or one block, without marks at its end that may become anything."""
        if self._fence:
            return self._fence.code([self._source]) if self._source else []
        text = _UNDECIDED.sub("", self._source)
        if self._table_head:
            return [MarkdownBlock(BlockKind.ROWS, self._table_head + text, joined=True)] if text.strip() else []
        return list(self._blocks(text)) if text.strip() else []

    def close(self) -> list[MarkdownBlock]:
        """Everything that is left, now that nothing more comes."""
        done = self.finished()
        if self._fence:
            if self._source and not self._fence.closed_by(self._source):
                done += self._fence.code([self._source])
            done.append(_CLOSED)
        elif self._table_head and self._source.strip():
            done.append(MarkdownBlock(BlockKind.ROWS, self._table_head + self._source, joined=True))
        elif self._source.strip():
            done += self._blocks(self._source)
        self._source, self._fence, self._table_head, self._joined = "", None, "", False
        return done

    def _code(self) -> list[MarkdownBlock]:
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

    def _rows(self) -> list[MarkdownBlock]:
        """The finished rows of a long table; a line that is none ends it."""
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

    def _cut(self, count: int, end: int) -> list[MarkdownBlock]:
        """The first blocks, up to that line; the rest stays."""
        lines = self._source.split("\n")
        done = list(self._blocks("\n".join(lines[:end]), count))
        self._source = "\n".join(lines[end:])
        self._joined = self._joined and not done
        return done

    def _opened(self) -> list[MarkdownBlock]:
        line, _, rest = self._source.partition("\n")
        fence = _Fence.opened_by(line)
        assert fence is not None
        self._fence, self._source, self._joined = fence, rest, False
        return [MarkdownBlock(BlockKind.CODE_OPENED, "", fence.language)]

    def _items(self, whole: str, rest: str) -> list[MarkdownBlock]:
        starts = self._item_starts(whole)
        if len(starts) < 2:
            return []
        lines = whole.split("\n")
        done = [
            MarkdownBlock(BlockKind.ITEM, text, joined=joined) for text, joined in _pieces(lines, starts, self._joined)
        ]
        self._source, self._joined = "\n".join([*lines[starts[-1] :], rest]), True
        return done

    def _shortened(self, tokens: list[Token]) -> list[MarkdownBlock]:
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

    def _blocks(self, text: str, limit: int | None = None) -> Iterator[MarkdownBlock]:
        """The text's outermost blocks, or the first of them."""
        lines, joined = text.split("\n"), self._joined
        for token in self._tokens(text)[:limit]:
            start, end = token.map or (0, len(lines))
            block = lines[start:end]
            if token.type == "fence" and (fence := _Fence.opened_by(block[0])):
                yield MarkdownBlock(BlockKind.CODE_OPENED, "", fence.language)
                yield from fence.code(block[1:-1] if fence.closed_by(block[-1]) else block[1:])
                yield _CLOSED
            elif token.type in _LISTS:
                starts = [*self._item_starts("\n".join(block)), len(block)]
                for item, follows in _pieces(block, starts, joined):
                    yield MarkdownBlock(BlockKind.ITEM, item, joined=follows)
            else:
                kind = BlockKind.TABLE if token.type == "table_open" else BlockKind.PROSE
                yield MarkdownBlock(kind, "\n".join(block).strip("\n"), joined=joined)
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


CODE_THEME = "ansi_dark"
CONTEXT = 40
"""How many earlier lines of a code block are looked at to colour the next."""
_NARROWEST = 4


class MarkdownStream:
    """An answer in the making: `done` gives what is finished since the last call, `live` what is not."""

    def __init__(self) -> None:
        self._blocks = BlockSplitter()
        self._begun = False
        self._code: list[str] = []
        self._widths: list[int] = []

    def feed(self, text: str) -> None:
        self._blocks.feed(sanitize(text))

    def done(self) -> list[RenderableType]:
        return list(self._rendered(self._blocks.finished()))

    def live(self) -> list[RenderableType]:
        return [shown for block in self._blocks.open() for shown in (*self._gap(block), self._render(block))]

    def close(self) -> list[RenderableType]:
        return list(self._rendered(self._blocks.close()))

    def _rendered(self, blocks: Iterable[MarkdownBlock]) -> Iterator[RenderableType]:
        for block in blocks:
            yield from self._gap(block)
            yield self._render(block)
            self._begun = True
            self._remember(block)

    def _gap(self, block: MarkdownBlock) -> Iterator[RenderableType]:
        if self._begun and not block.joined:
            yield Text()

    def _render(self, block: MarkdownBlock) -> RenderableType:
        match block.kind:
            case BlockKind.CODE_OPENED:
                return Text(f"─── {block.language}".rstrip(), style="dim")
            case BlockKind.CODE_CLOSED:
                return Text("───", style="dim")
            case BlockKind.CODE:
                return highlight_code(block.text, block.language, self._code)
            case BlockKind.TABLE:
                self._widths = []
                return ChatMarkdown(block.text, self._widths)
            case BlockKind.ROWS:
                return ChatMarkdown(block.text, self._widths)
            case _:
                return ChatMarkdown(block.text)

    def _remember(self, block: MarkdownBlock) -> None:
        if block.kind is BlockKind.CODE:
            self._code = [*self._code, *block.text.split("\n")][-CONTEXT:]
        elif block.kind is BlockKind.CODE_CLOSED:
            self._code = []


def render_markdown(text: str) -> list[RenderableType]:
    """A whole text at once."""
    stream = MarkdownStream()
    stream.feed(text)
    return stream.close()


def highlight_code(code: str, language: str, before: Sequence[str] = ()) -> Text:
    """The code in colours, which may depend on the lines before it. Long lines are folded, never cut."""
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
    """Code inside of something else: a list, a quotation."""

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
    """Markdown for a scrollback: nothing is centred or boxed, a newline in the source is one on the screen."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _Heading,
        "fence": _Code,
        "code_block": _Code,
        "hr": _Rule,
        "table_open": _Table,
    }

    def __init__(self, text: str, widths: list[int] | None = None) -> None:
        """`widths`: of a table's columns; what the first piece of a long table comes to holds for all of it."""
        super().__init__("", hyperlinks=False)
        self.parsed = markdown_parser().parse(text)
        self.widths = [] if widths is None else widths
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Without blank lines around it and without spaces at the ends of lines."""
        shown = [part for part in super().__rich_console__(console, options) if isinstance(part, Segment)]
        lines = [_trimmed(line) for line in Segment.split_lines(shown)]
        while lines and not lines[-1]:
            lines.pop()
        for line in dropwhile(lambda line: not line, lines):
            yield from line
            yield Segment.line()


def _trimmed(line: list[Segment]) -> list[Segment]:
    while line and not line[-1].text.rstrip():
        line = line[:-1]
    return [*line[:-1], Segment(line[-1].text.rstrip(), line[-1].style)] if line else []


def fit_columns(rows: Sequence[Sequence[Text]], width: int) -> list[int]:
    """The columns' widths: as wide as their widest cell, the widest ones narrowed until all fit."""
    columns = max(map(len, rows), default=0)
    cells = [[cell_len(row[place].plain) for row in rows if place < len(row)] for place in range(columns)]
    widths = [max(1, *lengths) for lengths in cells]
    room = width - 3 * (columns - 1)
    while sum(widths) > room and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    return widths
