"""Fused rotary embeddings and gated products in Qwen's vision towers, for training on CUDA, with Liger's kernels.

The layers of transformers read and write all numbers of a tower many times between two products. The kernels do it
once. The gated layers of Qwen2.5-VL have a width of 3420, for which cuBLAS has no fast kernels: it needs rows of eight
bfloat16 numbers or a multiple of that. So their weights are filled up with zeros.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from headwater.models.vision.architecture import GATED_ALIGNMENT

_ACTIVATIONS = ("silu", "swish")


def fuse_gated_layers(visual: Any) -> None:
    """Gated layers, which Qwen2.5-VL's tower has and Qwen3-VL's has not, compute their products in aligned widths."""
    if visual.config.hidden_act not in _ACTIVATIONS:
        return
    for block in visual.blocks:
        if hasattr(block.mlp, "gate_proj"):
            block.mlp.forward = MethodType(_gated, block.mlp)


def fused_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The rotary function of the towers: ``[patches, heads, head dim]``, in float32, rounded once at the end."""
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    # The kernel computes in the type of the tables, and reads and writes queries and keys in theirs.
    rotated = liger_rotary_pos_emb(
        query[None].transpose(1, 2), key[None].transpose(1, 2), cos.float()[None], sin.float()[None]
    )
    query, key = (each.transpose(1, 2)[0] for each in rotated)
    return query, key


def _gated(mlp: Any, hidden_state: Tensor) -> Tensor:
    from liger_kernel.ops import LigerSiLUMulFunction

    layers = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    missing = -mlp.gate_proj.out_features % GATED_ALIGNMENT
    if not missing or any(type(each) is not nn.Linear for each in layers):  # adapters have their own products
        gated: Tensor = LigerSiLUMulFunction.apply(mlp.gate_proj(hidden_state), mlp.up_proj(hidden_state))
        output: Tensor = mlp.down_proj(gated)
        return output
    gate, up = (
        F.linear(hidden_state, F.pad(each.weight, (0, 0, 0, missing)), _padded(each.bias, missing))
        for each in layers[:2]
    )
    gated = LigerSiLUMulFunction.apply(gate, up)
    return F.linear(gated, F.pad(mlp.down_proj.weight, (0, missing)), mlp.down_proj.bias)


def _padded(bias: Tensor | None, missing: int) -> Tensor | None:
    return None if bias is None else F.pad(bias, (0, missing))
