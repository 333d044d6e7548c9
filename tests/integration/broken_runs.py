"""Makes a finished run hostile, huge or damaged, for tests of what reads run directories."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SCRIPT = "</pre><script>window.wasRun = 1</script><img src=x onerror='window.wasRun = 2'>"
MILLION = 1_000_000


def make_hostile(run: Path) -> None:
    """Script where a model, a dataset or a log can put text."""
    file = run / "rollouts" / "step_000003.parquet"
    table = pq.read_table(file)
    messages = json.dumps([{"role": "user", "content": SCRIPT}, {"role": "assistant", "content": SCRIPT}])
    for name, text in (("prompt", SCRIPT), ("response", SCRIPT), ("messages", messages), ("ground_truth", SCRIPT)):
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, pa.array([text] * len(table), pa.string()))
    pq.write_table(table, file)
    status = json.loads((run / "status.json").read_text())
    status["notices"] = [SCRIPT]
    (run / "status.json").write_text(json.dumps(status))


def make_huge(run: Path) -> None:
    """One rollout with a million tokens more."""
    file = run / "rollouts" / "step_000003.parquet"
    rows = pq.read_table(file)
    first = rows.slice(0, 1).to_pylist()[0]
    length = len(first["tokens"])
    for name, value in first.items():
        if isinstance(value, list) and len(value) == length:
            first[name] = value + [value[-1]] * MILLION
    first["response_length"] += MILLION
    pq.write_table(pa.Table.from_pylist([first], schema=rows.schema), file)


def make_damaged(run: Path) -> None:
    """A run that was copied while it was written."""
    for name in ("metrics.jsonl", "status.json", "config.yaml", "ledger.jsonl"):
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[: len(content) * 2 // 3])
    file = run / "rollouts" / "step_000003.parquet"
    file.write_bytes(file.read_bytes()[:500])
