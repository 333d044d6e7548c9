"""What each metric means, for the page: the tables of ``docs/metrics.md``, shipped as ``metric_texts.json``.

python -m headwater.dashboard.metric_texts docs/metrics.md     # writes the file again; a test compares them
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

FILE = Path(__file__).with_name("metric_texts.json")
OTHERS = "Other metrics"
_KIND_OF = {"Evaluations": "eval", "Supervised start": "warm_start"}
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_CHOICE = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class Text:
    group: str
    text: str


@dataclass(frozen=True)
class _Row:
    kind: str
    group: str
    pattern: str
    text: str

    @property
    def expression(self) -> re.Pattern[str]:
        """``<name>`` stands for anything in the key."""
        parts = re.split(r"<[^>]*>", self.pattern)
        return re.compile(".+".join(map(re.escape, parts)))


class Texts:
    """Finds the row of a metric. Exact names come before patterns, and longer patterns before shorter ones."""

    def __init__(self, rows: Sequence[_Row]) -> None:
        self.groups = [*dict.fromkeys(row.group for row in rows), OTHERS]
        self._exact = {(row.kind, row.pattern): row for row in rows if "<" not in row.pattern}
        free = [row for row in rows if "<" in row.pattern]
        free.sort(key=lambda row: -len(re.sub(r"<[^>]*>", "", row.pattern)))
        self._free = [(row.kind, row.expression, row) for row in free]

    def of(self, key: str, kind: str) -> Text:
        row = self._exact.get((kind, key))
        if row is None:
            found = (row for its, expression, row in self._free if its == kind and expression.fullmatch(key))
            row = next(found, None)
        return Text(row.group, row.text) if row is not None else Text(OTHERS, "")


@cache
def texts() -> Texts:
    return Texts([_Row(*each) for each in json.loads(FILE.read_text(encoding="utf-8"))])


def parse(markdown: str) -> list[list[str]]:
    """Kind, group, pattern and text of every row of the tables whose first column is ``key``."""
    return list(_rows(markdown))


def _rows(markdown: str) -> Iterator[list[str]]:
    kind = group = ""
    is_table = False
    for line in markdown.splitlines():
        if line.startswith("## "):
            kind, group = _KIND_OF.get(line[3:].strip(), "train"), line[3:].strip()
        elif line.startswith("### "):
            group = line[4:].strip()
        if not line.startswith("|"):
            is_table = False
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells[0] == "key":
            is_table = True
        elif is_table and not cells[0].startswith("---"):
            text = _LINK.sub(r"\1", cells[1]).replace("`", "")
            for name in re.findall(r"`([^`]+)`", cells[0]):
                yield from ([kind, group, each, text] for each in _spelled_out(name))


def _spelled_out(name: str) -> list[str]:
    """``a/{x,y}`` as ``a/x`` and ``a/y``."""
    parts = _CHOICE.split(name)
    choices = [part.split(",") if place % 2 else [part] for place, part in enumerate(parts)]
    return ["".join(each) for each in product(*choices)]


def write(markdown: Path) -> None:
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in parse(markdown.read_text(encoding="utf-8")))
    FILE.write_text(f"[\n{rows}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
