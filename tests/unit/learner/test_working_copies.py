"""One process that computes in another type than its weights: converting all weights at once changes no bit."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_engine import actor, experience, weights
from transformers import AutoModelForCausalLM

from headwater.algorithms.policy_losses import PolicyLoss
from headwater.config.schema import LearnerConfig
from headwater.learner import ranks
from headwater.learner.engine import TrainEngine
from headwater.learner.packed_module import PolicyModule
from headwater.learner.wide_layers import plain_norm, widen_layers
from headwater.learner.working_copies import WorkingCopies, add_small
from headwater.models.builtin.tiny import PRESETS, build_config

# Processors without bfloat16 multiply its matrices several hundred times more slowly than those of float32.
SHAPE = replace(
    PRESETS["qwen3"], hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16
)
with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)
    MODEL = AutoModelForCausalLM.from_config(build_config(SHAPE)).eval()


def engine(**settings) -> TrainEngine:
    return TrainEngine(
        PolicyModule(copy.deepcopy(MODEL), temperature=1.0),
        LearnerConfig(learning_rate=1e-3, skip_zero_advantages=False, **settings),
        compute_dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


def test_a_learner_that_is_dropped_is_freed():
    """Its gradients are collected by hooks of torch, to which Python's garbage collection is blind."""
    learner = engine()
    learner.train_step(experience(1), lambda outputs, batch: PolicyLoss(-outputs["logprobs"]))
    weight = weakref.ref(next(learner.module.parameters()))
    assert weight().grad is None, "the step is complete"
    del learner
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, marks=pytest.mark.slow), {"max_tokens_per_microbatch": 40, "checkpoint_activations": True}],
)
def test_same_bits_as_fsdp(settings):
    results = []
    for how in ({"convert_at_once": True}, {"convert_at_once": False}):
        learner = engine(**how, **settings)
        policy = actor(learner)
        stats = [policy.update(experience(seed)) for seed in (1, 2)]
        logprobs = learner.compute(experience(3))["logprobs"]
        results.append((weights(learner), logprobs, stats))
    (first, first_logprobs, first_stats), (second, second_logprobs, second_stats) = results
    assert torch.equal(first, second)
    assert torch.equal(first_logprobs, second_logprobs)
    assert first_stats == second_stats


def test_layers_that_leave_an_addition_to_the_next_one_have_the_same_bits_in_fsdp(monkeypatch):
    def add_and_norm(residual, product, weight, eps):
        total = residual if product is None else residual + product
        return total, plain_norm(SimpleNamespace(weight=weight, variance_epsilon=eps), total)

    # In plain torch: Triton's interpreter would take half a minute.
    monkeypatch.setitem(sys.modules, "headwater.learner.norm_kernels", SimpleNamespace(add_and_norm=add_and_norm))
    monkeypatch.setattr(
        ranks, "widen_layers", lambda model, dtype, **_: widen_layers(model, dtype, uses_kernels=True, defers=True)
    )
    results = []
    for convert_at_once in (True, False):
        learner = engine(convert_at_once=convert_at_once)
        actor(learner).update(experience(1))
        results.append(weights(learner))
    assert torch.equal(*results)


def test_copies_exist_only_during_an_update():
    learner = engine()
    names = [name for name, _ in learner.module.named_parameters()]
    held = {name: id(each) for name, each in learner.module.named_parameters()}
    actor(learner).update(experience(1))
    assert {name: id(each) for name, each in learner.module.named_parameters()} == held
    assert all(each.dtype == torch.float32 for each in learner.module.parameters())
    copies = learner.module.copies
    assert isinstance(copies, WorkingCopies)
    copies.use()
    assert [name for name, _ in learner.module.named_parameters()] == names
    assert all(each.dtype == torch.bfloat16 for each in learner.module.parameters())
    copies.put_back()
    assert all(not each.numel() and each.grad is None for each in copies._copies.values())


def test_small_gradients_are_added_together_with_the_same_bits():
    generator = torch.Generator().manual_seed(0)
    sums, added = ([torch.randn(size, generator=generator) for size in (1, 7, 300)] for _ in range(2))
    narrow = [each.to(torch.bfloat16) for each in added]
    expected = [total + part for total, part in zip(sums, narrow, strict=True)]
    add_small(list(zip(sums, narrow, strict=True)))
    assert all(map(torch.equal, sums, expected))
    add_small([])


def test_a_failed_pass_puts_the_weights_back():
    learner = engine()

    def fails(outputs, batch):
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        learner.train_step(experience(1), fails)
    assert all(each.dtype == torch.float32 and each.grad is None for each in learner.module.parameters())


def test_copies_are_made_on_a_gpu_only_if_there_is_room(monkeypatch):
    module, gpu = engine().module, torch.device("cuda")
    num_weights = sum(each.numel() for each in module.parameters())

    def has_room(per_weight: float, *, trains: bool = True, **settings) -> bool:
        monkeypatch.setattr(ranks, "free_bytes", lambda _: int(per_weight * num_weights))
        config = LearnerConfig(**settings)
        return ranks.has_room_for_copies(module, config, torch.bfloat16, gpu, trains=trains)

    assert has_room(1.5 * (4 + 8 + 2))
    assert not has_room(1.5 * (4 + 8 + 2) - 0.1)
    assert has_room(1.5 * (4 + 2), offload_optimizer=True)
    assert has_room(1.5 * 2, trains=False)
    assert not has_room(1.5 * 2 - 0.1, trains=False)
    assert ranks.has_room_for_copies(module, LearnerConfig(), torch.bfloat16, torch.device("cpu"), trains=True)


def test_an_interrupt_while_copies_are_placed_is_repaired(monkeypatch):
    copies = engine().module.copies
    place, weights = copies._place, list(copies._places)

    def interrupted(parameters):
        places = next(iter(copies._places.values()))
        places[0][0]._parameters[places[0][1]] = parameters[weights[0]]
        raise KeyboardInterrupt

    monkeypatch.setattr(copies, "_place", interrupted)
    with pytest.raises(KeyboardInterrupt):
        copies.use()
    monkeypatch.setattr(copies, "_place", place)
    copies.put_back()
    assert all(part._parameters[name] is weight for weight, at in copies._places.items() for part, name in at)
