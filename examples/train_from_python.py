"""Train from Python: rows, a reward and a callback in one file.

    python examples/train_from_python.py

docs/python-api.md explains every argument.
"""

from __future__ import annotations

from headwater import train

ROWS = [{"prompt": f"{a} + {b} =", "ground_truth": str(a + b)} for a in range(10) for b in range(10)]


def correct(solution_str: str, ground_truth: str) -> float:
    return float(solution_str.strip() == ground_truth)


if __name__ == "__main__":
    result = train(
        model="tiny:qwen3",  # random weights; use "smollm2" after `headwater fetch smollm2`
        data=ROWS,
        reward=correct,
        callbacks=[lambda step, metrics: print(step, metrics["reward/mean"])],
        rollout={"max_new_tokens": 4, "num_samples_per_prompt": 4},
        trainer={"total_steps": 2, "num_prompts_per_step": 16},
    )
    print(result.path, result.model_path)
