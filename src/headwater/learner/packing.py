"""Turns a padded batch into packs without padding or repeated prompts.

A row is computed only up to the token that predicts its last trained token. The prompt of a group is computed once for
all its samples, and so are its images and videos.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.algorithms.masked import required
from headwater.core.data_proto import DataProto
from headwater.core.errors import DataError
from headwater.core.media import MEDIA_COLUMN, Media, MediaContent, identity_tokens, rotary_positions
from headwater.learner.partition import pack_evenly
from headwater.models.packed_attention import Segments
from headwater.models.upload import upload

_PACK_TENSORS = ("batch_rows", "input_ids", "position_ids", "predictors", "targets", "row", "column")
"""What the device needs of a pack."""


@dataclass(frozen=True)
class PackRow:
    """The tokens of one row of a batch that have to be computed."""

    index: int
    prompt: NDArray[np.int64]
    response: NDArray[np.int64]
    """Response tokens before the last trained one. Nothing is predicted from later tokens."""
    columns: NDArray[np.int64]
    """Trained positions of the response, ascending."""
    targets: NDArray[np.int64]
    """The tokens at those positions."""
    media: Media = ()
    """Images and videos. Their indices count the tokens of ``prompt`` and ``response``; those after the end are not
    computed."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.response)

    @property
    def num_media_tokens(self) -> int:
        return sum(int((item.places() < self.num_tokens).sum()) for item in self.media)

    def prompt_key(self) -> bytes:
        """Equal for rows whose prompts are the same input, so that they can share its computation."""
        shown = media_before(self.media, len(self.prompt))
        # Placeholder tokens of two pictures are equal, so the key depends on their contents. It differs from the key of
        # any prompt without media, because it has negative numbers.
        return (identity_tokens(self.prompt.tolist(), shown) if shown else self.prompt).tobytes()

    def positions(self) -> NDArray[np.int64]:
        """``[tokens]``, or ``[3, tokens]`` if media have a grid."""
        if not any(any(block.grid) for item in self.media for block in item.blocks):
            return np.arange(self.num_tokens)
        end = max(item.end for item in self.media)  # media may be cut off by the end of the row
        return rotary_positions(max(self.num_tokens, end), self.media)[:, : self.num_tokens]


def media_before(media: Media, end: int) -> Media:
    """The items that begin before the token ``end``."""
    return tuple(item for item in media if min(block.start for block in item.blocks) < end)


@dataclass(frozen=True)
class PackMedia:
    """The images and videos of a pack, each of them once, and the tokens that stand for them."""

    contents: list[MediaContent]
    num_tokens: list[int]
    """Of each content."""
    places: Tensor
    """Tokens of the pack, ascending."""
    sources: Tensor
    """Of each of them, the index of its embedding among those of all contents, one content after the other."""

    def between(self, start: int, end: int) -> PackMedia | None:
        """The part that stands in ``start..end`` of the pack, counted from ``start``; None if nothing does."""
        inside = (self.places >= start) & (self.places < end)
        if not inside.any():
            return None
        return replace(self, places=self.places[inside] - start, sources=self.sources[inside])


@dataclass(frozen=True)
class Pack:
    """Some rows of a batch, concatenated. Trained tokens are listed row by row."""

    rows: list[int]
    """Rows of the batch."""
    batch_rows: Tensor
    """The same, to select their columns on the device."""
    input_ids: Tensor
    position_ids: Tensor
    """``[tokens]``, or ``[3, tokens]`` if media of the pack have a grid."""
    segments: Segments
    predictors: Tensor
    """Per trained token, the position in the pack of the token before it."""
    targets: Tensor
    row: Tensor
    """Per trained token, the index of its row in ``rows``."""
    column: Tensor
    width: int
    """The number of response columns of the batch."""
    media: PackMedia | None = None

    def padded(self, values: Tensor) -> Tensor:
        """``[rows, width]`` from one value per trained token; 0 elsewhere."""
        return values.new_zeros(len(self.rows), self.width).index_put((self.row, self.column), values)

    def to(self, device: torch.device) -> Pack:
        """The pack with its tensors on ``device``. The host does not wait for the copy."""
        own = [getattr(self, name) for name in _PACK_TENSORS]
        media = [] if self.media is None else [self.media.places, self.media.sources]
        moved = upload([*own, *media], device)
        changes: dict[str, Any] = dict(zip(_PACK_TENSORS, moved, strict=False))
        if self.media is not None:
            changes["media"] = replace(self.media, places=moved[-2], sources=moved[-1])
        return replace(self, **changes)


def token_column(batch: DataProto, name: str) -> Tensor:
    """A column that every pass needs. If it is missing, the error names it."""
    return required(batch.batch, name, "a pass over tokens", "make batches with rollout.group.pad_trajectories")


def read_rows(batch: DataProto) -> list[PackRow]:
    """The rows that have trained tokens."""
    mask, input_ids = token_column(batch, "response_mask"), token_column(batch, "input_ids")
    start = input_ids.shape[1] - mask.shape[1]
    tokens, trained = input_ids.cpu().numpy(), mask.cpu().numpy() != 0
    prompt_lengths = token_column(batch, "attention_mask")[:, :start].sum(dim=1).tolist()
    media = batch.non_tensor_batch.get(MEDIA_COLUMN)
    # All rows at once: looking for the trained tokens of each would take most of the time.
    of_rows, columns = np.nonzero(trained)
    targets = tokens[of_rows, start + columns]
    cuts = np.searchsorted(of_rows, np.arange(len(trained) + 1)).tolist()
    rows = []
    for index, prompt_length in enumerate(prompt_lengths):
        own = slice(cuts[index], cuts[index + 1])
        if own.start == own.stop:
            continue
        if not prompt_length:
            raise DataError(
                f"row {index} of the batch has an empty prompt, so no token predicts its first response token"
            )
        last = int(columns[own.stop - 1])
        rows.append(
            PackRow(
                index,
                prompt=tokens[index, start - prompt_length : start],
                response=tokens[index, start : start + last],
                columns=columns[own],
                targets=targets[own],
                media=() if media is None else media_before(media[index], prompt_length + last),
            )
        )
    return rows


@dataclass(frozen=True)
class _Bundle:
    """Rows that share a prompt and are packed together."""

    rows: list[PackRow]
    num_tokens: int


def check_lengths(rows: Sequence[PackRow], max_tokens: int, key: str) -> None:
    """``key`` is the setting that ``max_tokens`` comes from."""
    for row in rows:
        if row.num_tokens > max_tokens:
            shown = f" ({row.num_media_tokens} of them of images or videos)" if row.media else ""
            raise DataError(
                f"row {row.index} of the batch has {row.num_tokens} tokens{shown}, over {key} = {max_tokens}; "
                f"raise that, or lower data.max_prompt_tokens or rollout.max_new_tokens"
            )


def pack_rows(
    rows: Sequence[PackRow], width: int, max_tokens: int, *, min_packs: int = 1, share_prompts: bool = True
) -> Sequence[Pack]:
    """Packs of at most ``max_tokens`` tokens, at least ``min_packs`` of them if there are that many bundles of rows.

    Every pack is made when it is accessed.
    """
    bundles = list(_bundles(rows, max_tokens, share_prompts))
    if not bundles:
        return []
    sizes = [each.num_tokens for each in bundles]
    plan = pack_evenly(sizes, max_tokens, min_bins=min(min_packs, len(bundles)))
    return _PlannedPacks([[bundles[place] for place in part] for part in plan], width)


class _PlannedPacks(Sequence[Pack]):
    def __init__(self, plan: list[list[_Bundle]], width: int) -> None:
        self._plan = plan
        self._width = width

    def __len__(self) -> int:
        return len(self._plan)

    @overload
    def __getitem__(self, index: int) -> Pack: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pack]: ...
    def __getitem__(self, index: int | slice) -> Pack | list[Pack]:
        if isinstance(index, slice):
            return [_pack(part, self._width) for part in self._plan[index]]
        return _pack(self._plan[index], self._width)


def _bundles(rows: Sequence[PackRow], max_tokens: int, share_prompts: bool) -> Iterator[_Bundle]:
    groups: dict[bytes | int, list[PackRow]] = {}
    for row in rows:
        groups.setdefault(row.prompt_key() if share_prompts else row.index, []).append(row)
    for members in groups.values():
        bundle: list[PackRow] = []
        num_tokens = len(members[0].prompt)
        for row in members:
            if num_tokens + len(row.response) > max_tokens:
                yield _Bundle(bundle, num_tokens)
                bundle, num_tokens = [], len(row.prompt)
            bundle.append(row)
            num_tokens += len(row.response)
        yield _Bundle(bundle, num_tokens)


def _pack(bundles: Sequence[_Bundle], width: int) -> Pack:
    tokens: list[NDArray[np.int64]] = []
    first_positions: list[int] = []
    """Of each part of ``tokens``."""
    segments: list[tuple[int, int, int, int]] = []
    last_of_prompt, before_response = [], []
    rows: list[PackRow] = []
    media = _MediaCollector()
    num_tokens = 0
    for bundle in bundles:
        prompt, prompt_start = bundle.rows[0].prompt, num_tokens
        num_prompt, is_shared = len(prompt), len(bundle.rows) > 1
        tokens.append(prompt)
        first_positions.append(0)
        media.add(bundle.rows[0].media, 0, num_prompt, prompt_start)
        num_tokens += num_prompt
        if is_shared:
            segments.append((prompt_start, num_prompt, prompt_start, 0))
        for row in bundle.rows:
            num_response = len(row.response)
            last_of_prompt.append(prompt_start + num_prompt - 1)
            before_response.append(num_tokens - 1)
            rows.append(row)
            tokens.append(row.response)
            first_positions.append(num_prompt)
            media.add(row.media, num_prompt, row.num_tokens, num_tokens - num_prompt)
            if not is_shared:
                segments.append((prompt_start, num_prompt + num_response, prompt_start, 0))
            elif num_response:
                segments.append((num_tokens, num_response, prompt_start, num_prompt))
            num_tokens += num_response
    # Arrays of all rows at once: operations on each of many short rows would take most of the time.
    columns = np.concatenate([row.columns for row in rows])
    row_of = np.repeat(np.arange(len(rows)), [len(row.columns) for row in rows])
    # The first response token is predicted by the prompt's last token, the others by the response itself.
    before = np.array(before_response)[row_of] + columns
    return Pack(
        rows=[row.index for row in rows],
        batch_rows=torch.tensor([row.index for row in rows]),
        input_ids=torch.from_numpy(np.concatenate(tokens)),
        position_ids=torch.from_numpy(_positions(bundles, [len(part) for part in tokens], first_positions)),
        segments=Segments(*np.array(segments, np.int64).T),
        predictors=torch.from_numpy(np.where(columns == 0, np.array(last_of_prompt)[row_of], before)),
        targets=torch.from_numpy(np.concatenate([row.targets for row in rows])),
        row=torch.from_numpy(row_of),
        column=torch.from_numpy(columns),
        width=width,
        media=media.result(),
    )


def _positions(bundles: Sequence[_Bundle], lengths: Sequence[int], first_positions: Sequence[int]) -> NDArray[np.int64]:
    """``[tokens]``, or ``[3, tokens]`` if media have a grid: of a prompt, then of the responses to it, and so on."""
    if not any(row.media for bundle in bundles for row in bundle.rows):
        starts = np.cumsum(lengths) - lengths
        plain: NDArray[np.int64] = np.arange(sum(lengths)) + np.repeat(np.array(first_positions) - starts, lengths)
        return plain
    parts = []
    for bundle in bundles:
        num_prompt = len(bundle.rows[0].prompt)
        parts.append(bundle.rows[0].positions()[..., :num_prompt])
        parts += [row.positions()[..., num_prompt:] for row in bundle.rows]
    if all(each.ndim == 1 for each in parts):
        return np.concatenate(parts)
    return np.concatenate([np.broadcast_to(each, (3, each.shape[-1])) for each in parts], axis=1)


class _MediaCollector:
    """Finds the tokens of a pack that stand for media."""

    def __init__(self) -> None:
        self._contents: dict[str, MediaContent] = {}
        self._first: dict[str, int] = {}
        """By digest, the index of the first embedding of a content."""
        self._num_tokens: list[int] = []
        self._places: list[NDArray[np.int64]] = []
        self._sources: list[NDArray[np.int64]] = []

    def add(self, media: Media, start: int, end: int, shift: int) -> None:
        """Add what stands in ``start..end`` of a row, whose token 0 would be token ``shift`` of the pack."""
        for item in media:
            places = item.places()
            inside = np.flatnonzero((places >= start) & (places < end))
            if not len(inside):
                continue
            digest = item.content.digest
            if digest not in self._contents:
                self._contents[digest], self._first[digest] = item.content, sum(self._num_tokens)
                self._num_tokens.append(item.num_tokens)
            self._places.append(places[inside] + shift)
            self._sources.append(self._first[digest] + inside)

    def result(self) -> PackMedia | None:
        if not self._places:
            return None
        places, sources = np.concatenate(self._places), np.concatenate(self._sources)
        order = np.argsort(places)
        return PackMedia(
            list(self._contents.values()),
            self._num_tokens,
            torch.from_numpy(places[order]),
            torch.from_numpy(sources[order]),
        )


def idle_pack(width: int) -> Pack:
    """One token whose result is not used, for a rank without rows while the other ranks compute."""
    nothing = np.zeros(1, np.int64)
    row = PackRow(0, prompt=nothing, response=nothing[:0], columns=nothing, targets=nothing)
    return _pack([_Bundle([row], 1)], width)


_TOKENS = frozenset({"input_ids", "attention_mask", "position_ids"})


class LossColumns:
    """The columns of a batch that a loss may need: all but the tokens, which its packs hold.

    They are moved once, and the rows of a micro-batch are selected on the device, with an index that is there already.
    Otherwise the host would wait for the forward pass before it could launch the loss and the backward pass.
    """

    def __init__(self, batch: DataProto, device: torch.device) -> None:
        columns = {name: column for name, column in batch.batch.items() if name not in _TOKENS}
        away = sorted(name for name, column in columns.items() if column.device.type != device.type)
        uploaded = upload([columns[name] for name in away], device)
        self._tensors = {**columns, **dict(zip(away, uploaded, strict=True))}
        self._meta_info = batch.meta_info

    def of(self, pack: Pack) -> DataProto:
        """The rows of ``pack``, in its order."""
        rows = {name: column.index_select(0, pack.batch_rows) for name, column in self._tensors.items()}
        return DataProto.from_dict(rows, meta_info=self._meta_info)
