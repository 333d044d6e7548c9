"""How a run is: its row in the listing, its summary, its ledger, its engine and the doctor's findings."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from headwater.core.errors import HeadwaterError
from headwater.core.records import DropKind
from headwater.dashboard.metric_texts import texts
from headwater.dashboard.plain_values import finite
from headwater.dashboard.rollout_files import FOLDERS
from headwater.dashboard.runs import Run
from headwater.dashboard.series import mean_lag, sampled
from headwater.observe.doctor import Diagnosis, examine
from headwater.observe.evidence import recorded_config
from headwater.observe.run_directory import last_records
from headwater.observe.status_file import COUNTS, RunStatus, read_status

_NUM_HISTORY = 60
_LINE_BYTES = 64 << 10
_FRESH_S, _FRESH_IF_OVER_S = 2.0, 30.0
"""A diagnosis depends on the time, so it is made again after this long, even if no file has changed."""
_HEADLINES = (
    "reward/mean", "response_length/mean", "actor/entropy", "rollout_gap/logprob_abs_mean", "kl/reference",
    "throughput/tokens_per_s", "time/step_s", "memory/host_peak_gib", "memory/gpu_peak_gib",
)  # fmt: skip
_LOWER_IS_BETTER = ("rollout_gap/", "time/", "memory/", "kl/")
_ENGINE_KEYS = (
    "engine/running_mean", "engine/waiting_mean", "engine/kv_used_mean", "engine/kv_used_max",
    "engine/cache_hit_fraction", "engine/generated_tokens", "throughput/generated_tokens_per_s",
)  # fmt: skip
DROP_TEXTS: Mapping[str, str] = {
    DropKind.FAILED: "The workflow raised an error.",
    DropKind.INVALID: "The workflow returned something that cannot be trained on.",
    DropKind.ENGINE_FAILED: "The engine could not answer a request.",
    DropKind.AGENT_FAILED: "An agent raised, ended with an error, was killed, or never called the model.",
    DropKind.AGENT_TIMED_OUT: "An agent did not end within its time limit.",
    DropKind.REWARD_FAILED: "The reward raised an error or returned something that is not a number.",
    DropKind.REWARD_TIMED_OUT: "A reward took longer than reward.timeout_s.",
    DropKind.TIMED_OUT: "The episodes took longer than rollout.episode_timeout_s.",
    DropKind.REJECTED: "The workflow returned None.",
    DropKind.FILTERED: "All samples have the same reward, so there is nothing to learn (algorithm.filter_groups).",
    DropKind.REFUSED: "rollout.should_accept returned false.",
    DropKind.STALE: "Its tokens are older than rollout.max_staleness allows.",
}
_UNNAMED = "reason not recorded"


class Overview:
    """Answers about runs. What is expensive is kept until a file changes."""

    def __init__(self) -> None:
        self._kept: dict[Path, tuple[tuple[object, ...], float, Diagnosis]] = {}
        self._rows: dict[Path, tuple[Diagnosis, dict[str, Any]]] = {}

    def diagnosis(self, run: Run) -> Diagnosis:
        """The doctor's. The contents of checkpoints are not read."""
        signature, now = run.signature(), time.monotonic()
        kept = self._kept.get(run.path)
        if kept is not None and kept[0] == signature and now - kept[1] < _fresh_s(kept[2]):
            return kept[2]
        try:
            found = examine(run.directory, most_bytes=0)
        except OSError:
            run.check()  # it was deleted meanwhile
            raise
        self._kept[run.path] = signature, now, found
        return found

    def row(self, run: Run) -> dict[str, Any]:
        """The run's line in the listing."""
        diagnosis = self.diagnosis(run)
        kept = self._rows.get(run.path)
        if kept is not None and kept[0] is diagnosis:
            return kept[1]
        row = self._row(run, diagnosis)
        self._rows[run.path] = diagnosis, row
        return row

    def _row(self, run: Run, diagnosis: Diagnosis) -> dict[str, Any]:
        status, last = status_of(run), run.directory.last_metrics(20)
        train = _newest(last, "train")
        evaluated = _newest(last, "eval") or _newest(run.directory.last_metrics(200), "eval")
        config = settings_of(run)
        times = [each.get("time") for each in last] + [status.time if status else None]
        numbers = [value for value in map(finite, times) if value is not None]
        return {
            "name": run.name,
            "state": diagnosis.life.state,
            "state_text": diagnosis.life.text,
            "step": diagnosis.step,
            "total_steps": diagnosis.total_steps,
            "reward": finite(train.get("reward/mean")),
            "eval_reward": finite(evaluated.get("reward/mean")),
            "tokens_per_s": finite(train.get("throughput/tokens_per_s")),
            "staleness": finite(mean_lag(train)),
            "step_s": finite(diagnosis.step_s),
            "message": _message(diagnosis),
            "started": status.started if status else _changed(run.path / "config.yaml"),
            "updated": max(numbers, default=_changed(run.path / "config.yaml")),
            "model": config.model.path if config else "",
            "data": _joined(config.data.train) if config else "",
            "has_rollouts": any(files.exists() for files in run.rollouts.values()),
            "reward_history": history(run.directory.metrics_file),
        }

    def summary(self, run: Run) -> dict[str, Any]:
        """Everything about a run that has one value."""
        diagnosis, status, directory = self.diagnosis(run), status_of(run), run.directory
        with run.records.lock:
            run.records.refresh()
            tables = run.records.tables
            headlines = [each for key in _HEADLINES if (each := _headline(tables["train"], key)) is not None]
            num_train, num_eval = len(tables["train"]), len(tables["eval"])
            skipped = run.records.num_skipped
        problems = [f"{skipped} lines of metrics.jsonl are no records and were skipped."] if skipped else []
        return {
            **self.row(run),
            "path": str(run.path),
            "run_id": _text(directory.id_file),
            "version": diagnosis.version,
            "notices": list(status.notices) if status else [],
            "log": [asdict(line) for line in diagnosis.log],
            "error": diagnosis.error,
            "stage": asdict(diagnosis.stage) if diagnosis.stage else None,
            "checkpoints": list(diagnosis.checkpoint_steps),
            "has_trace": bool(trace_files(run.path)),
            "num_train": num_train,
            "num_eval": num_eval,
            "files": {
                "metrics": _size(directory.metrics_file),
                "ledger": _size(directory.ledger_file),
                "status": _size(directory.status_file),
                **{FOLDERS[source]: files.count() for source, files in run.rollouts.items()},
            },
            "episodes": dict(diagnosis.episodes),
            "oldest_groups": [
                {"uid": each.uid, "seconds": each.seconds, "doing": each.doing} for each in diagnosis.oldest_groups
            ],
            "summary": headlines,
            "resume": diagnosis.resume,
            "problems": problems,
        }

    def doctor(self, run: Run) -> dict[str, Any]:
        return self.diagnosis(run).to_json()

    def ledger(self, run: Run) -> dict[str, Any]:
        """Where the dispatched groups are. What is reported as sent out always equals the sum of the parts."""
        problems: list[str] = []
        status = status_of(run, problems)
        counts: dict[str, int] | None
        drops: dict[str, tuple[int, str]]
        at: float | None
        if status is not None and status.counts is not None:
            counts, source, at = dict(status.counts), "status.json", status.time
            drops = {kind.value: (each.count, each.message) for kind, each in status.drops.items()}
        else:
            counts, drops, at = _recorded_ledger(run)
            source = "ledger.jsonl" if counts else "none"
        counts = counts or dict.fromkeys(COUNTS, 0)
        parts = _divided(counts["dropped"], drops)
        missing = counts["dispatched"] - sum(counts[name] for name in COUNTS if name != "dispatched")
        return {
            "time": at,
            "source": source,
            **counts,
            "missing": missing,
            "drops": [
                {"kind": kind, "count": count, "text": DROP_TEXTS.get(kind, ""), "message": message}
                for kind, (count, message) in parts.items()
            ],
            "balanced": missing == 0,
            "problems": problems,
        }

    def engine(self, run: Run) -> dict[str, Any]:
        """What generates: now, and over the last steps."""
        problems: list[str] = []
        diagnosis, status = self.diagnosis(run), status_of(run, problems)
        told = status.engine if status else {}
        with run.records.lock:
            run.records.refresh()
            train = run.records.tables["train"]
            past = sampled(train, [key for key in _ENGINE_KEYS if key in set(train.names())], 500)
        return {
            "source": "status.json",
            "time": status.time if status else None,
            "is_live": not diagnosis.life.is_over and status is not None,
            "version": status.version if status else None,
            "engine": {**engine_numbers(told), "num_restarts": status.engine_restarts} if status and told else None,
            "servers": [asdict(each) for each in status.servers] if status else [],
            "history": {"steps": past["steps"], "series": past["series"]},
            "capacity": diagnosis.capacity,
            "waits": diagnosis.to_json()["waits"],
            "problems": problems,
        }


def engine_numbers(told: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an engine in the same words, whichever engine told it."""
    metrics = told.get("metrics")
    numbers = (
        {name: value for name, value in metrics.items() if finite(value) is not None}
        if isinstance(metrics, Mapping)
        else {}
    )
    pages, cached = finite(numbers.get("kv_pages_total")), finite(numbers.get("num_tokens_cached"))
    prefilled = finite(numbers.get("num_tokens_prefilled"))
    prompts = (cached or 0) + (prefilled or 0)
    return {
        "num_running": told.get("num_running"),
        "num_waiting": told.get("num_waiting"),
        "kv_used": numbers["kv_pages_used"] / pages if pages and "kv_pages_used" in numbers else numbers.get("kv_used"),
        "cache_hits": cached / prompts if cached is not None and prompts else None,
        "tokens_per_s": numbers.get("tokens_per_s"),
        "is_paused": bool(told.get("is_paused")),
        "is_asleep": bool(told.get("is_asleep")),
        "metrics": numbers,
    }


def status_of(run: Run, problems: list[str] | None = None) -> RunStatus | None:
    """None if there is none, or it cannot be read, which ``problems`` gets."""
    try:
        return read_status(run.directory.status_file)
    except HeadwaterError as error:
        if problems is not None:
            problems.append(f"{error}.")
        return None


def settings_of(run: Run) -> Any:
    """The run's config; None if this version cannot read it."""
    try:
        file = run.directory.config_file
        found = file.stat()
        return recorded_config(file, found.st_mtime_ns, found.st_size).config
    except (HeadwaterError, OSError, ValueError):
        return None


def trace_files(path: Path) -> list[Path]:
    """``trace.json`` and those of later parts of the run, oldest first."""
    numbered = {each: each.stem.removeprefix("trace-") for each in path.glob("trace-*.json")}
    later = sorted((int(number), each) for each, number in numbered.items() if number.isdecimal())
    return [each for each in (path / "trace.json", *(each for _, each in later)) if each.is_file()]


def history(path: Path) -> list[float]:
    """A few rewards over the whole run. Of a long file, only as many lines are read."""
    try:
        size = path.stat().st_size
        if size <= 4 * _LINE_BYTES:
            records = [each for each in last_records(path, None).records if each["kind"] == "train"]
            step = max(1, math.ceil(len(records) / _NUM_HISTORY))
            found = [finite(each.get("reward/mean")) for each in records[::step]]
        else:
            with path.open("rb") as file:
                places = [size * place // _NUM_HISTORY for place in range(_NUM_HISTORY)]
                found = [_reward_after(file, place) for place in places]
    except OSError:
        return []
    return [value for value in found if value is not None]


def _reward_after(file: Any, place: int) -> float | None:
    """The reward in the first training record that begins after ``place``."""
    file.seek(place)
    if place:
        file.readline(_LINE_BYTES)
    for _ in range(3):  # evaluations have lines, too
        try:
            record = json.loads(file.readline(_LINE_BYTES))
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and record.get("kind") == "train":
            return finite(record.get("reward/mean"))
    return None


def _headline(table: Any, key: str) -> dict[str, Any] | None:
    values = table.column(key)
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    best = values.min() if key.startswith(_LOWER_IS_BETTER) else values.max()
    text = texts().of(key, "train").text
    return {"key": key, "text": text, "first": float(values[0]), "last": float(values[-1]), "best": float(best)}


def _newest(records: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The last record of a kind; empty if there is none."""
    return next((each for each in reversed(records) if each["kind"] == kind), {})


def _recorded_ledger(run: Run) -> tuple[dict[str, int] | None, dict[str, tuple[int, str]], float | None]:
    """The counts of the last step, and drops of all steps, from ``ledger.jsonl``."""
    records = [each for each in run.directory.last_ledger(3) if each["kind"] == "step"]
    if not records:
        return None, {}, None
    try:
        counts = {name: int(records[-1]["counts"][name]) for name in COUNTS}
    except (KeyError, TypeError, ValueError):
        return None, {}, None
    drops: dict[str, tuple[int, str]] = {}
    if counts["dropped"]:
        for record in run.directory.read_ledger():
            for each in record.get("dropped") or ():
                kind = str(each.get("kind", _UNNAMED)) if isinstance(each, Mapping) else _UNNAMED
                message = str(each.get("message", "")) if isinstance(each, Mapping) else ""
                drops[kind] = drops.get(kind, (0, ""))[0] + 1, message
    return counts, drops, finite(records[-1].get("time"))


def _divided(dropped: int, drops: Mapping[str, tuple[int, str]]) -> dict[str, tuple[int, str]]:
    """Drops by kind whose sum is ``dropped``. A live run notes the two one after the other, so they may differ."""
    left = dropped
    parts: dict[str, tuple[int, str]] = {}
    for kind, (count, message) in sorted(drops.items(), key=lambda each: -each[1][0]):
        if taken := min(left, max(0, count)):
            parts[kind] = taken, message
            left -= taken
    if left:
        parts[_UNNAMED] = left, ""
    return parts


def _fresh_s(diagnosis: Diagnosis) -> float:
    return _FRESH_IF_OVER_S if diagnosis.life.is_over else _FRESH_S


def _message(diagnosis: Diagnosis) -> str:
    if diagnosis.error:
        return diagnosis.error.strip().splitlines()[0]
    if diagnosis.stage is not None:
        return f"{diagnosis.stage.name}: {diagnosis.stage.done} of {diagnosis.stage.total}"
    problem = next((each.what for each in diagnosis.findings if each.severity == "problem"), "")
    return problem or (diagnosis.log[-1].message if diagnosis.log else "")


def _joined(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _text(path: Path) -> str:
    try:
        return path.read_bytes()[:200].decode("utf-8", "replace").strip()
    except OSError:
        return ""
