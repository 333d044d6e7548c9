"""Typed reading of a JSON object that a client sent.

    fields = Fields({"n": 2, "tempurature": 1})
    fields.integer("n", 1, minimum=1)          # 2
    fields.number("temperature", 1.0)          # 1.0
    fields.done()                              # ApiError: tempurature: no such field; did you mean temperature?

A null is as good as an absent field, as clients send it for arguments that were not given.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from headwater.serving.errors import ApiError, shown, wrong

T = TypeVar("T", bound=str)


class Fields:
    """Takes one field after the other; what is left at the end is unknown."""

    def __init__(self, values: Mapping[str, Any], owner: str = "") -> None:
        self._values = dict(values)
        self._prefix = f"{owner}." if owner else ""
        self._known: list[str] = []

    def name(self, field: str) -> str:
        """The field as messages call it: ``sampling_params.top_k``."""
        return self._prefix + field

    def raw(self, field: str) -> Any:
        self._known.append(field)
        return self._values.pop(field, None)

    def integer(self, field: str, default: int, *, minimum: int | None = None, maximum: int | None = None) -> int:
        value = self.optional_integer(field, minimum=minimum, maximum=maximum)
        return default if value is None else value

    def optional_integer(self, field: str, *, minimum: int | None = None, maximum: int | None = None) -> int | None:
        value = self.raw(field)
        if value is None:
            return None
        if not is_integer(value):
            raise wrong(self.name(field), value, "must be a whole number")
        if minimum is not None and value < minimum:
            raise wrong(self.name(field), value, f"must be >= {minimum}")
        if maximum is not None and value > maximum:
            raise wrong(self.name(field), value, f"must be <= {maximum}")
        return int(value)

    def number(
        self,
        field: str,
        default: float,
        *,
        minimum: float = -math.inf,
        maximum: float = math.inf,
        open_minimum: bool = False,
    ) -> float:
        """A finite number in [minimum, maximum]; without its lower end where ``open_minimum``."""
        value = self.raw(field)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise wrong(self.name(field), value, "must be a number")
        # An integer beyond the largest float compares well and converts badly, so it is compared first.
        if value > maximum:
            raise wrong(self.name(field), value, f"must be <= {maximum:g}")
        if value < minimum or (open_minimum and value == minimum):
            raise wrong(self.name(field), value, f"must be {'>' if open_minimum else '>='} {minimum:g}")
        try:
            number = float(value)
        except OverflowError:
            raise wrong(self.name(field), value, "is too large") from None
        if not math.isfinite(number):  # JSON can write it: 1e999
            raise wrong(self.name(field), value, "must be a finite number")
        return number

    def flag(self, field: str, default: bool) -> bool:
        value = self.raw(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(self.name(field), value, "must be true or false")
        return value

    def text(self, field: str) -> str | None:
        value = self.raw(field)
        return None if value is None else checked_text(value, self.name(field))

    def choice(self, field: str, choices: Sequence[T]) -> T | None:
        value = self.raw(field)
        if value is None:
            return None
        for choice in choices:
            if choice == value:
                return choice
        raise wrong(self.name(field), value, f"must be one of {', '.join(choices)}")

    def texts(self, field: str) -> tuple[str, ...]:
        """A string or a list of strings."""
        value = self.raw(field)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        return tuple(checked_text(item, f"{self.name(field)}[{place}]") for place, item in enumerate(items))

    def integers(self, field: str) -> tuple[int, ...]:
        value = self.raw(field)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise wrong(self.name(field), value, "must be a list of whole numbers")
        return checked_integers(value, self.name(field))

    def mapping(self, field: str) -> dict[str, Any] | None:
        value = self.raw(field)
        if value is None or isinstance(value, dict):
            return value
        raise wrong(self.name(field), value, "must be an object")

    def neutral(self, field: str, neutral: Sequence[Any], reason: str) -> None:
        """Accept a field we do not serve where its value asks for nothing."""
        value = self.raw(field)
        if value is None or any(value == each and type(value) is type(each) for each in neutral):
            return
        # 0 and 0.0 ask for the same, 1 and true do not.
        if isinstance(value, int | float) and not isinstance(value, bool) and value in _numbers(neutral):
            return
        raise ApiError(
            f"{self.name(field)} = {shown(value)}: not supported: {reason}", param=self.name(field), code="unsupported"
        )

    def ignored(self, *fields: str) -> None:
        """Fields that only label a request and so change nothing about its answer."""
        for field in fields:
            self.raw(field)

    def done(self) -> None:
        """Refuse whatever was not taken."""
        if not self._values:
            return
        field = next(iter(self._values))
        close = difflib.get_close_matches(field, self._known, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]}?" if close else f"known fields: {', '.join(sorted(self._known))}"
        raise ApiError(f"{self.name(field)}: no such field; {hint}", param=self.name(field), code="unknown_field")


def is_integer(value: Any) -> bool:
    # bool is a subclass of int, and true is no number.
    return isinstance(value, int) and not isinstance(value, bool)


def checked_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise wrong(name, value, "must be text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong(name, value, "holds half of a surrogate pair, which is no character; remove it") from None
    return value


def checked_integers(values: Iterable[Any], name: str) -> tuple[int, ...]:
    checked = tuple(values)
    for place, value in enumerate(checked):
        if not is_integer(value):
            raise wrong(f"{name}[{place}]", value, "must be a whole number")
    return checked


def _numbers(values: Sequence[Any]) -> list[float]:
    return [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
