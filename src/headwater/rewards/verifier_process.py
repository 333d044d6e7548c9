"""The process behind ``verifier.py``: reads requests from standard input, and compares answers with math-verify.

This process only imports and supervises. Comparisons run in a forked worker, which is killed at its limit of processor
time or memory; forking the next one takes milliseconds, because everything is imported already. math-verify's own
time limits are off: they are signals that sympy may catch, and that work only in the main thread of a process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
from itertools import product
from typing import Any, NoReturn

MEMORY_LIMIT = 1 << 30
REQUESTS_PER_WORKER = 2000
"""A worker is replaced after this number of comparisons, which also frees what sympy has cached."""
_LOOK_S = 5.0


class ComparingProcess:
    """A forked process that compares answers, and the socket to it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._served = 0
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            _work(theirs)
        theirs.close()

    def ask(self, request: dict[str, Any]) -> str | None:
        """The verdict; None if the requester is gone."""
        self._served += 1
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        readable, _, _ = select.select([self._socket, sys.stdin], [], [], request["wall_s"])
        if not readable:
            return "timed_out"
        if self._socket not in readable:
            return None
        # One recv is enough: a verdict is a few bytes, which a socket does not split.
        return self._socket.recv(4096).decode() or self._cause_of_end()

    def is_spent(self) -> bool:
        return self._served >= REQUESTS_PER_WORKER

    def end(self) -> None:
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._pid = 0
        self._socket.close()

    def _cause_of_end(self) -> str:
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        is_limit = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
        return "timed_out" if is_limit else "error"


def _work(requests: socket.socket) -> NoReturn:
    """Serve comparisons until the socket closes."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    try:
        with requests.makefile("rb") as lines:
            for line in lines:
                request = json.loads(line)
                # The system ends this process when its processor time is up, whatever it is doing.
                signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
                verdict = compare(request["truth"], request["answer"])
                signal.setitimer(signal.ITIMER_PROF, 0)
                requests.sendall(verdict.encode())
    finally:
        os._exit(0)


def compare(truth: str, answer: str) -> str:
    """Compare two answers; ``error`` if no comparison said right and one of them raised."""
    import sympy.core.random
    from math_verify import verify

    sympy.core.random.seed(0)  # equality tests sample points: the same answers get the same verdict
    verdict = "wrong"
    try:
        for left, right in product(_parse(truth), _parse(answer)):
            try:
                if verify(left, right, timeout_seconds=None, allow_set_relation_comp=True, raise_on_error=True):
                    return "right"
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, NotImplementedError):
                verdict = "error"
    except MemoryError:
        return "out_of_memory"
    except Exception:  # noqa: BLE001  sympy and its parser may raise anything on what a model wrote
        return "error"
    return verdict


def _parse(text: str) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    found: list[Any] = parse(f"\\boxed{{{text}}}", configs, parsing_timeout=None, raise_on_error=True)
    return found


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the requester decides when this process ends
    logging.disable(logging.WARNING)
    replies = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not be taken for a reply
    try:
        compare("1/2", "0.5")  # imports, and compiles the patterns
    except ImportError as error:
        _reply(replies, {"failed": f"math-verify cannot be imported ({error}); run: pip install math-verify"})
        return
    _reply(replies, {"ready": ""})
    worker = ComparingProcess()
    parent = os.getppid()
    received = b""
    try:
        while os.getppid() == parent:
            if select.select([sys.stdin], [], [], _LOOK_S)[0]:
                piece = os.read(0, 65536)
                if not piece:
                    break
                received += piece
            while b"\n" in received:
                line, _, received = received.partition(b"\n")
                verdict = worker.ask(json.loads(line))
                if verdict is None:
                    return
                _reply(replies, {"verdict": verdict})
                if verdict not in ("right", "wrong") or worker.is_spent():
                    worker.end()
                    worker = ComparingProcess()
    finally:
        worker.end()


def _reply(descriptor: int, reply: dict[str, str]) -> None:
    os.write(descriptor, json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main()
