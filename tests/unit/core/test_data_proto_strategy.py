"""What the DataProto tests share: an example, a strategy, and proof that it reaches the cases that matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st

from headwater.core.data_proto import DataProto

QUICK = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

MAX_ROWS = 7
DTYPES = (torch.float32, torch.int64, torch.bool)
TENSOR_NAMES = ("input_ids", "rewards", "mask", "values")
OBJECT_NAMES = ("uid", "turns", "info")
META_KEYS = ("temperature", "step", "note")

plain_values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3)
)
ragged_arrays = st.lists(st.integers(-9, 9), max_size=3).map(lambda values: np.array(values, dtype=np.int64))
cell_values = st.recursive(
    plain_values | ragged_arrays,
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)


def example() -> DataProto:
    return DataProto.from_dict(
        tensors={"ids": torch.arange(8).reshape(4, 2), "reward": torch.tensor([0.0, 1.0, 2.0, 3.0])},
        non_tensors={"uid": ["a", "b", "c", "d"], "turns": [[1], [1, 2], [], [3]]},
        meta_info={"temperature": 1.0},
    )


def uids(data: DataProto) -> str:
    return "".join(data.non_tensor_batch["uid"])


@st.composite
def tensors(draw: st.DrawFn, num_rows: int) -> torch.Tensor:
    """Random contents come from a seed: hypothesis need not choose every element."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = (num_rows, *draw(st.lists(st.integers(0, 3), max_size=2)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    if dtype is torch.float32:
        values = torch.randn(shape, generator=generator)
        return torch.where(values > 1.5, torch.nan, values)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)


@st.composite
def object_columns(draw: st.DrawFn, num_rows: int) -> list[Any]:
    """Cells of any kind, or lists that are all equally long, which numpy would like to make a second dimension of."""
    if draw(st.booleans()):
        width = draw(st.integers(0, 2))
        return [[row] * width for row in range(num_rows)]
    return draw(st.lists(cell_values, min_size=num_rows, max_size=num_rows))


@st.composite
def data_protos(draw: st.DrawFn, min_rows: int = 0, max_rows: int = MAX_ROWS) -> DataProto:
    num_rows = draw(st.integers(min_rows, max_rows))
    tensor_names = draw(st.lists(st.sampled_from(TENSOR_NAMES), unique=True, max_size=3))
    object_names = draw(st.lists(st.sampled_from(OBJECT_NAMES), unique=True, max_size=2))
    if not tensor_names and not object_names:
        tensor_names = ["input_ids"]
    return DataProto.from_dict(
        tensors={name: draw(tensors(num_rows)) for name in tensor_names},
        non_tensors={name: draw(object_columns(num_rows)) for name in object_names},
        meta_info=draw(st.dictionaries(st.sampled_from(META_KEYS), cell_values, max_size=2)),
    )


def assert_same(actual: DataProto, expected: DataProto) -> None:
    actual.check_consistency()
    assert actual.equals(expected), f"{actual!r}\n{expected!r}"


@pytest.mark.parametrize(
    "is_case",
    [
        lambda data: len(data) == 0,
        lambda data: len(data) > 2 and not list(data.batch.keys()),
        lambda data: len(data) > 2 and not data.non_tensor_batch,
        lambda data: any(tensor.ndim > 1 and tensor.numel() == 0 for _, tensor in data.batch.items()),
        lambda data: any(tensor.is_floating_point() and tensor.isnan().any() for _, tensor in data.batch.items()),
        lambda data: any(isinstance(cell, np.ndarray) for column in data.non_tensor_batch.values() for cell in column),
        lambda data: (
            len(data) > 1 and any(cell == [1, 1] for column in data.non_tensor_batch.values() for cell in column)
        ),
    ],
    ids=["no rows", "objects only", "tensors only", "empty trailing shape", "nan", "ragged arrays", "equal lists"],
)
def test_the_strategy_reaches(is_case: Callable[[DataProto], bool]) -> None:
    # Shrinking what is found would take most of the time.
    quick_find = settings(max_examples=1000, deadline=None, derandomize=True, phases=[Phase.generate])
    find(data_protos(), is_case, settings=quick_find)
