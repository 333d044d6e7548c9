"""Teach a language model to compute with the Python tool, and compare it with itself on held-out problems.

    python benchmarks/python_tool_learning.py --model smollm2 --out benchmarks/results/python_tool_learning.json
    python benchmarks/python_tool_learning.py --model tiny:qwen3 --steps 2 --warm-steps 2 --eval-prompts 4 \\
        trainer.num_prompts_per_step=2 rollout.num_samples_per_prompt=2

The problems have three numbers and two operations, such as 731 * 48 + 9312. The short warm start shows how a call is
written, but nine of ten programs compute only one of the two operations, so their answers are wrong. To write right
programs is learned from the reward. Held-out reward is measured for the model as it is, after the warm start, and after
training.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from options import parser_of
from record import write_record

from headwater.cli.main import main as headwater_main
from headwater.config.load import load_config
from headwater.data.tasks import Split, split_of, task_generator
from headwater.trainer.evaluate import evaluate
from headwater.trainer.rollout_setup import build_rollout

NAME = "python_tool"
SYSTEM = (
    "You can run Python programs. To run one, write only a call such as "
    '<tool_call>{"name": "python", "arguments": {"code": "print(12 * 34)"}}</tool_call> '
    "and wait for its output. Then answer with the final number only."
)
OPERATIONS = ("+", "-", "*")
WHOLE_FRACTION = 0.1
"""Share of the demonstrations whose program computes the whole problem."""


def rows(split: Split, count: int, seed: int) -> list[dict]:
    """Problems of one split, with demonstrations of which most compute one of the two operations only."""
    generator = task_generator(NAME, split, seed)
    made: dict[str, dict] = {}
    while len(made) < count:
        first, second, third = (int(each) for each in generator.integers(100, 10_000, size=3))
        one, other = (str(each) for each in generator.choice(OPERATIONS, size=2))
        problem = f"{first} {one} {second} {other} {third}"
        if split_of(NAME, problem) == split:
            made[problem] = _row(problem, _part(problem, generator))
    return list(made.values())


def _part(problem: str, generator: np.random.Generator) -> str:
    first, one, second, other, third = problem.split()
    chance = generator.random()
    if chance < WHOLE_FRACTION:
        return problem
    return f"{first} {one} {second}" if chance < (1 + WHOLE_FRACTION) / 2 else f"{second} {other} {third}"


def _row(problem: str, part: str) -> dict:
    call = {"name": "python", "arguments": {"code": f"print({part})"}}
    shown = str(_value(part))
    return {
        "prompt": [{"role": "user", "content": f"What is {problem}?"}],
        "data_source": "exact_match",
        "reward_model": {"ground_truth": str(_value(problem))},
        "extra_info": {
            "demonstration": [
                {"role": "assistant", "content": f"<tool_call>{json.dumps(call)}</tool_call>"},
                {"role": "tool", "content": shown},
                {"role": "assistant", "content": shown},
            ]
        },
    }


def _value(expression: str) -> int:
    """The value of whole numbers with + - and *, in the usual order."""
    total, sign, words = 0, 1, expression.split()
    product = int(words[0])
    for operation, number in zip(words[1::2], words[2::2], strict=True):
        if operation == "*":
            product *= int(number)
        else:
            total, sign, product = total + sign * product, 1 if operation == "+" else -1, int(number)
    return total + sign * product


def settings(folder: Path, args: object) -> list[str]:
    given = {
        "run.root": folder,
        "model.path": args.model,
        "data.train": folder / "train.jsonl",
        "data.eval": folder / "eval.jsonl",
        "data.system_prompt": json.dumps(SYSTEM),
        "data.max_prompt_tokens": 512,
        "rollout.workflow": "tool_agent",
        "rollout.workflow_args": "{max_assistant_turns: 3, max_calls_per_turn: 1, max_turn_tokens: 96}",
        "rollout.max_new_tokens": 320,
        "tools.use": "[python]",
        "tools.max_result_tokens": 64,
        "warm_start.num_steps": args.warm_steps,
        "warm_start.num_sequences_per_step": 16,
        "warm_start.learning_rate": 3e-5 if args.model == "smollm2" else 1e-3,
        "learner.learning_rate": 5e-6 if args.model == "smollm2" else 1e-4,
        "learner.num_warmup_steps": min(5, args.steps - 1),
        "learner.max_tokens_per_microbatch": 16384,
        "trainer.num_prompts_per_step": 32,
        "trainer.total_steps": args.steps,
        "eval.num_prompts": args.eval_prompts,
        "eval.every_steps": max(1, args.steps // 4),
    }
    return [*(f"{key}={value}" for key, value in given.items()), *args.overrides]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further settings of the run")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--warm-steps", type=int, default=60)
    parser.add_argument("--eval-prompts", type=int, default=256)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for split, count in (("train", 8192), ("eval", args.eval_prompts)):
            lines = (json.dumps(row) for row in rows(split, count, seed=0))
            (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        recipe = folder / "recipe.yaml"
        recipe.write_text(f"run: {{name: {NAME}}}\n")
        given = settings(folder, args)
        config = load_config(str(recipe), given).config
        parts = build_rollout(config, config.model.path)
        try:
            base = evaluate(parts.eval_rollouts.rollout_batch, parts.eval_data, args.eval_prompts, seed=0)
        finally:
            parts.close()
        print(f"held-out reward of the model as it is: {base.reward_mean:.3f}", flush=True)
        began = time.perf_counter()
        if code := headwater_main(["train", str(recipe), *given]):
            raise SystemExit(code)
        run_s = time.perf_counter() - began
        records = [json.loads(line) for line in (folder / NAME / "metrics.jsonl").read_text().splitlines()]
    evaluations = [each for each in records if each["kind"] == "eval"]
    shown = ("step", "reward/mean", "tools/calls", "tools/failed_fraction", "episode/turns")
    curve = [{key: each[key] for key in shown} for each in evaluations]
    for each in curve:
        print(each)
    write_record(
        args.out,
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        base_reward=base.reward_mean,
        warm_started_reward=curve[0]["reward/mean"],
        trained_reward=curve[-1]["reward/mean"],
        run_s=round(run_s, 1),  # the whole command: load the model, warm start, training, evaluations
        evaluations=curve,
        train_rewards=[each["reward/mean"] for each in records if each["kind"] == "train"],
    )


if __name__ == "__main__":
    main()
