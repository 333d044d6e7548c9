"""How far the predictions of ``headwater plan`` are from measurements.

    python benchmarks/planner_accuracy.py [--out benchmarks/results/planner_accuracy.json]

Three comparisons. (1) The cost formulas against the records from an H200 that they were fitted to, the newest of each
benchmark, and against whole steps. (2) Simulated runs against
the recorded runs of ``async_vs_sync.py``: the speed of the engine and of the learner are taken from the run at
staleness 1, and the runs at 2, 4 and 8 are predicted. (3) The shape of tokens/s by staleness against the figures in
AReaL's paper (Fu et al., 2025). Their cluster is not ours, so only the shape is compared: all rates relative to
unlimited staleness.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from async_workloads import log_normal
from options import parser_of
from record import write_record

from headwater.config.load import load_config
from headwater.core.protocols import EpisodeInput
from headwater.data.load import load_dataset
from headwater.models.load import load_tokenizer
from headwater.planner.costs import Costs, GenerationCosts, LearnerCosts
from headwater.planner.hardware import GIB, GPUS, SHAPES, Training, roofline_costs
from headwater.planner.simulate import Prediction, simulate
from headwater.planner.workload import Lengths, Workload
from headwater.rollout.source import PromptStream

RESULTS = Path(__file__).with_name("results")
H200 = GPUS["h200"]
AREAL = {0: 128.7e3, 1: 269.3e3, 2: 356.6e3, 4: 356.6e3, 8: 371.7e3, 16: 382.4e3, -1: 396.8e3}
"""Tokens/s by staleness; -1 is unlimited."""
UNLIMITED = 10_000


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def row(what: str, predicted: float, measured: float) -> dict[str, Any]:
    print(f"{what:<62} {predicted:>11,.1f} {measured:>11,.1f} {predicted / measured - 1:>+7.0%}")
    return {"what": what, "predicted": predicted, "measured": measured, "error": predicted / measured - 1}


# 1. Formulas


def of_formulas() -> list[dict[str, Any]]:
    rows = []
    for (name, backend, case_name), (prompt, measured) in decode_records().items():
        count, length = (int(part) for part in case_name.split("x"))
        rate = decode_rate(name, count, length, prompt, backend)
        rows.append(row(f"{name}, {backend}, {case_name}, tokens/s", rate, measured))
    for file, case_name, name, training in (
        ("gpu_train_step_packed_5c7a5498.json", "packed", "qwen2.5-1.5b", Training()),
        ("train_step_qwen2.5-7b_h200.json", "lora", "qwen2.5-7b",
         Training(is_checkpointed=True, is_lora=True, microbatch_tokens=8192)),
        ("train_step_qwen2.5-7b_h200.json", "full_offload", "qwen2.5-7b",
         Training(is_checkpointed=True, offloads_optimizer=True, microbatch_tokens=8192)),
    ):  # fmt: skip
        trained = next(each for each in read(file)["rows"] if each["case"] == case_name)
        costs = roofline_costs(SHAPES[name], H200, training, num_learner_gpus=1, context=400)
        rows.append(row(f"{name}, train, {case_name}, tokens/s", 1 / costs.learner.train_per_token_s,
                        trained["train_tokens_per_s"]))  # fmt: skip
        memory = training.learner_bytes(SHAPES[name], 1) / GIB
        rows.append(row(f"{name}, train, {case_name}, peak GiB", memory, trained["peak_gib"]))
    return [*rows, *of_whole_steps()]


def decode_records() -> dict[tuple[str, str, str], tuple[int, float]]:
    """The tokens of a prompt and the tokens/s of every shape, backend and case, each from its newest record."""
    found = {}
    for file, name in (
        ("gpu_rollout_qwen.json", "qwen2.5-1.5b"),
        ("gpu_rollout_qwen_alone.json", "qwen2.5-1.5b"),  # newer, without vLLM and without 1024x512
        ("gpu_rollout_smollm2.json", "smollm2-135m"),
    ):
        for case in read(file)["results"]:
            for backend, key in (("embedded", "engine_tokens_per_s"), ("vllm", "vllm_tokens_per_s")):
                if case[key]:
                    found[name, backend, case["case"]] = case["prompt_tokens"], case[key]
    return found


def decode_rate(name: str, count: int, length: int, prompt: int, backend: str) -> float:
    is_foreign = backend == "vllm"
    shape = SHAPES[name]
    costs = roofline_costs(shape, H200, Training(), num_learner_gpus=1, context=300, is_foreign=is_foreign).generation
    prefill_s = count * prompt * costs.prefill_per_token_s
    return count * length / (prefill_s + length * costs.decode_s(count, count * (prompt + length / 2)))


def of_whole_steps() -> list[dict[str, Any]]:
    """Colocated steps of 32 prompts, 8 samples and 512 tokens: a run of the 1.5B model, and the parts of a 7B step."""
    run = read("gpu_end_to_end.json")["sides"]["headwater"]
    small = {"step": run["step_s"], **{part: run["stages"][part] for part in ("train", "generate", "publish")}}
    last = read("gpu_hybrid_step_7b.json")["rows"][0]["steps"][-1]
    large = {part: last[f"{part}_s"] for part in ("train", "generate", "publish")}  # it has no training loop
    rows = []
    for name, prompt, training, measured in (
        ("qwen2.5-1.5b", 122, Training(), small),
        ("qwen2.5-7b", 128, Training(is_checkpointed=True), large),
    ):
        workload = Workload(
            num_prompts=32, num_samples=8, prompt_tokens=prompt, lengths=Lengths(np.full((1, 8), 512), "fixed")
        )
        costs = roofline_costs(SHAPES[name], H200, training, num_learner_gpus=1, context=380, weight_transfer="")
        told = simulate(workload, costs, 1, num_steps=3)
        predicted = {
            "step": told.step_s, "train": told.train_s, "generate": told.wait_s, "publish": told.publish_s,
        }  # fmt: skip
        rows += [row(f"{name}, colocated step, {part}, ms", 1e3 * predicted[part], 1e3 * seconds)
                 for part, seconds in measured.items()]  # fmt: skip
    return rows


# 2. Runs on this machine's cores


def of_runs(samples: int = 4, prompts: int = 8, mean_tokens: int = 48, tool_s: float = 1.0) -> list[dict[str, Any]]:
    rows = []
    record = read("async_vs_sync.json")
    for name in ("long-tailed", "tool latency"):
        runs = {each["max_staleness"]: each for each in record["rows"] if each["workload"] == name}
        workload = workload_of(name, samples, prompts, mean_tokens, tool_s)
        costs = calibrated(workload, runs[1], record["steps"])
        for staleness, measured in runs.items():
            if staleness == 0:
                continue  # it used twice the threads
            predicted = whole_run(replace(workload, max_staleness=staleness), costs, record["steps"])
            rate = prompts * samples / predicted.step_s
            what = "calibrated" if staleness == 1 else "predicted"
            rows.append(row(f"{name}, staleness {staleness}, samples/s ({what})", rate, measured["samples_per_s"]))
            rows.append(row(f"{name}, staleness {staleness}, mean lag", predicted.mean_lag, measured["mean_lag"]))
    return rows


def workload_of(name: str, samples: int, prompts: int, mean_tokens: int, tool_s: float) -> Workload:
    """The lengths and latencies of the recorded runs: they depend on the prompts alone."""
    config = load_config(
        None, ["data.train=largest_digit", "data.num_train_rows=2048", "data.max_prompt_tokens=32"]
    ).config
    data = load_dataset(config.data, load_tokenizer("tiny:qwen3"), "train", config.run.seed, None, None)
    assert data is not None
    drawn = PromptStream(data, config.run.seed, config.data.shuffle).take(64 * prompts)
    episodes = [[EpisodeInput(each.prompt, sample, 0) for sample in range(samples)] for each in drawn]
    is_tool = name == "tool latency"
    if is_tool:
        lengths = np.full((1, samples), mean_tokens // 2)
        waits = np.array([[log_normal(each, mean=tool_s, sigma=0.7) for each in group] for group in episodes])
    else:
        tailed = np.array([[log_normal(each, mean=mean_tokens, sigma=0.8) for each in group] for group in episodes])
        lengths = np.clip(np.rint(tailed), 1, 6 * mean_tokens).astype(int)
        waits = np.zeros((1, 1))
    return Workload(
        num_prompts=prompts,
        num_samples=samples,
        prompt_tokens=round(sum(len(each.prompt.tokens) for each in drawn) / len(drawn)),
        lengths=Lengths(lengths, "as in the recorded runs"),
        on_stale="wait",
        waits_s=waits,
    )


def whole_run(workload: Workload, costs: Costs, num_steps: int) -> Prediction:
    """As the recorded runs: all steps count, and nothing is generated for later ones."""
    return simulate(workload, costs, 1, num_steps=num_steps, warm_up=0, ends=True)


def calibrated(workload: Workload, measured: dict[str, Any], num_steps: int) -> Costs:
    """The speed of the learner and of the engine in one recorded run."""
    per_step = measured["seconds"] / num_steps
    tokens = workload.num_computed(
        workload.num_prompts, workload.num_prompts * workload.num_samples,
        round(workload.num_prompts * workload.num_samples * workload.lengths.mean),
    )  # fmt: skip
    learner = LearnerCosts(train_per_token_s=measured["training"] * per_step / tokens)
    costs = Costs(generation=GenerationCosts(step_s=1e-3, step_per_sequence_s=1e-4), learner=learner)
    for _ in range(6):  # the engine's speed, until it is as busy as in the recorded run
        predicted = whole_run(replace(workload, max_staleness=1), costs, num_steps)
        factor = measured["generating"] * per_step / (predicted.server_busy * predicted.step_s)
        generation = costs.generation
        scaled = replace(generation, step_s=generation.step_s * factor,
                         step_per_sequence_s=generation.step_per_sequence_s * factor)  # fmt: skip
        costs = replace(costs, generation=scaled)
    return costs


# 3. AReaL's curve


def of_areal(longest: int, mean: float) -> list[dict[str, Any]]:
    """A 1.5B model, 32 prompts of 16 samples, on three server GPUs for one of the learner, as in the paper."""
    rows = []
    lengths = Lengths.long_tailed(16, longest, mean=mean, sigma=0.8)
    workload = Workload(num_prompts=32, num_samples=16, prompt_tokens=200, lengths=lengths, update_mode="interrupt",
                        timeout_s=1e9, episode_timeout_s=1e9)  # fmt: skip
    costs = roofline_costs(SHAPES["qwen2.5-1.5b"], H200, Training(recomputes=True), num_learner_gpus=1,
                           context=mean / 2, is_foreign=True)  # fmt: skip
    rates: dict[int, tuple[float, Prediction]] = {}
    for staleness in AREAL:
        at = UNLIMITED if staleness < 0 else staleness
        settings = replace(workload, max_staleness=at, max_concurrent=20 * 32 if staleness < 0 else 0)
        ahead = 16 if staleness < 0 else staleness
        predicted = simulate(settings, costs, 3, warm_up=3 + ahead, num_steps=6 + ahead)
        rates[staleness] = predicted.total_tokens_per_s, predicted
    full = rates[-1][0]
    for staleness, (rate, predicted) in rates.items():
        name = "unlimited" if staleness < 0 else str(staleness)
        entry = row(f"staleness {name}, % of unlimited", 100 * rate / full, 100 * AREAL[staleness] / AREAL[-1])
        rows.append({**entry, "tokens_per_s": rate, "trained_tokens_per_s": predicted.tokens_per_s,
                     "step_s": predicted.step_s, "masked_share": predicted.masked_share,
                     "mean_lag": predicted.mean_lag})  # fmt: skip
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--longest", type=int, default=27648, help="for AReaL: rollout.max_new_tokens (default 27648)")
    parser.add_argument("--mean", type=float, default=8000, help="for AReaL: mean length of a response (default 8000)")
    options = parser.parse_args()
    print(f"{'what':<62} {'predicted':>11} {'measured':>11} {'error':>7}")
    formulas, runs = of_formulas(), of_runs()
    areal = of_areal(options.longest, options.mean)
    write_record(options.out, torch.device("cpu"), formulas=formulas, runs=runs, areal=areal)


if __name__ == "__main__":
    main()
