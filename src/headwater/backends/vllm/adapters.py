"""LoRA adapters in vLLM (``rollout.publish=adapter``): computed beside the weights, and updated without them.

vLLM knows the adapters of a run under one name and number, which every request names. An update replaces their values
in place (``inside/headwater_vllm_worker.py``), so that it reaches requests that are kept, and vLLM labels their tokens
as it does after an update of all weights. The cache of prompts is separate for every version in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from headwater.backends import BackendContext
from headwater.backends.remote.link import ServerInfo, ServerLink
from headwater.backends.remote.model import RunModel
from headwater.backends.vllm.http import INSIDE, OWN_WORKER
from headwater.backends.vllm.wire import dialect_of
from headwater.core.errors import ConfigError
from headwater.weights.adapter_files import adapted_layers

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's ``--max-lora-rank``."""
_KEY = "rollout.publish = adapter"
_OTHERWISE = "or use rollout.publish=full"


@runtime_checkable
class ComputesAdapters(Protocol):
    """A link to a vLLM that tells for which layers it computes adapters."""

    async def adapter_problem(self, layers: Sequence[str]) -> str: ...


def room_for(rank: int) -> int:
    """The smallest value of ``--max-lora-rank`` that is enough."""
    enough = next((each for each in _RANKS if each >= rank), None)
    if enough is None:
        raise ConfigError(
            [f"lora.rank = {rank}: vLLM computes adapters of at most rank {_RANKS[-1]}; use less, {_OTHERWISE}"]
        )
    return enough


async def check_adapters(
    link: ServerLink, info: ServerInfo, context: BackendContext, model: RunModel, where: str
) -> None:
    """Raise if this vLLM does not compute the adapters that the run publishes."""
    problem = _problem(info, context.config.lora.rank)
    if not problem:
        assert isinstance(link, ComputesAdapters), "a link to vLLM"
        told = await link.adapter_problem(adapted_layers(name for name, _ in model.skeleton.named_parameters()))
        if told:
            problem = f"{told}; name other layers in lora.targets"
    if problem:
        raise ConfigError([f"{_KEY}: {where}: {problem}, {_OTHERWISE}"])


def _problem(info: ServerInfo, rank: int) -> str:
    """What the settings of a server lack for adapters of this rank, and the remedy; empty if nothing."""
    if not dialect_of(info.version).computes_adapters:
        return f"vLLM {info.version} does not take adapters from a run; install vLLM 0.32"
    room = room_for(rank)
    start = f"start it with --enable-lora --max-lora-rank {room}"
    if not info.adapter_rank:
        return f"it was started without adapters; {start}"
    if info.adapter_rank < rank:
        return f"it computes adapters of at most rank {info.adapter_rank}, and lora.rank = {rank}; {start}"
    if not info.has_own_worker:
        its = f"--worker-extension-cls {OWN_WORKER} and PYTHONPATH={INSIDE}"
        return f"its workers cannot take adapters; start it with {its}"
    if not info.loads_adapters:
        return "adapters cannot be given to it while it runs; start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    return ""
