"""What is drawn: a scene is four quarters, each empty or with one shape in one color, and a picture of it.

A shape stays near the middle of its quarter, so that what the model has for one quarter holds all of it. About one
scene in eight is held out: which, follows from the scene alone, so no way of drawing it was ever trained on.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from PIL import Image, ImageDraw

from lab.demo.corpus.split import Split, split_of

PLACES = ("top left", "top right", "bottom left", "bottom right")
SHAPES = ("circle", "square", "triangle", "star")
COLORS = {
    "red": (215, 40, 40),
    "green": (40, 150, 60),
    "blue": (45, 80, 215),
    "yellow": (240, 205, 40),
    "purple": (140, 50, 165),
    "black": (30, 30, 30),
}
NUMBER_WEIGHTS = (4, 20, 28, 26, 22)
"""How often a scene has no shape, one, two, three, four."""

SIDE = 192
"""Pixels along a side, unless told otherwise; four times what the model sees."""


class Thing(NamedTuple):
    """A shape in a color."""

    shape: str
    color: str

    def __str__(self) -> str:
        return f"{self.color} {self.shape}"


Scene = tuple[Thing | None, ...]
"""What is in each of `PLACES`."""


def draw_scene(rng: random.Random, split: Split) -> Scene:
    """A random scene of one side of the split."""
    while True:
        number = rng.choices(range(len(NUMBER_WEIGHTS)), NUMBER_WEIGHTS)[0]
        taken = rng.sample(range(len(PLACES)), number)
        scene = tuple(_thing(rng) if place in taken else None for place in range(len(PLACES)))
        if split_of(("scene", *map(str, scene))) == split:
            return scene


def paint(scene: Scene, rng: random.Random, side: int = SIDE) -> Image.Image:
    """A picture of a scene, in RGB: where exactly shapes lie, their sizes, turns and tints are random."""
    image = Image.new("RGB", (side, side), tuple(rng.randint(236, 255) for _ in range(3)))
    canvas = ImageDraw.Draw(image)
    quarter = side / 2
    for place, thing in enumerate(scene):
        if thing is not None:
            x, y = (quarter * (part + 0.5 + rng.uniform(-0.08, 0.08)) for part in (place % 2, place // 2))
            radius = quarter * rng.uniform(0.3, 0.42)
            tint = tuple(min(255, max(0, level + rng.randint(-20, 20))) for level in COLORS[thing.color])
            _paint_shape(canvas, thing.shape, (x, y), radius, rng.uniform(-0.2, 0.2), tint)
    return image


def _thing(rng: random.Random) -> Thing:
    return Thing(rng.choice(SHAPES), rng.choice(tuple(COLORS)))


def _paint_shape(
    canvas: ImageDraw.ImageDraw,
    shape: str,
    middle: tuple[float, float],
    radius: float,
    turn: float,
    color: tuple[int, ...],
) -> None:
    """One shape within `radius` of its middle, turned by `turn` radians."""
    if shape == "circle":
        canvas.circle(middle, radius * 0.9, color)
        return
    corners, inner = {"square": (4, 0.0), "triangle": (3, 0.0), "star": (10, 0.42)}[shape]
    start = turn - math.pi / 2 + (math.pi / 4 if shape == "square" else 0)
    points = []
    for corner in range(corners):
        reach = radius * (inner if inner and corner % 2 else 1.0)
        angle = start + 2 * math.pi * corner / corners
        points.append((middle[0] + reach * math.cos(angle), middle[1] + reach * math.sin(angle)))
    canvas.polygon(points, color)
