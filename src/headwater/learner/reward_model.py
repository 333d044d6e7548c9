"""A learned judge: a sequence classifier with one label, whose score of a whole conversation is a reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.chat.render import ChatError, encode_rendered, render_chat
from headwater.config.schema import LearnerConfig
from headwater.core.errors import DataError, ModelError
from headwater.learner.memory import CPU
from headwater.learner.packed_module import ValueModule
from headwater.learner.packing import Row, pack_rows

Conversation = Sequence[Mapping[str, Any]]
"""Messages with ``role`` and ``content``, the answer last."""


class RewardModel:
    """Scores conversations in its own words: they are rendered and tokenised by the judge's own tokenizer."""

    def __init__(self, module: ValueModule, tokenizer: Any, config: LearnerConfig) -> None:
        if tokenizer.chat_template is None:
            raise ModelError(
                "reward.model: its tokenizer has no chat template, so a conversation cannot be shown to it; "
                "put the model's chat_template.jinja into its folder"
            )
        self._module = module
        self._device: torch.device = module.model.device
        self._tokenizer = tokenizer
        self._config = config

    def offload(self) -> None:
        """Move the model to main memory, for a rollout on the same device."""
        self._module.to(CPU)

    def onload(self) -> None:
        self._module.to(self._device)

    @torch.no_grad()
    def scores(self, conversations: Sequence[Conversation]) -> Tensor:
        """One score per conversation, read at its last token."""
        rows = [self._row(index, conversation) for index, conversation in enumerate(conversations)]
        self._check_lengths(rows)
        scores = torch.zeros(len(rows))
        for pack in pack_rows(rows, 1, self._config.max_tokens_per_microbatch):
            values = self._module(pack.to(self._device))["values"]
            scores[pack.rows] = pack.padded(values.cpu())[:, 0]
        if not scores.isfinite().all():
            raise DataError("reward.model: gave a score that is not a finite number; check the model and its dtype")
        return scores

    def _check_lengths(self, rows: Sequence[Row]) -> None:
        """The judge's own template and tokenizer may make more tokens of a conversation than the policy's did."""
        limit = self._config.max_tokens_per_microbatch
        for row in rows:
            if row.num_tokens > limit:
                raise DataError(
                    f"reward.model: conversation {row.index} of the batch has {row.num_tokens} of its tokens, over "
                    f"learner.max_tokens_per_microbatch = {limit}; raise that to {row.num_tokens} or more, or lower "
                    "data.max_prompt_tokens or rollout.max_new_tokens"
                )

    def _row(self, index: int, conversation: Conversation) -> Row:
        try:
            text = render_chat(self._tokenizer, conversation, add_generation_prompt=False)
        except ChatError as error:
            raise DataError(
                f"reward.model: its chat template cannot render conversation {index} of the batch ({error})"
            ) from error
        tokens = encode_rendered(self._tokenizer, text)
        first = np.zeros(1, np.int64)
        # All of it as a prompt: what is read is the state of the last token, as if it predicted one more.
        return Row(index, prompt=np.array(tokens, np.int64), response=first[:0], columns=first, targets=first)
