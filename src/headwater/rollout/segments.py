"""Which policy version made which tokens of a response."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

Segments = tuple[tuple[int, int], ...]
"""``(version, number of tokens)``, in the order of the response."""

Requests = Mapping[tuple[int, int], Segments]
"""Of a group, by (sample, number of the request within its episode)."""


def segments_of(versions: tuple[int, ...]) -> Segments:
    if versions and versions.count(versions[0]) == len(versions):  # the usual case, without a look at each token
        return ((versions[0], len(versions)),)
    return tuple((version, sum(1 for _ in run)) for version, run in groupby(versions))


def requests_to_json(requests: Requests) -> list[list[Any]]:
    return [[*place, [list(each) for each in made]] for place, made in sorted(requests.items())]


def requests_from_json(read: Iterable[Any]) -> dict[tuple[int, int], Segments]:
    return {(sample, number): tuple((version, count) for version, count in made) for sample, number, made in read}
