"""The program that runs agents: it imports the agent once and forks a process for every episode.

    python fork_server.py '{"agent": "agent.py:solve", "agent_args": {}}'

Forking takes milliseconds, while a new interpreter would import the agent's packages every time. The program needs only
the standard library, so it also runs in the environment of an agent, where Headwater is not installed.

It reads pickled messages from its standard input, each after its length: ``("call", number, Call as a dict)`` and
``("kill", number)``. It writes JSON the same way: first ``{"ready": true}`` or ``{"failed": reason}``, then
``{"number": ..., "outcome": ..., ...}`` for every call that has ended. When its input ends, it kills all agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import random
import runpy
import selectors
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

LENGTH = struct.Struct("!I")
OUTPUT_KEPT = 4096
"""How many of the last bytes that an agent prints are kept, for the message if it fails."""
_TRACE_KEPT = 4000
_PR_SET_PDEATHSIG = 1
_FAMILY = Path(__file__).parents[2] / "sandbox" / "inside" / "family.py"
_kill_family = runpy.run_path(str(_FAMILY))["kill_family"]  # in an agent's environment, the package is not installed


class Child:
    """A process that runs one agent."""

    def __init__(self, number: int, pid: int, result: int, output: int) -> None:
        self.number, self.pid = number, pid
        self.pipes = {result: bytearray(), output: bytearray()}
        self.result, self.output = result, output

    def read(self, pipe: int) -> bool:
        """Read what is there. False if no more can come."""
        try:
            data = os.read(pipe, 2**16)
        except BlockingIOError:
            return True
        self.pipes[pipe] += data
        if pipe == self.output:
            del self.pipes[pipe][:-OUTPUT_KEPT]
        return bool(data)


class Server:
    def __init__(self, agent: Any, agent_args: dict[str, Any], source: int, sink: int) -> None:
        self._agent, self._agent_args = agent, agent_args
        self._source, self._sink = source, sink
        self._input = bytearray()
        self._children: dict[int, Child] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(source, selectors.EVENT_READ)
        wake, self._wakes = os.pipe()
        for pipe in (wake, self._wakes):
            os.set_blocking(pipe, False)
        self._wake = wake
        self._selector.register(wake, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._source:
                    if not self._receive():
                        return
                elif key.fd == self._wake:
                    os.read(self._wake, 2**12)
                elif not key.data.read(key.fd):
                    self._selector.unregister(key.fd)
            self._reap()

    def kill_all(self) -> None:
        for child in self._children.values():
            _kill_family(child.pid)

    def _receive(self) -> bool:
        data = os.read(self._source, 2**20)
        self._input += data
        while len(self._input) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._input)
            if len(self._input) < LENGTH.size + length:
                break
            message = pickle.loads(self._input[LENGTH.size : LENGTH.size + length])
            del self._input[: LENGTH.size + length]
            if message[0] == "call":
                self._fork(message[1], message[2])
            else:
                for child in self._children.values():
                    if child.number == message[1]:
                        _kill_family(child.pid)
        return bool(data)

    def _fork(self, number: int, call: dict[str, Any]) -> None:
        call["parent"] = os.getpid()
        result, result_end = os.pipe()
        output, output_end = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            for pipe in (result, result_end, output, output_end):
                os.close(pipe)
            self._report(number, outcome="raised", error=f"a process for the agent cannot be created: {error}")
            return
        if pid == 0:
            inherited = [self._source, self._sink, self._wake, self._wakes, result, output]
            inherited += [pipe for child in self._children.values() for pipe in child.pipes]
            _become_agent(self._agent, self._agent_args, call, result_end, output_end, inherited)
        _lead_group(pid)
        os.close(result_end)
        os.close(output_end)
        child = self._children[pid] = Child(number, pid, result, output)
        for pipe in child.pipes:
            os.set_blocking(pipe, False)
            self._selector.register(pipe, selectors.EVENT_READ, child)

    def _reap(self) -> None:
        for child in list(self._children.values()):
            ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                continue
            # What the agent left behind in its group; the agent itself is a zombie until now. A process that has left
            # the group may continue, for example to finish the episode.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            _, status = os.waitpid(child.pid, 0)
            del self._children[child.pid]
            for pipe in child.pipes:
                while child.read(pipe) and _has_more(pipe):
                    pass
                if pipe in self._selector.get_map():
                    self._selector.unregister(pipe)
                os.close(pipe)
            self._report_end(child, status)

    def _report_end(self, child: Child, status: int) -> None:
        printed = child.pipes[child.output].decode(errors="replace")
        written = bytes(child.pipes[child.result])
        if os.WIFSIGNALED(status):
            self._report(child.number, outcome="killed", signal=os.WTERMSIG(status), output=printed)
        elif written:
            try:
                ended = json.loads(written)
            except ValueError:  # a process that the agent forked returned from it, too
                ended = {"outcome": "raised", "error": "more than one result: did the agent call os.fork()?"}
            self._report(child.number, output=printed, **ended)
            import_too(ended.get("imported", []))
        elif os.WEXITSTATUS(status):
            self._report(child.number, outcome="exited", status=os.WEXITSTATUS(status), output=printed)
        else:
            self._report(child.number, outcome="returned", value=None, output=printed)

    def _report(self, number: int, **fields: Any) -> None:
        send(self._sink, {"number": number, **fields})


def send(sink: int, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    data = memoryview(LENGTH.pack(len(body)) + body)
    while data:
        data = data[os.write(sink, data) :]


def _has_more(pipe: int) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        return bool(selector.select(0))


def _lead_group(pid: int) -> None:
    """Called by both processes, so that the group exists whoever comes first."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or is another program already
        os.setpgid(pid, pid)


# In the agent's process


def _become_agent(
    agent: Any, agent_args: dict[str, Any], call: dict[str, Any], result: int, output: int, inherited: list[int]
) -> NoReturn:
    status = 1
    try:
        _lead_group(0)
        _die_with_parent(call["parent"])
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for pipe in inherited:
            os.close(pipe)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(call["env"])
        if call["argv"]:
            _become_command(call["argv"], call["stdin"])
        status = _run_agent(agent, agent_args, call, result)
    except BaseException:  # noqa: BLE001  nothing may return into the server's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _die_with_parent(parent: int) -> None:
    """Linux ends the agent if this program is killed. Elsewhere the agent notices that its address is gone."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _become_command(argv: list[str], text: str) -> NoReturn:
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        os.dup2(file.fileno(), 0)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _run_agent(agent: Any, agent_args: dict[str, Any], call: dict[str, Any], result: int) -> int:
    random.seed(call["offered"]["seed"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(call["offered"]["seed"] % 2**32)
    known = set(sys.modules)
    try:
        value = plain(run_agent(agent, agent_args, call["offered"]))
        ended: dict[str, Any] = {"outcome": "returned", "value": value, "imported": sorted(set(sys.modules) - known)}
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001  an agent may raise anything
        trace = "".join(traceback.format_exception(error))[-_TRACE_KEPT:]
        ended = {"outcome": "raised", "error": f"{type(error).__name__}: {error}", "trace": trace}
    body = json.dumps(ended).encode()
    while body:
        body = body[os.write(result, body) :]
    return 0


# Shared with agents that run in threads


def load_agent(path: str) -> Any:
    """The function or class that ``file.py:name`` or ``package.module:name`` names."""
    module_name, _, name = path.rpartition(":")
    if module_name.endswith(".py"):
        file = Path(module_name).expanduser().resolve()
        spec = importlib.util.spec_from_file_location(f"headwater_agent_{file.stem}", file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        sys.path.insert(0, str(file.parent))
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(module_name)
    thing = getattr(module, name)
    if not callable(thing):
        raise TypeError(f"{path} is a {type(thing).__name__}; name a function or a class")
    return thing


def run_agent(agent: Any, agent_args: dict[str, Any], offered: dict[str, Any]) -> Any:
    """Call the agent with those of the offered arguments that it takes, and return its result."""
    if inspect.isclass(agent):
        made = agent(**agent_args)
        agent, agent_args = (made.run if hasattr(made, "run") else made), {}
    value = agent(**chosen(agent, {**offered, **agent_args}))
    return asyncio.run(_wait(value)) if inspect.isawaitable(value) else value


async def _wait(value: Any) -> Any:
    return await value


def chosen(agent: Any, offered: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(agent).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return offered
    names = {each.name for each in parameters}
    return {name: value for name, value in offered.items() if name in names}


def problem_of(agent: Any, agent_args: dict[str, Any], offered: list[str]) -> str:
    """What is wrong with the agent's signature, or an empty text."""
    if inspect.isclass(agent):
        if not hasattr(agent, "run") and not any("__call__" in vars(base) for base in agent.__mro__):
            return "the class needs a method run(...) or __call__(...)"
        try:
            inspect.signature(agent).bind(**agent_args)
        except TypeError as error:
            return f"agent_args do not fit the constructor: {error}"
        return ""
    known = [*offered, *agent_args]
    parameters = inspect.signature(agent).parameters.values()
    for each in parameters:
        is_named = each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        if each.kind is each.POSITIONAL_ONLY or (is_named and each.default is each.empty and each.name not in known):
            return f"its parameter {each.name!r} is not known; an agent may take {', '.join(known)}"
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return ""
    unknown = [name for name in agent_args if name not in {each.name for each in parameters}]
    return f"agent_args.{unknown[0]}: the function has no such parameter" if unknown else ""


def plain(value: Any) -> Any:
    """A value as JSON. What JSON cannot express becomes text."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if hasattr(value, "tolist"):  # numpy and torch
        return plain(value.tolist())
    if hasattr(value, "__float__"):
        return float(value)
    return f"<{type(value).__name__}>"


def warm_up() -> None:
    """Make OpenAI's client build its types, which it does at its first reply and which takes longer than a call."""
    # New versions of the client use httpx2.
    openai, httpx = sys.modules.get("openai"), sys.modules.get("httpx2", sys.modules.get("httpx"))
    if openai is None or httpx is None:
        return

    def answer(_: Any) -> Any:
        choice = {"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "stop"}
        return httpx.Response(200, json={"id": "", "object": "", "created": 0, "model": "", "choices": [choice]})

    with contextlib.suppress(Exception), httpx.Client(transport=httpx.MockTransport(answer)) as http:
        client = openai.OpenAI(base_url="http://unused", api_key="unused", http_client=http)
        client.chat.completions.create(model="", messages=[])


def import_too(names: list[str]) -> None:
    """What an agent has imported while it ran is there for the next one."""
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def main() -> None:
    settings = json.loads(sys.argv[1])
    source, sink = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the agent prints must not mix with the messages
    sys.path[0] = os.getcwd()  # not this program's folder, whose files would hide the agent's own modules
    agent = None
    try:
        if settings["agent"]:
            agent = load_agent(settings["agent"])
            problem = problem_of(agent, settings["agent_args"], settings["offered"])
            if problem:
                raise TypeError(problem)
            warm_up()
    except BaseException as error:  # noqa: BLE001  importing an agent may raise anything
        send(sink, {"failed": f"{type(error).__name__}: {error}"})
        return
    gc.collect()
    gc.freeze()  # otherwise the first collection of every agent would copy all memory
    server = Server(agent, settings["agent_args"], source, sink)
    send(sink, {"ready": True})
    try:
        server.run()
    finally:
        server.kill_all()


if __name__ == "__main__":
    main()
