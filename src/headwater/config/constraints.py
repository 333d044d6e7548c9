"""What a config value may be, written beside its type: ``Annotated[int, AtLeast(1)]``.

A constraint answers with the rule that was broken and the remedy, or with nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headwater.core.registry import is_path, known_names, nearest


class Constraint:
    def broken_by(self, value: Any) -> str | None:
        """The rule and remedy if ``value`` breaks it, else None."""
        raise AssertionError("a constraint defines broken_by")


@dataclass(frozen=True)
class AtLeast(Constraint):
    minimum: float
    remedy: str = ""

    def broken_by(self, value: Any) -> str | None:
        if _is_finite(value) and value >= self.minimum:
            return None
        return _with_remedy(f"must be >= {self.minimum}{_finite_rule(value)}", self.remedy)


@dataclass(frozen=True)
class MoreThan(Constraint):
    minimum: float
    remedy: str = ""

    def broken_by(self, value: Any) -> str | None:
        if _is_finite(value) and value > self.minimum:
            return None
        return _with_remedy(f"must be > {self.minimum}{_finite_rule(value)}", self.remedy)


@dataclass(frozen=True)
class Within(Constraint):
    """A closed interval."""

    minimum: float
    maximum: float
    remedy: str = ""

    def broken_by(self, value: Any) -> str | None:
        if self.minimum <= value <= self.maximum:
            return None
        return _with_remedy(f"must be in [{self.minimum}, {self.maximum}]", self.remedy)


@dataclass(frozen=True)
class NotEmpty(Constraint):
    remedy: str = ""

    def broken_by(self, value: Any) -> str | None:
        return None if value else _with_remedy("must not be empty", self.remedy)


@dataclass(frozen=True)
class PlainName(Constraint):
    """The name of one file or folder, not a path."""

    def broken_by(self, value: Any) -> str | None:
        if value and value not in (".", "..") and not set(value) & set("/\\\0"):
            return None
        return "must be a plain name without slashes, for example 'quickstart'"


@dataclass(frozen=True)
class Extension(Constraint):
    """The name of a file in a registry folder, or a ``module:Thing`` path."""

    package: str

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
