"""Every setting, stated once: its type, its default, its allowed values, and an explanation.

``headwater config`` prints the text under a field beside its value. Importing this file does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

from headwater.config.cluster_schema import ClusterConfig
from headwater.config.constraints import AtLeast, Extension, LessThan, MoreThan, NotEmpty, PlainName, Within
from headwater.config.rollout_schema import RewardConfig, RolloutConfig, SandboxConfig, ToolsConfig
from headwater.config.rollout_schema import WeightEncoding as WeightEncoding
from headwater.config.rollout_schema import WeightLink as WeightLink
from headwater.config.rollout_schema import WeightTransfer as WeightTransfer
from headwater.config.training_schema import CriticConfig, EvalConfig, LoraConfig, ReferenceConfig
from headwater.config.training_schema import Schedule as Schedule
from headwater.core.capabilities import UpdateMode as UpdateMode

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class RunConfig:
    name: Annotated[str, PlainName()] = "run"
    """Name of the run directory; run.if_exists says what happens if there is one."""
    project: Annotated[str, NotEmpty()] = "headwater"
    """Project under which trackers show the run."""
    root: Annotated[str, NotEmpty()] = "runs"
    """Folder that holds the run directories."""
    if_exists: Literal["number", "resume"] = "number"
    """What to do if the run directory exists: `number` starts a new run with a number appended to the name, `resume`
    continues the run, with the settings that are given now, or does nothing if it is complete. With eval.only, always
    `number`."""
    seed: Annotated[int, AtLeast(0)] = 0
    """Seed of initial weights, data order and every sampled token."""
    deterministic: bool = False
    """Make the run bitwise repeatable, also after a resume, on the same kind of device. Uses engine.deterministic and
    deterministic sums, without join_projections and cuda_graphs. With rollout.max_staleness > 0, batches are taken in
    order."""


@dataclass(frozen=True)
class ModelConfig:
    path: Annotated[str, NotEmpty("give a folder, a hub id, 'tiny:<preset>' or 'smollm2'")] = "tiny:qwen3"
    """A local folder, a hub id, tiny:<preset> (built offline), or smollm2 (see `headwater fetch smollm2`)."""
    chat_template: str = ""
    """Chat template: the path of a Jinja file, chatml or plain; empty means the model's own. A model without one takes
    prompts that are plain text."""
    dtype: Dtype = "auto"
    """Number type of generation and of the learner's passes; trained weights stay float32. `auto` chooses bfloat16 on
    a GPU that computes in it, otherwise float32; a run records it. `float16` needs a GPU and scales the loss."""
    device: str = "auto"
    """Device of the model: auto (CUDA if available), cpu, cuda or cuda:N."""


@dataclass(frozen=True)
class WarmStartConfig:
    num_steps: Annotated[int, AtLeast(0, "use 0 for no warm start")] = 0
    """Supervised steps on the demonstrations of the training rows before the first policy update; 0 means none."""
    num_sequences_per_step: Annotated[int, AtLeast(1)] = 64
    """Demonstrations in each supervised step."""
    learning_rate: Annotated[float, MoreThan(0)] = 1e-3
    """Learning rate of the supervised steps."""
    until_reward: Annotated[float, AtLeast(0, "use 0 to take all num_steps")] = 0.0
    """Stop early when sampled responses to training prompts reach this mean reward; 0 takes all steps."""


@dataclass(frozen=True)
class DataConfig:
    train: Annotated[tuple[str, ...], NotEmpty("name a task or at least one file")] = ("arithmetic",)
    """Training prompts: tasks (headwater/data/tasks, reasoning_gym:<name>), .parquet, .json or .jsonl files (also
    s3:// and other URLs), datasets of the hub (hub:openai/gsm8k), folders of datasets, or names of data.sources."""
    eval: tuple[str, ...] = ()
    """Held-out prompts, given like data.train; empty means the held-out split of the same task."""
    sources: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of single sources, by the name that data.train or data.eval has, such as {math:
    {source: hub:openai/gsm8k, weight: 2}}. Keys: source, subset, split, columns, system_prompt, data_source, max_rows,
    weight."""
    task_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the task, for example {max_operand: 99}; gsm8k takes {folder: ...}."""
    dataset: str = ""
    """Your own dataset class, as 'package.module:Class' or 'path/to/file.py:Class'; empty means RLHFDataset."""
    num_train_rows: Annotated[int, AtLeast(1)] = 2048
    """Number of training rows that a task generates; files are used in full."""
    num_eval_rows: Annotated[int, AtLeast(1)] = 256
    """Number of evaluation rows that a task generates; files are used in full."""
    max_train_rows: Annotated[int, AtLeast(0, "use 0 for all rows")] = 0
    """Use at most this many rows of data.train: a random choice with data.shuffle, else the first ones; 0 uses all."""
    max_eval_rows: Annotated[int, AtLeast(0, "use 0 for all rows")] = 0
    """Use at most this many rows of data.eval, chosen like data.max_train_rows; 0 uses all."""
    prompt_key: Annotated[str, NotEmpty()] = "prompt"
    """Column with the chat (a list of messages) or a plain string."""
    data_source_key: Annotated[str, NotEmpty()] = "data_source"
    """Column with the name that chooses the scorer; a row without it has the name of its file or task."""
    image_key: Annotated[str, NotEmpty()] = "images"
    """Column with the images for <image> placeholders."""
    video_key: Annotated[str, NotEmpty()] = "videos"
    """Column with the videos for <video> placeholders."""
    min_image_pixels: Annotated[int, AtLeast(0, "use 0 to enlarge no image")] = 0
    """Enlarge images and frames of videos with fewer pixels; 0 enlarges none. The model's processor has limits too."""
    max_image_pixels: Annotated[int, AtLeast(1)] = 1048576
    """Shrink images and frames of videos with more pixels, in proportion. Fewer pixels are fewer tokens."""
    video_frames_per_s: Annotated[float, MoreThan(0)] = 2.0
    """Frames taken from each second of a video file. Frames that a row lists are used as they are, at this rate if the
    row states none."""
    max_video_frames: Annotated[int, AtLeast(1)] = 64
    """Most frames of a video; a longer one loses frames at equal distances."""
    allow_remote_media: bool = False
    """Read images and videos of https://, s3:// and other URLs, and keep copies in the cache; false refuses them."""
    system_prompt: str = ""
    """System message for chats that have none; empty adds none."""
    chat_template_args: Mapping[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template, for example {enable_thinking: false}."""
    max_prompt_tokens: Annotated[int, AtLeast(1)] = 512
    """Longest prompt in tokens, after the chat template is applied."""
    truncation: Literal["filter", "left", "right", "middle", "error"] = "filter"
    """What to do with a longer prompt: `filter` drops it, `left`, `right` and `middle` cut it there, `error` stops
    the run."""
    num_filter_workers: Annotated[int, AtLeast(0, "use 0 to choose by the number of rows and cores")] = 0
    """Processes that measure prompt lengths; 0 chooses by the number of rows and cores."""
    shuffle: bool = True
    """Visit the rows in a new random order in every epoch; false keeps the file order."""


@dataclass(frozen=True)
class EngineConfig:
    max_sequences: Annotated[int, AtLeast(0, "use 0 for 256 on a CPU and 1024 on a GPU")] = 0
    """Sequences generated at the same time; 0 means 256 on a CPU and 1024 on a GPU."""
    max_queue: Annotated[int, AtLeast(1)] = 65536
    """Requests that may wait or run; more are refused."""
    max_prefill_tokens: Annotated[int, AtLeast(0, "use 0 for 1024 on a CPU and 16384 on a GPU")] = 0
    """Prompt tokens computed in one pass; longer prompts are split. 0 means 1024 on a CPU and 16384 on a GPU."""
    decode_steps: Annotated[int, AtLeast(1)] = 8
    """Tokens generated per sequence before the scheduler looks for finished and new requests."""
    overlap: bool = True
    """On a GPU, launch the next steps before reading the results of the last ones; turn off to debug the engine."""
    page_tokens: Annotated[int, AtLeast(0, "use 0 for 16 on a CPU and 64 on a GPU")] = 0
    """Tokens in one page of the KV cache; 0 means 16 on a CPU and 64 on a GPU."""
    kv_cache_gib: Annotated[float, AtLeast(0, "use 0 to size it from free memory")] = 0.0
    """Size of the KV cache in GiB; 0 derives it from free memory, and never more than all sequences could fill."""
    memory_fraction: Annotated[float, AtLeast(0, "use 0 for the default"), Within(0, 1)] = 0.0
    """Share of free memory for the KV cache; 0 means 0.85 for a server on a GPU, and 0.4 beside a learner or on a
    CPU."""
    keep_addresses: bool = False
    """On a GPU, give the KV cache and the weights fixed addresses, so that an engine that wakes up continues with the
    CUDA graphs it has instead of capturing them again. A run sets this itself if its memory plan releases them."""
    prefix_cache: bool = True
    """Keep the pages of finished sequences, so that prompts with the same beginning are not computed again."""
    update_mode: Literal["auto", UpdateMode] = "auto"
    """What running requests do when new weights arrive: `in_flight` keeps their KV cache, `interrupt` recomputes it,
    `drain` finishes them first. `auto` is `in_flight`, or `interrupt` with engine.deterministic."""
    deterministic: bool = False
    """Make the tokens and log-probs of a request bitwise independent of other requests; slower."""
    adapter_rank: Annotated[int, AtLeast(0, "use 0 for no adapters")] = 0
    """Rank of LoRA adapters that the engine computes beside its weights and takes alone as an update; 0 means none. A
    run sets this itself with rollout.publish=adapter."""
    adapter_alpha: Annotated[int, AtLeast(1)] = 32
    """Adapters are scaled by alpha / rank, as lora.alpha says for a run."""
    adapter_targets: tuple[str, ...] = ()
    """Linear layers that have an adapter, as lora.targets says for a run; empty means all except the output layer."""

    @cached_property
    def chosen_update_mode(self) -> UpdateMode:
        if self.update_mode != "auto":
            return self.update_mode
        return "interrupt" if self.deterministic else "in_flight"

    def chosen_sequences(self, *, on_gpu: bool) -> int:
        return self.max_sequences or (1024 if on_gpu else 256)

    def chosen_prefill_tokens(self, *, on_gpu: bool) -> int:
        return self.max_prefill_tokens or (16384 if on_gpu else 1024)

    def chosen_memory_fraction(self, *, has_gpu_alone: bool) -> float:
        return self.memory_fraction or (0.85 if has_gpu_alone else 0.4)


OldLogprobs = Literal["rollout", "recompute", "loglinear", "metrics"]
StatisticsLevel = Literal["none", "batch", "group"]


@dataclass(frozen=True)
class NormalizationConfig:
    mean_level: StatisticsLevel = "none"
    """Which mean to subtract: that of the whole `batch`, of the `group` of responses to one prompt, or `none`."""
    std_level: StatisticsLevel = "none"
    """Which standard deviation to divide by: that of the whole `batch`, of the `group`, or `none`."""
    leave_one_out: bool = False
    """Subtract the mean of the other values (leave-one-out)."""
    unbiased: bool = True
    """Use the sample deviation (n - 1); false uses the population deviation (n)."""
    epsilon: Annotated[float, MoreThan(0)] = 1e-5
    """Added to the deviation, so that equal values are not divided by zero."""

    @cached_property
    def is_on(self) -> bool:
        return self.mean_level != "none" or self.std_level != "none"


@dataclass(frozen=True)
class AlgorithmConfig:
    advantage: Annotated[str, Extension("headwater.algorithms.advantages")] = "grpo"
    """Advantage estimator."""
    advantage_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the advantage estimator, for example {normalize_by_std: false}."""
    normalize_rewards: NormalizationConfig = field(default_factory=NormalizationConfig)
    """Normalisation of scores, before a divergence is subtracted and advantages are estimated."""
    normalize_advantages: NormalizationConfig = field(default_factory=NormalizationConfig)
    """Normalisation of the advantages of trained tokens; the returns that a critic learns are not changed."""
    policy_loss: Annotated[str, Extension("headwater.algorithms.policy_losses")] = "ppo"
    """Policy loss."""
    policy_loss_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the policy loss, for example {clip_high: 0.28}."""
    aggregation: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
    ] = "token-mean"
    """How token losses are combined into the loss of a step; seq-mean-token-sum-norm divides by
    rollout.max_new_tokens."""
    old_logprobs: OldLogprobs = "rollout"
    """The policy that an update is measured from: `rollout` is the one that sampled, `recompute` the learner's before
    the update, `loglinear` interpolates between the two, `metrics` recomputes and reports the error of loglinear."""
    corrections: tuple[Annotated[str, Extension("headwater.algorithms.corrections")], ...] = ()
    """Corrections for samples whose log-probs differ between engine and learner; all of them are applied. A name may
    be listed several times. With old_logprobs=rollout they are computed in every update, from the trained policy."""
    corrections_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of each correction, for example {truncate: {upper: 2.0}}; for a name that is listed several
    times, a list with one mapping for each."""
    kl_in_reward: Annotated[float, AtLeast(0)] = 0.0
    """Coefficient of the divergence from the reference policy that is subtracted from each token's reward; 0 means
    none."""
    kl_in_loss: Annotated[float, AtLeast(0)] = 0.0
    """Coefficient of the divergence from the reference policy that is added to each token's loss; 0 means none."""
    kl_estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"] = "k3"
    """Estimator of the divergence from sampled tokens; a + keeps its value and uses the gradient of k2."""
    kl_clamp: Literal["k3", "all", "none"] = "k3"
    """Which estimators are limited to ±10: `k3` only, as in verl, `all`, as in AReaL, or `none`."""
    kl_target: Annotated[float, AtLeast(0, "use 0 for a fixed coefficient")] = 0.0
    """Adjust kl_in_reward to keep the mean divergence near this value; 0 keeps it fixed."""
    kl_horizon: Annotated[int, AtLeast(1)] = 10000
    """Number of samples over which kl_in_reward is adjusted; a larger number adjusts more slowly."""
    entropy_bonus: Annotated[float, AtLeast(0)] = 0.0
    """Coefficient of the entropy that is subtracted from each token's loss; 0 means none."""
    filter_groups: bool = False
    """Replace groups whose samples all have the same score by new prompts, because they give no gradient (DAPO)."""
    max_filter_rounds: Annotated[int, AtLeast(1)] = 10
    """With filter_groups or rollout.should_accept, rounds of new prompts before a step continues with the groups it
    has."""


_FORWARD_FACTOR = 4


@dataclass(frozen=True)
class LearnerConfig:
    learning_rate: Annotated[float, MoreThan(0)] = 1e-6
    """Peak learning rate of AdamW."""
    num_warmup_steps: Annotated[int, AtLeast(0)] = 0
    """Optimiser steps over which the learning rate rises from zero."""
    warmup_fraction: Annotated[float, AtLeast(0), LessThan(1, "the learning rate must reach its peak")] = 0.0
    """Share of all optimiser steps over which the learning rate rises, instead of a number in num_warmup_steps."""
    schedule: Schedule = "constant"
    """Course of the learning rate from the warm-up to the last step. Steps without a gradient do not advance it."""
    lowest_learning_rate_fraction: Annotated[float, Within(0, 1)] = 0.0
    """Final learning rate of a linear or cosine schedule, as a fraction of the peak."""
    weight_decay: Annotated[float, AtLeast(0)] = 0.0
    """Decoupled weight decay."""
    adam_beta1: Annotated[float, Within(0, 0.9999)] = 0.9
    """Decay of AdamW's average of gradients."""
    adam_beta2: Annotated[float, Within(0, 0.9999)] = 0.95
    """Decay of AdamW's average of squared gradients."""
    adam_epsilon: Annotated[float, MoreThan(0)] = 1e-8
    """Added to the root of AdamW's average of squared gradients, so that nothing is divided by zero."""
    max_grad_norm: Annotated[float, MoreThan(0)] = 1.0
    """Gradients with a larger norm are scaled down to this norm."""
    max_bad_steps: Annotated[int, AtLeast(1)] = 3
    """Consecutive optimiser steps with a non-finite loss or gradient before the run stops; each of them is skipped."""
    loss_scale: Annotated[float, AtLeast(1)] = 65536.0
    """In float16, the factor of the loss at the start, a power of two. It is halved when a gradient overflows, which
    skips the step."""
    loss_scale_growth_steps: Annotated[int, AtLeast(1)] = 200
    """In float16, optimiser steps without an overflow after which the loss scale is doubled."""
    num_minibatches: Annotated[int, AtLeast(1)] = 1
    """Optimiser steps per pass over a batch; must divide trainer.num_prompts_per_step."""
    num_epochs: Annotated[int, AtLeast(1)] = 1
    """Passes over each batch."""
    skip_zero_advantages: bool = True
    """Do not compute samples whose advantage is zero; turn off for a loss with terms that do not depend on the
    advantage."""
    max_tokens_per_microbatch: Annotated[int, AtLeast(1)] = 16384
    """Tokens per pass with gradients. Lower it to save memory; gradients stay the same."""
    max_tokens_per_forward_pass: Annotated[int, AtLeast(0, "use 0 for 4 times max_tokens_per_microbatch")] = 0
    """Tokens per pass without gradients: log-probs of the policy and the reference, values, the reward model. 0 means
    4 times max_tokens_per_microbatch, because such a pass keeps no activations."""
    share_prompts: bool = True
    """Compute the prompt of a group once for all its samples, forward and backward."""
    context_parallel: Annotated[int, AtLeast(1)] = 1
    """Ranks that compute each micro-batch together, every one a slice of its tokens; a rank then needs that much less
    memory for activations. Must divide the number of ranks and the model's attention heads."""
    freeze: tuple[Literal["vision"], ...] = ()
    """Parts of the model that are not trained. `vision` is the tower that reads images and videos, with its projector:
    it needs no gradients and no optimiser state. Empty trains all parts."""
    checkpoint_activations: bool = False
    """Keep only the input of each layer and recompute the rest in the backward pass: less memory, a third more work."""
    kept_logits_gib: Annotated[float, AtLeast(0)] = 2.0
    """Keep the logits of a pass for its backward pass if they need at most this much memory: 4 bytes per trained token
    and token of the vocabulary. Otherwise the output layer is computed twice, with the same result."""
    keep_logits_if_free: bool = True
    """On a GPU, keep logits beyond kept_logits_gib as well while a tenth of its memory, and what the output layer still
    needs, stay free. The result is the same. Turn it off if other programs need the memory."""
    fused_layers: bool = True
    """On a GPU, use fused kernels: our norms of the float32 residual stream, and the rotary embeddings and gated
    products of liger-kernel if it is installed."""
    join_projections: bool = True
    """On a GPU with fused_layers and convert_at_once, compute projections of the same input as one product: queries,
    keys and values, and the two of a gated layer. Not used for layers with LoRA adapters, or with run.deterministic."""
    compile: bool = False
    """Compile the layers with torch.compile instead: takes a minute at the start, then a few per cent faster on a
    GPU."""
    convert_at_once: bool = True
    """With a single rank, convert all weights to model.dtype once per update, which needs 2 bytes per weight. If off,
    or without room at the start, every pass converts one layer at a time, without join_projections and cuda_graphs."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """On a GPU with a single rank, `auto` fills small packs up to one of a few shapes, records the kernels of their
    passes as CUDA graphs, and launches each pass with one call. This needs up to a tenth of the GPU's memory."""
    offload_optimizer: bool = False
    """On a GPU, keep AdamW's averages in main memory and stream them through the device in each step."""
    offload_during_rollout: bool = False
    """On a GPU, move the learner to main memory during generation, and free the KV cache during training."""
    residency: tuple[Literal["auto", "resident", "kv_cache", "weights", "parameters", "optimizer"], ...] = ("auto",)
    """What leaves a GPU that engine and learner share while it is not needed: `auto` plans it and moves as little as
    possible; `resident` is nothing, apart from the offload settings; a list names what leaves."""
    rank_timeout_s: Annotated[float, MoreThan(0)] = 1800.0
    """With several ranks (torchrun or Ray), the longest time that one call of the learner may take before the run
    ends."""

    @cached_property
    def forward_tokens(self) -> int:
        """``max_tokens_per_forward_pass``, with its default filled in."""
        return self.max_tokens_per_forward_pass or _FORWARD_FACTOR * self.max_tokens_per_microbatch


@dataclass(frozen=True)
class ProfileConfig:
    steps: tuple[Annotated[int, AtLeast(1)], ...] = ()
    """Training steps that torch's profiler records, for example [3, 4]; the first one is 1. Each becomes a Chrome trace
    in profile/. A recorded step is slower."""
    ranks: tuple[Annotated[int, AtLeast(0)], ...] = (0,)
    """Ranks of the learner that are recorded."""
    memory: bool = False
    """Also record who allocated the memory in use: on a GPU, profile/*.pickle for pytorch.org/memory_viz."""


@dataclass(frozen=True)
class TrainerConfig:
    total_steps: Annotated[int, AtLeast(1)] = 100
    """Training steps of the run."""
    total_epochs: Annotated[int, AtLeast(0, "use 0 to count steps")] = 0
    """Passes over the training prompts, from which the number of steps follows, rounded down; it then replaces
    total_steps. 0 means that total_steps counts."""
    num_prompts_per_step: Annotated[int, AtLeast(1)] = 32
    """Prompts, and therefore groups, in each training step."""
    checkpoint_every_steps: Annotated[int, AtLeast(0, "use 0 to save only at the end")] = 0
    """Save a checkpoint every N steps, in addition to the one at the end or at Ctrl-C; 0 means only that one."""
    checkpoint_every_epochs: Annotated[int, AtLeast(0, "use 0 to save only at the end")] = 0
    """Save a checkpoint after every Nth pass over the training prompts; 0 means no such checkpoint."""
    checkpoint_every_minutes: Annotated[float, AtLeast(0, "use 0 to save only at the end")] = 0.0
    """Save a checkpoint after the first step that ends this long after the last checkpoint; 0 means no such
    checkpoint."""
    keep_checkpoints: Annotated[int, AtLeast(1)] = 2
    """Number of newest checkpoints to keep. The best one, if best_metric is set, is kept in addition."""
    best_metric: str = ""
    """A metric of evaluation, for example eval/reward/mean. Whenever an evaluation improves it, a checkpoint is saved
    and kept. Empty keeps only the newest checkpoints."""
    best_mode: Literal["max", "min"] = "max"
    """Whether a larger or a smaller best_metric is better."""
    checkpoint_in_background: bool = True
    """Write checkpoints from a copy in main memory while training continues; each rank copies its own part. With too
    little main memory for the copy, only checksums and uploads are in the background. false waits for all of it."""
    checkpoint_dir: str = ""
    """A folder or an fsspec URL, such as s3://bucket/runs, that gets a copy of the kept checkpoints and the records, in
    a folder named after the run. `headwater train --resume` accepts it. Empty makes no copy."""
    checkpoint_dtype: Literal["trained", "float32", "bfloat16", "float16"] = "trained"
    """Number type of the exported model in a checkpoint (model/). `trained` keeps the type of the trained weights:
    float32, or model.dtype with LoRA. `bfloat16` halves the export. Resuming is exact either way: it uses train/."""
    checkpoint_optimizer: bool = True
    """Whether checkpoints contain AdamW's averages, 8 bytes per trained weight. Without them a run can be resumed, but
    with a new optimiser state, so it does not continue exactly as if it had not stopped."""
    save_rollouts_every_steps: Annotated[int, AtLeast(0, "use 0 to save none")] = 1
    """Write the rollouts of every Nth step to rollouts/*.parquet; 0 writes none."""
    save_learner_logprobs: bool = False
    """Add the learner's log-probs and entropies to the saved rollouts and evaluations, in the columns learner_logprobs
    and entropies. This computes one more forward pass where training does not need it."""
    num_threads: Annotated[int, AtLeast(0, "use 0 for torch's choice")] = 0
    """Number of CPU threads that torch uses; 0 leaves the choice to torch."""
    trace: bool = False
    """Write trace.json, a timeline of generation and training; open it in Perfetto (ui.perfetto.dev)."""
    trackers: tuple[Annotated[str, Extension("headwater.observe.trackers")], ...] = ()
    """Where metrics go in addition to metrics.jsonl and the progress display; any number of them. One that fails never
    stops the run."""
    tracker_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the trackers in trainer.trackers by their name, for example {wandb: {mode: offline}}."""
    num_tracked_samples: Annotated[int, AtLeast(0, "use 0 for none")] = 10
    """Held-out prompts with a response that trackers get as a table after each evaluation; 0 means none."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    @property
    def saves_during_training(self) -> bool:
        """Whether there are checkpoints before the one at the end."""
        return bool(self.checkpoint_every_steps or self.checkpoint_every_epochs or self.checkpoint_every_minutes)


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
