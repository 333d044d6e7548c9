"""The tests' side: executes tests whose calls of the program go to another process."""

from __future__ import annotations

import builtins
import contextlib
import symtable
from collections.abc import Sequence
from typing import Any

from headwater.sandbox.inside import frames, runner
from headwater.sandbox.inside.values import Handle, decode, encode

_PATH = "<tests>"


class SolutionError(Exception):
    """The program raised an exception of its own class, or has ended."""

    __module__ = "tests"


def run_tests(source: str, calls_to: int, answers_from: int) -> None:
    """Execute tests and end this process: with status 0 only if the tests came to their end without an exception."""
    runner.become_script(_PATH)
    solution = Solution(calls_to, answers_from)
    main = runner.new_main(_PATH)
    main |= {name: getattr(solution, name) for name in free_names(source)}
    main |= {"solution": solution, "SolutionError": SolutionError}
    status = 1
    try:
        status = runner.execute(source, _PATH, main)
    finally:
        runner.end(status)


def free_names(source: str) -> set[str]:
    """Global names that code uses, but neither defines nor imports. Python's built-in names are never among them."""
    try:
        module = symtable.symtable(source, _PATH, "exec")
    except (SyntaxError, ValueError):
        return set()  # executing it will say what is wrong
    bound = {each.get_name() for each in module.get_symbols() if each.is_assigned() or each.is_imported()}
    used = {each.get_name() for each in module.get_symbols() if each.is_referenced()}
    waiting = list(module.get_children())
    while waiting:
        table = waiting.pop()
        used |= {each.get_name() for each in table.get_symbols() if each.is_global() and each.is_referenced()}
        bound |= {each.get_name() for each in table.get_symbols() if each.is_declared_global() and each.is_assigned()}
        waiting += table.get_children()
    return used - bound - set(dir(builtins)) - {"__name__", "__file__"}


class Remote:
    """A function, class or object of the program. Calls and attributes are answered by the program.

    Comparisons are not: it is equal only to itself, so that no method of the program decides a test.
    """

    def __init__(self, solution: Solution, path: tuple[str, ...], handle: Handle | None = None) -> None:
        self._solution = solution
        self._path = path
        self._handle = handle

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._solution._ask(self, arguments, named, calls=True)

    def __getattr__(self, name: str) -> Remote:
        if name.startswith("__"):
            raise AttributeError(name)
        return Remote(self._solution, (*self._path, name), self._handle)

    def __repr__(self) -> str:
        return self._handle.text if self._handle is not None else f"<{'.'.join(self._path)} of the program>"


class Solution:
    """The program: its names are attributes."""

    def __init__(self, calls_to: int, answers_from: int) -> None:
        self._calls_to = calls_to
        self._answers_from = answers_from

    def __getattr__(self, name: str) -> Remote:
        return Remote(self, (name,))

    def value(self, name: str) -> Any:
        """The value of a global name of the program."""
        return self._ask(Remote(self, (name,)), (), {}, calls=False)

    def _ask(self, target: Remote, arguments: Sequence[Any], named: dict[str, Any], calls: bool) -> Any:
        sent = [encode(each, _refuse) for each in arguments]
        question = {
            "path": list(target._path),
            "handle": target._handle.number if target._handle is not None else None,
            "calls": calls,
            "arguments": sent,
            "named": {name: encode(each, _refuse) for name, each in named.items()},
        }
        try:
            frames.write(self._calls_to, question)
            answer = frames.read(self._answers_from)
        except (OSError, frames.BrokenFrame, RecursionError) as error:
            raise SolutionError(f"the program gave no answer: {error}") from None
        if answer is None:
            raise SolutionError("the program ended during a call")
        return self._take(answer, arguments, sent)

    def _take(self, answer: dict[str, Any], arguments: Sequence[Any], sent: list[Any]) -> Any:
        if "error" in answer:
            raise _exception(str(answer["error"]), str(answer.get("text", "")))
        try:
            value = decode(answer["value"], self._find)
            if "arguments" in answer:
                self._change(arguments, sent, answer["arguments"])
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise SolutionError(f"the program gave an answer that cannot be read: {error}") from None
        return value

    def _change(self, arguments: Sequence[Any], sent: list[Any], changed: list[Any]) -> None:
        """Change the arguments as the program has changed its copies of them."""
        for ours, before, after in zip(arguments, sent, changed, strict=True):
            if before != after and isinstance(ours, (list, dict, set)):
                value = decode(after, self._find)
                if type(value) is not type(ours):
                    raise TypeError(f"a {type(ours).__name__} became a {type(value).__name__}")
                ours.clear()
                ours.extend(value) if isinstance(ours, list) else ours.update(value)

    def _find(self, encoded: dict[str, Any]) -> Remote:
        return Remote(self, (), Handle(int(encoded["number"]), str(encoded["text"])))


def _refuse(value: Any) -> Any:
    if isinstance(value, Remote) and value._handle is not None and not value._path:
        return {"type": "handle", "number": value._handle.number, "text": ""}
    raise TypeError(f"{type(value).__name__}: only plain values and objects of the program can be passed to it")


def _exception(name: str, text: str) -> Exception:
    """An exception of Python's own with this name. One that would end the tests silently is none."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # UnicodeDecodeError wants more
            return kind(text)
    return SolutionError(f"{name}: {text}")
