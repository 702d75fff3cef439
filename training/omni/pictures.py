"""Draws scenes with Pillow, in sizes and with the flaws that pictures have."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from training.omni import assets
from training.omni.scenes import Rgb, Scene, Thing, Writing
from training.phrasings import Draw

Point = tuple[float, float]
STROKES = {
    "0": (((0.5, 0), (0.1, 0.25), (0.1, 0.75), (0.5, 1), (0.9, 0.75), (0.9, 0.25), (0.5, 0)),),
    "1": (((0.25, 0.2), (0.55, 0), (0.55, 1)),),
    "2": (((0.1, 0.25), (0.3, 0), (0.7, 0), (0.9, 0.25), (0.75, 0.5), (0.1, 1), (0.9, 1)),),
    "3": (((0.1, 0.1), (0.5, 0), (0.85, 0.2), (0.5, 0.47), (0.9, 0.75), (0.5, 1), (0.1, 0.9)),),
    "4": (((0.7, 1), (0.7, 0), (0.1, 0.65), (0.95, 0.65)),),
    "5": (((0.85, 0), (0.2, 0), (0.15, 0.45), (0.6, 0.4), (0.9, 0.7), (0.6, 1), (0.1, 0.92)),),
    "6": (((0.75, 0), (0.25, 0.4), (0.1, 0.75), (0.5, 1), (0.9, 0.75), (0.5, 0.5), (0.12, 0.7)),),
    "7": (((0.1, 0), (0.9, 0), (0.4, 1)),),
    "8": (
        (
            (0.5, 0.48),
            (0.15, 0.25),
            (0.5, 0),
            (0.85, 0.25),
            (0.5, 0.48),
            (0.1, 0.75),
            (0.5, 1),
            (0.9, 0.75),
            (0.5, 0.48),
        ),
    ),
    "9": (((0.88, 0.3), (0.5, 0.5), (0.1, 0.25), (0.5, 0), (0.9, 0.25), (0.75, 0.65), (0.35, 1)),),
}
"""Digits as a pen draws them, in a box of one by one."""


def size(draw: Draw) -> tuple[int, int]:
    """Width and height."""
    side = draw.between(150, 260) if draw.chance(0.7) else draw.between(110, 520)
    longer = 1 + draw.random.random() * 0.5 if draw.chance(0.4) else 1.0
    width, height = round(side * math.sqrt(longer)), round(side / math.sqrt(longer))
    return (width, height) if draw.chance(0.65) else (height, width)


def draw_scene(draw: Draw, scene: Scene) -> Image.Image:
    width, height = size(draw)
    by = draw.pick((1, 1, 2)) if width < 300 else 1
    image = Image.new("RGB", (width * by, height * by), scene.background)
    pen = ImageDraw.Draw(image)
    for thing in scene.things:
        _draw_thing(pen, thing, width * by, height * by, scene.background)
    return finish(draw, image, (width, height))


def _draw_thing(pen: ImageDraw.ImageDraw, thing: Thing, width: int, height: int, behind: Rgb) -> None:
    cell_width, cell_height = width / 3, height / 3
    half = min(cell_width, cell_height) * thing.size / 2 * 0.92
    x = cell_width * (thing.cell % 3 + 0.5 + thing.shift[0])
    y = cell_height * (thing.cell // 3 + 0.5 + thing.shift[1])
    _fill(pen, thing, (x, y), half, thing.rgb)
    if thing.outline:
        _fill(pen, thing, (x, y), half * 0.62, behind)


def _fill(pen: ImageDraw.ImageDraw, thing: Thing, middle: Point, half: float, rgb: Rgb) -> None:
    if thing.shape == "circle":
        pen.ellipse((middle[0] - half, middle[1] - half, middle[0] + half, middle[1] + half), fill=rgb)
        return
    turn = math.radians(thing.turn)
    cos, sin = math.cos(turn), math.sin(turn)
    corners = [
        (middle[0] + half * (x * cos - y * sin), middle[1] + half * (x * sin + y * cos))
        for x, y in outline(thing.shape)
    ]
    pen.polygon(corners, fill=rgb)


@cache
def outline(shape: str) -> tuple[Point, ...]:
    """Corners in a box from -1 to 1."""
    match shape:
        case "square":
            return ((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85))
        case "rectangle":
            return ((-1, -0.5), (1, -0.5), (1, 0.5), (-1, 0.5))
        case "triangle":
            return ((0, -0.95), (1, 0.85), (-1, 0.85))
        case "diamond":
            return ((0, -1), (0.75, 0), (0, 1), (-0.75, 0))
        case "star":
            points = ((1.0 if at % 2 == 0 else 0.42, math.pi * (at / 5 - 0.5)) for at in range(10))
            return tuple((r * math.cos(a), r * math.sin(a)) for r, a in points)
        case "cross":
            a = 0.32
            return (
                (-a, -1),
                (a, -1),
                (a, -a),
                (1, -a),
                (1, a),
                (a, a),
                (a, 1),
                (-a, 1),
                (-a, a),
                (-1, a),
                (-1, -a),
                (-a, -a),
            )
        case "heart":
            angles = [2 * math.pi * at / 40 for at in range(40)]
            return tuple(
                (
                    math.sin(a) ** 3,
                    -(13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)) / 16 - 0.1,
                )
                for a in angles
            )
        case _:
            raise ValueError(f"no outline of {shape}")


def draw_writing(draw: Draw, written: Writing) -> Image.Image:
    width, height = size(draw)
    layer = Image.new("L", (width, height), 0)
    room = (width * 0.92, height * 0.92)
    if written.text.isdigit() and draw.chance(0.3):
        mask = _by_pen(draw, written, height * written.height, room)
    else:
        mask = _by_font(written, height * written.height, room)
    if written.turn:
        mask = mask.rotate(written.turn, Image.Resampling.BICUBIC, expand=True)
    if mask.width > room[0] or mask.height > room[1]:
        by = min(room[0] / mask.width, room[1] / mask.height)
        mask = mask.resize((max(1, int(mask.width * by)), max(1, int(mask.height * by))))
    x = (width - mask.width) / 2 * (1 + 0.8 * written.shift[0])
    y = (height - mask.height) / 2 * (1 + 0.8 * written.shift[1])
    layer.paste(mask, (round(x), round(y)))
    image = Image.new("RGB", (width, height), written.background)
    image.paste(written.rgb, (0, 0, width, height), layer)
    return finish(draw, image, (width, height))


def _by_font(written: Writing, height: float, room: Point) -> Image.Image:
    names = assets.fonts()
    pixels = max(14, int(height))
    font = _font(names[written.font % len(names)], pixels - pixels % 4)
    box = font.getbbox(written.text)
    mask = Image.new("L", (max(1, round(box[2] - box[0])), max(1, round(box[3] - box[1]))), 0)
    ImageDraw.Draw(mask).text((-box[0], -box[1]), written.text, fill=255, font=font)
    return mask


@cache
def _font(path: Path | None, pixels: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.truetype(str(path), pixels) if path else ImageFont.load_default(pixels)


def _by_pen(draw: Draw, written: Writing, height: float, room: Point) -> Image.Image:
    """Digits drawn as strokes, each a little different."""
    height = max(20.0, height * 0.8)
    digit, gap = height * draw.between(50, 75) / 100, height * draw.between(15, 30) / 100
    thick = max(2, round(height * draw.between(6, 16) / 100))
    count = len(written.text)
    mask = Image.new("L", (round(count * digit + (count - 1) * gap + 2 * thick), round(height + 2 * thick)), 0)
    pen = ImageDraw.Draw(mask)
    for at, text in enumerate(written.text):
        for stroke in STROKES[text]:
            points = [
                (
                    thick + at * (digit + gap) + digit * (x + draw.between(-5, 5) / 100),
                    thick + height * (y + draw.between(-4, 4) / 100),
                )
                for x, y in _rounded(stroke)
            ]
            pen.line(points, fill=255, width=thick, joint="curve")
            for x, y in (points[0], points[-1]):
                pen.ellipse((x - thick / 2, y - thick / 2, x + thick / 2, y + thick / 2), fill=255)
    return mask


def _rounded(stroke: tuple[Point, ...]) -> list[Point]:
    """The stroke with its corners cut once."""
    points = [stroke[0]]
    for (x, y), (u, v) in pairwise(stroke):
        points += [(x * 0.8 + u * 0.2, y * 0.8 + v * 0.2), (x * 0.2 + u * 0.8, y * 0.2 + v * 0.8)]
    return [*points, stroke[-1]]


def finish(draw: Draw, image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The picture in its size; some are blurred, some have noise."""
    if image.size != size:
        image = image.resize(size, Image.Resampling.BILINEAR)
    if draw.chance(0.08):
        image = image.filter(ImageFilter.GaussianBlur(0.4 + draw.random.random()))
    if draw.chance(0.05):
        noise = np.random.default_rng(draw.between(0, 2**31)).normal(0, draw.between(2, 9), (size[1], size[0], 3))
        image = Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))
    return image
