"""Checks and binds the configured arguments of an extension."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from headwater.config.constraints import NotBelow
from headwater.config.convert import WrongValue, convert_value
from headwater.config.schema import AlgorithmConfig
from headwater.core.errors import ConfigError, HeadwaterError, WrongArgument
from headwater.core.registry import Registry, blaming, is_path

F = TypeVar("F", bound=Callable[..., Any])

_UNCHECKED = "__unchecked__"


def broken_rules(
    hints: Mapping[str, Any], defaults: Mapping[str, Any], arguments: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Each argument whose value breaks a rule of its type, or of two arguments together, with the rule."""
    for name, value in arguments.items():
        try:
            convert_value(hints.get(name, Any), value)
        except WrongValue as error:
            yield name, str(error)
    values = {**defaults, **arguments}
    for name, hint in hints.items():
        for rule in _relations(hint):
            value, other = values.get(name), values.get(rule.argument)
            if not isinstance(value, (int, float)) or not isinstance(other, (int, float)) or rule.holds(value, other):
                continue
            if name in arguments:
                yield name, f"must be {rule.rule} = {other}; raise it, or lower {rule.argument}"
            elif rule.argument in arguments:
                sign = "<" if rule.strictly else "<="
                yield rule.argument, f"must be {sign} {name} = {value}; lower it, or raise {name}"


def checked(function: F) -> F:
    """The function with its keyword-only arguments checked at every call, also from Python code without a recipe."""
    if not inspect.isfunction(function):
        return function
    rules: dict[str, Any] = {}

    @wraps(function)
    def call(*args: Any, **arguments: Any) -> Any:
        if arguments:
            if not rules:
                rules.update(get_type_hints(function, include_extras=True))
            problems = [
                f"{function.__name__}: {name} = {arguments[name]!r}: {reason}"
                for name, reason in broken_rules(rules, function.__kwdefaults__ or {}, arguments)
            ]
            if problems:
                raise WrongArgument(problems)
        return function(*args, **arguments)

    setattr(call, _UNCHECKED, function)
    return call  # type: ignore[return-value]


def with_arguments(registry: Registry, name: str, arguments: Mapping[str, Any], key: str) -> Callable[..., Any]:
    """The extension with its configured keyword arguments bound. An argument that it does not take is an error."""
    setting = f"{key.partition('_args')[0]} = {name}"
    with blaming(setting):
        thing = registry.resolve(name)
    if not callable(thing):
        raise ConfigError([f"{setting}: not callable; name a function or a class"])
    hints = get_type_hints(thing.__init__ if inspect.isclass(thing) else thing, include_extras=True)
    parameters = inspect.signature(thing).parameters.values()
    known = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    takes = ", ".join(known) or "no arguments"
    problems = [
        f"{key}.{argument} = {value!r}: no such argument; {registry.kind} {name!r} takes {takes}"
        for argument, value in arguments.items()
        if argument not in known and not takes_any
    ]
    given = {argument: value for argument, value in arguments.items() if argument in known}
    wanted = {argument: hints.get(argument, Any) for argument in known}
    problems += [
        f"{key}.{argument} = {given[argument]!r}: {reason}" for argument, reason in broken_rules(wanted, known, given)
    ]
    if problems:
        raise ConfigError(problems)
    values = {**arguments, **{argument: convert_value(wanted[argument], value) for argument, value in given.items()}}
    # The values cannot change any more, so they are not checked again at every call.
    thing = getattr(thing, _UNCHECKED, thing)
    if not is_path(name):
        return partial(thing, **values)

    def call(*args: Any) -> Any:
        try:
            return thing(*args, **values)
        except HeadwaterError:
            raise
        except Exception as error:  # a user's extension may raise anything
            raise HeadwaterError(
                f"{setting}: raised {type(error).__name__}: {error}; run with --debug to see where"
            ) from error

    return call


@dataclass(frozen=True)
class ChosenCorrection:
    """One entry of ``algorithm.corrections`` with its arguments."""

    name: str
    label: str
    """Its name in metrics: that of the function, with a number if several corrections have the same name."""
    key: str
    """The key of its arguments."""
    arguments: Any
    """A mapping, unless the recipe is wrong."""


def chosen_corrections(algorithm: AlgorithmConfig) -> list[ChosenCorrection]:
    """The entries of ``algorithm.corrections``. If a name is listed several times, its arguments are a list."""
    labels = [name.rpartition(":")[2] for name in algorithm.corrections]
    repeated = {label for label, count in Counter(labels).items() if count > 1}
    names_seen: Counter[str] = Counter()
    labels_seen: Counter[str] = Counter()
    chosen = []
    for name, label in zip(algorithm.corrections, labels, strict=True):
        key, arguments, place = f"algorithm.corrections_args.{name}", algorithm.corrections_args.get(name, {}), ""
        if isinstance(arguments, Sequence) and not isinstance(arguments, str):
            at = names_seen[name]
            arguments, place = (arguments[at] if at < len(arguments) else {}), f"[{at}]"
        names_seen[name] += 1
        labels_seen[label] += 1
        number = f"_{labels_seen[label]}" if label in repeated else ""
        chosen.append(ChosenCorrection(name, label + number, key + place, arguments))
    return chosen


def _relations(hint: Any) -> list[NotBelow]:
    if get_origin(hint) is Union:
        return [rule for option in get_args(hint) for rule in _relations(option)]
    return [part for part in get_args(hint) if isinstance(part, NotBelow)] if get_origin(hint) is Annotated else []
