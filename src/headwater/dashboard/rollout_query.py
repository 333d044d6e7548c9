"""Listings of rollouts: filtered, sorted and paged, of one step or of a whole run."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.dashboard.errors import Refused, bad_request
from headwater.dashboard.parameters import listed, number, one_of, source_in, whole
from headwater.dashboard.rollout_files import (
    FACTS,
    AllNames,
    OpenFile,
    RolloutFile,
    Source,
    try_open,
)
from headwater.dashboard.rollout_row import ROW_COLUMNS, row_of
from headwater.dashboard.runs import Run

SORTS = ("place", "reward", "length", "turns", "tool_calls", "failures", "gap", "sample")
_ASCENDING = ("place", "sample")
_SEARCH_S = 1.5
"""A text search over all steps stops after this long and can be continued."""
_INDEX_WAIT_S = 0.4
_MOST_PROBLEMS = 20
_MOST_OFFSET = 100_000
_CURSOR = re.compile(r"(\d{1,9})")

Facts = NDArray[np.void]


@dataclass(frozen=True)
class Query:
    """What a listing is to show."""

    source: Source = "train"
    step: int | None = None
    uid: str | None = None
    sort: str = "place"
    is_ascending: bool = True
    min_reward: float | None = None
    max_reward: float | None = None
    min_length: float | None = None
    max_length: float | None = None
    stop_reason: tuple[str, ...] = ()
    ended_by: tuple[str, ...] = ()
    data_source: tuple[str, ...] = ()
    tools: str = ""
    text: str = ""
    offset: int = 0
    limit: int = 50
    cursor: str = ""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Query:
        """From the parameters of a request. Raise ``Refused`` for a value that cannot be used."""
        sort = one_of(given, "sort", SORTS, "place")
        order = one_of(given, "order", ("asc", "desc"), "asc" if sort in _ASCENDING else "desc")
        return cls(
            source=source_in(given),
            step=whole(given, "step"),
            uid=given.get("uid") or None,
            sort=sort,
            is_ascending=order == "asc",
            min_reward=number(given, "min_reward"),
            max_reward=number(given, "max_reward"),
            min_length=number(given, "min_length"),
            max_length=number(given, "max_length"),
            stop_reason=listed(given, "stop_reason"),
            ended_by=listed(given, "ended_by"),
            data_source=listed(given, "data_source"),
            tools=one_of(given, "tools", ("", "any", "none", "failed"), ""),
            text=given.get("text", ""),
            offset=whole(given, "offset", 0, low=0, high=_MOST_OFFSET) or 0,
            limit=whole(given, "limit", 50, low=1, high=200) or 50,
            cursor=given.get("cursor", ""),
        )


@dataclass
class _Found:
    """The candidates of a query in blocks, and the files they are in, by number."""

    blocks: Sequence[Facts]
    files: Sequence[RolloutFile]
    names: AllNames
    problems: list[str] = field(default_factory=list)


def list_rollouts(run: Run, query: Query) -> dict[str, Any]:
    """A page of rollouts."""
    index = run.index[query.source]
    if query.step is None:
        index.start(_INDEX_WAIT_S)
    found = _candidates(run, query)
    state, cursor = index.state(), None
    is_complete = query.step is not None or state["state"] == "ready"
    searched = sum(len(block) for block in found.blocks)
    if query.text and query.step is None:
        chosen, searched, cursor = _search_all(query, found)
        total, is_complete = len(chosen), is_complete and cursor is None
        page = chosen[query.offset : query.offset + query.limit]
    else:
        matching = _matching(found, query.text) if query.text else None
        page, total = _best(found, query, matching)
    names = found.names.of
    return {
        "total": total,
        "offset": query.offset,
        "limit": query.limit,
        "is_complete": is_complete,
        "searched": searched,
        "next_cursor": cursor,
        "index": state,
        "stop_reasons": sorted(names["stop_reason"].texts),
        "data_sources": sorted(names["data_source"].texts),
        "ended_by": sorted(names["ended_by"].texts),
        "rollouts": _read_page(page, found),
        "problems": found.problems[:_MOST_PROBLEMS],
    }


def step_facts(run: Run, source: Source, step: int) -> tuple[Facts, list[RolloutFile], AllNames, list[str]]:
    """The rollouts of one step, read from its files."""
    files, names, problems = run.rollouts[source].of_step(step), AllNames(), []
    parts = []
    for number_, file in enumerate(files):
        try:
            with OpenFile(file) as opened:
                parts.append(opened.facts(number_, names))
        except Refused as refused:
            problems.append(refused.message)
    if not parts and problems:
        raise Refused(422, "unreadable", problems[0])
    return np.concatenate(parts) if parts else np.zeros(0, FACTS), files, names, problems


def _candidates(run: Run, query: Query) -> _Found:
    if query.step is not None:
        facts, files, names, problems = step_facts(run, query.source, query.step)
        return _Found([facts], files, names, problems)
    index = run.index[query.source]
    blocks = index.blocks()
    return _Found(blocks, index.files(), index.names, list(index.problems))


def _mask(facts: Facts, query: Query, names: AllNames) -> NDArray[np.bool_]:
    kept = np.ones(len(facts), bool)
    if query.uid is not None:
        number_ = names.of["uid"].find(query.uid)
        kept &= facts["uid"] == (-2 if number_ is None else number_)
    for name, values in (("reward", facts["reward"]), ("length", facts["length"])):
        low, high = getattr(query, f"min_{name}"), getattr(query, f"max_{name}")
        if low is not None:
            kept &= values >= low
        if high is not None:
            kept &= values <= high
    for name in ("stop_reason", "ended_by", "data_source"):
        if wanted := getattr(query, name):
            numbers = [found for each in wanted if (found := names.of[name].find(each)) is not None]
            kept &= np.isin(facts[name], numbers)
    if query.tools == "any":
        kept &= facts["tool_calls"] > 0
    elif query.tools == "none":
        kept &= facts["tool_calls"] == 0
    elif query.tools == "failed":
        kept &= facts["failures"] > 0
    return kept


def _places(found: _Found) -> NDArray[np.int64]:
    """By the number of a file, where its rollouts stand: the newest step first. Shifted, to leave room for the row."""
    order = sorted(range(len(found.files)), key=lambda each: (-found.files[each].step, found.files[each].part))
    ranks = np.zeros(len(found.files), np.int64)
    ranks[order] = np.arange(len(order))
    return ranks << 32


def _best(found: _Found, query: Query, matching: Sequence[NDArray[np.bool_]] | None) -> tuple[Facts, int]:
    """The page, and how many rollouts the query has. Blocks are never joined: of each, only its best are kept."""
    places, count = _places(found), query.offset + query.limit
    total, parts = 0, []
    for number_, block in enumerate(found.blocks):
        kept = _mask(block, query, found.names)
        if matching is not None:
            kept &= matching[number_]
        facts = block[kept]
        total += len(facts)
        parts.append(_first(facts, _keys(facts, query, places), count))
    facts = _joined([facts for facts, _, _ in parts])
    if not len(facts):
        return facts, total
    keys, place = (np.concatenate([part[which] for part in parts]) for which in (1, 2))
    return facts[np.lexsort((place, keys))][query.offset : count], total


def _keys(facts: Facts, query: Query, places: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """What to sort by, smallest first; of equal ones, by place."""
    place = places[facts["file"]] | facts["row"]
    if query.sort == "place":
        return (place if query.is_ascending else -place), place
    values = facts[query.sort].astype(np.float64)
    # What is not known comes last, whatever the order.
    return np.nan_to_num(values if query.is_ascending else -values, nan=np.inf, posinf=1e300, neginf=-1e300), place


def _first(
    facts: Facts, by: tuple[NDArray[Any], NDArray[np.int64]], count: int
) -> tuple[Facts, NDArray[Any], NDArray[np.int64]]:
    """The ``count`` first of them, in any order."""
    keys, place = by
    if len(facts) > count:
        limit = np.partition(keys, count - 1)[count - 1]
        before, equal = np.flatnonzero(keys < limit), np.flatnonzero(keys == limit)
        need = count - len(before)
        if len(equal) > need:
            equal = equal[np.argpartition(place[equal], need - 1)[:need]]
        chosen = np.concatenate([before, equal])
        return facts[chosen], keys[chosen], place[chosen]
    return facts, keys, place


def _matching(found: _Found, text: str) -> list[NDArray[np.bool_]]:
    """Which rollouts of one step have a text."""
    (facts,) = found.blocks
    kept = np.zeros(len(facts), bool)
    for number_, file in enumerate(found.files):
        opened = try_open(file, [])  # what cannot be read was reported before
        if opened is not None:
            with opened:
                of_file = facts["file"] == number_
                kept[of_file] = opened.matching(text)[facts["row"][of_file]]
    return [kept]


def _search_all(query: Query, found: _Found) -> tuple[Facts, int, str | None]:
    """Search the texts from the newest step to the oldest, for a limited time. What was found is sorted as asked. In
    the order of place, it is enough to find a page; in any other, the best may come last."""
    until = time.monotonic() + _SEARCH_S
    is_by_place = query.sort == "place"
    most = query.offset + query.limit if is_by_place else math.inf
    places = _places(found)
    order = np.argsort(places if query.is_ascending or not is_by_place else -places, kind="stable")
    begin = 0
    if query.cursor:
        match = _CURSOR.fullmatch(query.cursor)
        if match is None or int(match[1]) >= len(order):
            raise bad_request("cursor: is not one that this server gave out.")
        begin = int(np.flatnonzero(order == int(match[1]))[0])
    spans = _spans(found)
    hits: list[Facts] = []
    num_hits = searched = 0
    for number_ in order[begin:].tolist():
        if searched and (time.monotonic() > until or num_hits >= most):
            return _ordered(_joined(hits), query, places), searched, str(number_)
        of_file = _joined([found.blocks[block][first:last] for block, first, last in spans.get(number_, ())])
        searched += len(of_file)
        of_file = of_file[_mask(of_file, query, found.names)]
        opened = try_open(found.files[number_], found.problems) if len(of_file) else None
        if opened is not None:
            with opened:
                hits.append(of_file[opened.matching(query.text)[of_file["row"]]])
            num_hits += len(hits[-1])
    return _ordered(_joined(hits), query, places), searched, None


def _ordered(facts: Facts, query: Query, places: NDArray[np.int64]) -> Facts:
    keys, place = _keys(facts, query, places)
    return facts[np.lexsort((place, keys))]


def _spans(found: _Found) -> dict[int, list[tuple[int, int, int]]]:
    """By the number of a file: the block, and from where to where in it, its rollouts are."""
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for number_, block in enumerate(found.blocks):
        files = block["file"]
        edges = [0, *(np.flatnonzero(np.diff(files)) + 1).tolist(), len(files)]
        for begin, end in pairwise(edges):
            if end > begin:
                spans.setdefault(int(files[begin]), []).append((number_, begin, end))
    return spans


def _joined(parts: Sequence[Facts]) -> Facts:
    return np.concatenate(parts) if parts else np.zeros(0, FACTS)


def _read_page(page: Facts, found: _Found) -> list[dict[str, Any]]:
    """The rows of a page, each file opened once."""
    rows_of: dict[int, list[int]] = {}
    for number_, row in zip(page["file"].tolist(), page["row"].tolist(), strict=True):
        rows_of.setdefault(number_, []).append(row)
    read: dict[tuple[int, int], dict[str, Any]] = {}
    for number_, rows in rows_of.items():
        rows_read = read_rows(found.files[number_], rows, found.problems)
        read |= {(number_, row): each for row, each in rows_read.items()}
    wanted = zip(page["file"].tolist(), page["row"].tolist(), strict=True)
    return [read[place] for place in wanted if place in read]


def read_rows(file: RolloutFile, rows: Sequence[int], problems: list[str]) -> dict[int, dict[str, Any]]:
    """Rows of one file as they are listed, by number. A file that cannot be read becomes a problem."""
    opened = try_open(file, problems)
    if opened is None:
        return {}
    with opened:
        try:
            listed = opened.rows(rows, ROW_COLUMNS, lambda row, values: row_of(file.id_of(row), values))
        except Refused as refused:
            problems.append(refused.message)
            return {}
    return dict(zip(rows, listed, strict=True))


def list_steps(run: Run, source: Source) -> dict[str, Any]:
    """The steps that have rollouts. Their numbers of rollouts are known once the index has read them."""
    files, index = run.rollouts[source].files(), run.index[source]
    counts = index.rows_of(files)
    known: dict[int, int] = {}
    for file in files:
        known[file.step] = known.get(file.step, 0) + 1
    state = index.state()
    is_ready = state["state"] == "ready"
    return {
        "source": source,
        "steps": [{"step": step, "num": counts.get(step), "files": num} for step, num in known.items()],
        "total": sum(counts.get(step, 0) for step in known) if is_ready else None,
        "index": state,
        "problems": list(index.problems),
    }
