"""``headwater serve`` as other projects' programs use it: lm-evaluation-harness, LangChain and LiteLLM.

They run in an environment of their own (``make setup-clients``), because their pins must not change our packages.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command import python_of, start_headwater
from real_clients import QUESTIONS

from headwater.models.load import load_model, load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("clients")]

MODEL = "tiny:qwen3"
LIMIT_S = 600.0
"""Generous: importing a client takes many seconds on a busy machine."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    process = start_headwater("serve", MODEL, "--port", "0")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving "), process.communicate(timeout=60)
        yield f"{line.split()[-1]}/v1"
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0


def received(client: str, url: str, folder: Path) -> dict[str, Any]:
    """What a client reports about its calls."""
    python, is_installed = python_of("clients")
    assert is_installed, f"the clients are not installed for {python}; run `make setup-clients` first"
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    ended = subprocess.run(
        [python, Path(__file__).with_name("real_clients.py"), client, url, MODEL, folder],
        env={**env, "HF_HOME": str(folder / "hf"), "HOME": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("RECEIVED ")]
    assert lines, ended.stdout[-3000:] + ended.stderr[-6000:]
    return json.loads(lines[-1].removeprefix("RECEIVED "))


def log_likelihood(model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, bool]:
    """The log-prob of a continuation, and whether each of its tokens is the most likely one."""
    before, tokens = tokenizer.encode(context), tokenizer.encode(context + continuation)
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    places = range(len(before) - 1, len(tokens) - 1)
    total = sum(float(logprobs[place, tokens[place + 1]]) for place in places)
    return total, all(int(logprobs[place].argmax()) == tokens[place + 1] for place in places)


def test_lm_evaluation_harness_scores_and_generates(url, tmp_path):
    found = received("lm_eval", url, tmp_path)
    model, tokenizer = load_model(MODEL, dtype="float32", device="cpu", seed=0), load_tokenizer(MODEL)
    num_right = 0
    for question, choices in zip(QUESTIONS, found["choices"], strict=True):
        wanted = [log_likelihood(model, tokenizer, question["question"], f" {text}") for text in question["choices"]]
        assert [each[0][0] for each in choices] == pytest.approx([total for total, _ in wanted], abs=1e-3)
        assert [each[0][1] for each in choices] == [is_greedy for _, is_greedy in wanted]
        num_right += max(range(len(wanted)), key=lambda place: wanted[place][0]) == question["answer"]
    assert found["accuracy"] == pytest.approx(num_right / len(QUESTIONS))
    for question, text in zip(QUESTIONS, found["texts"], strict=True):
        tokens = torch.tensor([tokenizer.encode(question["question"])])
        output = model.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        greedy = tokenizer.decode(output[0, tokens.shape[1] :], skip_special_tokens=True)
        assert text == greedy.split("\n")[0]


def is_person(value: Any) -> bool:
    return set(value) == {"age", "kind"} and 0 <= value["age"] <= 120 and value["kind"] in ("cat", "dog")


def test_langchain_chats_streams_and_gets_structured_output(url, tmp_path):
    found = received("langchain", url, tmp_path)
    assert found["text"]
    assert found["streamed"] == found["text"]
    assert found["tokens"] == found["streamed_tokens"] == 8
    assert found["num_tops"] == [2] * 8
    assert is_person(found["person"])
    assert found["anything"] in ("stop", "length")
    assert found["completion"]


def test_litellm_chats_streams_biases_and_gets_structured_output(url, tmp_path):
    found = received("litellm", url, tmp_path)
    assert found["text"]
    assert found["streamed"] == found["text"]
    assert found["tokens"] == 8
    assert found["biased"] == [load_tokenizer(MODEL).decode([42])] * 4
    assert is_person(found["person"])
    assert found["completion_tokens"] == 4
