"""The keys and values of everything that is being generated, in pages."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from headwater.config.schema import EngineConfig
from headwater.core.errors import ConfigError
from headwater.engine.free_memory import free_bytes
from headwater.engine.model_spec import ModelSpec

_GIB = 2**30
_SERVER_FRACTION = 0.85
SHARED_FRACTION = 0.4
_GPU_PAGE_TOKENS = 64
_CPU_PAGE_TOKENS = 16
CPU_COPY_BYTES = 64 * 2**20
"""What attention on a CPU copies from the pages of one layer at a time, unless a single sequence takes more."""
CPU_MASK_BYTES = 64 * 2**20
"""And what it needs to tell which keys the queries of prompts see, unless a single query of them takes more."""
_SOUND = 1e18
"""Keys and values up to this size are sound: no product with a query of such a size overflows."""


class KVCache:
    """Per layer, keys and values of ``num_pages`` pages.

    On CUDA a page is ``[kv heads, tokens, head dim]``, so that one head of a page is one piece of memory. On the CPU it
    is ``[tokens, kv heads, head dim]``, so that a token is one piece and pages can be read as a list of tokens.

    On the CPU it also knows which tokens are broken: NaN, infinite, or so large that products of them may be. Pages are
    handed from one sequence to the next as they are, and torch's attention lets such tokens through its masks.
    """

    def __init__(self, spec: ModelSpec, num_pages: int, page_tokens: int) -> None:
        self.spec = spec
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.heads_first = spec.device.type == "cuda"
        self._take(self._allocate())
        self._broken = np.zeros((num_pages, 0 if self.heads_first else page_tokens), np.bool_)
        self.has_broken = False

    @property
    def num_bytes(self) -> int:
        """What it takes up while it is not given back."""
        return self.spec.kv_bytes_per_token * self.page_tokens * self.num_pages

    def _allocate(self) -> Tensor:
        # Zeros: attention multiplies what it masks by zero, and zero times uninitialised memory may be NaN.
        spec, page = self.spec, self.page_tokens
        inner = (spec.num_kv_heads, page) if self.heads_first else (page, spec.num_kv_heads)
        shape = (spec.num_layers, 2, self.num_pages, *inner, spec.head_dim)
        if spec.device.type == "cuda":
            return torch.zeros(shape, dtype=spec.dtype, device=spec.device)
        # numpy asks the system for zeroed memory, which takes up room only once it is written to.
        raw = np.zeros(math.prod(shape) * spec.dtype.itemsize, np.uint8)
        return torch.from_numpy(raw).view(spec.dtype).view(shape)

    def _take(self, storage: Tensor) -> None:
        self._storage = storage
        # Made once: every layer of every step asks for them, and to make one takes as long as to write a few tokens.
        self._layers = [(keys, values) for keys, values in storage]
        self._copies = [storage.new_empty(0), storage.new_empty(0)]
        self._slots = (
            [] if self.heads_first else [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in storage]
        )

    def read(self, index: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of these pages of a layer, in memory that the next call uses again (CPU layout only)."""
        num_pages = len(pages)
        if num_pages > len(self._copies[0]):
            # Kept from pass to pass: asking the system for it again costs more than the copy.
            self._copies = [source.new_empty((num_pages, *source.shape[1:])) for source in self._layers[index]]
        keys, values = self._copies[0][:num_pages], self._copies[1][:num_pages]
        for source, copy in zip(self._layers[index], (keys, values), strict=True):
            torch.index_select(source, 0, pages, out=copy)
        return keys, values

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, page by page."""
        return self._layers[index]

    def store(self, index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write ``[tokens, kv heads, head dim]`` to the tokens' slots."""
        if self.heads_first:
            pages, offsets = slots // self.page_tokens, slots % self.page_tokens
            for cache, new in zip(self.layer(index), (keys, values), strict=True):
                cache[pages, :, offsets] = new
        else:
            for cache, new in zip(self._slots[index], (keys, values), strict=True):
                cache.index_copy_(0, slots, new)
            if self.has_broken or not (_is_sound(keys) and _is_sound(values)):
                self._note_broken(index, keys, values, slots)

    def _note_broken(self, index: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        broken, places = self._broken.reshape(-1), slots.numpy()
        if index == 0:
            broken[places] = False  # a token is written in all layers, and in each before it is read there
        size = torch.maximum(keys.abs().amax(dim=(1, 2)), values.abs().amax(dim=(1, 2)))
        broken[places[~(size <= _limit(size.dtype)).numpy()]] = True
        self.has_broken = bool(broken.any())

    def broken_in(self, pages: Tensor) -> Tensor | None:
        """``[pages, tokens]``: which tokens of ``pages`` are broken; ``None`` where none is (CPU layout only)."""
        if not self.has_broken:
            return None
        broken = self._broken[pages.numpy()]
        return torch.from_numpy(broken) if broken.any() else None

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """What ``sources`` hold is also in ``targets``: the copy of copy-on-write."""
        self._storage[:, :, targets] = self._storage[:, :, sources]
        if self.has_broken:
            self._broken[targets.numpy()] = self._broken[sources.numpy()]

    def free(self) -> None:
        """Give the memory back. What it held is gone."""
        self._take(self._storage.new_empty(0))

    def allocate_again(self) -> None:
        self._take(self._allocate())
        self._broken[:] = False
        self.has_broken = False


def _is_sound(tensor: Tensor) -> bool:
    return bool(tensor.abs().amax().item() <= _limit(tensor.dtype))  # no comparison with NaN is true


def _limit(dtype: torch.dtype) -> float:
    return min(_SOUND, torch.finfo(dtype).max)


def page_tokens_for(config: EngineConfig, device: torch.device) -> int:
    size = config.page_tokens or (_GPU_PAGE_TOKENS if device.type == "cuda" else _CPU_PAGE_TOKENS)
    if size & (size - 1):
        raise ConfigError([f"engine.page_tokens = {size}: must be a power of two; use 16, 32 or 64"])
    return size


def num_pages_for(
    spec: ModelSpec,
    config: EngineConfig,
    *,
    max_sequences: int,
    max_prefill_tokens: int,
    page_tokens: int,
    is_shared: bool,
) -> int:
    """How many pages fit into what is free, and no more than all sequences at full length could fill.

    ``is_shared`` says that a learner lives on the same device and needs its part.
    """
    page_bytes = spec.kv_bytes_per_token * page_tokens
    most = max_sequences * math.ceil(spec.max_positions / page_tokens) + 1  # see RequestLimits for the one more
    if config.kv_cache_gib:
        num_bytes = int(config.kv_cache_gib * _GIB)
        setting = f"engine.kv_cache_gib = {config.kv_cache_gib:g}"
    else:
        on_cpu = spec.device.type == "cpu"
        fraction = config.memory_fraction or (SHARED_FRACTION if is_shared or on_cpu else _SERVER_FRACTION)
        num_free = free_bytes(spec.device)
        num_free -= _workspace_bytes(spec, max_sequences, max_prefill_tokens) + _copy_bytes(spec, num_free)
        num_free = max(0, num_free)
        num_bytes = int(num_free * fraction)
        setting = (
            f"engine.memory_fraction = {fraction:g} of {num_free / _GIB:.4f} GiB that {spec.device} has left for the "
            f"cache with engine.max_sequences = {max_sequences} and engine.max_prefill_tokens = {max_prefill_tokens}"
        )
    num_pages = min(num_bytes // page_bytes, most)
    if num_pages < 2:
        raise ConfigError(
            [
                f"{setting}: one page of {page_tokens} tokens takes {page_bytes / _GIB:.4f} GiB and fewer than two "
                "fit; give the cache more, lower the other settings, or free memory"
            ]
        )
    return num_pages + 1  # the scratch page


def _workspace_bytes(spec: ModelSpec, max_sequences: int, max_prefill_tokens: int) -> int:
    """What a pass needs for itself: activations of a batch of prompts, logits, and the sort of a cut distribution."""
    activations = max_prefill_tokens * (6 * spec.hidden_size + 3 * spec.intermediate_size) * spec.dtype.itemsize
    # Of every logit: itself, in float32, sorted, its place, and the probabilities and sums that decide the cut.
    per_logit = spec.dtype.itemsize + 4 + 4 + 8 + 4 + 4
    return activations + max_sequences * spec.vocab_size * per_logit


def _copy_bytes(spec: ModelSpec, num_free: int) -> int:
    """What attention on a CPU copies from the cache at a time, see ``attention.cpu``."""
    if spec.device.type != "cpu":
        return 0
    # A single sequence is copied whole, one layer of it; and no sequence is longer than the whole cache.
    longest = min(spec.kv_bytes_per_token * spec.max_positions, num_free) // spec.num_layers
    # Twice: a copy without the tokens that are broken, where there are any.
    return 2 * max(CPU_COPY_BYTES, longest) + CPU_MASK_BYTES
