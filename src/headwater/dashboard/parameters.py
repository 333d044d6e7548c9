"""The parameters of a request as values. Each function raises ``Refused`` for a value that cannot be used."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from headwater.dashboard.errors import bad_request
from headwater.dashboard.rollout_files import SOURCES, Source


def source_in(given: Mapping[str, str]) -> Source:
    found = one_of(given, "source", SOURCES, "train")
    return "eval" if found == "eval" else "train"


def one_of(given: Mapping[str, str], name: str, known: Sequence[str], default: str) -> str:
    value = given.get(name) or default
    if value not in known:
        raise bad_request(f"{name} = {value[:80]!r}: must be one of {', '.join(each for each in known if each)}.")
    return value


def whole(
    given: Mapping[str, str], name: str, default: int | None = None, low: int = -(2**53), high: int = 2**53
) -> int | None:
    text = given.get(name)
    if not text:
        return default
    if not re.fullmatch(r"-?\d{1,16}", text) or not low <= int(text) <= high:
        raise bad_request(f"{name} = {text[:80]!r}: must be a whole number of at least {low} and at most {high}.")
    return int(text)


def number(given: Mapping[str, str], name: str) -> float | None:
    text = given.get(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value != value or abs(value) == float("inf"):
        raise bad_request(f"{name} = {text[:80]!r}: must be a number.")
    return value


def listed(given: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(each for each in given.get(name, "").split(",") if each)


def need(given: Mapping[str, str], name: str) -> str:
    value = given.get(name)
    if not value:
        raise bad_request(f"{name}: is needed.")
    return value


def need_step(given: Mapping[str, str]) -> int:
    step = whole(given, "step")
    if step is None:
        raise bad_request("step: is needed.")
    return step
