"""A real SGLang server on the CPU with a vision model: log-probs of prompts with images, also after updates."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from command import python_of
from vllm_images import ask, assert_logprobs, check_updates, context, picture, publish, request

from headwater.backends import SERVER_KEY
from headwater.backends.sglang.engine import SglangEngine

PYTHON, IS_INSTALLED = python_of("sglang")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not IS_INSTALLED, reason=f"NO REAL SGLANG: it is not installed for {PYTHON}"),
    pytest.mark.xdist_group("sglang"),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[SglangEngine]:
    settings = ["rollout.backend=sglang", "rollout.placement=disaggregated", f"rollout.launch.python={PYTHON}"]
    settings += ["engine.max_sequences=8", "engine.update_mode=in_flight"]
    # The cache of prompts would be as large as the machine's memory allows.
    engine = SglangEngine.launch(context(*settings, "rollout.launch.args=[--max-total-tokens, '4096']"), ["cpu"])
    yield engine
    engine.close()


def test_logprobs_with_images_are_those_of_the_published_weights(engine: SglangEngine) -> None:
    """The same images are asked about after every update, so features of an older tower would be noticed."""
    check_updates(engine)


def test_a_running_server_takes_images_and_weights_over_a_process_group(
    engine: SglangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SERVER_KEY, engine.api_key)
    settings = ("rollout.backend=sglang", f"rollout.servers=[{engine.url}]", "rollout.weight_transfer=collective")
    second = SglangEngine.connect(engine.url, context(*settings))
    try:
        assert second.capabilities.media, "it tells that it keeps no features"
        asked = request("red", picture("red"))
        for version in (11, 12):
            publish(second, version, "interrupt")
            (response,) = asyncio.run(ask(second, asked))
            assert set(response.output_versions) == {version}
            assert_logprobs(asked, response, seed=version)
    finally:
        second.close()
