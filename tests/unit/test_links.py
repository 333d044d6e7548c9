"""Links between the pages of the documentation lead somewhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them: lower case, spaces as hyphens, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def broken(page: Path) -> list[str]:
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    found = []
    for link in _LINK.findall(text):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(f"{page.relative_to(ROOT)}: {link}")
    return found


def test_links_lead_to_pages_and_headings():
    assert len(PAGES) > 20
    assert [link for page in PAGES for link in broken(page)] == []


def test_a_broken_link_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# One `thing`, twice\n[a](#one-thing-twice) [b](#other) [c](gone.md) `[d](gone.md)` [e](https://x.y)"
    )
    assert broken(page) == ["page.md: #other", "page.md: gone.md"]
