r"""How far the learner's log-probs are from the engine's at equal weights, and what each number type costs in speed.

    python benchmarks/mismatch.py --model FOLDER --dtypes bfloat16 --layers --narrow logits rotary residual \
        --out benchmarks/results/gpu_mismatch_narrow_smollm2.json          # as before the widening; 60 s on an H200
    python benchmarks/mismatch.py --model FOLDER --dtypes bfloat16 float16 float32 tf32 --layers \
        --out benchmarks/results/gpu_mismatch_smollm2.json                 # 180 s
    python benchmarks/mismatch.py --shape qwen2.5-1.5b --dtypes bfloat16 --narrow logits rotary residual \
        --out benchmarks/results/gpu_mismatch_narrow_qwen2.5-1.5b.json     # 80 s
    python benchmarks/mismatch.py --shape qwen2.5-1.5b --dtypes bfloat16 float16 tf32 float32 \
        --out benchmarks/results/gpu_mismatch_qwen2.5-1.5b.json            # 300 s
    python benchmarks/mismatch.py --model tiny:llama --dtypes float32 --prompts 2 --samples 2 --new-tokens 8      # CPU

The engine samples responses at temperature 1. The learner computes the same tokens, packed. Both have the same weights:
those of the model, rounded to the number type. ``exact`` is the learner in float32 with these rounded weights, so the
table also shows which side is further from it. ``tf32`` is float32 whose cuBLAS products have TF32 inputs.

``--layers`` prints where in the model the two sides part: relative differences (norm of the difference over the norm of
the exact values) of rotated queries, attention, the gated product and the residual stream after each layer, for one
sequence that the engine scores as a prompt. ``--narrow`` computes the named parts in the number type itself, as before
they were widened: ``logits``, ``rotary`` and ``residual``.

Random weights of a shape give nearly uniform distributions, which hide rounding. Their final norm is therefore
multiplied by ``--sharpen``. On a GPU the speeds are those of long runs: the engine's with ``--speed-sequences``
sequences, the learner's with one step of ``--speed-tokens`` tokens.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from mismatch_layers import LayerRow, layer_table, show_layers
from options import add_work, parser_of
from record import write_record
from shapes import SHAPES, build_model, default_device, make_prompts
from torch import Tensor

from headwater.algorithms.diagnostics import gap_metrics, gap_sums, ratio_percentiles
from headwater.algorithms.policy_losses.ppo import ppo
from headwater.config.schema import AlgorithmConfig, EngineConfig, LearnerConfig
from headwater.core.data_proto import DataProto
from headwater.core.records import NOT_SAMPLED, Trajectory
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams, derive_key
from headwater.engine.engine import Engine
from headwater.learner.actor import Actor
from headwater.learner.engine import TrainEngine
from headwater.learner.packed_module import PolicyModule
from headwater.models.builtin.tiny import build_tokenizer
from headwater.models.load import load_model, load_tokenizer
from headwater.rollout.group import pad_trajectories

DTYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
PARTS = ("logits", "rotary", "residual")
QUESTIONS = (
    "What is {0} + {1}?",
    "Natalia sold {0} clips in April and half as many in May. How many clips did she sell altogether?",
    "Write a short story about a lighthouse keeper who counts {0} ships.",
    "Explain why the sky is blue in {1} sentences.",
    "Name {1} cities in Europe and one fact about each.",
    "Write a Python function that returns the product of {0} and its argument.",
    "Which is larger, {0} or {1} squared? Explain.",
    "Translate to French: I have {0} apples and {1} pears.",
)


@dataclass(frozen=True)
class Gap:
    """The distance between two lists of log-probs of the same tokens."""

    mean_abs: float
    k3_kl: float
    ratio_p99: float
    ratio_p01: float
    max_abs: float

    @classmethod
    def between(cls, learner: Tensor, engine: Tensor, mask: Tensor) -> Gap:
        metrics = gap_metrics(*gap_sums(learner, engine, mask))
        ratios = ratio_percentiles(learner.double() - engine.double(), mask)
        return cls(
            metrics["logprob_abs_mean"],
            metrics["k3_kl"],
            ratios["ratio_p99"],
            ratios["ratio_p01"],
            metrics["logprob_abs_max"],
        )


@dataclass(frozen=True)
class Row:
    dtype: str
    narrow: list[str]
    num_tokens: int
    engine_learner: Gap
    engine_exact: Gap
    learner_exact: Gap
    decode_prefill: Gap
    """The engine's log-probs while it sampled, and those of the same tokens scored as a prompt."""
    engine_tokens_per_s: float | None
    logprobs_tokens_per_s: float | None
    train_tokens_per_s: float | None
    train_peak_gib: float | None
    layers: list[LayerRow]


@dataclass(frozen=True)
class Source:
    """Where the models and prompts of a measurement come from."""

    options: argparse.Namespace
    device: torch.device

    def model(self, rounded: torch.dtype, stored: torch.dtype) -> Any:
        """The model with its weights rounded to one type and stored in another."""
        options = self.options
        if options.model:
            model = load_model(options.model, dtype="float32", device=str(self.device), seed=0)
        else:
            model = build_model(options.shape, self.device, torch.float32)
            model.get_decoder().norm.weight.data *= options.sharpen
        for parameter in model.parameters():
            # Not the buffers: rotary frequencies stay float32, as from_pretrained keeps them.
            parameter.data = parameter.data.to(rounded).to(stored)
        model.config.dtype = stored
        return model.eval()

    def tokenizer(self) -> Any:
        return load_tokenizer(self.options.model) if self.options.model else build_tokenizer()

    def prompts(self, tokenizer: Any, vocabulary: int) -> list[tuple[int, ...]]:
        options = self.options
        if not options.model:
            return make_prompts(options.prompts, options.prompt_tokens, vocabulary)
        prompts = []
        for number in range(options.prompts):
            question = QUESTIONS[number % len(QUESTIONS)].format(13 + 7 * number, 2 + number % 5)
            text = question
            if tokenizer.chat_template:
                message = [{"role": "user", "content": question}]
                text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            prompts.append(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]))
        return prompts


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="a folder, tiny:<preset> or smollm2; default: random weights of --shape")
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="shape of a model with random weights")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "tf32", "bfloat16", "float16"])
    parser.add_argument("--narrow", nargs="+", choices=PARTS, default=[], help="parts that are not widened")
    parser.add_argument("--layers", action="store_true", help="also compare layer by layer")
    parser.add_argument("--prompts", type=int, default=64, help="number of prompts (default 64)")
    parser.add_argument("--sharpen", type=float, default=4.0, help="factor of a shape's final norm (default 4)")
    parser.add_argument("--no-speed", action="store_true", help="do not measure speeds")
    parser.add_argument("--speed-sequences", type=int, default=256, help="(default 256)")
    parser.add_argument("--speed-new-tokens", type=int, default=256, help="(default 256)")
    parser.add_argument("--speed-tokens", type=int, default=65536, help="tokens of a training step (default 65536)")
    parser.add_argument("--microbatch", type=int, default=16384, help="tokens of a training pass (default 16384)")
    add_work(parser, prompt_tokens=128, samples=8, new_tokens=256, runs=2)
    options = parser.parse_args()
    source = Source(options, default_device())
    _set_narrow(options.narrow)
    print(HEADER)
    rows = []
    for dtype in options.dtypes:
        rows.append(_measure(dtype, source))
        print(_line(rows[-1]), flush=True)
    print("\nfor docs/numerics.md:")
    for row in rows:
        print(_markdown(row))
    for row in rows:
        if row.layers:
            show_layers(row.dtype, row.layers)
    write_record(
        options.out,
        source.device,
        model="SmolLM2-135M" if options.model else options.shape,
        narrow=options.narrow,
        rows=[asdict(each) for each in rows],
    )


def _set_narrow(narrow: list[str]) -> None:
    try:
        from headwater.models import precision
    except ImportError:
        if narrow:
            raise SystemExit("--narrow: this version of Headwater widens nothing") from None
        return
    precision.WIDE.difference_update(narrow)


def _measure(name: str, source: Source) -> Row:
    options, device, dtype = source.options, source.device, DTYPES[name]
    with _tf32(name == "tf32"):
        engine = _engine(source, dtype)
        prompts = source.prompts(engine.tokenizer, engine.limits.vocab_size)
        responses = engine.generate(_requests(prompts, options.samples, options.new_tokens, not options.model))
        data = pad_trajectories([_trajectory(*each) for each in enumerate(responses)], pad_token_id=0)
        scored = _scored(engine, responses)
        probe = max(responses, key=lambda each: len(each.output_tokens))
        learner = _learner(source, dtype, dtype)
        mine = learner.engine.compute(data)["logprobs"]
        layers = []
        if options.layers:
            exact_learner = _learner(source, dtype, torch.float32)
            layers = layer_table(engine, learner.engine, exact_learner.engine, probe)
            del exact_learner
        rate = None if options.no_speed else _engine_speed(engine, source)
        engine.close()
        del engine  # its memory is needed for training in float32
        _collect(device)
        learner_speeds = (None, None, None) if options.no_speed else _learner_speeds(learner, source)
    del learner
    _collect(device)
    exact = _learner(source, dtype, torch.float32).engine.compute(data)["logprobs"]
    _collect(device)
    mask, sampled = data.batch["response_mask"], data.batch["rollout_logprobs"]
    return Row(
        name,
        options.narrow,
        int(mask.sum()),
        Gap.between(mine, sampled, mask),
        Gap.between(exact, sampled, mask),
        Gap.between(exact, mine, mask),
        Gap.between(scored, sampled, mask),
        rate,
        *learner_speeds,
        layers,
    )


@contextmanager
def _tf32(enabled: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _engine(source: Source, dtype: torch.dtype) -> Engine:
    on_gpu = source.device.type == "cuda"
    settings = EngineConfig(
        max_sequences=max(source.options.speed_sequences, 64) if on_gpu else 16, kv_cache_gib=24 if on_gpu else 0.25
    )
    return Engine(source.model(dtype, dtype), source.tokenizer(), settings)


def _learner(source: Source, rounded: torch.dtype, computed: torch.dtype) -> Actor:
    # Activations in float32 take twice the memory.
    num_tokens = source.options.microbatch // (2 if computed == torch.float32 else 1)
    config = LearnerConfig(max_tokens_per_microbatch=num_tokens, skip_zero_advantages=False)
    engine = TrainEngine(PolicyModule(source.model(rounded, torch.float32), 1.0), config, compute_dtype=computed)
    return Actor(engine, ppo, AlgorithmConfig(), loss_width=4096)


def _requests(prompts: list[tuple[int, ...]], samples: int, new_tokens: int, ignore_end: bool) -> list[ModelRequest]:
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=1.0, ignore_end=ignore_end)
    return [
        ModelRequest(f"{place}/{sample}", prompt, sampling, derive_key(0, place, sample))
        for place, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


def _trajectory(number: int, response: ModelResponse) -> Trajectory:
    prompt, output = response.input_tokens, response.output_tokens
    return Trajectory(
        uid=str(number),
        sample=0,
        tokens=prompt + output,
        prompt_length=len(prompt),
        loss_mask=(0,) * len(prompt) + (1,) * len(output),
        logprobs=(0.0,) * len(prompt) + response.output_logprobs,
        versions=(NOT_SAMPLED,) * len(prompt) + (0,) * len(output),
        reward=0.0,
        stop_reason=response.stop_reason,
    )


def _scored(engine: Engine, responses: list[ModelResponse]) -> Tensor:
    """The engine's log-probs of the responses when it computes them as prompts, ``[samples, response]``."""
    sampling = SamplingParams(max_new_tokens=0, prompt_logprobs=True)
    whole = [each.input_tokens + each.output_tokens for each in responses]
    scores = engine.generate([ModelRequest(f"s{number}", each, sampling, 0) for number, each in enumerate(whole)])
    result = torch.zeros(len(responses), max(len(each.output_tokens) for each in responses))
    for row, (response, score) in enumerate(zip(responses, scores, strict=True)):
        assert score.prompt_scores is not None
        num_output = len(response.output_tokens)
        result[row, :num_output] = torch.tensor(score.prompt_scores.logprobs[-num_output:])
    return result


def _engine_speed(engine: Engine, source: Source) -> float:
    options = source.options
    if source.device.type == "cuda":
        num, new_tokens = options.speed_sequences, options.speed_new_tokens
    else:
        num, new_tokens = 8, 16
    prompts = make_prompts(num, options.prompt_tokens, engine.limits.vocab_size)
    times = []
    for run in range(options.runs + 1):
        engine.set_version(run + 1)  # forgets the prefix cache: every run computes its prompts
        started = time.perf_counter()
        engine.generate(_requests(prompts, 1, new_tokens, True))
        times.append(time.perf_counter() - started)
    return num * new_tokens / min(times[1:])  # the first run captures graphs


def _learner_speeds(learner: Actor, source: Source) -> tuple[float, float, float | None]:
    """Tokens per second of log-probs and of training, and the peak of memory of training in GiB."""
    options, device = source.options, source.device
    num_tokens = options.speed_tokens if device.type == "cuda" else 1024
    length = 640 if device.type == "cuda" else 64
    vocabulary = learner.engine.module.num_outputs
    tokens = make_prompts(num_tokens // length, length, vocabulary, seed=5)
    rows = [
        Trajectory(
            uid=str(number),
            sample=0,
            tokens=each,
            prompt_length=length // 5,
            loss_mask=(0,) * (length // 5) + (1,) * (length - length // 5),
            logprobs=(0.0,) * (length // 5) + (-11.0,) * (length - length // 5),
            versions=(NOT_SAMPLED,) * (length // 5) + (0,) * (length - length // 5),
            reward=0.0,
            stop_reason="length",
        )
        for number, each in enumerate(tokens)
    ]
    data = pad_trajectories(rows, pad_token_id=0)
    advantages = torch.randn(len(data), 1, generator=torch.Generator().manual_seed(0)) * data.batch["response_mask"]
    data = data.with_columns(tensors={"old_logprobs": data.batch["rollout_logprobs"], "advantages": advantages})
    logprobs_s = _fastest(lambda: learner.engine.compute(data), options.runs, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    train_s = _fastest(lambda: _update(learner, data), options.runs, device)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    total = len(tokens) * length
    return total / logprobs_s, total / train_s, peak


def _update(learner: Actor, data: DataProto) -> None:
    learner.update(data)


def _fastest(work: Callable[[], Any], runs: int, device: torch.device) -> float:
    times = []
    for _ in range(runs + 2):  # the first two compile
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[2:])


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


HEADER = (
    f"{'dtype':<9} {'tokens':>8} | {'mean |d|':>9} {'k3 KL':>9} {'p99':>7} {'max |d|':>8} | {'engine KL':>9} "
    f"{'learner KL':>10} {'decode KL':>9} | {'engine/s':>9} {'logprob/s':>9} {'train/s':>9} {'peak GiB':>8}"
)


def _markdown(row: Row) -> str:
    gap, name = row.engine_learner, f"{row.dtype}, nothing widened" if len(row.narrow) == len(PARTS) else row.dtype
    speeds = (row.engine_tokens_per_s, row.logprobs_tokens_per_s, row.train_tokens_per_s)
    shown = " | ".join("-" if each is None else f"{each:,.0f}" for each in speeds)
    return f"| {name} | {gap.mean_abs:.1e} | {gap.k3_kl:.1e} | {gap.ratio_p99:.4f} | {shown} |"


def _line(row: Row) -> str:
    gap = row.engine_learner
    speeds = (row.engine_tokens_per_s, row.logprobs_tokens_per_s, row.train_tokens_per_s)
    shown = " ".join(f"{'-':>9}" if each is None else f"{each:>9,.0f}" for each in speeds)
    peak = f"{'-':>8}" if row.train_peak_gib is None else f"{row.train_peak_gib:>8.1f}"
    return (
        f"{row.dtype:<9} {row.num_tokens:>8,} | {gap.mean_abs:>9.2e} {gap.k3_kl:>9.2e} {gap.ratio_p99:>7.4f} "
        f"{gap.max_abs:>8.4f} | {row.engine_exact.k3_kl:>9.2e} {row.learner_exact.k3_kl:>10.2e} "
        f"{row.decode_prefill.k3_kl:>9.2e} | {shown} {peak}"
    )


if __name__ == "__main__":
    main()
