"""The columns that losses need, on the device, of which every micro-batch takes its rows."""

from __future__ import annotations

import torch

from headwater.core.data_proto import DataProto
from headwater.learner.packing import Pack
from headwater.models.upload import upload

_TOKENS = frozenset({"input_ids", "attention_mask", "position_ids"})


class LossColumns:
    """The columns of a batch that a loss may need: all but the tokens, which its packs hold.

    They are moved once, and the rows of a micro-batch are selected on the device, with an index that is there already.
    Otherwise the host would wait for the forward pass before it could launch the loss and the backward pass.
    """

    def __init__(self, batch: DataProto, device: torch.device) -> None:
        names = sorted(set(batch.batch.keys()) - _TOKENS)
        self._tensors = dict(zip(names, upload([batch.batch[name] for name in names], device), strict=True))
        self._meta_info = batch.meta_info

    def of(self, pack: Pack) -> DataProto:
        """The rows of ``pack``, in its order."""
        rows = {name: column.index_select(0, pack.batch_rows) for name, column in self._tensors.items()}
        return DataProto.from_dict(rows, meta_info=self._meta_info)
