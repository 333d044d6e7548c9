"""The same code on a CUDA device."""

from __future__ import annotations

import asyncio

import pytest
import tiny
import torch

from headwater.algorithms.policy_losses import PolicyLoss
from headwater.backends.hf import HfEngine
from headwater.cli.main import main
from headwater.config.schema import LearnerConfig
from headwater.core.protocols import WeightUpdate
from headwater.core.records import NOT_SAMPLED, Trajectory
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams
from headwater.engine.sampler import SamplingBatch, sample, uniforms
from headwater.learner.engine import TrainEngine
from headwater.learner.export import merged_weights
from headwater.learner.packed_module import PolicyModule
from headwater.models.load import load_model, resolve_dtype
from headwater.observe.run_directory import RunDirectory
from headwater.observe.spans import Spans
from headwater.rollout.group import pad_trajectories
from headwater.weights.memory import Receiver


def test_uniforms_are_the_same_bits_as_on_the_cpu():
    keys = torch.randint(-(2**62), 2**62, (10_000,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(10_000)
    assert torch.equal(uniforms(keys, positions), uniforms(keys.cuda(), positions.cuda()).cpu())


def test_tokens_are_drawn_as_on_the_cpu():
    logits = torch.randn(500, 300, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(1, temperature=0.8, top_p=0.95 if row % 2 else 1.0) for row in range(500)]
    keys, positions = list(range(500)), torch.arange(500)
    cpu, _ = sample(logits, SamplingBatch.build(params, keys, torch.device("cpu")), positions)
    cuda, _ = sample(logits.cuda(), SamplingBatch.build(params, keys, torch.device("cuda")), positions.cuda())
    assert (cpu != cuda.cpu()).sum() <= 1  # a draw on the very border between two tokens may round the other way


def likelihood(outputs, batch):
    return PolicyLoss(-outputs["logprobs"])


def of_response(uid: str, response: ModelResponse) -> Trajectory:
    num_prompt, num_output = len(response.input_tokens), len(response.output_tokens)
    return Trajectory(
        uid=uid,
        sample=0,
        tokens=response.input_tokens + response.output_tokens,
        prompt_length=num_prompt,
        loss_mask=(0,) * num_prompt + (1,) * num_output,
        logprobs=(0.0,) * num_prompt + response.output_logprobs,
        versions=(NOT_SAMPLED,) * num_prompt + response.output_versions,
        reward=1.0,
        stop_reason=response.stop_reason,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-3), ("bfloat16", 0.3)])
def test_engine_and_trainer_agree(dtype, tolerance):
    model = load_model("tiny:qwen3", dtype=dtype, device="auto", seed=0)
    assert model.device.type == "cuda"
    engine = HfEngine(model, tiny.tokenizer(), max_batch_sequences=64, spans=Spans())
    prompts = [tiny.prompt(f"{number}+1=", uid=str(number)) for number in range(16)]
    requests = [ModelRequest(each.uid, each.tokens, SamplingParams(8), row) for row, each in enumerate(prompts)]

    async def generate():
        return await asyncio.gather(*(engine.agenerate(request) for request in requests))

    responses = asyncio.run(generate())
    engine.close()
    pairs = zip(prompts, responses, strict=True)
    trajectories = [of_response(prompt.uid, response) for prompt, response in pairs]
    data = pad_trajectories(trajectories, tiny.tokenizer().pad_token_id)
    learner = load_model("tiny:qwen3", dtype="float32", device="auto", seed=0)
    update = WeightUpdate.of(0, model.named_parameters())
    Receiver(learner, update.shapes).take_all(update)
    trainer = TrainEngine(
        PolicyModule(learner, 1.0), LearnerConfig(learning_rate=1e-3), compute_dtype=resolve_dtype(dtype)
    )
    gap = (trainer.compute(data)["logprobs"] - data.batch["rollout_logprobs"]).abs() * data.batch["response_mask"]
    assert gap.max() < tolerance
    before = trainer.train_step(data, likelihood)["loss"]
    after = trainer.train_step(data, likelihood)["loss"]
    assert after < before


def test_the_quickstart_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tiny.ROOT)
    assert main(["train", "quickstart", f"run.root={tmp_path}", "trainer.total_steps=40"]) == 0
    evaluations = [each for each in RunDirectory.open(tmp_path / "quickstart").read_metrics() if each["kind"] == "eval"]
    assert evaluations[0]["reward/mean"] < 0.3
    assert evaluations[-1]["reward/mean"] > 0.7, evaluations


def test_training_computes_in_bfloat16_but_keeps_float32_weights():
    """In bfloat16 weights an update of this size would be rounded away."""
    model = load_model("tiny:qwen3", dtype="float32", device="cuda", seed=0)
    config = LearnerConfig(learning_rate=1e-6)
    trainer = TrainEngine(PolicyModule(model, 1.0), config, compute_dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in merged_weights(trainer.module.model)}
    data = pad_trajectories([tiny.trajectory(seed) for seed in range(8)], pad_token_id=0)
    trainer.train_step(data, likelihood)
    changed = [(tensor != before[name]).float().mean() for name, tensor in merged_weights(trainer.module.model)]
    assert all(tensor.dtype == torch.float32 for _, tensor in merged_weights(trainer.module.model))
    assert torch.stack(changed).mean() > 0.8


def test_a_bfloat16_run_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tiny.ROOT)
    settings = ["quickstart", f"run.root={tmp_path}", "trainer.total_steps=40", "model.dtype=bfloat16"]
    assert main(["train", *settings]) == 0
    evaluations = [each for each in RunDirectory.open(tmp_path / "quickstart").read_metrics() if each["kind"] == "eval"]
    assert evaluations[-1]["reward/mean"] > 0.7, evaluations
