"""A reward model: a sequence classifier with one label, which scores whole conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.chat.render import ChatError, encode_rendered, render_chat
from headwater.core.errors import DataError, ModelError
from headwater.learner.engine import ForwardEngine
from headwater.learner.packing import PackRow
from headwater.learner.ranks import reshard

Conversation = Sequence[Mapping[str, Any]]
"""Messages with ``role`` and ``content``, the response last."""


class RewardModel:
    """Scores conversations, which are rendered and tokenised by the reward model's own tokenizer."""

    def __init__(self, engine: ForwardEngine, tokenizer: Any) -> None:
        if tokenizer.chat_template is None:
            raise ModelError(
                "reward.model: its tokenizer has no chat template, so conversations cannot be rendered for it; "
                "add the model's chat_template.jinja to its folder"
            )
        self.engine = engine
        self._tokenizer = tokenizer

    @torch.no_grad()
    def scores(self, conversations: Sequence[Conversation]) -> Tensor:
        """One score per conversation, read at its last token."""
        limit = self.engine.config.forward_tokens
        rows = self.engine.agreed(lambda: self._rows(conversations, limit))
        scores = torch.zeros(len(rows))
        computed: list[Tensor] = []
        places: list[int] = []
        try:
            for pack, counts in self.engine.packs(rows, 1, limit):
                values = self.engine.values(pack)["values"]
                if counts:
                    computed.append(pack.padded(values)[:, 0])
                    places += pack.rows
        finally:
            reshard(self.engine.module)
        if computed:  # all at once: the device is waited for at the end only
            scores[places] = torch.cat(computed).cpu()
        if not scores.isfinite().all():
            raise DataError("reward.model: returned a score that is not finite; check the model and its dtype")
        return scores

    def _rows(self, conversations: Sequence[Conversation], limit: int) -> list[PackRow]:
        rows = [self._row(index, conversation) for index, conversation in enumerate(conversations)]
        for row in rows:
            # The reward model's template and tokenizer may produce more tokens than the policy's did.
            if row.num_tokens > limit:
                raise DataError(
                    f"reward.model: conversation {row.index} of the batch has {row.num_tokens} of its tokens, over "
                    f"learner.max_tokens_per_forward_pass = {limit}; raise that to {row.num_tokens} or more, or lower "
                    "data.max_prompt_tokens or rollout.max_new_tokens"
                )
        return rows

    def _row(self, index: int, conversation: Conversation) -> PackRow:
        try:
            text = render_chat(self._tokenizer, conversation, add_generation_prompt=False)
        except ChatError as error:
            raise DataError(
                f"reward.model: its chat template cannot render conversation {index} of the batch ({error})"
            ) from error
        tokens = encode_rendered(self._tokenizer, text)
        first = np.zeros(1, np.int64)
        # All tokens form the prompt: the score is read from the last token's state, as if it predicted one more token.
        return PackRow(index, prompt=np.array(tokens, np.int64), response=first[:0], columns=first, targets=first)
