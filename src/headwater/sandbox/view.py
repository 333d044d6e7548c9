"""What programs in the sandbox see of this machine: system libraries and the Python installation, read-only."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import cache
from pathlib import Path

from headwater.sandbox.inside.enclose import View

INSIDE = Path(__file__).parent / "inside"
INSIDE_AT = "/opt/headwater"
"""Where the folder ``inside`` appears in the sandbox."""

_SYSTEM = ("/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/share/zoneinfo")
_LINKED = ("/bin", "/lib", "/lib32", "/lib64")
"""Links into /usr on most systems, folders on some."""
_ETC = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime")


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
