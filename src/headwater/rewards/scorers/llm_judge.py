"""The score that a language model gives, through any server with OpenAI's chat API."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import weakref
from collections.abc import Mapping
from typing import Annotated, Any

import aiohttp

from headwater.config.constraints import AtLeast, MoreThan, NotBelow
from headwater.core.errors import RewardFailed
from headwater.rewards.scorers import SCORERS

PROMPT = """\
You grade an answer to a question.

Question:
{question}

Reference answer:
{ground_truth}

Answer to grade:
{response}

Reply with a short reason and then, on the last line, "Score: N", where N is a number from 0 (wrong) to 10 (right)."""

_NUMBER = r"-?\d+(?:\.\d+)?"
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
_SHOWN_CHARACTERS = 200
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Answers of a server that is busy or restarting."""


@SCORERS.register
async def llm_judge(
    solution_str: str,
    ground_truth: Any,
    question: Any,
    *,
    base_url: str,
    model: str,
    api_key_env: str = "",
    prompt: str = PROMPT,
    score_pattern: str = rf"Score:\s*({_NUMBER})",
    score_key: str = "",
    lowest: float = 0.0,
    highest: Annotated[float, NotBelow("lowest", strictly=True)] = 10.0,
    max_tokens: Annotated[int, AtLeast(1)] = 512,
    temperature: float = 0.0,
    max_attempts: Annotated[int, AtLeast(1)] = 3,
    timeout_s: Annotated[float, MoreThan(0)] = 15.0,
    price_in: float = 0.0,
    price_out: float = 0.0,
    extra_body: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Ask ``model`` at ``base_url`` for a score from ``lowest`` to ``highest``, which becomes a reward from 0 to 1.

    ``prompt`` is a template with ``{question}``, ``{ground_truth}`` and ``{response}``. The score is the last match of
    ``score_pattern``, or the entry ``score_key`` of the JSON object in the answer. ``api_key_env`` names the
    environment variable with the key. A busy server, a time-out or a lost connection is tried again, ``max_attempts``
    times in all, each within ``timeout_s``; ``reward.timeout_s`` limits all of them together. ``price_in`` and
    ``price_out`` are prices per million tokens, for ``judge_cost``.
    """
    values = {"question": str(question), "ground_truth": str(ground_truth), "response": solution_str}
    content = re.sub(r"\{(question|ground_truth|response)\}", lambda found: values[found[1]], prompt)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        **(extra_body or {}),
    }
    answer, num_attempts = await _ask(base_url, body, _headers(api_key_env), max_attempts, timeout_s)
    completion = _read(answer)
    num_in, num_out = _usage(completion)
    spent = {
        "judge_prompt_tokens": num_in,
        "judge_completion_tokens": num_out,
        "judge_cost": (num_in * price_in + num_out * price_out) / 1e6,
        "judge_retries": num_attempts - 1,
    }
    try:
        text = _text(completion, answer)
        score = _score(text, score_pattern, score_key)
        if not lowest <= score <= highest:
            raise _Nonsense(
                f"the judge gave {score:g}, which is not between lowest = {lowest:g} and highest = {highest:g}; "
                f"its answer: {text[-_SHOWN_CHARACTERS:]!r}"
            )
    except _Nonsense as error:
        raise RewardFailed(str(error), cause="judge_nonsense", spent=spent) from error
    return {"score": (score - lowest) / (highest - lowest), **spent}


class _Nonsense(Exception):
    """The judge answered, but not with a score."""


def _headers(api_key_env: str) -> dict[str, str]:
    if not api_key_env:
        return {}
    key = os.environ.get(api_key_env)
    if not key:
        raise RewardFailed(
            f"api_key_env = {api_key_env}: this environment variable is not set; set it to the judge's API key",
            cause="judge_unavailable",
        )
    return {"Authorization": f"Bearer {key}"}


async def _ask(
    base_url: str, body: Mapping[str, Any], headers: Mapping[str, str], max_attempts: int, timeout_s: float
) -> tuple[str, int]:
    """The body of the server's answer, and how many attempts it took."""
    url, limit = f"{base_url.rstrip('/')}/chat/completions", aiohttp.ClientTimeout(total=timeout_s)
    for attempt in range(1, max_attempts + 1):
        asked_wait_s = 0.0
        try:
            async with _session().post(url, json=body, headers=headers, timeout=limit) as response:
                text = await response.text(errors="replace")
            if response.status == 200:
                return text, attempt
            problem = f"it answered {response.status}: {text[:_SHOWN_CHARACTERS]}"
            if response.status not in _RETRIED:
                break
            asked_wait_s = _seconds(response.headers.get("Retry-After", ""))
        except TimeoutError:
            problem = f"no answer within timeout_s = {timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
        if attempt < max_attempts:
            # Random, so that many calls which failed together do not come back together.
            wait_s = _FIRST_WAIT_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
            await asyncio.sleep(min(_LONGEST_WAIT_S, max(asked_wait_s, wait_s)))
    tries = "1 attempt" if attempt == 1 else f"{attempt} attempts"
    raise RewardFailed(f"the judge at {url} gave no answer in {tries}; {problem}", cause="judge_unavailable")


def _seconds(text: str) -> float:
    """The header ``Retry-After``, if it is a number."""
    try:
        return max(0.0, float(text))
    except ValueError:
        return 0.0


def _read(answer: str) -> Mapping[str, Any]:
    """The server's answer; empty if it is not a JSON object."""
    try:
        read = json.loads(answer)
    except ValueError:
        return {}
    return read if isinstance(read, Mapping) else {}


def _usage(completion: Mapping[str, Any]) -> tuple[int, int]:
    """The tokens that the judge has read and written, as its server counts them."""
    usage = completion.get("usage")
    counts = [usage.get(name) if isinstance(usage, Mapping) else 0 for name in ("prompt_tokens", "completion_tokens")]
    num_in, num_out = (count if type(count) is int else 0 for count in counts)
    return num_in, num_out


def _text(completion: Mapping[str, Any], answer: str) -> str:
    try:
        text = completion["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str):
        raise _Nonsense(f"the judge's server did not answer with a chat completion: {answer[:_SHOWN_CHARACTERS]!r}")
    return text


def _score(text: str, pattern: str, key: str) -> float:
    shown = repr(text[-_SHOWN_CHARACTERS:])
    if not key:
        found = list(re.finditer(pattern, text))
        value: Any = found[-1][found[-1].lastindex or 0] if found else None
        wanted = f"score_pattern = {pattern!r}"
    else:
        start, end = text.find("{"), text.rfind("}") + 1
        try:
            value = json.loads(text[start:end]).get(key)
        except ValueError:
            value = None
        wanted = f"score_key = {key!r}"
    try:
        if value is not None and not isinstance(value, bool):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise _Nonsense(f"the judge's answer has no score ({wanted}); its end: {shown}")


_sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = weakref.WeakKeyDictionary()


def _session() -> aiohttp.ClientSession:
    """One session for each event loop, so that connections are used again. ``reward.max_concurrent`` limits them."""
    loop = asyncio.get_running_loop()
    if loop not in _sessions or _sessions[loop].closed:
        _sessions[loop] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    return _sessions[loop]
