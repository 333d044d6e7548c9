"""Small real things that many tests need: a tiny model, prompts, trajectories."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path

from headwater.core.records import Prompt, Trajectory
from headwater.models.load import load_model, load_tokenizer

ROOT = Path(__file__).parents[2]


def model(seed: int = 0):
    return load_model("tiny:qwen3", dtype="float32", device="cpu", seed=seed)


@lru_cache(maxsize=1)
def tokenizer():
    return load_tokenizer("tiny:qwen3")


def prompt(text: str = "12+34=", uid: str = "row", **fields) -> Prompt:
    messages = ({"role": "user", "content": text},)
    rendered = tokenizer().apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    tokens = tuple(tokenizer().encode(rendered, add_special_tokens=False))
    return Prompt(uid, messages, rendered, tokens, **{"data_source": "arithmetic", "ground_truth": "46", **fields})


def trajectory(seed: int, uid: str = "row", sample: int = 0, reward: float | None = None) -> Trajectory:
    rng = random.Random(seed)
    num_prompt, num_response = rng.randint(1, 9), rng.randint(1, 7)
    count = num_prompt + num_response
    mask = [0] * num_prompt + [rng.choice((0, 1, 1)) for _ in range(num_response)]
    return Trajectory(
        uid=uid,
        sample=sample,
        tokens=tuple(rng.randrange(6, 512) for _ in range(count)),
        prompt_length=num_prompt,
        loss_mask=tuple(mask),
        logprobs=tuple(-rng.random() if kept else 0.0 for kept in mask),
        versions=tuple(0 if kept else -1 for kept in mask),
        reward=rng.random() if reward is None else reward,
        stop_reason="stop",
    )
