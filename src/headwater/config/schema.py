"""Every setting, stated once: its type, its default, what it may be, and one line that explains it.

The text under a field is what ``headwater config`` prints beside its value. Reading this file needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from headwater.config.constraints import AtLeast, Extension, MoreThan, NotEmpty, PlainName, Within
from headwater.core.protocols import UpdateMode as UpdateMode

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class RunConfig:
    name: Annotated[str, PlainName()] = "run"
    """Name of the run directory; a second run of the same name gets a number of its own."""
    root: Annotated[str, NotEmpty()] = "runs"
    """Folder that holds the run directories."""
    seed: Annotated[int, AtLeast(0)] = 0
    """Decides initial weights, data order and every sampled token."""


@dataclass(frozen=True)
class ModelConfig:
    path: Annotated[str, NotEmpty("give a folder, a hub id, 'tiny:<preset>' or 'smollm2'")] = "tiny:qwen3"
    """A local folder, a hub id, tiny:<preset> (built offline), or smollm2 (see `headwater fetch smollm2`)."""
    dtype: Dtype = "float32"
    """Number type of generation and of training's passes (its weights stay float32); CPUs are fast in float32."""
    device: str = "auto"
    """Where the model runs: auto (CUDA when there is one), cpu, cuda or cuda:N."""


@dataclass(frozen=True)
class WarmStartConfig:
    num_steps: Annotated[int, AtLeast(0, "use 0 for no warm start")] = 0
    """Supervised steps on the training rows' demonstrations before the first policy update; 0 turns it off."""
    num_sequences_per_step: Annotated[int, AtLeast(1)] = 64
    """Demonstrations in each supervised step."""
    learning_rate: Annotated[float, MoreThan(0)] = 1e-3
    """Learning rate of the supervised steps."""
    until_reward: Annotated[float, AtLeast(0, "use 0 to take all num_steps")] = 0.0
    """Stop early once sampled responses to training prompts reach this mean reward; 0 takes all steps."""


@dataclass(frozen=True)
class DataConfig:
    train: Annotated[tuple[str, ...], NotEmpty("name a task or at least one file")] = ("arithmetic",)
    """Source of prompts: tasks (see headwater/data/tasks, and reasoning_gym:<name>) or .parquet/.json/.jsonl files."""
    eval: tuple[str, ...] = ()
    """Held-out prompts, named like data.train; empty means the held-out split of the same task."""
    task_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the task, for example {max_operand: 99}; gsm8k takes {folder: ...}."""
    dataset: str = ""
    """Your own dataset class, as 'package.module:Class' or 'path/to/file.py:Class'; empty means RLHFDataset."""
    num_train_rows: Annotated[int, AtLeast(1)] = 2048
    """Rows a generated task makes for training; files are used whole."""
    num_eval_rows: Annotated[int, AtLeast(1)] = 256
    """Rows a generated task makes for evaluation; files are used whole."""
    prompt_key: Annotated[str, NotEmpty()] = "prompt"
    """Column that holds the chat (a list of messages) or a plain string."""
    image_key: Annotated[str, NotEmpty()] = "images"
    """Column that holds the images behind <image> placeholders."""
    video_key: Annotated[str, NotEmpty()] = "videos"
    """Column that holds the videos behind <video> placeholders."""
    system_prompt: str = ""
    """Put before every chat that has no system message; empty adds none."""
    chat_template_args: Mapping[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template, for example {enable_thinking: false}."""
    max_prompt_tokens: Annotated[int, AtLeast(1)] = 512
    """Longest prompt, in tokens, after the chat template."""
    truncation: Literal["filter", "left", "right", "middle", "error"] = "filter"
    """A longer prompt is filtered out, cut on the left, right or in the middle, or stops the run with an error."""
    num_filter_workers: Annotated[int, AtLeast(0, "use 0 to choose by the number of rows and cores")] = 0
    """Processes that measure prompt lengths; 0 chooses by the number of rows and cores."""
    shuffle: bool = True
    """Visit the rows in a new random order every epoch; false keeps the file order."""


WeightTransfer = Literal["shared_memory", "file"]


@dataclass(frozen=True)
class RolloutConfig:
    backend: Annotated[str, Extension("headwater.backends")] = "embedded"
    """The inference engine that generates responses."""
    workflow: Annotated[str, Extension("headwater.workflows")] = "rlvr"
    """How one episode runs, from prompt to scored trajectory."""
    workflow_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the workflow class."""
    num_samples_per_prompt: Annotated[int, AtLeast(1)] = 8
    """Responses drawn for each prompt: the group that advantages compare."""
    max_new_tokens: Annotated[int, AtLeast(1)] = 256
    """Longest response, in tokens; all turns of an episode and what stands between them share it."""
    temperature: Annotated[float, MoreThan(0, "training needs randomness; greedy decoding is for eval.temperature")] = (
        1.0
    )
    """Sampling temperature; the learner applies the same one."""
    top_k: Annotated[int, AtLeast(0, "use 0 to keep all tokens")] = 0
    """Sample among the k likeliest tokens; 0 keeps all."""
    top_p: Annotated[float, MoreThan(0, "use 1.0 to keep all tokens"), Within(0, 1)] = 1.0
    """Sample among the likeliest tokens that hold this much probability; 1.0 keeps all."""
    max_staleness: Annotated[int, AtLeast(0, "use 0 for synchronous training")] = 0
    """How many policy versions a trained token may lag behind; 0 is synchronous."""
    on_stale: Literal["mask", "drop", "wait"] = "mask"
    """Tokens older than that: out of the loss; their group dropped, its prompt drawn again once; or updates wait."""
    max_concurrent_groups: Annotated[int, AtLeast(0, "use 0 for as many as max_staleness allows")] = 0
    """Most prompt groups that run at a time; 0 means as many as max_staleness allows."""
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """Where generation runs: colocated shares this process and device with training; disaggregated has its own."""
    weight_transfer: WeightTransfer = "shared_memory"
    """How new weights reach a disaggregated engine."""
    episode_timeout_s: Annotated[float, MoreThan(0)] = 1800.0
    """Longest time the episodes of one prompt may take, rewards and tools included; longer is a failure."""
    timeout_s: Annotated[float, MoreThan(0)] = 1800.0
    """Hard limit on the wait for one batch of rollouts."""
    on_failure: Literal["stop", "drop"] = "stop"
    """When an episode or its reward fails: stop the run with the cause, or drop its group, count it, draw another."""
    max_retries: Annotated[int, AtLeast(0)] = 0
    """How often a group whose episode or reward failed is tried again before that."""
    allow_partial_groups: bool = False
    """With on_failure=drop, go on without the samples that failed, where at least two are left to compare."""


@dataclass(frozen=True)
class EngineConfig:
    max_sequences: Annotated[int, AtLeast(0, "use 0 for 256 on a CPU and 1024 on a GPU")] = 0
    """Most sequences generated at a time; 0 means 256 on a CPU and 1024 on a GPU."""
    max_queue: Annotated[int, AtLeast(1)] = 65536
    """Requests that may wait or run; one more is refused."""
    max_prefill_tokens: Annotated[int, AtLeast(0, "use 0 for 1024 on a CPU and 16384 on a GPU")] = 0
    """Prompt tokens computed at a time; longer ones in chunks; 0 means 1024 on a CPU, 16384 on a GPU."""
    decode_steps: Annotated[int, AtLeast(1)] = 8
    """Tokens made for every sequence between two looks at what has finished or arrived."""
    overlap: bool = True
    """On a GPU, queue the next steps before reading the last ones; turn off to follow the engine in a debugger."""
    page_tokens: Annotated[int, AtLeast(0, "use 0 for 16 on a CPU and 64 on a GPU")] = 0
    """Tokens in one page of the KV cache; 0 means 16 on a CPU and 64 on a GPU."""
    kv_cache_gib: Annotated[float, AtLeast(0, "use 0 to size it from free memory")] = 0.0
    """Size of the KV cache; 0 sizes it from what is free, and never larger than all sequences could fill."""
    memory_fraction: Annotated[float, AtLeast(0, "use 0 for the default"), Within(0, 1)] = 0.0
    """Share of free memory for the KV cache; 0 means 0.85 for a server on a GPU, 0.4 beside a learner or on a CPU."""
    prefix_cache: bool = True
    """Keep the pages of finished sequences, so that a prompt that starts alike is not computed again."""
    update_mode: UpdateMode = "interrupt"
    """New weights: running requests start again from their tokens, go on with their KV (in_flight), or end first."""
    deterministic: bool = False
    """A request's tokens and log-probs do not depend on what else runs, to the last bit; slower."""


@dataclass(frozen=True)
class RewardConfig:
    manager: Annotated[str, Extension("headwater.rewards.managers")] = "naive"
    """How responses are handed to the scorer."""
    function: str = ""
    """A scorer's name or your own compute_score, as 'file.py:function'; empty chooses by the row's data_source."""
    function_args: Mapping[str, Any] = field(default_factory=dict)
    """Extra keyword arguments of the scoring function."""
    timeout_s: Annotated[float, MoreThan(0)] = 60.0
    """Longest time one response may take to score; longer is a failure."""
    max_concurrent: Annotated[int, AtLeast(1)] = 8
    """Scoring calls at a time, each in a thread of its own; functions that are async have no limit."""
    model: str = ""
    """A reward model (a transformers sequence classifier with one label): a folder or hub id; empty means none."""
    model_weight: float = 1.0
    """The reward model's score is added to the reward with this weight."""
    overlong_tokens: Annotated[int, AtLeast(0, "use 0 for no penalty")] = 0
    """Last tokens of rollout.max_new_tokens over which a penalty for length grows (DAPO); 0 is none."""
    overlong_penalty: Annotated[float, AtLeast(0)] = 1.0
    """The penalty of a response that uses all its tokens."""


OldLogprobs = Literal["rollout", "recompute", "loglinear", "metrics"]
StatisticsLevel = Literal["none", "batch", "group"]


@dataclass(frozen=True)
class NormalizationConfig:
    mean_level: StatisticsLevel = "none"
    """The mean that is taken off: of the whole batch, of the responses to the same prompt, or none."""
    std_level: StatisticsLevel = "none"
    """The deviation that is divided by: of the whole batch, of the responses to the same prompt, or none."""
    leave_one_out: bool = False
    """The mean that is taken off a value is that of all the others."""
    unbiased: bool = True
    """The deviation is that of a sample (n - 1); false is that of a population (n)."""
    epsilon: Annotated[float, MoreThan(0)] = 1e-5
    """Added to the deviation, so that values that are all the same are not divided by zero."""

    @property
    def is_on(self) -> bool:
        return self.mean_level != "none" or self.std_level != "none"


@dataclass(frozen=True)
class AlgorithmConfig:
    advantage: Annotated[str, Extension("headwater.algorithms.advantages")] = "grpo"
    """Advantage estimator."""
    advantage_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the advantage estimator, for example {normalize_by_std: false}."""
    normalize_rewards: NormalizationConfig = field(default_factory=NormalizationConfig)
    """Of every response's score, before a divergence is taken off and advantages are estimated."""
    normalize_advantages: NormalizationConfig = field(default_factory=NormalizationConfig)
    """Of every trained token's advantage; what a critic learns stays as it was."""
    policy_loss: Annotated[str, Extension("headwater.algorithms.policy_losses")] = "ppo"
    """Policy loss."""
    policy_loss_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the policy loss, for example {clip_high: 0.28}."""
    aggregation: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
    ] = "token-mean"
    """How the losses of tokens become the loss of a step; the last but one divides by rollout.max_new_tokens."""
    old_logprobs: OldLogprobs = "rollout"
    """The policy that updates are measured from: the one that sampled, a forward pass, or a guess between the two."""
    corrections: tuple[Annotated[str, Extension("headwater.algorithms.corrections")], ...] = ()
    """What is done about samples that the engine drew from another policy than the learner's, in order."""
    corrections_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments by correction, for example {truncate: {upper: 2.0}}."""
    kl_in_reward: Annotated[float, AtLeast(0)] = 0.0
    """Coefficient of the divergence from the reference policy, taken off every token's reward; 0 is none."""
    kl_in_loss: Annotated[float, AtLeast(0)] = 0.0
    """Coefficient of the divergence from the reference policy, added to every token's loss; 0 is none."""
    kl_estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"] = "k3"
    """How a divergence is estimated from the sampled tokens; + keeps the value and takes the gradient of k2."""
    kl_target: Annotated[float, AtLeast(0, "use 0 for a fixed coefficient")] = 0.0
    """Steer kl_in_reward so that the mean divergence stays near this; 0 keeps it fixed."""
    kl_horizon: Annotated[int, AtLeast(1)] = 10000
    """Samples over which the steering acts: larger is slower; at least those of a step."""
    entropy_bonus: Annotated[float, AtLeast(0)] = 0.0
    """Coefficient of the entropy, taken off every token's loss; 0 is none."""
    filter_groups: bool = False
    """Draw new prompts in place of groups whose samples all scored the same: they have nothing to teach (DAPO)."""
    max_filter_rounds: Annotated[int, AtLeast(1)] = 10
    """With filter_groups, rounds of new prompts before a step goes on with the groups it has."""


Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class LearnerConfig:
    learning_rate: Annotated[float, MoreThan(0)] = 1e-6
    """Peak learning rate of AdamW."""
    num_warmup_steps: Annotated[int, AtLeast(0)] = 0
    """Optimiser steps over which the learning rate rises from zero."""
    schedule: Schedule = "constant"
    """The rate from the warm-up to the last step; steps that teach nothing do not count, and may end it too high."""
    lowest_learning_rate_fraction: Annotated[float, Within(0, 1)] = 0.0
    """Where a linear or cosine schedule ends, as a fraction of the peak."""
    weight_decay: Annotated[float, AtLeast(0)] = 0.0
    """Decoupled weight decay."""
    adam_beta1: Annotated[float, Within(0, 0.9999)] = 0.9
    """AdamW's decay of the gradient average."""
    adam_beta2: Annotated[float, Within(0, 0.9999)] = 0.95
    """AdamW's decay of the squared-gradient average."""
    max_grad_norm: Annotated[float, MoreThan(0)] = 1.0
    """Gradients are scaled down to this norm."""
    max_bad_steps: Annotated[int, AtLeast(1)] = 3
    """Optimiser steps in a row with a loss or gradient that is not finite before the run stops; each is skipped."""
    num_minibatches: Annotated[int, AtLeast(1)] = 1
    """Optimiser steps per pass over a batch; must divide the prompts of a step."""
    num_epochs: Annotated[int, AtLeast(1)] = 1
    """Passes over each batch."""
    skip_zero_advantages: bool = True
    """Spend nothing on samples whose advantage is zero; turn off for a loss that has terms without the advantage."""
    max_tokens_per_microbatch: Annotated[int, AtLeast(1)] = 16384
    """Tokens in a pass, 4 times as many for log-probs or values alone; lower it for memory, gradients stay the same."""
    share_prompts: bool = True
    """Compute the prompt of a group once for all its samples, forward and backward."""
    checkpoint_activations: bool = False
    """Keep only each layer's input and compute the rest again in the backward pass: less memory, a third more work."""
    fused_layers: bool = True
    """On a GPU, use liger-kernel's norms, rotary embeddings and gated products, where it is installed."""
    compile: bool = False
    """Compile the layers with torch.compile instead: a minute at the start, then a few per cent faster on a GPU."""
    offload_optimizer: bool = False
    """On a GPU, keep AdamW's averages in main memory and stream them through the device at each step."""
    offload_during_rollout: bool = False
    """On a GPU, the learner waits in main memory while responses are generated; the KV cache goes while it trains."""


@dataclass(frozen=True)
class CriticConfig:
    enabled: bool = False
    """Train a critic beside the policy; the advantages gae and gae_turn need one."""
    path: str = ""
    """The model the critic starts from; empty means the policy's, with a new value head."""
    learning_rate: Annotated[float, MoreThan(0)] = 1e-5
    """Peak learning rate of the critic."""
    clip: Annotated[float, MoreThan(0)] = 0.5
    """A value may move so far from the one before the update before the loss stops rewarding it."""
    num_warmup_steps: Annotated[int, AtLeast(0)] = 0
    """Training steps in which only the critic learns, before the policy begins."""


@dataclass(frozen=True)
class LoraConfig:
    rank: Annotated[int, AtLeast(0, "use 0 to train all weights")] = 0
    """Rank of the trained adapters; 0 trains all weights. The model without adapters is then the reference."""
    alpha: Annotated[int, AtLeast(1)] = 32
    """Adapters are scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of the linear layers that get an adapter; empty means all but the output layer."""


@dataclass(frozen=True)
class EvalConfig:
    every_steps: Annotated[int, AtLeast(0, "use 0 to evaluate only before and after training")] = 0
    """Evaluate on held-out prompts every so many steps, besides before and after; 0 means only those two."""
    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""
    num_prompts: Annotated[int, AtLeast(1)] = 256
    """Held-out prompts to evaluate, at most."""
    num_samples_per_prompt: Annotated[int, AtLeast(1)] = 1
    """Responses drawn for each held-out prompt."""
    temperature: Annotated[float, AtLeast(0)] = 0.0
    """Sampling temperature of evaluation; 0 is greedy."""


@dataclass(frozen=True)
class TrainerConfig:
    total_steps: Annotated[int, AtLeast(1)] = 100
    """Training steps of the run."""
    num_prompts_per_step: Annotated[int, AtLeast(1)] = 32
    """Prompts, and so groups, trained on in each step."""
    checkpoint_every_steps: Annotated[int, AtLeast(0, "use 0 to save only at the end")] = 0
    """Save a checkpoint every so many steps, besides the one at the end or at Ctrl-C; 0 means only that one."""
    keep_checkpoints: Annotated[int, AtLeast(1)] = 2
    """Newest checkpoints to keep."""
    save_rollouts_every_steps: Annotated[int, AtLeast(0, "use 0 to save none")] = 1
    """Write all rollouts of every so many steps to rollouts/*.parquet; 0 writes none."""
    num_threads: Annotated[int, AtLeast(0, "use 0 for torch's choice")] = 0
    """CPU threads of torch; 0 leaves the choice to torch."""
    trace: bool = False
    """Write trace.json: what ran when, generation beside training; open it in Perfetto (ui.perfetto.dev)."""


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
