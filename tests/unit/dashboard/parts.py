"""A run directory that the real writers wrote, and the real server over it."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import tiny
import torch
from aiohttp import web

from headwater.config.explain import to_yaml
from headwater.config.load import load_config
from headwater.core.records import Trajectory
from headwater.dashboard.app import Dashboard, bind
from headwater.dashboard.assets import Assets
from headwater.dashboard.guard import Access
from headwater.dashboard.runs import Place, Runs
from headwater.observe.run_directory import MetricsRecord, RunDirectory
from headwater.observe.status_file import StatusFile
from headwater.trainer.tables import write_rollouts, write_tokens

SCRIPT = "</script><script>alert(1)</script>"
TEXT = f"café 🙂 {SCRIPT}"
"""Characters of several bytes, which the tiny tokenizer splits, and what must never run in a page."""
COUNTS = {"dispatched": 12, "trained": 8, "dropped": 2, "buffered": 1, "in_flight": 1}


def trajectory(uid: str, sample: int, reward: float, version: int, text: str = TEXT) -> Trajectory:
    """Two turns of the model with something inserted between them; its last token is not trained."""
    prompt, first, told, second = (
        tiny.tokenizer().encode(part, add_special_tokens=False) for part in ("Say it.", text, "Again!", "2")
    )
    sizes = [len(part) for part in (prompt, first, told, second)]
    versions = [-1] * sizes[0] + [version] * sizes[1] + [-1] * sizes[2] + [version + 1] * sizes[3]
    mask = [0] * sizes[0] + [1] * sizes[1] + [0] * (sizes[2] + sizes[3])
    return Trajectory(
        uid,
        sample,
        (*prompt, *first, *told, *second),
        sizes[0],
        tuple(mask),
        tuple(-0.5 - 0.01 * place if each >= 0 else 0.0 for place, each in enumerate(versions)),
        tuple(versions),
        reward,
        "stop" if sample % 2 == 0 else "length",
        turn_rewards=(reward, 0.0),
        info={"response_text": text, "num_tool_calls": sample, "tool_failures": {"raised": sample // 2}},
        messages=(
            {"role": "user", "content": "Say it."},
            {
                "role": "assistant",
                "content": text,
                "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}],
            },
            {"role": "tool", "content": "Again!"},
            {"role": "assistant", "content": "2"},
        ),
        reward_info={"acc": reward},
    )


def rollouts_of(step: int, num_prompts: int = 3, num_samples: int = 4):
    made = []
    for place in range(num_prompts):
        prompt = tiny.prompt(f"Question {place}", uid=f"row/{place}")
        for sample in range(num_samples):
            text = TEXT if place else f"needle {step}"
            made.append((prompt, trajectory(prompt.uid, sample, step + place + sample / 10, step - 1, text)))
    return made


def save_step(run: RunDirectory, step: int, folder: str = "rollouts", **sizes) -> Path:
    rollouts = rollouts_of(step, **sizes)
    width = max(len(each.tokens) - each.prompt_length for _, each in rollouts)
    columns = {
        "advantages": torch.full((len(rollouts), width), 0.25),
        "learner_logprobs": torch.full((len(rollouts), width), -0.75),
        "entropies": torch.full((len(rollouts), width), 1.5),
    }
    path = run.free_file(folder, f"step_{step:06d}", ".parquet")
    write_rollouts(path, step, rollouts, columns)
    return path


def add_metrics(run: RunDirectory, step: int, **more: float) -> None:
    values = {
        "reward/mean": step / 10,
        "time/step_s": 2.0,
        "time/wait_s": 0.5,
        "time/train_s": 1.0,
        "staleness/lag_0": 0.75,
        "staleness/lag_2": 0.25,
        "throughput/tokens_per_s": 100.0,
        **more,
    }
    run.append_metrics(MetricsRecord("train", step, 1000.0 + 2 * step, values).to_json())


def make_run(root: Path, name: str = "first", num_steps: int = 3, overrides=()) -> RunDirectory:
    """A finished run. Its last step was computed twice, as after a resume."""
    run = RunDirectory.create(root, name)
    run.write_config(to_yaml(load_config("quickstart", [f"trainer.total_steps={num_steps}", *overrides]).config))
    write_tokens(run.tokens_file, tiny.tokenizer())
    for step in range(1, num_steps + 1):
        add_metrics(run, step)
        save_step(run, step)
        dropped = [{"id": 1, "uid": "row/0", "index": 0, "epoch": 0, "kind": "stale", "message": "too old"}]
        line = {"kind": "step", "step": step, "time": 1.0, "weights": "w", "counts": COUNTS, "trained": []}
        run.append_ledger(line | {"dropped": dropped if step == 1 else []})
    save_step(run, num_steps, "eval", num_prompts=1)
    run.append_metrics(MetricsRecord("eval", num_steps, 1007.0, {"reward/mean": 0.9}).to_json())
    status = {
        "step": num_steps,
        "total_steps": num_steps,
        "ledger": COUNTS,
        "version": num_steps,
        "drops": {"stale": {"count": 1, "message": "too old"}, "filtered": {"count": 1, "message": "all equal"}},
        "engine": {"num_running": 3, "num_waiting": 1, "metrics": {"kv_pages_total": 10, "kv_pages_used": 4}},
    }
    with StatusFile(run.status_file, lambda: status, every_s=60):
        pass
    return run


class Client:
    """Asks the server over a real socket, so that paths and headers arrive as they are written here."""

    def __init__(self, port: int) -> None:
        self.port = port

    def raw(self, path: str, headers=None, method: str = "GET"):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request(method, path, headers=headers or {})
        reply = connection.getresponse()
        body = reply.read()
        connection.close()
        return reply, body

    def get(self, path: str, status: int = 200, **given):
        query = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in given.items())
        reply, body = self.raw(f"/api{path}{'?' if query else ''}{query}")
        assert reply.status == status, (path, reply.status, body[:500])
        return json.loads(body)

    def error(self, path: str, status: int, **given) -> tuple[str, str]:
        error = self.get(path, status, **given)["error"]
        assert error["message"].endswith("."), "a whole sentence"
        return error["code"], error["message"]

    def indexed(self, path: str, **given):
        """The answer once the index is ready."""
        deadline = time.monotonic() + 300
        while (answer := self.get(path, **given))["index"]["state"] != "ready":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return answer


@contextmanager
def served(path: Path, token: str = "", assets: Assets | None = None):
    """The dashboard over ``path`` in a thread."""
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    taken = bind("127.0.0.1", 0)
    port = taken.getsockname()[1]

    async def main() -> None:
        dashboard = Dashboard(Runs(Place.of(path)), Access.of("127.0.0.1", port, token), (), assets or page())
        runner = web.AppRunner(dashboard.app(), shutdown_timeout=1.0, handler_cancellation=True)
        await runner.setup()
        await web.SockSite(runner, taken).start()
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert ready.wait(300)
    try:
        yield Client(port)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(300)
        loop.close()


def page() -> Assets:
    """The page that is part of the package."""
    return Assets()
