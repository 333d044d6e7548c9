"""What an update of LoRA adapters alone costs with vLLM, compared with one of all weights, and what generation costs.

    make setup-vllm
    python benchmarks/vllm_adapters.py --vllm-python .venv-vllm/bin/python --shape smollm2

Two servers of the same model run at the same time: one takes merged weights (``rollout.publish=full``), the other one
adapters beside its weights (``rollout.publish=adapter``). They take turns, so that both see the same load of the
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from options import add_shape, add_work, parser_of
from record import write_record
from shapes import build_model, make_prompts
from torch import Tensor, nn

from headwater.backends import BackendContext
from headwater.backends.vllm.engine import VllmEngine
from headwater.config.load import load_config
from headwater.core.protocols import Bucket
from headwater.core.requests import ModelRequest, SamplingParams
from headwater.models.builtin.tiny import build_tokenizer
from headwater.models.device import with_dtype
from headwater.models.load import load_tokenizer
from headwater.observe.spans import Spans
from headwater.weights.memory import in_buckets
from headwater.weights.publish import AdaptersAlone, publish

PROMPT_TOKENS = 32
CPU = torch.device("cpu")


class Policy:
    """A model with an adapter on each linear layer of its decoder, as far as publishing needs it."""

    def __init__(self, shape: str, rank: int, alpha: int) -> None:
        self.model = build_model(shape, CPU, torch.float32)
        self._weights = {name: each.detach() for name, each in self.model.named_parameters()}
        self._scale = alpha / rank
        head = self.model.get_output_embeddings()
        layers = {name: each for name, each in self.model.named_modules() if isinstance(each, nn.Linear)}
        self._adapters: dict[str, Tensor] = {}
        for name, each in layers.items():
            if each is not head:
                self._adapters[f"{name}.lora_A"] = torch.empty(rank, each.in_features)
                self._adapters[f"{name}.lora_B"] = torch.empty(each.out_features, rank)
        self.change()

    def change(self) -> None:
        """The next version."""
        for each in self._adapters.values():
            each.normal_(std=0.02)

    def export(self) -> Iterator[Bucket]:
        return in_buckets(self._merged())

    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self._weights.items():
            layer = name.removesuffix(".weight")
            if (up := self._adapters.get(f"{layer}.lora_B")) is not None:
                weight = torch.addmm(weight, up, self._adapters[f"{layer}.lora_A"], alpha=self._scale)
            yield name, weight

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(each.shape) for name, each in self._weights.items()}

    def export_unmerged(self, adapters_alone: bool) -> Iterator[Bucket]:
        frozen = {} if adapters_alone else self._weights
        return in_buckets([*frozen.items(), *self._adapters.items()])

    def unmerged_shapes(self, adapters_alone: bool) -> dict[str, tuple[int, ...]]:
        frozen = {} if adapters_alone else self._weights
        return {name: tuple(each.shape) for name, each in {**frozen, **self._adapters}.items()}


def launched(folder: str, options: argparse.Namespace, how: str) -> VllmEngine:
    settings = [
        f"model.path={folder}", "model.device=cpu", "model.dtype=float32", "rollout.backend=vllm",
        "rollout.placement=disaggregated", f"rollout.launch.python={options.vllm_python}", f"rollout.publish={how}",
        f"lora.rank={options.rank}", f"lora.alpha={options.alpha}", f"data.max_prompt_tokens={PROMPT_TOKENS}",
        f"rollout.max_new_tokens={options.new_tokens}", "engine.prefix_cache=false",
    ]  # fmt: skip
    config = with_dtype(load_config("quickstart", settings).config)
    return VllmEngine.launch(BackendContext(config, folder, load_tokenizer(folder), Spans()), ["cpu"])


def generate(engine: VllmEngine, prompts: list[tuple[int, ...]], num_tokens: int) -> float:
    """Tokens per second."""
    sampling = SamplingParams(max_new_tokens=num_tokens, ignore_end=True)
    asked = [ModelRequest(f"r{number}", each, sampling, number) for number, each in enumerate(prompts)]

    async def answers() -> int:
        return sum(each.output_len for each in await asyncio.gather(*map(engine.agenerate, asked)))

    began = time.perf_counter()
    count = asyncio.run(answers())
    return count / (time.perf_counter() - began)


def main() -> None:
    parser = parser_of(__doc__)
    add_shape(parser)
    add_work(parser, new_tokens=64, runs=5)
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters (default 16)")
    parser.add_argument("--alpha", type=int, default=32, help="scale times rank (default 32)")
    parser.add_argument("--sequences", type=int, default=8, help="responses that are generated together (default 8)")
    parser.add_argument("--vllm-python", required=True, help="interpreter of an environment that has vLLM")
    options = parser.parse_args()
    policy = Policy(options.shape, options.rank, options.alpha)
    prompts = make_prompts(options.sequences, PROMPT_TOKENS, policy.model.config.vocab_size)
    rows: dict[str, list[dict[str, float]]] = {"full": [], "adapter": []}
    first: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        policy.model.save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        engines = {how: launched(folder, options, how) for how in rows}
        for engine in engines.values():
            stack.callback(engine.close)
        adapters: dict[str, Any] = {"full": None, "adapter": AdaptersAlone()}
        for version in range(1, options.runs + 2):
            policy.change()
            for how, engine in engines.items():
                sent = publish(policy, engine, version, adapters=adapters[how])
                rate = generate(engine, prompts, options.new_tokens)
                if version == 1:  # all weights in both cases, and the first tokens take longer
                    first[how] = float(sent.num_bytes)
                    continue
                row = {"seconds": sent.seconds, "pause_s": sent.pause_s or 0.0, "bytes": float(sent.num_bytes)}
                rows[how].append({**row, "tokens_per_s": rate})
                print(how, rows[how][-1], flush=True)
    medians = {
        how: {name: statistics.median(each[name] for each in its) for name in its[0]} for how, its in rows.items()
    }
    ratios = {name: medians["adapter"][name] / medians["full"][name] for name in medians["full"]}
    print("adapter / full:", ratios)
    write_record(
        options.out, CPU, shape=options.shape, rank=options.rank, first_update_bytes=first, medians=medians,
        ratios=ratios, rows=rows,
    )  # fmt: skip


if __name__ == "__main__":
    main()
