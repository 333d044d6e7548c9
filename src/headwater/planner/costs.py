"""What a step costs: the times from which a plan is computed, where they come from, and how they are stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from headwater.core.errors import HeadwaterError
from headwater.core.registry import nearest


@dataclass(frozen=True, kw_only=True)
class GenerationCosts:
    """One inference server. All of its GPUs together."""

    step_s: float
    """A decode step, without what depends on the number of sequences, such as launching kernels."""
    weights_s: float = 0.0
    """Reading the weights once per step. On a GPU the matrix products hide behind it, or it behind them."""
    products_per_sequence_s: float = 0.0
    """The matrix products of one sequence in a step. A step takes the longer of ``weights_s`` and all products."""
    step_per_sequence_s: float = 0.0
    """Added per running sequence: its sampling, and the host's work."""
    step_per_context_token_s: float = 0.0
    """Added per token in the KV cache of the running sequences: reading its keys and values."""
    prefill_per_token_s: float = 0.0
    """Computing one token of a prompt."""
    max_sequences: int = 1024
    """The most sequences that run at the same time."""
    kv_cache_tokens: int = 2**62
    """The tokens for which the KV cache has room."""

    def decode_s(self, num_sequences: int, context: float) -> float:
        """A step of this many sequences, which have this many tokens in the cache together."""
        products = max(self.weights_s, self.products_per_sequence_s * num_sequences)
        others = self.step_per_sequence_s * num_sequences + self.step_per_context_token_s * context
        return self.step_s + products + others


@dataclass(frozen=True, kw_only=True)
class LearnerCosts:
    """The learner, on all of its GPUs together."""

    train_per_token_s: float
    """Training on one token of a prompt or response: forward, backward and its part of the optimiser step. With
    ``learner.share_prompts``, the prompt of a group counts once."""
    experience_per_token_s: float = 0.0
    """Computing log-probs and values before the update, per token."""
    publish_s: float = 0.0
    """Sending a version to the engines, from the first byte until they generate with it."""
    pause_s: float = 0.0
    """The last part of ``publish_s``, in which the engines generate nothing. Before it they generate with the old
    weights."""
    step_s: float = 0.0
    """The rest of a step: advantages, records, calls."""
    step_per_token_s: float = 0.0
    """The controller's own work per token, which more GPUs do not make faster: assembling batches, writing files."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Everything that a simulation needs to know about the machines and the model."""

    generation: GenerationCosts
    learner: LearnerCosts
    source: str = ""
    """Where the times come from, for people."""
    notes: tuple[str, ...] = field(default=())
    """What was assumed and not measured."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> Costs:
        """A file in the format of ``to_json``."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise HeadwaterError(f"--costs {path}: cannot be read ({error})") from error
        except ValueError as error:
            raise HeadwaterError(f"--costs {path}: not JSON ({error})") from error
        if not isinstance(content, dict):
            raise HeadwaterError(f"--costs {path}: must hold an object with generation and learner")
        _check_keys(path, "", content, {"generation", "learner", "source", "notes"})
        generation = _section(path, "generation", content, GenerationCosts)
        learner = _section(path, "learner", content, LearnerCosts)
        return cls(
            generation=GenerationCosts(**generation),
            learner=LearnerCosts(**learner),
            source=str(content.get("source", path)),
            notes=tuple(content.get("notes", ())),
        )


def _section(path: Path, name: str, content: Mapping[str, Any], kind: type) -> dict[str, Any]:
    values = content.get(name)
    if not isinstance(values, dict):
        raise HeadwaterError(
            f"--costs {path}: {name} is missing; write one with `headwater plan RECIPE --write-costs FILE`"
        )
    _check_keys(path, f"{name}.", values, {each.name for each in fields(kind)})
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise HeadwaterError(f"--costs {path}: {name}.{key} = {value!r}: must be a number >= 0")
    first = fields(kind)[0].name
    if not values.get(first):
        raise HeadwaterError(f"--costs {path}: {name}.{first}: must be a number > 0")
    return values


def _check_keys(path: Path, where: str, values: Mapping[str, Any], known: set[str]) -> None:
    for key in values:
        if key not in known:
            raise HeadwaterError(f"--costs {path}: no such key {where}{key}; {nearest(key, sorted(known))}")
