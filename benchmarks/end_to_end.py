"""Time whole GRPO steps of Headwater, and of TRL with and without vLLM: generate, score, train, update the engine.

    python benchmarks/end_to_end.py --trl-python trl-env/bin/python --out gpu_end_to_end.json            # a GPU
    python benchmarks/end_to_end.py --device cpu                                                          # a minute
    headwater fetch smollm2; python benchmarks/end_to_end.py --device cpu --model smollm2 --prompts 8 --samples 8 \\
        --prompt-tokens 39 --new-tokens 32 --threads 2 --microbatch-tokens 320 --trl-python trl-env/bin/python

On a GPU the default is the shape of Qwen2.5-1.5B with random weights, 32 prompts of about 120 tokens with 8 samples of
exactly 512 new tokens, bfloat16 passes and float32 weights; on a CPU it is a tiny model. Temperature is 1, and there is
one optimiser step. All samples have different rewards, so every sample has an advantage and none is skipped.
``KEY=VALUE`` arguments change settings of Headwater, for example ``rollout.max_staleness=1``.

The sides run one after the other, each in its own process. A side that is not installed is left out and named. The
time of a step lasts from the end of the step before to its own end, so nothing is left out. The first step, in which
kernels are compiled and graphs captured, is reported separately, and the result is the median of the others. Peak
memory is that of the tensors, and that of the whole GPU without what was in use before, both with the KV cache. The
floor is the time that the necessary products and memory reads take at the rates of this machine, which are measured
first.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from end_to_end_job import DETAILS, STAGES, Job, Outcome
from options import parser_of
from record import write_record
from rollout_throughput import Case, floor_tokens_per_s, measure_ceilings
from shapes import SHAPES, build_model, default_device, default_dtype
from train_step import Work, make_trajectory
from transformers import AutoConfig, AutoModelForCausalLM

from headwater.models.builtin.smollm2 import fetched_folder
from headwater.models.builtin.tiny import build_tokenizer
from headwater.models.load import load_tokenizer
from headwater.rollout.group import pad_trajectories

HERE = Path(__file__).resolve().parent
SIDES = {
    "headwater": "end_to_end_headwater.py",
    "trl": "end_to_end_trl.py",
    "trl+vllm": "end_to_end_trl.py",
}
_NEEDS = {"headwater": ("headwater",), "trl": ("trl",), "trl+vllm": ("trl", "vllm")}
_SYSTEM = "Be brief."
_FILLER = "Think about the question, write down every step on a line of its own, check the result, then answer."
_LIMIT_S = 1800
_GIB = 2**30


@dataclass(frozen=True)
class Size:
    """Defaults of the options that say how large a step is."""

    shape: str
    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int
    microbatch_tokens: int
    trl_microbatch: int


_ON_GPU = Size("qwen2.5-1.5b", 32, 8, 120, 512, 16384, 16)
_ON_CPU = Size("tiny", 4, 4, 40, 16, 2048, 16)


def main() -> None:
    options = _options()
    device = torch.device("cpu") if options.device == "cpu" else default_device()
    load = os.getloadavg()
    print(f"load of the machine before the start: {load[0]:.1f}", flush=True)
    ceilings = measure_ceilings(device, default_dtype(device))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    outcomes: dict[str, dict[str, Any]] = {}
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        job = _job(options, device, Path(folder))
        floor = _floor(job, ceilings)
        for side in options.sides:
            python = sys.executable if side == "headwater" else options.trl_python
            if missing := _missing(python, side, device):
                left_out[side] = missing
                print(f"{side}: left out, because {missing}", flush=True)
                continue
            theirs = replace(job, microbatch=options.trl_microbatch, use_vllm=side == "trl+vllm")
            try:
                outcomes[side] = _run(python, side, job if side == "headwater" else theirs, Path(folder), device)
            except SideFailed as error:
                left_out[side] = str(error)
                print(f"{side}: {error}", flush=True)
    _print_table(outcomes, floor)
    write_record(
        options.out,
        device,
        model=options.model or options.shape,
        load_before=load,
        ceilings=asdict(ceilings),
        settings={name: value for name, value in asdict(job).items() if name not in ("chats", "model")},
        floor=floor,
        sides=outcomes,
        left_out=left_out,
    )
    if not outcomes:
        sys.exit("no side has run")


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of Headwater")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="cpu ignores a GPU")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="what to run (default: all)")
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter of an environment that has TRL")
    parser.add_argument("--model", default="", help="a folder, or smollm2; without it, random weights of --shape")
    parser.add_argument("--shape", choices=SHAPES, help="shape of a model with random weights")
    parser.add_argument("--prompts", type=int, help="prompts per step")
    parser.add_argument("--samples", type=int, help="samples per prompt")
    parser.add_argument("--prompt-tokens", type=int, help="length of each prompt, about")
    parser.add_argument("--new-tokens", type=int, help="length of each response")
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters of this rank (default 0: all weights)")
    parser.add_argument("--checkpoint-activations", action="store_true", help="compute activations twice, on all sides")
    parser.add_argument("--runs", type=int, default=4, help="timed steps, after the first (default 4)")
    parser.add_argument(
        "--threads", type=int, default=0, help="threads of torch on all sides (default: torch's choice)"
    )
    parser.add_argument("--microbatch-tokens", type=int, help="tokens per pass of Headwater")
    parser.add_argument("--trl-microbatch", type=int, metavar="SAMPLES", help="samples per pass of TRL")
    parser.add_argument("--vllm-memory", type=float, default=0.3, help="share of the GPU for TRL's vLLM (default 0.3)")
    options = parser.parse_args()
    is_given = options.trl_microbatch is not None
    is_small = options.device == "cpu" or not torch.cuda.is_available()
    for name, value in asdict(_ON_CPU if is_small else _ON_GPU).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if not is_given:
        options.trl_microbatch = math.gcd(options.trl_microbatch, options.prompts * options.samples)
    if bad := [each for each in options.settings if "=" not in each]:
        parser.error(f"{' '.join(bad)}: must be KEY=VALUE")
    if options.prompts * options.samples % options.trl_microbatch:
        parser.error(
            f"--trl-microbatch {options.trl_microbatch}: must divide the {options.prompts * options.samples} samples"
        )
    return options


def _job(options: argparse.Namespace, device: torch.device, folder: Path) -> Job:
    dtype = default_dtype(device)
    model = _model_folder(options, device, folder / "model")
    tokenizer = load_tokenizer(model)
    chats = [_chat(tokenizer, number, options.prompt_tokens) for number in range(options.prompts)]
    return Job(
        model=model,
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        chats=chats,
        prompt_tokens=sorted(_num_tokens(tokenizer, chat) for chat in chats),
        num_samples=options.samples,
        num_new_tokens=options.new_tokens,
        num_steps=1 + options.runs,
        learning_rate=1e-6,
        num_threads=options.threads,
        microbatch=options.microbatch_tokens,
        settings=options.settings,
        lora_rank=options.lora_rank,
        checkpoint_activations=options.checkpoint_activations,
        vllm_memory=options.vllm_memory,
    )


def _model_folder(options: argparse.Namespace, device: torch.device, folder: Path) -> str:
    """The model as a folder that all sides can read."""
    if options.model:
        return str(fetched_folder()) if options.model == "smollm2" else options.model
    build_model(options.shape, device, default_dtype(device)).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return str(folder)


def _chat(tokenizer: Any, number: int, num_tokens: int) -> list[dict[str, str]]:
    """A prompt of at least ``num_tokens`` tokens, and no word more than needed."""
    words = [f"{number}."]
    while True:
        chat = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": " ".join(words)}]
        if _num_tokens(tokenizer, chat) >= num_tokens:
            return chat
        words.append(_FILLER.split()[(len(words) - 1) % len(_FILLER.split())])


def _num_tokens(tokenizer: Any, chat: list[dict[str, str]]) -> int:
    return len(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])


def _floor(job: Job, ceilings: Any) -> dict[str, float]:
    """Seconds of one step if nothing but the necessary products and reads took time (see ``rollout_throughput.py`` and
    ``train_step.py``)."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(job.model)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, job.dtype))
    model.requires_grad_(not job.lora_rank)  # the products of adapters are too few to count
    case = Case(job.num_responses, job.num_new_tokens)
    mean_prompt = sum(job.prompt_tokens) / len(job.prompt_tokens)
    rate = floor_tokens_per_s(model, case, len(job.chats), mean_prompt, ceilings)
    rows = [
        make_trajectory([number] * length, [0] * job.num_new_tokens, sample)
        for number, length in enumerate(job.prompt_tokens)
        for sample in range(job.num_samples)
    ]
    work = Work.of(model, pad_trajectories(rows, pad_token_id=0))
    rollout_s, train_s = case.num_tokens / rate, work.train_flops / ceilings.matmul_flop_per_s
    return {"rollout": rollout_s, "train": train_s, "step": rollout_s + train_s, "train_flop": work.train_flops}


class SideFailed(Exception):
    """A side has ended without a result."""


def _missing(python: str, side: str, device: torch.device) -> str:
    """Why a side cannot run, or nothing."""
    if side == "trl+vllm" and device.type == "cpu":
        return "vLLM beside TRL in one process needs a GPU"
    code = "import importlib.util, sys; print(*[name for name in sys.argv[1:] if not importlib.util.find_spec(name)])"
    found = subprocess.run([python, "-c", code, *_NEEDS[side]], capture_output=True, text=True, check=False)
    if found.returncode:
        return f"its Python cannot run: {found.stderr.strip()[-300:]}"
    names = found.stdout.split()
    # Without the path of the interpreter: the record is published.
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not installed" if names else ""


def _run(python: str, side: str, job: Job, folder: Path, device: torch.device) -> dict[str, Any]:
    """Run one side in a separate process, so that its peak memory can be measured."""
    job.write(folder / "job.json")
    outcome_file = folder / "outcome.json"
    outcome_file.unlink(missing_ok=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1",
                   "VLLM_USE_FLASHINFER_SAMPLER": "0"}  # fmt: skip
    if device.type == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": ""}
    if job.num_threads:
        environment |= {"OMP_NUM_THREADS": str(job.num_threads)}
    command = [python, str(HERE / SIDES[side]), str(folder / "job.json"), str(outcome_file)]
    with _peak_of(device) as peak:
        try:
            done = subprocess.run(command, env=environment, check=False, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise SideFailed(f"no result after {_LIMIT_S} s") from None
    if done.returncode or not outcome_file.exists():
        raise SideFailed(f"failed with code {done.returncode}; its output is above")
    outcome = Outcome.read(outcome_file)
    _check_work(side, outcome, job)
    return {**outcome.summary(), "microbatch": job.microbatch, "device_peak_gib": max(peak, default=None)}


@contextmanager
def _peak_of(device: torch.device) -> Iterator[list[float]]:
    """GiB of the GPU that all processes use, beyond what is in use now. Nothing without a GPU."""
    seen: list[float] = []
    if device.type != "cuda":
        yield seen
        return
    before, _ = torch.cuda.mem_get_info()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.02):
            free, _ = torch.cuda.mem_get_info()
            seen[:] = [max([(before - free) / _GIB, *seen])]

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def _check_work(side: str, outcome: Outcome, job: Job) -> None:
    """Every side must have done the same."""
    expected = job.num_responses * job.num_new_tokens
    if len(outcome.steps) != job.num_steps or outcome.new_tokens != expected:
        raise SideFailed(f"made {len(outcome.steps)} steps and {outcome.new_tokens} tokens in the last, not {expected}")
    if outcome.num_rewards != job.num_responses:
        raise SideFailed(f"had {outcome.num_rewards} different rewards, not {job.num_responses}")


def _print_table(outcomes: dict[str, dict[str, Any]], floor: dict[str, float]) -> None:
    names = (*STAGES, *DETAILS)
    print(f"\n{'seconds':<12}{'first':>8}{'step':>8}" + "".join(f"{name:>12}" for name in names) + f"{'peak GiB':>12}")
    for side, each in outcomes.items():
        stages = "".join(f"{each['stages'][name]:>12.3f}" for name in names)
        print(f"{side:<12}{each['first_step_s']:>8.2f}{each['step_s']:>8.3f}{stages}{each['peak_gib']:>12.2f}")
    of = "".join(f"{floor[name]:>12.3f}" if name in floor else f"{'':>12}" for name in names)
    print(f"{'floor':<12}{'':>8}{floor['step']:>8.3f}{of}")
    if ours := outcomes.get("headwater"):
        for side in outcomes.keys() - {"headwater"}:
            print(f"Headwater is {outcomes[side]['step_s'] / ours['step_s']:.2f} times as fast as {side}")
        print(f"Headwater's step is {ours['step_s'] / floor['step']:.2f} times the floor")


if __name__ == "__main__":
    main()
