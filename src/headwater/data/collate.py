"""Prompts as one padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch

from headwater.core.data_proto import DataProto
from headwater.core.errors import DataError
from headwater.core.records import Prompt

OBJECT_COLUMNS = tuple(field.name for field in fields(Prompt) if field.name != "tokens")
"""Every field of a prompt but its tokens, which become tensors."""


def collate(prompts: Sequence[Prompt], pad_token_id: int) -> DataProto:
    """``input_ids``, ``attention_mask`` and ``position_ids``, padded on the left, so that responses can follow at one
    column; everything else a prompt holds is an object column of the same name."""
    if not prompts:
        raise DataError("collate: got no prompts; a batch needs at least one")
    lengths = torch.tensor([len(prompt.tokens) for prompt in prompts])
    width = int(lengths.max())
    columns = torch.arange(width)
    # The column at which each row's prompt begins.
    starts = (width - lengths).unsqueeze(1)
    attention_mask = (columns >= starts).long()
    input_ids = torch.full((len(prompts), width), pad_token_id, dtype=torch.long)
    input_ids[attention_mask.bool()] = torch.tensor([token for prompt in prompts for token in prompt.tokens])
    return DataProto.from_dict(
        tensors={
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": (columns - starts).clamp(min=0),
        },
        non_tensors={name: [getattr(prompt, name) for prompt in prompts] for name in OBJECT_COLUMNS},
    )
