"""Updates with joined projections have the gradients of those without: working copies, FSDP, recorded passes, LoRA."""

from __future__ import annotations

import copy

import pytest
import torch
from engine.engine_parts import make_model
from learner.test_engine import actor, experience
from learner.test_graphs import graphed
from torch.distributed.tensor import DTensor

from headwater.config.load import load_config
from headwater.config.schema import LearnerConfig, LoraConfig
from headwater.learner import ranks
from headwater.learner.build import LearnerSpec, build_learner
from headwater.learner.engine import TrainEngine
from headwater.learner.joined_layers import join_projections, joined, joined_weights
from headwater.learner.lora import add_adapters
from headwater.learner.packed_module import PolicyModule

# Weights are float32, and the passes compute in float64, where a CPU is fast and rounding does not matter.
COMPUTED = torch.float64
MODEL = make_model("qwen2")


def learner_of(model, *, is_joined: bool, **settings) -> TrainEngine:
    if is_joined:
        assert join_projections(model, COMPUTED, uses_kernels=False)
    config = LearnerConfig(learning_rate=1e-3, skip_zero_advantages=False, **settings)
    return TrainEngine(PolicyModule(model, 1.0), config, compute_dtype=COMPUTED, device=torch.device("cpu"))


def gradients(learner: TrainEngine) -> dict[str, torch.Tensor]:
    """Of one update, before clipping."""
    taken: dict[str, torch.Tensor] = {}
    clip = learner.optimizer.clip

    def keep() -> torch.Tensor:
        for name, each in learner.module.named_parameters():
            if each.grad is not None:
                whole = each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad
                taken[name.replace("_checkpoint_wrapped_module.", "")] = whole.clone()
        return clip()

    learner.optimizer.clip = keep
    actor(learner).update(experience(1))
    return taken


def check(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, ours in actual.items():
        theirs = expected[name]
        torch.testing.assert_close(ours, theirs, atol=1e-6 * float(theirs.abs().max()), rtol=1e-6, msg=name)


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_tokens_per_microbatch": 40, "checkpoint_activations": True}, {"convert_at_once": False}],
    ids=["copies", "checkpointed", "fsdp"],
)
def test_an_update_has_the_same_gradients(settings):
    expected = gradients(learner_of(copy.deepcopy(MODEL), is_joined=False, **settings))
    learner = learner_of(copy.deepcopy(MODEL), is_joined=True, **settings)
    check(gradients(learner), expected)
    if learner.module.copies is not None:
        learner.module.copies.use()
        views = [parts for parts in joined_weights(learner.module) if joined(parts).data_ptr() == parts[0].data_ptr()]
        assert len(views) >= len(learner.module.layers), "weights of a layer are one tensor"
        learner.module.copies.put_back()


def test_recorded_passes_have_the_same_gradients():
    expected = gradients(learner_of(copy.deepcopy(MODEL), is_joined=False))
    learner = learner_of(copy.deepcopy(MODEL), is_joined=True)
    learner.graphs = graphed(learner.module)
    check(gradients(learner), expected)
    assert learner.graphs.num_kept


@pytest.mark.parametrize("frozen", ["q_proj", "up_proj"])
def test_a_frozen_layer_beside_trained_ones_has_no_gradient(frozen):
    model = copy.deepcopy(MODEL)
    for name, each in model.named_parameters():
        each.requires_grad_(frozen not in name)
    expected = gradients(learner_of(copy.deepcopy(model), is_joined=False))
    check(gradients(learner_of(model, is_joined=True)), expected)
    assert not any(frozen in name for name in expected)


def test_adapters_beside_joined_layers_have_the_same_gradients():
    pytest.importorskip("peft")
    model = copy.deepcopy(MODEL)
    add_adapters(model, LoraConfig(rank=2, targets=("q_proj", "down_proj")))
    expected = gradients(learner_of(copy.deepcopy(model), is_joined=False))
    check(gradients(learner_of(model, is_joined=True)), expected)
    assert expected
    assert all("lora_" in name for name in expected)


@pytest.mark.parametrize(
    ("settings", "is_joined"),
    [({}, True), ({"join_projections": False}, False), ({"fused_layers": False}, False), ({"compile": True}, False)],
)
def test_a_learner_on_a_gpu_joins_projections_if_its_settings_say_so(monkeypatch, settings, is_joined):
    joins = []
    monkeypatch.setattr(ranks, "use_fused_layers", lambda model: True)
    monkeypatch.setattr(ranks, "widen_layers", lambda model, dtype, **_: False)
    monkeypatch.setattr(ranks, "has_room_for_copies", lambda *_, **__: True)
    monkeypatch.setattr(ranks, "join_projections", lambda model, dtype, *, uses_kernels: joins.append(uses_kernels))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: None)
    module = PolicyModule(copy.deepcopy(MODEL), 1.0)
    config = LearnerConfig(**settings)
    ranks.shard(module, ranks.Ranks(), config, compute_dtype=COMPUTED, device=torch.device("cuda"), trains=True)
    assert joins == ([True] if is_joined else [])


def test_a_deterministic_run_does_not_join_projections():
    """Whether it could would depend on the free memory."""
    for is_deterministic in (False, True):
        settings = [f"run.deterministic={is_deterministic}", "critic.enabled=true", "algorithm.advantage=gae"]
        config = load_config("quickstart", settings).config
        learner = build_learner(LearnerSpec(config, "tiny:qwen3", "tiny:qwen3"))
        engines = [learner.actor.engine, learner.critic.engine]
        assert [each.config.join_projections for each in engines] == [not is_deterministic] * 2
        learner.close()
