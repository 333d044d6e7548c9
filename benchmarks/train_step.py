"""One optimiser step and one pass of log-probs on packed sequences, compared with padded ones.

    python benchmarks/train_step.py --shape qwen2.5-1.5b --out benchmarks/results/train_step_qwen2.5-1.5b_h200.json
    python benchmarks/train_step.py --shape qwen2.5-7b --cases lora full_offload --tokens 32768      # does it fit?

Lengths are drawn from a long-tailed distribution. Utilisation counts only the computation that the step needs: the
layers on tokens that a trained token depends on (a shared prompt counts once), causal attention over them, and the
output layer on trained tokens. Padding and recomputation do not count. A trained weight needs three products, a frozen
one two, and attention three times its forward pass. Utilisation is a fraction of ``--peak-tflops``, which is not
measured here.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from options import add_shape, parser_of
from padded_module import PaddedPolicyModule, PaddedTrainEngine
from record import write_record
from shapes import build_model, default_device, default_dtype

from headwater.algorithms.policy_losses.ppo import ppo
from headwater.config.schema import AlgorithmConfig, LearnerConfig, LoraConfig
from headwater.core.data_proto import DataProto
from headwater.core.records import Trajectory
from headwater.learner import packed_module, wide_layers
from headwater.learner.actor import Actor
from headwater.learner.engine import TrainEngine
from headwater.learner.lora import add_adapters
from headwater.learner.packed_module import PolicyModule
from headwater.learner.packing import pack_rows, read_rows
from headwater.models.packed_attention import Segments
from headwater.rollout.group import pad_trajectories

GIB = 2**30


@dataclass(frozen=True)
class Case:
    name: str
    make_module: Callable[..., Any] = PolicyModule
    make_engine: Callable[..., Any] = TrainEngine
    training: tuple[tuple[str, Any], ...] = ()
    lora_rank: int = 0
    patches: tuple[tuple[Any, str, Any], ...] = ()
    """Constants that choose an earlier way: a module, a name and a value."""


_COMPILED_LOGITS = ((packed_module, "USES_LOGIT_KERNELS", False),)
_NO_DEFERRED_SUMS = ((wide_layers, "_DEFERRING", ()),)
_SEPARATE, _RECOMPUTED = ("join_projections", False), ("keep_logits_if_free", False)

CASES = {
    case.name: case
    for case in (
        Case("packed"),
        # Without one of the changes that ``packed`` has, and without all of them.
        Case("separate_projections", training=(_SEPARATE,)),
        Case("recomputed_logits", training=(_RECOMPUTED,)),
        Case("compiled_logits", patches=_COMPILED_LOGITS),
        Case("separate_sums", patches=_NO_DEFERRED_SUMS),
        Case("before", training=(_SEPARATE, _RECOMPUTED), patches=(*_COMPILED_LOGITS, *_NO_DEFERRED_SUMS)),
        Case("kept_logits", training=(("kept_logits_gib", 16.0),)),
        Case("unfused", training=(("fused_layers", False),)),
        Case("compiled", training=(("compile", True),)),
        Case("checkpointed", training=(("checkpoint_activations", True),)),
        Case("padded", make_module=PaddedPolicyModule, make_engine=PaddedTrainEngine),
        Case("lora", training=(("checkpoint_activations", True),), lora_rank=32),
        Case("full_offload", training=(("checkpoint_activations", True), ("offload_optimizer", True))),
        Case("offload", training=(("offload_optimizer", True),)),
    )
}


def main() -> None:
    parser = parser_of(__doc__)
    add_shape(parser)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["padded", "unfused", "compiled", "packed"])
    parser.add_argument("--tokens", type=int, default=65536, help="tokens per step (default 65536)")
    parser.add_argument("--microbatch", type=int, default=16384, help="tokens per pass (default 16384)")
    parser.add_argument("--mean", type=int, default=600, help="mean length (default 600)")
    parser.add_argument("--longest", type=int, default=4096, help="longest sequence (default 4096)")
    parser.add_argument("--samples", type=int, default=1, help="sequences that share a prompt (default 1)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after two that are not (default 3)")
    parser.add_argument("--peak-tflops", type=float, default=790.0, help="the rate to compare with (default 790)")
    parser.add_argument(
        "--profile", type=Path, help="write a profile of the GPU time of each case's step into this folder"
    )
    options = parser.parse_args()
    device = default_device()
    rows = []
    for name in options.cases:
        rows.append(_measure(CASES[name], options, device))
        print(_line(options.shape, rows[-1]), flush=True)
    by_name = {row["case"]: row for row in rows}
    if "padded" in by_name:
        for name in by_name.keys() - {"padded"}:
            ratio = by_name[name]["train_tokens_per_s"] / by_name["padded"]["train_tokens_per_s"]
            by_name[name]["speed_up_over_padded"] = ratio
            print(f"{name}: {ratio:.2f} times the tokens/s of the padded step")
    write_record(
        options.out, device, shape=options.shape, tokens=options.tokens, peak_tflops=options.peak_tflops, rows=rows
    )


def _measure(case: Case, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    before = [(module, name, getattr(module, name)) for module, name, _ in case.patches]
    try:
        for module, name, value in case.patches:
            setattr(module, name, value)
        return _measured(case, options, device)
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _measured(case: Case, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    gc.collect()  # the model of the case before
    if device.type == "cuda":
        torch.cuda.empty_cache()
    dtype = default_dtype(device)
    # What is trained is float32; frozen weights are only computed with.
    model = build_model(options.shape, device, dtype if case.lora_rank else torch.float32)
    data = experience_of(options, model.config.vocab_size)
    module = case.make_module(model, 1.0)
    if case.lora_rank:
        add_adapters(model, LoraConfig(rank=case.lora_rank))
    work = Work.of(model, data)
    config = LearnerConfig(
        max_tokens_per_microbatch=options.microbatch, skip_zero_advantages=False, **dict(case.training)
    )
    learner = Actor(case.make_engine(module, config, compute_dtype=dtype), ppo, AlgorithmConfig(), loss_width=4096)
    logprobs_s = seconds_per_call(lambda: learner.engine.compute(data)["logprobs"], options.steps, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    learner.update(data)
    _wait(device)
    first_s = time.perf_counter() - started
    train_s = seconds_per_call(lambda: learner.update(data), options.steps, device)
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0
    if options.profile:
        write_profile(lambda: learner.update(data), options.profile / f"{options.shape}_{case.name}.txt")
    return {
        "case": case.name,
        "sequences": len(data),
        "tokens": work.tokens,
        "first_train_s": first_s,
        "train_s": train_s,
        "train_tokens_per_s": work.tokens / train_s,
        "train_utilisation": work.train_flops / train_s / options.peak_tflops / 1e12,
        "logprobs_s": logprobs_s,
        "logprobs_tokens_per_s": work.tokens / logprobs_s,
        "logprobs_utilisation": work.forward_flops / logprobs_s / options.peak_tflops / 1e12,
        "peak_gib": peak,
    }


@dataclass(frozen=True)
class Work:
    tokens: int
    """Of all sequences, each with its prompt."""
    forward_flops: float
    train_flops: float

    @classmethod
    def of(cls, model: Any, data: DataProto) -> Work:
        (pack,) = pack_rows(read_rows(data), data.batch["response_mask"].shape[1], max_tokens=1 << 40)
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        embedded = id(model.get_input_embeddings().weight)
        layers = [each for each in decoder.parameters() if each.dim() == 2 and id(each) != embedded]
        products = [(each, len(pack.input_ids)) for each in layers] + [(head.weight, len(pack.targets))]
        flops = [(2.0 * weight.numel() * count, weight.requires_grad) for weight, count in products]
        attention = _attention_flops(model, pack.segments)
        return cls(
            tokens=int(data.batch["attention_mask"].sum()),
            forward_flops=sum(each for each, _ in flops) + attention,
            train_flops=sum(each * (3 if is_trained else 2) for each, is_trained in flops) + 3 * attention,
        )


def _attention_flops(model: Any, segments: Segments) -> float:
    """Scores and values of every token with those of its prefix and those up to itself."""
    pairs = float((segments.lengths * segments.prefix_lengths + segments.lengths * (segments.lengths + 1) / 2).sum())
    config = model.config
    width = config.num_attention_heads * model.get_decoder().layers[0].self_attn.head_dim
    return 2 * 2.0 * width * config.num_hidden_layers * pairs


def experience_of(options: argparse.Namespace, vocabulary: int) -> DataProto:
    """Sequences whose lengths are log-normal, cut at the longest, until there are tokens enough."""
    generator = torch.Generator().manual_seed(0)
    trajectories: list[Trajectory] = []
    num_tokens = 0
    while num_tokens < options.tokens:
        prompt = torch.randint(10, vocabulary, (128,), generator=generator).tolist()
        for sample in range(options.samples):
            spread = float(torch.randn((), generator=generator))
            # exp(mu + sigma²/2) is the mean of a log-normal; with sigma 1 a tenth of the lengths is over twice it.
            length = options.mean * torch.tensor(spread - 0.5).exp()
            longest = min(options.longest, options.tokens - num_tokens + len(prompt) + 8)
            length = max(int(min(float(length), longest)), len(prompt) + 8)
            response = torch.randint(10, vocabulary, (length - len(prompt),), generator=generator).tolist()
            trajectories.append(make_trajectory(prompt, response, sample))
            num_tokens += length
    data = pad_trajectories(trajectories, pad_token_id=0)
    advantages = torch.randn(len(data), 1, generator=generator) * data.batch["response_mask"]
    return data.with_columns(tensors={"old_logprobs": data.batch["rollout_logprobs"], "advantages": advantages})


def make_trajectory(prompt: list[int], response: list[int], sample: int) -> Trajectory:
    return Trajectory(
        uid="row",
        sample=sample,
        tokens=(*prompt, *response),
        prompt_length=len(prompt),
        loss_mask=(0,) * len(prompt) + (1,) * len(response),
        logprobs=(0.0,) * len(prompt) + (-11.0,) * len(response),
        versions=(-1,) * len(prompt) + (0,) * len(response),
        reward=0.0,
        stop_reason="length",
    )


def seconds_per_call(work: Callable[[], Any], steps: int, device: torch.device) -> float:
    """Of ``steps`` calls after two others, which compile and allocate."""
    for _ in range(2):
        work()
    _wait(device)
    started = time.perf_counter()
    for _ in range(steps):
        work()
    _wait(device)
    return (time.perf_counter() - started) / steps


def write_profile(work: Callable[[], Any], path: Path) -> None:
    """Kernels of two steps by their time, and where the device waited."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(2):
            work()
    path.parent.mkdir(parents=True, exist_ok=True)
    table = profile.key_averages().table(sort_by="cuda_time_total", row_limit=60, max_name_column_width=90)
    path.write_text(f"{_gaps(profile)}\n{table}")


def _gaps(profile: Any, num_shown: int = 15) -> str:
    """How long the device was idle between the first and the last kernel, and its longest pauses."""
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    )
    if not spans:
        return "no kernels"
    begin, (_, latest, last) = spans[0][0], spans[0]
    idle: list[tuple[float, str, str]] = []
    for start, end, name in spans[1:]:
        if start > latest:
            idle.append((start - latest, last, name))
        if end > latest:
            latest, last = end, name
    total = sum(each for each, _, _ in idle)
    short = sum(each for each, _, _ in idle if each < 20)
    lines = [
        f"two steps: {(latest - begin) / 1e3:.1f} ms from the first to the last kernel, and the device is idle for "
        f"{total / 1e3:.1f} ms in {len(idle)} gaps ({short / 1e3:.1f} ms in gaps below 20 us). The longest:"
    ]
    for each, before, after in sorted(idle, reverse=True)[:num_shown]:
        lines.append(f"{each / 1e3:9.2f} ms between {before[:60]} and {after[:60]}")
    return "\n".join(lines)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _line(shape: str, row: dict[str, Any]) -> str:
    return (
        f"{shape} {row['case']:<13} {row['sequences']} sequences, {row['tokens']:,} tokens: "
        f"train {row['train_s']:.3f} s (first {row['first_train_s']:.1f}), "
        f"{row['train_tokens_per_s']:,.0f} tokens/s, {row['train_utilisation']:.1%}; "
        f"log-probs {row['logprobs_s']:.2f} s, {row['logprobs_utilisation']:.1%}; peak {row['peak_gib']:.1f} GiB"
    )


if __name__ == "__main__":
    main()
