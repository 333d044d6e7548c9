"""Packed training on a CUDA device: the same numbers as elsewhere, and memory that comes and goes."""

from __future__ import annotations

import copy
import dataclasses
import sys

import pytest
import torch
from engine.engine_parts import make_model
from learner.test_engine import experience
from learner.test_packing import batch, plain_logprobs
from torch.distributed.tensor import DTensor

from headwater.algorithms.policy_losses import PolicyLoss
from headwater.algorithms.policy_losses.ppo import ppo
from headwater.config.schema import AlgorithmConfig, LearnerConfig, LoraConfig
from headwater.learner import packed_module
from headwater.learner.actor import Actor
from headwater.learner.engine import TrainEngine
from headwater.learner.export import merged_weights
from headwater.learner.fused_layers import use_fused_layers
from headwater.learner.lora import add_adapters
from headwater.learner.packed_module import PolicyModule
from headwater.learner.packing import pack_rows, read_rows
from headwater.models.load import load_model
from headwater.models.packed_attention import AttentionTables, BucketedAttention, VarlenAttention

CUDA = torch.device("cuda")


def actor(
    *,
    device: str = "cuda",
    dtype: torch.dtype = torch.float32,
    lora_rank: int = 0,
    kind: str = "qwen3",
    old_logprobs: str = "rollout",
    **training,
) -> Actor:
    stored = "bfloat16" if lora_rank and dtype == torch.bfloat16 else "float32"
    model = load_model(f"tiny:{kind}", dtype=stored, device=device, seed=0)
    module = PolicyModule(model, 1.0)
    if lora_rank:
        torch.manual_seed(0)
        add_adapters(model, LoraConfig(rank=lora_rank))
    config = LearnerConfig(learning_rate=1e-3, skip_zero_advantages=False, **training)
    algorithm = AlgorithmConfig(old_logprobs=old_logprobs)
    return Actor(TrainEngine(module, config, compute_dtype=dtype), ppo, algorithm, loss_width=8)


def weights(learner: Actor) -> torch.Tensor:
    return torch.cat([tensor.float().flatten().cpu() for _, tensor in merged_weights(learner.engine.module.model)])


@pytest.mark.parametrize("window", [0, 3])
def test_the_kernel_attends_as_the_plain_way_does(window):
    data = batch()
    [pack] = pack_rows(read_rows(data), data.batch["response_mask"].shape[1], 10_000)
    generator = torch.Generator(CUDA).manual_seed(0)
    shape = (len(pack.input_ids), 4, 32)
    leaves = [torch.randn(*shape, generator=generator, device=CUDA, dtype=torch.bfloat16) for _ in range(4)]
    query, key, value, upstream = leaves[0], leaves[1][:, :2], leaves[2][:, :2], leaves[3]
    results = []
    ways = VarlenAttention(AttentionTables.of(pack.segments, CUDA)), BucketedAttention(pack.segments, CUDA)
    for attend in ways:
        inputs = [each.clone().requires_grad_() for each in (query, key, value)]
        output = attend(*inputs, scale=0.2, window=window)
        (output * upstream).sum().backward()
        results.append([output, *(each.grad for each in inputs)])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("share_prompts", [True, False])
def test_float32_logprobs_are_those_of_single_rows(share_prompts):
    model = load_model("tiny:qwen3", dtype="float32", device="cuda", seed=0)
    data = batch()
    expected = plain_logprobs(data.to("cuda"), copy.deepcopy(model)).cpu()
    module = PolicyModule(model, 1.0)
    result = torch.zeros_like(data.batch["response_mask"])
    for pack in pack_rows(read_rows(data), data.batch["response_mask"].shape[1], 10_000, share_prompts=share_prompts):
        result[pack.rows] = pack.padded(module(pack.to(CUDA))["logprobs"].cpu())
    torch.testing.assert_close(result, expected, atol=2e-3, rtol=1e-3)


def test_a_step_on_the_gpu_is_the_step_on_the_cpu():
    gpu, cpu = actor(), actor(device="cpu")
    data = experience(1)
    for _ in range(2):
        on_gpu, on_cpu = gpu.update(data), cpu.update(data)
        for key in ("loss", "grad_norm", "entropy"):
            assert on_gpu[key] == pytest.approx(on_cpu[key], rel=1e-2, abs=1e-4)
    assert (weights(gpu) - weights(cpu)).abs().mean() < 1e-4


def gradient(learner: Actor, data) -> torch.Tensor:
    """Of one update, before clipping."""
    taken = []

    def keep() -> torch.Tensor:
        parameters = [each for each in learner.engine.module.parameters() if each.requires_grad]
        gradients = [parameter.grad for parameter in parameters]
        whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients]
        taken.append(torch.cat([each.float().flatten().cpu() for each in whole]))
        learner.engine._optimizer.clear()
        return torch.zeros((), device=parameters[0].device)

    learner.engine._optimizer.clip = keep
    learner.update(data.with_columns(tensors={"old_logprobs": learner.engine.compute(data)["logprobs"]}))
    return taken[0]


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize(
    "settings",
    [{}, {"fused_layers": False}, {"compile": True}, {"checkpoint_activations": True}, {"lora_rank": 4}],
    ids=lambda settings: "-".join(settings) or "fused",
)
def test_the_bfloat16_gradient_points_where_the_float32_one_does(share_prompts, settings):
    if settings != {"fused_layers": False}:
        pytest.importorskip("liger_kernel")
    data = batch(num_groups=8)
    advantages = torch.randn(len(data), 1, generator=torch.Generator().manual_seed(0)) * data.batch["response_mask"]
    data = data.with_columns(tensors={"advantages": advantages})
    # Adapters start at random, on each kind of device differently.
    plain = actor(fused_layers=False, **settings) if "lora_rank" in settings else actor(device="cpu")
    exact = gradient(plain, data)
    coarse = gradient(actor(dtype=torch.bfloat16, share_prompts=share_prompts, **settings), data)
    assert torch.nn.functional.cosine_similarity(coarse, exact, dim=0) > 0.995
    assert coarse.norm() == pytest.approx(exact.norm(), rel=0.03)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_joined_projections_and_kept_logits_have_the_gradient_of_the_plain_ways(kind):
    data = batch(num_groups=8)
    advantages = torch.randn(len(data), 1, generator=torch.Generator().manual_seed(0)) * data.batch["response_mask"]
    data = data.with_columns(tensors={"advantages": advantages})
    plain = {"join_projections": False, "kept_logits_gib": 0.0, "keep_logits_if_free": False, "cuda_graphs": "off"}
    exact = gradient(actor(device="cpu", kind=kind), data)
    found = {}
    for name, changed in (
        ("plain", {}),
        ("joined", {"join_projections": True}),
        ("kept", {"keep_logits_if_free": True}),
    ):
        found[name] = gradient(actor(dtype=torch.bfloat16, kind=kind, **{**plain, **changed}), data)
        assert torch.nn.functional.cosine_similarity(found[name], exact, dim=0) > 0.995, name
        assert found[name].norm() == pytest.approx(exact.norm(), rel=0.03), name
    for name in ("joined", "kept"):
        assert torch.nn.functional.cosine_similarity(found[name], found["plain"], dim=0) > 0.998, name


def test_the_logit_kernels_compute_what_the_compiled_functions_do(monkeypatch):
    generator = torch.Generator(CUDA).manual_seed(0)
    hidden = torch.randn(300, 64, generator=generator, device=CUDA, dtype=torch.bfloat16)
    weight = torch.randn(151936, 64, generator=generator, device=CUDA, dtype=torch.bfloat16) * 0.3
    targets = torch.randint(0, 151936, (300,), generator=generator, device=CUDA)
    monkeypatch.setitem(packed_module._CHUNK_ELEMENTS, "cuda", 151936 * 128)
    results = []
    for uses_kernels in (True, False):
        monkeypatch.setattr(packed_module, "USES_LOGIT_KERNELS", uses_kernels)
        leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
        made = packed_module.token_logprobs(*leaves, None, targets, 0.8)
        (made.logprobs.sum() + 0.1 * made.entropy.sum()).backward()
        results.append([*(each.detach() for each in made), *(each.grad for each in leaves)])
    for place, (ours, plain) in enumerate(zip(*results, strict=True)):
        tolerance = 1e-4 if place < 3 else 0.02
        torch.testing.assert_close(ours, plain, atol=tolerance * float(plain.abs().max()), rtol=tolerance)


@pytest.mark.parametrize("kind", ["llama", "llama3", "qwen2", "qwen3", "mistral", "gemma", "gemma3_text"])
def test_fused_layers_compute_the_same(kind):
    pytest.importorskip("liger_kernel")
    plain = make_model(kind).to(CUDA)
    fused = copy.deepcopy(plain)
    assert use_fused_layers(fused)
    data = batch()
    [pack] = pack_rows(read_rows(data), data.batch["response_mask"].shape[1], 10_000)
    results = []
    for model in (fused, plain):
        logprobs = PolicyModule(model, 1.0)(pack.to(CUDA))["logprobs"]
        logprobs.sum().backward()
        results.append([logprobs, *(each.grad for each in model.parameters() if each.grad is not None)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-3 * float(expected.detach().abs().max()), rtol=1e-2)


def test_fusing_one_model_leaves_others_alone(monkeypatch):
    pytest.importorskip("liger_kernel")
    fused, other = (load_model("tiny:llama", dtype="float32", device="cuda", seed=0) for _ in range(2))
    assert use_fused_layers(fused)
    later = load_model("tiny:llama", dtype="float32", device="cpu", seed=0)
    assert type(later.model.norm).__name__ == "LlamaRMSNorm"
    rotary = sys.modules[type(fused.model).__module__].apply_rotary_pos_emb
    calls = []
    monkeypatch.setattr(
        sys.modules[type(fused.model).__module__],
        "apply_rotary_pos_emb",
        dataclasses.replace(rotary, fused=lambda *each: calls.append("fused") or rotary.fused(*each)),
    )
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.isfinite(later(tokens).logits).all()
    assert torch.isfinite(other(tokens.to(CUDA)).logits).all()
    assert not calls
    assert torch.isfinite(fused(tokens.to(CUDA)).logits).all()
    assert len(calls) == fused.config.num_hidden_layers


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"checkpoint_activations": True},
        {"compile": True},
        {"offload_optimizer": True},
        {"lora_rank": 4},
        {"lora_rank": 4, "offload_optimizer": True, "checkpoint_activations": True},
    ],
    ids=str,
)
def test_bfloat16_training_learns_in_every_setting(settings):
    learner = actor(dtype=torch.bfloat16, **settings)
    data = experience(2)
    data = data.with_columns(tensors={"advantages": data.batch["response_mask"].clone()})
    before = learner.engine.compute(data)["logprobs"].sum()
    for _ in range(5):
        learner.update(data.with_columns(tensors={"old_logprobs": learner.engine.compute(data)["logprobs"]}))
    assert learner.engine.compute(data)["logprobs"].sum() > before


def test_a_streamed_optimizer_takes_the_same_steps():
    plain, streamed = actor(dtype=torch.bfloat16), actor(dtype=torch.bfloat16, offload_optimizer=True)
    for seed in (1, 2, 3):
        plain.update(experience(seed))
        streamed.update(experience(seed))
    torch.testing.assert_close(weights(streamed), weights(plain), atol=1e-5, rtol=1e-4)
    states = [
        value
        for optimizer in streamed.engine._optimizer.optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if value.ndim
    ]
    assert states
    assert all(getattr(each, "_local_tensor", each).device.type == "cpu" for each in states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offload_gives_memory_back_and_onload_goes_on(dtype):
    learner, twin = actor(dtype=dtype), actor(dtype=dtype)
    for each in (learner, twin):
        each.update(experience(1))
    before = torch.cuda.memory_allocated()
    size = sum(parameter.numel() * 4 for parameter in learner.engine.module.parameters())
    learner.engine.offload()
    assert before - torch.cuda.memory_allocated() > 2.5 * size  # the weights and AdamW's two averages
    learner.engine.onload()
    for each in (learner, twin):
        each.update(experience(2))
    torch.testing.assert_close(weights(learner), weights(twin), atol=2e-3, rtol=1e-3)
    assert (weights(learner) - weights(twin)).abs().mean() < 1e-4


def test_the_averages_of_a_sibling_leave_with_the_learner_and_come_back():
    learner = actor().engine
    sibling = learner.sibling(learner.config)

    def likelihood(outputs, batch):
        return PolicyLoss(-outputs["logprobs"])

    sibling.train_step(experience(1), likelihood)
    before = torch.cuda.memory_allocated()
    size = sum(parameter.numel() * 4 for parameter in learner.module.parameters())
    learner.offload()
    assert before - torch.cuda.memory_allocated() > 2.5 * size  # the weights and AdamW's two averages
    learner.onload()
    assert sibling.train_step(experience(2), likelihood)["skipped_steps"] == 0


def test_checkpoints_go_on_from_where_they_were_saved(tmp_path):
    learner = actor(dtype=torch.bfloat16, offload_optimizer=True)
    learner.update(experience(1))
    learner.engine.save(tmp_path)
    saved = weights(learner)
    learner.update(experience(2))
    again = actor(dtype=torch.bfloat16, offload_optimizer=True)
    again.engine.load(tmp_path)
    assert torch.equal(weights(again), saved)
    again.update(experience(2))
    assert (weights(again) - weights(learner)).abs().mean() < 1e-4
