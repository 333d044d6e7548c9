"""The settings of evaluation, and of the models beside the policy: critic, reference, adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from headwater.config.constraints import AtLeast, LessThan, MoreThan, Within

Schedule = Literal["constant", "linear", "cosine"]

_AS_LEARNER = "use null for the learner's"


@dataclass(frozen=True)
class CriticConfig:
    enabled: bool = False
    """Train a critic beside the policy. Advantages that use values, such as gae, need one."""
    path: str = ""
    """Model that the critic starts from; empty means the policy's model with a new value head."""
    learning_rate: Annotated[float, MoreThan(0)] = 1e-5
    """Peak learning rate of the critic."""
    warmup_fraction: Annotated[float, AtLeast(0), LessThan(1, "the learning rate must reach its peak")] | None = None
    """Share of the critic's optimiser steps over which its learning rate rises; null means the learner's warm-up."""
    schedule: Schedule | None = None
    """Course of the critic's learning rate from the warm-up to the last step; null means learner.schedule."""
    lowest_learning_rate_fraction: Annotated[float, Within(0, 1)] | None = None
    """Final learning rate of a linear or cosine schedule of the critic, as a fraction of the peak; null means
    learner.lowest_learning_rate_fraction."""
    num_epochs: Annotated[int, AtLeast(1, _AS_LEARNER)] | None = None
    """Passes of the critic over each batch; null means learner.num_epochs."""
    num_minibatches: Annotated[int, AtLeast(1, _AS_LEARNER)] | None = None
    """Optimiser steps of the critic per pass over a batch; null means learner.num_minibatches. Must divide
    trainer.num_prompts_per_step."""
    weight_decay: Annotated[float, AtLeast(0, _AS_LEARNER)] | None = None
    """Decoupled weight decay of the critic; null means learner.weight_decay."""
    adam_beta1: Annotated[float, Within(0, 0.9999)] | None = None
    """Decay of AdamW's average of the critic's gradients; null means learner.adam_beta1."""
    adam_beta2: Annotated[float, Within(0, 0.9999)] | None = None
    """Decay of AdamW's average of the critic's squared gradients; null means learner.adam_beta2."""
    adam_epsilon: Annotated[float, MoreThan(0, _AS_LEARNER)] | None = None
    """Added to the root of AdamW's average of the critic's squared gradients; null means learner.adam_epsilon."""
    max_grad_norm: Annotated[float, MoreThan(0, _AS_LEARNER)] | None = None
    """Gradients of the critic with a larger norm are scaled down to this norm; null means learner.max_grad_norm."""
    clip: Annotated[float, MoreThan(0)] = 0.5
    """Clip range of the value loss: how far a value may move from its old one before the loss stops rewarding it."""
    loss: Literal["mse", "huber"] = "mse"
    """Value loss: `mse` is half the squared error, `huber` is linear for errors above 10."""
    num_warmup_steps: Annotated[int, AtLeast(0)] = 0
    """Training steps at the start in which only the critic learns."""
    bootstrap_unfinished: bool = False
    """Continue the return of responses that reached their length limit with the critic's value after their last token,
    as in AReaL; false treats them as finished."""


@dataclass(frozen=True)
class ReferenceConfig:
    path: str = ""
    """Model of the reference policy, for example an earlier supervised checkpoint; it must have the policy's tokenizer.
    Empty means the policy before training: model.path, or the end of the warm start."""


@dataclass(frozen=True)
class LoraConfig:
    rank: Annotated[int, AtLeast(0, "use 0 to train all weights")] = 0
    """Rank of the trained adapters; 0 trains all weights. With adapters, the reference is the model without them."""
    alpha: Annotated[int, AtLeast(1)] = 32
    """Adapters are scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of the linear layers that get an adapter; empty means all except the output layer. In a vision model, they
    are layers of the language model, unless only the vision tower has a layer of that name."""


@dataclass(frozen=True)
class EvalConfig:
    every_steps: Annotated[int, AtLeast(0, "use 0 to evaluate only before and after training")] = 0
    """Evaluate on held-out prompts every N steps, in addition to eval.before and eval.after; 0 means only those."""
    every_epochs: Annotated[int, AtLeast(0, "use 0 to evaluate only before and after training")] = 0
    """Evaluate after every Nth pass over the training prompts, in addition to the others; 0 means no such
    evaluation."""
    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""
    only: bool = False
    """Evaluate once and train nothing."""
    num_prompts: Annotated[int, AtLeast(0, "use 0 for all held-out prompts")] = 256
    """Maximum number of held-out prompts, in equal shares if there are several sources; 0 means all of them."""
    batch_size: Annotated[int, AtLeast(1)] = 1024
    """Held-out prompts that are generated, scored and saved together. A smaller number needs less memory."""
    num_samples_per_prompt: Annotated[int, AtLeast(1)] = 1
    """Responses sampled for each held-out prompt. With more than one, evaluation also reports mean@k, std@k, best@k,
    worst@k and maj@k."""
    temperature: Annotated[float, AtLeast(0)] = 0.0
    """Sampling temperature of evaluation; 0 is greedy."""
    top_k: Annotated[int, AtLeast(0, "use 0 to keep all tokens")] = 0
    """Evaluation samples only from the k most likely tokens; 0 keeps all."""
    top_p: Annotated[float, MoreThan(0, "use 1.0 to keep all tokens"), Within(0, 1)] = 1.0
    """Evaluation samples only from the most likely tokens that together have this probability; 1 keeps all."""
    min_p: Annotated[float, AtLeast(0, "use 0 to keep all tokens"), LessThan(1, "use 0 to keep all tokens")] = 0.0
    """Evaluation samples only from tokens that are at least this fraction as likely as the most likely one; 0 keeps
    all."""
    max_new_tokens: Annotated[int, AtLeast(0, "use 0 for rollout.max_new_tokens")] = 0
    """Longest response of evaluation in tokens; 0 means rollout.max_new_tokens."""

    @property
    def is_repeated(self) -> bool:
        """Whether there are evaluations during training."""
        return bool(self.every_steps or self.every_epochs)
