"""trackio and MLflow, in an environment of their own: they ask for other versions of packages than the tests use."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from command import PROCESS_LIMIT_S, ROOT, python_of

PYTHON, IS_INSTALLED = python_of("trackers")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not IS_INSTALLED, reason=f"NO TRACKIO AND MLFLOW: not installed for {PYTHON}; run `make setup-trackers`"
    ),
]

LOG = """
import json, sys
from pathlib import Path
from headwater.observe.trackers import Trackers

rows = [{"prompt": "1+1=", "response": "2", "reward": 1.0}, {"prompt": "2+2=", "response": "5", "reward": 0.0}]
for steps in ((1, 2), (2, 3)):  # a resumed run repeats steps
    made = Trackers.of([sys.argv[1]], {})
    config = {"run": {"name": "small"}, "data": {"train": ("a", "b")}, "eval": {}}
    made.start(config, "small", project="sums", folder=Path(sys.argv[2]))
    for step in steps:
        made.log(step, {"reward/mean": step / 4, "tools/calls": 1, "tools/calls/x": 2.5, "odd": float("nan")})
    made.table(steps[-1], "eval/samples", rows)
    problems = made.finish(300.0)
    assert not problems, problems
"""

READ = {
    "trackio": """
from trackio.sqlite_storage import SQLiteStorage
logs = SQLiteStorage.get_logs("sums", "small")
values = [(each["step"], each["reward/mean"]) for each in logs if "reward/mean" in each]
tables = [each["eval/samples"]["_value"] for each in logs if "eval/samples" in each]
""",
    "mlflow": """
from mlflow.tracking import MlflowClient
folder = Path(sys.argv[1]) / "mlflow"
client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
experiment = client.get_experiment_by_name("sums")
(run,) = client.search_runs([experiment.experiment_id])
assert run.info.status == "FINISHED" and run.info.run_name == "small", run
assert run.data.params["data.train"] == "['a', 'b']", run.data.params
values = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "reward/mean")]
table = json.loads(next(folder.rglob("samples.json")).read_text())
tables = [table["data"][:2], table["data"][2:]]
""",
}


@pytest.mark.parametrize("name", READ)
def test_a_run_and_its_resume_are_one_entry(name, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TRACKIO_DIR": str(tmp_path / "trackio")}
    environment |= {"HF_HUB_OFFLINE": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "GIT_PYTHON_REFRESH": "quiet"}
    environment.pop("MLFLOW_TRACKING_URI", None)

    def run(code: str, *arguments: object) -> str:
        command = [str(PYTHON), "-c", code, *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PROCESS_LIMIT_S, env=environment, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(LOG, name, tmp_path)
    show = "import json, sys\nfrom pathlib import Path\n" + READ[name] + "print(json.dumps([values, tables]))"
    values, tables = json.loads(run(show, tmp_path).splitlines()[-1])
    assert values == [[1, 0.25], [2, 0.5], [2, 0.5], [3, 0.75]]
    assert len(tables) == 2
    assert "1+1=" in json.dumps(tables[0])
