"""vLLM's side of ``rollout_throughput.py`` and ``vision_throughput.py``, in an environment that has vLLM but not
Headwater.

Reads a job as JSON from standard input: a folder with a model's configuration (vLLM chooses random weights), and cases
of prompts and lengths. A prompt is a list of tokens, or tokens and the path of a picture. Writes vLLM's version and the
seconds of every timed run as JSON to its argument, a file.
"""

import json
import sys
import time
from pathlib import Path

import vllm
from vllm import LLM, SamplingParams


def main() -> None:
    job = json.load(sys.stdin)
    llm = LLM(
        model=job["folder"],
        skip_tokenizer_init=not job.get("reads_pictures", False),
        load_format="dummy",
        dtype=job["dtype"],
        max_model_len=job["max_tokens"],
        max_num_seqs=job["max_sequences"],
        **job["settings"],
    )
    times = {}
    for case in job["cases"]:
        samples, new_tokens = case["samples"], case["new_tokens"]
        _seconds(llm, case["warm_prompts"], samples, min(16, new_tokens))
        times[case["name"]] = [_seconds(llm, prompts, samples, new_tokens) for prompts in case["runs"]]
    Path(sys.argv[1]).write_text(json.dumps({"version": vllm.__version__, "seconds": times}))


def _prompt(given: list[int] | dict[str, object]) -> dict[str, object]:
    if isinstance(given, list):
        return {"prompt_token_ids": given}
    from PIL import Image

    with Image.open(str(given["image"])) as image:
        return {"prompt_token_ids": given["tokens"], "multi_modal_data": {"image": image.convert("RGB")}}


def _seconds(llm: LLM, prompts: list[list[int] | dict[str, object]], samples: int, new_tokens: int) -> float:
    # Only the log-prob of the sampled token, in flat lists instead of one object per token.
    sampling = SamplingParams(
        n=samples,
        temperature=1.0,
        max_tokens=new_tokens,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
    )
    started = time.perf_counter()
    outputs = llm.generate([_prompt(each) for each in prompts], sampling, use_tqdm=False)
    elapsed = time.perf_counter() - started
    responses = [response for output in outputs for response in output.outputs]
    assert all(len(each.token_ids) == len(each.logprobs) == new_tokens for each in responses)
    assert len(responses) == samples * len(prompts)
    return elapsed


if __name__ == "__main__":
    main()
