"""Every answer of the API as a plain function of a run and the parameters of the request."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

import headwater
from headwater.dashboard import rollout_groups, rollout_view, series, settings
from headwater.dashboard.engine_view import engine
from headwater.dashboard.errors import bad_request
from headwater.dashboard.ledger_view import ledger
from headwater.dashboard.overview import Overview
from headwater.dashboard.parameters import need, need_step, number, one_of, source_in, whole
from headwater.dashboard.record_log import KINDS
from headwater.dashboard.rollout_query import Query, list_rollouts, list_steps
from headwater.dashboard.runs import Run, Runs
from headwater.dashboard.timeline import Timelines

_MOST_KEYS = 64
_GROUP_SORTS = ("place", "reward", "spread", "length")

Parameters = Mapping[str, str]


class Answers:
    """What the page can ask about runs. All of it may take a while, so it is called in threads."""

    def __init__(self, runs: Runs, servers: tuple[str, ...] = ()) -> None:
        self.runs = runs
        self._servers = servers
        self._overview = Overview()
        self._timelines = Timelines()
        self._tokens = rollout_view.TokenCache()
        self.about_run: Mapping[str, Callable[[Run, Parameters], dict[str, Any]]] = {
            "": self._summary,
            "config": lambda run, given: settings.settings(run),
            "keys": self._keys,
            "metrics": self._metrics,
            "staleness": lambda run, given: self._of_records(run, "train", series.staleness),
            "stages": lambda run, given: self._of_records(run, "train", series.stages),
            "ledger": lambda run, given: ledger(run, self._overview.diagnosis(run).life.is_over),
            "doctor": lambda run, given: self._overview.doctor(run),
            "engine": lambda run, given: engine(run, self._overview.diagnosis(run)),
            "timeline": self._timeline,
            "steps": lambda run, given: list_steps(run, source_in(given)),
            "rollouts": lambda run, given: list_rollouts(run, Query.of(given)),
            "groups": self._groups,
            "group": self._group,
            "prompt": lambda run, given: rollout_groups.over_steps(run, source_in(given), need(given, "uid")),
            "rollout": lambda run, given: rollout_view.rollout(run, need(given, "id"), self._tokens),
            "tokens": self._token_page,
            "mismatches": self._mismatches,
        }
        """By the last part of the path."""

    def info(self) -> dict[str, Any]:
        place = self.runs.place
        return {
            "version": headwater.__version__,
            "runs_dir": str(place.root),
            "is_export": False,
            "exported": None,
            "servers": list(self._servers),
            "single_run": place.single,
            "time": time.time(),
        }

    def listing(self) -> dict[str, Any]:
        """All runs, newest activity first. A run that cannot be read is a problem, and does not hide the others."""
        rows, problems = [], []
        for run in self.runs.all():
            try:
                rows.append(self._overview.row(run))
            except Exception as error:  # noqa: BLE001  whatever is wrong with one folder, the others are shown
                problems.append(f"{run.name} cannot be read ({type(error).__name__}: {error}).")
        return {"runs": sorted(rows, key=lambda row: -(row["updated"] or 0)), "problems": problems}

    def difference(self, given: Parameters) -> dict[str, Any]:
        left, right = (self.runs.get(need(given, side)) for side in ("left", "right"))
        return settings.difference(left, right)

    def of_run(self, name: str, what: str, given: Parameters) -> dict[str, Any]:
        return self.about_run[what](self.runs.get(name), given)

    def state(self, run: Run) -> dict[str, Any]:
        """For the events of one run."""
        row = self._overview.row(run)
        return {"step": row["step"], "state": row["state"]}

    def _summary(self, run: Run, given: Parameters) -> dict[str, Any]:
        return self._overview.summary(run)

    def _keys(self, run: Run, given: Parameters) -> dict[str, Any]:
        with run.records.lock:
            run.records.refresh()
            return series.listed(run.records)

    def _of_records(self, run: Run, kind: str, make: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        with run.records.lock:
            run.records.refresh()
            return make(run.records.tables[kind])

    def _metrics(self, run: Run, given: Parameters) -> dict[str, Any]:
        kind = one_of(given, "kind", KINDS, "train")
        keys = [unquote(key) for key in need(given, "keys").split(",") if key]
        if len(keys) > _MOST_KEYS:
            raise bad_request(f"keys: at most {_MOST_KEYS} metrics can be asked for at once.")
        points = whole(given, "points", 1000, low=20, high=series.MOST_POINTS) or 1000
        first, last = whole(given, "from"), whole(given, "to")
        return {
            "kind": kind,
            **self._of_records(run, kind, lambda table: series.sampled(table, keys, points, first, last)),
        }

    def _timeline(self, run: Run, given: Parameters) -> dict[str, Any]:
        most = whole(given, "max", 2000, low=100, high=10_000) or 2000
        begin, end = number(given, "from"), number(given, "to")
        if begin is not None and end is not None and end <= begin:
            raise bad_request("to: must be larger than from.")
        return self._timelines.window(run, begin, end, most)

    def _groups(self, run: Run, given: Parameters) -> dict[str, Any]:
        sort = one_of(given, "sort", _GROUP_SORTS, "place")
        order = one_of(given, "order", ("asc", "desc"), "asc" if sort == "place" else "desc")
        return rollout_groups.groups(
            run,
            source_in(given),
            need_step(given),
            sort,
            order == "asc",
            whole(given, "offset", 0, low=0) or 0,
            whole(given, "limit", 50, low=1, high=200) or 50,
            given.get("text", ""),
        )

    def _group(self, run: Run, given: Parameters) -> dict[str, Any]:
        return rollout_groups.group(run, source_in(given), need_step(given), given.get("uid", ""))

    def _token_page(self, run: Run, given: Parameters) -> dict[str, Any]:
        offset = whole(given, "offset", 0, low=0) or 0
        limit = whole(given, "limit", 4096, low=1, high=rollout_view.MOST_TOKENS) or 4096
        return rollout_view.token_page(run, need(given, "id"), self._tokens, offset, limit)

    def _mismatches(self, run: Run, given: Parameters) -> dict[str, Any]:
        count = whole(given, "count", 20, low=1, high=1000) or 20
        return rollout_view.mismatches(run, need(given, "id"), self._tokens, count)
