"""Embeddings of images and videos for prompts: the vision tower runs once per picture, and a cache keeps what it made.

The cache is keyed by content, so the samples of a group, the chunks of a prompt and later turns of a conversation
share the features of a picture. The weights of the tower may change: then everything in the cache is dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from headwater.core.byte_cache import ByteCache
from headwater.core.media import MediaContent, PlacedMedia
from headwater.engine.batch_media import BatchMedia
from headwater.engine.media_reader import Inputs, MediaFailed, MediaReader
from headwater.engine.rows import upload
from headwater.models.memory_sizes import GPU_TOWER_NUMBERS
from headwater.models.vision import MediaFeatures

_CPU_TOWER_NUMBERS = 8 * 2**20
"""Maximum size of the pictures, as tensors, that the tower computes together on a CPU, unless one picture is larger."""
_AHEAD_TOKENS = 4096
"""How many tokens pictures must have to be computed before their requests have entered: eight pictures of 512."""


@dataclass(frozen=True)
class MediaInputs:
    """What media change about one pass of the decoder, on its device."""

    places: Tensor
    """The tokens that stand for media."""
    embeddings: Tensor
    """``[places, hidden]``: they replace the embeddings of these tokens."""
    deep: tuple[Tensor, ...] = ()
    """``[places, hidden]`` for each of the first layers: they are added to its output."""
    rotary: Tensor | None = None
    """``[3, tokens]``: the rotary positions of all tokens. ``None`` if they are the positions in the sequence."""

    def of_block(self, start: int, end: int, num_rows: int) -> MediaInputs:
        """The same for some of the tokens, with positions for ``num_rows`` tokens (for a CPU)."""
        first, last = torch.searchsorted(self.places, torch.tensor([start, end])).tolist()
        rotary = None
        if self.rotary is not None:
            own = self.rotary[:, start:end]
            rotary = torch.nn.functional.pad(own, (0, num_rows - own.shape[1]))
        part = slice(first, last)
        return MediaInputs(
            self.places[part] - start, self.embeddings[part], tuple(each[part] for each in self.deep), rotary
        )


class Tower(Protocol):
    """What turns the tensors of pictures into features."""

    def of_inputs(self, inputs: Sequence[Mapping[str, Tensor]]) -> list[MediaFeatures]:
        """The features of several pictures, whose tensors are on the host."""
        ...

    def weights_changed(self) -> None:
        """Called when the weights of the model have changed, and before they leave the device."""
        ...


class TowerClock:
    """How long the vision tower has computed. A GPU tells it later, so nothing waits for the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._passes: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        """Beginnings and ends on the device that are not counted yet."""
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what is computed in this block."""
        if not self._is_cuda:
            began = time.perf_counter()
            try:
                yield
            finally:
                self.seconds += time.perf_counter() - began
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        yield  # a pass that fails is not timed: the device may be unable to record anything
        end.record()
        self._passes.append((begin, end))

    def collect(self) -> None:
        """Add the passes that the device has completed."""
        while self._passes and self._passes[0][1].query():  # type: ignore[no-untyped-call]
            begin, end = self._passes.popleft()
            self.seconds += begin.elapsed_time(end) / 1000


class MediaEncoder:
    """The vision tower of a model, and the features it has computed. The engine's thread owns it."""

    def __init__(self, model: Any, tower: Tower, reader: MediaReader, max_bytes: int, *, deterministic: bool) -> None:
        """``deterministic``: the features of a picture do not depend on which others are computed with it."""
        self._tower = tower
        self._reader = reader
        self._device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        self._hidden_size: int = model.config.get_text_config().hidden_size
        self._one_by_one = deterministic
        self._max_numbers = GPU_TOWER_NUMBERS if self._device.type == "cuda" else _CPU_TOWER_NUMBERS
        self._refused: set[str] = set()
        """What could not be prepared the last time: it is not tried again until it is needed."""
        self.cache: ByteCache[str, MediaFeatures] = ByteCache(max_bytes, feature_bytes)
        self._unused: set[str] = set()
        """What the tower has computed and no prompt has used yet."""
        self._num_computed = self._num_cached = 0
        self._clock = TowerClock(self._device)

    def counts(self) -> dict[str, float]:
        """Images and videos that the tower has computed, how often the cache had one, and the tower's seconds.

        Empty before the first one, so that an engine that gets no images tells nothing of them. May be called by any
        thread.
        """
        if not self._num_computed:
            return {}
        return {
            "num_media_computed": self._num_computed,
            "num_media_cached": self._num_cached,
            "media_tower_s": self._clock.seconds,
        }

    def forget(self) -> None:
        """The weights of the tower have changed, or leave the device."""
        self.cache.clear()
        self._unused.clear()
        self._tower.weights_changed()

    @torch.inference_mode()
    def prepare(self, media: Iterable[PlacedMedia]) -> None:
        """Compute features that will soon be needed, if there are enough of them for a pass.

        A GPU then works while other pictures are still being read.
        """
        new: dict[str, MediaContent] = {}
        num_tokens = num_bytes = 0
        for item in media:
            digest = item.content.digest
            features = self.cache.get(digest)
            if features is not None:
                num_bytes += feature_bytes(features)
            elif digest not in new and digest not in self._refused:
                new[digest] = item.content
                num_tokens += item.num_tokens
        # More than that might be dropped before it is used.
        if num_tokens < _AHEAD_TOKENS or 2 * num_bytes > self.cache.max_bytes:
            return
        try:
            self._features(new)
        except MediaFailed:
            self._refused = set(new)  # the requests that need them will be told
        # Requests may have been aborted since, so that what was computed for them is never used.
        self._unused = {digest for digest in self._unused if digest in self.cache}

    @torch.inference_mode()
    def inputs(self, media: BatchMedia) -> MediaInputs:
        """What the decoder needs for a batch."""
        self._clock.collect()
        rotary = None if media.rotary is None else self._uploaded(media.rotary)
        if not media.parts:
            nothing = torch.zeros(0, self._hidden_size, dtype=self._dtype, device=self._device)
            return MediaInputs(nothing[:, 0].long(), nothing, (), rotary)
        features = self._features({part.content.digest: part.content for part in media.parts})
        embeddings, deep = [], []
        for part in media.parts:
            self._count_use(part.content.digest)
            own = features[part.content.digest]
            rows = slice(part.first, part.first + len(part.places))
            embeddings.append(own.embeddings[rows])
            deep.append([each[rows] for each in own.deep])
        places = np.concatenate([part.places for part in media.parts])
        return MediaInputs(
            self._uploaded(places),
            torch.cat(embeddings),
            tuple(torch.cat(layer) for layer in zip(*deep, strict=True)),
            rotary,
        )

    def _count_use(self, digest: str) -> None:
        if digest in self._unused:
            self._unused.remove(digest)  # it was computed for this use
        else:
            self._num_cached += 1

    def _features(self, contents: dict[str, MediaContent]) -> dict[str, MediaFeatures]:
        found = {digest: features for digest in contents if (features := self.cache.get(digest)) is not None}
        new = [content for digest, content in contents.items() if digest not in found]
        for batch in self._batches(self._reader.read_all(new)):
            for digest, features in self._computed(batch).items():
                # Not a view: one picture of a batch must not keep the memory of all.
                own = MediaFeatures(features.embeddings.clone(), tuple(each.clone() for each in features.deep))
                found[digest] = own
                self.cache.put(digest, own, contents)
                self._num_computed += 1
                self._unused.add(digest)
        return found

    def _batches(self, inputs: Mapping[str, Inputs]) -> list[dict[str, Inputs]]:
        """What the tower computes together."""
        batches: list[dict[str, Inputs]] = []
        num_numbers = 0
        for digest, tensors in inputs.items():
            # The tower makes two frames of the bytes of a picture.
            own = sum(each.numel() * (2 if each.dtype == torch.uint8 else 1) for each in tensors.values())
            if not batches or self._one_by_one or num_numbers + own > self._max_numbers:
                batches.append({})
                num_numbers = 0
            batches[-1][digest] = tensors
            num_numbers += own
        return batches

    def _computed(self, inputs: Mapping[str, Inputs]) -> dict[str, MediaFeatures]:
        """The features of several pictures by digest. Raises ``MediaFailed`` for those that are too much for the tower.

        An error of the device itself returns in the next step of the decoder, and ends the engine there.
        """
        try:
            with self._clock.running():
                return dict(zip(inputs, self._tower.of_inputs([*inputs.values()]), strict=True))
        except Exception as error:  # noqa: BLE001  most likely memory, which differs between devices
            reason = f"cannot be computed: {type(error).__name__}: {error}; use a smaller one"
        # Outside of the handler, which holds on to the tensors of the pass that failed.
        if len(inputs) == 1:
            raise MediaFailed(dict.fromkeys(inputs, reason))
        made: dict[str, MediaFeatures] = {}
        reasons: dict[str, str] = {}
        for digest, tensors in inputs.items():
            try:
                made |= self._computed({digest: tensors})
            except MediaFailed as failed:
                reasons |= failed.reasons
        if reasons:
            raise MediaFailed(reasons)
        return made

    def _uploaded(self, values: np.ndarray[Any, Any]) -> Tensor:
        return upload(torch.from_numpy(values), self._device)


def feature_bytes(features: MediaFeatures) -> int:
    return features.embeddings.nbytes + sum(each.nbytes for each in features.deep)
