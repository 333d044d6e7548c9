"""How fast the dashboard is with a large run, and how much an open page slows a live one.

    python benchmarks/dashboard.py [--steps 10000] [--rollouts-per-step 100] [--skip-live] [--out FILE.json]

The large run is generated: real rollout files, metrics and ledger lines of a run, repeated with other numbers. Its
rollouts have 40 tokens, but those of four more steps have 8,192 to 32,768. The real server process is then asked what
the page asks when it opens a run, for rollouts at random places, for the long ones, and for listings over all steps.
If there is a Chromium for Playwright, the time until it shows the run is measured, too, with and without the start of
the server. The live part trains the quickstart in pairs with and without an open page that asks for everything it
shows. On a machine with other work, its step times say little; the processor time of the server, as a share of a core,
does.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from options import parser_of
from record import write_record

from headwater.config.explain import to_yaml
from headwater.config.load import load_config
from headwater.dashboard import metric_texts
from headwater.models.load import load_tokenizer
from headwater.trainer.tables import write_tokens

NUM_METRICS = 150
RESPONSE_TOKENS, PROMPT_TOKENS = 24, 16
GROUP = 8
LONG_TOKENS, LONG_ROLLOUTS = (8192, 16384, 24576, 32768), 16
"""Tokens of each rollout of the last steps, and how many each of these steps has."""
_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Of Student's distribution, by the degrees of freedom from one on: for intervals of 95%."""
STEPS_AT_ONCE = 200
OVERVIEW = (
    "", "/keys", "/metrics?keys=" + quote("reward/mean,response_length/mean,actor/entropy,kl/reference"),
    "/metrics?kind=eval&keys=" + quote("reward/mean"), "/staleness", "/stages", "/ledger", "/doctor", "/timeline",
    "/steps",
)  # fmt: skip


# The run


def generate(root: Path, num_steps: int, per_step: int) -> Path:
    """A run directory of ``num_steps`` steps, with the columns that a real one has."""
    run = root / "large"
    (run / "rollouts").mkdir(parents=True)
    config = load_config("quickstart", [f"trainer.total_steps={num_steps}", f"run.root={root}"]).config
    (run / "config.yaml").write_text(to_yaml(config))
    (run / "run_id").write_text("0" * 32)
    tokenizer = load_tokenizer("tiny:qwen3")
    write_tokens(run / "tokens.parquet", tokenizer)
    _write_records(run, num_steps, per_step // GROUP)
    for first in range(1, num_steps + 1, STEPS_AT_ONCE):
        count = min(STEPS_AT_ONCE, num_steps + 1 - first)
        table = _rollouts(first, count, per_step)
        for place in range(count):
            path = run / "rollouts" / f"step_{first + place:06d}.parquet"
            pq.write_table(table.slice(place * per_step, per_step), path)
    for place, tokens in enumerate(LONG_TOKENS):
        step = num_steps + 1 + place
        table = _rollouts(step, 1, LONG_ROLLOUTS, tokens - PROMPT_TOKENS)
        pq.write_table(table, run / "rollouts" / f"step_{step:06d}.parquet", row_group_size=4)
    return run


def _write_records(run: Path, num_steps: int, num_groups: int) -> None:
    rng = np.random.default_rng(0)
    known = json.loads(metric_texts.FILE.read_text())
    names = [key for kind, _, key, _ in known if kind == "train" and "<" not in key][: NUM_METRICS - 3]
    names += ["staleness/lag_0", "staleness/lag_1", "reward/largest_digit/mean"]
    is_whole = rng.random(len(names)) < 0.3  # counts, and metrics that are 0 in most runs
    began = time.time() - num_steps
    with (run / "metrics.jsonl").open("w") as metrics, (run / "ledger.jsonl").open("w") as ledger:
        for step in range(1, num_steps + 1):
            drawn = np.where(is_whole, rng.integers(0, 5, len(names)), rng.random(len(names)))
            values = dict(zip(names, drawn.tolist(), strict=True))
            record = {"kind": "train", "step": step, "time": began + step, **values, "time/step_s": 1.0}
            metrics.write(json.dumps(record) + "\n")
            if step % 100 == 0:
                record = {"kind": "eval", "step": step, "time": began + step, "reward/mean": values["reward/mean"]}
                metrics.write(json.dumps(record) + "\n")
            trained = [
                {"id": step * num_groups + place, "uid": f"task/{place}", "index": place, "epoch": 0,
                 "requests": [[sample, 0, [[step, 2]]] for sample in range(GROUP)]}
                for place in range(num_groups)
            ]  # fmt: skip
            done = step * num_groups
            counts = {"dispatched": done, "trained": done, "dropped": 0, "buffered": 0, "in_flight": 0}
            ledger.write(
                json.dumps({"kind": "step", "step": step, "time": began + step, "weights": "float32-0",
                            "counts": counts, "trained": trained, "dropped": []}) + "\n"
            )  # fmt: skip


def _rollouts(first: int, count: int, per_step: int, response_tokens: int = RESPONSE_TOKENS) -> pa.Table:
    rng, size = np.random.default_rng(first), count * per_step
    length = PROMPT_TOKENS + response_tokens
    steps = np.repeat(np.arange(first, first + count), per_step)
    sample = np.tile(np.arange(per_step) % GROUP, count)
    prompt = rng.integers(0, 4096, size)
    response = rng.integers(0, 10**6, size)
    offsets = pa.array(np.arange(size + 1) * length, pa.int32())

    def lists(values: np.ndarray) -> pa.Array:
        return pa.ListArray.from_arrays(offsets, pa.array(values.reshape(-1)))

    sampled = np.arange(length) >= PROMPT_TOKENS
    logprobs = np.where(sampled, -rng.random((size, length)), 0.0)
    learner = np.where(sampled, logprobs + rng.normal(0, 1e-3, (size, length)), 0.0).astype(np.float32)
    return pa.table(
        {
            "step": steps,
            "uid": [f"task/train/{each}" for each in prompt.tolist()],
            "sample": sample,
            "data_source": pa.array(["task"] * size),
            "prompt": [f"<|user|>What is {each} plus {each}?<|end|><|assistant|>" for each in prompt.tolist()],
            "response": [f"The answer is {each}, because of {each} reasons." for each in response.tolist()],
            "messages": [f'[{{"role": "user", "content": "What is {each}?"}}]' for each in prompt.tolist()],
            "ground_truth": [f'"{2 * each}"' for each in prompt.tolist()],
            "reward": rng.random(size),
            "stop_reason": pa.array(np.where(rng.random(size) < 0.9, "stop", "length").tolist()),
            "num_turns": np.ones(size, np.int64),
            "prompt_length": np.full(size, PROMPT_TOKENS),
            "response_length": np.full(size, response_tokens),
            "num_tool_calls": rng.integers(0, 3, size),
            "num_failed_calls": rng.integers(0, 2, size),
            "info": pa.array(["{}"] * size),
            "ended_by": pa.array([None] * size, pa.string()),
            "turn_rewards": pa.array([[]] * size, pa.list_(pa.float64())),
            "tokens": lists(rng.integers(6, 500, (size, length))),
            "loss_mask": lists(np.tile(sampled, (size, 1)).astype(np.int64)),
            "logprobs": lists(logprobs),
            "versions": lists(np.where(sampled, steps[:, None] - 1, -1)),
            "advantages": lists(np.where(sampled, rng.normal(0, 1, (size, 1)), 0.0).astype(np.float32)),
            "learner_logprobs": lists(learner),
            "logprob_gap": np.abs(learner - logprobs).max(axis=1),
        }
    )


# The server


class Server:
    """``headwater ui`` as a user starts it."""

    def __init__(self, root: Path) -> None:
        began = time.perf_counter()
        command = [sys.executable, "-m", "headwater.cli.main", "ui", str(root), "--port", "0", "--no-browser"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.start_s = time.perf_counter() - began
        match = re.search(r"127\.0\.0\.1:(\d+)", line)
        assert match is not None, f"no address in {line!r}"
        self.port = int(match[1])

    def get(self, path: str) -> tuple[float, Any]:
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("GET", f"/api{path}")
        reply = connection.getresponse()
        content = reply.read()
        took = time.perf_counter() - began
        connection.close()
        assert reply.status == 200, f"{path}: {reply.status} {content[:500]!r}"
        return took, json.loads(content)

    def memory_mb(self) -> tuple[float, float]:
        """Now, and the most so far."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        now, most = (re.search(rf"{name}:\s+(\d+) kB", text) for name in ("VmRSS", "VmHWM"))
        assert now
        assert most
        return int(now[1]) / 1024, int(most[1]) / 1024

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)


@contextmanager
def served(root: Path) -> Iterator[Server]:
    server = Server(root)
    try:
        yield server
    finally:
        server.close()


def at_once(server: Server, paths: list[str]) -> float:
    """Seconds until all of them are answered, asked together as a page does."""
    began = time.perf_counter()
    threads = [threading.Thread(target=server.get, args=(path,)) for path in paths]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return time.perf_counter() - began


def measure_large(root: Path, num_steps: int, per_step: int) -> dict[str, Any]:
    rng = random.Random(0)
    load = os.getloadavg()[0]
    with served(root) as server:
        runs_s, _ = server.get("/runs")
        open_s = at_once(server, [f"/runs/large{each}" for each in OVERVIEW])
        cpu_s = server.cpu_s()
        again_s = at_once(server, [f"/runs/large{each}" for each in OVERVIEW])
        after_open = server.memory_mb()
        places = [(rng.randint(1, num_steps), rng.randrange(per_step)) for _ in range(50)]
        rollouts = []
        for step, row in places:
            id = quote(f"step_{step:06d}:{row}")
            rollouts.append(at_once(server, [f"/runs/large/rollout?id={id}", f"/runs/large/tokens?id={id}"]))
        long_s, long_mb = open_long(server, num_steps)
        step_s = [server.get(f"/runs/large/rollouts?step={step}&sort=reward")[0] for step, _ in places[:20]]
        first_s, _ = server.get("/runs/large/rollouts?sort=reward&order=desc")
        began = time.perf_counter()
        while server.get("/runs/large/rollouts?limit=1")[1]["index"]["state"] != "ready":
            time.sleep(0.5)
        index_s = time.perf_counter() - began
        sorted_s, _ = server.get("/runs/large/rollouts?sort=reward&order=desc")
        filtered_s, listed = server.get("/runs/large/rollouts?sort=gap&min_reward=0.5&stop_reason=length")
        uid = quote(listed["rollouts"][0]["uid"])
        prompt_s, prompt = server.get(f"/runs/large/prompt?uid={uid}")
        search_s, found = server.get("/runs/large/rollouts?text=" + quote("of 999999 reasons"))
        long_again_s, _ = open_long(server, num_steps)
        during_index = server.memory_mb()
    return {
        "in_a_browser": in_a_browser(root),
        "load_average_before": load,
        "start_s": server.start_s,
        "list_of_runs_s": runs_s,
        "open_s": runs_s + open_s,
        "open_cpu_s_of_the_server_with_start": cpu_s,
        "open_again_s": again_s,
        "rollout_s": {"median": statistics.median(rollouts), "max": max(rollouts)},
        "long_rollout_s": {"median": statistics.median(long_s), "max": max(long_s)},
        "long_rollout_with_index_s": {"median": statistics.median(long_again_s), "max": max(long_again_s)},
        "list_of_a_step_s": {"median": statistics.median(step_s), "max": max(step_s)},
        "first_listing_over_all_steps_s": first_s,
        "index_s": index_s,
        "sorted_over_all_steps_s": sorted_s,
        "filtered_over_all_steps_s": filtered_s,
        "prompt_over_steps_s": prompt_s,
        "prompt_num_steps": prompt["num_steps"],
        "text_search_s": search_s,
        "text_search_rollouts": found["searched"],
        "memory_mb": {
            "after_open": after_open[0],
            "after_long_rollouts": long_mb,
            "after_all": during_index[0],
            "most": during_index[1],
        },
        "load_average_after": os.getloadavg()[0],
    }


def open_long(server: Server, num_steps: int) -> tuple[list[float], float]:
    """Every rollout of the steps with many tokens: the seconds of each, and the most memory so far."""
    seconds = []
    for place in range(len(LONG_TOKENS)):
        for row in range(LONG_ROLLOUTS):
            id = quote(f"step_{num_steps + 1 + place:06d}:{row}")
            asked = [f"/runs/large/{what}?id={id}" for what in ("rollout", "tokens", "mismatches")]
            seconds.append(at_once(server, asked))
    return seconds, server.memory_mb()[1]


def in_a_browser(root: Path) -> dict[str, float] | None:
    """Seconds until Chromium shows the overview of the run, from the start of the server and from its first answer."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        return None
    names = ("chromium", "chromium-browser", "google-chrome")
    installed = os.environ.get("HEADWATER_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as playwright:
        try:
            chrome = playwright.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        except Error as error:
            print(f"no Chromium, so the first paint is not measured ({str(error).splitlines()[0]})")
            return None
        page = chrome.new_page()
        began = time.perf_counter()
        with served(root) as server:
            started = time.perf_counter()
            page.goto(f"http://127.0.0.1:{server.port}/#/run/large")
            page.wait_for_selector("canvas")
            painted = time.perf_counter()
            paint_ms = page.evaluate(
                "performance.getEntriesByName('first-contentful-paint').map((entry) => entry.startTime)[0] ?? 0"
            )
        chrome.close()
    return {
        "first_paint_s": paint_ms / 1000,
        "first_curve_s": painted - started,
        "first_curve_with_start_of_the_server_s": painted - began,
    }


# A live run


def train(root: Path, name: str, num_steps: int) -> dict[str, float]:
    command = [
        sys.executable, "-m", "headwater.cli.main", "train", "quickstart", f"run.root={root}", f"run.name={name}",
        f"trainer.total_steps={num_steps}", "eval.every_steps=0", "eval.before=false", "eval.after=false",
        "warm_start.num_steps=20",
    ]  # fmt: skip
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    records = [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]
    seconds = [each["time/step_s"] for each in records if each["kind"] == "train"][2:]
    return {"mean_step_s": statistics.mean(seconds), "steps_s": sum(seconds), "wall_s": took, "cpu_s": cpu_s}


def watch(server: Server, name: str, stop: threading.Event) -> None:
    """An open page: events tell it what changed, and it asks for what it shows."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    connection.request("GET", "/api/events")
    events = connection.getresponse()
    while not stop.is_set():
        line = events.readline()
        if not line:
            return
        if line.startswith(b"event: changed"):
            content = json.loads(events.readline().removeprefix(b"data: "))
            if name in content["runs"]:
                at_once(server, ["/runs", *(f"/runs/{name}{each}" for each in OVERVIEW)])
    connection.close()


def measure_live(root: Path, num_steps: int, repeats: int) -> dict[str, Any]:
    """Pairs of a run with and one without an open page, in turns, so that the load of the machine falls on both."""
    measured: dict[str, list[dict[str, float]]] = {"alone": [], "watched": []}
    loads = [os.getloadavg()[0]]
    with served(root) as server:
        for turn in range(repeats):
            for kind in ("alone", "watched") if turn % 2 == 0 else ("watched", "alone"):
                name = f"{kind}-{turn}"
                measured[kind].append(train_watched(server, root, name, num_steps) if kind == "watched" else
                                      train(root, name, num_steps))  # fmt: skip
            loads.append(os.getloadavg()[0])
    pairs = zip(measured["alone"], measured["watched"], strict=True)
    slower_by = [watched["mean_step_s"] / alone["mean_step_s"] - 1 for alone, watched in pairs]
    return {
        "steps": num_steps,
        "repeats": repeats,
        "mean_step_s": {name: statistics.mean(each["mean_step_s"] for each in runs) for name, runs in measured.items()},
        "slower_by": interval(slower_by),
        "server_cpu_share_of_a_core": interval([each["server_cpu_share"] for each in measured["watched"]]),
        "runs": measured,
        "load_averages": loads,
    }


def interval(values: list[float]) -> dict[str, float]:
    """Their mean, and an interval that has the true mean with 95%."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return {"mean": mean}
    t = _T_95[len(values) - 2] if len(values) - 2 < len(_T_95) else 2.0
    half = t * statistics.stdev(values) / len(values) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half}


def train_watched(server: Server, root: Path, name: str, num_steps: int) -> dict[str, float]:
    stop = threading.Event()
    page = threading.Thread(target=watch, args=(server, name, stop), daemon=True)
    before = server.cpu_s()
    page.start()
    found = train(root, name, num_steps)
    stop.set()
    spent = server.cpu_s() - before
    return found | {"server_cpu_s": spent, "server_cpu_share": spent / found["wall_s"]}


def show(results: dict[str, Any], prefix: str = "") -> None:
    for name, value in results.items():
        if isinstance(value, dict):
            show(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float)):
            print(f"{prefix + name:<50} {value:>12,.3f}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rollouts-per-step", type=int, default=100)
    parser.add_argument("--skip-live", action="store_true")
    parser.add_argument("--live-steps", type=int, default=60)
    parser.add_argument("--live-repeats", type=int, default=5, help="pairs of runs; default 5")
    parser.add_argument(
        "--run", type=Path, help="folder that has, or gets, the generated run; default: a temporary one"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = args.run or Path(temporary) / "runs"
        if not (root / "large" / "rollouts" / f"step_{args.steps + len(LONG_TOKENS):06d}.parquet").exists():
            began = time.perf_counter()
            generate(root, args.steps, args.rollouts_per_step)
            print(f"generated in {time.perf_counter() - began:.0f} s")
        results: dict[str, Any] = {"large": measure_large(root, args.steps, args.rollouts_per_step)}
        if not args.skip_live:
            live = Path(temporary) / "live"
            live.mkdir()
            results["live"] = measure_live(live, args.live_steps, args.live_repeats)
    show(results)
    num_rollouts = args.steps * args.rollouts_per_step
    write_record(args.out, torch.device("cpu"), num_steps=args.steps, num_rollouts=num_rollouts, **results)


if __name__ == "__main__":
    main()
