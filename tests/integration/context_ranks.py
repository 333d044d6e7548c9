"""What ``test_context_parallel.py`` runs: the learner's calls on ranks that compute every pack together.

    python tests/integration/context_ranks.py FOLDER NUM_RANKS NUM_CONTEXT CASE ...

Rank 0 writes ``FOLDER/results.pt``. The test makes the same calls on one rank.
"""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from integration.two_ranks import CASES, RESUMED, Case, Observed, error_of, fork_ranks, resume, spec_of, take_steps

from headwater.cluster.torchrun import join
from headwater.learner.build import LearnerSpec, build_learner

RANK_TIMEOUT_S = 7200.0
"""Longer than the limit of the group that the ranks join."""


class Counted(Observed):
    """A learner that also counts the tokens that its rank computes."""

    def watch(self) -> None:
        self.tokens: list[tuple[int, int]] = []
        """Per pass of the policy, the tokens of the pack and the tokens that the layers of this rank got."""
        module = self.actor.engine.module
        packs: list[int] = []
        module.register_forward_pre_hook(lambda _, arguments: packs.append(len(arguments[0].input_ids)))
        module.layers[0].register_forward_pre_hook(
            lambda _, arguments: self.tokens.append((packs[-1], arguments[0].shape[1]))
        )

    def limits(self) -> set[float]:
        """How long a collective operation may take in any of the groups."""
        groups = (dist.group.WORLD, self.actor.engine.module.context.mesh.get_group())
        return {each._get_backend(torch.device("cpu")).options._timeout.total_seconds() for each in groups}

    def counted(self) -> list[tuple[int, int]]:
        return self.tokens


def build(spec: LearnerSpec) -> Counted:
    learner = build_learner(spec)
    learner.__class__ = Counted
    return learner  # type: ignore[return-value]


def split(case: Case, num_context: int) -> Case:
    added = (f"learner.context_parallel={num_context}", f"learner.rank_timeout_s={RANK_TIMEOUT_S}")
    return replace(case, settings=(*case.settings, *added))


def main(folder: Path, num_ranks: int, num_context: int, names: list[str]) -> None:
    torch.set_num_threads(1)
    with closing(join()) as group:
        if group.rank:
            group.serve()
            return
        results: dict[str, Any] = {"taken": {}, "resumed": {}, "held": {}, "tokens": {}, "limits": {}}
        everyone: list[tuple[Any, ...]] = [()] * num_ranks

        def everywhere(method: str) -> list[Any]:
            return group.call(method, everyone)

        for name in names:
            case = split(CASES[name], num_context)
            learner = group.build(build, spec_of(case, folder), timeout_s=300)
            group.call("watch", everyone)
            results["taken"][name] = take_steps(learner, case, folder / "together" / name, everywhere)
            results["held"][name] = group.call("held_bytes", everyone)
            results["tokens"][name] = group.call("counted", everyone)
            results["limits"][name] = group.call("limits", everyone)
            if name in RESUMED and num_ranks > 2:  # the fast test does not look at it
                learner = group.build(build, spec_of(case, folder), timeout_s=300)
                results["resumed"][name] = resume(learner, case, folder / "alone" / name)
        if num_ranks % 3:
            odd = spec_of(split(CASES[names[0]], 3), folder)
            results["uneven"] = error_of(lambda: group.build(build, odd, timeout_s=300))
        if num_context == 2:
            other = replace(spec_of(split(CASES[names[0]], 2), folder), model_path=str(folder / "three_heads"))
            results["heads"] = error_of(lambda: group.build(build, other, timeout_s=300))
        torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    fork_ranks(partial(main, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]), int(sys.argv[2]))
