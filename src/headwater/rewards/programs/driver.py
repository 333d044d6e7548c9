"""Runs inside the sandbox: calls the functions of a program, for tests that the program can neither see nor touch.

Two processes. The *program* runs in a child that knows nothing but its own source and the arguments it is called with.
The *tests* run in the parent and reach the program through pipes. Why a program cannot cheat:

- The child is forked before the tests and the secret that marks the verdict enter the sandbox, so they are not in its
  memory: ``start`` and ``finish`` are two pieces of code in one session. The child has no descriptors but the pipes.
- The parent is not dumpable: although the child has the same user, it cannot open the parent's memory or descriptors in
  /proc, trace it, or copy its descriptors. The child checks this before the program runs.
- What comes back is data of built-in types. An object with its own ``__eq__`` stays in the child, and the tests get a
  handle that equals nothing else.
- A program that exits, hangs or kills the parent prevents a verdict. Without a verdict, no test has passed.

This file runs on its own, so it imports nothing of Headwater. ``finish`` prints one line: the secret and a JSON object
with one entry per test or call.
"""

from __future__ import annotations

import ast
import builtins
import collections
import ctypes
import datetime
import decimal
import fractions
import importlib
import io
import itertools
import json
import marshal
import os
import pickle
import random
import struct
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

MAX_MESSAGE_BYTES = 64 << 20
MAX_ITEMS = 1_000_000
MAX_TEXT = 300
"""Longest message about a failed test."""
PR_SET_DUMPABLE = 4

BASES = (tuple, list, dict, str, bytes, int, float, complex, set, frozenset)
"""An object of a subclass of one of these, such as a named tuple, travels as an object of the base class."""
PLAIN = frozenset({
    *BASES, type(None), bool, bytearray, range, slice, collections.OrderedDict, collections.defaultdict,
    collections.Counter, collections.deque, decimal.Decimal, fractions.Fraction, datetime.date, datetime.time,
    datetime.datetime, datetime.timedelta, datetime.timezone,
})  # fmt: skip
"""Types whose objects travel as values. Of everything else, a handle travels."""
PLAIN_BY_NAME = {(each.__module__, each.__name__): each for each in PLAIN}
MUTABLE = (list, dict, set, bytearray, collections.deque)


class ProgramEnded(BaseException):
    """The program's process ended or broke the protocol. Not an Exception, so that no test catches it."""


class CannotSend(BaseException):
    """A test passes something to the program that cannot be sent to another process."""


class ProgramRaised(Exception):
    """The program raised an exception of its own class, or one that ends processes."""


class Pipe:
    """Messages of any length over two pipes."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing

    def send(self, message: bytes) -> None:
        rest = memoryview(struct.pack("<Q", len(message)) + message)
        while rest:
            try:
                rest = rest[os.write(self._writing, rest) :]
            except OSError as error:
                raise ProgramEnded(str(error)) from None

    def receive(self) -> bytes:
        (length,) = struct.unpack("<Q", self._exactly(8))
        if length > MAX_MESSAGE_BYTES:
            raise ProgramEnded("it returned too much data")
        return self._exactly(length)

    def _exactly(self, length: int) -> bytes:
        pieces = io.BytesIO()
        while pieces.tell() < length:
            piece = os.read(self._reading, min(length - pieces.tell(), 1 << 20))
            if not piece:
                raise ProgramEnded("it exited")
            pieces.write(piece)
        return pieces.getvalue()


# The program's side.


class ValuePickler(pickle.Pickler):
    """Writes values as data, and other objects as numbers in ``kept``."""

    def __init__(self, file: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(file, protocol=5)
        self._kept = kept

    def persistent_id(self, value: Any) -> int | None:
        if type(value) in PLAIN or isinstance(value, BASES) or _is_array(value) or _is_plain_type(value):
            return None
        self._kept.append(value)
        return len(self._kept) - 1

    def reducer_override(self, value: Any) -> Any:
        if type(value) in PLAIN or isinstance(value, type):
            return NotImplemented
        plain = value.tolist() if _is_array(value) else _base_of(value)(value)
        return type(plain), (plain,)


class HandleUnpickler(pickle.Unpickler):
    """Reads what the tests send: values, handles of this program's objects, and functions."""

    def __init__(self, message: bytes, kept: list[Any], namespace: dict[str, Any]) -> None:
        super().__init__(io.BytesIO(message))
        self._kept, self._namespace = kept, namespace

    def persistent_load(self, given: Any) -> Any:
        if isinstance(given, int):
            return self._kept[given]
        code, name, defaults = given
        return types.FunctionType(marshal.loads(code), self._namespace, name, defaults)


class Served:
    """The objects of the program, and what the tests may do with them."""

    def __init__(self) -> None:
        module = types.ModuleType("solution")
        sys.modules["solution"] = module  # dataclasses and pickle look their module up
        self._namespace = module.__dict__
        self._kept: list[Any] = []

    def serve(self, pipe: Pipe) -> None:
        while True:
            message = pipe.receive()
            try:
                reply = self._encode(self._do(*HandleUnpickler(message, self._kept, self._namespace).load()))
            except BaseException as error:  # noqa: BLE001  a program may raise anything; the tests decide
                reply = self._encode(("raised", type(error).__name__, str(error)[:MAX_TEXT]))
            pipe.send(reply)

    def _encode(self, value: Any) -> bytes:
        file = io.BytesIO()
        ValuePickler(file, self._kept).dump(value)
        return file.getvalue()

    def _do(self, what: str, *given: Any) -> tuple[Any, ...]:
        if what == "call":
            target, arguments, named = given
            value = target(*arguments, **named)
            return "value", value, [each if type(each) in MUTABLE else None for each in arguments]
        actions: dict[str, Callable[..., Any]] = {
            "load": self._load,
            "find": self._find,
            "names": lambda names: {name: self._namespace[name] for name in names if name in self._namespace},
            "attribute": getattr,
            "items": lambda target: list(itertools.islice(target, MAX_ITEMS)),
            "item": lambda target, key: target[key],
            "length": len,
            "next": next,
            "text": str,
        }
        return "value", actions[what](*given), []

    def _load(self, prompt: str, code: str, entry: str) -> None:
        """Run the program. A response may be whole, or continue the prompt, which then ends in the middle."""
        if prompt and not _defines(code, entry.partition("(")[0].partition(".")[0]):
            exec(compile(prompt + code, "solution.py", "exec"), self._namespace)
            return
        if _tree(prompt) is not None:
            exec(compile(prompt, "prompt.py", "exec"), self._namespace)
        exec(compile(code, "solution.py", "exec"), self._namespace)

    def _find(self, entry: str) -> Any:
        """The function ``entry``, a method ``entry`` of a class Solution, or an expression such as ``Solution().f``."""
        if entry in self._namespace:
            return self._namespace[entry]
        solution = self._namespace.get("Solution")
        if isinstance(solution, type) and hasattr(solution, entry):
            return getattr(solution(), entry)
        return eval(entry, self._namespace)


def _tree(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _defines(source: str, name: str) -> bool:
    tree = _tree(source)
    if tree is None:
        return False
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    targets = (target for each in tree.body if isinstance(each, ast.Assign) for target in each.targets)
    names = {each.name for each in tree.body if isinstance(each, definitions)}
    return name in names | {target.id for target in targets if isinstance(target, ast.Name)}


def _base_of(value: Any) -> Any:
    return next(base for base in BASES if isinstance(value, base))


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "tolist")


def _is_plain_type(value: Any) -> bool:
    return isinstance(value, type) and value in PLAIN


# The tests' side.


class Handle:
    """An object of the program. It can be called and looked into, and equals only itself."""

    def __init__(self, program: Program, number: int) -> None:
        self.__dict__.update(_program=program, _number=number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._program.call(self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self._program.ask("attribute", self, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._program.ask("items", self))

    def __getitem__(self, key: Any) -> Any:
        return self._program.ask("item", self, key)

    def __len__(self) -> int:
        return int(self._program.ask("length", self))

    def __next__(self) -> Any:
        return self._program.ask("next", self)

    def __str__(self) -> str:
        return str(self._program.ask("text", self))

    def __bool__(self) -> bool:
        raise TypeError("the function returned an object of its own class where a test expects a plain value")


class TestPickler(pickle.Pickler):
    """Writes values, handles and plain functions."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Handle):
            return value._number
        if isinstance(value, types.FunctionType) and value.__closure__ is None:
            return marshal.dumps(value.__code__), value.__name__, value.__defaults__
        return None


class DataUnpickler(pickle.Unpickler):
    """Reads data of built-in types and handles. Anything else ends the program's tests."""

    def __init__(self, message: bytes, program: Program) -> None:
        super().__init__(io.BytesIO(message))
        self._program = program

    def find_class(self, module: str, name: str) -> Any:
        return PLAIN_BY_NAME[module, name]

    def persistent_load(self, number: Any) -> Any:
        return Handle(self._program, int(number))


class Program:
    """The program in the other process."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def ask(self, what: str, *given: Any) -> Any:
        return self._reply(what, *given)[1]

    def call(self, target: Handle, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        _, value, after = self._reply("call", target, arguments, named)
        for before, now in zip(arguments, after, strict=True):
            if type(before) in MUTABLE and type(now) is type(before):
                _replace(before, now)
        return value

    def _reply(self, what: str, *given: Any) -> Any:
        file = io.BytesIO()
        try:
            TestPickler(file, protocol=5).dump((what, *given))
        except Exception as error:  # noqa: BLE001  pickle raises many kinds
            raise CannotSend(f"{type(error).__name__}: {error}") from None
        self._pipe.send(file.getvalue())
        message = self._pipe.receive()
        try:
            reply = DataUnpickler(message, self).load()
            status, *content = reply
            if status == "raised":
                name, text = map(str, content)
            elif status != "value" or len(content) != 2:
                raise ValueError(status)
        except Exception as error:  # noqa: BLE001  whatever a forged message causes
            raise ProgramEnded(f"it sent no valid reply ({type(error).__name__})") from None
        if status == "raised":
            kind = getattr(builtins, name, None)
            is_usual = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError)
            raise kind(text) if is_usual else ProgramRaised(f"{name}: {text}")
        return reply


def _replace(before: Any, now: Any) -> None:
    """Give an argument the content that the program left in it."""
    before.clear()
    (before.extend if isinstance(before, (list, bytearray, collections.deque)) else before.update)(now)


def run_calls(program: Program, job: dict[str, Any]) -> list[dict[str, Any]]:
    """What the function returns for each list of arguments. The caller compares: no result is expected here."""
    results: list[dict[str, Any]] = []
    for arguments in job["calls"]:
        try:
            value = program.call(program.ask("find", job["entry"]), tuple(arguments), {})
            results.append({"value": json.loads(json.dumps(value, default=_as_json))})
        except Exception as error:  # noqa: BLE001  the program's error is the result of the call
            results.append({"error": _text(error)})
            if job["stops_early"]:
                break
    return results


def _as_json(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, (range, collections.deque)):
        return list(value)
    if isinstance(value, Handle):
        return list(value)  # a generator
    return str(value)


def run_tests(program: Program, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run each test: Python code that raises if it fails."""
    random.seed(0)
    module = types.ModuleType("tests")
    sys.modules["tests"] = module
    namespace = module.__dict__
    context = _tree(job["prompt"])
    if context is not None:
        exec(compile(context, "prompt.py", "exec"), namespace)
    _bind(program, job, namespace)
    results: list[dict[str, Any]] = []
    for number, test in enumerate([job["setup"], *job["tests"]]):
        try:
            exec(compile(test, f"test{number}.py", "exec"), namespace)
            results.append({"passed": True})
        except Exception as error:  # noqa: BLE001  a test fails by raising
            results.append({"passed": False, "error": _text(error)})
            if job["stops_early"] or number == 0:
                break
    return results[1:] if results[0]["passed"] else [{"passed": False, "error": f"setup: {results[0]['error']}"}]


def _bind(program: Program, job: dict[str, Any], namespace: dict[str, Any]) -> None:
    """Give the tests the names that they use: modules of the standard library, and then what the program defines.

    Names that the data set defines are not taken from the program: it must not replace what judges it.
    """
    sources = [job["setup"], *job["tests"]]
    trees = [tree for source in sources if (tree := _tree(source)) is not None]
    used = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    missing = used - namespace.keys() - vars(builtins).keys()
    for name in sorted(missing & sys.stdlib_module_names):
        namespace[name] = importlib.import_module(name)
    namespace.update(program.ask("names", sorted(missing - sys.stdlib_module_names)))
    if job["entry"]:
        candidate = program.ask("find", job["entry"])
        namespace.update({"candidate": candidate, job["entry"]: candidate})


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_TEXT].rstrip(": ")


def start() -> Pipe:
    """Fork the child that will run the program. Nothing of the tests may be in this process yet."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    parent = os.getpid()
    requests, replies = os.pipe(), os.pipe()
    if os.fork() == 0:
        try:
            _be_program(requests[0], replies[1], parent)
        finally:
            os._exit(0)
    os.close(requests[0])
    os.close(replies[1])
    return Pipe(replies[0], requests[1])


def _be_program(reading: int, writing: int, parent: int) -> None:
    """The child: keep nothing but the two pipes, check that the tests will be out of reach, then serve."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for place, descriptor in enumerate((nowhere, nowhere, nowhere, os.dup(reading), os.dup(writing))):
        os.dup2(descriptor, place + 100)
    for place in range(5):
        os.dup2(place + 100, place)
    os.closerange(5, os.sysconf("SC_OPEN_MAX"))
    pipe = Pipe(3, 4)
    try:
        os.close(os.open(f"/proc/{parent}/mem", os.O_RDONLY))
        pipe.send(b"exposed")
    except OSError:
        pipe.send(b"separate")
    Served().serve(pipe)


def finish(pipe: Pipe, text: str) -> None:
    """Send the program to the child, run the tests, and print the verdict."""
    job = json.loads(text)
    output = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # what the tests print is no verdict
    verdict: dict[str, Any] = {"results": []}
    try:
        if pipe.receive() != b"separate" and job["must_be_separate"]:
            verdict["exposed"] = True
        else:
            program = Program(pipe)
            program.ask("load", job["prompt"], job["code"], job["entry"])
            verdict["results"] = (run_calls if "calls" in job else run_tests)(program, job)
    except CannotSend as error:
        verdict["cannot_send"] = str(error)[:MAX_TEXT]
    except ProgramEnded as error:
        verdict["error"] = f"the program ended: {error}"
    except Exception as error:  # noqa: BLE001  the program could not be loaded
        verdict["error"] = _text(error)
    line = f"\n{job['secret']} {json.dumps(verdict)}\n".encode()
    while line:
        line = line[os.write(output, line) :]
