"""Turns a padded batch into packs without padding or repeated prompts.

A row is computed only up to the token that predicts its last trained token. The prompt of a group is computed once for
all its samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.algorithms.masked import required
from headwater.core.data_proto import DataProto
from headwater.core.errors import DataError
from headwater.learner.partition import pack_evenly
from headwater.models.packed_attention import Segments


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

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class Pack:
    """Some rows of a batch, concatenated. Trained tokens are listed row by row."""

    rows: list[int]
    """Rows of the batch."""
    input_ids: Tensor
    position_ids: Tensor
    segments: Segments
    predictors: Tensor
    """Per trained token, the position in the pack of the token before it."""
    targets: Tensor
    row: Tensor
    """Per trained token, the index of its row in ``rows``."""
    column: Tensor
    width: int
    """The number of response columns of the batch."""

    def padded(self, values: Tensor) -> Tensor:
        """``[rows, width]`` from one value per trained token; 0 elsewhere."""
        return values.new_zeros(len(self.rows), self.width).index_put((self.row, self.column), values)

    def to(self, device: torch.device) -> Pack:
        return replace(
            self,
            **{
                name: getattr(self, name).to(device, non_blocking=True)
                for name in ("input_ids", "position_ids", "predictors", "targets", "row", "column")
            },
        )


def token_column(batch: DataProto, name: str) -> Tensor:
    """A column that every pass needs. If it is missing, the error names it."""
    return required(batch.batch, name, "a pass over tokens", "make batches with rollout.group.pad_trajectories")


def read_rows(batch: DataProto) -> list[PackRow]:
    """The rows that have trained tokens."""
    mask, input_ids = token_column(batch, "response_mask"), token_column(batch, "input_ids")
    start = input_ids.shape[1] - mask.shape[1]
    tokens, trained = input_ids.cpu().numpy(), mask.cpu().numpy() != 0
    prompt_lengths = token_column(batch, "attention_mask")[:, :start].sum(dim=1).tolist()
    rows = []
    for index, prompt_length in enumerate(prompt_lengths):
        columns = np.flatnonzero(trained[index])
        if not len(columns):
            continue
        if not prompt_length:
            raise DataError(
                f"row {index} of the batch has an empty prompt, so no token predicts its first response token"
            )
        response = tokens[index, start:]
        rows.append(
            PackRow(
                index,
                prompt=tokens[index, start - prompt_length : start],
                response=response[: columns[-1]],
                columns=columns,
                targets=response[columns],
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
            raise DataError(
                f"row {row.index} of the batch has {row.num_tokens} tokens, over {key} = {max_tokens}; "
                f"raise that, or lower data.max_prompt_tokens or rollout.max_new_tokens"
            )


def pack_rows(
    rows: Sequence[PackRow], width: int, max_tokens: int, *, min_packs: int = 1, share_prompts: bool = True
) -> list[Pack]:
    """Packs of at most ``max_tokens`` tokens, at least ``min_packs`` of them if there are that many bundles of rows."""
    bundles = list(_bundles(rows, max_tokens, share_prompts))
    if not bundles:
        return []
    sizes = [each.num_tokens for each in bundles]
    plan = pack_evenly(sizes, max_tokens, min_bins=min(min_packs, len(bundles)))
    return [_pack([bundles[place] for place in part], width) for part in plan]


def _bundles(rows: Sequence[PackRow], max_tokens: int, share_prompts: bool) -> Iterator[_Bundle]:
    groups: dict[bytes | int, list[PackRow]] = {}
    for row in rows:
        groups.setdefault(row.prompt.tobytes() if share_prompts else row.index, []).append(row)
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
    tokens, positions, segments = [], [], []
    predictors, row_of = [], []
    rows: list[PackRow] = []
    num_tokens = 0
    for bundle in bundles:
        prompt, prompt_start = bundle.rows[0].prompt, num_tokens
        is_shared = len(bundle.rows) > 1
        tokens.append(prompt)
        positions.append(np.arange(len(prompt)))
        num_tokens += len(prompt)
        if is_shared:
            segments.append((prompt_start, len(prompt), prompt_start, 0))
        for row in bundle.rows:
            # The first response token is predicted by the prompt's last token, the others by the response itself.
            before = num_tokens + row.columns - 1
            predictors.append(np.where(row.columns == 0, prompt_start + len(prompt) - 1, before))
            row_of.append(np.full(len(row.columns), len(rows)))
            rows.append(row)
            tokens.append(row.response)
            positions.append(len(prompt) + np.arange(len(row.response)))
            if not is_shared:
                segments.append((prompt_start, len(prompt) + len(row.response), prompt_start, 0))
            elif len(row.response):
                segments.append((num_tokens, len(row.response), prompt_start, len(prompt)))
            num_tokens += len(row.response)
    return Pack(
        rows=[row.index for row in rows],
        input_ids=torch.from_numpy(np.concatenate(tokens)),
        position_ids=torch.from_numpy(np.concatenate(positions)),
        segments=Segments(*np.array(segments, np.int64).T),
        predictors=torch.from_numpy(np.concatenate(predictors)),
        targets=torch.from_numpy(np.concatenate([row.targets for row in rows])),
        row=torch.from_numpy(np.concatenate(row_of)),
        column=torch.from_numpy(np.concatenate([row.columns for row in rows])),
        width=width,
    )


def idle_pack(width: int) -> Pack:
    """One token whose result is not used, for a rank without rows while the other ranks compute."""
    nothing = np.zeros(1, np.int64)
    row = PackRow(0, prompt=nothing, response=nothing[:0], columns=nothing, targets=nothing)
    return _pack([_Bundle([row], 1)], width)
