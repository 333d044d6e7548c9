"""The vision tower of an engine: pictures of many prompts in one pass, in a few large operations.

The layers of transformers launch about forty small kernels each, and read the grids of the pictures back from the
device several times in a pass, which stops the engine from queueing work ahead. Here a layer is nine operations, and
everything that follows from grids is made on the host. The results differ only by rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from headwater.engine.media import Tower
from headwater.engine.runners.decoder import CpuOps, DecoderOps, Projection
from headwater.models.upload import upload
from headwater.models.vision import MediaFeatures, VisionProcessor, VisionTower
from headwater.models.vision.architecture import GATED_ALIGNMENT
from headwater.models.vision.attention import attend_within
from headwater.models.vision.grids import GridShape, PatchLayout
from headwater.models.vision.qwen import QwenFamily, kind_of, patches_of

_PACKED = ("qwen2_5_vl", "qwen3_vl")


def make_tower(model: Any, processor: VisionProcessor) -> Tower:
    """The fastest tower for this model."""
    if not _can_pack(model):
        return VisionTower(model, processor)
    if model.device.type != "cuda":
        return PackedTower(model, processor.family, CpuOps())
    from headwater.engine.runners.cuda import CudaOps  # needs Triton, which only CUDA builds of torch install

    return PackedTower(model, processor.family, CudaOps())


def num_copied_bytes(model: Any) -> int:
    """Device memory that the tower of ``make_tower`` uses for copies of weights."""
    if not _can_pack(model):
        return 0
    blocks = [block for block in _visual(model).blocks if _is_gated(block)]
    return sum(3 * _padded_width(each.mlp) * each.mlp.gate_proj.in_features * model.dtype.itemsize for each in blocks)


def _can_pack(model: Any) -> bool:
    if model.config.model_type not in _PACKED:
        return False
    visual = _visual(model)
    if any(_is_gated(block) for block in visual.blocks) and visual.config.hidden_act != "silu":
        return False
    return not any("lora_A" in name for name, _ in visual.named_parameters())


def _visual(model: Any) -> Any:
    return getattr(model, model.base_model_prefix).visual


def _is_gated(block: Any) -> bool:
    return hasattr(block.mlp, "gate_proj")


@dataclass(frozen=True)
class _Attention:
    """Which patches attend to one another."""

    starts: Tensor
    longest: int


@dataclass(frozen=True)
class _Pass:
    """What follows from the grids of the pictures of one pass, on the device."""

    cos: Tensor
    sin: Tensor
    within_windows: _Attention
    within_frames: _Attention


@dataclass(frozen=True)
class _GatedWeights:
    """Copies of the weights of a gated layer. Gate and up are one product, and zeros fill the width up."""

    gate_up: Projection
    down: Projection


class PackedTower:
    """The tower of Qwen2.5-VL or Qwen3-VL. It reads the model's own weights, except copies of gated layers.

    It takes the inputs of a ``QwenFamily`` and, in less time, its ``level_inputs``.
    """

    def __init__(self, model: Any, family: Any, ops: DecoderOps) -> None:
        self._visual = visual = _visual(model)
        self._ops = ops
        self._device: torch.device = model.device
        config = visual.config
        window = 0
        if hasattr(visual, "fullatt_block_indexes"):
            window = int(config.window_size) // int(config.spatial_merge_size) // int(config.patch_size)
        table = visual.pos_embed.num_embeddings if hasattr(visual, "pos_embed") else 0
        self._shape = GridShape(int(config.spatial_merge_size), window, int(table**0.5))
        self._whole = set(getattr(visual, "fullatt_block_indexes", ()))
        """Blocks that attend to whole frames although the tower has windows."""
        self._deep = list(getattr(visual, "deepstack_visual_indexes", ()))
        self._copies: list[_GatedWeights | None] = []
        self._family: QwenFamily = family
        like = visual.patch_embed.proj.weight
        self._tables = {kind: patches.table.to(like) for kind, patches in family.patches.items()}

    def weights_changed(self) -> None:
        self._copies = []

    @torch.inference_mode()
    def of_inputs(self, inputs: Sequence[Mapping[str, Tensor]]) -> list[MediaFeatures]:
        made = [patches_of(each) for each in inputs]
        layout = PatchLayout.of([grid for _, grid in made], self._shape)
        sizes = [grid[0] * grid[1] * grid[2] // self._shape.merge_size**2 for _, grid in made]
        hidden = self._embedded(self._patches(inputs, [pixels for pixels, _ in made]), layout)
        back = None
        if self._shape.window_tokens:
            order, back = self._uploaded(layout.patch_order(self._shape), layout.token_places())
            hidden = hidden[order]
        merged, deep = self._blocks(hidden, self._pass_of(layout))
        parts = [torch.split(each if back is None else each[back], sizes) for each in (merged, *deep)]
        return [MediaFeatures(own, tuple(layers)) for own, *layers in zip(*parts, strict=True)]

    def _patches(self, inputs: Sequence[Mapping[str, Tensor]], pixels: list[Tensor]) -> Tensor:
        """The patches of all pictures, on the device."""
        uploaded = upload(pixels, self._device)
        # The bytes of neighbours of one kind become numbers together. A single frame is shorter than others.
        kinds = [(kind_of(each), own.dtype, own.shape[1]) for each, own in zip(inputs, uploaded, strict=True)]
        parts = []
        for (kind, dtype, _), group in groupby(range(len(kinds)), kinds.__getitem__):
            part = torch.cat([uploaded[place] for place in group])
            is_level = dtype == torch.uint8
            parts.append(self._family.patches[kind].values(part, self._tables[kind]) if is_level else part)
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _embedded(self, patches: Tensor, layout: PatchLayout) -> Tensor:
        projection = self._visual.patch_embed.proj
        weight = projection.weight.flatten(1)
        hidden = F.linear(patches.to(weight.dtype), weight, projection.bias)
        if layout.taps.shape[1]:
            taps, shares = self._uploaded(layout.taps, layout.shares)
            table = self._visual.pos_embed.weight
            # One after the other: four embeddings of every patch in float32 would need the most memory of the pass.
            positions = sum(table[taps[:, each]] * shares[:, each, None] for each in range(layout.taps.shape[1]))
            assert isinstance(positions, Tensor)
            hidden += positions.to(hidden.dtype)
        return hidden

    def _pass_of(self, layout: PatchLayout) -> _Pass:
        numbers = layout.places, _starts(layout.windows), _starts(layout.frames)
        places, windows, frames = self._uploaded(*numbers)
        frequencies = self._visual.rotary_pos_emb.inv_freq.to(self._device).float()
        angles = (places.float()[:, :, None] * frequencies).transpose(0, 1).flatten(1)
        return _Pass(
            angles.cos(),
            angles.sin(),
            _Attention(windows, int(layout.windows.max())),
            _Attention(frames, int(layout.frames.max())),
        )

    def _blocks(self, residual: Tensor, tables: _Pass) -> tuple[Tensor, list[Tensor]]:
        """What the projectors make of the output of the last block, and of blocks before it."""
        visual, ops = self._visual, self._ops
        if not self._copies:
            self._copies = [_copied(block.mlp) if _is_gated(block) else None for block in visual.blocks]
        deep = []
        norms = [*(block.norm1 for block in visual.blocks[1:]), None]
        hidden = self._norm(residual, visual.blocks[0].norm1)
        for index, (block, next_norm, gated) in enumerate(zip(visual.blocks, norms, self._copies, strict=True)):
            is_within_window = self._shape.window_tokens and index not in self._whole
            attention = tables.within_windows if is_within_window else tables.within_frames
            attended = self._attended(block.attn, hidden, tables, attention)
            hidden = self._add_and_norm(attended, _projection(block.attn.proj), residual, block.norm2)
            if gated is not None:
                hidden = ops.gated_linear(hidden, gated.gate_up.weight, gated.gate_up.bias)
                down = gated.down
            else:
                hidden = block.mlp.act_fn(block.mlp.linear_fc1(hidden))
                down = _projection(block.mlp.linear_fc2)
            hidden = self._add_and_norm(hidden, down, residual, next_norm)
            if index in self._deep:
                deep.append(visual.deepstack_merger_list[self._deep.index(index)](residual))
        return visual.merger(residual), deep

    def _attended(self, layer: Any, hidden: Tensor, tables: _Pass, attention: _Attention) -> Tensor:
        qkv = self._ops.linear(hidden, layer.qkv.weight, layer.qkv.bias)
        heads = qkv.view(len(qkv), 3 * layer.num_heads, -1)
        _rotate(heads, tables, 2 * layer.num_heads)
        query, key, value = heads.view(len(qkv), 3, layer.num_heads, -1).unbind(1)
        return attend_within(query, key, value, attention.starts, attention.longest, layer.scaling).flatten(1)

    def _norm(self, x: Tensor, norm: Any) -> Tensor:
        if isinstance(norm, torch.nn.LayerNorm):
            return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
        return self._ops.rms_norm(x, norm.weight, norm.variance_epsilon)

    def _add_and_norm(self, x: Tensor, projection: Projection, residual: Tensor, norm: Any) -> Tensor:
        """Add a product to ``residual`` in place, and return the norm of the sum. Without one, return the sum."""
        if norm is not None and not isinstance(norm, torch.nn.LayerNorm):
            return self._ops.linear_add_rms_norm(x, projection, residual, norm.weight, norm.variance_epsilon)
        residual += self._ops.linear(x, projection.weight, projection.bias)
        return residual if norm is None else self._norm(residual, norm)

    def _uploaded(self, *values: NDArray[Any]) -> list[Tensor]:
        return upload([torch.from_numpy(each) for each in values], self._device)


def _projection(layer: Any) -> Projection:
    return Projection(layer.weight, layer.bias)


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


def _rotate(heads: Tensor, tables: _Pass, num_rotated: int) -> None:
    """Rotate queries and keys in place, in float32."""
    if heads.is_cuda:
        from headwater.engine.kernels.head_rotation import rotate_heads  # needs Triton

        rotate_heads(heads, tables.cos, tables.sin, num_rotated)
        return
    low, high = heads[:, :num_rotated].float().chunk(2, dim=-1)
    cos, sin = tables.cos[:, None], tables.sin[:, None]
    heads[:, :num_rotated] = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(heads.dtype)


def _padded_width(mlp: Any) -> int:
    return int(-(-mlp.gate_proj.out_features // GATED_ALIGNMENT) * GATED_ALIGNMENT)


def _copied(mlp: Any) -> _GatedWeights:
    width, size = _padded_width(mlp), mlp.gate_proj.out_features
    weight = mlp.gate_proj.weight
    gate_up, bias = weight.new_zeros(2 * width, weight.shape[1]), weight.new_zeros(2 * width)
    for start, layer in ((0, mlp.gate_proj), (width, mlp.up_proj)):
        gate_up[start : start + size] = layer.weight
        if layer.bias is not None:
            bias[start : start + size] = layer.bias
    down = weight.new_zeros(weight.shape[1], width)
    down[:, :size] = mlp.down_proj.weight
    return _GatedWeights(Projection(gate_up, bias), Projection(down, mlp.down_proj.bias))
