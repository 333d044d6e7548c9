"""What a call through the endpoint of an episode costs, compared with ``episode.reply()``.

    python benchmarks/endpoint_overhead.py [--concurrent 1 256] [--calls 2000]

The engine answers at once, so that only the endpoint is measured. Each of the concurrent episodes is a conversation of
several turns; every call sends all of it, as OpenAI's clients do. Calls come from a separate process over connections
that are kept open: with plain HTTP, which shows what the endpoint costs, and with OpenAI's own client, which adds its
own time. CPU time is that of the process with the endpoint.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import torch
from options import parser_of
from record import write_record

from headwater.core.protocols import EpisodeInput
from headwater.core.records import Prompt
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams
from headwater.models.load import load_tokenizer
from headwater.workflows import Episode, WorkflowContext
from headwater.workflows.agents.server import EndpointServer
from headwater.workflows.agents.session import SessionRules

TURNS = 8
ASK = {"role": "user", "content": "What is the next number after 17, 23, 29 and 31? Explain your answer in one line."}
ANSWER = "The next number is 37, because all of them are primes that follow each other."

CLIENT = """
import asyncio, json, sys, time

async def talk_plainly(url, key, asked, turns, found):
    import aiohttp
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        messages = [asked]
        for _ in range(turns):
            began = time.perf_counter()
            async with http.post(f"{url}/chat/completions", json={"model": "m", "messages": messages}) as response:
                reply = await response.json()
            found.append(time.perf_counter() - began)
            messages += [reply["choices"][0]["message"], asked]

async def talk_with_openai(url, key, asked, turns, found):
    import openai
    async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
        messages = [asked]
        for _ in range(turns):
            began = time.perf_counter()
            reply = await client.chat.completions.create(model="m", messages=messages)
            found.append(time.perf_counter() - began)
            messages += [reply.choices[0].message.model_dump(), asked]

async def main():
    given = json.load(sys.stdin)
    talk, found = {"http": talk_plainly, "openai": talk_with_openai}[given["client"]], []
    await talk(*given["episodes"].pop(), given["asked"], given["turns"], [])  # imports, and the first connection
    waiting = iter(given["episodes"])

    async def worker():
        for url, key in waiting:
            await talk(url, key, given["asked"], given["turns"], found)

    began = time.perf_counter()
    await asyncio.gather(*[worker() for _ in range(given["concurrent"])])
    print(json.dumps({"seconds": time.perf_counter() - began, "found": found}))

asyncio.run(main())
"""


class Instant:
    """Answers every request at once."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self._tokens = tokens

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        count = len(self._tokens)
        return ModelResponse(request.input_tokens, self._tokens, (-1.0,) * count, (0,) * count, "stop")


def summary(latencies: list[float], seconds: float, cpu_s: float) -> dict[str, float]:
    ordered = sorted(latencies)
    return {
        "calls": len(ordered),
        "p50_ms": 1e3 * ordered[len(ordered) // 2],
        "p99_ms": 1e3 * ordered[int(len(ordered) * 0.99)],
        "calls_per_s": len(ordered) / seconds,
        "cpu_ms_per_call": 1e3 * cpu_s / len(ordered),
    }


class Bench:
    def __init__(self) -> None:
        self._tokenizer = load_tokenizer("tiny:qwen3")
        text = self._tokenizer.apply_chat_template([ASK], add_generation_prompt=True, tokenize=False)
        tokens = tuple(self._tokenizer.encode(text, add_special_tokens=False))
        self._prompt = Prompt("row", (ASK,), text, tokens, "none")
        answer = tuple(self._tokenizer.encode(f"{ANSWER}<|end|>", add_special_tokens=False))
        self._engine = Instant(answer)
        self._context = WorkflowContext(self._tokenizer, None, SamplingParams(max_new_tokens=2**16))  # type: ignore[arg-type]

    def episode(self) -> Episode:
        return Episode(self._context, self._engine, EpisodeInput(self._prompt, 0, 1))

    async def direct(self, num_episodes: int, concurrent: int) -> dict[str, float]:
        found: list[float] = []
        waiting = iter(range(num_episodes))

        async def worker() -> None:
            for _ in waiting:
                episode = self.episode()
                for _ in range(TURNS):
                    began = time.perf_counter()
                    if episode.num_turns:
                        episode.tell([ASK])
                    await episode.reply()
                    found.append(time.perf_counter() - began)

        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*[worker() for _ in range(concurrent)])
        return summary(found, time.perf_counter() - began, time.process_time() - cpu)

    async def endpoint(self, client: str, num_episodes: int, concurrent: int) -> dict[str, float]:
        server = await EndpointServer.here("127.0.0.1", 0)
        rules = SessionRules(TURNS, "ignore", "follow", lambda: None, set())  # type: ignore[arg-type, return-value]
        sessions = [server.session(self.episode(), rules) for _ in range(num_episodes + 1)]
        opened = [await each.__aenter__() for each in sessions]
        given = {
            "client": client,
            "episodes": [(server.base_url(each), each.key) for each in opened],
            "asked": ASK,
            "turns": TURNS,
            "concurrent": concurrent,
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        cpu = time.process_time()
        output, _ = await process.communicate(json.dumps(given).encode())
        cpu = time.process_time() - cpu
        for each in sessions:
            await each.__aexit__(None, None, None)
        told = json.loads(output)
        assert all(each.transcript.num_replies == TURNS for each in opened)
        assert all(len(each.transcript.leaves()) == 1 for each in opened)
        return summary(told["found"], told["seconds"], cpu)


async def measure(concurrent: list[int], calls: int) -> list[dict[str, Any]]:
    bench, rows = Bench(), []
    for number in concurrent:
        num_episodes = max(number, calls // TURNS)
        ways = {
            "episode.reply()": bench.direct(num_episodes, number),
            "plain HTTP": bench.endpoint("http", num_episodes, number),
            "openai client": bench.endpoint("openai", num_episodes, number),
        }
        for way, running in ways.items():
            rows.append({"concurrent": number, "way": way, **await running})
            print(
                "  ".join(
                    f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
                    for key, value in rows[-1].items()
                )
            )
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args()
    rows = asyncio.run(measure(options.concurrent, options.calls))
    write_record(options.out, torch.device("cpu"), cores=os.cpu_count(), turns=TURNS, rows=rows)


if __name__ == "__main__":
    main()
