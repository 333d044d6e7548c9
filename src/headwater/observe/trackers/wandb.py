"""Weights & Biases. Without an account, ``trainer.tracker_args.wandb.mode=offline`` writes files for `wandb sync`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from headwater.observe.trackers import TRACKERS, TableRecords, require

_STEP = "trainer/step"
"""The axis of all charts. The package's own step may not become smaller, which that of a resumed run does."""


@TRACKERS.register
class Wandb:
    def __init__(
        self,
        *,
        mode: Literal["online", "offline", "disabled"] | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: tuple[str, ...] = (),
        notes: str | None = None,
    ) -> None:
        """As in ``wandb.init``. Without ``mode``, the variable WANDB_MODE decides, or it is online."""
        require("wandb", "wandb")
        self._options: dict[str, Any] = {
            "mode": mode,
            "entity": entity,
            "group": group,
            "tags": list(tags) or None,
            "notes": notes,
        }
        self._run: Any = None

    def start(self, config: Mapping[str, Any], name: str, *, project: str, folder: Path) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        id_file = folder / "run_id"
        run_id = id_file.read_text(encoding="utf-8") if id_file.exists() else secrets.token_hex(4)
        id_file.write_text(run_id, encoding="utf-8")
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                id=run_id,
                dir=str(folder),
                config=dict(config),
                resume="allow",
                reinit="create_new",
                settings=wandb.Settings(console="off", silent=True),
                **self._options,
            )
        except wandb.errors.UsageError as error:  # there are no credentials, and no terminal to ask for them
            raise RuntimeError(
                f"{error}; run `wandb login`, set WANDB_API_KEY, or use trainer.tracker_args.wandb.mode=offline"
            ) from error
        self._run.define_metric("*", step_metric=_STEP)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, _STEP: step})

    def table(self, step: int, name: str, rows: TableRecords) -> None:
        import wandb

        columns = list(rows[0]) if rows else []
        data = [[row[column] for column in columns] for row in rows]
        self._run.log({name: wandb.Table(columns=columns, data=data), _STEP: step})

    def finish(self) -> None:
        self._run.finish()
