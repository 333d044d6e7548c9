"""Training a vision model on a CUDA device: the numbers of a CPU, the kernel of the tower, and offloading."""

from __future__ import annotations

import copy
import gc
import types

import pictures
import pytest
import torch
from learner.test_vision_learner import rows
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP

from headwater.algorithms.policy_losses.ppo import ppo
from headwater.config.schema import AlgorithmConfig, LearnerConfig
from headwater.core.data_proto import DataProto
from headwater.learner.actor import Actor
from headwater.learner.engine import TrainEngine
from headwater.learner.export import merged_weights
from headwater.learner.freeze import freeze_parts, vision_modules
from headwater.learner.fused_layers import fuse_gated_layers, use_fused_layers
from headwater.learner.held import averages_of
from headwater.learner.joined_layers import join_projections, joined_weights
from headwater.learner.packed_module import PolicyModule
from headwater.learner.packing import pack_rows, read_rows
from headwater.learner.wide_layers import widen_layers
from headwater.models.load import load_model
from headwater.models.vision import VisionTower
from headwater.models.vision.attention import NAME
from headwater.rollout.group import pad_trajectories

CUDA = torch.device("cuda")
NAMES = ["tiny:qwen2_5_vl", "tiny:qwen3_vl", "tiny:smolvlm", "tiny:idefics3"]


def actor(name: str, device: str, dtype: torch.dtype = torch.float32, **settings) -> Actor:
    model = load_model(name, dtype="float32", device=device, seed=0)
    freeze_parts(model, settings.get("freeze", ()))
    config = LearnerConfig(learning_rate=1e-3, skip_zero_advantages=False, max_tokens_per_microbatch=256, **settings)
    engine = TrainEngine(PolicyModule(model, 1.0, pictures.processor(name)), config, compute_dtype=dtype)
    return Actor(engine, ppo, AlgorithmConfig(), loss_width=24)


def experience(name: str) -> DataProto:
    data = pad_trajectories(rows(name), 0)
    advantages = torch.randn(len(data), 1, generator=torch.Generator().manual_seed(0)) * data.batch["response_mask"]
    return data.with_columns(tensors={"old_logprobs": data.batch["rollout_logprobs"], "advantages": advantages})


def weights(learner: Actor) -> dict[str, torch.Tensor]:
    return {name: each.float().cpu().clone() for name, each in merged_weights(learner.engine.module.model)}


def is_of_tower(key: str) -> bool:
    return any(part in key for part in (".visual.", ".vision_model.", ".connector."))


def gradients(learner: Actor, data: DataProto) -> dict[str, torch.Tensor]:
    """Of one update, before they are clipped."""
    taken: dict[str, torch.Tensor] = {}
    clip = learner.engine.optimizer.clip

    def keep() -> torch.Tensor:
        for name, each in learner.engine.module.named_parameters():
            if each.grad is not None:
                taken[name] = each.grad.float().cpu().clone()
        return clip()

    learner.engine.optimizer.clip = keep
    learner.update(data)
    return taken


@pytest.mark.parametrize("name", NAMES)
def test_float32_logprobs_are_those_of_transformers(name):
    data = experience(name)
    width = data.batch["response_mask"].shape[1]
    with torch.no_grad():
        expected = pictures.plain_logprobs(rows(name), width, pictures.model(name), name)
    computed = actor(name, "cuda").engine.compute(data)["logprobs"]
    torch.testing.assert_close(computed, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_on_the_gpu_is_the_step_on_the_cpu(name):
    gpu, cpu, data = actor(name, "cuda"), actor(name, "cpu"), experience(name)
    ours, theirs = gpu.update(data), cpu.update(data)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-2)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-2, abs=1e-4)
    after, expected = weights(gpu), weights(cpu)
    for key, tensor in expected.items():
        # AdamW's first step has the size of the learning rate, also where rounding decides its direction.
        differs = (after[key] - tensor).abs() > 2e-4
        assert differs.float().mean() < 0.05, key


@pytest.mark.parametrize("name", NAMES[:2])
def test_the_kernel_of_the_tower_attends_as_the_plain_way_does(name):
    contents = [pictures.picture(1, 112, 112), pictures.picture(2, 84, 140), pictures.picture(3), pictures.video(4)]
    results = []
    for way in (NAME, "sdpa"):
        model = load_model(name, dtype="bfloat16", device="cuda", seed=0)
        tower = VisionTower(model, pictures.processor(name))
        model.model.visual.config._attn_implementation = way
        features = torch.cat([part for each in tower(contents) for part in (each.embeddings, *each.deep)])
        features.float().square().mean().backward()
        grads = [each.grad.float() for part in vision_modules(model) for each in part.parameters()]
        results.append((features.float().detach(), grads))
    (ours, our_grads), (plain, plain_grads) = results
    torch.testing.assert_close(ours, plain, atol=0.1, rtol=0.1)
    for one, other in zip(our_grads, plain_grads, strict=True):
        assert (one - other).norm() <= 0.1 * other.norm() + 1e-4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("joins", [False, True], ids=["separate", "joined"])
def test_fused_layers_compute_the_same(name, dtype, joins):
    """Joined projections come with deferred additions, as in a learner that keeps its activations."""
    pytest.importorskip("liger_kernel")
    data = experience(name)
    packs = pack_rows(read_rows(data), data.batch["response_mask"].shape[1], 10_000)
    results = []
    for is_fused in (True, False):
        model = load_model(name, dtype=dtype, device="cuda", seed=0)
        assert not is_fused or use_fused_layers(model)
        widen_layers(model, getattr(torch, dtype), uses_kernels=is_fused, defers=joins)
        if is_fused and joins:
            # The type is only compared with that of the weights.
            assert join_projections(model, torch.float16, uses_kernels=True) >= len(model.get_decoder().layers)
        module = PolicyModule(model, 1.0, pictures.processor(name))
        logprobs = torch.cat([module(pack.to(CUDA))["logprobs"] for pack in packs])
        logprobs.sum().backward()
        gradients = {key: each.grad.float() for key, each in model.named_parameters() if each.grad is not None}
        results.append((logprobs.detach(), gradients))
    (ours, gradients), (plain, expected) = results
    torch.testing.assert_close(ours, plain, atol=2e-3 if dtype == "float32" else 0.1, rtol=1e-2)
    assert gradients.keys() == expected.keys()
    largest = max(float(each.norm()) for each in expected.values())
    for key, gradient in expected.items():
        # Gradients of biases of keys are zero but for rounding.
        limit = (2e-3 if dtype == "float32" else 0.1) * float(gradient.norm()) + 1e-4 * largest
        assert (gradients[key] - gradient).norm() <= limit, key


def test_a_width_without_fast_products_is_filled_up():
    pytest.importorskip("liger_kernel")
    config = types.SimpleNamespace(hidden_size=64, intermediate_size=108, hidden_act="silu")
    plain = Qwen2_5_VLMLP(config, bias=True).to("cuda", torch.bfloat16)
    filled = copy.deepcopy(plain)
    fuse_gated_layers(types.SimpleNamespace(config=config, blocks=[types.SimpleNamespace(mlp=filled)]))
    hidden = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16)
    for each in (filled, plain):
        each(hidden).float().square().sum().backward()
    for ours, expected in zip(filled.parameters(), plain.parameters(), strict=True):
        assert (ours.grad - expected.grad).float().norm() <= 0.02 * expected.grad.float().norm()


def test_the_tower_does_not_wait_for_the_device():
    name = NAMES[0]
    model = load_model(name, dtype="bfloat16", device="cuda", seed=0)
    tower = VisionTower(model, pictures.processor(name))
    contents = [pictures.picture(1, 112, 112), pictures.picture(2, 84, 140)]
    tower(contents)  # loads kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        features = tower(contents)
        torch.stack([each.embeddings.float().sum() for each in features]).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"join_projections": False},
        {"freeze": ("vision",)},
        {"checkpoint_activations": True},
        {"convert_at_once": False},
    ],
    ids=["joined", "separate", "frozen", "checkpointed", "sharded"],
)
def test_steps_in_bfloat16(name, settings):
    learner, data = actor(name, "cuda", torch.bfloat16, **settings), experience(name)
    module = learner.engine.module
    joins = settings.get("join_projections", True) and settings.get("convert_at_once", True)
    assert bool(list(joined_weights(module))) == joins
    exact = actor(name, "cpu").engine.compute(data)["logprobs"]
    computed = learner.engine.compute(data)["logprobs"]
    assert (computed - exact).abs().max() < 0.3
    before = weights(learner)
    stats = [learner.update(data) for _ in range(3)]
    assert all(each["skipped_steps"] == 0 for each in stats)
    after = weights(learner)
    # Biases of keys without rotary embeddings have gradients of rounding alone, which may be zero.
    compared = {key for key in before if not key.endswith("k_proj.bias")}
    unchanged = {key for key in compared if torch.equal(before[key], after[key])}
    assert unchanged == ({key for key in compared if is_of_tower(key)} if settings.get("freeze") else set())


@pytest.mark.parametrize("name", NAMES)
def test_joined_projections_take_the_same_step_in_bfloat16(name):
    """Gradients are compared: AdamW's first step has the size of the learning rate, also where rounding decides it."""
    found = []
    for joins in (True, False):
        learner, data = actor(name, "cuda", torch.bfloat16, join_projections=joins), experience(name)
        found.append(gradients(learner, data))
    ours, expected = found
    assert ours.keys() == expected.keys()
    largest = max(float(each.norm()) for each in expected.values())
    for key, gradient in expected.items():
        limit = 0.1 * float(gradient.norm()) + 1e-3 * largest
        assert float((ours[key] - gradient).norm()) <= limit, key


def test_a_learner_with_a_frozen_tower_leaves_the_device_and_returns():
    name = NAMES[0]
    learner, data = actor(name, "cuda", torch.bfloat16, freeze=("vision",)), experience(name)
    learner.update(data)
    before, values = weights(learner), learner.engine.compute(data)["logprobs"]
    averages = [each for optimizer in learner.engine.optimizer.optimizers for each in averages_of(optimizer)]
    num_bytes = sum(each.nbytes for each in [*learner.engine.module.parameters(), *averages])
    gc.collect()  # not while it is measured: learners of other tests may wait to be collected
    allocated = torch.cuda.memory_allocated()
    learner.engine.offload()
    assert allocated - torch.cuda.memory_allocated() >= num_bytes
    learner.engine.onload()
    torch.testing.assert_close(learner.engine.compute(data)["logprobs"], values)
    assert all(torch.equal(each, before[key]) for key, each in weights(learner).items())
