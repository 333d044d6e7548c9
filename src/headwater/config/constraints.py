"""What a value may be, written beside its type: ``Annotated[int, AtLeast(1)]``.

The types of settings (``schema.py``) and the arguments of algorithms use the same constraints. A constraint states its
rule, and answers with the broken rule and the remedy if a value breaks it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from headwater.core.registry import is_path, known_names, nearest


class Constraint:
    @property
    def rule(self) -> str:
        """The rule in a few words, for example ``>= 0``."""
        raise AssertionError("a constraint defines its rule")

    def broken_by(self, value: Any) -> str | None:
        """The rule and the remedy if ``value`` breaks it, else None."""
        raise AssertionError("a constraint defines broken_by")


@dataclass(frozen=True)
class AtLeast(Constraint):
    minimum: float
    remedy: str = ""
    finite: bool = True
    """Whether infinity is refused."""

    @property
    def rule(self) -> str:
        return f">= {self.minimum}"

    def broken_by(self, value: Any) -> str | None:
        if value >= self.minimum and (_is_finite(value) or not self.finite):
            return None
        return _with_remedy(f"must be {self.rule}{_finite_rule(value)}", self.remedy)


@dataclass(frozen=True)
class MoreThan(Constraint):
    minimum: float
    remedy: str = ""
    finite: bool = True
    """Whether infinity is refused."""

    @property
    def rule(self) -> str:
        return f"> {self.minimum}"

    def broken_by(self, value: Any) -> str | None:
        if value > self.minimum and (_is_finite(value) or not self.finite):
            return None
        return _with_remedy(f"must be {self.rule}{_finite_rule(value)}", self.remedy)


@dataclass(frozen=True)
class LessThan(Constraint):
    maximum: float
    remedy: str = ""

    @property
    def rule(self) -> str:
        return f"< {self.maximum}"

    def broken_by(self, value: Any) -> str | None:
        return None if value < self.maximum else _with_remedy(f"must be {self.rule}", self.remedy)


@dataclass(frozen=True)
class Within(Constraint):
    """A closed interval."""

    minimum: float
    maximum: float
    remedy: str = ""

    @property
    def rule(self) -> str:
        return f"in [{self.minimum}, {self.maximum}]"

    def broken_by(self, value: Any) -> str | None:
        if self.minimum <= value <= self.maximum:
            return None
        return _with_remedy(f"must be {self.rule}", self.remedy)


@dataclass(frozen=True)
class NotBelow(Constraint):
    """At least the value of another argument, or with ``strictly`` more, unless that is None.

    ``Declared.problems`` checks it, because it needs both values.
    """

    argument: str
    strictly: bool = False

    @property
    def rule(self) -> str:
        return f"{'>' if self.strictly else '>='} {self.argument}"

    def broken_by(self, value: Any) -> str | None:
        return None

    def holds(self, value: float, other: float) -> bool:
        return value > other if self.strictly else value >= other


@dataclass(frozen=True)
class NotEmpty(Constraint):
    remedy: str = ""

    @property
    def rule(self) -> str:
        return "not empty"

    def broken_by(self, value: Any) -> str | None:
        return None if value else _with_remedy("must not be empty", self.remedy)


@dataclass(frozen=True)
class PlainName(Constraint):
    """The name of one file or folder, not a path."""

    @property
    def rule(self) -> str:
        return "a plain name without slashes"

    def broken_by(self, value: Any) -> str | None:
        if value and value not in (".", "..") and not set(value) & set("/\\\0"):
            return None
        return f"must be {self.rule}, for example 'quickstart'"


@dataclass(frozen=True)
class ServerUrl(Constraint):
    """The URL of a server, without a path."""

    @property
    def rule(self) -> str:
        return "a URL such as http://10.0.0.5:8000"

    def broken_by(self, value: Any) -> str | None:
        try:
            parts = urlsplit(value)
            is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:  # for example a port that is not a number
            is_valid = False
        if is_valid and not (parts.path.strip("/") or parts.query or parts.fragment or parts.username):
            return None
        return f"must be {self.rule}: http or https, a host and a port, and nothing after them"


@dataclass(frozen=True)
class Extension(Constraint):
    """The name of a file in a registry folder, or a ``module:Thing`` path."""

    package: str

    @property
    def rule(self) -> str:
        return f"{' | '.join(known_names(self.package))} | package.module:Thing | path/to/file.py:Thing"

    def broken_by(self, value: Any) -> str | None:
        known = known_names(self.package)
        if is_path(value) or value in known:
            return None
        return f"no such name; {nearest(value, known)}; or give your own as 'package.module:Thing'"


def _is_finite(value: float) -> bool:
    # math.isfinite cannot take an int beyond the largest float.
    return isinstance(value, int) or math.isfinite(value)


def _finite_rule(value: float) -> str:
    return "" if _is_finite(value) else " and finite"


def _with_remedy(rule: str, remedy: str) -> str:
    return f"{rule}; {remedy}" if remedy else rule
