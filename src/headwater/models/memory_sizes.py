"""How much memory a run's models, gradients, averages, activations and caches take, before anything is loaded.

Weights, gradients and averages follow from the number of parameters. Activations and workspaces are estimates, checked
against peaks that were measured on an H200 (``docs/performance.md``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from headwater.config.schema import Config
from headwater.models.builtin.tiny import build_config, find_preset
from headwater.models.device import resolve_dtype
from headwater.models.folder import quiet
from headwater.models.load import read_config
from headwater.models.source import locate, resolve_model
from headwater.models.vision.architecture import (
    GATED_ALIGNMENT,
    is_vision,
    patches_per_token,
    vision_parameter_names,
)

TRAINED_BYTES, GRADIENT_BYTES, AVERAGES_BYTES = 4, 4, 8
"""Of one trained weight: itself and its gradient in float32, and AdamW's two averages."""
_WIDE_BYTES = 4
"""Of a value of the residual stream and of a logit, which are float32 in any case."""
LOGITS_CHUNK_BYTES = (1 << 29) * _WIDE_BYTES
"""The learner computes logits in chunks of this size (``learner/packed_module.py``)."""
_KEPT_PER_TOKEN, _KEPT_WIDE = 25, 2
"""Values that a layer keeps for its backward pass, per token and hidden unit, if nothing is recomputed; and how many of
them belong to the residual stream."""
_ROW_BYTES = 10
"""Per logit of a row that is decoded: the logit, its float32 copy and a float32 result."""
_SAMPLED_BYTES = 28
"""Per logit of a row while its token is chosen with truncated sampling (``engine/kv_cache.py``)."""
BUCKET_BYTES = 1 << 29
"""Averages in one bucket of ``learner/streamed_averages.py``, of which three are in flight."""

GRAPHS_SHARE = 0.1
"""Of the device's memory, what the recorded passes of the learner may need at most (``learner.cuda_graphs``)."""
CACHE_BYTES = 512 * 2**20
"""Size limit of the engine's cache of features. The features of one batch are kept in any case."""
GPU_TOWER_NUMBERS = 80 * 2**20
"""Maximum size of the pictures, as tensors, that the engine's tower computes together on a GPU, unless one picture is
larger. These are the pictures of one batch of prompts: 34 of 512 tokens."""
GPU_TOWER_BYTES = 36 * GPU_TOWER_NUMBERS
"""Device memory that the engine leaves for the pass of a tower over one batch. In half precision, a layer of
Qwen2.5-VL's tower needs about 30 bytes for every number of the pictures."""
_COLOURS = 3


@dataclass(frozen=True)
class TowerSize:
    """Shapes of a vision tower with its projector."""

    num_parameters: int
    num_blocks: int
    width: int
    inner_width: int
    """Of the layers between two attentions."""
    patches_per_token: int
    """Of the decoder."""
    numbers_per_patch: int
    copied_width: int = 0
    """What ``inner_width`` is filled up to in copies of gated layers; 0 if nothing is copied."""

    @classmethod
    def of(cls, model: Any, names: Collection[str]) -> TowerSize:
        """``names`` are those of the tower's parameters."""
        vision = model.config.vision_config
        frames = getattr(vision, "temporal_patch_size", 1)
        is_gated = any(name.endswith("mlp.gate_proj.weight") for name in names)
        inner = int(vision.intermediate_size)
        filled = -(-inner // GATED_ALIGNMENT) * GATED_ALIGNMENT
        return cls(
            num_parameters=sum(each.numel() for name, each in model.named_parameters() if name in names),
            num_blocks=int(vision.depth if hasattr(vision, "depth") else vision.num_hidden_layers),
            width=int(vision.hidden_size),
            inner_width=inner,
            patches_per_token=patches_per_token(model.config),
            numbers_per_patch=int(_COLOURS * frames * vision.patch_size**2),
            copied_width=filled if is_gated else 0,
        )

    def copied_bytes(self, itemsize: int) -> int:
        """Copies of the weights of gated layers, in all blocks."""
        return self.num_blocks * 3 * self.width * self.copied_width * itemsize

    def pass_bytes(self, num_tokens: int, itemsize: int) -> int:
        """The peak of a pass that keeps nothing: pixels, and the widest place of a block."""
        inner = max(self.inner_width, self.copied_width)
        values = 4 * self.width + max(3 * inner, 4 * self.width)
        return self._pixel_bytes(num_tokens, itemsize) + num_tokens * self.patches_per_token * values * itemsize

    def kept_bytes(self, num_tokens: int, itemsize: int, *, is_checkpointed: bool) -> int:
        """What a trained tower keeps for its backward pass: pixels, inputs of the blocks or all they compute, and
        copies of weights that have another width."""
        block = num_tokens * self.patches_per_token * self.width * itemsize
        copies = self.copied_bytes(itemsize) if self.copied_width > self.inner_width else 0
        if is_checkpointed:  # one block at a time is computed again
            kept = block * (self.num_blocks + _KEPT_PER_TOKEN) + copies // self.num_blocks
        else:
            kept = block * self.num_blocks * _KEPT_PER_TOKEN + copies
        return self._pixel_bytes(num_tokens, itemsize) + kept

    def _pixel_bytes(self, num_tokens: int, itemsize: int) -> int:
        """Pixels are copied to the device in float32 and converted there."""
        return num_tokens * self.patches_per_token * self.numbers_per_patch * (_WIDE_BYTES + itemsize)


@dataclass(frozen=True)
class ModelSize:
    """Shapes of a decoder, and the number of its parameters."""

    num_parameters: int
    num_root_parameters: int
    """Outside of the layers: the embedding, and the output layer if it is not the same tensor."""
    largest_parameter: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    kv_values_per_token: int
    linear_shapes: tuple[tuple[str, int, int], ...] = ()
    """The last part of the name, input and output size of every linear layer of the decoder, which may have adapters.
    The output layer and a vision tower are not among them."""
    tower: TowerSize | None = None
    """Of a vision model. The parameters of the tower are root parameters as well."""
    num_head_parameters: int = 0
    """Of an output layer that is not the same tensor as the embedding."""

    @property
    def num_vision_parameters(self) -> int:
        """Of a vision tower and its projector."""
        return 0 if self.tower is None else self.tower.num_parameters

    @property
    def num_scoring_parameters(self) -> int:
        """Of the same model as a critic or a reward model, which has one output instead of the output layer."""
        return self.num_parameters - self.num_head_parameters

    @classmethod
    def read(cls, path: str, key: str = "model.path") -> ModelSize:
        """From the model's config alone. Weights are neither read nor allocated."""
        source = resolve_model(path, key)
        config = build_config(find_preset(path)) if source.kind == "tiny" else read_config(locate(source), key)
        return cls.of_config(config)

    @classmethod
    def of_config(cls, config: Any) -> ModelSize:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        with torch.device("meta"), quiet():
            if is_vision(config):
                return cls.of(AutoModelForImageTextToText.from_config(config))
            return cls.of(AutoModelForCausalLM.from_config(config.get_text_config(decoder=True)))

    @classmethod
    def of(cls, model: Any) -> ModelSize:
        config = model.config.get_text_config(decoder=True)
        decoder = model.get_decoder()
        in_layers = sum(each.numel() for each in decoder.layers.parameters())
        every = [each.numel() for each in model.parameters()]
        of_vision = vision_parameter_names(model)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
        return cls(
            num_parameters=sum(every),
            num_root_parameters=sum(every) - in_layers,
            largest_parameter=max(every),
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            kv_values_per_token=2 * config.num_hidden_layers * config.num_key_value_heads * head_dim,
            linear_shapes=tuple(
                (name.rpartition(".")[2], each.in_features, each.out_features)
                for name, each in decoder.named_modules()
                if isinstance(each, nn.Linear) and each is not head
            ),
            tower=TowerSize.of(model, of_vision) if of_vision else None,
            num_head_parameters=0 if head is None or head.weight is embedding else head.weight.numel(),
        )

    def adapter_parameters(self, rank: int, targets: Collection[str]) -> int:
        """Of LoRA adapters on the layers with these names, or on all."""
        return sum(rank * (into + out) for name, into, out in self.linear_shapes if not targets or name in targets)

    def activation_bytes(
        self,
        num_tokens: int,
        itemsize: int,
        *,
        is_checkpointed: bool,
        trains_all: bool = True,
        kept_logits_gib: float = 0.0,
    ) -> int:
        """The peak of a forward and backward pass, without weights and gradients of the whole model.

        It is reached either in the output layer or in a layer, whichever needs more. If only adapters are trained
        (``trains_all`` is false), the large weights have no gradients. ``kept_logits_gib`` is that of the config.
        """
        wide, narrow = (1, 0) if is_checkpointed else (_KEPT_WIDE, _KEPT_PER_TOKEN - _KEPT_WIDE)
        inputs = num_tokens * self.num_layers * self.hidden_size * (_WIDE_BYTES * wide + itemsize * narrow)
        all_logits = num_tokens * self.vocab_size * _WIDE_BYTES
        # A pass decides by its own trained tokens whether its logits are kept, so the most that are kept count.
        kept = min(int(kept_logits_gib * 2**30), all_logits)
        logits = min(LOGITS_CHUNK_BYTES, all_logits) + max(kept, min(LOGITS_CHUNK_BYTES, all_logits))
        head = self.vocab_size * self.hidden_size
        gathered = self.num_root_parameters * itemsize
        at_head = logits + gathered + (head * (itemsize + GRADIENT_BYTES) if trains_all else 0)
        layer = (self.num_parameters - self.num_root_parameters) // self.num_layers
        recomputed = num_tokens * (16 * self.hidden_size + 5 * self.intermediate_size) * itemsize
        of_weights = head * itemsize + layer * (2 * itemsize + GRADIENT_BYTES) if trains_all else 0
        at_layer = recomputed + gathered + of_weights
        return inputs + max(at_head, at_layer)

    def forward_bytes(self, num_tokens: int, itemsize: int, num_picture_tokens: int = 0) -> int:
        """The peak of a pass without gradients. A vision tower has computed all pictures before the decoder begins."""
        logits = 3 * min(LOGITS_CHUNK_BYTES, num_tokens * self.vocab_size * _WIDE_BYTES)
        decoder = num_tokens * self._pass_bytes(itemsize) + logits
        pictures = 0 if self.tower is None else self.tower.pass_bytes(num_picture_tokens, itemsize)
        return max(decoder, pictures) + self.num_root_parameters * itemsize

    def prefill_bytes(self, num_tokens: int, num_rows: int, itemsize: int) -> int:
        """What the engine needs for a pass over prompts, and to sample a token for every row."""
        return num_tokens * self._pass_bytes(itemsize) + num_rows * self.vocab_size * _SAMPLED_BYTES

    def _pass_bytes(self, itemsize: int) -> int:
        """Per token of a pass that keeps nothing."""
        values = 6 * self.hidden_size + 3 * self.intermediate_size
        return values * itemsize + self.hidden_size * (_WIDE_BYTES - itemsize)

    def decode_bytes(self, num_rows: int) -> int:
        """What the engine's CUDA graphs hold."""
        return num_rows * self.vocab_size * _ROW_BYTES


@dataclass(frozen=True)
class RunSizes:
    """Bytes of everything that a run holds on the GPU that its engine and its learner share."""

    weights: int
    """The engine's."""
    parameters: int
    """Of the policy, and of the critic, the reference and the reward model if there are any."""
    gradients: int
    optimizer: int
    streamed: int
    """Averages that are on the device at once if they are streamed."""
    activations: int
    """Of the pass that needs the most, beside the gradients."""
    prefill: int
    graphs: int
    kv_token: int
    """One token in the KV cache."""
    copies: int
    """The trained weights in the type that passes compute in, if all are converted at once."""
    pictures: int = 0
    """What the engine of a vision model keeps: features of pictures, and copies of weights of its tower."""
    tower: int = 0
    """A pass of the engine's vision tower."""

    @classmethod
    def of(
        cls,
        config: Config,
        policy: ModelSize,
        others: dict[str, ModelSize],
        num_rows: int,
        prefill: int,
    ) -> RunSizes:
        """``others`` are the critic, the reference and the reward model, by their section of the config.

        ``num_rows`` and ``prefill`` are those of the engine: sequences at once, and tokens of a prefill pass.
        """
        item = resolve_dtype(config.model.dtype, config.model.device).itemsize
        learner, lora = config.learner, config.lora
        trains_vision = not lora.rank and "vision" not in learner.freeze
        trained = policy.num_parameters - (0 if trains_vision else policy.num_vision_parameters)
        if lora.rank:
            trained = policy.adapter_parameters(lora.rank, lora.targets)
        # Beside adapters, the model has the type in which passes compute; otherwise all of it is loaded in float32.
        parameters = policy.num_parameters * TRAINED_BYTES
        if lora.rank:
            parameters = policy.num_parameters * item + trained * TRAINED_BYTES
        largest = policy.largest_parameter if not lora.rank else 0
        trained_together = trained  # the critic is trained before the policy, and its gradients are gone by then
        if "critic" in others:
            critic = others["critic"]
            frozen = critic.num_vision_parameters if "vision" in learner.freeze else 0
            trained_together = max(trained, critic.num_scoring_parameters - frozen)
            trained += critic.num_scoring_parameters - frozen
            parameters += critic.num_scoring_parameters * TRAINED_BYTES
            largest = max(largest, critic.largest_parameter)
        if "reference" in others:
            parameters += others["reference"].num_parameters * item
        if "reward" in others:
            parameters += others["reward"].num_scoring_parameters * item
        passes = {policy: not lora.rank}
        if "critic" in others:
            passes[others["critic"]] = True
        num_tokens, checkpointed = _tokens_of_step(config), learner.checkpoint_activations
        micro = min(learner.max_tokens_per_microbatch, num_tokens)

        def training_bytes(size: ModelSize, *, trains_all: bool) -> int:
            decoder = size.activation_bytes(
                micro,
                item,
                is_checkpointed=checkpointed,
                trains_all=trains_all,
                kept_logits_gib=learner.kept_logits_gib,
            )
            if size.tower is None:
                return decoder
            pictures = min(micro, prompt_tokens_of_step(config))  # as if prompts consisted of pictures
            if trains_all and "vision" not in learner.freeze:
                return decoder + size.tower.kept_bytes(pictures, item, is_checkpointed=checkpointed)
            return max(decoder, size.tower.pass_bytes(pictures, item))

        activations = max(training_bytes(each, trains_all=trains_all) for each, trains_all in passes.items())
        gradients = trained_together * GRADIENT_BYTES
        if _makes_forward_passes(config, others):
            most = min(learner.forward_tokens, num_tokens)
            pictures = min(most, prompt_tokens_of_step(config))
            forward = max(each.forward_bytes(most, item, pictures) for each in (policy, *others.values()))
            activations = max(activations, forward - gradients)
        window = min(trained * AVERAGES_BYTES, max(BUCKET_BYTES, largest * AVERAGES_BYTES) + 2 * BUCKET_BYTES)
        return cls(
            weights=policy.num_parameters * item,
            parameters=parameters,
            gradients=gradients,
            optimizer=trained * AVERAGES_BYTES,
            streamed=max(0, window - activations),  # a step is taken when activations are gone
            activations=activations,
            prefill=policy.prefill_bytes(prefill, num_rows, item),
            graphs=policy.decode_bytes(num_rows),
            kv_token=policy.kv_values_per_token * item,
            copies=trained_together * item if learner.convert_at_once and item != TRAINED_BYTES else 0,
            pictures=0 if policy.tower is None else CACHE_BYTES + policy.tower.copied_bytes(item),
            tower=0 if policy.tower is None else GPU_TOWER_BYTES,
        )

    @property
    def certain(self) -> RunSizes:
        """The same without what is only estimated, or is used only by some runs."""
        return replace(self, activations=0, prefill=0, graphs=0, pictures=0, tower=0)


def _tokens_of_step(config: Config) -> int:
    """The most tokens that the responses of one step have, with their prompts, each of which counts once if the samples
    share it."""
    num_samples = config.trainer.num_prompts_per_step * config.rollout.num_samples_per_prompt
    return prompt_tokens_of_step(config) + num_samples * config.rollout.max_new_tokens


def prompt_tokens_of_step(config: Config) -> int:
    """The most tokens that the prompts of one step have."""
    num_samples = 1 if config.learner.share_prompts else config.rollout.num_samples_per_prompt
    return config.trainer.num_prompts_per_step * num_samples * config.data.max_prompt_tokens


def _makes_forward_passes(config: Config, others: dict[str, ModelSize]) -> bool:
    """Whether the learner computes log-probs, values or scores besides its updates."""
    return bool(others) or config.algorithm.old_logprobs != "rollout" or config.trainer.save_learner_logprobs
