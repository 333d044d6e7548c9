"""The baseline: rows in their original order, padded to the longest row of the micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwater.learner.engine import TrainEngine
from headwater.learner.packed_module import PackedModule, TokenStatistics, token_logprobs
from headwater.learner.packing import Pack, PackRow, pack_rows


class PaddedPolicyModule(PackedModule):
    """Lays a pack of unshared rows out as a padded batch again and runs transformers' own attention on it."""

    outputs = TokenStatistics._fields

    def __init__(self, model: Any, temperature: float) -> None:
        nn.Module.__init__(self)
        self.model = model.eval()
        self.model.set_attn_implementation("sdpa")
        self._temperature = temperature

    def forward(self, pack: Pack) -> Mapping[str, Tensor]:
        starts = torch.from_numpy(pack.segments.starts).to(pack.input_ids.device)
        lengths = torch.from_numpy(pack.segments.lengths).to(pack.input_ids.device)
        row = torch.repeat_interleave(torch.arange(len(starts), device=starts.device), lengths)
        column = torch.arange(len(pack.input_ids), device=starts.device) - starts[row]
        width = int(lengths.max())
        tokens = torch.zeros(len(starts), width, dtype=torch.int64, device=starts.device)
        mask = torch.zeros_like(tokens)
        tokens[row, column], mask[row, column] = pack.input_ids, 1
        hidden = self.model.get_decoder()(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
        head = self.model.get_output_embeddings()
        # The head, too, is applied to the padded batch.
        flat = hidden.flatten(0, 1)
        targets = torch.zeros(len(flat), dtype=torch.int64, device=flat.device)
        place = row[pack.predictors] * width + column[pack.predictors]
        targets[place] = pack.targets
        outputs = token_logprobs(flat, head.weight, head.bias, targets, self._temperature)
        return {name: values[place] for name, values in outputs._asdict().items()}


class PaddedTrainEngine(TrainEngine):
    """Counts padding among the tokens of a micro-batch."""

    def _pack(self, rows: Sequence[PackRow], width: int, max_tokens: int, min_packs: int) -> list[Pack]:
        parts: list[list[PackRow]] = []
        longest = 0
        for row in rows:
            length = len(row.prompt) + len(row.response)
            if not parts or (len(parts[-1]) + 1) * max(longest, length) > max_tokens:
                parts.append([])
                longest = 0
            parts[-1].append(row)
            longest = max(longest, length)
        return [pack for part in parts for pack in pack_rows(part, width, 1 << 30, share_prompts=False)]
