"""Rollout throughput of the embedded engine, compared with transformers' generate and with vLLM.

    python benchmarks/rollout_throughput.py --shape qwen2.5-1.5b --cases 256x512 1024x512 64x1024 8x512   # GPU
    python benchmarks/rollout_throughput.py --shape qwen2.5-1.5b --cases 256x512 --top-p 0.95 --no-baseline   # GPU
    python benchmarks/rollout_throughput.py --shape smollm2 --cases 64x32 --samples 8 --prompt-tokens 39   # CPU
    python benchmarks/rollout_throughput.py --shape tiny --cases 256x16 --samples 8 --prompt-tokens 16
    python benchmarks/rollout_throughput.py --shape qwen2.5-1.5b --cases 32x8192@8192 --runs 1 --no-baseline

A case is sequences × new tokens, and optionally the length of its prompts after ``@``. Weights are random (speed does
not depend on them), temperature is 1, log-probs are on, and no response ends early. Times are measured from the first
request to the last response. Transformers' generate gets the same prompts, without stop strings; on a GPU it generates
fewer tokens, because it would take minutes.
With ``--vllm-python``, vLLM runs first, in a separate process, on random weights and prompts of the same shape.

The floor is a lower bound of the time for layers that run one after the other, at the copy and matrix rates of this
machine, which are measured first. ``floor_tokens_per_s`` describes what it includes. ``preempted`` counts sequences
that had to wait for room in the KV cache and were computed again; it should be 0.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from options import add_shape, add_work, parser_of
from record import write_record
from shapes import build_model, default_device, default_dtype, make_prompts, make_requests
from vllm_side import VllmCase, VllmRuns, run_vllm

from headwater.config.schema import EngineConfig
from headwater.engine.engine import Engine
from headwater.engine.model_spec import ModelSpec
from headwater.models.builtin.tiny import build_tokenizer
from headwater.models.load import load_tokenizer

_GPU_BASELINE_TOKENS = 48
_GIB = 2**30


@dataclass(frozen=True)
class Case:
    sequences: int
    new_tokens: int
    prompt_tokens: int | None = None
    """Of each prompt; ``None`` means the length of ``--prompt-tokens``."""

    @classmethod
    def parse(cls, text: str) -> Case:
        work, _, prompt = text.partition("@")
        sequences, new_tokens = work.split("x")
        return cls(int(sequences), int(new_tokens), int(prompt) if prompt else None)

    @property
    def name(self) -> str:
        return f"{self.sequences}x{self.new_tokens}" + (f"@{self.prompt_tokens}" if self.prompt_tokens else "")

    @property
    def num_tokens(self) -> int:
        """All new tokens."""
        return self.sequences * self.new_tokens


@dataclass(frozen=True)
class Ceilings:
    copy_bytes_per_s: float
    matmul_flop_per_s: float


@dataclass(frozen=True)
class Result:
    shape: str
    case: str
    samples_per_prompt: int
    prompt_tokens: int
    engine_tokens_per_s: float
    engine_runs_s: list[float]
    prefilled_tokens: int
    kv_gib_needed: float
    """Keys and values of all sequences at their full length, those of a shared prompt once."""
    kv_gib: float
    """The engine's cache."""
    preempted: int
    vllm_tokens_per_s: float | None
    baseline_tokens_per_s: float | None
    baseline_new_tokens: int | None
    ratio: float | None
    floor_tokens_per_s: float
    fraction_of_floor: float
    filtered_tokens_per_s: float | None = None
    """With ``--top-k``, ``--top-p`` or ``--min-p`` in every request."""
    filtered_runs_s: list[float] | None = None


def run_engine(
    engine: Engine, prompts: list[tuple[int, ...]], case: Case, samples: int, run: int, settings: Mapping[str, Any]
) -> float:
    """Seconds. ``settings`` are fields of ``SamplingParams``."""
    requests = make_requests(prompts, samples, case.new_tokens, run, **settings)
    started = time.perf_counter()
    responses = engine.generate(requests)
    elapsed = time.perf_counter() - started
    made = sum(len(response.output_tokens) for response in responses)
    assert made == case.num_tokens, f"{made} tokens, expected {case.num_tokens}"
    assert all(len(each.output_logprobs) == case.new_tokens for each in responses)
    return elapsed


@torch.inference_mode()
def run_baseline(model: Any, prompts: list[tuple[int, ...]], samples: int, new_tokens: int) -> float:
    input_ids = torch.tensor([prompt for prompt in prompts for _ in range(samples)], device=model.device)
    started = time.perf_counter()
    output = model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
        max_new_tokens=new_tokens, min_new_tokens=new_tokens, pad_token_id=0, return_dict_in_generate=True,
        output_logits=False,
    )  # fmt: skip
    _ = output.sequences[0, -1].item()
    return time.perf_counter() - started


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    on_gpu = device.type == "cuda"
    size = 8192 if on_gpu else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    source = torch.randn((2**30 if on_gpu else 2**25), device=device).to(dtype)
    target = torch.empty_like(source)
    product_s = _fastest(lambda: left @ right, device)
    copy_s = _fastest(lambda: target.copy_(source), device)
    return Ceilings(2 * source.nbytes / copy_s, 2 * size**3 / product_s)


def _fastest(action: Any, device: torch.device) -> float:
    times = []
    for _ in range(8):
        _wait(device)
        started = time.perf_counter()
        action()
        _wait(device)
        times.append(time.perf_counter() - started)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def floor_tokens_per_s(model: Any, case: Case, num_prompts: int, prompt_tokens: float, ceilings: Ceilings) -> float:
    """Tokens per second if nothing but this took time.

    An embedding that is no head's as well is neither multiplied nor read. Each prompt is multiplied once, by every
    weight but the head's, and its tokens attend to those before them, which is most of the work of a prompt of tens of
    thousands of tokens. Each step multiplies every sequence by every weight, or reads the weights once, whichever takes
    longer; then it reads the keys and values of all sequences. Those of a prompt that several samples share count once
    per step: every sample attends to them, but memory need deliver them only once if the other samples find them in the
    second-level cache. Attention's arithmetic during decoding, its reading during prefill, activations, logits,
    sampling and launches count as free.
    """
    spec = ModelSpec.of(model)
    num_weights = sum(each.numel() for each in model.parameters())
    if not model.config.tie_word_embeddings:
        num_weights -= model.get_input_embeddings().weight.numel()
    head = spec.vocab_size * spec.hidden_size
    decode_flop = 2 * num_weights * case.sequences
    weight_s = max(
        num_weights * spec.dtype.itemsize / ceilings.copy_bytes_per_s, decode_flop / ceilings.matmul_flop_per_s
    )
    mean_kv_tokens = num_prompts * prompt_tokens + case.sequences * case.new_tokens / 2
    kv_s = mean_kv_tokens * spec.kv_bytes_per_token / ceilings.copy_bytes_per_s
    # Two products, each with two operations for every pair of a token and one that it attends to.
    pairs = prompt_tokens * (prompt_tokens + 1) / 2
    attention_flop = 4 * spec.num_layers * spec.num_heads * spec.head_dim * pairs
    prompt_flop = 2 * (num_weights - head) * prompt_tokens + attention_flop
    prefill_s = num_prompts * prompt_flop / ceilings.matmul_flop_per_s
    return case.num_tokens / (prefill_s + case.new_tokens * (weight_s + kv_s))


def run_case(
    model: Any,
    baseline: Any,
    engine: Engine,
    case: Case,
    options: argparse.Namespace,
    ceilings: Ceilings,
    vllm: VllmRuns | None,
) -> Result:
    samples, settings = options.samples, {"stop_strings": tuple(options.stop)}
    num_prompts, prompt_tokens = case.sequences // samples, case.prompt_tokens or options.prompt_tokens
    spec = ModelSpec.of(model)
    needed_gib = (num_prompts * prompt_tokens + case.num_tokens) * spec.kv_bytes_per_token / _GIB
    if needed_gib > engine.config.kv_cache_gib:
        print(
            f"{case.name}: the KV cache has {engine.config.kv_cache_gib:.1f} of the {needed_gib:.1f} GiB that it needs"
        )
    warm = Case(case.sequences, min(case.new_tokens, 2 * engine.config.decode_steps + 1))
    others = make_prompts(num_prompts, prompt_tokens, engine.limits.vocab_size - 1)
    run_engine(engine, others, warm, samples, 999, settings)
    prompts = make_prompts(num_prompts, prompt_tokens, engine.limits.vocab_size)
    before = engine.metrics()
    times = []
    for run in range(options.runs):
        engine.set_version(run + 1)  # forgets the prefix cache: every run computes its prompts
        times.append(run_engine(engine, prompts, case, samples, run, settings))
    after = engine.metrics()
    prefilled = (after.num_tokens_prefilled - before.num_tokens_prefilled) // options.runs
    filtered_rate, filtered = None, None
    if filters := filters_of(options):
        run_engine(engine, others, warm, samples, 998, {**settings, **filters})
        filtered = []
        for run in range(options.runs):
            engine.set_version(options.runs + run + 1)
            filtered.append(run_engine(engine, prompts, case, samples, run, {**settings, **filters}))
        filtered_rate = case.num_tokens / min(filtered)
    baseline_rate = baseline_tokens = ratio = None
    rate = case.num_tokens / min(times)
    if baseline is not None:
        on_gpu = baseline.device.type == "cuda"
        baseline_tokens = min(case.new_tokens, _GPU_BASELINE_TOKENS) if on_gpu else case.new_tokens
        run_baseline(baseline, prompts, samples, 4)
        num_runs = 1 if on_gpu else options.runs
        taken = min(run_baseline(baseline, prompts, samples, baseline_tokens) for _ in range(num_runs))
        baseline_rate = case.sequences * baseline_tokens / taken
        ratio = rate / baseline_rate
    vllm_rate = case.num_tokens / min(vllm.seconds[case.name]) if vllm else None
    floor = floor_tokens_per_s(model, case, num_prompts, prompt_tokens, ceilings)
    return Result(
        options.shape, case.name, samples, prompt_tokens, rate, times, prefilled, needed_gib,
        engine.config.kv_cache_gib, after.num_preempted - before.num_preempted, vllm_rate, baseline_rate,
        baseline_tokens, ratio, floor, rate / floor, filtered_rate, filtered,
    )  # fmt: skip


def filters_of(options: argparse.Namespace) -> dict[str, float]:
    given = {"top_k": options.top_k, "top_p": options.top_p, "min_p": options.min_p}
    return {name: value for name, value in given.items() if value is not None}


def show(result: Result) -> None:
    baseline = f"{'-':>10} {'-':>7}"
    if result.ratio is not None:
        baseline = f"{result.baseline_tokens_per_s:>10,.0f} {result.ratio:>6.1f}x"
    vllm = "-" if result.vllm_tokens_per_s is None else f"{result.vllm_tokens_per_s:,.0f}"
    print(
        f"{result.shape:<13} {result.case:>13} x{result.samples_per_prompt:<3} {result.engine_tokens_per_s:>10,.0f} "
        f"{vllm:>10} {baseline} {result.floor_tokens_per_s:>10,.0f} {result.fraction_of_floor:>6.0%}",
        flush=True,
    )
    if result.filtered_tokens_per_s is not None:
        share = result.filtered_tokens_per_s / result.engine_tokens_per_s
        print(
            f"{'':<13} {'filtered':>9} {'':<4} {result.filtered_tokens_per_s:>10,.0f} ({share:.0%} of plain)",
            flush=True,
        )


def main() -> None:
    parser = parser_of(__doc__)
    add_shape(parser)
    add_work(parser, samples=1, prompt_tokens=128, runs=2)
    parser.add_argument("--cases", nargs="+", default=[Case(256, 16)], type=Case.parse, metavar="SEQxTOKENS[@PROMPT]")
    parser.add_argument("--no-baseline", action="store_true", help="do not run transformers' generate")
    parser.add_argument(
        "--vllm-python", help="interpreter of an environment that has vLLM; without it, vLLM is not run"
    )
    parser.add_argument("--decode-steps", type=int, default=EngineConfig().decode_steps)
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="a stop string that is never generated (repeatable)"
    )
    parser.add_argument("--top-k", type=int, help="also run every case with this filter, and compare")
    parser.add_argument("--top-p", type=float, help="likewise")
    parser.add_argument("--min-p", type=float, help="likewise")
    parser.add_argument("--deterministic", action="store_true", help="the engine's bitwise mode")
    parser.add_argument(
        "--fixed-tiles", action="store_true", help="with --deterministic: the tiles of GPUs other than H100 and H200"
    )
    parser.add_argument(
        "--attention-keys", type=int, default=64, choices=(32, 64), help="keys per block of prefill and --deterministic"
    )
    parser.add_argument("--profile", metavar="FILE", help="write a profile of the GPU time of the last case")
    options = parser.parse_args()
    device = default_device()
    dtype = default_dtype(device)
    ceilings = measure_ceilings(device, dtype)
    print(f"copy {ceilings.copy_bytes_per_s / 1e12:.3f} TB/s, matmul {ceilings.matmul_flop_per_s / 1e12:.3f} TFLOP/s")
    model = build_model(options.shape, device, dtype)
    baseline = None if options.no_baseline else build_model(options.shape, device, dtype)
    most = max(case.sequences for case in options.cases)
    vllm = None
    if options.vllm_python:
        cases = [
            VllmCase(
                case.name, case.sequences, case.new_tokens, options.samples, case.prompt_tokens or options.prompt_tokens
            )
            for case in options.cases
        ]
        vllm = run_vllm(options.vllm_python, model, cases, options.runs)
    settings = EngineConfig(
        max_sequences=most,
        decode_steps=options.decode_steps,
        memory_fraction=0.6,
        deterministic=options.deterministic,
    )
    # Texts matter only to stop strings, which are to be looked for in a real vocabulary where there is one.
    tokenizer = load_tokenizer("smollm2") if options.stop and options.shape == "smollm2" else build_tokenizer()
    if device.type == "cuda":
        _use_kernels(options)
    engine = Engine(model, tokenizer, settings)
    names = f"{'engine':>10} {'vLLM':>10} {'generate':>10} {'':>7} {'floor':>10}"
    print(f"{'shape':<13} {'case':>13} {'':<4} {names} tokens/s")
    results = []
    for case in options.cases:
        results.append(run_case(model, baseline, engine, case, options, ceilings, vllm))
        show(results[-1])
    if options.profile:
        _profile(engine, options)
    engine.close()
    write_record(
        options.out,
        device,
        deterministic=options.deterministic,
        fixed_tiles=options.fixed_tiles,
        attention_keys=options.attention_keys,
        filters=filters_of(options),
        ceilings=asdict(ceilings),
        vllm=asdict(vllm) if vllm else None,
        results=[asdict(each) for each in results],
    )


def _use_kernels(options: argparse.Namespace) -> None:
    # They need Triton.
    from headwater.engine.kernels import linear, prefill_attention

    if options.fixed_tiles:
        linear.SCALED_TILES_ON = None
    prefill_attention.KEYS_PER_BLOCK = options.attention_keys


def _profile(engine: Engine, options: argparse.Namespace) -> None:
    last = options.cases[-1]
    case = Case(last.sequences, 64)
    prompt_tokens = last.prompt_tokens or options.prompt_tokens
    prompts = make_prompts(case.sequences // options.samples, prompt_tokens, engine.limits.vocab_size)
    engine.set_version(77)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run_engine(engine, prompts, case, options.samples, 77, {"stop_strings": tuple(options.stop)})
    table = profile.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=90)
    Path(options.profile).write_text(table)


if __name__ == "__main__":
    main()
