"""Makes a file for verl or AReaL importable without these packages.

After ``provide()``, ``import verl...`` and ``import areal...`` find modules with Headwater's versions of the names that
rollout classes, tools and reward functions use, also inside a function that is called later. An installed package is
never replaced. The names themselves are defined in other folders and loaded only when a file imports them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_VERL = "headwater.workflows.adapters.verl"
_AREAL = "headwater.workflows.adapters.areal"
_TOOLS = "headwater.tools.base"
_VERL_TOOLS = "headwater.workflows.adapters.verl_tools"
_VERL_AGENTS = "headwater.workflows.adapters.verl_agents"
_SCORES = "headwater.rewards.verl_scores"
_AREAL_OPENAI = "headwater.workflows.adapters.areal_openai"

_LOOP = ("AgentLoopBase", "AgentLoopMetrics", "AgentLoopOutput", "register")
_BOXES = ("last_boxed_only_string", "remove_boxed")
_MATH = ("compute_score=math_score", "is_equiv", *_BOXES)
_API = (
    "AsyncRewardWrapper", "GenerationHyperparameters", "InferenceEngine", "ModelRequest", "ModelResponse",
    "RolloutWorkflow",
)  # fmt: skip

MODULES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "verl": ("headwater.core.data_proto", ("DataProto",)),
    "verl.protocol": (
        "headwater.core.verl_functions",
        ("DataProto", "fold_batch_dim", "pad_dataproto_to_divisor", "unfold_batch_dim", "unpad_dataproto"),
    ),
    "verl.experimental.agent_loop": (_VERL, _LOOP),
    "verl.experimental.agent_loop.agent_loop": (
        _VERL, (*_LOOP, "AsyncLLMServerManager", "LLMServerClient", "TokenOutput"),
    ),
    "verl.experimental.agent_loop.tool_parser": (_VERL, ("FunctionCall", "ToolParser")),
    "verl.experimental.agent_loop.single_turn_agent_loop": (_VERL_AGENTS, ("SingleTurnAgentLoop",)),
    "verl.experimental.agent_loop.tool_agent_loop": (_VERL_AGENTS, ("AgentData", "AgentState", "ToolAgentLoop")),
    "verl.tools.base_tool": (_TOOLS, ("BaseTool", "OpenAIFunctionToolSchema=ToolSchema", "ToolResponse")),
    "verl.tools.gsm8k_tool": (_VERL_TOOLS, ("Gsm8kTool",)),
    "verl.tools.schemas": (
        _VERL_TOOLS,
        (
            "OpenAIFunctionCallSchema", "OpenAIFunctionParametersSchema", "OpenAIFunctionParsedSchema",
            "OpenAIFunctionPropertySchema", "OpenAIFunctionSchema", "OpenAIFunctionToolCall",
            "OpenAIFunctionToolSchema=ToolSchema", "ToolResponse",
        ),
    ),
    "verl.tools.utils.tool_registry": (_VERL_TOOLS, ("initialize_tools_from_config",)),
    "verl.utils.profiler": (_VERL, ("simple_timer",)),
    "verl.utils.ray_utils": (_VERL, ("get_event_loop",)),
    "verl.utils.rollout_trace": (_VERL, ("rollout_trace_op",)),
    "verl.utils.reward_score": (_SCORES, ("_default_compute_score=default_compute_score", "default_compute_score")),
    "verl.utils.reward_score.geo3k": (_SCORES, ("compute_score=geo3k_score",)),
    "verl.utils.reward_score.gsm8k": (_SCORES, ("compute_score=gsm8k_score", "extract_solution=gsm8k_solution")),
    "verl.utils.reward_score.math": (_SCORES, _MATH),
    "verl.utils.reward_score.math_dapo": (_SCORES, ("compute_score=math_dapo_score", *_BOXES)),
    "verl.utils.reward_score.math_reward": (_SCORES, _MATH),
    "verl.utils.reward_score.math_verify": (_SCORES, ("compute_score=math_verify_score",)),
    "verl.utils.reward_score.search_r1_like_qa_em": (_SCORES, ("compute_score=search_qa_score",)),
    "verl.workers.rollout.llm_server": (_VERL, ("LLMServerClient",)),
    "verl.workers.rollout.replica": (_VERL, ("TokenOutput",)),
    "areal": (_AREAL, ("workflow_context",)),
    "areal.api": (_AREAL, _API),
    "areal.api.cli_args": (_AREAL, ("GenerationHyperparameters",)),
    "areal.api.engine_api": (_AREAL, ("InferenceEngine",)),
    "areal.api.io_struct": (_AREAL, ("ModelRequest", "ModelResponse")),
    "areal.api.reward_api": (_AREAL, ("AsyncRewardWrapper",)),
    "areal.api.workflow_api": (_AREAL, ("RolloutWorkflow",)),
    "areal.experimental.openai": (_AREAL_OPENAI, ("ArealOpenAI",)),
    "areal.experimental.openai.client": (_AREAL_OPENAI, ("ArealOpenAI",)),
    "areal.experimental.openai.types": (_AREAL_OPENAI, ("InteractionWithTokenLogpReward=Interaction",)),
    "areal.infra": (_AREAL, ("workflow_context",)),
    "areal.utils": (_AREAL, ("logging", "stats_tracker")),
    "areal.utils.data": (_AREAL, ("concat_padded_tensors",)),
    "areal.utils.dynamic_import": (_AREAL, ("import_from_string",)),
    "areal.utils.image": (_AREAL, ("image2base64",)),
    "areal.utils.hf_utils": (_AREAL, ("apply_chat_template", "load_hf_tokenizer")),
    "areal.utils.perf_tracer": (_AREAL, ("atrace_session_phase", "session_context", "trace_session")),
}  # fmt: skip
"""Each module, where the names that it offers come from, and these names; ``theirs=ours`` if ours is another one."""


def _with_parents(names: Sequence[str]) -> set[str]:
    split = [name.split(".") for name in names]
    return {".".join(parts[:count]) for parts in split for count in range(1, len(parts) + 1)}


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of ``MODULES`` and their parents. It is asked last, so it never hides an installed package."""

    def __init__(self) -> None:
        self._known = _with_parents(tuple(MODULES))

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        root = fullname.partition(".")[0]
        if root not in self._known:
            return None
        if fullname != root and getattr(getattr(sys.modules.get(root), "__spec__", None), "loader", None) is not self:
            return None  # a module that an installed package does not have
        if fullname not in self._known:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: {root} is not installed, and Headwater provides only the modules that "
                f"rollout classes and tools need: {', '.join(name for name in MODULES if name.startswith(root))}",
                name=fullname,
            )
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        source, names = MODULES.get(module.__name__, ("", ()))
        ours = {theirs: own or theirs for theirs, _, own in (name.partition("=") for name in names)}

        def find(name: str) -> Any:
            """A name is looked up when a file uses it: the module of one name may import torch, which others do not."""
            if name not in ours:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return getattr(importlib.import_module(source), ours[name])

        module.__dict__.update(__getattr__=find, __all__=sorted(ours))


_finder = _Finder()


def provide() -> None:
    """From now on, code for verl or AReaL can be imported."""
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)
