"""A real vLLM server with a vision model: log-probs of prompts with images, after updates, and what is refused.

vLLM's Qwen2.5-VL needs torchvision, which the environment of ``make setup-vllm`` cannot have on every machine.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from command import PROCESS_LIMIT_S, ROOT, python_of
from vllm_images import ask, assert_logprobs, check_updates, context, picture, request

from headwater.backends.vllm.engine import VllmEngine
from headwater.core.errors import RequestError
from headwater.core.media import MediaContent

PYTHON, IS_INSTALLED = python_of("vllm")


def has_torchvision() -> bool:
    if not IS_INSTALLED:
        return False
    return subprocess.run([PYTHON, "-c", "import torchvision"], capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_torchvision(), reason=f"NO VLLM WITH IMAGES: {PYTHON} has no vLLM with torchvision"),
    pytest.mark.xdist_group("vllm"),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    launch = ("rollout.placement=disaggregated", f"rollout.launch.python={PYTHON}")
    engine = VllmEngine.launch(context(*launch), ["cpu"])
    yield engine
    engine.close()


def test_logprobs_with_images_are_those_of_the_published_weights(engine: VllmEngine) -> None:
    check_updates(engine)


def test_a_response_with_an_image_continues_after_given_tokens(engine: VllmEngine) -> None:
    asked = request("whole", picture("green"))
    given = replace(asked, request_id="rest", given_tokens=(40, 41, 42))
    (response,) = asyncio.run(ask(engine, given))
    assert response.output_len == asked.sampling.max_new_tokens - 3
    longer = replace(response, input_tokens=(*asked.input_tokens, 40, 41, 42))
    assert_logprobs(asked, longer, seed=engine.get_version())


def test_what_vllm_would_misread_is_refused(engine: VllmEngine) -> None:
    asked = request("refused", picture("red"))
    video = MediaContent.of("video", [picture("red").frames[0]] * 2, 1.0)
    with pytest.raises(RequestError, match="has a video, and this engine takes only images"):
        engine.check(replace(asked, media=(replace(asked.media[0], content=video),)))
    # The model has sampled a placeholder token before the image: vLLM would put the image there.
    pad = asked.input_tokens[asked.media[0].blocks[0].start]
    moved = tuple(item.moved(1) for item in asked.media)
    with pytest.raises(RequestError, match="placeholder token that stands for no image"):
        asyncio.run(ask(engine, replace(asked, input_tokens=(pad, *asked.input_tokens), media=moved)))


def test_vllm_in_this_process_takes_images() -> None:
    script = Path(__file__).with_name("vllm_images.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [PYTHON, script], env=environment, capture_output=True, text=True, timeout=PROCESS_LIMIT_S, check=False
    )
    if "NO PACKAGE" in done.stdout:
        pytest.skip(f"{PYTHON} lacks a package of Headwater: {done.stdout.strip()[-200:]}")
    assert done.stdout.strip().endswith("all is well"), done.stdout[-2000:] + done.stderr[-2000:]
