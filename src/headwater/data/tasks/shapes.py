"""Pictures of coloured shapes, with questions about them: ``<image>What color is the circle?``.

The vision quickstart's task. A picture is a grid of cells that are empty or show one shape. All answers to a question
are equally frequent, whatever shape it names, so that a model that does not look at the picture scores one in four.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headwater.core.errors import DataError
from headwater.data.tasks import (
    TASKS,
    Split,
    TaskRow,
    make_row,
    one_of,
    split_of,
    task_generator,
    whole_number,
)

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

NAME = "shapes"
SHAPES = ("circle", "square", "triangle")
COLORS = ("red", "green", "blue", "yellow")
PLACES = ("top left", "top right", "bottom left", "bottom right")
"""The cells, in the order of their numbers."""
QUESTIONS = ("count", "color", "position")
DEMONSTRATIONS = ("right", "half_right", "any_answer")

_RGB = {"red": (220, 30, 30), "green": (30, 170, 50), "blue": (40, 70, 220), "yellow": (240, 200, 20)}
_BACKGROUND = (255, 255, 255)


class Figure(NamedTuple):
    """A shape in a cell: its kind and colour, and its distance from the cell's left and top side in pixels."""

    shape: str
    color: str
    left: int
    top: int
    size: int


Cells = tuple[Figure | None, ...]


@dataclass(frozen=True)
class Problem:
    question: str
    cells: Cells
    answer: str


@TASKS.register
def shapes(
    split: Split,
    num_rows: int,
    seed: int,
    *,
    questions: Sequence[str] = QUESTIONS,
    max_shapes: int = 4,
    cell_pixels: int = 28,
    blank: bool = False,
    demonstrations: str = "right",
) -> list[TaskRow]:
    """``num_rows`` pictures, each with one of the ``questions``.

    With ``blank``, all pictures are empty: what a model learns from them, it learns without looking. With
    ``demonstrations="any_answer"`` the warm start shows only the form of an answer, a random one; with ``half_right``
    every second answer is right, and the others are random.
    """
    kinds = _checked_questions(questions)
    whole_number(NAME, "max_shapes", max_shapes, 2 if "count" in kinds else 1)
    whole_number(NAME, "cell_pixels", cell_pixels, 8)
    one_of(NAME, "demonstrations", demonstrations, DEMONSTRATIONS)
    if max_shapes > len(PLACES):
        raise DataError(f"task {NAME}: data.task_args.max_shapes = {max_shapes}: must be at most {len(PLACES)}")
    if not isinstance(blank, bool):
        raise DataError(f"task {NAME}: data.task_args.blank = {blank!r}: must be true or false")
    generator = task_generator(NAME, split, seed)
    rows: list[TaskRow] = []
    for index, number in enumerate(generator.permutation(num_rows).tolist()):
        kind, round_number = kinds[number % len(kinds)], number // len(kinds)
        answers = _answers(kind, max_shapes)
        answer = answers[round_number % len(answers)]
        asked = SHAPES[round_number // len(answers) % len(SHAPES)]
        guess = str(generator.choice(answers))
        problem = _draw(kind, asked, answer, max_shapes, cell_pixels, generator)
        # A picture is in one split, whatever is asked about it.
        while split_of(NAME, str(problem.cells)) != split:
            problem = _draw(kind, asked, answer, max_shapes, cell_pixels, generator)
        is_right = demonstrations == "right" or (demonstrations == "half_right" and index % 2 == 0)
        row = make_row(
            f"<image>{problem.question}",
            data_source=NAME,
            ground_truth=answer,
            split=split,
            index=index,
            demonstration=answer if is_right else guess,
            question=kind,
        )
        shown = (None,) * len(PLACES) if blank else problem.cells
        rows.append({**row, "images": [{"bytes": draw_picture(shown, cell_pixels)}]})
    return rows


def _answers(kind: str, max_shapes: int) -> tuple[str, ...]:
    counts = tuple(str(number) for number in range(1, max_shapes + 1))
    return {"count": counts, "color": COLORS, "position": PLACES}[kind]


def _checked_questions(questions: Any) -> tuple[str, ...]:
    chosen = tuple(questions) if isinstance(questions, Sequence) and not isinstance(questions, str) else ()
    if not chosen or len(set(chosen)) < len(chosen):
        raise DataError(
            f"task {NAME}: data.task_args.questions = {questions!r}: must be a list of different ones of "
            f"{', '.join(QUESTIONS)}"
        )
    return tuple(one_of(NAME, "questions", kind, QUESTIONS) for kind in chosen)


def _draw(
    kind: str, asked: str, answer: str, max_shapes: int, cell_pixels: int, generator: np.random.Generator
) -> Problem:
    """A random picture for which ``answer`` is right. ``asked`` is the shape that the question names."""
    num_shapes = int(answer) if kind == "count" else int(generator.integers(1, max_shapes, endpoint=True))
    figures = [_figure(SHAPES, COLORS, cell_pixels, generator) for _ in range(num_shapes)]
    places = generator.permutation(len(PLACES)).tolist()
    if kind == "count":
        return Problem("How many shapes?", _cells(places, figures), answer)
    others = tuple(shape for shape in SHAPES if shape != asked)
    colors = (answer,) if kind == "color" else COLORS
    first = _figure((asked,), colors, cell_pixels, generator)
    figures = [first, *(_figure(others, COLORS, cell_pixels, generator) for _ in figures[1:])]
    if kind == "color":
        return Problem(f"What color is the {asked}?", _cells(places, figures), answer)
    wanted = PLACES.index(answer)
    places = [wanted, *(place for place in places if place != wanted)]
    return Problem(f"Where is the {asked}?", _cells(places, figures), answer)


def _figure(shapes: Sequence[str], colors: Sequence[str], cell_pixels: int, generator: np.random.Generator) -> Figure:
    size = int(generator.integers(cell_pixels * 5 // 8, cell_pixels * 7 // 8, endpoint=True))
    left, top = (int(offset) for offset in generator.integers(0, cell_pixels - size, size=2, endpoint=True))
    return Figure(str(generator.choice(shapes)), str(generator.choice(colors)), left, top, size)


def _cells(places: Sequence[int], figures: Sequence[Figure]) -> Cells:
    shown = dict(zip(places, figures, strict=False))
    return tuple(shown.get(place) for place in range(len(PLACES)))


def draw_picture(cells: Cells, cell_pixels: int) -> bytes:
    """A PNG file of 2 x 2 cells."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise DataError(f"task {NAME}: drawing pictures needs Pillow; pip install headwater[vision]") from error
    image = Image.new("RGB", (2 * cell_pixels, 2 * cell_pixels), _BACKGROUND)
    canvas = ImageDraw.Draw(image)
    for number, figure in enumerate(cells):
        if figure is not None:
            row, column = divmod(number, 2)
            left, top = column * cell_pixels + figure.left, row * cell_pixels + figure.top
            _draw_shape(canvas, figure.shape, figure.color, left, top, figure.size)
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def _draw_shape(canvas: ImageDraw, shape: str, color: str, left: int, top: int, size: int) -> None:
    right, bottom = left + size - 1, top + size - 1
    if shape == "circle":
        canvas.ellipse((left, top, right, bottom), fill=_RGB[color])
    elif shape == "square":
        canvas.rectangle((left, top, right, bottom), fill=_RGB[color])
    else:
        canvas.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], fill=_RGB[color])
