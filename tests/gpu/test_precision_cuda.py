"""Number types on a CUDA device: what is computed in float32, the gap between engine and learner, and float16 runs."""

from __future__ import annotations

import copy
import math

import pytest
import tiny
import torch
from engine.engine_parts import build, running
from learner.test_engine import experience
from learner.test_packing import batch
from transformers import LlamaConfig, Qwen2Config

from headwater.algorithms.diagnostics import gap_metrics, gap_sums
from headwater.algorithms.policy_losses import PolicyLoss
from headwater.cli.main import main
from headwater.config.schema import LearnerConfig
from headwater.core.records import NOT_SAMPLED, Trajectory
from headwater.core.requests import ModelRequest, SamplingParams
from headwater.engine.kernels.linear import invariant_linear, split_linear
from headwater.engine.kernels.norm import add_rms_norm, rms_norm, sum_add_rms_norm
from headwater.learner.engine import TrainEngine
from headwater.learner.norm_kernels import add_and_norm
from headwater.learner.packed_module import PolicyModule, token_logprobs
from headwater.learner.packing import pack_rows, read_rows
from headwater.learner.wide_layers import widen_layers
from headwater.models import precision
from headwater.models.precision import wide_linear
from headwater.observe.run_directory import RunDirectory
from headwater.rollout.group import pad_trajectories

CUDA = torch.device("cuda")
NARROW = [torch.bfloat16, torch.float16]
EXACT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half a unit in the last place, relative to the number."""


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator(CUDA).manual_seed(seed), device=CUDA).to(dtype)


def norm(total: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = total.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


# Kernels


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("hidden", [576, 1536])
def test_the_engines_norms_of_a_wide_residual_are_rounded_once(hidden, dtype):
    parts, residual = randn(3, 65, hidden), randn(65, hidden, seed=1) * 30
    weight, bias = randn(hidden, dtype=dtype, seed=2), randn(hidden, dtype=dtype, seed=3)
    total = residual.clone()
    y = sum_add_rms_norm(parts, bias, total, weight, 1e-6)
    expected = residual.double() + parts.double().sum(0) + bias.double()
    torch.testing.assert_close(total.double(), expected, atol=1e-5, rtol=1e-6)
    assert y.dtype == dtype
    exact = norm(total, weight, 1e-6)
    assert ((y.double() - exact).abs() <= exact.abs() * EXACT[dtype] * 1.01 + 1e-7).all()
    assert torch.equal(rms_norm(total, weight, 1e-6), y)
    again = residual.clone()
    product = parts.sum(0) + bias
    torch.testing.assert_close(add_rms_norm(product, again, weight, 1e-6), y, atol=0, rtol=2 * EXACT[dtype])
    assert again.dtype == torch.float32


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("has_product", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 576), (1, 1000, 1536)])
def test_the_learners_sum_and_norm_have_the_gradients_of_torch(shape, has_product, dtype):
    residual, weight = randn(*shape) * 3, 1 + 0.3 * randn(shape[-1], seed=1)
    product = randn(*shape, dtype=dtype, seed=2) if has_product else None

    def plain(residual, product, weight, eps):
        total = residual if product is None else residual + product
        normalised = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
        return total, (weight.float() * normalised).to(weight.dtype)

    results = []
    for way in (add_and_norm, plain):
        leaves = [residual.clone(), None if product is None else product.clone(), weight.to(dtype)]
        for each in leaves:
            if each is not None:
                each.requires_grad_()
        total, normed = way(*leaves, 1e-5)
        ((normed.float() * randn(*shape, seed=3)).sum() + (total * randn(*shape, seed=4)).sum()).backward()
        results.append([total, normed, *(each.grad for each in leaves if each is not None)])
    for ours, expected in zip(*results, strict=True):
        assert ours.dtype == expected.dtype
        tolerance = 3 * EXACT[dtype]
        torch.testing.assert_close(ours, expected, atol=tolerance * float(expected.abs().max()), rtol=tolerance)


@pytest.mark.parametrize("dtype", NARROW)
def test_products_with_float32_results_are_not_rounded(dtype):
    x, weight, bias = (
        randn(77, 576, dtype=dtype),
        randn(1000, 576, dtype=dtype, seed=1),
        randn(1000, dtype=dtype, seed=2),
    )
    expected = x.double() @ weight.double().T + bias.double()
    for product in (
        wide_linear(x, weight, bias),
        invariant_linear(x, weight, bias, torch.float32),
        split_linear(x, weight, 3).sum(0) + bias,
    ):
        assert product.dtype == torch.float32
        assert (product - expected).abs().max() < 1e-3
    assert ((x @ weight.T + bias) - expected).abs().max() > 1e-3
    one = invariant_linear(x[:1], weight, bias, torch.float32)
    assert torch.equal(one, invariant_linear(x, weight, bias, torch.float32)[:1])


@pytest.mark.parametrize("dtype", NARROW)
def test_logprobs_of_narrow_states_are_those_of_exact_logits(dtype):
    hidden, weight = randn(50, 64, dtype=dtype), randn(1000, 64, dtype=dtype, seed=1)
    targets = torch.arange(50, device=CUDA) * 7
    hidden.requires_grad_()
    weight.requires_grad_()
    ours = token_logprobs(hidden, weight, None, targets, 0.7)
    exact = ((hidden.double() @ weight.double().T) / 0.7).log_softmax(-1)
    expected = exact.gather(-1, targets[:, None])[:, 0]
    assert (ours.logprobs - expected).abs().max() < 1e-3  # logits of 30 have steps of 0.125 in bfloat16
    (gradient,) = torch.autograd.grad(ours.logprobs.sum(), hidden, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected.sum(), hidden)
    torch.testing.assert_close(gradient, wanted, atol=8 * EXACT[dtype] * float(wanted.abs().max()), rtol=0.1)


# Layers


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("uses_kernels", [True, False])
def test_wide_layers_are_nearer_to_float32(uses_kernels, dtype, monkeypatch):
    exact = build(LLAMA).to(CUDA)
    exact.model.embed_tokens.weight.data *= 30  # a sum that is large compared with what layers add
    for parameter in exact.parameters():
        parameter.data = parameter.data.to(dtype).float()
    wide, narrow = (copy.deepcopy(exact).to(dtype) for _ in range(2))
    for model in (wide, narrow):  # the frequencies stay float32, as from_pretrained keeps them
        model.model.rotary_emb.inv_freq = exact.model.rotary_emb.inv_freq.clone()
    assert widen_layers(wide, dtype, uses_kernels=uses_kernels)
    data = batch(num_groups=8)
    [pack] = pack_rows(read_rows(data), data.batch["response_mask"].shape[1], 10_000)
    pack = pack.to(CUDA)
    with torch.no_grad():
        expected = PolicyModule(exact, 1.0)(pack)["logprobs"]
        ours = PolicyModule(wide, 1.0)(pack)["logprobs"]
        monkeypatch.setattr(precision, "WIDE", set())
        theirs = PolicyModule(narrow, 1.0)(pack)["logprobs"]
    assert (ours - expected).square().mean() < (theirs - expected).square().mean() / 1.5


# Engine and learner

LLAMA = LlamaConfig(
    vocab_size=512, hidden_size=192, intermediate_size=512, num_hidden_layers=8, num_attention_heads=6,
    num_key_value_heads=3, max_position_embeddings=2048, initializer_range=0.08,
)  # fmt: skip
QWEN = Qwen2Config(
    vocab_size=512, hidden_size=192, intermediate_size=512, num_hidden_layers=8, num_attention_heads=6,
    num_key_value_heads=3, max_position_embeddings=2048, initializer_range=0.08,
)  # fmt: skip


def gap(config, dtype: torch.dtype, *, deterministic: bool = False) -> dict[str, float]:
    """Engine against learner with the same weights."""
    master = build(config).to(CUDA)
    for parameter in master.parameters():
        parameter.data = parameter.data.to(dtype).float()
    model = copy.deepcopy(master)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, 500, (64, 24), generator=generator).tolist()
    sampling = SamplingParams(max_new_tokens=64, ignore_end=True)
    requests = [ModelRequest(str(row), tuple(prompt), sampling, row) for row, prompt in enumerate(prompts)]
    with running(model, kv_cache_gib=0.5, deterministic=deterministic) as engine:
        responses = engine.generate(requests)
    trajectories = [
        Trajectory(
            uid=str(row),
            sample=0,
            tokens=each.input_tokens + each.output_tokens,
            prompt_length=24,
            loss_mask=(0,) * 24 + (1,) * 64,
            logprobs=(0.0,) * 24 + each.output_logprobs,
            versions=(NOT_SAMPLED,) * 24 + (0,) * 64,
            reward=0.0,
            stop_reason="length",
        )
        for row, each in enumerate(responses)
    ]
    data = pad_trajectories(trajectories, pad_token_id=0)
    learner = TrainEngine(PolicyModule(master, 1.0), LearnerConfig(), compute_dtype=dtype)
    logprobs = learner.compute(data)["logprobs"]
    return gap_metrics(*gap_sums(logprobs, data.batch["rollout_logprobs"], data.batch["response_mask"]))


@pytest.mark.parametrize("config", [LLAMA, QWEN], ids=["llama", "qwen2"])
def test_the_gap_between_engine_and_learner_shrinks_with_wide_parts_and_with_float16(config, monkeypatch):
    wide, half = gap(config, torch.bfloat16), gap(config, torch.float16)
    exact = gap(config, torch.float32)
    monkeypatch.setattr(precision, "WIDE", set())
    narrow = gap(config, torch.bfloat16)
    assert wide["k3_kl"] < narrow["k3_kl"] / 2
    assert half["k3_kl"] < wide["k3_kl"] / 10
    assert exact["k3_kl"] < half["k3_kl"]
    assert exact["logprob_abs_mean"] < 1e-4


@pytest.mark.parametrize("dtype", NARROW)
def test_the_deterministic_engine_is_as_near_to_the_learner(dtype):
    assert gap(LLAMA, dtype, deterministic=True)["k3_kl"] < 3 * gap(LLAMA, dtype)["k3_kl"]


# float16


def likelihood(outputs, batch):
    return PolicyLoss(-outputs["logprobs"])


@pytest.mark.parametrize("settings", [{}, {"checkpoint_activations": True}, {"fused_layers": False}], ids=str)
def test_float16_training_learns_and_resumes_with_its_scale(tmp_path, settings):
    def engine() -> TrainEngine:
        config = LearnerConfig(learning_rate=1e-3, loss_scale_growth_steps=3, **settings)
        return TrainEngine(PolicyModule(build(LLAMA).to(CUDA), 1.0), config, compute_dtype=torch.float16)

    one, data = engine(), experience(1)
    losses = [one.train_step(data, likelihood) for _ in range(4)]
    assert all(math.isfinite(each["loss"]) for each in losses)
    assert losses[-1]["loss"] < losses[0]["loss"]
    one.save(tmp_path)
    other = engine()
    other.load(tmp_path)
    assert other.optimizer.loss_scale.state() == one.optimizer.loss_scale.state()
    assert other.train_step(data, likelihood)["loss"] == pytest.approx(one.train_step(data, likelihood)["loss"])


def test_a_float16_overflow_is_skipped_and_training_goes_on():
    config = LearnerConfig(learning_rate=1e-3, loss_scale=2.0**24, max_bad_steps=1)
    engine = TrainEngine(PolicyModule(build(LLAMA).to(CUDA), 1.0), config, compute_dtype=torch.float16)

    def steep(outputs, batch):
        return PolicyLoss(-outputs["logprobs"] * 100)

    steps = [engine.train_step(experience(1), steep) for _ in range(16)]
    assert steps[0]["skipped_steps"] == 1
    assert steps[-1]["skipped_steps"] == 0
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert engine.optimizer.num_steps == sum(not each["skipped_steps"] for each in steps)


def test_a_float16_run_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tiny.ROOT)
    settings = ["quickstart", f"run.root={tmp_path}", "trainer.total_steps=40", "model.dtype=float16"]
    assert main(["train", *settings]) == 0
    records = RunDirectory.open(tmp_path / "quickstart").read_metrics()
    evaluations = [each for each in records if each["kind"] == "eval"]
    assert evaluations[-1]["reward/mean"] > 0.7, evaluations
    steps = [each for each in records if "actor/loss_scale" in each]
    assert steps
    assert all(each["rollout_gap/k3_kl"] < 1e-4 for each in steps if "rollout_gap/k3_kl" in each)
