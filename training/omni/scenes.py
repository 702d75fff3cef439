"""What a picture shows: shapes in their places, a number, or a word. Scenes are drawn by `pictures.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from training.phrasings import Draw

SHAPES = ("circle", "square", "rectangle", "triangle", "diamond", "star", "heart", "cross")
COLOURS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "red": ((220, 20, 30), (200, 0, 0), (240, 40, 40), (178, 24, 36)),
    "orange": ((255, 140, 0), (245, 120, 10), (250, 150, 40)),
    "yellow": ((255, 225, 0), (250, 235, 40), (240, 215, 20)),
    "green": ((0, 150, 40), (30, 180, 60), (20, 120, 30), (60, 200, 80)),
    "blue": ((20, 60, 220), (0, 0, 200), (50, 100, 240), (30, 110, 210)),
    "purple": ((128, 0, 160), (110, 30, 180), (145, 50, 190)),
    "pink": ((255, 130, 190), (250, 105, 180), (255, 160, 205)),
    "brown": ((120, 70, 20), (140, 80, 40), (100, 60, 25)),
    "black": ((0, 0, 0), (20, 20, 20), (10, 10, 15)),
    "white": ((255, 255, 255), (245, 245, 245), (250, 250, 245)),
    "grey": ((128, 128, 128), (140, 140, 145), (115, 115, 115)),
}
"""Typical values of each colour; a picture's own values scatter a little around them."""
BACKGROUNDS = (
    (255, 255, 255),
    (245, 245, 240),
    (225, 225, 225),
    (0, 0, 0),
    (35, 35, 40),
    (200, 225, 250),
    (255, 245, 210),
    (215, 240, 215),
)
PLACES = ("top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right")
_CONTRAST = 110

Rgb = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Thing:
    """A shape in one of the nine cells of a picture."""

    shape: str
    colour: str
    rgb: Rgb
    cell: int
    size: float
    """Its width as a share of the cell."""
    shift: tuple[float, float]
    """How far it is off the middle of its cell, as shares of the cell."""
    turn: float
    """Degrees."""
    outline: bool = False

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"

    @property
    def place(self) -> str:
        return PLACES[self.cell]


@dataclass(frozen=True, slots=True)
class Scene:
    things: tuple[Thing, ...]
    background: Rgb


@dataclass(frozen=True, slots=True)
class Writing:
    """A number or a word."""

    text: str
    rgb: Rgb
    background: Rgb
    font: int
    height: float
    """The height of the letters as a share of the picture's."""
    shift: tuple[float, float]
    turn: float


def contrast(a: Rgb, b: Rgb) -> float:
    return float(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5)


def scattered(draw: Draw, rgb: Rgb, by: int = 10) -> Rgb:
    red, green, blue = (min(255, max(0, value + draw.between(-by, by))) for value in rgb)
    return red, green, blue


def background(draw: Draw) -> Rgb:
    return draw.pick(BACKGROUNDS[:3]) if draw.chance(0.5) else scattered(draw, draw.pick(BACKGROUNDS), 6)


def colour(draw: Draw, behind: Rgb) -> tuple[str, Rgb]:
    """A colour that stands out from what is behind it."""
    while True:
        name = draw.pick(tuple(COLOURS))
        rgb = scattered(draw, draw.pick(COLOURS[name]))
        if contrast(rgb, behind) >= _CONTRAST:
            return name, rgb


def thing(draw: Draw, cell: int, behind: Rgb, shape: str = "", named: tuple[str, Rgb] | None = None) -> Thing:
    name, rgb = named or colour(draw, behind)
    shape = shape or draw.pick(SHAPES)
    return Thing(
        shape,
        name,
        rgb,
        cell,
        size=draw.between(55, 95) / 100,
        shift=(draw.between(-8, 8) / 100, draw.between(-8, 8) / 100),
        turn=draw.between(-12, 12) if draw.chance(0.5) and shape not in ("circle", "diamond") else 0,
        outline=draw.chance(0.08) and shape != "cross",
    )


def scene(draw: Draw, count: int) -> Scene:
    """`count` things, each in a cell of its own, in the order in which one reads."""
    behind = background(draw)
    cells = sorted(draw.sample(range(9), count))
    alike, shape = draw.random.random(), draw.pick(SHAPES)
    shared = colour(draw, behind)
    pair = (draw.pick(SHAPES), shape)
    colours = (colour(draw, behind), shared)
    things = []
    for cell in cells:
        if alike < 0.3:
            things.append(thing(draw, cell, behind, shape, shared))
        elif alike < 0.6:
            things.append(thing(draw, cell, behind, draw.pick(pair), draw.pick(colours)))
        else:
            things.append(thing(draw, cell, behind))
    return Scene(tuple(things), behind)


def large_thing(draw: Draw) -> Scene:
    """One thing that fills much of the picture."""
    behind = background(draw)
    return Scene((replace(thing(draw, 4, behind), size=draw.between(100, 290) / 100),), behind)


def different_things(draw: Draw, count: int) -> Scene:
    """Things of which no two share a shape or a colour."""
    behind = background(draw)
    cells, shapes = sorted(draw.sample(range(9), count)), draw.sample(SHAPES, count)
    things: list[Thing] = []
    for cell, shape in zip(cells, shapes, strict=True):
        while (named := colour(draw, behind))[0] in {other.colour for other in things}:
            pass
        things.append(thing(draw, cell, behind, shape, named))
    return Scene(tuple(things), behind)


def writing(draw: Draw, text: str) -> Writing:
    behind = background(draw)
    rgb = colour(draw, behind)[1] if draw.chance(0.5) else ((0, 0, 0) if sum(behind) > 380 else (255, 255, 255))
    return Writing(
        text,
        rgb,
        behind,
        font=draw.between(0, 999),
        height=draw.between(28, 75) / 100,
        shift=(draw.between(-100, 100) / 100, draw.between(-100, 100) / 100),
        turn=draw.between(-10, 10) if draw.chance(0.4) else 0,
    )
