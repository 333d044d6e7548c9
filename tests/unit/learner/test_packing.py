"""Packs: every token that matters once, and attention that keeps sequences apart."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.errors import DataError
from headwater.core.records import Trajectory
from headwater.learner.packed_module import PolicyModule
from headwater.learner.packing import check_lengths, idle_pack, pack_rows, read_rows
from headwater.models.packed_attention import BucketedAttention, Segments
from headwater.rollout.group import pad_trajectories

MODEL = tiny.model()


def trajectory(prompt: list[int], response: list[int], mask: list[int] | None = None) -> Trajectory:
    mask = mask or [1] * len(response)
    return Trajectory(
        uid="row",
        sample=0,
        tokens=(*prompt, *response),
        prompt_length=len(prompt),
        loss_mask=(0,) * len(prompt) + tuple(mask),
        logprobs=(0.0,) * (len(prompt) + len(response)),
        versions=(-1,) * len(prompt) + tuple(0 if each else -1 for each in mask),
        reward=0.0,
        stop_reason="stop",
    )


def group(seed: int, num_samples: int = 3) -> list[Trajectory]:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(6, 500, rng.integers(1, 9)).tolist()
    samples = []
    for _ in range(num_samples):
        response = rng.integers(6, 500, rng.integers(1, 8)).tolist()
        mask = rng.integers(0, 2, len(response)).tolist()
        mask[rng.integers(len(mask))] = 1
        samples.append(trajectory(prompt, response, mask))
    return samples


def batch(seed: int = 0, num_groups: int = 4):
    return pad_trajectories([each for number in range(num_groups) for each in group(seed + number)], pad_token_id=0)


def packs(data, max_tokens: int = 10_000, **settings):
    return pack_rows(read_rows(data), data.batch["response_mask"].shape[1], max_tokens, **settings)


def logprobs(data, module, **settings) -> torch.Tensor:
    result = torch.zeros_like(data.batch["response_mask"])
    for pack in packs(data, **settings):
        result = result.index_add(0, torch.tensor(pack.rows), pack.padded(module(pack)["logprobs"]))
    return result


def plain_logprobs(data, model) -> torch.Tensor:
    """One row at a time, as transformers computes it."""
    width = data.batch["response_mask"].shape[1]
    rows = []
    for row in range(len(data)):
        real = data.batch["attention_mask"][row].bool()
        tokens = data.batch["input_ids"][row][real]
        scores = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        num_response = int(real[-width:].sum())
        rows.append(torch.nn.functional.pad(scores[-num_response:], (0, width - num_response)))
    return torch.stack(rows) * data.batch["response_mask"]


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("max_tokens", [20, 40, 10_000])
def test_packed_logprobs_and_gradients_are_those_of_single_rows(share_prompts, max_tokens):
    data = batch()
    weights = torch.randn(data.batch["response_mask"].shape, generator=torch.Generator().manual_seed(0))
    single, packed = copy.deepcopy(MODEL), copy.deepcopy(MODEL)
    expected = plain_logprobs(data, single)
    (expected * weights).sum().backward()
    actual = logprobs(data, PolicyModule(packed, 1.0), share_prompts=share_prompts, max_tokens=max_tokens)
    (actual * weights).sum().backward()
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(packed.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-3, rtol=1e-3)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1000), st.integers(1, 6), st.integers(20, 80), st.booleans(), st.integers(1, 4))
def test_packs_hold_what_matters_once_and_keep_the_budget(seed, num_groups, max_tokens, share_prompts, min_packs):
    data = batch(seed, num_groups)
    made = packs(data, max_tokens, share_prompts=share_prompts, min_packs=min_packs)
    assert sorted(row for pack in made for row in pack.rows) == list(range(len(data)))
    assert len(made) >= min(min_packs, num_groups)
    mask = data.batch["response_mask"]
    for pack in made:
        assert len(pack.input_ids) <= max_tokens
        assert pack.segments.lengths.sum() == len(pack.input_ids)
        rows = torch.tensor(pack.rows)[pack.row]
        assert mask[rows, pack.column].all()
        assert len(pack.targets) == int(mask[pack.rows].sum())
        start = data.batch["input_ids"].shape[1] - pack.width
        assert torch.equal(data.batch["input_ids"][rows, start + pack.column], pack.targets)


def test_a_shared_prompt_is_packed_once():
    samples = [trajectory([7, 8, 9, 10], [20 + number, 30]) for number in range(5)]
    [shared] = packs(pad_trajectories(samples, 0))
    [plain] = packs(pad_trajectories(samples, 0), share_prompts=False)
    # The last token of a response predicts nothing, so it is not computed.
    assert len(shared.input_ids) == 4 + 5
    assert len(plain.input_ids) == 5 * (4 + 1)


def test_rows_without_trained_tokens_are_not_computed():
    data = pad_trajectories([trajectory([7, 8], [9, 10]), trajectory([7], [9, 10], [0, 0])], 0)
    assert [pack.rows for pack in packs(data)] == [[0]]


def test_a_group_over_the_budget_is_split_and_a_row_over_it_refused():
    samples = [trajectory([7, 8, 9, 10], [20, 21, 22]) for _ in range(5)]
    assert len(packs(pad_trajectories(samples, 0), 8)) == 3
    with pytest.raises(DataError, match=r"row 0 of the batch has 6 tokens, over learner\.a_budget = 5; raise that"):
        check_lengths(read_rows(pad_trajectories(samples, 0)), 5, "learner.a_budget")


def test_an_idle_pack_runs():
    assert len(PolicyModule(copy.deepcopy(MODEL), 1.0)(idle_pack(3))["logprobs"]) == 1


@pytest.mark.parametrize("window", [0, 1, 3])
def test_attention_over_segments_is_attention_over_each_alone(window):
    generator = torch.Generator().manual_seed(0)
    # A prompt of 4 seen by responses of 3 and 2, then a sequence of 5 on its own.
    segments = Segments(*np.array([(0, 4, 0, 0), (4, 3, 0, 4), (7, 2, 0, 4), (9, 5, 9, 0)]).T)
    query = torch.randn(14, 4, 8, generator=generator)
    key, value = torch.randn(2, 14, 2, 8, generator=generator)
    output = BucketedAttention(segments, torch.device("cpu"))(query, key, value, scale=0.3, window=window)
    for places in ([0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 7, 8], [9, 10, 11, 12, 13]):
        q, k, v = (each[places].repeat_interleave(4 // each.shape[1], dim=1) for each in (query, key, value))
        scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
        visible = torch.ones(len(places), len(places)).tril()
        if window:
            visible = visible.triu(1 - window)
        expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(visible == 0, -torch.inf).softmax(-1), v)
        torch.testing.assert_close(output[places], expected, atol=1e-5, rtol=1e-5)


def test_gradients_of_a_shared_prompt_are_the_same_bits_each_time():
    """Many samples add to the gradient of one prompt; in whatever order threads came, the sums would differ."""
    generator = torch.Generator().manual_seed(0)
    segments = Segments(*np.array([(0, 64, 0, 0), *((64 + 4 * each, 4, 0, 64) for each in range(64))]).T)
    inputs = [torch.randn(64 + 256, 4, 32, generator=generator) for _ in range(4)]
    attention = BucketedAttention(segments, torch.device("cpu"))

    def gradient() -> torch.Tensor:
        query, key, value = (each.clone().requires_grad_() for each in inputs[:3])
        (attention(query, key, value, scale=0.2, window=0) * inputs[3]).sum().backward()
        return torch.cat([key.grad, value.grad])

    first = gradient()
    assert all(torch.equal(gradient(), first) for _ in range(10))
