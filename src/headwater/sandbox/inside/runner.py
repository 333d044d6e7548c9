"""Executes Python code as the interpreter would execute a script."""

from __future__ import annotations

import ast
import atexit
import builtins
import contextlib
import gc
import io
import os
import signal
import sys
import threading
import traceback
import types
from functools import cache
from typing import Any

from headwater.sandbox.inside import frames

_OWN_PACKAGE = "headwater"


def run_program(path: str) -> None:
    """Execute a file as ``__main__`` and end this process with the exit status that the interpreter would have."""
    become_script(path)
    status = 1
    try:
        status = execute(read(path), path, new_main(path))
    finally:
        end(status)


def run_session(link: int, path: str) -> None:
    """Execute one piece of code after the other in the same ``__main__``, until no more come.

    The code itself can reach the connection too. What it writes there is only ever taken for its own result.
    """
    become_script(path, line_buffering=True)
    names = new_main(path)
    while True:
        try:
            message = frames.read(link)
        except KeyboardInterrupt:  # the time limit came just after the end of the previous piece
            continue
        if message is None:
            end(0)
            return
        status = execute(message["code"], path, names, shows_value=True)
        _flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        frames.write(link, {"number": message["number"], "exit_code": status})
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def become_script(path: str, line_buffering: bool = False) -> None:
    """Make the interpreter look as if it had just started. Modules beside a script can be imported."""
    sys.argv = [path]
    if folder := os.path.dirname(path):
        sys.path.insert(0, folder)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for name, descriptor, errors in (("stdout", 1, "surrogateescape"), ("stderr", 2, "backslashreplace")):
        stream = io.TextIOWrapper(
            open(descriptor, "wb", closefd=False),  # noqa: SIM115
            encoding="utf-8",
            errors=errors,
            line_buffering=line_buffering or descriptor == 2,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for name in _own_modules():
        del sys.modules[name]
    gc.enable()


@cache
def _own_modules() -> tuple[str, ...]:
    """Modules of this folder. The zygote finds them once: looking at all names would copy many pages."""
    return tuple(name for name in sys.modules if name.partition(".")[0] == _OWN_PACKAGE)


def warm_up() -> None:
    """In the zygote: compute what programs would else compute for themselves."""
    _own_modules()


def new_main(path: str) -> dict[str, Any]:
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    return main.__dict__


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def execute(source: str | bytes, path: str, names: dict[str, Any], shows_value: bool = False) -> int:
    """Execute source code and return its exit status. An exception is printed without the frames of this file."""
    try:
        tree: Any = compile(source, path, "exec", flags=ast.PyCF_ONLY_AST, dont_inherit=True)
        last = _take_last_expression(tree) if shows_value else None
        _remember_lines(source, path)
        exec(compile(tree, path, "exec", dont_inherit=True), names)
        if last is not None:
            sys.displayhook(eval(compile(last, path, "eval", dont_inherit=True), names))
    except SystemExit as ended:
        return _exit_status(ended.code)
    except BaseException as error:  # noqa: BLE001  whatever the code raises is its result
        _print_error(error)
        return 1
    return 0


def _take_last_expression(tree: Any) -> ast.Expression | None:
    """Split the last line off, if it is an expression: a session shows its value."""
    if not tree.body or not isinstance(tree.body[-1], ast.Expr):
        return None
    return ast.Expression(tree.body.pop().value)


def _remember_lines(source: str | bytes, path: str) -> None:
    """Let tracebacks show the lines of code that is in no file, as in a session."""
    import linecache

    text = source if isinstance(source, str) else source.decode("utf-8", "replace")
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)


def _print_error(error: BaseException) -> None:
    here = error.__traceback__
    try:
        traceback.print_exception(type(error), error, here.tb_next if here else None)
    except BaseException:  # noqa: BLE001  the error may be the code's own class, with methods that raise
        os.write(2, f"{type(error).__name__}\n".encode("utf-8", "replace"))


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    with contextlib.suppress(BaseException):
        print(code, file=sys.stderr)  # noqa: T201
    return 1


def end(status: int) -> None:
    """Wait for threads, call what atexit registered, flush, and end."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException as error:  # noqa: BLE001
        _print_error(error)
        status = status or 1
    if not _flush():
        status = status or 1
    os._exit(status)


def _flush() -> bool:
    flushed = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # noqa: BLE001  the code may have closed or replaced it
            flushed = False
    return flushed
