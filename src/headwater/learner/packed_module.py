"""The modules that an engine runs: a transformers decoder on a pack, and outputs computed from its hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from headwater.learner.packing import Pack
from headwater.learner.token_logprobs import TokenStatistics, token_logprobs
from headwater.models.packed_attention import packed_attention, rows_of, use_packed_attention


class PackedModule(nn.Module):
    """A model whose forward pass takes a pack and returns named values, one per trained token.

    It wraps the transformers model so that FSDP sees a single forward call from the embedding to the result.
    """

    outputs: ClassVar[tuple[str, ...]]
    """The names of the values that ``forward`` returns."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        use_packed_attention(model)
        # Dropout stays off, so that the trained policy is the policy that sampled.
        self.model = model.eval()

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers, which are sharded, checkpointed and compiled one by one."""
        layers = self.model.get_decoder().layers
        assert isinstance(layers, nn.ModuleList)
        return layers

    def hidden(self, pack: Pack) -> Tensor:
        """The hidden state that predicts each trained token, ``[trained tokens, hidden size]``."""
        # Inside a forward pass, a sharded weight has the type that the layers compute in.
        dtype = self.model.get_input_embeddings().weight.dtype
        states = self.model.get_decoder()(
            input_ids=pack.input_ids[None],
            position_ids=pack.position_ids[None],
            use_cache=False,
            packed_attention=packed_attention(pack.segments, pack.input_ids.device, dtype),
        ).last_hidden_state[0]
        return rows_of(states, pack.predictors)


class PolicyModule(PackedModule):
    """``logprobs`` of the trained tokens, ``entropy`` and ``sum_pi_squared`` of the distributions they were drawn from.

    ``temperature`` is the sampling temperature, so that the engine and the learner use the same distribution.
    """

    outputs = TokenStatistics._fields

    def __init__(self, model: Any, temperature: float) -> None:
        super().__init__(model)
        self._temperature = temperature

    def forward(self, pack: Pack) -> Mapping[str, Tensor]:
        head = self.model.get_output_embeddings()
        return token_logprobs(self.hidden(pack), head.weight, head.bias, pack.targets, self._temperature)._asdict()


class ValueModule(PackedModule):
    """``values``: the return that is still to come, predicted before each trained token."""

    outputs = ("values",)

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        if not isinstance(getattr(model, "score", None), nn.Linear):
            raise TypeError(f"{type(model).__name__} has no linear layer named score; see models.load_critic")

    def forward(self, pack: Pack) -> Mapping[str, Tensor]:
        # In float32: bfloat16 cannot represent small differences between values.
        values = F.linear(self.hidden(pack).float(), self.model.score.weight.float())
        return {"values": values[:, 0].clone()}  # FSDP warns about views
