"""Training on Ray: real Ray, real actors, two nodes on this machine, processes and nodes that end during a run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from command import CUT_DOWN, PROCESS_LIMIT_S, ROOT, metrics
from test_vllm_server import IS_INSTALLED, NO_VLLM, PYTHON

from headwater.cli.process import EXIT_INTERRUPTED
from headwater.observe.doctor import examine
from headwater.observe.run_directory import RunDirectory
from headwater.rollout.ledger import LedgerCounts

pytest.importorskip("ray")

pytestmark = pytest.mark.slow
ONE_RAY = pytest.mark.xdist_group("ray")
"""One at a time: each starts dozens of processes."""

NODES = """
import functools, json, sys
from ray.cluster_utils import Cluster
# Ray gives up after 30 s, which a busy machine may need.
Cluster._wait_for_node = functools.partialmethod(Cluster._wait_for_node, timeout=300)
cluster = Cluster()
nodes = {}
for line in sys.stdin:
    command, name, num_cpus, dashboard = line.split()
    if command == "add":
        options = {"include_dashboard": dashboard == "True", "dashboard_host": "127.0.0.1"} if not nodes else {}
        options |= {"num_cpus": int(num_cpus), "object_store_memory": 150 * 2**20, "labels": {"role": name}}
        for num_left in (2, 1, 0):
            try:
                nodes[name] = cluster.add_node(**options)
                break
            except Exception:  # its other limits of 30 s cannot be changed
                if not num_left:
                    raise
    else:
        cluster.remove_node(nodes[name], allow_graceful=False)
    print(cluster.address, cluster.head_node.webui_url if dashboard == "True" else "", flush=True)
cluster.shutdown()
"""
"""Adds and removes nodes as its standard input says, and removes all of them when that ends."""

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listen on the loopback address only
    "RAY_AUTH_TOKEN": "0123456789abcdef0123456789abcdef",  # otherwise Ray writes one to the home directory
    "RAY_AUTH_MODE": "token",
    "RAY_gcs_server_port_wait_time_s": "300",  # for a busy machine
}
REWARD = "tests/integration/varied_reward.py:compute_score"
NO_EVALUATION = ["eval.before=false", "eval.after=false", "eval.every_steps=0"]
TOOLS = [
    "tools.use=[calculator]", "data.train=[calculator]", "rollout.workflow=tool_agent", "data.task_args={}",
    "data.num_train_rows=500",
]  # fmt: skip
TASK_STEPS = 60
"""The held-out reward was 0.89, 0.95, 0.98 and 1.00 after 30, 40, 50 and 60 steps of this asynchronous run."""
SMALL_ACTORS = ["cluster.learner.cpus_per_rank=0.25", "cluster.rollout.cpus_per_server=0.25"]


class Nodes:
    """Ray nodes in a separate process, each with the label ``role``."""

    def __init__(self) -> None:
        self.address = ""
        self.dashboard = ""
        self._process = subprocess.Popen(
            [sys.executable, "-c", NODES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **ENVIRONMENT}, start_new_session=True,
        )  # fmt: skip

    def add(self, role: str, num_cpus: int, *, dashboard: bool = False) -> None:
        self._tell(f"add {role} {num_cpus} {dashboard}")

    def remove(self, role: str) -> None:
        self._tell(f"remove {role} 0 False")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        self.address, _, self.dashboard = self._process.stdout.readline().strip().partition(" ")
        assert self.address, "the process that holds the nodes has ended"

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(300)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    try:
        yield made
    finally:
        made.close()


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "headwater.cli.main", "train", *map(str, arguments)]


@contextmanager
def training(
    root: Path, *settings: str, environment: Mapping[str, str] = ENVIRONMENT, resume: bool = False
) -> Iterator[subprocess.Popen[str]]:
    start = ["--resume", root / "quickstart"] if resume else ["quickstart", "cluster=ray", f"run.root={root}"]
    with (root / "output.txt").open("w") as output:
        process = subprocess.Popen(
            command(*start, *settings),
            cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment},
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def output(root: Path) -> str:
    return (root / "output.txt").read_text()


def events(run: Path) -> str:
    file = run / "logs" / "cluster.log"
    return file.read_text() if file.exists() else ""


def until(process: subprocess.Popen[str], root: Path, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PROCESS_LIMIT_S
    while not is_so():
        assert process.poll() is None, output(root)
        assert time.monotonic() < deadline, output(root)
        time.sleep(0.2)


def num_steps(run: Path) -> int:
    return len(metrics(run, "train")) if (run / "metrics.jsonl").exists() else 0


def actor_pid(run: Path, pattern: str) -> int:
    """The process of the newest actor whose line matches."""
    lines = [line for line in events(run).splitlines() if re.search(pattern, line)]
    return int(re.search(r"process (\d+)", lines[-1])[1])


def counts_of(run: Path) -> LedgerCounts:
    counts = LedgerCounts(**json.loads((run / "status.json").read_text())["ledger"])
    assert counts.is_balanced
    return counts


def check_ledger(run: Path, num_steps: int, num_prompts: int = 32) -> None:
    """Every step trained whole groups once, and nothing is counted twice or lost."""
    records = [each for each in RunDirectory.open(run).read_ledger() if each["kind"] == "step"]
    assert [record["step"] for record in records] == list(range(1, num_steps + 1))
    trained = [each["id"] for record in records for each in record["trained"]]
    assert len(trained) == len(set(trained)) == num_prompts * num_steps
    counts = counts_of(run)
    assert (counts.trained, counts.dropped) == (num_prompts * num_steps, 0)


@ONE_RAY
def test_too_few_resources_are_an_error_that_says_which_setting_to_change(tmp_path):
    settings = ["cluster.learner.num_ranks=200", "cluster.object_store_mib=100"]
    with training(tmp_path, *settings) as process:
        assert process.wait(PROCESS_LIMIT_S) == 2
    text = output(tmp_path)
    assert "cluster.learner.num_ranks = 200" in text, text
    assert "200 learner ranks need 2 CPUs each, 400 CPUs in total; the cluster has 1 node" in " ".join(text.split())
    assert not (tmp_path / "quickstart").exists()


@pytest.mark.timeout(1200)
@ONE_RAY
def test_two_ranks_and_two_servers_learn_on_two_nodes_although_a_server_and_a_node_end(tmp_path, nodes):
    nodes.add("learner", 1)
    nodes.add("rollout", 1)
    run = tmp_path / "quickstart"
    settings = [
        *SMALL_ACTORS, "cluster.learner.num_ranks=2", "cluster.learner.labels={role: learner}",
        "rollout.placement=disaggregated", "rollout.launch.num_servers=2", 'cluster.rollout.labels={role: "!learner"}',
        "rollout.max_staleness=1", "eval.every_steps=0", "trainer.total_steps=10000",
    ]  # fmt: skip
    environment = {**ENVIRONMENT, "RAY_ADDRESS": nodes.address}
    with training(tmp_path, *settings, environment=environment) as process:
        until(process, tmp_path, lambda: num_steps(run) >= 5)
        os.kill(actor_pid(run, "rollout-0 serves"), signal.SIGKILL)
        until(process, tmp_path, lambda: events(run).count("rollout-0 serves") >= 2 and num_steps(run) >= 15)
        nodes.add("spare", 1)
        nodes.remove("rollout")
        # Two servers, one that was killed, and both on the spare node.
        until(process, tmp_path, lambda: len(re.findall(r"rollout-\d serves", events(run))) >= 5)
        begun = num_steps(run)
        until(process, tmp_path, lambda: num_steps(run) >= begun + 3)
        process.send_signal(signal.SIGINT)
        assert process.wait(PROCESS_LIMIT_S) == EXIT_INTERRUPTED, output(tmp_path)
    # How many steps it took until then depends on the machine, so only the resumed run has a last step.
    total_steps = max(TASK_STEPS, num_steps(run) + 1)
    more = [f"trainer.total_steps={total_steps}"]
    with training(tmp_path, *more, environment=environment, resume=True) as process:
        assert process.wait(PROCESS_LIMIT_S) == 0, output(tmp_path)
    evaluations = metrics(run, "eval")
    assert evaluations[0]["reward/mean"] < 0.3
    assert evaluations[-1]["step"] == total_steps
    assert evaluations[-1]["reward/mean"] > 0.9, [(each["step"], each["reward/mean"]) for each in evaluations]
    assert all(each["ranks/memory_peak_gib_max"] > 0 for each in metrics(run, "train"))
    check_ledger(run, total_steps)
    names = {path.name for path in (run / "logs").iterdir()}
    assert names == {"cluster.log", "learner-0.log", "learner-1.log", "rollout-0.log", "rollout-1.log"}


@pytest.mark.timeout(1200)
@ONE_RAY
def test_a_run_with_reward_and_tool_actors_survives_the_end_of_a_rank_as_often_as_its_config_allows(tmp_path):
    run = tmp_path / "quickstart"
    settings = [
        *SMALL_ACTORS, "cluster.learner.num_ranks=2", "rollout.launch.num_servers=1", "cluster.object_store_mib=100",
        "cluster.max_restarts=1", "trainer.checkpoint_every_steps=2", "trainer.total_steps=10000",
        "cluster.reward.num_actors=1", f"reward.function={REWARD}",
        "warm_start.num_steps=5", *NO_EVALUATION, *TOOLS, "cluster.tools.num_actors=1",
        "cluster.tools.cpus_per_actor=0.25", "rollout.max_new_tokens=16", "cluster.learner.cpus_per_rank=0.1",
    ]  # fmt: skip
    with training(tmp_path, *settings) as process:
        until(process, tmp_path, lambda: num_steps(run) >= 3)
        os.kill(actor_pid(run, "learner rank 1"), signal.SIGKILL)
        until(process, tmp_path, lambda: events(run).count("learner rank 1") >= 2)
        begun = num_steps(run)
        until(process, tmp_path, lambda: num_steps(run) >= begun + 2)
        os.kill(actor_pid(run, "learner rank 0"), signal.SIGKILL)
        began = time.monotonic()
        code = process.wait(PROCESS_LIMIT_S)
    assert code == 2, output(tmp_path)
    assert time.monotonic() - began < 300, "the run must end soon after its rank, long before learner.rank_timeout_s"
    text = " ".join(output(tmp_path).split())
    assert "the run continues from its last checkpoint (restart 1 of cluster.max_restarts = 1)" in text
    assert re.search(r"rank 0 \(node 127\.0\.0\.1, process \d+\) has ended", text.rpartition("Resuming")[2]), text
    assert RunDirectory.open(run).checkpoint_steps()
    assert all(record["reward/failed_calls"] == 0 for record in metrics(run, "train"))
    assert {"reward-0.log", "tools-0.log"} <= {path.name for path in (run / "logs").iterdir()}
    diagnosis = examine(RunDirectory.open(run))
    assert diagnosis.ledger.missing == 0, "what was dispatched when the rank ended is counted"
    assert [each.is_alive for each in diagnosis.ranks] == [False, True], diagnosis.ranks
    assert diagnosis.ranks[0].pid == actor_pid(run, "learner rank 0")


@pytest.mark.timeout(1200)
@ONE_RAY
def test_a_learner_node_that_leaves_ends_the_run_which_resumes_when_there_is_another(tmp_path, nodes):
    """Meanwhile the ranks of one node send their weights to the servers of another one themselves."""
    for role in ("loop", "learner", "rollout"):
        nodes.add(role, 1)
    run, environment = tmp_path / "quickstart", {**ENVIRONMENT, "RAY_ADDRESS": nodes.address}
    settings = [
        *CUT_DOWN, *NO_EVALUATION, *SMALL_ACTORS, "cluster.learner.num_ranks=2", "trainer.checkpoint_every_steps=2",
        "cluster.learner.labels={role: learner}", "cluster.rollout.labels={role: rollout}", "trainer.total_steps=10000",
        "rollout.placement=disaggregated", "rollout.weight_transfer=collective", "rollout.max_staleness=1",
    ]  # fmt: skip
    with training(tmp_path, *settings, environment=environment) as process:
        until(process, tmp_path, lambda: num_steps(run) >= 3)
        nodes.remove("learner")
        assert process.wait(PROCESS_LIMIT_S) == 2, output(tmp_path)
    text = " ".join(output(tmp_path).split())
    assert re.search(r"rank [01] \(node 127\.0\.0\.1, process \d+\) has ended", text), text
    assert counts_of(run).trained == 4 * len(RunDirectory.open(run).read_ledger())
    assert all(each["weights/bytes"] > 0 for each in metrics(run, "train")), metrics(run, "train")[0].keys()
    nodes.add("learner", 1)
    last = RunDirectory.open(run).checkpoint_steps()[-1]
    with training(tmp_path, f"trainer.total_steps={last + 2}", environment=environment, resume=True) as process:
        assert process.wait(PROCESS_LIMIT_S) == 0, output(tmp_path)
    check_ledger(run, last + 2, num_prompts=4)


@ONE_RAY
@pytest.mark.skipif(
    importlib.util.find_spec("aiohttp_cors") is None,
    reason="NO JOBS OF RAY: its job server is not installed; install it with pip install 'ray[default]'",
)
def test_a_run_is_a_job_of_ray(tmp_path, nodes):
    nodes.add("head", 2, dashboard=True)
    settings = [*CUT_DOWN, *NO_EVALUATION, *SMALL_ACTORS, f"run.root={tmp_path}"]
    submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", f"http://{nodes.dashboard}"]
    done = subprocess.run(
        [*submit, "--", *command("quickstart", "cluster=ray", *settings, f"reward.function={ROOT}/{REWARD}")],
        capture_output=True, text=True, timeout=PROCESS_LIMIT_S, env={**os.environ, **ENVIRONMENT}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "succeeded" in done.stdout
    check_ledger(tmp_path / "quickstart", 2, num_prompts=4)


@pytest.mark.skipif(not IS_INSTALLED, reason=NO_VLLM)
@pytest.mark.xdist_group("vllm")
def test_servers_of_vllm_are_actors(tmp_path):
    run = tmp_path / "quickstart"
    settings = [
        *CUT_DOWN, *NO_EVALUATION, *SMALL_ACTORS, "cluster.object_store_mib=100", "rollout.backend=vllm",
        "rollout.placement=disaggregated", f"rollout.launch.python={PYTHON}", "rollout.max_staleness=1",
    ]  # fmt: skip
    with training(tmp_path, *settings) as process:
        assert process.wait(PROCESS_LIMIT_S) == 0, output(tmp_path)
    assert re.search(r"rollout-0 serves at http://127\.0\.0\.1:\d+ \(node", events(run)), events(run)
    assert "vllm" in (run / "logs" / "rollout-0.log").read_text().lower()
    check_ledger(run, 2, num_prompts=4)
