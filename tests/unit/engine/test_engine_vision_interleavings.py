"""Requests with pictures, for any order of operations: every token has the log-prob of its picture and its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from engine.engine_parts import assert_nothing_is_held, like_a_gpu, stepping
from engine.play import TAGS, Play
from engine.vision_parts import asking, full_pass, picture, reference, running, weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwater.core.requests import ModelRequest

NAME = "qwen2_5_vl"
ONE, OTHER, WIDE = picture(1), picture(2), picture(3, 112, 84)
CONTENTS = ([], [ONE], [OTHER], [WIDE], [ONE, OTHER], [OTHER, ONE], [WIDE, WIDE])
REQUESTS = st.builds(
    lambda contents, key, new, temperature: asking(NAME, contents, key, max_new_tokens=new, temperature=temperature),
    st.sampled_from(CONTENTS),
    st.integers(0, 2),
    st.sampled_from((1, 2, 9, 20)),
    st.sampled_from((1.0, 0.0)),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), REQUESTS, st.integers(1, 3)),
        st.tuples(st.just("stream"), REQUESTS, st.just(1)),
        st.tuples(st.just("turn"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("leave"), st.integers(0, 9)),
        st.tuples(st.just("pause")),
        st.tuples(st.just("resume")),
        st.tuples(st.just("update"), st.sampled_from(("interrupt", "drain")), st.integers(0, 1)),
        st.tuples(st.just("sleep"), st.sampled_from(TAGS)),
        st.tuples(st.just("wake"), st.sampled_from(TAGS)),
    ),
    min_size=4,
    max_size=16,
)


@dataclass
class VisionPlay(Play):
    def _named(self, asked: ModelRequest) -> ModelRequest:
        return replace(asked, request_id=f"r{len(self.sent)}")

    def update(self, mode: str, seed: int) -> None:
        self.num_versions += 1
        future = self.engine.engine.update_weights(weights(NAME, seed, self.num_versions), mode)
        self.updates.append((self.num_versions, seed, future))


def num_pages(count: int) -> dict[str, Any]:
    config = reference(NAME).config.get_text_config()
    head_dim = config.hidden_size // config.num_attention_heads
    page_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 4 * 4
    return {"page_tokens": 4, "kv_cache_gib": (count + 0.5) * page_bytes / 2**30}


@pytest.mark.slow
@given(STEPS, st.booleans())
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_order_of_operations_mixes_pictures_or_weights(steps, gpu_like):
    with running(NAME, **num_pages(26), max_sequences=4, max_prefill_tokens=11, decode_steps=3) as engine:
        for contents in CONTENTS[1:]:
            engine._media.read(asking(NAME, contents))  # so that requests do not depend on other threads
        with stepping(like_a_gpu(engine) if gpu_like else engine) as slow:
            play = VisionPlay(slow)
            responses = play.play(steps)
            seeds = play.seeds()
            for sent, response in responses:
                assert (response.stop_reason == "abort") == sent.aborted
                assert sent.aborted or len(response.output_tokens) == sent.request.sampling.max_new_tokens
                used = {seeds[version] for version in response.output_versions}
                expected = {seed: full_pass(NAME, sent.request, response, seed) for seed in used}
                for place, version in enumerate(response.output_versions):
                    ours, theirs = response.output_logprobs[place], expected[seeds[version]][place]
                    assert ours == pytest.approx(theirs, abs=1e-4)
            assert_nothing_is_held(engine)
