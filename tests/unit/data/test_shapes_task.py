from __future__ import annotations

import io
from collections import Counter

import pytest
from PIL import Image

from headwater.core.errors import DataError
from headwater.data.tasks.shapes import _RGB, PLACES, QUESTIONS, shapes

COLOR_NAMES = {rgb: name for name, rgb in _RGB.items()}


def opened(row):
    return Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("RGB")


def seen(row):
    """The colour in every cell, read from the pixels."""
    image = opened(row)
    cells = {}
    for number, place in enumerate(PLACES):
        top, left = (28 * each for each in divmod(number, 2))
        found = {pixel for _, pixel in image.crop((left, top, left + 28, top + 28)).getcolors()}
        names = {COLOR_NAMES[pixel] for pixel in found if pixel != (255, 255, 255)}
        assert len(names) <= 1
        if names:
            cells[place] = names.pop()
    return cells


def test_answers_are_in_the_pictures():
    rows = shapes("train", 120, 0)
    for row in rows:
        cells, answer = seen(row), row["reward_model"]["ground_truth"]
        kind = row["extra_info"]["question"]
        if kind == "count":
            assert answer == str(len(cells))
        elif kind == "color":
            assert answer in cells.values()
        else:
            assert answer in cells
        assert opened(row).size == (56, 56)
        assert row["prompt"][0]["content"].count("<image>") == 1
    assert Counter(row["extra_info"]["question"] for row in rows) == dict.fromkeys(QUESTIONS, 40)


def test_all_answers_are_equally_frequent():
    for split in ("train", "eval"):
        rows = shapes(split, 96, 3)
        counts = Counter((row["extra_info"]["question"], row["reward_model"]["ground_truth"]) for row in rows)
        assert len(counts) == 12
        assert set(counts.values()) == {8}


def test_pictures_are_held_out_and_the_seed_decides():
    arrangements = {split: {str(seen(row)) for row in shapes(split, 200, 1, max_shapes=1)} for split in ("train", "eval")}
    assert shapes("train", 20, 1) == shapes("train", 20, 1) != shapes("train", 20, 2)
    train, held_out = (
        {row["images"][0]["bytes"] for row in shapes(split, 400, seed)} for split, seed in (("train", 1), ("eval", 2))
    )
    assert not train & held_out
    assert len(train) > 390
    assert arrangements["train"]


def test_blank_pictures_change_nothing_else():
    rows, blank = shapes("train", 30, 0, demonstrations="any_answer"), shapes(
        "train", 30, 0, demonstrations="any_answer", blank=True
    )
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
        ({"demonstrations": "none"}, "demonstrations = 'none': must be one of right, any_answer"),
    ):
        with pytest.raises(DataError, match=message):
            shapes("train", 4, 0, **options)
