"""The first process of a cell: receives a program from the owner, gives up all privileges, and becomes the program.

``CellPlace`` is where the program runs: its scratch folder, and the view of the file system around it.
"""

from __future__ import annotations

import base64
import math
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from headwater.sandbox.inside import frames, linux
from headwater.sandbox.inside.answering import serve_calls
from headwater.sandbox.inside.confine import Bounds, confine
from headwater.sandbox.inside.examiner import run_tests
from headwater.sandbox.inside.runner import run_program, run_session

USER_ID = 1000
"""The user and group id that programs see."""
NAMESPACES = linux.ALL_NAMESPACES
_SCRATCH = "/tmp"
_MAX_FILES = 10_000


@dataclass(frozen=True)
class CellPlace:
    """A scratch folder with a folder to work in."""

    scratch: str

    @property
    def work(self) -> str:
        return f"{self.scratch}/work"

    @property
    def program(self) -> str:
        return f"{self.work}/main.py"

    def write(self, name: str, contents: bytes) -> str:
        """Write a file below the working folder and return its path. The owner has checked the name."""
        path = os.path.join(self.work, name)
        if "/" in name:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        left = memoryview(contents)
        while left:
            left = left[os.write(descriptor, left) :]
        os.close(descriptor)
        return path

    def write_all(self, files: Mapping[str, str]) -> None:
        """Write files whose contents are in base 64."""
        for name, contents in files.items():
            self.write(name, base64.b64decode(contents))


def prepare_nested(user_id: int, group_id: int, max_file_bytes: int) -> CellPlace:
    """In new namespaces: mount an own scratch folder and an own /proc over those that this process inherited."""
    linux.map_own_user(USER_ID, user_id, group_id)
    linux.mount("", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    safe = linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("tmpfs", _SCRATCH, "tmpfs", safe, f"size={max_file_bytes},nr_inodes={_MAX_FILES},mode=0700")
    mount_proc()
    os.mkdir(f"{_SCRATCH}/.shm")
    linux.mount(f"{_SCRATCH}/.shm", "/dev/shm", "", linux.MS_BIND)
    return prepare_folder(_SCRATCH)


def mount_proc() -> None:
    """Mount a /proc that shows only the processes of this namespace; nothing else where the kernel can do that."""
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    try:
        linux.mount("proc", "/proc", "proc", flags, "subset=pid")
    except OSError:
        linux.mount("proc", "/proc", "proc", flags)


def prepare_folder(scratch: str) -> CellPlace:
    """Use a scratch folder that is there already."""
    place = CellPlace(scratch)
    os.mkdir(place.work)
    os.chdir(place.work)
    os.environ.update(HOME=place.work, TMPDIR=scratch, PWD=place.work)
    return place


@dataclass(frozen=True)
class CellLinks:
    """Descriptors that the owner sends for a cell."""

    data: int
    """The program comes from here. A session keeps it; other programs never see it."""
    watch: int
    """The zygote's connection to the owner."""
    stdout: int
    stderr: int


class Cell:
    """Runs what the owner sends, in a place that is ready for it."""

    def __init__(self, links: CellLinks, bounds: Bounds, own_virtual_bytes: int) -> None:
        self._links = links
        self._bounds = bounds
        self._own_virtual_bytes = own_virtual_bytes

    def run(self, kind: str, place: CellPlace) -> NoReturn:
        """Receive a program, say that all is ready, and run it. This process ends with it."""
        request = frames.read(self._links.data)
        if request is None:
            os._exit(1)
        place.write_all(request["files"])
        if kind != "session":
            place.write("main.py", request["code"].encode("utf-8", "surrogatepass"))
        frames.write(self._links.data, {"ready": True})
        if kind == "tests":
            self._run_tests(place)
        elif kind == "session":
            # The zygote limits the processor time of each run; the kernel can only limit that of all runs together.
            self._bounds = replace(self._bounds, cpu_s=math.inf)
            self._confine(_nowhere(), keep=(self._links.data,))
            run_session(self._links.data, "<session>")
        else:
            self._confine(_open_input(place, request["stdin"]))
            run_program(place.program)
        os._exit(1)

    def _run_tests(self, place: CellPlace) -> None:
        """Fork the program, then become the process of the tests that judge it.

        The program is forked before the tests are read from the owner, so they are not in its memory. The process of
        the tests is secret: the program cannot read, trace or write to it. It can only answer calls, or end it, and
        then the tests have failed.
        """
        calls_from, calls_to = os.pipe()
        answers_from, answers_to = os.pipe()
        if linux.is_supported():
            linux.set_dumpable(False)  # before there is another process: what it has opened once, it can read for ever
        if os.fork() == 0:
            try:
                self._confine(_nowhere(), stdout=_nowhere(), keep=(calls_from, answers_to))
                serve_calls(place.program, calls_from, answers_to)
            finally:
                os._exit(1)
        message: dict[str, Any] | None = frames.read(self._links.data)
        if message is None:
            os._exit(1)
        os.chdir("/")
        self._confine(_nowhere(), keep=(calls_to, answers_from), is_secret=True)
        run_tests(message["tests"], calls_to, answers_from)

    def _confine(
        self, stdin: int, stdout: int | None = None, keep: tuple[int, ...] = (), is_secret: bool = False
    ) -> None:
        stdout = self._links.stdout if stdout is None else stdout
        for place, descriptor in enumerate((stdin, stdout, self._links.stderr)):
            os.dup2(descriptor, place)
        confine(self._bounds, keep, self._own_virtual_bytes, is_secret)


def reset_signals() -> None:
    """Forget what the zygote does about signals."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    if linux.is_supported():
        linux.die_with_parent(signal.SIGKILL)


def _nowhere() -> int:
    return os.open("/dev/null", os.O_RDWR)


def _open_input(place: CellPlace, text: str) -> int:
    """Standard input is a file without a name."""
    if not text:
        return _nowhere()
    path = place.write(".stdin", text.encode("utf-8", "surrogatepass"))
    descriptor = os.open(path, os.O_RDONLY)
    os.unlink(path)
    return descriptor
