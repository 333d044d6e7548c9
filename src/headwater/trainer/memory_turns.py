"""The engine and the learner take turns on one GPU: what leaves it before each phase, and what comes back.

with turns.generating():       # the engine's memory is there, and what the plan moves is not
    batch = rollouts.take()
turns.train()                  # the engine's memory is released, as far as the plan says so
...
turns.publishing()             # the weights do not change any more: copies to main memory can begin
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import torch

from headwater.config.schema import Config
from headwater.core.capabilities import MemoryTag
from headwater.core.errors import ConfigError
from headwater.core.learner import Learner
from headwater.core.memory_plan import MOVED, RELEASED, MemoryPlan
from headwater.core.protocols import DiscardingEngine, InferenceEngine

_CACHE: tuple[MemoryTag, ...] = ("kv_cache",)
_GIB = 2**30

Stage = Callable[[str], AbstractContextManager[None]]


def releases_cache(config: Config, plan: MemoryPlan | None) -> bool:
    """Whether the KV cache is on the device only while responses are generated."""
    return config.learner.offload_during_rollout or (plan is not None and plan.ways["kv_cache"] == RELEASED)


class MemoryTurns:
    """Switches between generation and training.

    Without a plan, ``learner.offload_during_rollout`` alone decides: everything of the learner is moved.
    """

    def __init__(
        self,
        config: Config,
        plan: MemoryPlan | None,
        learner: Learner,
        engine: InferenceEngine,
        stage: Stage,
        *,
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        """``stage`` measures the time of a switch, and puts an interrupt off until its end. ``settle`` is called before
        the engine's weights are discarded, and waits for whatever reads them."""
        self._settle = settle
        self.plan = plan
        self._learner = learner
        self._engine = engine
        self._stage = stage
        ways: Mapping[str, str] = plan.ways if plan is not None else {}
        is_told = config.learner.offload_during_rollout
        self._moves_learner = is_told or ways.get("parameters") == MOVED
        self._releases_cache = releases_cache(config, plan)
        self._discarding = _discarding(engine) if ways.get("weights") == RELEASED else None
        """The engine, if its weights are released while the learner trains."""
        self._report: dict[str, float] = {}

    @contextmanager
    def generating(self) -> Iterator[None]:
        """The engine generates inside this block."""
        if not self._moves_learner and not self._releases_cache:
            yield
            return
        is_awake = False
        try:
            with self._stage("offload"):
                if self._moves_learner:
                    self._learner.offload()
                self._note("train")
                if self._releases_cache:
                    is_awake = True  # first, because a part may be awake after an error
                    self._engine.wake(_CACHE)
            yield
        finally:
            with self._stage("offload"):
                self._note("generate")
                try:
                    if is_awake:
                        self._engine.sleep(_CACHE)
                finally:
                    if self._moves_learner:
                        self._learner.onload()

    def train(self) -> None:
        """The learner begins a step. The engine's weights are not needed until new ones are published."""
        if self._discarding is not None and not self._engine.status().needs_weights:
            self._settle()
            with self._stage("offload"):
                self._note("generate")
                self._discarding.discard_weights()

    def publishing(self) -> None:
        """The step is complete: its weights are published, and stay as they are until the next step."""
        if self._moves_learner:
            self._learner.prepare_offload()

    def take_report(self) -> dict[str, float]:
        """Memory of the device at the switches since the last call, in GiB."""
        report, self._report = self._report, {}
        return report

    def _note(self, phase: str) -> None:
        """At the end of a phase: what this process and others use of the device, and what torch has cached of it."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            free, total = torch.cuda.mem_get_info()
            cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            self._report[f"memory/after_{phase}/used_gib"] = (total - free) / _GIB
            self._report[f"memory/after_{phase}/cached_gib"] = cached / _GIB


def _discarding(engine: InferenceEngine) -> DiscardingEngine:
    if not engine.capabilities.discards_weights:
        raise ConfigError(
            [
                "learner.residency: the memory plan releases the engine's weights, and the engine of rollout.backend "
                "cannot do that; use learner.residency=[resident]"
            ]
        )
    return cast(DiscardingEngine, engine)
