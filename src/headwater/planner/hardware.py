"""Costs from first principles: the shape of a model, the rates of a GPU, and how much of them Headwater reaches.

The rates of the H200 are measured; the constants below name the file in ``benchmarks/results`` that each comes from.
Where a benchmark was run several times, they are fitted to the newest record. ``benchmarks/planner_accuracy.py``
compares the formulas with these records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwater.config.schema import Config
from headwater.core.errors import HeadwaterError
from headwater.core.registry import nearest
from headwater.planner.costs import Costs, GenerationCosts, LearnerCosts
from headwater.trainer.logprob_sources import needs_logprobs_first

GIB = 2**30


@dataclass(frozen=True)
class ModelShape:
    """A decoder with gated MLPs, as Llama and Qwen have it."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool = False
    """The output layer is the transposed embedding."""
    has_vision_tower: bool = False
    """The model also reads pictures. Its vision tower is not part of these numbers."""

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        return self.num_layers * self.layer_parameters + self.embedding_parameters * (1 if self.is_tied else 2)

    @property
    def product_parameters(self) -> int:
        """The parameters that a token is multiplied with: all but the input embedding."""
        return self.num_layers * self.layer_parameters + self.embedding_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """In bfloat16."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def attention_flops(self, context: float) -> float:
        """Of one token that attends to ``context`` others, in the forward pass."""
        return 4.0 * self.num_layers * self.num_heads * self.head_dim * context

    @classmethod
    def of_config(cls, name: str, config: Any) -> ModelShape:
        """From a ``transformers`` config; of a model with images, the part that is a language model."""
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        try:
            heads = int(text.num_attention_heads)
            return cls(
                name,
                num_layers=int(text.num_hidden_layers),
                hidden_size=int(text.hidden_size),
                intermediate_size=int(text.intermediate_size),
                num_heads=heads,
                num_kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
                head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
                vocab_size=int(text.vocab_size),
                is_tied=any(bool(getattr(each, "tie_word_embeddings", False)) for each in (config, text)),
                has_vision_tower=getattr(config, "vision_config", None) is not None,
            )
        except (AttributeError, TypeError) as error:
            raise HeadwaterError(
                f"model {name}: its config.json is not that of a decoder such as Llama or Qwen ({error}); "
                "measure its costs with --measure or --run, or name a model of similar size with --model"
            ) from error


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152, is_tied=True),
        ModelShape("qwen2.5-0.5b", 24, 896, 4864, 14, 2, 64, 151936, is_tied=True),
        ModelShape("qwen2.5-1.5b", 28, 1536, 8960, 12, 2, 128, 151936, is_tied=True),
        ModelShape("qwen2.5-3b", 36, 2048, 11008, 16, 2, 128, 151936, is_tied=True),
        ModelShape("qwen2.5-7b", 28, 3584, 18944, 28, 4, 128, 152064),
        ModelShape("qwen2.5-14b", 48, 5120, 13824, 40, 8, 128, 152064),
        ModelShape("qwen2.5-32b", 64, 5120, 27648, 40, 8, 128, 152064),
        ModelShape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256),
        ModelShape("llama-3.1-70b", 80, 8192, 28672, 64, 8, 128, 128256),
        ModelShape("qwen2.5-72b", 80, 8192, 29568, 64, 8, 128, 152064),
    )
}
"""Well-known shapes, so that a plan needs no files of the model."""


def shape_of(name: str, key: str = "model.path") -> ModelShape:
    """By the name of a well-known shape, also as part of a hub id, or from the config.json of a model."""
    from headwater.models.source import SMOLLM2, resolve_model

    plain = name.rsplit("/", 1)[-1].lower()
    for known in sorted(SHAPES, key=len, reverse=True):
        if plain == known or plain.startswith(f"{known}-"):
            return SHAPES[known]
    if name == SMOLLM2:
        return SHAPES["smollm2-135m"]
    source = resolve_model(name, key)
    if source.kind == "tiny":
        from headwater.models.builtin.tiny import build_config, find_preset

        return ModelShape.of_config(name, build_config(find_preset(name, key)))
    from headwater.models.load import read_config
    from headwater.models.source import locate

    try:
        return ModelShape.of_config(name, read_config(locate(source), key))
    except HeadwaterError as error:
        hint = nearest(plain, sorted(SHAPES))
        raise HeadwaterError(f"{error}; or give the shape of a well-known model with --model ({hint})") from error


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU: its rates, and the share of them that Headwater reaches."""

    name: str
    memory_bytes: float
    flops: float
    """Per second, of large bfloat16 products."""
    bandwidth: float
    """Bytes per second of memory."""
    is_measured: bool = False


GPUS = {
    # flops and bandwidth: the ceilings in gpu_rollout_qwen.json and gpu_rollout_smollm2.json
    "h200": Gpu("h200", 139 * GIB, 785e12, 4.12e12, is_measured=True),
    # The others are the H200, scaled by the datasheets' ratios.
    "h100": Gpu("h100", 79 * GIB, 785e12, 4.12e12 * 3.35 / 4.8),
    "a100": Gpu("a100", 79 * GIB, 785e12 * 312 / 989, 4.12e12 * 2.0 / 4.8),
}

TRAIN_EFFICIENCY = 0.64
"""Of the products that a training step computes, recomputation included: gpu_train_step_packed_5c7a5498.json. The 7B
model reaches 0.74 with all weights (gpu_hybrid_step_7b.json), and with LoRA 0.55, in an older record
(train_step_qwen2.5-7b_h200.json)."""
FORWARD_EFFICIENCY = 0.66
"""Of a pass without gradients: logprobs_utilisation in gpu_train_step_packed_5c7a5498.json."""
PREFILL_EFFICIENCY = 0.85
"""gpu_group_prefill.json: 30,720 tokens of a 1.5B model in 136 ms."""
_LAYER_S = 33e-6
"""Launching and running the small kernels of a layer in a decode step: what is left of a step after weights, products,
keys and values. Fitted, with the next one, to gpu_rollout_qwen_alone.json, gpu_rollout_qwen.json (1024x512) and
gpu_rollout_smollm2.json: the largest error is 7%."""
_SEQUENCE_S = 0.6e-6
"""Per sequence in a step, from the same files."""
_VLLM_STEP_S, _VLLM_SEQUENCE_S = 1.15e-3, 37e-6
"""What vLLM 0.23 takes longer per step, and per sequence: gpu_rollout_qwen.json and gpu_rollout_smollm2.json. It was
limited by its host's processor."""
_PUBLISH_S = 0.05
"""What a publish to a server takes besides sending: gpu_steps_before_after.json, disaggregated."""


@dataclass(frozen=True)
class Transfer:
    """One way for weights to reach the engines."""

    rate: float
    """Bytes per second, to all engines together."""
    pause_share: float
    """The share of a publish in which the engines generate nothing."""
    source: str


TRANSFERS = {
    "shared_memory": Transfer(19.7e9, 104 / 157, "as measured through shared memory within one machine"),
    "cuda_ipc": Transfer(23.9e9, 74 / 129, "as measured with cuda_ipc on one GPU"),
    "file": Transfer(1.36e9, 517 / 2278, "as measured through a file on one machine; network file systems were not "
                     "measured"),
    "collective": Transfer(2.2e9, 1356 / 1395, "as measured over gloo between two processes of one machine; networks "
                           "and NCCL were not measured"),
}  # fmt: skip
"""By ``rollout.weight_transfer``. The shares are milliseconds of the pause / of the update in
gpu_weight_transfer_1.5b.json, to one server on the learner's own GPU, as are the rates."""
_MEMORY_RATE, _MEMORY_PAUSE_S = 25e9, 0.006
"""An engine in the learner's process: 0.06 to 0.10 s for 3.1 GB in gpu_end_to_end.json and 0.66 s for 15.2 GB in
gpu_hybrid_step_7b.json; the pause is from gpu_weight_swap_publish_256.json."""
GPUS_PER_MACHINE = 8
"""With more than these, weights are sent to other machines."""
_STEP_S, _STEP_TOKEN_S = 0.17, 0.08e-6
"""gpu_end_to_end.json: what is left of a step of 256 episodes; batch_assembly.json: the main thread's part, in which
the GPUs of the learner wait. The second is the work of one thread, whatever the number of GPUs."""
RANKS_EFFICIENCY = 0.9
"""Assumed, not measured: what several learner ranks reach of their number."""
TENSOR_EFFICIENCY = 0.85
"""Assumed, not measured: what several GPUs of one server reach of their number."""
_WEIGHTS_SHARE = 0.6
"""The most of a server's memory that weights may take; the rest is for the KV cache."""
_CACHE_SHARE = 0.85
"""``engine.memory_fraction`` of a server."""
_ACTIVATIONS, _ACTIVATIONS_CHECKPOINTED = 72.0, 11.0
"""Bytes per token of a micro-batch, layer and unit of the hidden size: peak_gib of gpu_train_step_packed_5c7a5498.json
and of train_step_qwen2.5-7b_h200.json, less the states of the parameters."""


@dataclass(frozen=True)
class Training:
    """What the config asks of the learner, in passes over the model."""

    is_checkpointed: bool = False
    is_lora: bool = False
    has_critic: bool = False
    has_reference: bool = False
    recomputes: bool = False
    """Log-probs of the policy before the update."""
    num_epochs: int = 1
    offloads_optimizer: bool = False
    microbatch_tokens: int = 16384

    @classmethod
    def of(cls, config: Config) -> Training:
        algorithm, learner = config.algorithm, config.learner
        return cls(
            is_checkpointed=learner.checkpoint_activations,
            is_lora=config.lora.rank > 0,
            has_critic=config.critic.enabled,
            has_reference=algorithm.kl_in_loss > 0 or algorithm.kl_in_reward > 0,
            # Where the update measures itself, only the mini-batches after the first one need a pass.
            recomputes=needs_logprobs_first(config, is_saved=False)
            or (algorithm.old_logprobs == "recompute" and learner.num_minibatches > 1),
            num_epochs=learner.num_epochs,
            offloads_optimizer=learner.offload_optimizer,
            microbatch_tokens=-(-learner.max_tokens_per_microbatch // learner.context_parallel),
        )

    def train_flops(self, shape: ModelShape, context: float) -> float:
        """Per trained token, with what is computed twice. ``context`` is the mean number of tokens it attends to."""
        forward = 2.0 * shape.product_parameters + shape.attention_flops(context)
        backward = forward if self.is_lora else 2 * forward  # LoRA needs no gradients of the large matrices
        policy = forward + backward + (forward if self.is_checkpointed else 0.0)
        critic = (3 + self.is_checkpointed) * forward if self.has_critic else 0.0
        return self.num_epochs * (policy + critic)

    def experience_flops(self, shape: ModelShape, context: float) -> float:
        num_passes = self.recomputes + self.has_reference + self.has_critic
        return num_passes * (2.0 * shape.product_parameters + shape.attention_flops(context))

    def learner_bytes(self, shape: ModelShape, num_ranks: int) -> float:
        """Memory of one GPU of the learner: states of the parameters, two gathered layers, activations."""
        count = shape.num_parameters
        trained = 4.0 + 4.0 + (0.0 if self.offloads_optimizer else 8.0)  # weights, gradients, AdamW's averages
        states = (2.0 if self.is_lora else trained) * count
        states += trained * count if self.has_critic else 0.0
        states += 2.0 * count if self.has_reference and not self.is_lora else 0.0
        gathered = 2.0 * (2 * shape.layer_parameters + 2 * shape.embedding_parameters) if num_ranks > 1 else 0.0
        per_unit = _ACTIVATIONS_CHECKPOINTED if self.is_checkpointed else _ACTIVATIONS
        activations = per_unit * self.microbatch_tokens * shape.num_layers * shape.hidden_size
        return states / num_ranks + gathered + activations


def gpus_per_server(shape: ModelShape, gpu: Gpu) -> int:
    """The fewest GPUs, a power of two, whose memory holds the weights and a reasonable KV cache."""
    count = 1
    while 2.0 * shape.num_parameters > _WEIGHTS_SHARE * gpu.memory_bytes * count:
        count *= 2
    return count


def roofline_costs(
    shape: ModelShape,
    gpu: Gpu,
    training: Training,
    *,
    num_learner_gpus: int,
    num_server_gpus: int = 1,
    context: float,
    is_foreign: bool = False,
    max_sequences: int = 0,
    weight_transfer: str = "shared_memory",
) -> Costs:
    """``num_server_gpus`` are those of one server. ``context`` is the mean number of tokens that a token attends to.

    ``is_foreign`` is that of ``BackendTraits``: such servers are taken to be as fast as vLLM.
    ``weight_transfer`` is one of ``TRANSFERS``, or empty for an engine in the learner's process.
    """
    server = num_server_gpus * (1.0 if num_server_gpus == 1 else TENSOR_EFFICIENCY)
    learner = num_learner_gpus * (1.0 if num_learner_gpus == 1 else RANKS_EFFICIENCY)
    weights = 2.0 * shape.num_parameters
    flops_s = 1 / (gpu.flops * learner)
    transfer = TRANSFERS[weight_transfer] if weight_transfer else None
    publish_s = _PUBLISH_S + weights / transfer.rate if transfer else weights / _MEMORY_RATE
    free = _CACHE_SHARE * (gpu.memory_bytes * num_server_gpus - weights)
    return Costs(
        generation=GenerationCosts(
            step_s=_LAYER_S * shape.num_layers + (_VLLM_STEP_S if is_foreign else 0.0),
            weights_s=weights / gpu.bandwidth / server,
            products_per_sequence_s=2.0 * shape.product_parameters / gpu.flops / server,
            step_per_sequence_s=_VLLM_SEQUENCE_S if is_foreign else _SEQUENCE_S,
            step_per_context_token_s=shape.kv_bytes_per_token / gpu.bandwidth / server,
            prefill_per_token_s=2.0 * shape.product_parameters / (gpu.flops * PREFILL_EFFICIENCY) / server,
            max_sequences=max_sequences or 1024,
            kv_cache_tokens=int(max(0.0, free) / shape.kv_bytes_per_token),
        ),
        learner=LearnerCosts(
            train_per_token_s=training.train_flops(shape, context) / TRAIN_EFFICIENCY * flops_s,
            experience_per_token_s=training.experience_flops(shape, context) / FORWARD_EFFICIENCY * flops_s,
            publish_s=publish_s,
            pause_s=transfer.pause_share * publish_s if transfer else _MEMORY_PAUSE_S,
            step_s=_STEP_S,
            step_per_token_s=_STEP_TOKEN_S,
        ),
        source=f"{shape.name} on {gpu.name}: rates of the GPU and what Headwater reached of them on an H200",
        notes=_notes(shape, gpu, num_learner_gpus, num_server_gpus, is_foreign, transfer),
    )


def _notes(
    shape: ModelShape,
    gpu: Gpu,
    num_learner_gpus: int,
    num_server_gpus: int,
    is_foreign: bool,
    transfer: Transfer | None,
) -> tuple[str, ...]:
    notes = []
    if shape.has_vision_tower:
        notes.append(
            "the vision tower and pictures are not counted, only the language model: a real step takes longer and "
            "needs more memory"
        )
    if not gpu.is_measured:
        notes.append(f"the {gpu.name} was not measured: its rates are those of the H200, scaled by the datasheets")
    if num_learner_gpus > 1:
        notes.append(f"several learner ranks are assumed to reach {RANKS_EFFICIENCY:.0%} of their number; not measured")
    if num_server_gpus > 1:
        notes.append(
            f"servers with {num_server_gpus} GPUs (tensor parallel) are assumed to reach {TENSOR_EFFICIENCY:.0%} of "
            "their number; not measured"
        )
    if is_foreign:
        notes.append("vLLM and SGLang: as vLLM 0.23 on a host whose processor was its limit")
    if transfer is None:
        notes.append(
            f"weights are assumed to reach the engine at {_MEMORY_RATE / 1e9:g} GB/s, as measured in one process"
        )
    else:
        notes.append(
            f"weights are assumed to reach all servers at {transfer.rate / 1e9:g} GB/s, {transfer.source}; the servers "
            f"pause for {transfer.pause_share:.0%} of that time, as measured with one server on the learner's GPU"
        )
    return tuple(notes)
