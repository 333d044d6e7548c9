"""Generation and training at the same time on one device: on one CUDA stream, and on separate ones.

    python benchmarks/colocated_overlap.py --shape qwen2.5-1.5b --out benchmarks/results/gpu_colocated_overlap.json

Engine and learner are those of a run. The engine keeps ``--sequences`` responses running, the learner takes optimiser
steps on the same batch again and again, and every step publishes its weights to the engine (mode ``in_flight``). Both
are first measured alone, then together: with the engine on the default stream, which the learner uses, and on its own
stream with the same and with a higher priority.

``overlap`` is the sum of two fractions: the speed of generation and that of training, each of what it is alone. One
means that the two take turns; more than one is gained by running at once.
"""

from __future__ import annotations

import argparse
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from options import add_shape, add_work, parser_of
from record import write_record
from shapes import build_model, default_device, default_dtype, make_prompts, make_requests

from headwater.algorithms.policy_losses.ppo import ppo
from headwater.config.schema import AlgorithmConfig, EngineConfig, LearnerConfig
from headwater.core.data_proto import DataProto
from headwater.core.protocols import Bucket
from headwater.core.records import Trajectory
from headwater.core.requests import ModelRequest
from headwater.engine import engine as engine_module
from headwater.engine.engine import Engine
from headwater.learner.actor import Actor
from headwater.learner.engine import TrainEngine
from headwater.learner.export import merged_weights, weight_shapes
from headwater.learner.packed_module import PolicyModule
from headwater.models.builtin.tiny import build_tokenizer
from headwater.rollout.group import pad_trajectories
from headwater.weights.memory import in_buckets
from headwater.weights.publish import publish

PROMPT_TOKENS = 128


@dataclass(frozen=True)
class Streams:
    """On which stream the engine computes."""

    name: str
    is_own: bool = True
    priority: int = 0


SHARED = Streams("shared", is_own=False)
ALL = (SHARED, Streams("separate"), Streams("separate, higher priority", priority=-1))


def main() -> None:
    parser = parser_of(__doc__)
    add_shape(parser)
    add_work(parser, new_tokens=512)
    parser.add_argument("--sequences", type=int, default=256, help="responses that run at once (default 256)")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens per optimiser step (default 32768)")
    parser.add_argument("--microbatch", type=int, default=16384, help="tokens per pass (default 16384)")
    parser.add_argument("--seconds", type=float, default=12.0, help="length of each measurement (default 12)")
    parser.add_argument("--kv-cache-gib", type=float, default=16.0, help="size of the KV cache (default 16)")
    options = parser.parse_args()
    device = default_device()
    learner = _Learner(options, device)
    learner.step()
    learner.step()
    training_alone = _training(learner, options.seconds, device)
    print(f"{options.shape}: training alone {training_alone:,.0f} tokens/s", flush=True)
    rows = []
    for streams in ALL:
        with _engine(options, device, streams) as engine, _Generation(engine, options):
            generation_alone = _generation(engine, options.seconds)
            row = _together(engine, learner, options.seconds)
        row |= {"streams": streams.name, "generation_alone": generation_alone, "training_alone": training_alone}
        row["overlap"] = row["generation"] / generation_alone + row["training"] / training_alone
        rows.append(row)
        print(
            f"{streams.name:<26} generation {row['generation']:,.0f} of {generation_alone:,.0f} tokens/s, training "
            f"{row['training']:,.0f} of {training_alone:,.0f} tokens/s, publish {row['publish_ms']:.0f} ms, overlap "
            f"{row['overlap']:.2f}",
            flush=True,
        )
    peak = torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else 0.0
    write_record(options.out, device, shape=options.shape, rows=rows, peak_reserved_gib=peak)


@contextmanager
def _engine(options: argparse.Namespace, device: torch.device, streams: Streams) -> Iterator[Engine]:
    engine_module.STREAM_PRIORITY = streams.priority
    config = EngineConfig(
        max_sequences=options.sequences,
        max_queue=4 * options.sequences,
        kv_cache_gib=options.kv_cache_gib,
        update_mode="in_flight",
    )
    model = build_model(options.shape, device, default_dtype(device))
    engine = Engine(model, build_tokenizer(), config, own_stream=streams.is_own)
    try:
        yield engine
    finally:
        engine.close()
        del engine, model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


class _Generation:
    """Keeps the engine busy: as many threads of requests as it takes, so that rows are always in use."""

    def __init__(self, engine: Engine, options: argparse.Namespace) -> None:
        self._engine = engine
        self._options = options
        self._is_ending = False
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(4)]

    def __enter__(self) -> _Generation:
        first = self._requests(0, self._options.sequences)
        self._engine.generate(first[:1] if self._options.shape == "tiny" else first)  # compiles and captures
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending = True
        while any(thread.is_alive() for thread in self._threads):
            self._engine.abort()
            time.sleep(0.05)

    def _run(self, number: int) -> None:
        count, turn = -(-self._options.sequences // len(self._threads)), 0
        while not self._is_ending:
            turn += 1
            self._engine.generate(self._requests(1 + number + len(self._threads) * turn, count))

    def _requests(self, run: int, count: int) -> list[ModelRequest]:
        prompts = make_prompts(count, PROMPT_TOKENS, self._engine.limits.vocab_size, seed=run)
        return make_requests(prompts, 1, self._options.new_tokens, run)


class _Learner:
    """A policy that is trained on one batch, and the source of the weights that are published."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        model = build_model(options.shape, device, torch.float32)
        self._device = device
        self._data = _experience(options, model.config.vocab_size)
        config = LearnerConfig(max_tokens_per_microbatch=options.microbatch, skip_zero_advantages=False)
        train_engine = TrainEngine(PolicyModule(model, 1.0), config, compute_dtype=default_dtype(device))
        self._actor = Actor(train_engine, ppo, AlgorithmConfig(), loss_width=4096)
        self._model = model
        self.num_tokens = int(self._data.batch["attention_mask"].sum())

    def step(self) -> None:
        self._actor.update(self._data)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def export(self) -> Iterator[Bucket]:
        return in_buckets(merged_weights(self._model))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return weight_shapes(self._model)


def _training(learner: _Learner, seconds: float, device: torch.device) -> float:
    """Tokens trained per second."""
    started, num_steps = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        learner.step()
        num_steps += 1
    return num_steps * learner.num_tokens / (time.perf_counter() - started)


def _generation(engine: Engine, seconds: float) -> float:
    """Tokens generated per second."""
    before, started = engine.metrics().num_tokens_generated, time.perf_counter()
    time.sleep(seconds)
    return (engine.metrics().num_tokens_generated - before) / (time.perf_counter() - started)


def _together(engine: Engine, learner: _Learner, seconds: float) -> dict[str, Any]:
    learner.step()  # its memory, beside that of the engine
    before, started = engine.metrics().num_tokens_generated, time.perf_counter()
    num_steps, publish_s = 0, 0.0
    while time.perf_counter() - started < seconds:
        learner.step()
        began = time.perf_counter()
        publish(learner, engine, engine.get_version() + 1)
        publish_s += time.perf_counter() - began
        num_steps += 1
    elapsed = time.perf_counter() - started
    return {
        "generation": (engine.metrics().num_tokens_generated - before) / elapsed,
        "training": num_steps * learner.num_tokens / elapsed,
        "publish_ms": 1e3 * publish_s / num_steps,
        "steps": num_steps,
    }


def _experience(options: argparse.Namespace, vocabulary: int) -> DataProto:
    generator = torch.Generator().manual_seed(0)
    length = PROMPT_TOKENS + options.new_tokens
    trajectories = []
    for sample in range(max(1, options.tokens // length)):
        tokens = torch.randint(10, vocabulary, (length,), generator=generator).tolist()
        trajectories.append(
            Trajectory(
                uid="row",
                sample=sample,
                tokens=tuple(tokens),
                prompt_length=PROMPT_TOKENS,
                loss_mask=(0,) * PROMPT_TOKENS + (1,) * options.new_tokens,
                logprobs=(0.0,) * PROMPT_TOKENS + (-11.0,) * options.new_tokens,
                versions=(-1,) * PROMPT_TOKENS + (0,) * options.new_tokens,
                reward=0.0,
                stop_reason="length",
            )
        )
    data = pad_trajectories(trajectories, pad_token_id=0)
    advantages = torch.randn(len(data), 1, generator=generator) * data.batch["response_mask"]
    return data.with_columns(tensors={"old_logprobs": data.batch["rollout_logprobs"], "advantages": advantages})


if __name__ == "__main__":
    main()
