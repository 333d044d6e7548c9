"""What ``test_ray_actors.py`` runs: tools, scoring functions and ranks in actors of a Ray that this process starts.

    python tests/integration/ray_actors.py FOLDER

Writes ``FOLDER/results.json``. The file also has the tools and the scoring function.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from headwater.cluster import keep_ray_local
from headwater.core.errors import DataError
from headwater.core.processes import process_start
from headwater.tools.base import BaseTool, ToolUnavailable

TIMEOUT_S = 60
"""Of a call: much longer than a busy machine takes to start the sandbox of the tool ``python``, or to notice the end of
an actor. One call of the test takes this long."""
LIMIT_S = 300.0
END_S = 900.0
"""When this process shows where it hangs, and ends."""
HUNG_S = 15.0
"""How long the call to a rank that is stopped may take."""


class Counter(BaseTool):
    """Counts in each episode, in the process of its actor."""

    tool_schema = {  # noqa: RUF012 - the schema of the class
        "name": "count",
        "description": "Adds to a counter.",
        "parameters": {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]},
    }

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._values: dict[str, int] = {}

    async def create(self, instance_id: str, start: int = 0) -> str:
        self._values[f"{instance_id}!"] = start
        return f"{instance_id}!"  # a tool may choose its own id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[str, float, dict]:
        self._values[instance_id] += parameters["by"]
        return f"{self._values[instance_id]} in {os.getpid()}", 0.5, {"by": parameters["by"]}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(self._values[instance_id])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._values[instance_id]
        with (self._folder / "released").open("a") as file:
            file.write(f"{instance_id}\n")

    async def check(self) -> None:
        with (self._folder / "checked").open("a") as file:
            file.write(f"{os.getpid()}\n")


def fail(how: str) -> str:
    """Fails.

    Args:
        how: In which way.
    """
    if how == "unavailable":
        raise ToolUnavailable("the service is down")
    if how == "slow":
        for _ in range(6000):
            time.sleep(0.1)
    if how == "bytes":
        return b"bytes"  # type: ignore[return-value]
    raise LookupError(f"no {how}")


def draw() -> Any:
    """Draws a large picture."""
    from PIL import Image

    return Image.new("RGB", (112, 112), "blue")


async def use(folder: Path, tools: Any, config: Any) -> dict[str, Any]:
    from headwater.core.records import Prompt
    from headwater.core.tool_calls import ToolCall
    from headwater.data.media import MediaSettings
    from headwater.models.load import load_tokenizer
    from headwater.tools.toolbox import Toolbox

    tokenizer = load_tokenizer("tiny:qwen3")
    media = MediaSettings.of(config.data)
    toolbox = await asyncio.to_thread(Toolbox.from_config, config.tools, config.sandbox, tokenizer, tools, media)
    assert toolbox is not None
    results: dict[str, Any] = {"names": toolbox.names}

    def prompt(number: int) -> Prompt:
        kwargs = {"count": {"create_kwargs": {"start": 10 * number}}}
        return Prompt(f"row{number}", (), "?", (1,), "test", tools_kwargs=kwargs)

    async def call(session: Any, name: str, **arguments: Any) -> dict[str, Any]:
        return asdict(await session.call(ToolCall("1", name, arguments)))

    async def episode(number: int) -> list[dict[str, Any]]:
        async with toolbox.open(prompt(number)) as session:
            found = [await call(session, "count", by=1), await call(session, "count", by=1)]
            return [*found, await session.rewards()]

    results["episodes"] = await asyncio.gather(*(episode(number) for number in range(4)))
    async with toolbox.open(prompt(1)) as session:
        for how in ("unavailable", "slow", "bytes", "key"):
            began = time.monotonic()
            results[how] = await call(session, "fail", how=how)
            results[f"{how} took"] = time.monotonic() - began
        results["python"] = await call(session, "python", code="print(6 * 7)")
        (drawn,) = (await session.call(ToolCall("1", "draw", {}))).media
        results["drawn"] = drawn.images()[0].size
    try:
        toolbox.check_row(replace(prompt(1), tools_kwargs={"count": {"create_kwargs": {"begin": 1}}}))
    except DataError as error:
        results["row"] = str(error)
    async with toolbox.open(prompt(2)) as session:
        first = await call(session, "count", by=1)
        os.kill(int(first["text"].rpartition(" ")[2]), 9)
        results["after death"] = [await call(session, "count", by=1)]
        deadline = time.monotonic() + LIMIT_S
        while "state of this episode" not in (last := await call(session, "count", by=1))["text"]:
            assert time.monotonic() < deadline, last
            await asyncio.sleep(0.5)
        results["after death"].append(last)
    results["later"] = await episode(3)
    await toolbox.close()
    results["counts"] = dict(toolbox.counts)
    return results


def compute_score(folder: str, num_deaths: int) -> float:
    """Ends its actor in its first ``num_deaths`` calls, each of which leaves a line."""
    calls = Path(folder) / f"{num_deaths} deaths"
    with calls.open("a") as file:
        file.write(f"{os.getppid()}\n")
    if len(calls.read_text().split()) <= num_deaths:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(LIMIT_S)  # the end of its actor ends this process
    return 0.5


async def score(folder: Path, pool: Any) -> dict[str, Any]:
    """The replies to calls during which the actor ends once or more often. Another call runs beside the first one."""
    from headwater.rewards.functions import Failure, RemoteFunction

    function = RemoteFunction(f"{__file__}:compute_score", {}, False)

    async def call(num_deaths: int) -> Any:
        arguments = {"folder": str(folder), "num_deaths": num_deaths}
        reply = await pool.call(function, arguments, None, LIMIT_S)
        return asdict(reply) if isinstance(reply, Failure) else [each.value for each in reply]

    return {"died once": await asyncio.gather(call(1), call(0)), "died twice": await call(2), "later": await call(0)}


async def both(folder: Path, tools: Any, pool: Any, config: Any) -> dict[str, Any]:
    """At the same time: each waits mostly for actors that start."""
    used, scored = await asyncio.gather(use(folder, tools, config), score(folder, pool))
    return {**used, "rewards": scored}


def stop_a_rank(ranks: Any) -> dict[str, Any]:
    """What a call says whose second rank is a process that is stopped. Returns when the processes have ended."""
    from integration import failing_ranks

    learner = ranks.build(failing_ranks.build, SimpleNamespace(config=None, learner=()))
    learner.offload()
    pids = [place.pid for place in ranks.places]
    os.kill(pids[1], signal.SIGSTOP)
    ranks._timeout_s = HUNG_S
    error = failing_ranks.error_of(learner.offload)
    ranks.close()
    deadline = time.monotonic() + LIMIT_S
    while any(process_start(pid) for pid in pids):
        assert time.monotonic() < deadline, "a process of a rank has not ended"
        time.sleep(0.1)
    return {"pid": pids[1], "error": error, "failure": learner.status().failure}


def main(folder: Path) -> None:
    faulthandler.dump_traceback_later(END_S, exit=True)
    keep_ray_local()
    from headwater.cluster.ray import RayCluster
    from headwater.config.load import load_config

    here = Path(__file__)
    uses = f"tools.use=[{here}:Counter, {here}:fail, {here}:draw, python]"
    settings = [
        "cluster=ray", "cluster.object_store_mib=100", "cluster.learner.num_ranks=2",
        "cluster.learner.cpus_per_rank=0.1", "cluster.rollout.cpus_per_server=0.1", "cluster.tools.num_actors=2",
        "cluster.tools.cpus_per_actor=0.1", "cluster.reward.num_actors=1", f"reward.function={here}:compute_score",
        "rollout.workflow=tool_agent", uses, f"tools.timeout_s={TIMEOUT_S}", "tools.parser=hermes",
        "data.max_image_pixels=3136",
    ]  # fmt: skip
    settings.append(f"tools.args={json.dumps({f'{here}:Counter': {'folder': str(folder)}})}")
    config = load_config("quickstart", settings).config
    cluster = RayCluster.join(config)
    try:
        tools, pool = cluster.tools(), cluster.reward_pool()
        results = asyncio.run(both(folder, tools, pool, config))
        results["stopped rank"] = stop_a_rank(cluster._ranks)
    finally:
        cluster.close()
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
