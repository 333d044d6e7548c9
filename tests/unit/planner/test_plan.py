"""Plans: costs from a model's shape, the choice of a split, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.cli.main import main
from headwater.cli.plan import settings_of
from headwater.cluster.resources import num_servers
from headwater.config.load import load_config
from headwater.config.schema import Config
from headwater.config.traits import BackendTraits
from headwater.core.errors import HeadwaterError
from headwater.planner import plan as plan_module
from headwater.planner.costs import Costs, GenerationCosts, LearnerCosts
from headwater.planner.hardware import (
    GIB,
    GPUS,
    SHAPES,
    TRANSFERS,
    Training,
    gpus_per_server,
    roofline_costs,
    shape_of,
)
from headwater.planner.plan import TOLERANCE, Candidate, Measured, Roofline, Split, make_plan, splits
from headwater.planner.workload import Lengths, Workload

H200 = GPUS["h200"]
ROOT = Path(__file__).parents[3]


def record(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def test_shapes_have_the_published_numbers_of_parameters():
    billions = {"qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.544, "qwen2.5-7b": 7.616, "qwen2.5-32b": 32.76,
                "llama-3.1-70b": 70.55}  # fmt: skip
    for name, number in billions.items():
        assert SHAPES[name].num_parameters / 1e9 == pytest.approx(number, rel=2e-3)
    assert shape_of("Qwen/Qwen2.5-7B-Instruct") is SHAPES["qwen2.5-7b"]
    tiny = shape_of("tiny:qwen3")
    assert tiny.num_layers == 4
    assert tiny.kv_bytes_per_token == 2 * 2 * 4 * 2 * 32
    with pytest.raises(HeadwaterError, match="--model"):
        shape_of("./no-such-folder")


def test_the_formulas_reproduce_the_measurements():
    """Within a sixth of what the newest records say; benchmarks/planner_accuracy.py lists all."""
    shape = SHAPES["qwen2.5-1.5b"]
    costs = roofline_costs(shape, H200, Training(), num_learner_gpus=1, context=300)
    generation = costs.generation
    for case in record("gpu_rollout_qwen_alone.json")["results"]:
        count, length = (int(part) for part in case["case"].split("x"))
        seconds = count * case["prompt_tokens"] * generation.prefill_per_token_s
        seconds += length * generation.decode_s(count, count * (case["prompt_tokens"] + length / 2))
        assert count * length / seconds == pytest.approx(case["engine_tokens_per_s"], rel=1 / 6)
    (packed,) = record("gpu_train_step_packed_5c7a5498.json")["rows"]
    assert 1 / costs.learner.train_per_token_s == pytest.approx(packed["train_tokens_per_s"], rel=1 / 6)
    assert Training().learner_bytes(shape, 1) / GIB == pytest.approx(packed["peak_gib"], rel=1 / 6)
    lora = Training(is_checkpointed=True, is_lora=True)
    seven = roofline_costs(SHAPES["qwen2.5-7b"], H200, lora, num_learner_gpus=1, context=300)
    (lora_row,) = (each for each in record("train_step_qwen2.5-7b_h200.json")["rows"] if each["case"] == "lora")
    assert 1 / seven.learner.train_per_token_s == pytest.approx(lora_row["train_tokens_per_s"], rel=1 / 6)


def test_what_the_config_asks_for_costs_something():
    shape = SHAPES["qwen2.5-7b"]
    plain = Training.of(Config())
    for more in ({"is_checkpointed": True}, {"has_critic": True}, {"num_epochs": 2}):
        assert Training(**more).train_flops(shape, 100) > plain.train_flops(shape, 100)
    assert Training(recomputes=True, has_reference=True).experience_flops(shape, 0) == 4 * shape.product_parameters
    assert Training(offloads_optimizer=True).learner_bytes(shape, 1) < plain.learner_bytes(shape, 1)
    assert gpus_per_server(shape, H200) == 1
    assert gpus_per_server(SHAPES["llama-3.1-70b"], H200) == 2
    assert gpus_per_server(SHAPES["llama-3.1-70b"], GPUS["h100"]) == 4


def test_splits_use_all_gpus():
    for num_gpus in (1, 2, 3, 8, 17, 1000):
        for per_server in (1, 2, 8):
            found = splits(num_gpus, per_server)
            assert len(found) <= 9
            for each in found:
                used = each.num_learner_gpus + (0 if each.is_colocated else each.num_servers * each.num_server_gpus)
                assert used == num_gpus
                assert each.num_servers >= 1
                assert each.num_learner_gpus >= 1


def small_plan(train_s: float, decode_s: float, *, step_s: float = 0.0, wait_s: float = 0.0):
    workload = Workload(
        num_prompts=8,
        num_samples=4,
        prompt_tokens=10,
        lengths=Lengths(np.full((1, 4), 50), "test"),
        waits_s=np.full((1, 1), wait_s),
    )
    costs = Costs(
        generation=GenerationCosts(step_s=1e-4, step_per_sequence_s=decode_s / 32 / 50),
        learner=LearnerCosts(train_per_token_s=train_s / 1680, step_s=step_s),
        source="test",
    )
    return make_plan(workload, Measured(costs), 8, staleness=(0, 2))


def test_the_slower_side_gets_more_gpus():
    learner, server = (small_plan(*costs).by_staleness[0].split for costs in ((8.0, 1.0), (1.0, 8.0)))
    assert learner.num_learner_gpus > server.num_learner_gpus
    plan = small_plan(4.0, 4.0)
    assert [each.max_staleness for each in plan.by_staleness] == [0, 1, 2]
    rates = [each.rate for each in plan.by_staleness]
    assert rates[0] < rates[1] <= rates[2] * 1.01
    # With equal lengths no GPU idles in a synchronous step, so nothing is faster than sharing all of them.
    assert plan.best.rate == max(each.rate for each in plan.by_split)
    assert plan.best.split.is_colocated


def test_gpus_that_gain_nothing_are_left_out():
    """A step of the controller alone needs one GPU, and waiting for tools one GPU for each side."""
    for plan, split in (
        (small_plan(0.01, 0.01, step_s=5.0), Split(1, 1, is_colocated=True)),
        (small_plan(0.1, 0.1, wait_s=10.0), Split(1, 1)),
    ):
        assert plan.best.split == split
        assert plan.whole.split.num_gpus == 8
        assert plan.whole.rate >= (1 - TOLERANCE) * max(each.rate for each in plan.by_split[:-1])
        assert plan.best.rate >= (1 - TOLERANCE) * plan.whole.rate
        assert plan.by_staleness[0].split.num_gpus == 8
    # As much training as generation: every GPU helps.
    assert small_plan(4.0, 4.0).best.split.num_gpus == 8


def test_of_equal_splits_the_one_with_fewer_learner_gpus_is_the_best():
    rows = small_plan(0.01, 0.01, step_s=5.0).by_split[:8]
    assert [each.split.num_gpus for each in rows] == [8] * 8
    shuffled = [replace(row, split=each.split) for row, each in zip(rows, reversed(rows), strict=True)]
    for given in (rows, shuffled):
        assert max(each.rate for each in given) < min(each.rate for each in given) * (1 + TOLERANCE)
        assert plan_module._best(given).split == Split(1, 7)


def test_the_plan_of_a_vision_model_says_that_pictures_are_not_counted():
    for name, is_told in (("tiny:qwen2_5_vl", True), ("tiny:smolvlm", True), ("tiny:qwen3", False)):
        notes = Roofline(shape_of(name), H200, Training(), context=100).costs(Split(1, 1)).notes
        assert any("the vision tower and pictures are not counted" in each for each in notes) == is_told


def test_weights_for_other_machines_and_of_several_ranks_are_published_at_the_rate_of_collective():
    model = Roofline(SHAPES["qwen2.5-7b"], H200, Training(), context=100)
    for here, there in (
        (Split(1, 7), Split(1, 8)),
        (Split(1, 7), Split(2, 6)),
        (Split(1, 7), Split(8, 8, is_colocated=True)),
    ):
        near, far = model.costs(here), model.costs(there)
        assert near.learner.publish_s == pytest.approx(0.82, rel=0.02)
        assert far.learner.publish_s == pytest.approx(7.0, rel=0.02)
        assert "19.7 GB/s, as measured through shared memory" in near.notes[-1]
        assert "2.2 GB/s, as measured over gloo" in far.notes[-1]


def test_servers_pause_for_the_measured_share_of_a_publish():
    """The table of the planner against the record from which it is."""
    transfers = record("gpu_weight_transfer_1.5b.json")
    measured = transfers["shapes"]["qwen2.5-1.5b"]["transports"]
    for name, transfer in TRANSFERS.items():
        row = measured[f"{name} to 1"]
        assert transfer.pause_share == pytest.approx(row["pause_s"] / row["seconds"], rel=0.01), name
        assert transfer.rate / 1e9 == pytest.approx(row["gb_per_s"], rel=0.03), name
        model = Roofline(SHAPES["qwen2.5-7b"], H200, Training(), context=100, weight_transfer=name)
        learner = model.costs(Split(1, 1)).learner
        assert learner.pause_s / learner.publish_s == pytest.approx(transfer.pause_share)
    in_process = Roofline(SHAPES["qwen2.5-7b"], H200, Training(), context=100).costs(Split(1, 1, is_colocated=True))
    assert in_process.learner.pause_s == 0.006


def test_servers_that_take_only_files_get_weights_from_files():
    traits = BackendTraits(is_foreign=True, transfers=("file",))
    model = Roofline(SHAPES["qwen2.5-7b"], H200, Training(), context=100, traits=traits)
    assert {model.transfer(Split(1, count)) for count in (1, 100)} == {"file"}
    assert model.transfer(Split(1, 1, is_colocated=True)) == "file"


def test_servers_of_several_gpus_have_the_costs_of_the_backend_that_is_recommended(tmp_path, capsys):
    """`headwater serve` uses one GPU, so an embedded engine cannot serve a model that needs two."""
    seventy = ["--model", "llama-3.1-70b", "--gpus", "16", "--staleness", "1", "--mean-tokens", "50"]
    given = ["learner.checkpoint_activations=true", "lora.rank=8", "trainer.num_prompts_per_step=4"]

    def planned(*more: str) -> tuple[Costs, str]:
        file = tmp_path / "costs.json"
        assert main(["plan", "quickstart", *given, *more, *seventy, "--write-costs", str(file)]) == 0
        return Costs.read(file), capsys.readouterr().out

    weights = 2 * SHAPES["llama-3.1-70b"].num_parameters
    over_gloo = weights / 2.2e9
    folder = "rollout.weight_folder=/shared/weights"
    for more in ((), ("rollout.placement=disaggregated", "rollout.weight_transfer=collective")):
        costs, printed = planned(*more)
        assert costs.learner.publish_s == pytest.approx(over_gloo, rel=0.01), "16 GPUs are several machines"
        assert costs.generation.step_per_sequence_s == 37e-6, "vLLM's"
        assert (
            "Backend  vllm, because a server needs 2 GPUs, and a server of rollout.backend = embedded has one"
            in printed
        )
        assert "rollout.launch.tensor_parallel=2 rollout.backend=vllm" in printed
        assert folder not in printed
        assert "rollout.weight_transfer=auto" not in printed
    costs, printed = planned("rollout.placement=disaggregated", "rollout.backend=sglang")
    assert costs.learner.publish_s == pytest.approx(over_gloo, rel=0.01)
    assert "Backend" not in printed
    assert folder not in printed


def test_servers_on_other_machines_that_read_files_get_a_folder():
    def settings(split: Split, *given: str) -> list[str]:
        config = load_config(["quickstart"], ["rollout.backend=vllm", *given], was_accepted=True).config
        return [each for each in settings_of(Candidate(split, 1, None), config) if "weight" in each]

    assert settings(Split(4, 4)) == [], "one machine"
    assert settings(Split(4, 5)) == [], "over the network"
    files = ("rollout.placement=disaggregated", "rollout.weight_transfer=file")
    assert settings(Split(4, 5), *files) == ["rollout.weight_folder=/shared/weights"]
    assert settings(Split(4, 5), *files, "rollout.weight_folder=/mine") == [], "the recipe has one"


def test_the_recommended_settings_are_accepted_and_use_all_gpus():
    for backend, split in (
        ("embedded", Split(1, 1, is_colocated=True)),
        ("embedded", Split(4, 4, is_colocated=True)),
        ("embedded", Split(1, 3)),
        ("embedded", Split(4, 12)),
        ("embedded", Split(4, 2, 2)),
        ("embedded", Split(16, 8, 2)),
        ("vllm", Split(1, 2, 2)),
        ("vllm", Split(4, 4, is_colocated=True)),
    ):
        given = [f"rollout.backend={backend}"]
        config = load_config(["quickstart"], given, was_accepted=True).config
        settings = settings_of(Candidate(split, 0 if split.is_colocated else 2, None), config)
        used = load_config(["quickstart"], [*given, *settings]).config
        if used.cluster.kind == "ray":
            num_ranks, count = used.cluster.learner.num_ranks, num_servers(used)
        else:
            num_ranks, count = 1, used.rollout.launch.num_servers or 1
        assert (num_ranks, count) == (split.num_learner_gpus, split.num_servers)
        assert used.rollout.launch.tensor_parallel == split.num_server_gpus
    beside = Split(4, 2, 2, is_colocated=True)
    assert "has one GPU" in Roofline(SHAPES["llama-3.1-70b"], H200, Training(), context=100).problem(beside)


def test_a_simulation_that_was_shortened_is_said(monkeypatch):
    assert not any("few were simulated" in each for each in small_plan(1.0, 1.0).notes)
    monkeypatch.setattr(plan_module, "_EPISODES_PER_SIMULATION", 1)
    short = small_plan(1.0, 1.0)
    assert "few were simulated" in short.notes[-1]
    assert short.by_staleness[-1].to_json()["is_shortened"]


def test_a_model_that_does_not_fit_is_said_with_a_remedy():
    workload = Workload(num_prompts=8, num_samples=4, prompt_tokens=10, lengths=Lengths(np.full((1, 4), 50), "test"))
    model = Roofline(SHAPES["llama-3.1-70b"], H200, Training(), context=100)
    with pytest.raises(HeadwaterError, match=r"--gpus 4: .*does not fit.*checkpoint_activations"):
        make_plan(workload, model, 4)


def test_the_command_writes_what_it_prints(tmp_path, capsys):
    costs, plan, plot = tmp_path / "costs.json", tmp_path / "plan.json", tmp_path / "plan.png"
    recipe = ["plan", "quickstart", "trainer.num_prompts_per_step=4", "--gpus", "3", "--staleness", "0,1"]
    assert main([*recipe, "--write-costs", str(costs), "--json", str(plan), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert "Best:" in printed
    assert "staleness   1" in printed
    assert "assumed: log-normal" in printed
    assert "more GPUs do not help: 3 would give " in printed
    assert "of a step is work of the controller" in printed
    content = json.loads(plan.read_text())
    assert content["best"]["prediction"]["tokens_per_s"] > 0
    assert len(content["by_staleness"]) == 2
    assert plot.read_bytes().startswith(b"\x89PNG")
    again = Costs.read(costs)
    assert again.to_json() == costs.read_text()
    assert main([*recipe, "--costs", str(costs)]) == 0


def test_wrong_arguments_name_the_remedy(tmp_path, capsys):
    costs = tmp_path / "costs.json"

    def error(*arguments: str) -> str:
        assert main(["plan", *arguments]) == 2
        return capsys.readouterr().err

    assert "--gpus 0: must be >= 1" in error("quickstart", "--gpus", "0")
    assert "name a recipe" in error("--gpus", "2")
    assert "--staleness 1,x" in error("quickstart", "--gpus", "2", "--staleness", "1,x")
    assert "give one source of costs" in error("quickstart", "--gpus", "2", "--costs", str(costs), "--measure")
    assert "--gpu b200: no costs are known" in error("quickstart", "--gpus", "2", "--gpu", "b200")
    assert "cannot be read" in error("quickstart", "--gpus", "2", "--costs", str(costs))
    costs.write_text('{"generation": {"step_s": 1, "step_per_seq_s": 1}, "learner": {"train_per_token_s": 1}}')
    assert "generation.step_per_seq_s" in error("quickstart", "--gpus", "2", "--costs", str(costs))
    costs.write_text('{"generation": {"step_s": -1}, "learner": {"train_per_token_s": 1}}')
    assert "generation.step_s = -1: must be a number >= 0" in error("quickstart", "--gpus", "2", "--costs", str(costs))
    assert "no rollout files" in error("quickstart", "--gpus", "2", "--run", str(tmp_path))
