from __future__ import annotations

import importlib.util
import json

import pytest

from headwater.core.errors import DataError
from headwater.data.tasks import _gym_process
from headwater.data.tasks.reasoning_gym import gym_entry, reasoning_gym

pytestmark = pytest.mark.xdist_group("reasoning gym")  # which takes seconds to import

OPTIONS = {"min_terms": 2, "max_terms": 3}


def generate_here(label, request):
    """Without a process of its own, which would take seconds to import the gym once more."""
    made = json.loads(json.dumps(_gym_process.generate(**request)))
    return made["entries"], made["num_draws"]


HERE = ("headwater.data.tasks.reasoning_gym._in_child_process", generate_here)


@pytest.fixture(scope="module")
def chain_sums():
    train = reasoning_gym("train", 40, 0, "chain_sum", **OPTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*HERE)
        return {"train": train, "eval": reasoning_gym("eval", 40, 0, "chain_sum", **OPTIONS)}


def test_rows(chain_sums):
    for index, row in enumerate(chain_sums["train"]):
        gym = row["extra_info"]["gym"]
        assert row["data_source"] == "reasoning_gym:chain_sum"
        assert row["prompt"][0]["content"].startswith(gym["question"])
        assert row["reward_model"]["ground_truth"] == gym["answer"]
        assert row["extra_info"]["demonstration"] == f"<answer>{gym['answer']}</answer>"
        assert row["extra_info"]["index"] == index
        assert gym["metadata"]["num_terms"] in (2, 3)
        assert gym["options"] == OPTIONS


def test_splits_are_disjoint_and_rows_distinct(chain_sums):
    train, held_out = ({row["extra_info"]["gym"]["question"] for row in chain_sums[split]} for split in chain_sums)
    assert len(train) == len(held_out) == 40
    assert not train & held_out


def test_rows_survive_json_and_the_gym_scores_them_again(chain_sums):
    import reasoning_gym as package

    arc = _gym_process.generate("arc_agi", "train", 2, 0, {})["entries"]
    infos = [row["extra_info"] for row in chain_sums["train"]] + [
        {"gym": {"dataset": "arc_agi", "options": {}, **entry}} for entry in arc
    ]
    datasets = {name: package.create_dataset(name) for name in ("chain_sum", "arc_agi")}
    for info in json.loads(json.dumps(infos)):
        entry = gym_entry(info)
        score = datasets[info["gym"]["dataset"]].score_answer
        assert score(entry["answer"], entry) == 1.0
        assert score("nonsense", entry) < 0.5


@pytest.mark.slow
def test_rows_do_not_depend_on_the_hash_seed_of_the_process(monkeypatch):
    """ransom_note draws letters from a set, whose order Python changes from process to process."""
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    first = reasoning_gym("train", 5, 0, "ransom_note")
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert reasoning_gym("train", 5, 0, "ransom_note") == first


def test_a_dataset_without_one_answer_gives_no_demonstration():
    entry = _gym_process.generate("graph_color", "train", 1, 0, {})["entries"][0]
    assert entry["answer"] is None
    from headwater.data.tasks.reasoning_gym import _row

    assert "demonstration" not in _row("reasoning_gym:graph_color", "train", 0, "graph_color", {}, entry)["extra_info"]


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        ("chain_sums", {}, "no dataset 'chain_sums'; nearest of its .*chain_sum"),
        ("chain_sum", {"max_term": 3}, "unknown option data.task_args.max_term = 3; did you mean 'max_terms'"),
        ("chain_sum", {"size": 3}, "data.task_args.size = 3: is set by data.num_train_rows"),
        ("chain_sum", {"min_terms": -1}, "min_terms"),
    ],
)
def test_errors(dataset, options, message):
    with pytest.raises(DataError, match=message):
        _gym_process.generate(dataset, "train", 1, 0, options)


def test_errors_cross_the_process_border():
    with pytest.raises(DataError, match="task reasoning_gym:chain_sums: the gym has no dataset 'chain_sums'"):
        reasoning_gym("train", 1, 0, "chain_sums")


def test_too_few_distinct_problems(monkeypatch):
    monkeypatch.setattr(*HERE)
    with pytest.raises(DataError, match=r"num_eval_rows = 50, but 4000 draws found only \d+ distinct eval problems"):
        reasoning_gym("eval", 50, 0, "chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)


def test_options_must_be_plain_values():
    with pytest.raises(DataError, match="use plain values"):
        reasoning_gym("train", 1, 0, "chain_sum", min_terms={1})


def test_install_hint(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install headwater\[tasks\]"):
        reasoning_gym("train", 1, 0, "chain_sum")
