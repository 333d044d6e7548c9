"""Binds the configured arguments of an extension."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_type_hints

from headwater.config.convert import WrongValue, convert_value
from headwater.core.errors import ConfigError, HeadwaterError
from headwater.core.registry import Registry, blaming, is_path


def with_arguments(registry: Registry, name: str, arguments: Mapping[str, Any], key: str) -> Callable[..., Any]:
    """The extension with its configured keyword arguments bound. An argument that it does not take is an error."""
    setting = f"{key.partition('_args')[0]} = {name}"
    with blaming(setting):
        thing = registry.resolve(name)
    if not callable(thing):
        raise ConfigError([f"{setting}: not callable; name a function or a class"])
    hints = get_type_hints(thing.__init__ if inspect.isclass(thing) else thing, include_extras=True)
    parameters = inspect.signature(thing).parameters.values()
    known = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    problems, values = [], {}
    for argument, value in arguments.items():
        if argument in known:
            try:
                values[argument] = convert_value(hints.get(argument, Any), value)
            except WrongValue as error:
                problems.append(f"{key}.{argument} = {value!r}: {error}")
        elif takes_any:
            values[argument] = value
        else:
            takes = ", ".join(known) or "no arguments"
            problems.append(f"{key}.{argument} = {value!r}: no such argument; {registry.kind} {name!r} takes {takes}")
    if problems:
        raise ConfigError(problems)
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
