"""Two ranks train what one rank trains, and read each other's checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from integration.two_ranks import on_two_ranks
from torch.distributed.checkpoint.filesystem import FileSystemReader

from headwater.algorithms.policy_losses.ppo import ppo
from headwater.config.schema import AlgorithmConfig, CriticConfig, LearnerConfig, LoraConfig
from headwater.core.data_proto import DataProto
from headwater.core.errors import DataError
from headwater.learner.actor import Actor
from headwater.learner.balance import balanced_parts
from headwater.learner.critic import Critic
from headwater.learner.engine import TrainEngine
from headwater.learner.lora import add_adapters
from headwater.learner.packed_module import PolicyModule, ValueModule
from headwater.learner.reference import AdapterReference
from headwater.models.scored import load_critic
from headwater.rollout.padding import pad_trajectories

SETTINGS = {
    "plain": {},
    "checkpointed": {"checkpoint_activations": True},
    "small packs": {"max_tokens_per_microbatch": 16},
    "by sequence": {"aggregation": "seq-mean-token-mean"},
    "bfloat16": {"compute_dtype": torch.bfloat16},
    "adapters": {"lora_rank": 4},
    "uneven": {"max_tokens_per_microbatch": 16, "num_rows": 5},
    "mini-batches": {"num_minibatches": 2, "num_epochs": 2},
    "uneven mini-batches": {"max_tokens_per_microbatch": 16, "num_rows": 5, "num_minibatches": 2, "num_epochs": 2},
    "more mini-batches than rows": {"num_rows": 2, "num_minibatches": 3},
    "nothing to learn on one rank": {"silent": "second rank", "skip_zero_advantages": True},
    "nothing to learn in mini-batches": {"silent": "most", "skip_zero_advantages": True, "num_minibatches": 2},
    "adapters in bfloat16": {"lora_rank": 4, "compute_dtype": torch.bfloat16},
}
MEANS = ("loss", "grad_norm", "entropy", "clip_fraction")
COARSE = ("bfloat16", "adapters in bfloat16")
OF_CRITIC = ("mini-batches", "uneven mini-batches")


def experience(num_rows: int = 12, silent: str = "", num_minibatches: int = 1) -> DataProto:
    trajectories = [tiny.trajectory(100 + row, uid=f"row{row // 4}", sample=row) for row in range(num_rows)]
    data = pad_trajectories(trajectories, pad_token_id=0)
    advantages = torch.randn(num_rows, 1, generator=torch.Generator().manual_seed(0)) * data.batch["response_mask"]
    if silent:
        part = balanced_parts(data, 2, num_minibatches=num_minibatches)[1]
        advantages[part.non_tensor_batch["sample"].tolist()] = 0.0
    if silent == "most":  # nothing of the first mini-batch, and of the second one rank's rows only
        advantages[: num_rows // 2] = 0.0
    mask = data.batch["response_mask"]
    returns = torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)) * mask
    return data.with_columns(
        tensors={
            "old_logprobs": data.batch["rollout_logprobs"],
            "advantages": advantages,
            "values": torch.zeros_like(returns),
            "returns": returns,
        }
    )


def share(data: DataProto, rank: int, num_minibatches: int) -> DataProto:
    """A rank's rows; of a small batch the second rank gets only one, and has to keep the first rank company."""
    if len(data) < 8:
        marked = balanced_parts(data, 1, num_minibatches=num_minibatches)[0]
        return marked[1:] if rank == 0 else marked[:1]
    return balanced_parts(data, 2, num_minibatches=num_minibatches)[rank]


def take_data(settings: dict, rank: int | None) -> tuple[DataProto, dict]:
    """The batch of a case, whole or the rows of a rank, and the settings that are left."""
    settings = dict(settings)
    num_minibatches = settings.get("num_minibatches", 1)
    data = experience(settings.pop("num_rows", 12), settings.pop("silent", ""), num_minibatches)
    return data if rank is None else share(data, rank, num_minibatches), settings


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
    config = LearnerConfig(**{"learning_rate": 1e-3, "skip_zero_advantages": False, **training})
    engine = TrainEngine(module, config, compute_dtype=compute_dtype)
    return Actor(engine, ppo, AlgorithmConfig(aggregation=aggregation), loss_width=8)


def weights(learner: Actor | Critic) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.engine.export_weights()}


def critic(**training) -> Critic:
    model = load_critic("tiny:qwen3", dtype="float32", device="cpu", seed=0)
    engine = TrainEngine(ValueModule(model), LearnerConfig(**{"learning_rate": 1e-3, **training}))
    return Critic(engine, CriticConfig(), AlgorithmConfig(), loss_width=8)


def two_steps(settings: dict, folder: Path, rank: int | None = None):
    """Weights and statistics after each of two steps, with passes without a gradient and a checkpoint in between."""
    data, settings = take_data(settings, rank)
    learner = actor(**settings)
    if "lora_rank" in settings:
        AdapterReference(learner.engine).logprobs(data)
    learner.logprobs(data)
    first = learner.update(data)
    learner.logprobs(data)
    learner.engine.save(folder)
    second = learner.update(data)
    return weights(learner), [first, second]


def resumed_step(settings: dict, folder: Path, rank: int | None = None):
    """Weights after the second step, gone on with from the checkpoint."""
    data, settings = take_data(settings, rank)
    learner = actor(**settings)
    learner.engine.load(folder)
    learner.update(data)
    return weights(learner)


def critic_step(settings: dict, rank: int | None = None):
    """A critic's weights and statistics after one step."""
    data, settings = take_data(settings, rank)
    learner = critic(**settings)
    stats = learner.update(data)
    return weights(learner), [stats]


def too_long_on_one_rank(rank: int) -> str:
    """The error each rank gets when a row of the first is too long."""
    learner = actor(max_tokens_per_microbatch=16 if rank else 4)
    try:
        learner.logprobs(experience(4))
    except DataError as error:
        return str(error)
    return "none"


def on_rank(rank: int, folder: Path):
    trained = {name: two_steps(settings, folder / "of_two" / name, rank) for name, settings in SETTINGS.items()}
    judged = {name: critic_step(SETTINGS[name], rank) for name in OF_CRITIC}
    resumed = resumed_step({}, folder / "of_one" / "plain", rank)
    return trained, judged, resumed, too_long_on_one_rank(rank)


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


def assert_together(first: tuple, second: tuple, alone: tuple, keys: tuple[str, ...]) -> None:
    """Both ranks have the same weights and statistics, to the bit, and one rank has them but for rounding."""
    assert_same(first[0], alone[0])
    assert all(torch.equal(tensor, second[0][key]) for key, tensor in first[0].items())
    assert first[1] == second[1]
    for ours, theirs in zip(first[1], alone[1], strict=True):
        assert ours["optimizer_steps"] == theirs["optimizer_steps"]
        for key in keys:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in COARSE])
def test_two_ranks_train_what_one_trains(runs, name):
    _, alone, [(first, *_), (second, *_)] = runs
    assert_together(first[name], second[name], alone[name], (*MEANS, "ratio_p10", "ratio_p50", "ratio_p99"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mini-batches", 4),
        ("more mini-batches than rows", 2),
        ("nothing to learn in mini-batches", 1),
    ],
)
def test_steps_are_those_that_have_something_to_teach(runs, name, expected):
    _, _, [(first, *_), _] = runs
    assert [stats["optimizer_steps"] for stats in first[name][1]] == [expected, expected]


@pytest.mark.parametrize("name", OF_CRITIC)
def test_a_critic_learns_on_two_ranks_what_it_learns_on_one(runs, name):
    _, _, [(_, first, *_), (_, second, *_)] = runs
    assert_together(first[name], second[name], critic_step(SETTINGS[name]), ("loss", "grad_norm", "value"))


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
    _, alone, [(_, _, resumed, _), _] = runs
    assert_same(resumed, alone["plain"][0])


def test_rows_that_one_rank_cannot_compute_are_an_error_on_all(runs):
    _, _, [(*_, first), (*_, second)] = runs
    assert "over learner.max_tokens_per_microbatch = 4" in first
    assert second == "another rank cannot compute its rows; its own error says why"
