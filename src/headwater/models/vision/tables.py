"""What Qwen's vision towers derive from the grids of pictures: positions, windows, and where they begin.

The layers of transformers derive it in every pass from grids on the device, and wait for the device each time. Made on
the host and given to the tower, it costs one copy that nothing waits for.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)


def tower_tables(visual: Any, grids: Tensor) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Tensors, and the sizes of the largest frame and window, by the names under which the forward pass takes them.

    ``grids`` is on the CPU, and so are the tensors.
    """
    merge = visual.spatial_merge_size
    tensors = {
        "position_ids": get_vision_position_ids(grids, merge),
        "cu_seqlens": get_vision_cu_seqlens(grids),
    }
    largest = {"max_seqlen": _largest(tensors["cu_seqlens"])}
    if hasattr(visual, "fullatt_block_indexes"):
        sizes = {"spatial_merge_size": merge, "window_size": visual.window_size, "patch_size": visual.patch_size}
        tensors["window_index"], tensors["cu_window_seqlens"] = get_vision_window_index(grids, **sizes)
        largest["max_window_seqlen"] = _largest(tensors["cu_window_seqlens"])
    if hasattr(visual, "pos_embed"):
        tensors["interp_indices"], tensors["interp_weights"] = get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=merge,
        )
    return tensors, largest


def _largest(starts: Tensor) -> int:
    return int(starts.diff().max())
