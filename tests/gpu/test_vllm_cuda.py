"""A real vLLM server on the GPU, in bfloat16: log-probs after every update, interrupted responses, sleep, training.

vLLM must be installed in this environment, or in the one of ``HEADWATER_VLLM_PYTHON``.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "integration"))
from command import metrics, train_here

from headwater.backends import SERVER_KEY, BackendContext
from headwater.backends.vllm.engine import VllmEngine
from headwater.config.load import load_config
from headwater.core.protocols import WeightUpdate
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams
from headwater.models.checksum import checksum
from headwater.models.device import with_dtype
from headwater.models.load import load_model, load_tokenizer
from headwater.observe.spans import Spans
from headwater.weights import shared_memory

PYTHON = os.environ.get("HEADWATER_VLLM_PYTHON", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON and importlib.util.find_spec("vllm") is None,
        reason="NO REAL VLLM: install vllm in this environment, or set HEADWATER_VLLM_PYTHON",
    ),
    pytest.mark.xdist_group("vllm"),
]

MODEL = "tiny:qwen3"
LIMIT_S = 900.0
NOISE = 0.06
"""Mean difference of bfloat16 log-probs between vLLM and transformers; between two models it is about 1."""


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    settings = [
        *("rollout.backend=vllm", "rollout.placement=disaggregated", f"model.path={MODEL}", "model.dtype=bfloat16"),
        *("data.max_prompt_tokens=64", "rollout.max_new_tokens=448", "engine.memory_fraction=0.2"),
        *([f"rollout.launch.python={PYTHON}"] if PYTHON else []),
        "rollout.launch.args=[--enable-sleep-mode]",
    ]
    config = with_dtype(load_config("quickstart", settings).config)
    engine = VllmEngine.launch(BackendContext(config, MODEL, load_tokenizer(MODEL), Spans()), ["cuda:0"])
    yield engine
    engine.close()


def weights(seed: int) -> torch.nn.Module:
    return load_model(MODEL, dtype="bfloat16", device="cuda", seed=seed)


def publish(engine: VllmEngine, seed: int, version: int, mode=None) -> None:
    engine.update_weights(WeightUpdate.of(version, weights(seed).named_parameters()), mode).result(LIMIT_S)


async def ask(engine: VllmEngine, count: int, num_tokens: int) -> list[ModelResponse]:
    sampling = SamplingParams(num_tokens, ignore_end=True)
    asked = [ModelRequest(f"request-{each}", (5, 6, 7, 10 + each), sampling, rng_key=each) for each in range(count)]
    return list(await asyncio.gather(*map(engine.agenerate, asked)))


@torch.no_grad()
def error(seed: int, response: ModelResponse) -> torch.Tensor:
    """How far each log-prob is from what the model of ``seed`` computes."""
    tokens = torch.tensor([[*response.input_tokens, *response.output_tokens]], device="cuda")
    start = len(response.input_tokens)
    own = weights(seed)(tokens).logits[0, start - 1 : -1].float().log_softmax(-1)
    return (own.gather(1, tokens[0, start:, None])[:, 0].cpu() - torch.tensor(response.output_logprobs)).abs()


@torch.no_grad()
def continued_error(old: int, new: int, num_old: int, response: ModelResponse) -> torch.Tensor:
    """The same if the weights change after ``num_old`` tokens, whose keys and values stay those of the old weights."""
    tokens = torch.tensor([[*response.input_tokens, *response.output_tokens]], device="cuda")
    start = len(response.input_tokens)
    num_read = start + num_old - 1  # the last old token was sampled, but not read yet
    before = weights(old)(tokens[:, :num_read], use_cache=True)
    after = weights(new)(tokens[:, num_read:], past_key_values=before.past_key_values)
    logits = torch.cat([before.logits, after.logits], dim=1)[0, start - 1 : -1]
    own = logits.float().log_softmax(-1).gather(1, tokens[0, start:, None])[:, 0]
    return (own.cpu() - torch.tensor(response.output_logprobs)).abs()


def test_logprobs_after_every_update_are_those_of_the_new_weights(engine: VllmEngine) -> None:
    assert engine.capabilities.dtype == "bfloat16"
    for version in (1, 2, 3):
        publish(engine, version, version)
        for response in asyncio.run(ask(engine, 8, 64)):
            assert set(response.output_versions) == {version}
            assert float(error(version, response).mean()) < NOISE
            assert float(error(version - 1, response).mean()) > 5 * NOISE


def test_every_transfer_brings_the_weights_that_the_learner_has(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with slots that are far smaller than the model. This test has not run on a GPU yet."""
    monkeypatch.setenv(SERVER_KEY, engine.api_key)
    monkeypatch.setattr(shared_memory, "_SLOT_BYTES", 2**18)
    settings = [
        *("rollout.backend=vllm", f"model.path={MODEL}", "model.dtype=bfloat16", f"rollout.servers=[{engine.url}]"),
        *("data.max_prompt_tokens=64", "rollout.max_new_tokens=448"),
    ]
    for transfer in ("shared_memory", "collective", "file"):
        config = with_dtype(load_config("quickstart", [*settings, f"rollout.weight_transfer={transfer}"]).config)
        owner = VllmEngine.connect(engine.url, BackendContext(config, MODEL, load_tokenizer(MODEL), Spans()))
        try:
            for version in (1, 2):
                publish(owner, version, version)
                if transfer != "file":
                    assert owner.weights_checksum() == checksum(weights(version).named_parameters())
                for response in asyncio.run(ask(owner, 8, 64)):
                    assert float(error(version, response).mean()) < NOISE, transfer
                    assert float(error(version - 1, response).mean()) > 5 * NOISE, transfer
        finally:
            owner.close()


def test_responses_continue_under_new_weights_without_losing_a_token(engine: VllmEngine) -> None:
    for mode in engine.capabilities.update_modes:
        old = engine.get_version() + 1
        publish(engine, old, old)
        answers: list[ModelResponse] = []
        thread = threading.Thread(target=lambda: answers.extend(asyncio.run(ask(engine, 16, 440))))  # noqa: B023
        thread.start()
        while engine.status().num_running < 16:
            time.sleep(0.005)
        publish(engine, old + 1, old + 1, mode)
        thread.join(LIMIT_S)
        assert len(answers) == 16
        for response in answers:
            versions = torch.tensor(response.output_versions)
            assert (response.output_len, response.stop_reason) == (440, "length")
            assert list(response.output_versions) == sorted(response.output_versions)
            if mode != "in_flight":
                for version in set(response.output_versions):
                    assert float(error(version, response)[versions == version].mean()) < NOISE
        if mode == "in_flight":
            assert_labelled(answers, old)
        spans = sum(len(set(response.output_versions)) == 2 for response in answers)
        assert spans == 0 if mode == "drain" else spans > 0


def assert_labelled(answers: list[ModelResponse], old: int) -> None:
    """The new tokens, which attend to keys and values of the old weights, begin exactly where the labels say so."""
    spanning = [each for each in answers if 0 < each.output_versions.count(old) < each.output_len]
    last_old, first_new = [], []
    for response in spanning:
        num_old = response.output_versions.count(old)
        assert float(continued_error(old, old + 1, num_old, response).mean()) < NOISE
        old_errors = error(old, response)
        last_old.append(old_errors[num_old - 1])
        first_new.append(old_errors[num_old])
    assert float(torch.stack(last_old).mean()) < 2 * NOISE
    assert float(torch.stack(first_new).mean()) > 5 * NOISE


def test_memory_is_released_and_comes_back(engine: VllmEngine) -> None:
    version = engine.get_version()
    assert engine.capabilities.memory_tags == ("kv_cache", "weights")
    (before,) = asyncio.run(ask(engine, 1, 32))
    for tags in (("kv_cache", "weights"), ("kv_cache",)):
        released = 0
        for _ in range(5):  # other processes of the device may take memory at the same moment
            free, _ = torch.cuda.mem_get_info()
            engine.sleep(tags)
            asleep, _ = torch.cuda.mem_get_info()
            assert engine.status().is_asleep
            engine.wake(tags)
            released = max(released, asleep - free)
            if released > 2**30:
                break
        assert released > 2**30
        (after,) = asyncio.run(ask(engine, 1, 32))
        assert float(error(version, after).mean()) < NOISE
    assert float(error(version, before).mean()) < NOISE


def test_a_run_learns_through_the_server(engine: VllmEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SERVER_KEY, engine.api_key)
    settings = [
        *("rollout.backend=vllm", f"rollout.servers=[{engine.url}]", "model.dtype=bfloat16"),
        *("trainer.total_steps=25", "eval.before=false", "algorithm.old_logprobs=recompute"),
        *(f"run.root={tmp_path}", "run.name=learns"),
    ]
    train_here("quickstart", *settings)
    records = metrics(tmp_path / "learns", "train")
    rewards = [record["reward/mean"] for record in records]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15, rewards
    assert max(record["rollout_logprob_gap"] for record in records) < 2 * NOISE, "every update has reached the server"
