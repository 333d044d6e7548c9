"""Runs inside the sandbox: one function loads a program, another one runs its tests. The file is sent as a whole.

``Sandbox.run_tests`` keeps the two apart: the program runs in one process and the tests in another one, to which only
plain values come from the program. The tests' process prints one line of JSON at its end.

A prompt may define classes, such as LeetCode's ListNode. Both processes have them, so their objects are sent as the
values of their attributes, and the tests get objects of the class in their process.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

LONGEST_TEXT = 300
"""Longest message about a failed test."""


def pack(value: Any, classes: dict[str, type]) -> dict[str, Any]:
    """A value as plain data. Objects of ``classes`` are listed with their attributes and referred to by number."""
    names = {each: name for name, each in classes.items()}
    objects: list[Any] = []
    numbers: dict[int, int] = {}

    def packed(each: Any) -> list[Any]:
        if type(each) in names:
            if id(each) not in numbers:
                numbers[id(each)] = len(objects)
                objects.append(each)
            return ["object", numbers[id(each)]]
        if type(each) in (list, tuple):
            return [type(each).__name__, [packed(item) for item in each]]
        if type(each) is dict:
            return ["dict", [[packed(key), packed(item)] for key, item in each.items()]]
        return ["value", each]

    root = packed(value)
    # The list of objects grows while it is read.
    attributes = [[names[type(each)], {name: packed(item) for name, item in vars(each).items()}] for each in objects]
    return {"root": root, "objects": attributes}


def unpack(data: dict[str, Any], classes: dict[str, type]) -> Any:
    """The value that ``pack`` packed, with objects of these classes."""
    objects: list[Any] = [object.__new__(classes[name]) for name, _ in data["objects"]]

    def unpacked(each: list[Any]) -> Any:
        kind, content = each
        if kind == "object":
            return objects[content]
        if kind == "dict":
            return {unpacked(key): unpacked(item) for key, item in content}
        if kind in ("list", "tuple"):
            items = [unpacked(item) for item in content]
            return items if kind == "list" else tuple(items)
        return content

    for made, (_, attributes) in zip(objects, data["objects"], strict=True):
        vars(made).update({name: unpacked(item) for name, item in attributes.items()})
    return unpacked(data["root"])


def classes_of(names: dict[str, Any]) -> dict[str, type]:
    """The classes that a prompt defines."""
    own = names["__name__"]
    found = {name: value for name, value in names.items() if isinstance(value, type) and value.__module__ == own}
    found.pop("Solution", None)
    return found


def parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def owner_of(entry: str) -> str:
    """The name that an expression such as ``f`` or ``Solution().f`` begins with."""
    return entry.partition("(")[0].partition(".")[0]


def load_program(prompt: str, code: str, entry: str) -> None:
    """Run a program as the module ``solution``. A response may be complete, or continue the code of the prompt."""
    names = sys.modules["__main__"].__dict__
    # Code under `if __name__ == "__main__"` reads input and prints: it is not what is tested.
    names["__name__"] = "solution"
    sys.modules["solution"] = sys.modules["__main__"]
    tree = parsed(code)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    is_complete = tree is not None and owner_of(entry) in {each.name for each in tree.body if isinstance(each, kinds)}
    if prompt and not is_complete:
        exec(compile(prompt + code, "solution.py", "exec"), names)
        return
    if parsed(prompt) is not None:
        exec(compile(prompt, "prompt.py", "exec"), names)
    shared = list(classes_of(names))

    def call_with_objects(packed: dict[str, Any]) -> dict[str, Any]:
        classes = {name: names[name] for name in shared}
        arguments, named = unpack(packed, classes)
        value = eval(entry, names)(*arguments, **named)
        return pack([value, arguments], classes)

    names["call_with_objects"] = call_with_objects
    exec(compile(code, "solution.py", "exec"), names)


class Checks:
    """Tests of a program, or calls of one of its functions.

    Names that the data set defines, built-in functions and modules of the standard library are not taken from the
    program: it must not replace what judges it.
    """

    def __init__(self, job: dict[str, Any], solution: Any) -> None:
        self._job = job
        self._solution = solution
        module = types.ModuleType("tests")
        sys.modules["tests"] = module
        self._names = module.__dict__

    def run(self) -> list[dict[str, Any]]:
        """What came of each test or call; with ``stops_early``, up to the first error."""
        found: list[dict[str, Any]] = []
        try:
            for result in self._calls() if "calls" in self._job else self._tests():
                found.append(result)
                if "error" in result and self._job["stops_early"]:
                    break
        except Exception as error:  # noqa: BLE001  the program does not work, or the tests do not
            found.append(_failed(error))
        return found

    def _calls(self) -> Iterator[dict[str, Any]]:
        for arguments in self._job["calls"]:
            try:
                yield {"value": self._find(self._job["entry"])(*arguments)}
            except Exception as error:  # noqa: BLE001  the program's error is the result of the call
                yield _failed(error)

    def _tests(self) -> Iterator[dict[str, Any]]:
        random.seed(0)
        exec(compile(parsed(self._job["prompt"]) or "", "prompt.py", "exec"), self._names)
        self._bind([self._job["setup"], *self._job["tests"]])
        exec(compile(self._job["setup"], "setup.py", "exec"), self._names)
        for number, test in enumerate(self._job["tests"]):
            try:
                exec(compile(test, f"test{number}.py", "exec"), self._names)
                yield {}
            except Exception as error:  # noqa: BLE001  a test fails by raising
                yield _failed(error)

    def _bind(self, sources: list[str]) -> None:
        """Give the tests the names that they use and do not define."""
        shared = classes_of(self._names)
        used = {node.id for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
        for name in sorted(used - self._names.keys() - vars(builtins).keys()):
            if name in sys.stdlib_module_names:
                self._names[name] = importlib.import_module(name)
                continue
            try:
                self._names[name] = self._solution.value(name)
            except NameError:
                continue  # the tests define it
        entry = self._job["entry"]
        if entry:
            candidate = self._sharing(shared) if shared else self._find(entry)
            self._names.update({"candidate": candidate, entry: candidate})

    def _find(self, entry: str) -> Any:
        """A function, a method of the class Solution, or an expression such as ``Solution().f``."""
        name = owner_of(entry)
        for owner in (name, "Solution"):
            try:
                value = self._solution.value(owner)
            except NameError:
                continue
            if owner != name:
                return getattr(value(), entry)
            return value if name == entry else eval(entry, {name: value})
        raise NameError(f"name {name!r} is not defined")

    def _sharing(self, shared: dict[str, type]) -> Any:
        """The function, with objects of shared classes as arguments and results."""

        def candidate(*arguments: Any, **named: Any) -> Any:
            packed = pack([list(arguments), named], shared)
            value, after = unpack(self._solution.call_with_objects(packed), shared)
            for before, now in zip(arguments, after, strict=True):
                if type(before) in shared.values():
                    vars(before).update(vars(now))
                elif type(before) is list:
                    before[:] = now
            return value

        return candidate


def _failed(error: Exception) -> dict[str, Any]:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    # The sandbox refuses an argument that it cannot send. The text proves nothing: the program may have chosen it.
    if place is not None and place.tb_frame.f_code.co_name == "_refuse":
        return {"cannot_send": str(error)}
    text = f"{type(error).__name__}: {error}"[:LONGEST_TEXT].rstrip(": ")
    return {"is_wrong": isinstance(error, AssertionError), "error": text}
