"""Two ranks train what one rank trains, and read each other's checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from integration.two_ranks import on_two_ranks
from torch.distributed.checkpoint.filesystem import FileSystemReader

from headwater.algorithms.policy_losses.ppo import ppo
from headwater.config.schema import AlgorithmConfig, LoraConfig, TrainingConfig
from headwater.core.data_proto import DataProto
from headwater.core.errors import DataError
from headwater.rollout.padding import pad_trajectories
from headwater.training.actor import Actor
from headwater.training.balance import balanced_parts
from headwater.training.engine import TrainEngine
from headwater.training.lora import add_adapters
from headwater.training.packed_module import PolicyModule
from headwater.training.reference import AdapterReference

SETTINGS = {
    "plain": {},
    "checkpointed": {"checkpoint_activations": True},
    "small packs": {"max_tokens_per_microbatch": 16},
    "by sequence": {"aggregation": "seq-mean-token-mean"},
    "bfloat16": {"compute_dtype": torch.bfloat16},
    "adapters": {"lora_rank": 4},
    "uneven": {"max_tokens_per_microbatch": 16, "num_rows": 5},
    "mini-batches": {"num_minibatches": 3},
    "nothing to learn on one rank": {"is_half_silent": True, "skip_zero_advantages": True},
    "adapters in bfloat16": {"lora_rank": 4, "compute_dtype": torch.bfloat16},
}
COARSE = ("bfloat16", "adapters in bfloat16")


def experience(num_rows: int = 12, is_half_silent: bool = False) -> DataProto:
    trajectories = [tiny.trajectory(100 + row, uid=f"row{row // 4}") for row in range(num_rows)]
    data = pad_trajectories(trajectories, pad_token_id=0)
    advantages = torch.randn(num_rows, 1, generator=torch.Generator().manual_seed(0)) * data.batch["response_mask"]
    if is_half_silent:
        silent = set(balanced_parts(data, 2)[1].non_tensor_batch["uid"])
        advantages[[uid in silent for uid in data.non_tensor_batch["uid"]]] = 0.0
    return data.with_columns(tensors={"old_logprobs": data.batch["rollout_logprobs"], "advantages": advantages})


def share(data: DataProto, rank: int) -> DataProto:
    """A rank's rows; of a small batch the second rank gets a single one, and has to keep the first one company."""
    if len(data) < 8:
        return data[: len(data) - 1] if rank == 0 else data[len(data) - 1 :]
    return balanced_parts(data, 2)[rank]


def take_data(settings: dict) -> tuple[DataProto, dict]:
    """The batch of a case, and the settings that are left."""
    settings = dict(settings)
    return experience(settings.pop("num_rows", 12), settings.pop("is_half_silent", False)), settings


def actor(
    aggregation: str = "token-mean",
    compute_dtype: torch.dtype = torch.float32,
    lora_rank: int = 0,
    **training,
) -> Actor:
    # What adapters stand beside is only computed with, and so in the type of the passes.
    model = tiny.model().to(compute_dtype if lora_rank else torch.float32)
    module = PolicyModule(model, 1.0)
    if lora_rank:
        torch.manual_seed(0)
        add_adapters(model, LoraConfig(rank=lora_rank))
    config = TrainingConfig(**{"learning_rate": 1e-3, "skip_zero_advantages": False, **training})
    engine = TrainEngine(module, config, compute_dtype=compute_dtype)
    return Actor(engine, ppo, AlgorithmConfig(aggregation=aggregation), loss_width=8)


def weights(learner: Actor) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.engine.export_weights()}


def two_steps(settings: dict, folder: Path, pick=lambda data: data):
    """Weights and statistics after each of two steps, with passes without a gradient and a checkpoint in between."""
    data, settings = take_data(settings)
    data = pick(data)
    learner = actor(**settings)
    if "lora_rank" in settings:
        AdapterReference(learner.engine).logprobs(data)
    learner.logprobs(data)
    first = learner.update(data)
    learner.logprobs(data)
    learner.engine.save(folder)
    second = learner.update(data)
    return weights(learner), [first, second]


def resumed_step(settings: dict, folder: Path, pick=lambda data: data):
    """Weights after the second step, gone on with from the checkpoint."""
    data, settings = take_data(settings)
    learner = actor(**settings)
    learner.engine.load(folder)
    learner.update(pick(data))
    return weights(learner)


def too_long_on_one_rank(rank: int) -> str:
    """The error each rank gets when a row of the first is too long."""
    learner = actor(max_tokens_per_microbatch=16 if rank else 4)
    try:
        learner.logprobs(experience(4))
    except DataError as error:
        return str(error)
    return "none"


def on_rank(rank: int, folder: Path):
    trained = {
        name: two_steps(settings, folder / "of_two" / name, lambda data: share(data, rank))
        for name, settings in SETTINGS.items()
    }
    resumed = resumed_step({}, folder / "of_one" / "plain", lambda data: share(data, rank))
    return trained, resumed, too_long_on_one_rank(rank)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same steps on one rank and on two."""
    folder = tmp_path_factory.mktemp("ranks")
    alone = {name: two_steps(settings, folder / "of_one" / name) for name, settings in SETTINGS.items()}
    return folder, alone, on_two_ranks(on_rank, folder, folder)


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        # A step of AdamW is of the size of the learning rate, 1e-3, however small the gradient.
        torch.testing.assert_close(actual[name], tensor, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in (*COARSE, "mini-batches")])
def test_two_ranks_train_what_one_trains(runs, name):
    _, alone, [(first, *_), (second, *_)] = runs
    expected_weights, expected_stats = alone[name]
    assert_same(first[name][0], expected_weights)
    assert all(torch.equal(tensor, second[name][0][key]) for key, tensor in first[name][0].items())
    assert first[name][1] == second[name][1]
    for ours, theirs in zip(first[name][1], expected_stats, strict=True):
        for key in ("loss", "grad_norm", "entropy", "clip_fraction"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5)


def test_ranks_with_different_numbers_of_rows_take_their_steps_together(runs):
    """Which rows meet in a mini-batch depends on the ranks, so the steps are not those of one rank."""
    _, _, [(first, *_), (second, *_)] = runs
    (weights_of_first, stats), (weights_of_second, other_stats) = first["mini-batches"], second["mini-batches"]
    assert all(torch.equal(tensor, weights_of_second[key]) for key, tensor in weights_of_first.items())
    assert stats == other_stats
    assert [each["optimizer_steps"] for each in stats] == [3, 3]


@pytest.mark.parametrize("name", COARSE)
def test_mixed_precision_keeps_float32_weights(runs, name):
    folder, alone, [(first, *_), _] = runs
    # Rounding decides the sign of tiny gradients, and AdamW makes full steps of them: compare what is averaged.
    for ours, theirs in zip(first[name][1], alone[name][1], strict=True):
        for key in ("loss", "grad_norm", "entropy"):
            assert ours[key] == pytest.approx(theirs[key], rel=0.1, abs=0.03)
    # Saved after a pass without a gradient, whose copies in bfloat16 must not be taken for the weights.
    held = FileSystemReader(folder / "of_two" / name / "train").read_metadata().state_dict_metadata
    assert {entry.properties.dtype for key, entry in held.items() if key.startswith("model.")} == {torch.float32}


@pytest.mark.parametrize("name", ["plain", "adapters"])
def test_a_checkpoint_of_two_ranks_resumes_on_one(runs, name):
    folder, _, [(trained, *_), _] = runs
    assert_same(resumed_step(SETTINGS[name], folder / "of_two" / name), trained[name][0])


def test_a_checkpoint_of_one_rank_resumes_on_two(runs):
    _, alone, [(_, resumed, _), _] = runs
    assert_same(resumed, alone["plain"][0])


def test_rows_that_one_rank_cannot_compute_are_an_error_on_all(runs):
    _, _, [(*_, first), (*_, second)] = runs
    assert "over training.max_tokens_per_microbatch = 4" in first
    assert second == "another rank cannot compute its rows; its own error says why"
