"""MLflow: a server, or a local database in the tracker's folder if no ``tracking_uri`` is given."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headwater.observe.trackers import TRACKERS, TableRecords, require

_MOST_METRICS, _MOST_PARAMS = 1000, 100
"""In one call."""
_LONGEST_PARAM = 6000


@TRACKERS.register
class MLflow:
    def __init__(self, *, tracking_uri: str = "") -> None:
        """``tracking_uri`` is a server or database. Empty means that of MLFLOW_TRACKING_URI, or else a local one."""
        require("mlflow", "mlflow")
        self._uri = tracking_uri
        self._client: Any = None
        self._run_id = ""

    def start(self, config: Mapping[str, Any], name: str, *, project: str, folder: Path) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        folder.mkdir(parents=True, exist_ok=True)
        uri = self._uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder / 'mlflow.db').absolute()}"
        client = self._client = MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name(project)
        # A server keeps files itself; a local database needs a folder for them.
        place = (folder / "artifacts").absolute().as_uri() if uri.startswith("sqlite:") else None
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(project, place)
        id_file = folder / "run_id"
        if id_file.exists():
            self._run_id = id_file.read_text(encoding="utf-8")
            client.update_run(self._run_id, status="RUNNING")
            return  # the settings of a run cannot be logged twice
        self._run_id = client.create_run(experiment_id, run_name=name).info.run_id
        id_file.write_text(self._run_id, encoding="utf-8")
        params = [Param(key, text[:_LONGEST_PARAM]) for key, text in _flat(config)]
        for start in range(0, len(params), _MOST_PARAMS):
            client.log_batch(self._run_id, params=params[start : start + _MOST_PARAMS])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        made = [Metric(_name(key), float(value), now, step) for key, value in metrics.items()]
        for start in range(0, len(made), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=made[start : start + _MOST_METRICS])

    def table(self, step: int, name: str, rows: TableRecords) -> None:
        columns: dict[str, list[Any]] = {key: [row[key] for row in rows] for key in (rows[0] if rows else ())}
        columns["step"] = [step] * len(rows)
        self._client.log_table(self._run_id, columns, f"{_name(name)}.json")

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)


def _name(key: str) -> str:
    """Only these characters are allowed."""
    return "".join(each if each.isalnum() or each in "_-./ :" else "_" for each in key)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield _name(f"{prefix}{name}"), str(value)
