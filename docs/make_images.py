"""Draws the first screens of the terminal as docs/screens/terminal-*.png, with Chromium.

PYTHONPATH=src python3 -m docs.make_images
"""

from __future__ import annotations

import html
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pyte
from pyte.screens import Char

from tests.repl import terminal
from tests.repl.terminal import CTRL_D, Terminal

SOURCE = Path(__file__).parents[1] / "src"
SCREENS = Path(__file__).with_name("screens")
SIZES = ((100, 30), (60, 20))
DIM = "8b949e"
COLOURS = {"default": "#e6edf3", "cyan": "#56d4dd", "magenta": "#d2a8ff", "red": "#ff7b72", "blue": "#79c0ff"}
CELL_WIDTH, CELL_HEIGHT, MARGIN = 9.03, 20, 16
"""In CSS pixels, for 15 px DejaVu Sans Mono."""


class ColourScreen(terminal.Screen):
    """pyte has no dim text: it gets a colour of its own."""

    def select_graphic_rendition(self, *attributes: int, private: bool = False) -> None:
        super().select_graphic_rendition(*attributes)
        if 2 in attributes:
            self.cursor.attrs = self.cursor.attrs._replace(fg=DIM)


def page(screen: pyte.Screen) -> str:
    rows = "\n".join("".join(_spans(row, screen.columns)) for row in screen.buffer.values())
    width, height = _pixels(screen.columns, screen.lines)
    return (
        "<meta charset=utf-8><style>body { margin: 0; background: #0d1117 } pre { box-sizing: border-box; margin: 0; "
        f"padding: {MARGIN}px; width: {width}px; height: {height}px; color: {COLOURS['default']}; "
        f"font: 15px/{CELL_HEIGHT}px 'DejaVu Sans Mono', monospace }}</style><pre>{rows}</pre>"
    )


def _spans(row: dict[int, Char], columns: int) -> Iterator[str]:
    cells = [row[column] for column in range(columns)]
    for (fg, bold, reverse), group in groupby(cells, lambda cell: (cell.fg, cell.bold, cell.reverse)):
        text = html.escape("".join(cell.data for cell in group))
        colour = COLOURS.get(fg, f"#{fg}")
        style = f"background: {colour}; color: #0d1117" if reverse else f"color: {colour}"
        yield f'<span style="{style}{"; font-weight: bold" if bold else ""}">{text}</span>'


def _pixels(columns: int, rows: int) -> tuple[int, int]:
    return round(columns * CELL_WIDTH + 2 * MARGIN), rows * CELL_HEIGHT + 2 * MARGIN


def draw(screen: pyte.Screen, path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium, "Chromium draws the images: it is not installed"
    width, height = _pixels(screen.columns, screen.lines)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "screen.html"
        source.write_text(page(screen), encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={width},{height}"]
        command = [chromium, *options, f"--user-data-dir={folder}", f"--screenshot={path}", source.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=300)


def main() -> None:
    terminal.Screen = ColourScreen  # type: ignore[misc]
    for columns, rows in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "palaver", "chat", "--local", "--data", folder, "--set", "seed=1"]
            with Terminal(command, columns, rows, {"PYTHONPATH": str(SOURCE)}) as opened:
                opened.wait("(?s)^›.*Loading sprout")
                draw(opened.screen, SCREENS / f"terminal-loading-{columns}x{rows}.png")
                opened.until(" is ready · ")
                opened.prompt()
                opened.do("What is 1234 + 5678?")
                draw(opened.screen, SCREENS / f"terminal-{columns}x{rows}.png")
                opened.type(CTRL_D)
                opened.wait_for_exit()


if __name__ == "__main__":
    main()
