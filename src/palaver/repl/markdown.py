"""Markdown on a terminal while it streams: finished blocks once, the open one again and again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import dropwhile
from typing import ClassVar

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

from palaver.repl.blocks import Block, Blocks, Kind, parser
from palaver.repl.safe import safe

CODE_THEME = "ansi_dark"
CONTEXT = 40
"""How many earlier lines of a code block are looked at to colour the next."""
_NARROWEST = 4


class MarkdownStream:
    """An answer in the making: `done` gives what is finished since the last call, `live` what is not."""

    def __init__(self) -> None:
        self._blocks = Blocks()
        self._begun = False
        self._code: list[str] = []
        self._widths: list[int] = []

    def feed(self, text: str) -> None:
        self._blocks.feed(safe(text))

    def done(self) -> list[RenderableType]:
        return list(self._rendered(self._blocks.finished()))

    def live(self) -> list[RenderableType]:
        return [shown for block in self._blocks.open() for shown in (*self._gap(block), self._render(block))]

    def close(self) -> list[RenderableType]:
        return list(self._rendered(self._blocks.close()))

    def _rendered(self, blocks: Iterable[Block]) -> Iterator[RenderableType]:
        for block in blocks:
            yield from self._gap(block)
            yield self._render(block)
            self._begun = True
            self._remember(block)

    def _gap(self, block: Block) -> Iterator[RenderableType]:
        if self._begun and not block.joined:
            yield Text()

    def _render(self, block: Block) -> RenderableType:
        match block.kind:
            case Kind.CODE_OPENED:
                return Text(f"─── {block.language}".rstrip(), style="dim")
            case Kind.CODE_CLOSED:
                return Text("───", style="dim")
            case Kind.CODE:
                return highlighted(block.text, block.language, self._code)
            case Kind.TABLE:
                self._widths = []
                return ChatMarkdown(block.text, self._widths)
            case Kind.ROWS:
                return ChatMarkdown(block.text, self._widths)
            case _:
                return ChatMarkdown(block.text)

    def _remember(self, block: Block) -> None:
        if block.kind is Kind.CODE:
            self._code = [*self._code, *block.text.split("\n")][-CONTEXT:]
        elif block.kind is Kind.CODE_CLOSED:
            self._code = []


def rendered(text: str) -> list[RenderableType]:
    """A whole text at once."""
    stream = MarkdownStream()
    stream.feed(text)
    return stream.close()


def highlighted(code: str, language: str, before: Sequence[str] = ()) -> Text:
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
        yield highlighted(str(self.text).rstrip("\n"), self.lexer_name)


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
        widths[:] = widths if further else fitted([head, *rows], options.max_width)
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
        self.parsed = parser().parse(text)
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


def fitted(rows: Sequence[Sequence[Text]], width: int) -> list[int]:
    """The columns' widths: as wide as their widest cell, the widest ones narrowed until all fit."""
    columns = max(map(len, rows), default=0)
    cells = [[cell_len(row[place].plain) for row in rows if place < len(row)] for place in range(columns)]
    widths = [max(1, *lengths) for lengths in cells]
    room = width - 3 * (columns - 1)
    while sum(widths) > room and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    return widths
