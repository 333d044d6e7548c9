"""The engine on a CUDA device: graphs, rounds queued ahead, our kernels, and the same promises as on the CPU."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from engine.engine_parts import (
    LIMIT_S,
    assert_nothing_is_held,
    assert_same,
    bits,
    build,
    collect,
    full_pass,
    logits_after,
    request,
    run,
    running,
    stepped,
    texts,
    tokens_of,
    weights,
)
from engine.play import MODES, TAGS, Play, check
from tiny import tokenizer
from transformers import Gemma3TextConfig, GemmaConfig, LlamaConfig, MistralConfig

from headwater.config.schema import EngineConfig
from headwater.core.errors import LogitsBroken, ModelError
from headwater.core.protocols import WeightUpdate
from headwater.core.requests import SamplingParams
from headwater.engine.engine import Engine
from headwater.engine.kernels.truncation import sample_truncated
from headwater.engine.runners.fixed_rows import sample_in_blocks
from headwater.engine.sampler import SamplingBatch, distribution, sample, uniforms
from headwater.models.load import load_model
from headwater.models.virtual_memory import mapped_bytes

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.09,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
BUILT = {
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=20),
    "gemma": lambda: GemmaConfig(**SHAPE, tie_word_embeddings=False),
    "gemma3_text": lambda: Gemma3TextConfig(**SHAPE, query_pre_attn_scalar=32, tie_word_embeddings=False, **WINDOW),
}
KINDS = ("tiny:qwen3", "tiny:qwen2", "tiny:llama", *BUILT)
LENGTHS = (1, 17, 63, 64, 65, 150)
SMALL_CACHE = {"num_pages": 24, "page_tokens": 16}


def cuda_model(kind: str = "tiny:qwen3", dtype: str = "float32", seed: int = 0):
    if kind in BUILT:
        return build(BUILT[kind](), seed).to(getattr(torch, dtype)).to("cuda")
    return load_model(kind, dtype=dtype, device="cuda", seed=seed)


def used_bytes() -> int:
    return torch.cuda.memory_allocated() + mapped_bytes()


def cuda(dtype: str = "float32", kind: str = "tiny:qwen3", **settings):
    """An engine; its cache is kept small, because it starts as zeros."""
    if "num_pages" not in settings:
        settings.setdefault("kv_cache_gib", 0.5)
    return running(cuda_model(kind, dtype), **settings)


def slow_cuda(**settings):
    return stepped(cuda_model(), **({"kv_cache_gib": 0.5} if "num_pages" not in settings else {}), **settings)


@pytest.fixture(scope="module")
def reference():
    return cuda_model()


REQUESTS = [request(tokens_of(length), key, max_new_tokens=20) for key, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def alone():
    responses = []
    with cuda(overlap=False, prefix_cache=False) as engine:
        for each in REQUESTS:
            responses += engine.generate([each])
    return responses


# Correctness


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logprobs_are_those_of_a_full_forward_pass(kind, overlap):
    sampling = [{"temperature": 0.0}, {}, {"temperature": 0.6}, {"top_k": 9, "top_p": 0.9}, {"min_p": 0.1}]
    asked = [
        request(tokens_of(length), key, max_new_tokens=40, **sampling[key % len(sampling)])
        for key, length in enumerate((*LENGTHS, *LENGTHS))
    ]
    with cuda(kind=kind, overlap=overlap) as engine:
        responses = engine.generate(asked)
    model = cuda_model(kind)
    for each, response in zip(asked, responses, strict=True):
        assert len(response.output_tokens) == 40
        assert response.output_logprobs == pytest.approx(full_pass(model, response, each.sampling), abs=1e-4)
        if each.sampling.temperature == 0:
            everything = (*response.input_tokens, *response.output_tokens)
            logits = logits_after(model, everything[:-1])[len(response.input_tokens) - 1 :]
            assert response.output_tokens == tuple(logits.argmax(-1).tolist())


@pytest.mark.parametrize("deterministic", [False, True])
def test_bfloat16_logprobs_are_near_a_full_forward_pass(deterministic):
    with cuda("bfloat16", deterministic=deterministic) as engine:
        responses = engine.generate(REQUESTS)
    model = cuda_model(dtype="bfloat16")
    gaps = torch.tensor(
        [
            abs(ours - theirs)
            for each, response in zip(REQUESTS, responses, strict=True)
            for ours, theirs in zip(response.output_logprobs, full_pass(model, response, each.sampling), strict=True)
        ]
    )
    assert gaps.mean() < 0.03
    assert gaps.max() < 0.3


# Cache paths


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "settings", [{}, {"max_prefill_tokens": 7}, {"max_sequences": 2}, {"decode_steps": 1}, {"page_tokens": 16}]
)
def test_in_a_batch_as_alone(alone, settings, overlap):
    with cuda(overlap=overlap, **settings) as engine:
        assert_same(engine.generate(REQUESTS), alone)
        assert_same(engine.generate(REQUESTS), alone)  # now found in the cache
        assert engine.metrics().num_tokens_cached > 0


@pytest.mark.parametrize("overlap", [True, False])
def test_a_group_computes_its_prompt_once(overlap):
    group = [request(tokens_of(100), key, max_new_tokens=20) for key in range(16)]
    with cuda(overlap=overlap) as engine:
        together = engine.generate(group)
        assert engine.metrics().num_tokens_prefilled == 100
    with cuda(prefix_cache=False) as engine:
        separate = [engine.generate([each])[0] for each in group]
    assert_same(together, separate)
    assert len(set(texts(together))) == 16


@pytest.mark.parametrize("overlap", [True, False])
def test_making_room_for_others_changes_nothing(overlap):
    asked = [request(tokens_of(20 + 5 * key), key, max_new_tokens=60) for key in range(10)]
    with cuda(page_tokens=16) as engine:
        expected = engine.generate(asked)
    with cuda(overlap=overlap, **SMALL_CACHE) as engine:
        assert_same(engine.generate(asked), expected)
        assert engine.metrics().num_preempted > 0
        assert_nothing_is_held(engine)


# Graphs


@pytest.mark.parametrize("overlap", [True, False])
def test_rows_that_end_at_different_times_cross_the_buckets(overlap):
    """As rows end, the batch shrinks through many graphs; every response is what it is in a batch of its own."""
    asked = [request(tokens_of(3 + key % 7), key, max_new_tokens=1 + key * 7 % 90) for key in range(150)]
    with cuda(overlap=overlap, max_sequences=150) as engine:
        responses = engine.generate(asked)
        buckets = {num_rows for num_rows, *_ in engine._runner._graphs}
        assert_nothing_is_held(engine)
    assert len(buckets) > 4
    assert [len(each.output_tokens) for each in responses] == [1 + key * 7 % 90 for key in range(150)]
    some = range(0, 150, 15)
    with cuda(overlap=False) as engine:
        assert_same([responses[key] for key in some], [engine.generate([asked[key]])[0] for key in some])


@pytest.mark.parametrize("capacity", [24, 40])
def test_full_rows_that_become_holes_cost_no_tokens(capacity):
    """All rows in use, then some end while the bucket stays: the last lane must keep its tokens."""
    asked = [request(tokens_of(5), key, max_new_tokens=60 if key % 8 else 3) for key in range(3 * capacity)]
    with cuda(max_sequences=capacity) as engine:
        responses = engine.generate(asked)
        assert_nothing_is_held(engine)
    assert [len(each.output_tokens) for each in responses] == [60 if key % 8 else 3 for key in range(3 * capacity)]


def test_stops_of_every_kind_end_a_response_where_they_should():
    with cuda() as engine:
        free = texts(engine.generate([request(tokens_of(9), key, max_new_tokens=50) for key in range(8)]))
        for overlap_tokens in (free[0][13],):
            stops = (*range(480, 500), overlap_tokens)
            cut = engine.generate(
                [request(tokens_of(9), key, max_new_tokens=50, stop_token_ids=stops) for key in range(8)]
            )
            for tokens, response in zip(free, cut, strict=True):
                ends = [place for place, token in enumerate(tokens) if token in stops]
                assert response.output_tokens == (tokens[: ends[0] + 1] if ends else tokens)
        text = tokenizer().decode(list(free[1][:20]))
        stop = text[len(text) // 2 : len(text) // 2 + 4]
        [response] = engine.generate([request(tokens_of(9), 1, max_new_tokens=50, stop_strings=(stop,))])
        end = next(end for end in range(1, 51) if stop in tokenizer().decode(list(free[1][:end])))
        assert (response.output_tokens, response.stop_reason) == (free[1][:end], "stop")
        for last in (22, 300, 40):  # the device watches sixteen; the table of early ones grows
            early = tuple(range(6, last))
            [response] = engine.generate(
                [request(tokens_of(9), 2, max_new_tokens=30, min_new_tokens=30, stop_token_ids=early)]
            )
            assert not set(response.output_tokens) & set(early)
        deltas = run(collect(engine.astream(request(tokens_of(9), 3, max_new_tokens=50))))
        assert tuple(token for delta in deltas for token in delta.tokens) == free[3]
        assert_nothing_is_held(engine)


def test_first_tokens_follow_the_models_distribution(reference):
    count, prompt = 20_000, tokens_of(9)
    with cuda() as engine:
        responses = engine.generate([request(prompt, key, max_new_tokens=1) for key in range(count)])
    observed = torch.bincount(torch.tensor([each.output_tokens[0] for each in responses]), minlength=512).double()
    expected = logits_after(reference, prompt)[-1].double().softmax(-1) * count
    likely = expected >= 5
    observed = torch.cat([observed[likely], observed[~likely].sum()[None]])
    expected = torch.cat([expected[likely], expected[~likely].sum()[None]])
    statistic, freedom = float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1
    deviate = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert abs(deviate) < 3.5


# Deterministic mode

SAMPLING = ({}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 7}, {"top_p": 0.8, "min_p": 0.02})
MIXED = [
    request(tokens_of(length), key, max_new_tokens=12, **SAMPLING[key % len(SAMPLING)])
    for key, length in enumerate((*LENGTHS, 130, 200))
]
NEIGHBOURS = [request(tokens_of(11, key), 100 + key, **SAMPLING[key % len(SAMPLING)]) for key in range(70)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_bits_do_not_depend_on_batch_chunks_order_or_cache(dtype):
    with cuda(dtype, deterministic=True, prefix_cache=False, overlap=False) as engine:
        expected = bits([engine.generate([each])[0] for each in MIXED])
    for settings in ({}, {"max_prefill_tokens": 5}, {"max_prefill_tokens": 16}, {"max_sequences": 3}):
        with cuda(dtype, deterministic=True, **settings) as engine:
            assert bits(engine.generate([*NEIGHBOURS, *MIXED])[len(NEIGHBOURS) :]) == expected
            assert bits(engine.generate(MIXED[::-1])[::-1]) == expected
            assert engine.metrics().num_tokens_cached > 0


@pytest.mark.parametrize("kind", ["tiny:qwen2", "tiny:llama", "mistral"])
def test_deterministic_bits_for_other_architectures(kind):
    with cuda(kind=kind, deterministic=True, prefix_cache=False) as engine:
        expected = bits([engine.generate([each])[0] for each in MIXED])
    with cuda(kind=kind, deterministic=True, max_prefill_tokens=50) as engine:
        assert bits(engine.generate([*NEIGHBOURS, *MIXED])[len(NEIGHBOURS) :]) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_bits_survive_making_room_and_interruptions(dtype):
    asked = [request(tokens_of(20 + 5 * key), key, max_new_tokens=60) for key in range(10)]
    with cuda(dtype, deterministic=True, page_tokens=16, prefix_cache=False) as engine:
        expected = bits([engine.generate([each])[0] for each in asked])
    with cuda(dtype, deterministic=True, **SMALL_CACHE) as engine:
        assert bits(engine.generate(asked)) == expected
        assert engine.metrics().num_preempted > 0
    same = cuda_model(dtype=dtype)
    with stepped(cuda_model(dtype=dtype), deterministic=True, page_tokens=16, kv_cache_gib=0.2) as slow:
        answers = [slow.submit(each) for each in asked]
        for version in (1, 2):
            slow.turn(3)
            slow.engine.update_weights(WeightUpdate.of(version, same.named_parameters()), "interrupt")
        slow.finish()
        assert slow.engine.metrics().num_interrupted > 0
        assert bits([answer.result(LIMIT_S) for answer in answers]) == expected


CUTS = ({"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.001}, {"temperature": 0.8, "top_k": 1000, "top_p": 0.7})
# The second is odd: rows of its logits begin at other alignments.
LARGE_VOCABULARIES = (128_256, 100_003)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("vocabulary", LARGE_VOCABULARIES)
def test_a_cut_distribution_is_drawn_from_with_the_same_bits_among_any_others(vocabulary, cut):
    generator = torch.Generator("cuda").manual_seed(0)
    logits = 4 * torch.randn(65, vocabulary, device="cuda", generator=generator).bfloat16()
    params = SamplingParams(1, **cut)
    keys = torch.randint(-(2**62), 2**62, (65,), generator=torch.Generator().manual_seed(0))

    def draw(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        batch = SamplingBatch.build([params] * len(rows), keys[rows].tolist(), torch.device("cuda"))
        return sample_in_blocks(logits[rows], batch, torch.full((len(rows),), 5, device="cuda"))

    token, logprob = draw([0])
    for num_others in (1, 7, 64):
        for place in {0, num_others // 2, num_others}:
            others = list(range(1, num_others + 1))
            tokens, logprobs = draw([*others[:place], 0, *others[place:]])
            assert torch.equal(tokens[place], token[0])
            assert torch.equal(logprobs[place], logprob[0])


@pytest.mark.parametrize("spread", [0.8, 3.0, 6.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_truncation_without_sorting_draws_the_tokens_of_the_plain_sampler(dtype, spread):
    num_rows, vocabulary, device = 1024, 151_936, torch.device("cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    logits = (spread * torch.randn(num_rows, vocabulary, device="cuda", generator=generator)).to(dtype)
    logits[::7, 1000:90_000] = -torch.inf
    cuts = (*CUTS, {}, {"temperature": 0.0, "top_k": 3}, {"top_p": 0.999, "min_p": 1e-4})
    params = [SamplingParams(1, **cuts[row % len(cuts)]) for row in range(num_rows)]
    keys = torch.randint(-(2**62), 2**62, (num_rows,), generator=torch.Generator().manual_seed(0))
    batch = SamplingBatch.build(params, keys.tolist(), device)
    positions, rows = torch.arange(num_rows, device="cuda"), torch.arange(num_rows, device="cuda")
    inputs = batch.keys, positions, batch.temperature
    filters = batch.top_k, batch.top_p, batch.min_p
    tokens, logprobs = sample_truncated(logits, *inputs, filters, rows)
    num_same = 0
    for start in range(0, num_rows, 64):
        block = torch.arange(start, start + 64, device="cuda")
        own = batch.of_rows(block)
        expected, expected_logprobs = sample(logits[block], own, positions[block])
        same = tokens[block] == expected
        num_same += int(same.sum())
        torch.testing.assert_close(logprobs[block][same], expected_logprobs[same], rtol=1e-3, atol=1e-3)
        # The uniform number falls into the share of the drawn token, or next to it.
        up_to = distribution(logits[block], own).double().exp().cumsum(-1)
        up_to = up_to.gather(-1, tokens[block][:, None])[:, 0]
        shares = logprobs[block].double().exp()
        uniform = uniforms(own.keys, positions[block])
        falls = (up_to - shares - 1e-4 < uniform) & (uniform < up_to + 1e-4)
        assert (falls | (own.temperature == 0)).all()
    # Float32 sums may put a boundary, or the drawn token, one token earlier or later. Flat rows keep very many tokens.
    assert num_same > (0.99 if spread > 1 else 0.5) * num_rows
    for row in range(16):
        one = slice(row, row + 1)
        own = sample_truncated(
            logits[one], *(each[one] for each in inputs), tuple(each[one] for each in filters), rows[:1]
        )
        assert torch.equal(own[0][0], tokens[row])
        assert torch.equal(own[1][0], logprobs[row])


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.02}])
def test_filters_in_all_rows_draw_the_tokens_of_the_plain_sampler(reference, cut):
    asked = [request(tokens_of(length), key, max_new_tokens=20, **cut) for key, length in enumerate(LENGTHS)]
    with cuda() as engine:
        responses = engine.generate(asked)
    num_same = num_tokens = 0
    for each, response in zip(asked, responses, strict=True):
        everything = (*response.input_tokens, *response.output_tokens)
        logits = logits_after(reference, everything[:-1])[len(response.input_tokens) - 1 :]
        batch = SamplingBatch.build([each.sampling] * len(logits), [each.rng_key] * len(logits), logits.device)
        expected, _ = sample(logits, batch, torch.arange(len(logits), device=logits.device))
        num_same += sum(map(int.__eq__, response.output_tokens, expected.tolist()))
        num_tokens += len(response.output_tokens)
    assert num_same >= num_tokens - 2  # the logits of a full pass differ in their last bits


@pytest.mark.parametrize("vocabulary", LARGE_VOCABULARIES)
def test_deterministic_bits_of_cut_distributions_over_a_large_vocabulary(vocabulary):
    def large():
        shape = {**SHAPE, "vocab_size": vocabulary, "initializer_range": 0.05}
        return build(LlamaConfig(**shape), 0).bfloat16().to("cuda")

    settings = {"deterministic": True, "kv_cache_gib": 0.2, "max_sequences": 80}
    asked = [request(tokens_of(20 + key), key, max_new_tokens=10, **cut) for key, cut in enumerate(CUTS)]
    others = [request(tokens_of(11, key), 100 + key, max_new_tokens=14, **CUTS[key % 4]) for key in range(64)]
    with running(large(), prefix_cache=False, overlap=False, **settings) as engine:
        expected = bits([engine.generate([each])[0] for each in asked])
    with running(large(), **settings) as engine:
        for num_others in (1, 7, 64):
            assert bits(engine.generate([*others[:num_others], *asked])[num_others:]) == expected


def test_deterministic_mode_refuses_what_it_does_not_cover():
    with pytest.raises(ModelError, match=r"engine.deterministic = true.*gemma"):
        Engine(cuda_model("gemma"), tokenizer(), EngineConfig(deterministic=True, kv_cache_gib=0.1))


# Control


@pytest.mark.parametrize("where", ["cuda", "cpu"])
@pytest.mark.parametrize("mode", ["interrupt", "in_flight"])
def test_weights_change_in_memory_between_two_tokens(mode, where):
    new = cuda_model(seed=1).to(where)
    asked = [request(tokens_of(20), key, max_new_tokens=60) for key in range(4)]
    with slow_cuda() as slow:
        answers = [slow.submit(each) for each in asked]
        slow.turn(3)
        computed = slow.engine.metrics().num_tokens_prefilled
        update = slow.engine.update_weights(WeightUpdate.of(5, new.named_parameters()), mode)
        slow.turn()
        assert update.done()
        slow.finish()
        responses = [answer.result(LIMIT_S) for answer in answers]
        assert (slow.engine.metrics().num_tokens_prefilled == computed) == (mode == "in_flight")
        later = slow.submit(asked[0])
        slow.finish()
    models = {0: cuda_model(), 5: new.to("cuda")}
    for each, response in zip(asked, responses, strict=True):
        assert list(response.output_versions) == sorted(response.output_versions)
        assert set(response.output_versions) == {0, 5}
        for version, model in models.items():
            if version == 5 and mode == "in_flight":
                continue  # new weights over the old cache: no single forward pass says that
            expected = full_pass(model, response, each.sampling)
            for ours, theirs, tag in zip(response.output_logprobs, expected, response.output_versions, strict=True):
                assert tag != version or ours == pytest.approx(theirs, abs=1e-4)
    expected = full_pass(models[5], later.result(LIMIT_S), asked[0].sampling)
    assert later.result(LIMIT_S).output_logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}])
def test_requests_fail_under_weights_that_make_nan_and_the_engine_takes_better_ones(cut):
    asked = [request(tokens_of(length), length, max_new_tokens=20, **cut) for length in LENGTHS]
    model = cuda_model()
    good = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    huge = {**good, "model.embed_tokens.weight": good["model.embed_tokens.weight"] * 1000}
    huge["model.norm.weight"] = torch.full_like(good["model.norm.weight"], 1e37)
    with running(model, kv_cache_gib=0.5) as engine:
        expected = engine.generate(asked)
        engine.update_weights(WeightUpdate.of(1, huge.items())).result(LIMIT_S)
        with pytest.raises(LogitsBroken, match="weights of version 1 produced NaN or infinite logits"):
            engine.generate(asked)
        engine.update_weights(WeightUpdate.of(2, good.items())).result(LIMIT_S)
        assert_same(engine.generate(asked), expected)
        assert engine.metrics().num_failed == len(asked)
        assert_nothing_is_held(engine)


@pytest.mark.parametrize("tags", TAGS)
def test_sleeping_frees_the_memory_of_the_device_and_generation_goes_on_afterwards(tags):
    asked = [request(tokens_of(20), key, max_new_tokens=60) for key in range(4)]
    with cuda() as engine:
        expected = engine.generate(asked)
    with slow_cuda() as slow:
        answers = [slow.submit(each) for each in asked]
        slow.turn(3)
        gc.collect()  # engines of earlier tests
        before = used_bytes()
        weight_bytes = sum(each.numel() * each.element_size() for each in slow.engine._model.parameters())
        slow.call(lambda: slow.engine.sleep(tags))
        freed = before - used_bytes()
        assert freed >= (0.45 * 2**30 if "kv_cache" in tags else 0) + (0.9 * weight_bytes if "weights" in tags else 0)
        slow.turn(3)
        slow.call(lambda: slow.engine.wake(tags))
        assert used_bytes() >= before - 64 * 2**20
        slow.finish()
        assert_same([answer.result(LIMIT_S) for answer in answers], expected)
        assert_nothing_is_held(slow.engine)


def test_pausing_and_aborting_with_rounds_queued_ahead():
    asked = [request(tokens_of(20), key, f"r{key}", max_new_tokens=100) for key in range(3)]
    with cuda() as engine:
        expected = engine.generate(asked)
    with slow_cuda() as slow:
        streams = [slow.stream(each) for each in asked]
        slow.turn(3)
        slow.call(slow.engine.pause)
        slow.settle()
        before = [streamed.tokens for streamed, _ in streams]
        slow.turn(3)
        slow.settle()
        assert [streamed.tokens for streamed, _ in streams] == before
        assert slow.call(lambda: slow.engine.abort("r1"))
        slow.call(slow.engine.resume)
        slow.finish()
        responses = [answer.result(LIMIT_S) for _, answer in streams]
        assert_nothing_is_held(slow.engine)
    assert [each.stop_reason for each in responses] == ["length", "abort", "length"]
    assert responses[1].output_tokens == expected[1].output_tokens[: len(before[1])]
    assert_same(responses[::2], expected[::2])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("modes", [("interrupt", "drain"), MODES])
def test_whatever_happens_in_whatever_order_no_token_is_lost_or_repeated(seed, modes):
    chance = random.Random(seed)
    steps = []
    for _ in range(30):
        kind = chance.choice(["submit"] * 4 + ["stream"] * 2 + ["turn"] * 5 + ["abort", "update", "update", "sleep"])
        asked = request(
            tokens_of(chance.choice((1, 17, 40))),
            chance.randrange(4),
            max_new_tokens=chance.choice((1, 5, 40)),
            temperature=chance.choice((0.0, 1.0)),
            stop_token_ids=chance.choice(((), tuple(range(6, 24)))),
        )
        steps += {
            "submit": [("submit", asked, chance.randrange(1, 4))],
            "stream": [("stream", asked, 1)],
            "turn": [("turn", chance.randrange(1, 5))],
            "abort": [("abort", chance.randrange(9))],
            "update": [("update", chance.choice(modes), chance.randrange(2))],
            "sleep": [("sleep", chance.choice(TAGS)), ("turn", 1), ("wake", TAGS[-1])],
        }[kind]
    with slow_cuda(num_pages=14, page_tokens=16, max_sequences=6, max_prefill_tokens=24, decode_steps=3) as slow:
        play = Play(slow, "tiny:qwen3")
        check(play, play.play(steps), logprobs_too="in_flight" not in modes)


def test_an_update_of_weights_tied_under_the_other_name_reaches_the_captured_graphs():
    new = dict(cuda_model(seed=1).named_parameters())
    new["lm_head.weight"] = new.pop("model.embed_tokens.weight")
    asked = request(tokens_of(20), max_new_tokens=30)
    with cuda() as engine:
        engine.generate([asked])
        engine.update_weights(WeightUpdate.of(1, new.items())).result(LIMIT_S)
        [response] = engine.generate([asked])
    expected = full_pass(cuda_model(seed=1), response, asked.sampling)
    assert response.output_logprobs == pytest.approx(expected, abs=1e-4)


def test_weights_from_the_cpu_reference_mean_the_same_on_the_device():
    """What the interleavings above compare with: the reference model runs on the CPU."""
    asked = request(tokens_of(20), max_new_tokens=30)
    with cuda() as engine:
        engine.update_weights(weights(1, 1, "tiny:qwen3")).result(LIMIT_S)
        [response] = engine.generate([asked])
    expected = full_pass(cuda_model(seed=1), response, asked.sampling)
    assert response.output_logprobs == pytest.approx(expected, abs=1e-4)
