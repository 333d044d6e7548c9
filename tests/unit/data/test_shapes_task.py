from __future__ import annotations

import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from headwater.core.errors import DataError
from headwater.data.tasks.shapes import _RGB, PLACES, QUESTIONS, shapes

COLOR_NAMES = {rgb: name for name, rgb in _RGB.items()}


def opened(row):
    return Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("RGB")


def seen(row):
    """The shape and colour in every cell, read from the pixels: a shape is told by how much of its box it fills."""
    image = opened(row)
    cells = {}
    for number, place in enumerate(PLACES):
        top, left = (28 * each for each in divmod(number, 2))
        cell = np.asarray(image.crop((left, top, left + 28, top + 28)))
        drawn = (cell != 255).any(axis=2)
        if not drawn.any():
            continue
        (color,) = {tuple(pixel) for pixel in cell[drawn].tolist()}
        rows, columns = (np.flatnonzero(drawn.any(axis=axis)) for axis in (1, 0))
        share = drawn.sum() / ((rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1))
        shape = "square" if share > 0.95 else "circle" if share > 0.65 else "triangle"
        cells[place] = shape, COLOR_NAMES[color]
    return cells


def test_answers_are_in_the_pictures():
    rows = shapes("train", 120, 0)
    for row in rows:
        cells, answer, text = seen(row), row["reward_model"]["ground_truth"], row["prompt"][0]["content"]
        asked = [(place, color) for place, (shape, color) in cells.items() if f"the {shape}?" in text]
        kind = row["extra_info"]["question"]
        if kind == "count":
            assert text == "<image>How many shapes?"
            assert answer == str(len(cells))
        else:
            assert text.startswith("<image>What color is the " if kind == "color" else "<image>Where is the ")
            ((place, color),) = asked
            assert answer == (color if kind == "color" else place)
        assert opened(row).size == (56, 56)
    assert Counter(row["extra_info"]["question"] for row in rows) == dict.fromkeys(QUESTIONS, 40)


def test_a_question_tells_nothing_about_its_answer():
    for split, options in (
        ("train", {}),
        ("eval", {}),
        ("eval", {"max_shapes": 1, "questions": ["color", "position"]}),
    ):
        kinds = options.get("questions", QUESTIONS)
        rows = shapes(split, 48 * len(kinds), 3, **options)
        counts = Counter((row["prompt"][0]["content"], row["reward_model"]["ground_truth"]) for row in rows)
        expected = {"How many": 12, "What color": 4, "Where is": 4}
        assert len(counts) == sum({"count": 4, "color": 12, "position": 12}[kind] for kind in kinds)
        for (text, _), count in counts.items():
            assert count == next(number for start, number in expected.items() if start in text)


def test_pictures_are_held_out_and_the_seed_decides():
    assert shapes("train", 20, 1) == shapes("train", 20, 1) != shapes("train", 20, 2)
    options = {"max_shapes": 1, "questions": ["color"]}
    files = [
        {row["images"][0]["bytes"] for row in shapes(*given, **options)}
        for given in (("train", 3000, 1), ("eval", 300, 2))
    ]
    train, held_out = files
    assert len(train) > 2000, "most pictures differ"
    assert not train & held_out


def test_blank_pictures_change_nothing_else():
    rows, blank = (shapes("train", 30, 0, demonstrations="any_answer", blank=blank) for blank in (False, True))
    assert {row["images"][0]["bytes"] for row in blank} == {blank[0]["images"][0]["bytes"]}
    assert opened(blank[0]).getcolors() == [(56 * 56, (255, 255, 255))]
    for row in (*rows, *blank):
        del row["images"]
    assert rows == blank
    wrong = [row for row in rows if row["extra_info"]["demonstration"] != row["reward_model"]["ground_truth"]]
    assert 10 < len(wrong) < 30


def test_wrong_options():
    for options, message in (
        ({"questions": []}, r"questions = \[\]: must be a list of different ones of count, color, position"),
        ({"questions": "color"}, "must be a list"),
        ({"questions": ["size"]}, "questions = 'size': must be one of count, color, position"),
        ({"max_shapes": 1}, "max_shapes = 1: must be a whole number >= 2"),
        ({"max_shapes": 5}, "max_shapes = 5: must be at most 4"),
        ({"cell_pixels": 2}, "cell_pixels = 2: must be a whole number >= 8"),
        ({"blank": 1}, "blank = 1: must be true or false"),
        ({"demonstrations": "none"}, "demonstrations = 'none': must be one of right, half_right, any_answer"),
    ):
        with pytest.raises(DataError, match=message):
            shapes("train", 4, 0, **options)
