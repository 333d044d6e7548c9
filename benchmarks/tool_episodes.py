"""Run 1,000 tool episodes at the same time, and measure how much memory and time they take.

    python benchmarks/tool_episodes.py --out benchmarks/results/tool_episodes.json
    python benchmarks/tool_episodes.py --tools python_session --episodes 100

Every episode is a real one: the workflow tool_agent, the tools in their sandbox, groups, states and trajectories. A
script takes the place of the model, so that the figures are those of the episodes. Several waves of the same size
follow each other; with bounded memory, the last one needs no more than one in the middle. The memory is that of this
process. The processes in which the sandbox runs programs are not counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from pathlib import Path

import torch
from options import parser_of
from record import write_record

from headwater.chat.parsers import make_parser
from headwater.chat.render import encode_rendered, render_chat
from headwater.config.rollout_schema import SandboxConfig, ToolsConfig
from headwater.core.records import Prompt, Score, Trajectory
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams
from headwater.models.load import load_tokenizer
from headwater.rollout.flight import Dispatch, Flight, WatchedEngine
from headwater.rollout.group import Group, PromptDraw
from headwater.rollout.group_runner import GroupRunner
from headwater.tools.toolbox import Toolbox
from headwater.workflows import EpisodeRunner, WorkflowContext
from headwater.workflows.tool_agent import ToolAgentWorkflow

ARGUMENTS = {
    "calculator": {"expression": "38*94"},
    "python": {"code": "print(38 * 94)"},
    "python_session": {"code": "print(38 * 94)"},
}
SAMPLES = 8


class Scripted:
    """Calls the tools in ``num_calls`` turns, then answers. Each reply takes ``latency_s``."""

    def __init__(self, tokenizer: object, call: str, num_calls: int, latency_s: float) -> None:
        self._call, self._answer = (tuple(tokenizer.encode(f"{text}<|end|>")) for text in (call, "3572"))
        self._num_calls = num_calls
        self._latency_s = latency_s

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        await asyncio.sleep(self._latency_s)
        turn = int(request.request_id.partition("/")[2] or 0)
        tokens = self._call if turn < self._num_calls else self._answer
        return ModelResponse(request.input_tokens, tokens, (-0.5,) * len(tokens), (0,) * len(tokens), "stop")


class Right:
    async def score(self, episode: object) -> Score:
        return Score(1.0)


def resident_mib() -> float:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def wave(groups: GroupRunner, engine: Scripted, prompts: list[Prompt]) -> tuple[list[Trajectory], float]:
    """All groups at the same time. Returns their trajectories, and the largest memory while they ran."""
    most = resident_mib()

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, resident_mib())
            await asyncio.sleep(0.01)

    watching = asyncio.ensure_future(watch())
    flights = [Flight(Dispatch(n, PromptDraw(prompt, n)), 0, SAMPLES) for n, prompt in enumerate(prompts)]
    outcomes = await asyncio.gather(*(groups.run(each, WatchedEngine.maker(engine, each)) for each in flights))
    watching.cancel()
    assert all(isinstance(each, Group) for each in outcomes)
    return [trajectory for each in outcomes for trajectory in each.trajectories], most


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--waves", type=int, default=4, help="at least 2; with 2, the last is compared with the first")
    parser.add_argument("--turns", type=int, default=3, help="turns with calls in each episode")
    parser.add_argument("--latency", type=float, default=0.5, help="seconds of each reply of the model")
    parser.add_argument("--tools", default="calculator", choices=ARGUMENTS)
    args = parser.parse_args()
    if args.waves < 2:
        parser.error(f"--waves {args.waves}: must be at least 2, because the last wave is compared with an earlier one")
    tokenizer = load_tokenizer("tiny:qwen3")
    toolbox = Toolbox(ToolsConfig(use=(args.tools,)), SandboxConfig(), tokenizer)
    (schema,) = toolbox.offered.schemas.values()
    name = schema["function"]["name"]
    call = f"<tool_call>{json.dumps({'name': name, 'arguments': ARGUMENTS[args.tools]})}</tool_call>"
    messages = ({"role": "user", "content": "38 times 94?"},)
    text = render_chat(tokenizer, messages, {"tools": [schema]})
    tokens = encode_rendered(tokenizer, text)
    prompts = [
        Prompt(f"row{n}", messages, text, tokens, "exact_match", tool_schemas=(schema,))
        for n in range(args.episodes // SAMPLES)
    ]
    context = WorkflowContext(
        tokenizer,
        Right(),
        SamplingParams(max_new_tokens=2048),
        tools=toolbox,
        parser=make_parser("auto", tokenizer),
    )
    runner = EpisodeRunner(ToolAgentWorkflow(context, max_assistant_turns=args.turns + 1), context, "tool_agent")
    groups = GroupRunner(runner, num_samples=SAMPLES, on_failure="stop")
    engine = Scripted(tokenizer, call, args.turns, args.latency)

    async def run() -> list[dict[str, float]]:
        waves = []
        for _ in range(args.waves):
            began = time.monotonic()
            made, most = await wave(groups, engine, prompts)
            seconds = time.monotonic() - began
            results = [message["content"] for each in made for message in each.messages if message["role"] == "tool"]
            assert set(results) == {"3572"}, set(results)
            waves.append({"seconds": seconds, "calls_per_s": len(results) / seconds, "peak_mib": most})
            print({key: round(value, 1) for key, value in waves[-1].items()}, flush=True)
        await toolbox.close()
        return waves

    before = resident_mib()
    waves = asyncio.run(run())
    middle = (len(waves) - 1) // 2
    growth = waves[-1]["peak_mib"] - waves[middle]["peak_mib"]
    per_episode = 1024 * (waves[0]["peak_mib"] - before) / args.episodes
    print(f"{per_episode:.0f} KiB per episode; from wave {middle + 1} to the last, the peak grew by {growth:.1f} MiB")
    write_record(
        args.out,
        torch.device("cpu"),
        waves=waves,
        before_mib=before,
        kib_per_episode=per_episode,
        growth_mib=growth,
        growth_since_wave=middle + 1,
        calls_per_s=statistics.median(each["calls_per_s"] for each in waves),
    )


if __name__ == "__main__":
    main()
