"""The model of a run, as a vLLM and the checks of its weights need it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headwater.backends import BackendContext
from headwater.backends.vllm.link import VllmInfo
from headwater.core.errors import ConfigError
from headwater.models.load import end_token_ids, load_model, load_part, local_folder
from headwater.models.save import save_model
from headwater.models.source import resolve_model

_SHAPE_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)
"""The numbers of config.json that decide the names and shapes of the weights."""


@dataclass(frozen=True)
class RunModel:
    """The model that the learner trains. ``skeleton`` has its parameters, of which only names and shapes are used."""

    skeleton: Any
    end_tokens: tuple[int, ...]

    @classmethod
    def of(cls, context: BackendContext) -> RunModel:
        config = context.config
        skeleton, _ = load_part(context.model_path, dtype=config.model.dtype, seed=config.run.seed)
        return cls(skeleton, end_token_ids(skeleton, context.tokenizer))

    @property
    def vocab_size(self) -> int:
        return int(self.skeleton.config.get_text_config().vocab_size)

    @property
    def max_tokens(self) -> int:
        return int(self.skeleton.config.get_text_config().max_position_embeddings)

    def check_same(self, info: VllmInfo, where: str) -> None:
        """Raise if a server loaded a model of other shapes.

        Without methods of Headwater in its workers, only its folder tells. If that is on another machine, do nothing.
        """
        told, file = info.text_config, Path(info.model) / "config.json"
        if not told and file.is_file():
            told = json.loads(file.read_text(encoding="utf-8"))
            told = told.get("text_config", told)
        own = self.skeleton.config.get_text_config().to_dict()
        for key in _SHAPE_KEYS:
            if key in told and key in own and told[key] != own[key]:
                raise ConfigError(
                    [
                        f"{where} serves another model than this run trains: its {key} is {told[key]}, not {own[key]}; "
                        "start the server with the model of model.path"
                    ]
                )


@contextmanager
def model_folder(context: BackendContext) -> Iterator[Path]:
    """A folder that vLLM can load. A built-in model is written to a temporary one, which exists inside this block."""
    source = resolve_model(context.model_path)
    if source.kind != "tiny":
        yield local_folder(source)
        return
    with TemporaryDirectory(prefix="headwater-model-") as folder:
        config = context.config
        model = load_model(context.model_path, dtype=config.model.dtype, device="cpu", seed=config.run.seed)
        save_model(model, context.tokenizer, folder)
        yield Path(folder)
