"""One optimiser step of a vision model on prompts with pictures, compared with prompts of text of the same length.

    python benchmarks/vision_train_step.py --shape qwen2.5-vl-3b --out benchmarks/results/vision_train_step_3b_h200.json
    python benchmarks/vision_train_step.py --shape tiny --prompts 4 --samples 4 --image-tokens 16 --text-tokens 8 \
        --new-tokens 16                                                                                    # CPU

Every prompt has one picture and some text, and ``--samples`` responses share it. Weights are random. Utilisation counts
what the step needs: the layers of the language model on every token once, its causal attention, the output layer on
trained tokens, and the layers of the vision tower on every picture once, without the tower's attention. A frozen tower
counts one forward pass, everything that is trained three. It is a fraction of ``--peak-tflops``, which is not measured
here. Pictures are read in every step: the processor keeps none of them.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from options import parser_of
from record import write_record
from shapes import default_device, default_dtype, make_prompts
from train_step import seconds_per_call, write_profile
from vision_throughput import SHAPES, build, make_media_prompts

from headwater.algorithms.policy_losses.ppo import ppo
from headwater.config.schema import AlgorithmConfig, LearnerConfig
from headwater.config.training_schema import LoraConfig
from headwater.core.data_proto import DataProto
from headwater.core.media import Media
from headwater.core.records import Trajectory
from headwater.learner.actor import Actor
from headwater.learner.engine import TrainEngine
from headwater.learner.freeze import freeze_parts
from headwater.learner.lora import add_adapters
from headwater.learner.packed_module import PolicyModule
from headwater.learner.step_sums import FLOPS
from headwater.models.vision import VisionProcessor
from headwater.rollout.group import pad_trajectories

GIB = 2**30
_BYTES_PER_TOKEN = 4 * 1176 * 4
"""Of the four patches that become one token."""


class Case(NamedTuple):
    settings: Mapping[str, Any] = MappingProxyType({})
    has_pictures: bool = True
    lora_rank: int = 0


CASES = {
    "text": Case(has_pictures=False),
    "pictures": Case(),
    "frozen": Case({"freeze": ("vision",)}),
    "checkpointed": Case({"checkpoint_activations": True}),
    "lora": Case({"checkpoint_activations": True}, lora_rank=32),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="shape of the model; its weights are random")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["text", "pictures", "frozen"])
    counts = {
        "--prompts": (32, "prompts per step, each with its own picture"),
        "--samples": (8, "responses that share a prompt"),
        "--image-tokens": (512, "tokens of each picture"),
        "--text-tokens": (64, "other tokens of each prompt"),
        "--new-tokens": (256, "tokens of each response"),
        "--microbatch": (5632, "tokens per pass with gradients"),
        "--steps": (3, "timed steps, after two that are not"),
    }
    for name, (default, meaning) in counts.items():
        parser.add_argument(name, type=int, default=default, help=f"{meaning} (default {default})")
    parser.add_argument("--peak-tflops", type=float, default=790.0, help="the rate to compare with (default 790)")
    parser.add_argument(
        "--profile", type=Path, help="write the GPU time of each case's step by kernel into this folder"
    )
    options = parser.parse_args()
    device = default_device()
    rows = []
    for name in options.cases:
        rows.append(_measure(name, options, device))
        print(_line(options.shape, rows[-1]), flush=True)
    write_record(options.out, device, shape=options.shape, peak_tflops=options.peak_tflops, rows=rows)


def _measure(name: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    gc.collect()  # the model of the case before
    if device.type == "cuda":
        torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated() / GIB if device.type == "cuda" else 0.0
    case, dtype = CASES[name], default_dtype(device)
    model, processor = build(options.shape, device, dtype if case.lora_rank else torch.float32)
    config = LearnerConfig(max_tokens_per_microbatch=options.microbatch, skip_zero_advantages=False, **case.settings)
    freeze_parts(model, config.freeze)
    # A training run sees new pictures in every step, so only those of this pass and the next one are kept.
    num_pictures = 2 * max(1, options.microbatch // (options.image_tokens + options.text_tokens))
    kept = num_pictures * options.image_tokens * _BYTES_PER_TOKEN
    processor = VisionProcessor(processor.tokenizer, processor.family, max_cache_bytes=kept)
    module = PolicyModule(model, 1.0, processor)
    if case.lora_rank:
        add_adapters(model, LoraConfig(rank=case.lora_rank))
    prompts = make_media_prompts(processor, options.prompts, options, 1)
    if not case.has_pictures:
        length = options.image_tokens + options.text_tokens
        prompts = [(tokens, ()) for tokens in make_prompts(options.prompts, length, 500, 1)]
    data = _experience(prompts, options)
    learner = Actor(TrainEngine(module, config, compute_dtype=dtype), ppo, AlgorithmConfig(), loss_width=4096)
    logprobs_s = seconds_per_call(lambda: learner.engine.compute(data), options.steps, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    flops = learner.update(data)[FLOPS]
    train_s = seconds_per_call(lambda: learner.update(data), options.steps, device)
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0
    if options.profile:
        write_profile(lambda: learner.update(data), options.profile / f"{options.shape}_{name}.txt")
    num_tokens = int(data.batch["attention_mask"].sum())
    return {
        "case": name,
        "sequences": len(data),
        "tokens": num_tokens,
        "train_s": train_s,
        "train_tokens_per_s": num_tokens / train_s,
        "train_tflop": flops / 1e12,
        "train_utilisation": flops / train_s / options.peak_tflops / 1e12,
        "logprobs_s": logprobs_s,
        "peak_gib": peak,
        "held_before_gib": held,
    }


def _experience(prompts: list[tuple[tuple[int, ...], Media]], options: argparse.Namespace) -> DataProto:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number, (prompt, media) in enumerate(prompts):
        for sample in range(options.samples):
            response = torch.randint(10, 500, (options.new_tokens,), generator=generator).tolist()
            rows.append(_trajectory(f"row{number}", sample, prompt, response, media))
    data = pad_trajectories(rows, pad_token_id=0)
    advantages = torch.randn(len(data), 1, generator=generator) * data.batch["response_mask"]
    return data.with_columns(tensors={"old_logprobs": data.batch["rollout_logprobs"], "advantages": advantages})


def _trajectory(uid: str, sample: int, prompt: tuple[int, ...], response: list[int], media: Media) -> Trajectory:
    return Trajectory(
        uid=uid,
        sample=sample,
        tokens=(*prompt, *response),
        prompt_length=len(prompt),
        loss_mask=(0,) * len(prompt) + (1,) * len(response),
        logprobs=(0.0,) * len(prompt) + (-11.0,) * len(response),
        versions=(-1,) * len(prompt) + (0,) * len(response),
        reward=0.0,
        stop_reason="length",
        media=media,
    )


def _line(shape: str, row: dict[str, Any]) -> str:
    return (
        f"{shape} {row['case']:<13} {row['sequences']} sequences, {row['tokens']:,} tokens: "
        f"train {row['train_s']:.2f} s, {row['train_tokens_per_s']:,.0f} tokens/s, {row['train_utilisation']:.1%}; "
        f"log-probs {row['logprobs_s']:.2f} s; peak {row['peak_gib']:.1f} GiB"
    )


if __name__ == "__main__":
    main()
