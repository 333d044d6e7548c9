"""The program's side of a test: executes the program, then answers the calls of the tests (``examiner.py``)."""

from __future__ import annotations

import os
from typing import Any

from headwater.sandbox.inside import frames, runner
from headwater.sandbox.inside.values import decode, encode


def serve_calls(path: str, calls_from: int, answers_to: int) -> None:
    """Execute a file as ``__main__``, then answer calls until no more come."""
    runner.become_script(path)
    names = runner.new_main(path)
    status = runner.execute(runner.read(path), path, names)
    program = _Program(names)
    if status:
        program.fault = "the program ended with an error when it was loaded"
    while (call := frames.read(calls_from)) is not None:
        frames.write(answers_to, program.answer(call))
    os._exit(0)


class _Program:
    """The names of the program, and its objects that the tests know."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._kept: list[Any] = []
        self.fault = ""

    def answer(self, call: dict[str, Any]) -> dict[str, Any]:
        """Do what the tests ask for and return the value, or the exception in words."""
        try:
            if self.fault:
                raise RuntimeError(self.fault)
            target = self._resolve(call)
            if not call["calls"]:
                return {"value": encode(target, self._keep)}
            arguments = [decode(each, self._find) for each in call["arguments"]]
            named = {name: decode(each, self._find) for name, each in call["named"].items()}
            value = target(*arguments, **named)
            # The value first: it may be an iterator that reads the arguments.
            return {
                "value": encode(value, self._keep),
                "arguments": [encode(each, self._keep) for each in arguments],
            }
        except BaseException as error:  # noqa: BLE001  the tests hear about it
            return {"error": type(error).__name__, "text": _text(error)}

    def _resolve(self, call: dict[str, Any]) -> Any:
        path = call["path"]
        if call["handle"] is not None:
            target = self._kept[call["handle"]]
        elif path[0] in self._names:
            target, path = self._names[path[0]], path[1:]
        else:
            raise NameError(f"the program has no {path[0]!r}")
        for name in path:
            if isinstance(target, type) and callable(getattr(target, name, None)):
                target = target()  # a method of a class that the tests have not made an object of
            target = getattr(target, name)
        return target

    def _keep(self, value: Any) -> dict[str, Any]:
        self._kept.append(value)
        return {"type": "handle", "number": len(self._kept) - 1, "text": _text(value)}

    def _find(self, encoded: dict[str, Any]) -> Any:
        return self._kept[encoded["number"]]


def _text(value: object) -> str:
    try:
        return (str(value) if isinstance(value, BaseException) else repr(value))[:1000]
    except BaseException:  # noqa: BLE001  it is the program's own method
        return type(value).__name__
