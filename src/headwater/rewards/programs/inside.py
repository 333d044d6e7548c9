"""Runs inside the sandbox: one function loads a program, the other runs its tests. They are sent as source code.

``Sandbox.run_tests`` keeps the two apart: the program runs in one process and the tests in another one, to which only
plain values come from the program. The tests' process prints one line of JSON at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def load_program(prompt: str, code: str, entry: str) -> None:
    """Run a program as the module ``solution``. A response may be complete, or continue the code of the prompt."""
    import ast
    import sys

    def parsed(source: str) -> ast.Module | None:
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None

    def defines(tree: ast.Module, name: str) -> bool:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        return any(isinstance(each, kinds) and each.name == name for each in tree.body)

    names = sys.modules["__main__"].__dict__
    # Code under `if __name__ == "__main__"` reads input and prints: it is not what is tested.
    names["__name__"] = "solution"
    sys.modules["solution"] = sys.modules["__main__"]
    tree = parsed(code)
    if prompt and (tree is None or not defines(tree, entry.partition("(")[0].partition(".")[0])):
        exec(compile(prompt + code, "solution.py", "exec"), names)
        return
    if parsed(prompt) is not None:
        exec(compile(prompt, "prompt.py", "exec"), names)
    exec(compile(code, "solution.py", "exec"), names)


def run_checks(job: dict[str, Any], solution: Any) -> list[dict[str, Any]]:
    """Run each test, or call the function with each list of arguments. Returns what came of it.

    Names that the data set defines, built-in functions and modules of the standard library are not taken from the
    program: it must not replace what judges it.
    """
    import ast
    import builtins
    import importlib
    import random
    import sys
    import types

    longest_text = 300
    module = types.ModuleType("tests")
    sys.modules["tests"] = module
    names = module.__dict__

    def text(error: BaseException) -> str:
        return f"{type(error).__name__}: {error}"[:longest_text].rstrip(": ")

    def failed(error: Exception) -> dict[str, Any]:
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        # The sandbox refuses an argument that it cannot send. The text proves nothing: the program chooses that.
        if place is not None and place.tb_frame.f_code.co_name == "_refuse":
            return {"cannot_send": str(error)}
        return {"is_wrong": isinstance(error, AssertionError), "error": text(error)}

    def find(entry: str) -> Any:
        """A function, a method of the class Solution, or an expression such as ``Solution().f``."""
        name = entry.partition("(")[0].partition(".")[0]
        for owner in (name, "Solution"):
            try:
                value = solution.value(owner)
            except NameError:
                continue
            if owner != name:
                return getattr(value(), entry)
            return value if name == entry else eval(entry, {name: value})
        raise NameError(f"name {name!r} is not defined")

    def value_of(arguments: list[Any]) -> dict[str, Any]:
        try:
            return {"value": find(job["entry"])(*arguments)}
        except Exception as error:  # noqa: BLE001  the program's error is the result of the call
            return failed(error)

    def run(test: str, number: int) -> dict[str, Any]:
        try:
            exec(compile(test, f"test{number}.py", "exec"), names)
        except Exception as error:  # noqa: BLE001  a test fails by raising
            return failed(error)
        return {}

    def bind(sources: list[str]) -> None:
        used = {node.id for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
        missing = used - names.keys() - vars(builtins).keys()
        for name in sorted(missing):
            if name in sys.stdlib_module_names:
                names[name] = importlib.import_module(name)
                continue
            try:
                names[name] = solution.value(name)
            except NameError:
                continue  # the tests define it
        if job["entry"]:
            names.update({"candidate": find(job["entry"]), job["entry"]: find(job["entry"])})

    def results() -> Iterator[dict[str, Any]]:
        if "calls" in job:
            yield from map(value_of, job["calls"])
            return
        random.seed(0)
        try:
            context = ast.parse(job["prompt"])
        except SyntaxError:
            context = ast.parse("")
        exec(compile(context, "prompt.py", "exec"), names)
        bind([job["setup"], *job["tests"]])
        exec(compile(job["setup"], "setup.py", "exec"), names)
        for number, test in enumerate(job["tests"]):
            yield run(test, number)

    found: list[dict[str, Any]] = []
    try:
        for result in results():
            found.append(result)
            if "error" in result and job["stops_early"]:
                break
    except Exception as error:  # noqa: BLE001  the program does not work, or the tests do not
        found.append(failed(error))
    return found
