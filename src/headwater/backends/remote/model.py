"""The model of a run, as a server of another program and the checks of its weights need it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headwater.backends import BackendContext
from headwater.backends.remote.link import OtherWeights, ServerInfo
from headwater.config.schema import Config
from headwater.core.errors import ConfigError
from headwater.engine.adapters import add_adapters
from headwater.models.load import end_token_ids, load_model, load_part, load_processor, local_folder
from headwater.models.save import save_model
from headwater.models.source import resolve_model
from headwater.models.vision.architecture import vision_parameter_names
from headwater.models.vision.processor import VisionProcessor

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
    processor: VisionProcessor | None = None
    """Of a model that reads images."""

    @classmethod
    def of(cls, context: BackendContext) -> RunModel:
        """With the adapters that ``rollout.publish=adapter`` publishes beside its weights."""
        config = context.config
        skeleton, _ = load_part(context.model_path, dtype=config.model.dtype, seed=config.run.seed)
        if config.rollout.publish == "adapter":
            lora = config.lora
            add_adapters(skeleton, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)
        processor = load_processor(context.model_path, config.model.chat_template)
        return cls(skeleton, end_token_ids(skeleton, context.tokenizer), processor)

    @property
    def vocab_size(self) -> int:
        return int(self.skeleton.config.get_text_config().vocab_size)

    @property
    def max_tokens(self) -> int:
        return int(self.skeleton.config.get_text_config().max_position_embeddings)

    def trains_vision(self, config: Config) -> bool:
        """Whether the vision tower of one version differs from that of the next."""
        if self.processor is None or "vision" in config.learner.freeze:
            return False
        if not config.lora.rank:
            return True
        tower = vision_parameter_names(self.skeleton)
        # A name that both parts have means a layer of the language model.
        texts = [f".{name.rpartition('.')[0]}" for name, _ in self.skeleton.named_parameters() if name not in tower]
        return not all(any(layer.endswith(f".{target}") for layer in texts) for target in config.lora.targets)

    def check_same(self, info: ServerInfo, where: str) -> None:
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


@dataclass
class ServedWeights:
    """What the server was told, so that the process that replaces it can be told the same."""

    version: int = 0
    folder: str = ""
    """Where the newest weights are; empty before the first update, and if they were not sent through a file."""
    adapter_folder: str = ""
    """Where the newest adapters are that belong to them, if the server computes adapters beside its weights."""
    is_needed: bool = False
    """The server does not hold a complete version of this run. Requests wait until it does."""
    is_owned: bool = True
    """This run decides which weights the server has."""
    label: str = ""
    """Of the newest weights; empty before the first update."""
    labels: dict[str, int] = field(default_factory=dict)
    """The version behind every label of weights."""
    seen: str = ""
    """The label in the last answer. If another program publishes the weights, only this label shows a change."""

    def cache_name(self, version: int) -> str:
        """Identifies the weights of a request that is sent with ``version`` in the cache of prompts."""
        return str(version) if self.is_owned else self.seen

    def version_of(self, label: str) -> int | None:
        """None for weights that this run did not publish, unless another program publishes them."""
        if self.is_owned:
            return self.labels.get(label)
        return int(label) if label.isascii() and label.isdecimal() else 0

    def are_on(self, label: str) -> bool:
        """Whether a server that tells this label of its weights has the newest ones, as far as that can be told."""
        return not (self.is_owned and self.label and label) or label == self.label

    def check(self, label: str) -> None:
        """Raise if tokens come from weights that the server should not have."""
        if not self.are_on(label):
            raise OtherWeights(
                f"it generates with weights labelled {label!r} instead of {self.label!r}, as if it had been restarted"
            )


@contextmanager
def model_folder(context: BackendContext) -> Iterator[Path]:
    """A folder that the server can load. A built-in model is written to a temporary one, removed after this block."""
    source = resolve_model(context.model_path)
    if source.kind != "tiny":
        yield local_folder(source)
        return
    with TemporaryDirectory(prefix="headwater-model-") as folder:
        config = context.config
        model = load_model(context.model_path, dtype=config.model.dtype, device="cpu", seed=config.run.seed)
        save_model(model, context.tokenizer, folder, processor=load_processor(context.model_path))
        yield Path(folder)
