"""Make the records of an H200 again: every benchmark in h200.yaml.

    python benchmarks/h200.py --list                                    # names, minutes, commits of the present records
    python benchmarks/h200.py rollouts training --seconds 500           # groups, or single names
    python benchmarks/h200.py --seconds 1500 --smollm2 FOLDER --vllm-python ENV/bin/python --trl-python ENV/bin/python

The benchmarks run one after the other, each in its own process with its own limit. One that would not end within
``--seconds`` is not begun, and one that needs what was not given (a model, vLLM) is left out; both are named at the
end. A benchmark that fails or reaches its limit does not stop the others, and its record stays as it was. Output is
shown and also kept beside the record, as ``NAME.log`` in ``--logs``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Benchmark:
    group: str
    record: str
    """Name of the JSON file without its ending."""
    command: str
    """Script and arguments. ``{smollm2}`` and the like are replaced by what the command line gives."""
    about_s: int
    """How long it takes, with the compilation of kernels; it is stopped after one and a half times that."""

    @property
    def script(self) -> Path:
        return HERE / self.command.split()[0]

    def arguments(self, given: dict[str, str]) -> list[str]:
        return [each.format(**given) for each in self.command.split()[1:]]

    def lacks(self, given: dict[str, str]) -> list[str]:
        return [name for name in given if f"{{{name}}}" in self.command and not given[name]]


def read_benchmarks(path: Path) -> list[Benchmark]:
    groups = yaml.safe_load(path.read_text())
    return [
        Benchmark(group, record, told["command"], told["seconds"])
        for group, records in groups.items()
        for record, told in records.items()
    ]


def _committed(record: str) -> str:
    """The commit of the record that is there."""
    path = HERE / "results" / f"{record}.json"
    return str(json.loads(path.read_text()).get("commit", "?")) if path.exists() else "none"


def _list(benchmarks: list[Benchmark]) -> None:
    for each in benchmarks:
        minutes = f"{each.about_s / 60:4.1f} min"
        print(f"{each.group:12} {each.record:36} {minutes} {_committed(each.record):12} {each.command}")


def _run(benchmark: Benchmark, given: dict[str, str], results: Path, logs: Path) -> str:
    """Run one benchmark, and say how it ended."""
    # A script that is stopped must not leave half a record in the place of a whole one.
    unfinished = logs / f"{benchmark.record}.json"
    unfinished.unlink(missing_ok=True)
    command = [sys.executable, str(benchmark.script), *benchmark.arguments(given), "--out", str(unfinished)]
    print(f"\n== {benchmark.record}: {' '.join(command[1:-2])}", flush=True)
    with (logs / f"{benchmark.record}.log").open("w") as log:
        # Some scripts start others, which must end with them.
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(timeout=1.5 * benchmark.about_s)
            ended = "done" if status == 0 else f"failed with status {status}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {1.5 * benchmark.about_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    print((logs / f"{benchmark.record}.log").read_text()[-3000:], flush=True)
    if ended == "done":
        (results / unfinished.name).write_text(unfinished.read_text())
    return ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    benchmarks = read_benchmarks(HERE / "h200.yaml")
    known = {name for each in benchmarks for name in (each.group, each.record)}
    parser.add_argument("names", nargs="*", metavar="NAME", help="groups or records (default: all)")
    parser.add_argument("--list", action="store_true", help="only show what there is")
    parser.add_argument("--seconds", type=float, default=3600, help="for all together (default 3600)")
    parser.add_argument("--smollm2", default="", help="folder of SmolLM2-135M")
    parser.add_argument("--vllm-python", default="", help="interpreter of an environment that has vLLM")
    parser.add_argument("--trl-python", default="", help="interpreter of an environment that has TRL")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the records")
    parser.add_argument("--logs", type=Path, default=Path("logs"), help="folder of the output (default logs)")
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - known):
        parser.error(f"unknown: {', '.join(unknown)}; --list shows groups and records")
    chosen = [each for each in benchmarks if not args.names or {each.group, each.record} & set(args.names)]
    if args.list:
        _list(chosen)
        return 0
    if not torch.cuda.is_available():
        parser.error("these benchmarks need a GPU; the docstring of each script says how to try it on a CPU")
    args.results.mkdir(parents=True, exist_ok=True)
    args.logs.mkdir(parents=True, exist_ok=True)
    given = {name: getattr(args, name) for name in ("smollm2", "vllm_python", "trl_python")}
    end = time.monotonic() + args.seconds
    ended: dict[str, str] = {}
    for each in chosen:
        if lacking := each.lacks(given):
            ended[each.record] = "left out: needs " + " and ".join(f"--{name.replace('_', '-')}" for name in lacking)
        elif time.monotonic() + each.about_s > end:
            ended[each.record] = f"left out: takes about {each.about_s} s, too little time is left"
        else:
            begun = time.monotonic()
            ended[each.record] = f"{_run(each, given, args.results, args.logs)} ({time.monotonic() - begun:.0f} s)"
    print()
    for record, how in ended.items():
        print(f"{record:36} {how}")
    return int(any("failed" in how or "stopped" in how for how in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
