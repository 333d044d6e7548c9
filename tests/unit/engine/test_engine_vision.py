"""The engine with vision models: the same numbers as transformers, whatever happens to a request on its way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine.engine_parts import LIMIT_S, assert_nothing_is_held, bits, like_a_gpu, stepping
from engine.vision_parts import (
    NAMES,
    asking,
    full_pass,
    generated,
    has_stray_placeholder,
    logits_after,
    picture,
    reference,
    running,
    video,
    weights,
)

from headwater.core.media import MediaContent, rotary_positions
from headwater.core.protocols import WeightUpdate
from headwater.engine.batch_media import BatchMedia
from headwater.engine.media import MediaEncoder, feature_bytes
from headwater.engine.runners.decoder import CpuOps
from headwater.engine.runners.plain import Runner
from headwater.models.vision import MediaFeatures, vision_parameter_names

CLOSE = {"abs": 1e-4}
EACH = [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])]
WITH_VIDEOS = [each for each, name in zip(EACH, NAMES, strict=True) if name != "idefics3"]
ONE, OTHER, WIDE = picture(1), picture(2), picture(3, 112, 84)


@pytest.fixture
def tower_calls(monkeypatch):
    """The digests that each call of a vision tower was given."""
    calls: list[list[str]] = []
    compute = MediaEncoder._computed

    def counted(encoder, inputs):
        calls.append([*inputs])
        return compute(encoder, inputs)

    monkeypatch.setattr(MediaEncoder, "_computed", counted)
    return calls


def assert_right(name, requests, responses):
    for asked, response in zip(requests, responses, strict=True):
        assert response.output_logprobs == pytest.approx(full_pass(name, asked, response), **CLOSE)


def with_given(requests, responses, count):
    """The requests after ``count`` tokens of their responses."""
    pairs = zip(requests, responses, strict=True)
    return [replace(asked, given_tokens=response.output_tokens[:count]) for asked, response in pairs]


@pytest.mark.parametrize("name", [*NAMES[:2], *EACH[2:]])
def test_mixed_requests_equal_transformers(name):
    """Text, one picture, several pictures, a group, and pictures that chunks cut, all together."""
    greedy = [asking(name, contents, temperature=0.0) for contents in ([], [ONE], [ONE, WIDE, OTHER])]
    sampled = [asking(name, [WIDE], key) for key in range(3)] + [asking(name, [OTHER, ONE], 4), asking(name, [], 5)]
    with running(name, max_prefill_tokens=13) as engine:
        assert engine.capabilities.media
        responses = engine.generate([*greedy, *sampled])
    assert [list(each.output_tokens) for each in responses[: len(greedy)]] == [generated(name, each) for each in greedy]
    assert_right(name, [*greedy, *sampled], responses)
    assert len({each.output_tokens for each in responses[len(greedy) :]}) == len(sampled)


@pytest.mark.parametrize("name", WITH_VIDEOS)
def test_videos_equal_transformers(name):
    """With 0.01 frames per second, the rotary positions of Qwen2.5-VL are far beyond the number of tokens."""
    videos = [video(1), video(2, num_frames=2), video(1, num_frames=4, frames_per_s=0.01)]
    asked = [asking(name, [each], key) for key, each in enumerate(videos)] + [asking(name, [ONE, videos[0], WIDE], 9)]
    with running(name, max_prefill_tokens=19) as engine:
        assert_right(name, asked, engine.generate(asked))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_greedy_text_after_videos_is_that_of_generate(name):
    contents = [[video(1)], [video(1, num_frames=4, frames_per_s=0.01)], [ONE, video(2, num_frames=3), WIDE]]
    asked = [asking(name, each, temperature=0.0) for each in contents]
    with running(name, max_prefill_tokens=19) as engine:
        responses = engine.generate(asked)
    assert [list(each.output_tokens) for each in responses] == [generated(name, each) for each in asked]


@pytest.mark.parametrize("name", EACH)
def test_pictures_with_equal_tokens_share_nothing(name):
    """The tokens are equal and the prefix cache is on. Pictures in one batch or one after the other never mix."""
    first, second = asking(name, [ONE]), asking(name, [OTHER])
    assert first.input_tokens == second.input_tokens
    assert first.media != second.media
    with running(name, page_tokens=4) as engine:
        together = engine.generate([first, second, first, second])
        later = engine.generate([second, first])
        assert engine.metrics().num_tokens_cached > 0, "equal pictures share their prefix"
    for responses in (together[:2], together[2:], later[::-1]):
        assert_right(name, [first, second], responses)
    assert abs(together[0].output_logprobs[0] - together[1].output_logprobs[0]) > 1e-2, "the picture has no effect"


@pytest.mark.parametrize("name", EACH)
def test_the_tower_runs_once_per_picture(name, tower_calls):
    group = [asking(name, [ONE, WIDE], key) for key in range(8)] + [asking(name, [WIDE], 8)]
    with running(name, max_prefill_tokens=11) as engine:
        responses = engine.generate(group)
    assert sorted(digest for call in tower_calls for digest in call) == sorted([ONE.digest, WIDE.digest])
    assert len({each.output_tokens for each in responses}) > 1


@pytest.mark.parametrize("name", EACH)
def test_the_status_counts_what_the_tower_did(name):
    with running(name, prefix_cache=False) as engine:
        engine.generate([asking(name, [])])
        assert not [key for key in engine.status().metrics if "media" in key], (
            "nothing is told of images before one came"
        )
        engine.generate([asking(name, [ONE, WIDE])])
        first = engine.status().metrics
        engine.generate([asking(name, [WIDE], text="And this?")])
        second = engine.status().metrics
        engine.update_weights(weights(name, 1, 1), "interrupt")
        engine.generate([asking(name, [WIDE])])
        third = engine.status().metrics
    counts = [(each["num_media_computed"], each["num_media_cached"]) for each in (first, second, third)]
    assert counts == [(2, 0), (2, 1), (3, 1)]
    assert 0 < first["media_tower_s"] == second["media_tower_s"] < third["media_tower_s"]
    assert third["media_wait_s"] >= first["media_wait_s"] > 0


@pytest.mark.parametrize("name", EACH)
def test_an_update_replaces_the_weights_of_the_tower_too(name, tower_calls):
    asked = [asking(name, [ONE], key, max_new_tokens=24) for key in range(3)]
    changed, other = (dict(reference(name, seed).named_parameters()) for seed in (0, 1))
    changed |= {key: other[key] for key in vision_parameter_names(reference(name))}
    with running(name, decode_steps=2) as engine, stepping(engine) as slow:
        before = engine.weights_checksum()
        answers = [slow.submit(each) for each in asked]
        slow.await_media(len(asked))
        while not engine.metrics().num_tokens_generated:
            slow.turn()
        slow.engine.update_weights(WeightUpdate.of(1, changed.items()), "interrupt")
        slow.turn(3)
        slow.engine.update_weights(weights(name, 1, 2), "interrupt")
        slow.finish()
        responses = [answer.result(LIMIT_S) for answer in answers]
        assert engine.weights_checksum() != before
        slow.let_go()
        again = engine.generate(asked[:1])[0]
        assert_nothing_is_held(engine)
    for request, response in zip(asked, responses, strict=True):
        for version, seed in ((0, 0), (2, 1)):
            places = [place for place, each in enumerate(response.output_versions) if each == version]
            assert places
            expected = full_pass(name, request, response, seed)
            for place in places:
                assert response.output_logprobs[place] == pytest.approx(expected[place], **CLOSE)
        assert set(response.output_versions) == {0, 1, 2}
        middle = response.output_versions.index(1)
        old = full_pass(name, request, response)[middle]
        assert abs(response.output_logprobs[middle] - old) > 1e-4, "the tower's weights have no effect"
    assert again.output_logprobs == pytest.approx(full_pass(name, asked[0], again, 1), **CLOSE)
    assert tower_calls == [[ONE.digest]] * 3, "once per version"


def test_an_update_without_the_tower_is_refused():
    name = NAMES[0]
    tower = vision_parameter_names(reference(name))
    without = [(key, value) for key, value in reference(name).named_parameters() if key not in tower]
    with running(name) as engine:
        refused = engine.update_weights(WeightUpdate.of(1, without)).exception(LIMIT_S)
        assert "missing model.visual" in str(refused)
        engine.sleep()
        engine.wake()
        asked = asking(name, [ONE])
        assert_right(name, [asked], engine.generate([asked]))


@pytest.mark.parametrize("name", EACH)
def test_preempted_and_continued_requests_equal_transformers(name):
    """Too few pages for all, so that the youngest are computed again, and rows move as on a GPU."""
    asked = [asking(name, [ONE, WIDE] if key % 2 else [OTHER], key, max_new_tokens=40 + key) for key in range(5)]
    config = reference(name).config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    page_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 4 * 4
    with running(name, page_tokens=4, kv_cache_gib=50.5 * page_bytes / 2**30, decode_steps=3) as engine:
        for each in asked:
            engine._media.read(each)  # so that all of them start together, however long reading takes
        responses = like_a_gpu(engine).generate(asked)
        assert engine.metrics().num_preempted > 0
        assert_right(name, asked, responses)
        # The same responses, continued from a part of them, and the next turn of a conversation.
        continued = [
            replace(each, given_tokens=done.output_tokens[:7]) for each, done in zip(asked, responses, strict=True)
        ]
        rest = engine.generate(continued)
        assert [each.output_tokens for each in rest] == [each.output_tokens[7:] for each in responses]
        assert_right(name, continued, rest)
        turn = replace(asked[0], input_tokens=(*asked[0].input_tokens, *responses[0].output_tokens, 9, 8, 7))
        assert_right(name, [turn], engine.generate([turn]))


@pytest.mark.parametrize("name", EACH)
def test_log_probs_of_a_prompt_with_pictures(name):
    asked = asking(name, [ONE, WIDE], prompt_logprobs=True, num_top_logprobs=2)
    with running(name, max_prefill_tokens=10) as engine:
        [response] = engine.generate([asked])
        [later] = engine.generate([asking(name, [ONE, WIDE])])
    logits = logits_after(name, asked.input_tokens, asked.media)[:-1].log_softmax(-1)
    expected = logits.gather(-1, torch.tensor(asked.input_tokens[1:])[:, None])[:, 0].tolist()
    assert response.prompt_scores.logprobs == pytest.approx(expected, **CLOSE)
    assert_right(name, [asked, asking(name, [ONE, WIDE])], [response, later])


@pytest.mark.parametrize("name", EACH)
def test_a_placeholder_token_that_stands_for_nothing_is_text(name):
    """A model may sample it. In a response and in a later prompt it has the embedding of its token."""
    mark = reference(name).config.image_token_id
    asked = replace(asking(name, [ONE]), given_tokens=(9, mark, 10))
    written = replace(asked, input_tokens=(*asked.input_tokens, mark), given_tokens=())
    alone = replace(asking(name, []), input_tokens=(7, mark, mark, 8))
    assert has_stray_placeholder(name, written.input_tokens, written.media)
    with running(name) as engine:
        assert_right(name, [asked, written, alone], engine.generate([asked, written, alone]))


@pytest.mark.parametrize("name", EACH)
def test_deterministic_mode_gives_the_same_bits_in_any_company(name, tower_calls):
    asked = [asking(name, [WIDE], 1), asking(name, [ONE, OTHER], 2), asking(name, [], 3)]
    others = [asking(name, [picture(seed, 84, 56)], 10 + seed) for seed in range(3)]
    with running(name, deterministic=True) as engine:
        together = engine.generate([*others, *asked])[3:]
        assert_right(name, asked, together)
    with running(name, deterministic=True, max_prefill_tokens=9, page_tokens=16) as engine:
        alone = [engine.generate([each])[0] for each in asked]
        continued = [
            replace(each, given_tokens=done.output_tokens[:3]) for each, done in zip(asked, alone, strict=True)
        ]
        rest = engine.generate(continued)
    assert bits(alone) == bits(together)
    assert {len(call) for call in tower_calls} == {1}, "the bits of a picture may depend on others of the same call"
    assert [(each.output_tokens, each.output_logprobs) for each in rest] == [
        (each.output_tokens[3:], each.output_logprobs[3:]) for each in alone
    ]


@pytest.mark.parametrize("name", EACH)
def test_the_layers_of_transformers_compute_the_same(name, monkeypatch):
    def unfused(model, spec, cache, rows, *, deterministic, stream):
        return Runner(model, spec, cache, rows, CpuOps(), fused=False)

    monkeypatch.setattr("headwater.engine.engine.make_runner", unfused)
    asked = [asking(name, [ONE, WIDE]), asking(name, [], 1)]
    with running(name, max_prefill_tokens=15) as engine:
        assert_right(name, asked, engine.generate(asked))


# The cache of features, and what a batch needs


def test_the_features_of_all_layers_count_in_the_cache():
    assert feature_bytes(MediaFeatures(torch.zeros(4, 8), (torch.zeros(4, 8), torch.zeros(4, 8)))) == 3 * 4 * 8 * 4


@pytest.mark.parametrize("name", EACH)
def test_a_cache_that_is_too_small_only_costs_time(name, monkeypatch):
    monkeypatch.setattr("headwater.engine.engine.CACHE_BYTES", 1)
    asked = [asking(name, [WIDE, ONE], 1), asking(name, [OTHER], 2)]
    with running(name, max_prefill_tokens=9) as engine:
        assert_right(name, asked, engine.generate(asked))


def test_chunks_cut_pictures_anywhere():
    tokens, media = asking(NAMES[0], [ONE, WIDE]).input_tokens, asking(NAMES[0], [ONE, WIDE]).media
    for count in range(1, len(tokens) + 1):
        seen: list[tuple[MediaContent, int, int]] = []
        rotary = []
        for start in range(0, len(tokens), count):
            batch = BatchMedia.of([((), 0, 5), (media, start, min(count, len(tokens) - start))])
            assert batch is not None
            rotary.append(batch.rotary[:, 5:])
            for part in batch.parts:
                seen += [(part.content, part.first + i, start + at - 5) for i, at in enumerate(part.places.tolist())]
        wanted = [(item.content, i, at) for item in media for i, at in enumerate(item.places().tolist())]
        assert seen == wanted
        np.testing.assert_array_equal(np.concatenate(rotary, axis=1), rotary_positions(len(tokens), media))
