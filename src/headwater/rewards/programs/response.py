"""The program in a response."""

from __future__ import annotations

import re

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+#.-]*)[^\n]*$", re.MULTILINE)
_PYTHON = frozenset({"python", "python3", "py", "py3", "python2", "pypy", "pypy3"})


def find_program(response: str) -> str:
    """The last block of Python code in a response; without one, its last block of any kind, or all of it.

    Thoughts before ``</think>`` do not count. A block that is not closed reaches to the end of the response.
    """
    answer = response.rpartition("</think>")[2]
    blocks = _blocks(answer)
    python = [content for language, content in blocks if language.lower() in _PYTHON]
    if python:
        return python[-1]
    return blocks[-1][1] if blocks else answer


def _blocks(text: str) -> list[tuple[str, str]]:
    """The fenced blocks with their languages."""
    found: list[tuple[str, str]] = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        else:
            found.append((opened[1], text[opened.end() + 1 : fence.start()]))
            # A fence with a language opens a block, also if the one before was not closed.
            opened = fence if fence[1] else None
    if opened is not None:
        found.append((opened[1], text[opened.end() + 1 :]))
    return found
