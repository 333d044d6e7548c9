"""Where one program runs: its scratch folder, and the view of the file system around it."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from dataclasses import dataclass

from headwater.sandbox.inside import linux

USER_ID = 1000
"""The user and group id that programs see."""
NAMESPACES = linux.ALL_NAMESPACES
_SCRATCH = "/tmp"
_MAX_FILES = 10_000


@dataclass(frozen=True)
class Place:
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


def prepare_nested(user_id: int, group_id: int, max_file_bytes: int) -> Place:
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


def prepare_folder(scratch: str) -> Place:
    """Use a scratch folder that is there already."""
    place = Place(scratch)
    os.mkdir(place.work)
    os.chdir(place.work)
    os.environ.update(HOME=place.work, TMPDIR=scratch, PWD=place.work)
    return place
