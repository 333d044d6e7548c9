"""JSON request bodies: parsing them, and reading their fields with type checks.

    fields = Fields({"n": 2, "tempurature": 1})
    fields.integer("n", 1, minimum=1)          # 2
    fields.number("temperature", 1.0)          # 1.0
    fields.done()                              # ApiError: tempurature: no such field; did you mean temperature?

A null counts as an absent field, because clients send null for arguments that were not given.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from headwater.serving.errors import ApiError, cut, shown, wrong

T = TypeVar("T", bound=str)

MAX_NAME_CHARACTERS = 512
"""The longest name of a request. Every sample's id and reply repeats it."""
MAX_FIELDS = 256
"""The largest number of fields of an object whose fields have fixed names."""

_KINDS = {list: "list", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


class Fields:
    """The fields of one JSON object. Each is read once; ``done`` refuses the fields that were not read."""

    def __init__(self, values: Mapping[str, Any], owner: str = "", *, most: int = MAX_FIELDS) -> None:
        if len(values) > most:
            what = owner or "the body"
            raise ApiError(f"{what}: has {len(values)} fields, and the limit is {most}", param=owner or None)
        self._values = dict(values)
        self._prefix = f"{owner}." if owner else ""
        self._known: list[str] = []

    def name(self, field: str) -> str:
        """The field's full name for messages, for example ``sampling_params.top_k``."""
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
        """A finite number in [minimum, maximum], or in (minimum, maximum] if ``open_minimum``."""
        value = self.raw(field)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise wrong(self.name(field), value, "must be a number")
        # Compare before converting: an integer may be larger than any float.
        if value > maximum:
            raise wrong(self.name(field), value, f"must be <= {maximum:g}")
        if value < minimum or (open_minimum and value == minimum):
            raise wrong(self.name(field), value, f"must be {'>' if open_minimum else '>='} {minimum:g}")
        try:
            number = float(value)
        except OverflowError:
            raise wrong(self.name(field), value, "is too large") from None
        if not math.isfinite(number):  # for example 1e999
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
        """Accept an unsupported field only if its value has no effect."""
        value = self.raw(field)
        if value is None or any(value == each and type(value) is type(each) for each in neutral):
            return
        # 0 and 0.0 are equal here; 1 and true are not.
        if isinstance(value, int | float) and not isinstance(value, bool) and value in _numbers(neutral):
            return
        raise ApiError(
            f"{self.name(field)} = {shown(value)}: not supported: {reason}", param=self.name(field), code="unsupported"
        )

    def ignored(self, *fields: str) -> None:
        """Accept fields that do not change the reply, such as labels."""
        for field in fields:
            self.raw(field)

    def unread(self) -> tuple[str, ...]:
        """The fields that were not read and have a value."""
        return tuple(cut(name) for name, value in self._values.items() if value is not None)

    def done(self) -> None:
        """Refuse unknown fields."""
        if not self._values:
            return
        # Cut, because the time to find a close match grows with the length of the name.
        field = cut(next(iter(self._values)))
        close = difflib.get_close_matches(field, self._known, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]}?" if close else f"known fields: {', '.join(sorted(self._known))}"
        raise ApiError(f"{self.name(field)}: no such field; {hint}", param=self.name(field), code="unknown_field")


def is_integer(value: Any) -> bool:
    # bool is a subclass of int.
    return isinstance(value, int) and not isinstance(value, bool)


def checked_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise wrong(name, value, "must be text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong(name, value, "contains half of a surrogate pair, which is not a character; remove it") from None
    return value


def check_name(name: str, field: str) -> None:
    if len(name) > MAX_NAME_CHARACTERS:
        raise wrong(field, name, f"has {len(name)} characters, and the limit is {MAX_NAME_CHARACTERS}; shorten it")


def checked_integers(values: Iterable[Any], name: str) -> tuple[int, ...]:
    checked = tuple(values)
    for place, value in enumerate(checked):
        if not is_integer(value):
            raise wrong(f"{name}[{place}]", value, "must be a whole number")
    return checked


def _numbers(values: Sequence[Any]) -> list[float]:
    return [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]


def read_object(body: bytes) -> dict[str, Any]:
    """Parse ``body`` as a JSON object. An empty body is an empty object."""
    if not body.strip():
        return {}
    try:
        value = _load(body)
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8: {error}; send JSON in UTF-8", code="bad_json") from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(f"the body is not valid JSON: {reason}", code="bad_json") from error
    if not isinstance(value, dict):
        raise ApiError(f"the body is a JSON {_KINDS.get(type(value), 'value')}; send an object", code="bad_json")
    return value


def write_json(value: Any) -> bytes:
    # NaN is not valid JSON. A NaN log-prob means that the model is broken, so raise instead of sending it.
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _load(body: bytes) -> Any:
    """As ``json.loads``, but refuse NaN and Infinity, which Python accepts although they are not JSON."""
    constants: list[_Constant] = []

    def note(name: str) -> _Constant:
        constants.append(_Constant(name))
        return constants[-1]

    value = json.loads(body, parse_constant=note)
    if constants:
        place = _place_of(constants[0], value) or "the body"
        raise ApiError(
            f"{place} = {constants[0].name}: is not a JSON number; send a finite number, or omit the field",
            param=place,
            code="bad_json",
        )
    return value


@dataclass(frozen=True, eq=False)
class _Constant:
    name: str


def _place_of(wanted: _Constant, value: Any, place: str = "") -> str | None:
    """The path of ``wanted`` within ``value``, for example ``sampling_params.stop[2]``."""
    if value is wanted:
        return place
    parts: Iterator[tuple[str, Any]] = iter(())
    if isinstance(value, dict):
        parts = ((f"{place}.{name}" if place else name, each) for name, each in value.items())
    elif isinstance(value, list):
        parts = ((f"{place}[{number}]", each) for number, each in enumerate(value))
    return next((found for name, each in parts if (found := _place_of(wanted, each, name)) is not None), None)
