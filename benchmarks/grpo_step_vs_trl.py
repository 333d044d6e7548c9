"""Time one GRPO step on a CPU, first Headwater's, then TRL's: generate, score, train, update the engine's weights.

    headwater fetch smollm2
    python benchmarks/grpo_step_vs_trl.py --out benchmarks/results/grpo_step_vs_trl.json

8 prompts of about 39 tokens, 8 samples each, exactly 32 new tokens, float32, temperature 1, one optimiser step. Each
side runs in a new process, and its peak resident memory is reported. The first step is a warm-up. The result is the
median of the other steps, and their parts are means ("cpu" is the processor time of all threads). All samples have
different rewards, so every sample has an advantage and none is skipped.

The first run creates a separate environment for TRL in the cache folder: TRL 1.16 with the installed versions of torch
and transformers. ``--trl-python`` selects another environment. ``--model tiny:qwen3`` is a quick check of the script.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from dataclasses import asdict, replace
from pathlib import Path

import torch
import transformers
from grpo_step_job import QUESTIONS, Job, Outcome
from options import add_work, parser_of
from record import write_record

from headwater.models.builtin.smollm2 import cache_dir, fetched_folder
from headwater.models.load import load_model, load_tokenizer, save_model

TRL = "trl==1.16.*"
HERE = Path(__file__).resolve().parent
PARTS = ("generate", "forward", "backward", "optimizer", "rest", "cpu")


def main() -> None:
    options = _options()
    trl_python = options.trl_python or _trl_environment(cache_dir() / "trl")
    load = os.getloadavg()
    print(f"load of the machine before the start: {load[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            model=_model_folder(options.model, Path(folder)),
            num_samples=options.samples,
            num_new_tokens=options.new_tokens,
            num_steps=1 + options.runs,
            learning_rate=1e-6,
            num_threads=options.threads,
            microbatch=options.microbatch_tokens,
        )
        outcomes = {"headwater": _run(sys.executable, "headwater_grpo_step.py", job, Path(folder))}
        samples = [each or len(QUESTIONS) * options.samples for each in options.trl_microbatch]
        for num_samples in samples:
            name = f"TRL, {num_samples} samples a pass"
            outcomes[name] = _run(trl_python, "trl_grpo_step.py", replace(job, microbatch=num_samples), Path(folder))
    _check_same_work(outcomes, len(QUESTIONS) * options.samples, options.new_tokens)
    _print_table(outcomes)
    ratios = {name: each.step_s / outcomes["headwater"].step_s for name, each in outcomes.items()}
    write_record(
        options.out,
        torch.device("cpu"),
        model=options.model,
        load_before=load,
        step_s={name: each.step_s for name, each in outcomes.items()},
        headwater_over=ratios,
        peak_gib={name: each.peak_gib for name, each in outcomes.items()},
        outcomes={name: asdict(each) for name, each in outcomes.items()},
    )


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_work(parser, samples=8, new_tokens=32, runs=2)
    parser.add_argument("--model", default="smollm2", help="smollm2 (the default) or tiny:<preset>")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch on both sides (default 2)")
    parser.add_argument("--microbatch-tokens", type=int, default=320, help="tokens per pass of Headwater (default 320)")
    parser.add_argument(
        "--trl-microbatch",
        type=int,
        nargs="+",
        default=[0],
        metavar="SAMPLES",
        help="samples per pass of TRL, one run for each value; 0, the default, means all samples in one pass",
    )
    parser.add_argument("--trl-python", help="interpreter of an environment that already has TRL")
    return parser.parse_args()


def _model_folder(model: str, work: Path) -> str:
    """The model as a folder that both sides can read."""
    if model == "smollm2":
        return str(fetched_folder())
    folder = work / "model"
    save_model(load_model(model, dtype="float32", device="cpu", seed=0), load_tokenizer(model), folder)
    return str(folder)


def _trl_environment(folder: Path) -> str:
    """The interpreter of an environment with TRL, made unless it is there. Takes some minutes and 2 GB of disk."""
    python = folder / "bin" / "python"
    # pip finds nothing to do where all is there. Newer torch would bring packages for CUDA.
    if not python.exists():
        print(f"making an environment for TRL: {folder}", flush=True)
        venv.create(folder, with_pip=True)
    wanted = [TRL, "torch>=2.11,<2.14", f"transformers=={transformers.__version__}"]
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    subprocess.run(command, check=True)
    return str(python)


def _run(python: str, script: str, job: Job, folder: Path) -> Outcome:
    """Run one side in a separate process, so that its peak memory can be measured."""
    job.write(folder / "job.json")
    outcome = folder / "outcome.json"
    outcome.unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.num_threads), "HF_HUB_OFFLINE": "1",
                   "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
    subprocess.run([python, str(HERE / script), str(folder / "job.json"), str(outcome)], check=True, env=environment)
    return Outcome.read(outcome)


def _check_same_work(outcomes: dict[str, Outcome], num_samples: int, num_new_tokens: int) -> None:
    ours = outcomes["headwater"]
    for name, each in outcomes.items():
        assert each.prompt_tokens == ours.prompt_tokens, f"{name} has prompts of other lengths: {each.prompt_tokens}"
        assert each.new_tokens == num_samples * num_new_tokens, f"{name} made {each.new_tokens} tokens in a step"
        assert each.num_rewards == num_samples, f"{name} has {each.num_rewards} different rewards"


def _print_table(outcomes: dict[str, Outcome]) -> None:
    ours = outcomes["headwater"]
    print(f"\n{'seconds':<26}{'step':>8}" + "".join(f"{part:>11}" for part in PARTS) + f"{'peak':>11}{'ratio':>8}")
    for name, each in outcomes.items():
        parts = "".join(f"{each.mean(part):>11.2f}" for part in PARTS)
        print(f"{name:<26}{each.step_s:>8.2f}{parts}{each.peak_gib:>7.2f} GiB{each.step_s / ours.step_s:>7.2f}x")
    print(f"prompts of {ours.prompt_tokens} tokens; {ours.new_tokens} new tokens a step; {len(ours.steps) - 1} steps")


if __name__ == "__main__":
    main()
