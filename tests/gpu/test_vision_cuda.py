"""The engine with vision models on a CUDA device: the same promises as on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from engine.engine_parts import LIMIT_S, assert_nothing_is_held, bits, stepping
from engine.vision_parts import (
    NAMES,
    asking,
    full_pass,
    generated,
    has_stray_placeholder,
    make_model,
    picture,
    reference,
    running,
    video,
    weights,
)

from headwater.core.protocols import WeightUpdate
from headwater.engine.media import MediaEncoder
from headwater.models.vision import vision_parameter_names

CLOSE = {"abs": 1e-4}


ONE, OTHER, WIDE = picture(1), picture(2), picture(3, 112, 84)


@pytest.fixture(autouse=True)
def exact_convolutions() -> Iterator[None]:
    """The first layer of a tower is a convolution, which is not computed in float32 by default."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def cuda(name, dtype="float32", **settings):
    settings.setdefault("kv_cache_gib", 0.25)
    return running(name, make_model(name, device="cuda", dtype=dtype), **settings)


def assert_right(name, requests, responses):
    for asked, response in zip(requests, responses, strict=True):
        assert response.output_logprobs == pytest.approx(full_pass(name, asked, response, device="cuda"), **CLOSE)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_mixed_requests_equal_transformers(name, overlap):
    contents = ([], [ONE], [ONE, WIDE, OTHER], [] if name == "idefics3" else [video(1), ONE])
    greedy = [asking(name, each, temperature=0.0) for each in contents[:3]]
    sampled = [asking(name, each, key, max_new_tokens=40) for each in contents for key in range(3)]
    with cuda(name, max_prefill_tokens=50, overlap=overlap) as engine:
        responses = engine.generate([*greedy, *sampled])
        assert engine.capabilities.media
    for asked, response in zip(greedy, responses, strict=False):
        # A placeholder that was sampled is text for the engine. Transformers' generate reads it as text, too.
        assert list(response.output_tokens) == generated(name, asked, "cuda")
    assert_right(name, [*greedy, *sampled], responses)


@pytest.mark.parametrize("name", NAMES)
def test_pictures_with_equal_tokens_share_nothing(name):
    first, second = (asking(name, [each], text="What is this? " * 9) for each in (ONE, OTHER))
    assert first.input_tokens == second.input_tokens
    with cuda(name, page_tokens=16) as engine:
        together = engine.generate([first, second, first, second])
        later = engine.generate([second, first])
        assert engine.metrics().num_tokens_cached > 0
    for responses in (together[:2], together[2:], later[::-1]):
        assert_right(name, [first, second], responses)
    assert abs(together[0].output_logprobs[0] - together[1].output_logprobs[0]) > 1e-2


@pytest.mark.parametrize("name", NAMES)
def test_the_tower_runs_once_per_picture_and_again_for_new_weights(name, monkeypatch):
    calls: list[str] = []
    compute = MediaEncoder._computed

    def counted(encoder, inputs):
        calls.extend(inputs)
        return compute(encoder, inputs)

    asked = [asking(name, [ONE, WIDE], key, max_new_tokens=64) for key in range(8)]
    changed, other = (dict(reference(name, seed, "cuda").named_parameters()) for seed in (0, 1))
    changed |= {key: other[key] for key in vision_parameter_names(reference(name))}
    with cuda(name, decode_steps=4) as engine, stepping(engine) as slow:
        monkeypatch.setattr(MediaEncoder, "_computed", counted)
        answers = [slow.submit(each) for each in asked]
        slow.await_media(len(asked))
        while not engine.metrics().num_tokens_generated:
            slow.turn()
        assert sorted(calls) == sorted([ONE.digest, WIDE.digest])
        engine.update_weights(WeightUpdate.of(1, changed.items()), "interrupt")
        slow.turn(4)
        engine.update_weights(weights(name, 1, 2, "cuda"), "interrupt")
        slow.finish()
        responses = [answer.result(LIMIT_S) for answer in answers]
        assert len(calls) == 6
        assert engine.weights_checksum()
        assert_nothing_is_held(engine)
    monkeypatch.undo()
    for request, response in zip(asked, responses, strict=True):
        for version, seed in ((0, 0), (2, 1)):
            expected = full_pass(name, request, response, seed, "cuda")
            places = [place for place, each in enumerate(response.output_versions) if each == version]
            assert places
            for place in places:
                assert response.output_logprobs[place] == pytest.approx(expected[place], **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_preempted_and_continued_requests_equal_transformers(name):
    asked = [asking(name, [ONE, WIDE] if key % 2 else [OTHER], key, max_new_tokens=100 + key) for key in range(6)]
    config = reference(name).config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    page_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 4 * 16
    with cuda(name, page_tokens=16, kv_cache_gib=30.5 * page_bytes / 2**30) as engine:
        responses = engine.generate(asked)
        assert engine.metrics().num_preempted > 0
        pairs = zip(asked, responses, strict=True)
        continued = [replace(each, given_tokens=done.output_tokens[:20]) for each, done in pairs]
        rest = engine.generate(continued)
    assert_right(name, asked, responses)
    assert_right(name, continued, rest)


@pytest.mark.parametrize("name", NAMES)
def test_a_placeholder_token_that_stands_for_nothing_is_text(name):
    mark = reference(name).config.image_token_id
    asked = replace(asking(name, [ONE]), given_tokens=(9, mark, 10))
    written = replace(asked, input_tokens=(*asked.input_tokens, mark), given_tokens=())
    assert has_stray_placeholder(name, written.input_tokens, written.media)
    with cuda(name) as engine:
        assert_right(name, [asked, written], engine.generate([asked, written]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_mode_gives_the_same_bits_in_any_company(name, dtype):
    asked = [asking(name, [WIDE], 1), asking(name, [ONE, OTHER], 2), asking(name, [], 3)]
    others = [asking(name, [picture(seed, 84, 56)], 10 + seed, max_new_tokens=30) for seed in range(5)]
    with cuda(name, dtype, deterministic=True) as engine:
        together = engine.generate([*others, *asked])[5:]
    with cuda(name, dtype, deterministic=True, max_prefill_tokens=9) as engine:
        alone = [engine.generate([each])[0] for each in asked]
        pairs = zip(asked, alone, strict=True)
        rest = engine.generate([replace(each, given_tokens=done.output_tokens[:3]) for each, done in pairs])
    assert bits(alone) == bits(together)
    assert [each.output_logprobs for each in rest] == [each.output_logprobs[3:] for each in alone]


@pytest.mark.parametrize("keep_addresses", [False, True])
def test_sleep_and_wake_bring_the_tower_back(keep_addresses):
    name = NAMES[0]
    asked = [asking(name, [ONE], 1), asking(name, [], 2)]
    # In the fast mode, the last bits depend on which requests share a pass, so on how fast pictures are read.
    with cuda(name, keep_addresses=keep_addresses, deterministic=True) as engine:
        before, checksum = engine.generate(asked), engine.weights_checksum()
        engine.sleep()
        assert engine.weights_checksum() == checksum
        engine.wake()
        assert engine.weights_checksum() == checksum
        assert bits(engine.generate(asked)) == bits(before)
        assert_right(name, asked, before)


def test_bfloat16_logprobs_are_near_a_full_forward_pass():
    for name in NAMES:
        asked = [asking(name, [ONE, WIDE], key, max_new_tokens=20) for key in range(4)]
        with cuda(name, "bfloat16") as engine:
            responses = engine.generate(asked)
        gaps = [
            abs(ours - theirs)
            for each, response in zip(asked, responses, strict=True)
            for ours, theirs in zip(response.output_logprobs, full_pass(name, each, response), strict=True)
        ]
        assert sum(gaps) / len(gaps) < 0.1, name


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_the_host_does_not_wait_while_prompts_are_computed(name, monkeypatch):
    """Otherwise the device is idle while the pictures of the next batch are prepared."""
    requests = [[asking(name, [picture(10 * turn + each)], each) for each in range(6)] for turn in range(3)]
    with cuda(name, "bfloat16", max_prefill_tokens=50) as engine:
        for warm_up in requests[:2]:
            engine.generate(warm_up)  # compiles and captures, which waits
        prefill, batches = engine._runner.prefill, []

        def refusing(batch, *others):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return prefill(batch, *others)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                batches.append(len(batch.input_ids))

        monkeypatch.setattr(engine._runner, "prefill", refusing)
        assert len(engine.generate(requests[2])) == len(requests[2])
        assert len(batches) > 1
