"""The settings of rollouts: episodes, tools, rewards and the sandbox. ``schema.py`` has all others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from headwater.config.constraints import AtLeast, Extension, LessThan, MoreThan, NotEmpty, ServerUrl, Within

WeightTransfer = Literal["shared_memory", "file", "collective", "cuda_ipc"]
WeightLink = Literal["gloo", "nccl"]
WeightEncoding = Literal["plain", "delta"]


@dataclass(frozen=True)
class LaunchConfig:
    num_servers: Annotated[int, AtLeast(0, "use 0 for the default")] = 0
    """Servers that the run starts itself; requests are distributed over them. 0 means one with
    rollout.placement=disaggregated, and with cluster=ray and rollout.placement=colocated one per learner rank, on its
    GPU."""
    devices: tuple[Annotated[str, NotEmpty("use cpu or cuda:N")], ...] = ()
    """Device of each server, for example [cuda:2, cuda:3]; with tensor_parallel, the devices of the first server, then
    those of the second. Empty uses rollout.device for all."""
    tensor_parallel: Annotated[int, AtLeast(1)] = 1
    """Devices of one server, over which it splits the model; for vllm and sglang."""
    python: str = ""
    """Python interpreter of the environment in which vLLM or SGLang is installed; empty means that of this process."""
    args: tuple[str, ...] = ()
    """Further command-line arguments of every server, for example [--max-model-len, "4096"]."""

    @property
    def count(self) -> int:
        """Servers that are not beside learner ranks."""
        return self.num_servers or 1


@dataclass(frozen=True)
class RolloutConfig:
    backend: Annotated[str, Extension("headwater.backends")] = "embedded"
    """Inference engine that generates responses."""
    workflow: Annotated[str, Extension("headwater.workflows")] = "rlvr"
    """How one episode runs, from prompt to scored trajectory."""
    workflow_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the workflow, which is a class or a function."""
    num_samples_per_prompt: Annotated[int, AtLeast(1)] = 8
    """Responses sampled for each prompt. They form a group, which advantages compare."""
    max_new_tokens: Annotated[int, AtLeast(1)] = 256
    """Longest response in tokens. All turns of an episode share it, together with the text between them."""
    temperature: Annotated[float, MoreThan(0, "training needs randomness; greedy decoding is for eval.temperature")] = (
        1.0
    )
    """Sampling temperature; the learner applies the same one."""
    top_k: Annotated[int, AtLeast(0, "use 0 to keep all tokens")] = 0
    """Sample from the k most likely tokens; 0 keeps all."""
    top_p: Annotated[float, MoreThan(0, "use 1.0 to keep all tokens"), Within(0, 1)] = 1.0
    """Sample from the most likely tokens that together have this probability; 1.0 keeps all."""
    min_p: Annotated[float, AtLeast(0, "use 0 to keep all tokens"), LessThan(1, "use 0 to keep all tokens")] = 0.0
    """Sample from the tokens that are at least this share as likely as the most likely one; 0 keeps all. As top_k and
    top_p, it applies to training, not to evaluation."""
    min_new_tokens: Annotated[int, AtLeast(0, "use 0 for no minimum")] = 0
    """Shortest reply in tokens: until then, tokens and texts that end a reply are not sampled or do not end it."""
    stop: tuple[Annotated[str, NotEmpty("it would end every reply immediately; remove it")], ...] = ()
    """Texts that end a reply. The tokens of the text belong to the reply and are trained."""
    stop_token_ids: tuple[Annotated[int, AtLeast(0, "give ids of the model's vocabulary")], ...] = ()
    """Tokens that end a reply, in addition to the model's end token. They belong to the reply and are trained."""
    should_accept: str = ""
    """Function that decides whether a group is trained on, as 'file.py:function'. It receives the list of trajectories
    of one prompt and returns true or false. Refused groups are counted, and other prompts are drawn."""
    max_staleness: Annotated[int, AtLeast(0, "use 0 for synchronous training")] = 0
    """How many policy versions old a trained token may be; 0 means synchronous training."""
    on_stale: Literal["mask", "drop", "wait"] = "mask"
    """What to do with tokens older than max_staleness: `mask` removes them from the loss, `drop` discards the group
    and retries its prompt once, `wait` delays the update until no group can become stale."""
    max_concurrent_groups: Annotated[int, AtLeast(0, "use 0 for as many as max_staleness allows")] = 0
    """Prompt groups that may run at the same time; 0 means as many as max_staleness allows."""
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """Where generation runs: `colocated` shares the process and device of the learner, `disaggregated` uses servers in
    separate processes, which rollout.launch describes. Running servers (rollout.servers) are always separate."""
    servers: tuple[Annotated[str, ServerUrl()], ...] = ()
    """URLs of running servers that only this run uses, instead of starting some. rollout.backend names their kind:
    native (`headwater serve`), vllm or sglang. The environment variable HEADWATER_SERVER_KEY holds their API key."""
    server_timeout_s: Annotated[float, MoreThan(0)] = 120.0
    """How long a server of rollout.servers may be unreachable, at the start or later, before the run ends. If there are
    others, they continue its requests at once, and its return is awaited without a limit."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    device: Annotated[str, NotEmpty("use auto, cpu, cuda or cuda:N")] = "auto"
    """Device of a disaggregated engine: `cpu`, `cuda`, `cuda:N`, or `auto`: a GPU that the learner does not use, or
    the learner's device if there is none."""
    weight_transfer: Literal["auto", "shared_memory", "file", "collective", "cuda_ipc"] = "auto"
    """How weights reach servers: `shared_memory` or `cuda_ipc` (on the GPU) on this machine, through a `file`, or
    `collective` over the network. vLLM has no cuda_ipc, SGLang only the last two. `auto` takes the first that works,
    never cuda_ipc."""
    weight_link: WeightLink = "gloo"
    """With weight_transfer=collective: `gloo` sends from main memory and works on every machine; `nccl` sends from GPU
    to GPU and needs a separate GPU for every learner rank and server. vLLM takes weights over gloo only."""
    weight_encoding: WeightEncoding = "plain"
    """With weight_transfer=collective: `delta` sends the compressed difference from the weights before, for slow
    networks. The engine gets exactly the same weights. Both sides keep a copy in main memory."""
    publish: Literal["full", "adapter"] = "full"
    """What the engine gets after an update of LoRA adapters: `full` merges them into all weights, `adapter` sends them
    alone, and Headwater's engine or vLLM computes them beside its weights: far fewer bytes, slower generation."""
    update_order: Literal["together", "rolling"] = "together"
    """How several servers take new weights: `together` at the same time, or `rolling`, one after another while the
    others generate. An episode never goes back to older weights."""
    weight_folder: str = ""
    """Folder for weight_transfer=file that the run and all servers see under this path, such as a network file system.
    Empty means a temporary folder of this machine."""
    episode_timeout_s: Annotated[float, MoreThan(0)] = 1800.0
    """Time limit for the episodes of one prompt, including rewards and tools; exceeding it is a failure."""
    timeout_s: Annotated[float, MoreThan(0)] = 1800.0
    """Time limit for one batch of rollouts; exceeding it stops the run."""
    on_failure: Literal["stop", "drop"] = "stop"
    """What to do if an episode or its reward fails, or if a row cannot be read during training: `stop` ends the run
    with the cause, `drop` discards the group, counts it and draws another prompt."""
    max_retries: Annotated[int, AtLeast(0)] = 0
    """How often a failed group is retried before on_failure applies."""
    allow_partial_groups: bool = False
    """With on_failure=drop, keep a group without its failed samples if at least two are left."""

    @property
    def is_separate(self) -> bool:
        """Whether engines run in other processes than the learner."""
        return bool(self.servers) or self.placement == "disaggregated"


@dataclass(frozen=True)
class ToolsConfig:
    use: tuple[Annotated[str, Extension("headwater.tools")], ...] = ()
    """Tools that the model may call: names of built-in tools, or your own as 'file.py:Class' or 'file.py:function'."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the tools in tools.use, by the name that is written there, for example tools.args.search.corpus."""
    config: str = ""
    """Path of a YAML file that lists tools with their settings, also in verl's format; in addition to tools.use."""
    parser: str = "auto"
    """Format in which the model writes tool calls (see headwater/chat/parsers); `auto` chooses it from the chat
    template."""
    timeout_s: Annotated[float, MoreThan(0)] = 30.0
    """Time limit for one call; exceeding it ends the call, and the model is told."""
    max_concurrent: Annotated[int, AtLeast(1)] = 256
    """Calls of one tool that run at the same time, over all episodes; others wait."""
    max_result_tokens: Annotated[int, AtLeast(1)] = 512
    """Longest result of one call in tokens; longer ones are cut."""
    truncation: Literal["left", "right", "middle"] = "middle"
    """Where a long result is cut."""


@dataclass(frozen=True)
class RewardConfig:
    manager: Annotated[str, Extension("headwater.rewards.managers")] = "naive"
    """How responses are passed to the scorer: `naive` one per call, `batch` many per call, `prime` and `dapo` as in
    verl."""
    function: str = ""
    """Name of a scorer, or your own compute_score as 'file.py:function'; empty chooses by the row's data_source."""
    function_args: Mapping[str, Any] = field(default_factory=dict)
    """Extra keyword arguments of the scoring function."""
    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Several functions whose weighted sum is the reward, instead of reward.function: by name, each with `function`
    (empty chooses by data_source), `weight` (default 1) and `args`. Each is also a metric."""
    where: Literal["processes", "threads", "event_loop"] = "processes"
    """Where scoring functions run: in worker `processes`, in `threads` of this process, or on its `event_loop`, which a
    plain function blocks. Built-in scorers that take microseconds are always called directly."""
    workers: Annotated[int, AtLeast(0, "use 0 for the number of cores")] = 0
    """Scoring calls that run at the same time, each in a worker process or thread; 0 means the number of cores."""
    max_concurrent: Annotated[int, AtLeast(1)] = 256
    """Calls of async scoring functions that run at the same time."""
    batch_size: Annotated[int, AtLeast(1)] = 256
    """With reward.manager=batch: the most responses in one call."""
    batch_wait_s: Annotated[float, AtLeast(0)] = 0.05
    """With reward.manager=batch: how long a call waits for more responses."""
    timeout_s: Annotated[float, MoreThan(0)] = 60.0
    """Time limit for one scoring call; exceeding it is a failure, and a worker process is then killed and replaced."""
    join: Literal["early", "late"] = "early"
    """When a step waits for its scores: `early` before anything is computed, `late` after log-probs and values were
    computed, while responses are scored. `late` needs the workflow rlvr and rollout.max_staleness 0."""
    max_retries: Annotated[int, AtLeast(0)] = 0
    """How often a failed scoring call is repeated before it counts as a failure of its episode."""
    max_failed_share: Annotated[float, Within(0, 1, "use 1 to never stop")] = 0.5
    """The run stops if more than this share of the last 256 scoring calls failed, or all of the first 32, also with
    rollout.on_failure=drop."""
    model: str = ""
    """Reward model (a transformers sequence classifier with one label): a folder or hub id; empty means none."""
    model_weight: float = 1.0
    """Weight of the reward model's score, which is added to the reward."""
    overlong_tokens: Annotated[int, AtLeast(0, "use 0 for no penalty")] = 0
    """Number of tokens before rollout.max_new_tokens over which a length penalty grows (DAPO); 0 means no penalty."""
    overlong_penalty: Annotated[float, AtLeast(0)] = 1.0
    """Penalty of a response that uses all its tokens."""
    overlong_counts: Literal["response", "trained"] = "response"
    """Tokens that the length penalty counts: all tokens of the `response`, or only the `trained` ones, as in AReaL."""
    bias: float = 0.0
    """Added to every score, before it is scaled."""
    scale: Annotated[float, MoreThan(0)] = 1.0
    """Factor of every score, before it is clipped."""
    clip: Annotated[float, AtLeast(0, "use 0 for no limit")] = 0.0
    """Largest absolute value of a score after bias and scale; 0 means no limit."""
    zero_unfinished: bool = False
    """Set the score of responses that reached their length limit to 0, after normalisation."""


@dataclass(frozen=True)
class SandboxConfig:
    isolation: Literal["auto", "bubblewrap", "namespaces", "unprotected"] = "auto"
    """What separates the code of a model from this machine: `bubblewrap`, or user `namespaces` without it. `auto` takes
    the first that works and refuses to run code if none does. `unprotected` runs code with your own rights."""
    memory_mib: Annotated[int, AtLeast(16)] = 512
    """Largest memory of one run of code."""
    cpu_s: Annotated[float, MoreThan(0)] = 10.0
    """Processor time of one run of code."""
    timeout_s: Annotated[float, MoreThan(0)] = 20.0
    """Time limit of one run of code."""
    max_processes: Annotated[int, AtLeast(1)] = 32
    """Processes and threads of one run of code."""
    max_file_mib: Annotated[int, AtLeast(1)] = 64
    """Size of all files that one run of code writes."""
    max_output_kib: Annotated[int, AtLeast(1)] = 256
    """Output that is kept of one run of code; the run ends when it writes much more."""
    max_concurrent: Annotated[int, AtLeast(0, "use 0 for the number of cores")] = 0
    """Runs of code at the same time; others wait. 0 means the number of cores."""
    preload: tuple[str, ...] = ()
    """Modules that are imported once, so that programs which import them start faster, for example numpy."""
