"""The paged KV cache, and how many pages fit into the free memory."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.config.schema import EngineConfig
from headwater.core.errors import ConfigError
from headwater.engine.model_spec import ModelSpec
from headwater.engine.rows import upload
from headwater.models.device import available_ram as available_ram
from headwater.models.device import free_bytes as free_bytes
from headwater.models.virtual_memory import AddressRange

_GIB = 2**30
_GPU_PAGE_TOKENS = 64
_CPU_PAGE_TOKENS = 16
CPU_COPY_BYTES = 64 * 2**20
"""Maximum size of the copy that CPU attention makes of one layer's pages, unless a single sequence is larger."""
CPU_MASK_BYTES = 64 * 2**20
"""Maximum size of the masks in CPU attention over prompts, unless a single query needs more."""
_PAGE_COPY_BYTES = 64 * 2**20
"""Maximum size of the temporary copy when pages are copied for the samples of a prompt, unless one page is larger."""
_SOUND = 1e18
"""Keys and values up to this magnitude are sound: a product with a query of that magnitude does not overflow."""


class KVCache:
    """Keys and values of ``num_pages`` pages, per layer.

    On CUDA a page is ``[kv heads, tokens, head dim]``: one head of a page is contiguous. On a CPU it is
    ``[tokens, kv heads, head dim]``: a token is contiguous, and pages can be read as a list of tokens.

    On a CPU the cache also records which tokens are broken: NaN, infinite, or so large that products of them may
    overflow. Pages are reused without clearing, and the masks of torch's attention do not stop such values.

    With ``keeps_address``, the tensors have the same addresses after ``free`` and ``allocate_again``.
    """

    def __init__(self, spec: ModelSpec, num_pages: int, page_tokens: int, *, keeps_address: bool = False) -> None:
        self.spec = spec
        self.keeps_address = keeps_address
        self._range: AddressRange | None = None
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.heads_first = spec.device.type == "cuda"
        self._take(self._allocate())
        self._broken = np.zeros((num_pages, 0 if self.heads_first else page_tokens), np.bool_)
        self.has_broken = False

    @property
    def num_bytes(self) -> int:
        """Size of the cache while its memory is allocated."""
        return self.spec.kv_bytes_per_token * self.page_tokens * self.num_pages

    def _allocate(self) -> Tensor:
        # Attention multiplies masked values by zero, and zero times uninitialised memory may be NaN.
        spec, page = self.spec, self.page_tokens
        inner = (spec.num_kv_heads, page) if self.heads_first else (page, spec.num_kv_heads)
        shape = (spec.num_layers, 2, self.num_pages, *inner, spec.head_dim)
        if self.keeps_address:
            if self._range is None:
                self._range = AddressRange(math.prod(shape) * spec.dtype.itemsize, spec.device)
            return self._range.tensor(shape, spec.dtype).zero_()
        if spec.device.type == "cuda":
            return torch.zeros(shape, dtype=spec.dtype, device=spec.device)
        # numpy requests zeroed memory from the system, which uses physical memory only once it is written.
        raw = np.zeros(math.prod(shape) * spec.dtype.itemsize, np.uint8)
        return torch.from_numpy(raw).view(spec.dtype).view(shape)

    def _take(self, storage: Tensor) -> None:
        self._storage = storage
        # Created once: every layer of every step needs these views, and creating one costs as much as a small write.
        self._layers = [(keys, values) for keys, values in storage]
        self._copies = [storage.new_empty(0), storage.new_empty(0)]
        self._slots = (
            [] if self.heads_first else [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in storage]
        )

    def read(self, index: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of these pages of a layer. The next call reuses the returned memory (CPU layout only)."""
        num_pages = len(pages)
        if num_pages > len(self._copies[0]):
            # Kept between passes: allocating this memory again costs more than the copy.
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
            broken[places] = False  # a token is written to every layer before it is read there
        size = torch.maximum(keys.abs().amax(dim=(1, 2)), values.abs().amax(dim=(1, 2)))
        broken[places[~(size <= _limit(size.dtype)).numpy()]] = True
        self.has_broken = bool(broken.any())

    def broken_in(self, pages: Tensor) -> Tensor | None:
        """Which tokens of ``pages`` are broken, ``[pages, tokens]``; ``None`` if none is (CPU layout only)."""
        if not self.has_broken:
            return None
        broken = self._broken[pages.numpy()]
        return torch.from_numpy(broken) if broken.any() else None

    def copy_pages(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Copy the contents of the pages ``sources`` to the pages ``targets`` (copy-on-write).

        A page may be a source first and a target later, if its prompt has left the cache in between.
        """
        if self.has_broken:
            self._broken[targets] = self._broken[sources]
        both = upload(torch.from_numpy(np.stack([sources, targets])), self.spec.device)
        if self.heads_first and not np.isin(targets, sources).any():
            from headwater.engine.kernels.paging import copy_pages  # Triton needs a GPU

            copy_pages(self._storage, *both)
        else:
            self._copy_in_slices(*both)

    def _copy_in_slices(self, sources: Tensor, targets: Tensor) -> None:
        """In the given order. A thousand samples that start together would need gigabytes at once."""
        num_slice = max(1, _PAGE_COPY_BYTES // (self.spec.kv_bytes_per_token * self.page_tokens))
        for source, target in zip(torch.split(sources, num_slice), torch.split(targets, num_slice), strict=True):
            self._storage[:, :, target] = self._storage[:, :, source]

    def free(self) -> None:
        """Release the memory. The contents are lost."""
        if self._range is not None:
            self._range.unmap()
        else:
            self._take(self._storage.new_empty(0))

    def allocate_again(self) -> None:
        if self._range is not None:
            self._range.map()
            self._storage.zero_()
        else:
            self._take(self._allocate())
        self._broken[:] = False
        self.has_broken = False


def _is_sound(tensor: Tensor) -> bool:
    return bool(tensor.abs().amax().item() <= _limit(tensor.dtype))  # false for NaN


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
    num_media_bytes: int = 0,
) -> int:
    """Number of pages that fit into free memory, at most as many as all sequences at full length could use.

    ``is_shared`` means that a learner on the same device needs part of the memory. ``num_media_bytes`` are for the
    vision tower and its features.
    """
    page_bytes = spec.kv_bytes_per_token * page_tokens
    most = max_sequences * math.ceil(spec.max_positions / page_tokens) + 1  # RequestLimits explains the additional page
    if config.kv_cache_gib:
        num_bytes = int(config.kv_cache_gib * _GIB)
        setting = f"engine.kv_cache_gib = {config.kv_cache_gib:g}"
    else:
        fraction = config.chosen_memory_fraction(has_gpu_alone=spec.device.type == "cuda" and not is_shared)
        num_free = free_bytes(spec.device)
        num_free -= _workspace_bytes(spec, max_sequences, max_prefill_tokens) + _copy_bytes(spec, num_free)
        num_free -= _page_copy_bytes(page_bytes, max_sequences) + num_media_bytes
        num_free = max(0, num_free)
        num_bytes = int(num_free * fraction)
        setting = (
            f"engine.memory_fraction = {fraction:g} of the {num_free / _GIB:.4f} GiB left on {spec.device} "
            f"with engine.max_sequences = {max_sequences} and engine.max_prefill_tokens = {max_prefill_tokens}"
        )
    num_pages = min(num_bytes // page_bytes, most)
    if num_pages < 2:
        raise ConfigError(
            [
                f"{setting}: one page of {page_tokens} tokens needs {page_bytes / _GIB:.4f} GiB, and fewer than two "
                "pages fit; raise this setting, lower the others, or free memory"
            ]
        )
    return num_pages + 1  # the scratch page


def _workspace_bytes(spec: ModelSpec, max_sequences: int, max_prefill_tokens: int) -> int:
    """Memory of one forward pass: activations of a batch of prompts, logits, and the sort for truncated sampling."""
    activations = max_prefill_tokens * (6 * spec.hidden_size + 3 * spec.intermediate_size) * spec.dtype.itemsize
    # The residual stream is float32.
    activations += max_prefill_tokens * spec.hidden_size * (4 - spec.dtype.itemsize)
    # Per logit, in float32: the logit, a copy, the sorted copy, its index, and the probabilities and cumulative sums.
    per_logit = 4 + 4 + 4 + 8 + 4 + 4
    return activations + max_sequences * spec.vocab_size * per_logit


def _page_copy_bytes(page_bytes: int, max_sequences: int) -> int:
    """Temporary memory of ``KVCache.copy_pages``. Every sample of a prompt but one copies its partly filled page."""
    return max(page_bytes, min(_PAGE_COPY_BYTES, (max_sequences - 1) * page_bytes))


def _copy_bytes(spec: ModelSpec, num_free: int) -> int:
    """Memory for the copies that attention on a CPU makes of the cache, see ``attention.cpu``."""
    if spec.device.type != "cpu":
        return 0
    # One layer of a single sequence is copied as a whole, and no sequence is longer than the whole cache.
    longest = min(spec.kv_bytes_per_token * spec.max_positions, num_free) // spec.num_layers
    # Twice, because broken tokens require a second copy without them.
    return 2 * max(CPU_COPY_BYTES, longest) + CPU_MASK_BYTES
