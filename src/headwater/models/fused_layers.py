"""Norms, rotary embeddings and gated products as one kernel each, for training on CUDA: Liger's, where installed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_ROTARY = "apply_rotary_pos_emb"


def use_fused_layers(model: Any) -> bool:
    """Put Liger's kernels into the layers of ``model``; False where it is not installed or does not know the model."""
    if find_spec("liger_kernel") is None:
        logger.info("liger-kernel is not installed, so layers train unfused and slower: pip install 'headwater[cuda]'")
        return False
    # It looks for each of its backends and warns of every one that is not there.
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from transformers.integrations.liger import apply_liger_kernel

    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        logger.info("liger-kernel has nothing for %s: its layers train unfused", model.config.model_type)
        return False
    modeling = sys.modules[type(model.get_decoder()).__module__]
    before = dict(vars(modeling))
    # Log-probs are read off hidden states, so its losses are not for us.
    apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
    _keep_to_instance(modeling, before)
    return True


class _RotaryByDevice(NamedTuple):
    """The rotary function of a transformers module, which all models of an architecture share: fused on CUDA only."""

    plain: Callable[..., tuple[Tensor, Tensor]]
    fused: Callable[..., tuple[Tensor, Tensor]]

    def __call__(self, query: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        is_plain = not query.is_cuda or torch.compiler.is_compiling()
        return (self.plain if is_plain else self.fused)(query, *rest, **options)


def _keep_to_instance(modeling: Any, before: dict[str, Any]) -> None:
    """Undo what Liger did to the classes of ``modeling``: models made later may live on a CPU, where it cannot run."""
    fused = vars(modeling).get(_ROTARY)
    for name, value in before.items():
        setattr(modeling, name, value)
    plain = before.get(_ROTARY)
    if plain is not None and fused is not None and plain is not fused and not isinstance(plain, _RotaryByDevice):
        setattr(modeling, _ROTARY, _RotaryByDevice(plain, fused))
