"""What is computed in float32 although the layers compute in bfloat16 or float16, alike in the engine and the learner.

Two programs with the same weights round the same numbers, but add them in different orders. Where a sum ends near the
border between two numbers of a narrow type, one program rounds it up and the other down. Three places turn this into
different log-probs, and float32 is cheap in each of them (docs/numerics.md has the measurements):

- ``logits``: a logit of 20 has a distance of 0.125 to its neighbours in bfloat16.
- ``rotary``: tables and rotation of queries and keys, rounded once at the end.
- ``residual``: the sum that all layers add to. It is large compared with what one layer adds.

Products have inputs of the narrow type in any case. With float32 layers nothing changes.

Of a vision model, this holds for the layers of its language model: they are those of Qwen2, Qwen3 and Llama. Embeddings
of pictures, which the tower computes in the narrow type without any change, and what Qwen3-VL adds after its first
layers, are converted to float32 when they enter the residual stream, on both sides.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

WIDE: set[str] = {"logits", "rotary", "residual"}
"""Remove a name before an engine and a learner are built to measure what it gives (``benchmarks/mismatch.py``)."""
WIDE_RESIDUAL = ("llama", "mistral", "qwen2", "qwen3", "qwen2_5_vl_text", "qwen3_vl_text")
"""Model types whose layers both sides run with a wide residual stream and wide rotary embeddings."""
NARROW_TYPES = (torch.bfloat16, torch.float16)


def has_wide_logits(dtype: torch.dtype) -> bool:
    """Whether a model whose layers compute in ``dtype`` has float32 logits."""
    return "logits" in WIDE and dtype in NARROW_TYPES


def is_wide(part: str, config: Any, dtype: torch.dtype) -> bool:
    """Whether layers of a model with this config, which compute in ``dtype``, compute ``part`` in float32."""
    return part in WIDE and dtype in NARROW_TYPES and has_wide_layers(config)


def has_wide_layers(config: Any) -> bool:
    """Pre-norm layers, RMS norm, rotary embeddings in halves and gated SiLU."""
    return config.model_type in WIDE_RESIDUAL and config.hidden_act == "silu"


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` in float32, from inputs of any type. It has no gradient."""
    if x.dtype == torch.float32:
        return F.linear(x, weight, bias)
    if not x.is_cuda:  # torch has no product with a wider result type on a CPU
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    product = torch.mm(x, weight.T, out_dtype=torch.float32)
    return product if bias is None else product.add_(bias)
