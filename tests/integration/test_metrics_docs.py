"""docs/metrics.md lists every metric of a run, and no metric that does not exist."""

from __future__ import annotations

import math
import re

import pytest
from command import CUT_DOWN, ROOT, metrics, train_here, train_on_two
from picture_tools import TOOLS, VISION
from trainer.test_experience_reward_model import save_judge

PAGE = ROOT / "docs" / "metrics.md"

RUNS = {
    "sync": ["quickstart", *CUT_DOWN, "warm_start.num_steps=1", "reward.overlong_tokens=2"],
    "async": [
        "quickstart-async", *CUT_DOWN, "trainer.total_steps=3", "algorithm.old_logprobs=metrics",
        "algorithm.kl_in_reward=0.01", "algorithm.kl_in_loss=0.01", "algorithm.corrections=[truncate]",
        "algorithm.policy_loss=ppo", "learner.skip_zero_advantages=false",
    ],
    "critic": ["quickstart", "ppo", *CUT_DOWN, "critic.num_warmup_steps=0", "algorithm.corrections=[reject]"],
    "LoRA, two sources": [
        "quickstart-lora", *CUT_DOWN, "rollout.publish=adapter", "data.train=[few, many]",
        "data.sources={few: {source: largest_digit, weight: 1}, many: {source: largest_digit, weight: 3}}",
    ],
    "tools": ["quickstart-tools", *CUT_DOWN[:-1], "rollout.max_new_tokens=24", "learner.skip_zero_advantages=false"],
}  # fmt: skip
SLOW_RUNS = {
    "servers": [
        "quickstart-async", *CUT_DOWN, "trainer.total_steps=3", "rollout.placement=disaggregated",
        "rollout.launch.num_servers=2",
    ],
    "pictures from tools": [*VISION, *CUT_DOWN, *TOOLS, "learner.skip_zero_advantages=false"],
    "agents": [
        "quickstart", *CUT_DOWN, "rollout.workflow=endpoint", "rollout.max_new_tokens=32",
        "rollout.workflow_args.agent=tests/integration/endpoint_agent.py:two_turns",
    ],
    "evaluation of several samples": ["quickstart", *CUT_DOWN, "eval.num_samples_per_prompt=4", "eval.temperature=1"],
    "two ranks": ["quickstart", "ppo", *CUT_DOWN, "critic.num_warmup_steps=0"],
    "reward model": ["quickstart", *CUT_DOWN],
}  # fmt: skip
"""What takes other processes or another model."""
NEEDS = {"ranks": "two ranks", "reward model": "reward model", "images": "pictures from tools"}
"""What the last column says about metrics that only one of the slow runs has."""
IN_NO_RUN = ("GPU", "videos")
"""What it says about metrics that none of the runs has."""
KINDS = {"Training steps": "train", "Evaluations": "eval", "Supervised start": "warm_start"}
"""The sections with metrics, and the kind of record that has them."""


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """All records of all runs that need no other process."""
    root = tmp_path_factory.mktemp("runs")
    return {name: trained(root, name, settings) for name, settings in RUNS.items()}


@pytest.fixture(scope="module")
def slow_records(tmp_path_factory):
    root = tmp_path_factory.mktemp("slow-runs")
    save_judge(root / "judge")
    settings = {**SLOW_RUNS, "reward model": [*SLOW_RUNS["reward model"], f"reward.model={root / 'judge'}"]}
    return {name: trained(root, name, each) for name, each in settings.items()}


def trained(root, name, settings):
    """The records of a run, by kind."""
    arguments = (*settings, f"run.root={root}", f"run.name={name}")
    if name == "two ranks":
        train_on_two(root / name, *arguments)
    else:
        train_here(*arguments)
    return {kind: metrics(root / name, kind) for kind in KINDS.values()}


def documented() -> dict[str, tuple[str, str]]:
    """The kind of record and the last column of every row, by ``kind:name``."""
    found, kind = {}, None
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            kind = KINDS.get(line.removeprefix("## "))
        if line.startswith("| `") and kind is not None:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            found |= {f"{kind}:{name}": (kind, cells[-1]) for name in re.findall(r"`([^`]+)`", cells[0])}
    return found


def pattern_of(name: str) -> re.Pattern[str]:
    """``<...>`` stands for a name, which may have slashes, and ``{a,b}`` for one of several words."""
    parts = re.split(r"(<[^>]+>|\{[^}]+\})", name)
    texts = [
        ".+" if part.startswith("<") else f"(?:{'|'.join(map(re.escape, part[1:-1].split(',')))})"
        if part.startswith("{") else re.escape(part)
        for part in parts
    ]  # fmt: skip
    return re.compile("".join(texts))


def expanded(name: str) -> list[str]:
    """The names that ``{a,b}`` stands for."""
    if (choice := re.search(r"\{([^}]+)\}", name)) is None:
        return [name]
    return [each for word in choice[1].split(",") for each in expanded(name.replace(choice[0], word, 1))]


def seen_in(records):
    """The names of all metrics, by kind of record."""
    return {kind: {key for made in records.values() for each in made[kind] for key in each} for kind in KINDS.values()}


def assert_documented(seen):
    known = documented()
    for kind, names in seen.items():
        patterns = [pattern_of(key.partition(":")[2]) for key, (of, _) in known.items() if of == kind]
        shown = names - {"kind", "step", "time"}
        missing = sorted(name for name in shown if not any(each.fullmatch(name) for each in patterns))
        assert not missing, f"not in {PAGE.name}, {kind}: {missing}"


def invented(seen, is_needed):
    """The documented metrics that are not there although they should be, by what the last column says."""
    return [
        each
        for key, (kind, when) in documented().items()
        if "<" not in key and is_needed(when)
        for each in expanded(key.partition(":")[2])
        if each not in seen[kind]
    ]


def test_every_metric_is_documented_and_every_documented_metric_exists(records):
    seen = seen_in(records)
    assert_documented(seen)
    found = invented(seen, lambda when: not any(word in when for word in (*IN_NO_RUN, *NEEDS)))
    assert not found, f"{PAGE.name} has metrics that no run has: {found}"


@pytest.mark.slow
def test_the_same_with_servers_ranks_pictures_agents_and_a_reward_model(slow_records):
    assert_documented(seen_in(slow_records))
    for word, name in NEEDS.items():
        seen = seen_in({name: slow_records[name]})
        assert any(word in when for _, when in documented().values())
        found = invented(seen, lambda when: word in when)  # noqa: B023
        assert not found, f"{PAGE.name} has metrics that the run with {name} does not have: {found}"
    assert_measured(slow_records)
    shares = [each for each in slow_records["servers"]["train"] if "engine/kv_used_mean" in each]
    assert shares, "servers tell what their engines measure"
    assert {"reward/best@4", "reward/mean@4"} <= seen_in(slow_records)["eval"]


def test_what_every_run_must_measure_is_measured_and_finite(records):
    assert_measured(records)
    mixed = records["LoRA, two sources"]["train"]
    assert [(each["data/few/prompts"], each["data/many/drawn"]) for each in mixed] == [(1, 3), (1, 6)]
    assert all("data/few/epoch" in each for each in mixed)
    gap = records["sync"]["train"][-1]
    assert gap["rollout_gap/logprob_abs_max"] < 1e-3, "the engine and the learner have the same weights here"
    assert records["critic"]["train"][-1]["value/explained_variance"] <= 1.0


def assert_measured(records):
    for name, made in records.items():
        train = made["train"]
        for record in train:
            values = {key: value for key, value in record.items() if isinstance(value, (int, float))}
            assert all(math.isfinite(value) for value in values.values()), name
            assert values["tokens/total"] > values["tokens/trained"] > 0, name
            assert values["throughput/tokens_per_s"] > values["throughput/generated_tokens_per_s"] > 0, name
        last = train[-1]
        assert last["rollout_gap/tokens"] > 0, name
        assert last["rollout_gap/logprob_abs_mean"] <= last["rollout_gap/logprob_abs_max"], name
        assert last["memory/host_peak_gib"] >= last["memory/train/host_gib"] > 0, name
        assert sum(each["engine/generated_tokens"] for each in train) > 0, name
