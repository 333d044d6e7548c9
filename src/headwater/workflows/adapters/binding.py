"""Constructs foreign classes: every parameter of a constructor gets the value that its name stands for."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Mapping
from typing import Any

from headwater.core.errors import ConfigError, HeadwaterError
from headwater.core.protocols import Tokenizer
from headwater.core.registry import nearest


def constructor_parameters(made: type) -> tuple[dict[str, inspect.Parameter], bool]:
    """The parameters of a constructor, with those that ``**kwargs`` passes on to base classes, and whether the last of
    these takes any name."""
    named: dict[str, inspect.Parameter] = {}
    for each in made.__mro__:
        init = vars(each).get("__init__")
        if init is None or each is object:
            continue
        parameters = list(inspect.signature(init).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                named.setdefault(parameter.name, parameter)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return named, False
    return named, True


def bind(made: type, setting: str, arguments: Mapping[str, Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a constructor: ``arguments`` from the recipe, then ``offered`` where it takes them."""
    named, takes_any = constructor_parameters(made)
    known = [name for name in named if name not in offered]
    problems = [
        f"rollout.workflow_args.{name} = {value!r}: no such argument; {setting} takes {', '.join(known) or 'none'} "
        f"({nearest(name, known)})"
        for name, value in arguments.items()
        if name not in named and not takes_any
    ]
    bound = {**{name: value for name, value in offered.items() if name in named}, **arguments}
    problems += [
        f"rollout.workflow_args.{name}: {setting} requires it; set it"
        for name, parameter in named.items()
        if parameter.default is parameter.empty and name not in bound
    ]
    if problems:
        raise ConfigError(problems)
    return bound


def construct(made: type, setting: str, bound: Mapping[str, Any]) -> Any:
    try:
        return made(**bound)
    except HeadwaterError:
        raise
    except Exception as error:  # a user's class may raise anything
        raise HeadwaterError(
            f"{setting}: raised {type(error).__name__}: {error}; run with --debug to see where"
        ) from error


def with_token_lists(tokenizer: Tokenizer) -> Tokenizer:
    """A copy of the tokenizer whose ``apply_chat_template`` returns a list of tokens, as it did before transformers 5.

    Many classes call it in threads, so calls follow one another.
    """
    made = copy.copy(tokenizer)
    lock = threading.Lock()

    def apply_chat_template(conversation: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("tokenize", True):
            kwargs.setdefault("return_dict", False)
        with lock:
            return tokenizer.apply_chat_template(conversation, *args, **kwargs)

    setattr(made, "apply_chat_template", apply_chat_template)  # noqa: B010  an instance attribute hides the method
    return made
