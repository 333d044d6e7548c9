"""The host does not wait for the device between the micro-batches of a step.

The model is on torch's meta device, whose tensors have no values: whatever needs a value of a tensor fails, as does a
copy to main memory. On a GPU, each of these is a wait for everything that is queued.
"""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from learner.test_engine import experience
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headwater.algorithms.corrections import CORRECTIONS
from headwater.algorithms.masked import StepTotals
from headwater.algorithms.policy_losses import POLICY_LOSSES
from headwater.config.schema import AlgorithmConfig, LearnerConfig
from headwater.learner import packing
from headwater.learner.actor import Actor
from headwater.learner.engine import TrainEngine
from headwater.learner.packed_module import _CHUNK_ELEMENTS, PolicyModule
from headwater.learner.packing import Pack
from headwater.learner.ranks import Ranks
from headwater.learner.step_sums import StepSums
from headwater.models import packed_attention
from headwater.models.upload import upload

META = torch.device("meta")


class Copies(TorchDispatchMode):
    """Lists operations that take a tensor of main memory to the device by themselves, and counts uploads."""

    def __init__(self) -> None:
        super().__init__()
        self.direct: list[str] = []
        self.num_uploads = 0
        self._uploads = False

    def upload(self, tensors: list[Tensor], device: torch.device) -> list[Tensor]:
        self.num_uploads += 1
        self._uploads = True
        try:
            return upload(tensors, device)
        finally:
            self._uploads = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        # Single numbers are passed to kernels by value.
        from_host = any(each.device.type == "cpu" and each.ndim for each in given)
        if from_host and any(each.is_meta for each in (*given, *made)) and not self._uploads:
            self.direct.append(str(function))
        return result


@pytest.fixture
def copies(monkeypatch):
    monkeypatch.setitem(_CHUNK_ELEMENTS, "meta", 2000)  # several chunks of logits in a micro-batch
    watched = Copies()
    for module in (packing, packed_attention):
        monkeypatch.setattr(module, "upload", watched.upload)
    return watched


@pytest.fixture(scope="module")
def train_engine():
    config = LearnerConfig(max_tokens_per_microbatch=24, max_tokens_per_forward_pass=24, skip_zero_advantages=False)
    return TrainEngine(PolicyModule(tiny.model().to("meta"), temperature=0.7), config)


def actor_of(engine: TrainEngine, policy_loss: str = "ppo", corrections: tuple[str, ...] = ()) -> Actor:
    return Actor(
        engine,
        POLICY_LOSSES.resolve(policy_loss),
        AlgorithmConfig(old_logprobs="rollout", entropy_bonus=0.01),
        loss_width=8,
        corrections={name: CORRECTIONS.resolve(name) for name in corrections},
    )


def noted_passes(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> list[Pack]:
    passes: list[Pack] = []
    packs = actor.engine.packs

    def noted(*arguments: Any) -> Any:
        for pack, counts in packs(*arguments):
            passes.append(pack)
            yield pack, counts

    monkeypatch.setattr(actor.engine, "packs", noted)
    return passes


def update(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> int:
    """Update on the meta device, where only the statistics, at the end, have made-up values; returns their reads."""
    reads = []

    def read(sums: StepSums, *arguments: Any, **options: Any) -> Any:
        reads.append(sums)
        return {"loss": 0.0}, [1.0]

    monkeypatch.setattr(StepSums, "read", read)
    monkeypatch.setattr(actor.engine.optimizer, "step", lambda *_: {"skipped_steps": 0.0})
    actor.update(experience(1))
    return len(reads)


def test_a_copy_that_is_no_upload_is_seen(copies):
    on_device = torch.zeros(3, 2, device=META)
    with copies:
        copies.upload([torch.ones(2)], META)
        on_device + 1.0
        assert (copies.direct, copies.num_uploads) == ([], 1)
        on_device[torch.tensor([0, 2])]
        torch.ones(2).to(META)
        assert len(copies.direct) == 2


def test_an_update_reads_the_device_once_per_optimiser_step(train_engine, copies, monkeypatch):
    actor = actor_of(train_engine)
    passes = noted_passes(actor, monkeypatch)
    with copies:
        assert update(actor, monkeypatch) == 1
    assert len(passes) > 3
    assert copies.direct == []


def test_log_probs_are_read_once_at_the_end(train_engine, copies, monkeypatch):
    actor = actor_of(train_engine)
    passes = noted_passes(actor, monkeypatch)
    with copies, pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        actor.engine.compute(experience(1))
    assert sum(len(pack.rows) for pack in passes) == 12
    assert len(passes) > 3
    assert copies.direct == []


def test_the_statistics_and_the_norm_are_one_transfer():
    """``read`` fails at its first copy to main memory; all that it copies is in it."""
    sums, copied = StepSums(META), []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if (kwargs or {}).get("device") == torch.device("cpu"):
                copied.append(args[0].shape)
                return torch.zeros(args[0].shape, dtype=args[0].dtype)
            return function(*args, **(kwargs or {}))

    sums.add({"value": torch.ones(1, 2, device=META)}, torch.ones(1, 2, device=META))
    with Noted():
        statistics, (norm,) = sums.read(Ranks(), [torch.ones((), device=META)], has_gap=True)
    assert len(copied) == 1
    assert (statistics["value"], norm) == (0.0, 0.0)


def waits(actor: Actor) -> bool:
    """Whether the loss of a micro-batch, or its statistics, need a value."""
    micro = experience(1).to(META)
    outputs = {name: torch.zeros(12, 7, device=META, requires_grad=True) for name in ("logprobs", "entropy")}
    totals = StepTotals(84, 12, 8)
    try:
        actor.engine._backward(outputs, micro, actor.token_losses, "token-mean", totals, StepSums(META))
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error).lower():
            raise
        return True
    return False


def test_losses_and_corrections_do_not_wait_unless_they_rank_the_tokens_of_a_micro_batch(train_engine):
    """The three that do take a number of tokens from a sorted list, and the number depends on the mask."""
    losses = {name for name in POLICY_LOSSES.names() if waits(actor_of(train_engine, name))}
    corrections = {name for name in CORRECTIONS.names() if waits(actor_of(train_engine, corrections=(name,)))}
    assert (losses, corrections) == ({"clip_cov", "kl_cov"}, {"m2po"})
