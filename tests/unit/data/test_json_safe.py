from __future__ import annotations

import datetime
import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.data.json_safe import from_json_safe, to_json_safe

keys = st.one_of(st.text(max_size=4), st.integers(), st.tuples(st.integers(), st.integers()), st.just("__tuple__"))
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.dates(), st.datetimes()
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(keys, inner),
        st.frozensets(st.integers()).map(set),
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=60)
@given(values)
def test_any_value_survives_json(value):
    assert from_json_safe(json.loads(json.dumps(to_json_safe(value)))) == value


def test_numpy_values_become_plain_and_others_text():
    given_values = {"a": np.int64(3), "b": np.array([[1.5]]), "c": np.bool_(True), "d": datetime.timedelta(days=1)}
    assert to_json_safe(given_values) == {"a": 3, "b": [[1.5]], "c": True, "d": "1 day, 0:00:00"}
