"""The command that starts a zygote, for every kind of isolation, and what programs see of this machine."""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from headwater.config.rollout_schema import SandboxConfig
from headwater.sandbox.inside.enclose import View
from headwater.sandbox.inside.zygote import Settings

INSIDE = Path(__file__).parent / "inside"
INSIDE_AT = "/opt/headwater"
"""Where the folder ``inside`` appears in the sandbox."""

_SYSTEM = ("/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/share/zoneinfo")
_LINKED = ("/bin", "/lib", "/lib32", "/lib64")
"""Links into /usr on most systems, folders on some."""
_ETC = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime")
Kind = Literal["bubblewrap", "bubblewrap-single", "namespaces", "unprotected"]
_NOBODY = 65534
_CAP_SYS_ADMIN = 21
_CAPABILITIES = ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID")
"""What a zygote that root starts needs until it becomes another user."""
_BOOT = """\
import sys, types
for name, path in (("headwater", []), ("headwater.sandbox", []), ("headwater.sandbox.inside", [sys.argv[1]])):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = path
from headwater.sandbox.inside.{module} import main
main(sys.argv[2:])
"""
"""The package itself is not visible inside, so its names are made by hand."""
PLACES = "/usr/local/bin:/usr/bin:/bin"
ENVIRONMENT = {
    "PATH": PLACES,
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
    "USER": "user",
}


@dataclass(frozen=True)
class Launch:
    """A command with its environment."""

    command: tuple[str, ...]
    environment: dict[str, str]


def make_launch(kind: Kind, config: SandboxConfig, control: int, owner: int) -> Launch:
    """The command that starts a zygote with these descriptors."""
    is_root = os.geteuid() == 0
    drops_root = is_root and kind in ("bubblewrap", "namespaces") and _may_become_nobody()
    settings = Settings(
        control=control,
        owner=owner,
        mode={"bubblewrap": "nested", "namespaces": "nested", "bubblewrap-single": "single", "unprotected": "plain"}[
            kind
        ],
        paths=package_paths(),
        preload=config.preload,
        user_id=_NOBODY if drops_root else -1,
    )
    boot = (python(), "-I", "-S", "-c", _BOOT.format(module="zygote"))
    told = json.dumps(asdict(settings))
    if kind == "unprotected":
        command: tuple[str, ...] = (*boot, str(INSIDE), told)
    else:
        command = (*boot, INSIDE_AT, told)
    if kind == "namespaces":
        view = json.dumps(asdict(make_view()))
        has_privileges = "privileged" if drops_root else "unprivileged"
        enclose = (*boot[:-1], _BOOT.format(module="enclose"), str(INSIDE))
        command = (*enclose, view, has_privileges, *command)
    elif kind != "unprotected":
        command = (*_bubblewrap(kind, config, keeps_root=drops_root), *command)
    return Launch(command, dict(ENVIRONMENT))


def _may_become_nobody() -> bool:
    """Whether root may really do everything here, and become another user; in many containers it may not."""
    with open("/proc/self/status") as file:
        effective = next(line for line in file if line.startswith("CapEff:"))
    if not int(effective.split()[1], 16) & (1 << _CAP_SYS_ADMIN):
        return False
    return all(_is_mapped(f"/proc/self/{name}") for name in ("uid_map", "gid_map"))


def _is_mapped(path: str) -> bool:
    """Whether the user namespace of this process has the user or group nobody."""
    with open(path) as file:
        ranges = [[int(each) for each in line.split()] for line in file]
    return any(first <= _NOBODY < first + count for first, _, count in ranges)


def find_bubblewrap() -> str | None:
    """The path of the program bwrap, also if PATH does not lead to it."""
    return shutil.which("bwrap") or shutil.which("bwrap", path=PLACES)


def _bubblewrap(kind: Kind, config: SandboxConfig, keeps_root: bool) -> tuple[str, ...]:
    words = [
        find_bubblewrap() or "bwrap",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-cgroup-try",
    ]
    if keeps_root:
        for capability in _CAPABILITIES:
            words += ["--cap-add", capability]
    else:
        words += ["--unshare-user"]
    if kind == "bubblewrap-single":
        words += ["--uid", "1000", "--gid", "1000"]
    words += ["--as-pid-1", "--hostname", "sandbox", "--chdir", "/"]
    view = make_view()
    for path in view.folders:
        words += ["--perms", "0755", "--dir", path]
    for source, path in view.binds:
        words += ["--ro-bind", source, path]
    for target, path in view.links:
        words += ["--symlink", target, path]
    words += ["--dev", "/dev", "--proc", "/proc"]
    if kind == "bubblewrap-single":
        size = str(config.max_file_mib << 20)
        words += ["--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", "/dev/shm"]
    return (*words, "--remount-ro", "/dev", "--remount-ro", "/", "--")


def python() -> str:
    """The interpreter itself, not a link to it in a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable) or sys.executable)


def package_paths() -> tuple[str, ...]:
    """Folders of installed packages."""
    found = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    return tuple(dict.fromkeys(path for path in found if os.path.isdir(path)))


@cache
def make_view() -> View:
    """The view of this machine. A folder that another one contains is not listed twice."""
    wanted = [*_SYSTEM, *_ETC, python(), os.path.realpath(sys.base_prefix), sys.base_prefix, *package_paths()]
    wanted += [os.path.realpath(path) for path in package_paths()]
    links = []
    for path in _LINKED:
        if os.path.islink(path):
            links.append((os.readlink(path), path))
        else:
            wanted.append(path)
    # The Python of the system is in /usr/bin and /usr/lib; the rest of /usr is not needed.
    wanted = [path for path in wanted if path != "/usr"]
    binds = [(str(INSIDE), INSIDE_AT)] + [(path, path) for path in _outermost(wanted)]
    folders = {"/tmp", "/proc"}
    for _, path in (*binds, *links):
        folders.update(str(parent) for parent in Path(path).parents)
    return View(tuple(binds), tuple(links), tuple(sorted(folders - {"/"})))


def _outermost(paths: list[str]) -> list[str]:
    present = sorted({path for path in paths if os.path.exists(path)})
    return [path for path in present if not any(path.startswith(f"{other}/") for other in present)]
