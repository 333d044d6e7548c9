"""Programs of other projects as clients of ``headwater serve``. Runs in their environment, without Headwater.

    .venv-clients/bin/python tests/integration/real_clients.py lm_eval http://127.0.0.1:8000/v1 MODEL FOLDER

Prints one JSON object with what the client received.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

QUESTIONS = [
    {"question": "2+2=", "choices": ["4", "22"], "answer": 0},
    {"question": "The sky is", "choices": ["green", "blue", "loud"], "answer": 1},
    {"question": "Cats", "choices": ["purr", "€uro"], "answer": 0},
]
SCHEMA = {
    "title": "Person",
    "description": "A person.",
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["age", "kind"],
    "additionalProperties": False,
}


def lm_eval(url: str, model: str, folder: str) -> dict:
    """EleutherAI's harness: a multiple-choice task (log-likelihoods) and a generation task."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    data = Path(folder, "questions.jsonl")
    data.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choosing = {
        **shared,
        "task": "choosing",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    writing = {
        **shared,
        "task": "writing",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={"model": model, "base_url": f"{url}/completions", "num_concurrent": 2, "max_length": 256},
        tasks=[choosing, writing],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    return {
        "accuracy": results["results"]["choosing"]["acc,none"],
        "exact_match": results["results"]["writing"]["exact_match,none"],
        "choices": [each["resps"] for each in results["samples"]["choosing"]],
        "texts": [each["resps"][0][0] for each in results["samples"]["writing"]],
    }


def langchain(url: str, model: str, folder: str) -> dict:
    from langchain_openai import ChatOpenAI, OpenAI

    common = {"base_url": url, "api_key": "unused", "model": model, "max_retries": 0}
    chat = ChatOpenAI(**common, max_tokens=8, temperature=0, seed=3)
    answer = chat.invoke("Hello")
    chunks = list(chat.stream("Hello", stream_usage=True))
    likely = chat.bind(logprobs=True, top_logprobs=2).invoke("Hello")
    person = ChatOpenAI(**common, max_tokens=200, seed=3).with_structured_output(SCHEMA, method="json_schema")
    anything = ChatOpenAI(**common, max_tokens=300, seed=3).bind(response_format={"type": "json_object"})
    return {
        "text": answer.content,
        "tokens": answer.usage_metadata["output_tokens"],
        "streamed": "".join(chunk.content for chunk in chunks),
        "streamed_tokens": sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks),
        "num_tops": [len(each["top_logprobs"]) for each in likely.response_metadata["logprobs"]["content"]],
        "person": person.invoke("Describe a pet."),
        "anything": anything.invoke("Write JSON.").response_metadata["finish_reason"],
        "completion": OpenAI(**common, max_tokens=4, temperature=0).invoke("Hello"),
    }


def litellm(url: str, model: str, folder: str) -> dict:
    import litellm

    common = {"model": f"openai/{model}", "api_base": url, "api_key": "unused", "num_retries": 0}
    messages = [{"role": "user", "content": "Hello"}]
    whole = litellm.completion(**common, messages=messages, max_tokens=8, temperature=0, seed=3, user="someone")
    chunks = list(
        litellm.completion(
            **common,
            messages=messages,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    biased = litellm.completion(
        **common, messages=messages, max_tokens=4, logit_bias={"42": 100}, presence_penalty=0.5, logprobs=True
    )
    described = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    person = litellm.completion(**common, messages=messages, max_tokens=200, response_format=described)
    text = litellm.text_completion(
        model=f"text-completion-openai/{model}",
        api_base=url,
        api_key="unused",
        prompt="Hello",
        max_tokens=4,
        logprobs=2,
    )
    return {
        "text": whole.choices[0].message.content,
        "tokens": whole.usage.completion_tokens,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "biased": [each.token for each in biased.choices[0].logprobs.content],
        "person": json.loads(person.choices[0].message.content),
        "completion_tokens": text.usage.completion_tokens,
    }


if __name__ == "__main__":
    os.environ.update(OPENAI_API_KEY="unused", HF_HUB_OFFLINE="1", LITELLM_LOCAL_MODEL_COST_MAP="True")
    client, *arguments = sys.argv[1:]
    received = {"lm_eval": lm_eval, "langchain": langchain, "litellm": litellm}[client](*arguments)
    sys.stdout.write("RECEIVED " + json.dumps(received) + "\n")
