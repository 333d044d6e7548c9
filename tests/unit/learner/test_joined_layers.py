"""Projections of the same input as one product."""

from __future__ import annotations

import copy

import pictures
import pytest
import torch
from engine.engine_parts import make_model
from engine.kernels.support import DEVICE, randn
from learner.test_packing import batch
from torch import nn

from headwater.config.schema import LoraConfig
from headwater.learner.joined_kernels import gated, rotated_heads
from headwater.learner.joined_layers import (
    _plain_gated,
    _plain_heads,
    join_projections,
    joined,
    joined_linear,
    joined_weights,
)
from headwater.learner.lora import add_adapters
from headwater.learner.packed_module import PolicyModule
from headwater.learner.packing import pack_rows, read_rows
from headwater.learner.wide_layers import widen_layers
from headwater.learner.working_copies import WorkingCopies
from headwater.models import precision
from headwater.rollout.group import pad_trajectories


def gradients_of(function, *leaves: torch.Tensor) -> list[torch.Tensor]:
    """The results, and the gradients of all leaves."""
    leaves = tuple(each.clone().requires_grad_() for each in leaves)
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    total = sum((each * randn(*each.shape, seed=7 + place)).sum() for place, each in enumerate(results))
    total.backward()
    return [*(each.detach() for each in results), *(each.grad for each in leaves)]


def check(actual, expected, tolerance=1e-5):
    for ours, plain in zip(actual, expected, strict=True):
        assert ours.dtype == plain.dtype
        torch.testing.assert_close(ours, plain, atol=tolerance * max(1.0, float(plain.abs().max())), rtol=tolerance)


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_joined_product_has_the_results_and_gradients_of_its_parts(has_bias):
    layers = [nn.Linear(8, size, bias=has_bias, device=DEVICE) for size in (6, 2, 4)]
    x, parameters = randn(2, 5, 8), [each for layer in layers for each in layer.parameters()]
    results = []
    for way in (lambda x: joined_linear(x, layers), lambda x: torch.cat([each(x) for each in layers], dim=-1)):
        found = gradients_of(way, x)
        results.append([*found, *(each.grad for each in parameters)])
        for each in parameters:
            each.grad = None
    check(*results)
    layers[0].weight.requires_grad_(False)  # a frozen layer beside trained ones
    joined_linear(x, layers).sum().backward()
    assert layers[0].weight.grad is None
    assert layers[1].weight.grad is not None


def test_neighbours_in_memory_are_joined_without_a_copy():
    memory = torch.arange(24.0)
    first, second, third = memory[:8].view(2, 4), memory[8:20].view(3, 4), memory[20:].view(1, 4)
    assert joined([first, second, third]).data_ptr() == memory.data_ptr()
    assert torch.equal(joined([first, second, third]), memory.view(6, 4))
    for others in ([first, third], [second, first], [first, second.clone()], [first, second[:, :2]]):
        if others[1].shape[1] == 4:
            assert torch.equal(joined(others), torch.cat(others))
    assert joined([first, third]).data_ptr() != memory.data_ptr()


@pytest.mark.parametrize("width", [48, 1100])
def test_the_gated_kernel_computes_what_torch_does(width):
    check(gradients_of(gated, randn(3, 2 * width)), gradients_of(_plain_gated, randn(3, 2 * width)))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (3, 1, 24)])
def test_the_rotary_kernel_computes_what_torch_does(num_heads, num_kv_heads, head_dim):
    angles = randn(5, head_dim // 2, seed=3)
    cos, sin = (torch.cat([each, each], dim=-1) for each in (angles.cos(), angles.sin()))
    states = randn(5, (num_heads + 2 * num_kv_heads) * head_dim)
    results = [
        gradients_of(lambda x, way=way: way(x, cos, sin, num_heads, num_kv_heads), states)
        for way in (rotated_heads, _plain_heads)
    ]
    check(*results)


def result(model) -> list[torch.Tensor]:
    """Log-probs and the gradients of all weights, by name."""
    data = batch(num_groups=2)
    [pack] = pack_rows(read_rows(data), data.batch["response_mask"].shape[1], 10_000)
    logprobs = PolicyModule(model, 1.0)(pack.to(DEVICE))["logprobs"]
    logprobs.sum().backward()
    return [logprobs.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


@pytest.mark.parametrize(
    ("kind", "per_layer"), [("llama", 2), ("mistral", 2), ("qwen2", 2), ("qwen3", 1), ("gemma", 0)]
)
def test_joined_models_have_the_gradients_of_the_others(kind, per_layer):
    plain = make_model(kind).to(DEVICE)
    for uses_kernels in (False, True):
        model = copy.deepcopy(plain)
        assert join_projections(model, torch.float16, uses_kernels=uses_kernels) == per_layer * len(model.model.layers)
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
        if per_layer:
            check(result(model), result(copy.deepcopy(plain)), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "per_layer", "defers"),
    [
        ("tiny:qwen2_5_vl", 1, False),
        ("tiny:qwen3_vl", 1, False),
        ("tiny:smolvlm", 2, True),
        ("tiny:idefics3", 2, True),
    ],
)
def test_vision_models_have_the_same_gradients_through_joined_and_deferring_layers(
    monkeypatch, name, per_layer, defers
):
    """The layers that a GPU runs in bfloat16, in float32, where rounding hides nothing."""
    monkeypatch.setattr(precision, "NARROW_TYPES", (torch.float32,))
    data = pad_trajectories(pictures.group(1, [pictures.picture(1)], 2, name=name), 0)
    [pack] = pack_rows(read_rows(data), data.batch["response_mask"].shape[1], 10_000)

    def trained(model) -> dict[str, torch.Tensor]:
        logprobs = PolicyModule(model, 1.0, pictures.processor(name))(pack.to(DEVICE))["logprobs"]
        logprobs.sum().backward()
        gradients = {key: each.grad for key, each in model.named_parameters() if each.grad is not None}
        return {"log-probs": logprobs.detach(), **gradients}

    joint = pictures.model(name).to(DEVICE)
    layers = joint.get_decoder().layers
    del layers[2:]  # Triton's interpreter is slow
    plain = copy.deepcopy(joint)
    assert widen_layers(joint, torch.float32, uses_kernels=True, defers=True)
    assert join_projections(joint, torch.float16, uses_kernels=True) == per_layer * len(layers)
    outputs = []
    layers[0].register_forward_hook(lambda *call: outputs.append(call[2]))
    ours, expected = trained(joint), trained(plain)
    assert isinstance(outputs[0], tuple) == defers
    assert ours.keys() == expected.keys()
    assert any(".visual." in key or "vision_model" in key for key in ours)
    largest = max(float(each.abs().max()) for key, each in expected.items() if key != "log-probs")
    for key, tensor in expected.items():
        limit = 1e-4 * float(tensor.abs().max()) + 1e-6 * largest  # biases of keys have gradients of rounding alone
        assert float((ours[key] - tensor).abs().max()) <= limit, key


def test_layers_with_adapters_stay_separate():
    model = make_model("llama")
    add_adapters(model, LoraConfig(rank=2, targets=("q_proj",)))
    assert not join_projections(model, torch.float32, uses_kernels=False), "they have the type of the passes"
    assert join_projections(model, torch.float16, uses_kernels=False) == len(model.model.layers), "gated layers alone"
    assert {len(parts) for parts in joined_weights(model)} == {2}


def test_working_copies_of_joined_weights_are_one_tensor():
    model = make_model("qwen2")
    join_projections(model, torch.float64, uses_kernels=False)
    copies = WorkingCopies(model, torch.float64, joined_weights(model))
    copies.use()
    groups = list(joined_weights(model))
    assert len(groups) == 3 * len(model.model.layers), "weights and biases of q, k and v, weights of gate and up"
    for parts in groups:
        is_aligned = all(each.numel() % 128 == 0 for each in parts[:-1])
        assert (joined(parts).data_ptr() == parts[0].data_ptr()) == is_aligned
        assert torch.equal(joined(parts), torch.cat(list(parts)))
    assert any(all(each.numel() % 128 == 0 for each in parts) for parts in groups)
    copies.put_back()
    assert all(each.dtype == torch.float32 for each in model.parameters())
