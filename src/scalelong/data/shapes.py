"""The dataset `shapes`: one or two coloured shapes on white with their captions, drawn by a formula from a seed.

    a red circle · two blue squares · a green triangle · two black crosses …

Every eighth combination of number, colour and shape is in the validation split only, so that its captions are prompts
that training never saw, made of words that it knows.
"""

import numpy as np
import numpy.typing as npt

from scalelong.data.records import Example, Pixels, Reading

SIZE = 16
COLOURS = {
    "red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220), "yellow": (245, 205, 40),
    "purple": (150, 60, 180), "orange": (245, 130, 30), "grey": (150, 150, 150), "black": (20, 20, 20),
}  # fmt: skip
SHAPES = {"circle": "circles", "square": "squares", "triangle": "triangles", "cross": "crosses"}
NUMBERS = ("a", "two")
PER_CAPTION = {"train": 72, "validation": 16}

Combination = tuple[str, str, str]  # number, colour, shape


def caption_of(combination: Combination) -> str:
    """Return "a red circle" or "two red circles"."""
    number, colour, shape = combination
    if number == "two":
        return f"two {colour} {SHAPES[shape]}"
    return f"{'an' if colour[0] in 'aeiou' else 'a'} {colour} {shape}"


def combinations(split: str) -> list[Combination]:
    """Return the combinations of a split. The held-out ones cover every number, colour and shape."""
    every = [(number, colour, shape) for number in NUMBERS for colour in COLOURS for shape in SHAPES]
    rank = {word: k for words in (NUMBERS, COLOURS, SHAPES) for k, word in enumerate(words)}
    held_out = {(n, c, s) for n, c, s in every if (2 * rank[n] + rank[c] + rank[s]) % 8 == 0}
    return [combination for combination in every if (combination in held_out) == (split == "validation")]


def draw(combination: Combination, rng: np.random.Generator, size: int = SIZE) -> Pixels:
    """Draw one image, uint8 (size, size, 3). Place and size are random, edges are smooth."""
    number, colour, shape = combination
    y, x = np.mgrid[0:size, 0:size] + 0.5  # centres of pixels
    unit = size / 24
    if number == "two":  # side by side or one above the other, in random halves
        radius, gap = rng.uniform(4.2, 5.2, 2) * unit, rng.uniform(5.7, 6.3) * unit
        along = size / 2 + np.array([-gap, gap])
        across = size / 2 + rng.uniform(-4.5, 4.5, 2) * unit
        centres = list(zip(along, across, strict=True) if rng.random() < 0.5 else zip(across, along, strict=True))
    else:
        radius = rng.uniform(5.5, 8.5, 1) * unit
        centres = [tuple(rng.uniform(radius[0] + 1, size - radius[0] - 1, 2))]
    covered = np.zeros((size, size))
    for r, (cx, cy) in zip(radius, centres, strict=True):
        covered = np.maximum(covered, np.clip(0.5 - distance(shape, x - cx, y - cy, r), 0, 1))
    shade = np.array(COLOURS[colour], float) + rng.uniform(-12, 12, 3)
    pixels = 255 + covered[..., None] * (shade - 255)
    return np.rint(pixels.clip(0, 255)).astype(np.uint8)


def distance(shape: str, x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], r: float) -> npt.NDArray[np.float64]:
    """Return the distance to the edge of a shape of radius r around 0, in pixels: negative inside."""
    if shape == "circle":
        return np.hypot(x, y) - r
    x, y_abs = np.abs(x), np.abs(y)
    if shape == "square":
        return np.maximum(x, y_abs) - 0.88 * r
    if shape == "triangle":  # equilateral, one corner up
        r, y = 1.2 * r, y - 0.3 * r
        return np.maximum(0.75**0.5 * x - y / 2, y) - r / 2
    arm = 0.34 * r
    return np.minimum(np.maximum(x - arm, y_abs - r), np.maximum(x - r, y_abs - arm))


def read_shapes(folders: object, split: str) -> Reading:
    """Draw a split. The same on every machine."""
    seed, rows = int(split == "validation"), combinations(split) * PER_CAPTION[split]
    examples = (
        Example(f"shapes {split} {k}", draw(row, np.random.default_rng([seed, k])), captions=(caption_of(row),))
        for k, row in enumerate(rows)
    )
    return Reading(examples, len(rows), captioned=True)
