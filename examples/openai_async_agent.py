"""An async agent with OpenAI's client and streams: it shows the model its own answer and asks it to check it.

    headwater train quickstart rollout.max_new_tokens=24 \
        rollout.workflow=endpoint rollout.workflow_args.agent=examples/openai_async_agent.py:check_twice \
        rollout.workflow_args.run_in=thread

It returns no reward, so the run's own reward function scores its last answer. docs/endpoint.md explains this file.
"""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

CHECK = {"role": "user", "content": "Sure?"}


async def ask(client: AsyncOpenAI, messages: list[Any]) -> dict[str, Any]:
    stream = await client.chat.completions.create(model="policy", messages=messages, stream=True, max_tokens=4)
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    return {"role": "assistant", "content": "".join(parts)}


async def check_twice(base_url: str, api_key: str, messages: list[Any]) -> None:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        first = await ask(client, messages)
        await ask(client, [*messages, first, CHECK])
