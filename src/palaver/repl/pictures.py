"""Pictures in the terminal, by the protocols of Kitty and iTerm2 or as Sixel graphics."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from palaver.media import Picture

if TYPE_CHECKING:
    from PIL import Image

PictureProtocol = Literal["kitty", "iterm2", "sixel"]
_SIZE = (480, 320)
"""A picture is scaled down to fit into this many pixels."""
_KITTY_CHUNK = 4096
_KITTY_PROGRAMS = ("kitty", "ghostty", "wezterm")
_ITERM_PROGRAMS = ("iterm.app", "mintty", "vscode")
_SIXEL_TERMS = ("sixel", "foot", "mlterm", "yaft")
_SIXEL_COLOURS = 64


def picture_protocol(environment: Mapping[str, str]) -> PictureProtocol | None:
    """The protocol of the terminal, by its environment variables; None inside of a multiplexer, which hides it."""
    term, program = environment.get("TERM", ""), environment.get("TERM_PROGRAM", "").lower()
    if environment.get("TMUX") or term.startswith(("screen", "tmux", "dumb")):
        return None
    if environment.get("KITTY_WINDOW_ID") or "kitty" in term or "ghostty" in term or program in _KITTY_PROGRAMS:
        return "kitty"
    if program in _ITERM_PROGRAMS:
        return "iterm2"
    return "sixel" if any(name in term for name in _SIXEL_TERMS) else None


def encode_picture(pixels: Picture, protocol: PictureProtocol) -> str:
    """The control sequences that draw the picture at the cursor."""
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail(_SIZE)
    match protocol:
        case "kitty":
            return "".join(_kitty_chunks(_png(image)))
        case "iterm2":
            data = _png(image)
            return f"\x1b]1337;File=inline=1;size={len(data)}:{base64.b64encode(data).decode()}\a"
        case "sixel":
            return _sixel(image)


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _kitty_chunks(png: bytes) -> Iterator[str]:
    text = base64.b64encode(png).decode()
    for start in range(0, len(text), _KITTY_CHUNK):
        control = "a=T,f=100,q=2," if start == 0 else ""
        more = int(start + _KITTY_CHUNK < len(text))
        yield f"\x1b_G{control}m={more};{text[start : start + _KITTY_CHUNK]}\x1b\\"


def _sixel(image: Image.Image) -> str:
    """Bands of six rows. In a band, each colour draws its pixels, then the next colour starts again at the left."""
    import numpy as np

    reduced = image.quantize(_SIXEL_COLOURS)
    palette = np.array(reduced.getpalette(), dtype=np.uint16).reshape(-1, 3) * 100 // 255
    indices = np.asarray(reduced)
    height, width = indices.shape
    colours = "".join(f"#{index};2;{r};{g};{b}" for index, (r, g, b) in enumerate(palette))
    bands = []
    for top in range(0, height, 6):
        band = indices[top : top + 6]
        weights = (1 << np.arange(len(band)))[:, None]
        rows = []
        for colour in np.unique(band):
            bits = ((band == colour) * weights).sum(axis=0)
            rows.append(f"#{colour}" + "".join(chr(63 + int(value)) for value in bits))
        bands.append("$".join(rows))
    return f'\x1bP0;1q"1;1;{width};{height}{colours}{"-".join(bands)}\x1b\\'
