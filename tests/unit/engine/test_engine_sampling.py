"""Which tokens are sampled, and where a response ends."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from cases import case
from engine.engine_parts import (
    END,
    LIMIT_S,
    collect,
    logits_after,
    reference,
    request,
    run,
    running,
    stepped,
    texts,
    tokens_of,
)
from tiny import tokenizer

from headwater.engine.plans import MAX_STOP_IDS

PROMPT = tokens_of(9)


@pytest.fixture(scope="module")
def engine():
    with running() as engine:
        yield engine


def test_first_tokens_follow_the_models_distribution(engine):
    for temperature in [0.5, 1.0]:
        with case(temperature):
            count = 3000
            requests = [request(PROMPT, key, max_new_tokens=1, temperature=temperature) for key in range(count)]
            drawn = torch.tensor([each.output_tokens[0] for each in engine.generate(requests)])
            probabilities = (logits_after(reference(), PROMPT)[-1] / temperature).double().softmax(-1)
            observed, expected = torch.bincount(drawn, minlength=512).double(), probabilities * count
            likely = expected >= 5  # the others form one cell, because chi-square needs cells that are not nearly empty
            observed = torch.cat([observed[likely], observed[~likely].sum()[None]])
            expected = torch.cat([expected[likely], expected[~likely].sum()[None]])
            statistic, freedom = float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1
            assert freedom > 30
            # Wilson and Hilferty: the cube root of chi-square is nearly normal. Three and a half deviations.
            deviate = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
            assert abs(deviate) < 3.5


def test_later_tokens_follow_it_too(engine):
    """The third token of many responses, compared with the distribution after the first two."""
    responses = engine.generate([request(PROMPT, key, max_new_tokens=3) for key in range(1000)])
    with torch.no_grad():
        before = torch.tensor([[*PROMPT, *each.output_tokens[:2]] for each in responses])
        probabilities = reference()(before, use_cache=False).logits[:, -1].double().softmax(-1)
    token = torch.tensor([[each.output_tokens[2]] for each in responses])
    # The token's position in the cumulative distribution is uniform if it was sampled from it.
    places = probabilities.cumsum(-1).gather(1, token) - probabilities.gather(1, token) / 2
    counts = torch.histc(places.float(), bins=10, min=0, max=1)
    assert ((counts - 100) ** 2 / 100).sum() < 27.9  # 9 degrees of freedom, p = 0.001


def test_the_same_key_draws_the_same_tokens_and_others_draw_others(engine):
    keys = [*range(20), *range(20)]
    drawn = texts(engine.generate([request(PROMPT, key) for key in keys]))
    assert drawn[:20] == drawn[20:]
    assert len(set(drawn)) == 20


def test_neighbouring_keys_and_positions_are_unrelated(engine):
    """Key k at position p + 1 must not repeat key k + 1 at position p, as a plain sum of both would."""
    drawn = texts(engine.generate([request(PROMPT, key, max_new_tokens=30) for key in range(10)]))
    for first, second in pairwise(drawn):
        assert sum(one == other for one, other in zip(first[1:], second, strict=False)) < 8


def test_every_64_bit_key_can_be_used(engine):
    responses = engine.generate([request(PROMPT, key) for key in (0, -1, 2**63 - 1, -(2**63))])
    assert [len(each.output_tokens) for each in responses] == [12] * 4


def expected_cut(tokens, stops, minimum=0):
    ends = [place + 1 for place, token in enumerate(tokens) if token in stops and place >= minimum]
    return tokens[: ends[0]] if ends else tokens


def test_a_stop_token_ends_the_response_however_many_there_are(engine):
    """The device checks up to sixteen stop tokens, the host the others."""
    for num_stops, prefix in [(1, True), (16, False), (17, False), (60, False), (60, True)]:
        with case(num_stops, prefix):
            requests = [request(PROMPT, key, max_new_tokens=40) for key in range(12)]
            free = texts(engine.generate(requests))
            # The other stop tokens never occur.
            never = [token for token in range(6, 512) if all(token not in tokens for tokens in free)][: num_stops - 1]
            stop = free[0][9]
            stops = (stop, *never) if prefix else (*never, stop)
            cut = engine.generate([request(PROMPT, key, max_new_tokens=40, stop_token_ids=stops) for key in range(12)])
            assert texts(cut) == [expected_cut(tokens, stops) for tokens in free]
            assert [each.stop_reason for each in cut] == ["stop" if stop in tokens else "length" for tokens in free]
            assert len(cut[0].output_tokens) <= 10


def test_the_models_own_end_token_ends_a_response_unless_it_is_ignored(engine):
    many = texts(engine.generate([request(PROMPT, key, max_new_tokens=20) for key in range(200)]))
    ends = [key for key, tokens in enumerate(many) if END in tokens]
    assert ends, "no key out of 200 sampled the end token"
    [free] = texts(engine.generate([request(PROMPT, ends[0], max_new_tokens=20)]))
    [response] = engine.generate([request(PROMPT, ends[0], max_new_tokens=20, ignore_end=False)])
    assert response.output_tokens == free[: free.index(END) + 1]
    assert response.stop_reason == "stop"
    assert len(free) == 20


def test_no_stop_token_before_the_least_number_of_tokens(engine):
    for minimum, num_stops in [(1, MAX_STOP_IDS), (7, MAX_STOP_IDS), (7, MAX_STOP_IDS + 1), (1, 200), (40, 200)]:
        with case(minimum, num_stops):
            stops = tuple(range(6, 6 + num_stops))
            sampling = {"max_new_tokens": 40, "stop_token_ids": stops}
            free = engine.generate([request(PROMPT, key, **sampling) for key in range(40)])
            assert any(len(each.output_tokens) <= minimum for each in free)
            bounded = engine.generate([request(PROMPT, key, min_new_tokens=minimum, **sampling) for key in range(40)])
            for each in bounded:
                assert len(each.output_tokens) > minimum or each.stop_reason == "length"
                assert not set(each.output_tokens[:minimum]) & set(stops)
                assert each.stop_reason == ("stop" if each.output_tokens[-1] in stops and minimum < 40 else "length")


def test_one_token_is_enough_if_asked_for(engine):
    [response] = engine.generate([request(PROMPT, 3, max_new_tokens=1)])
    assert (len(response.output_tokens), response.stop_reason) == (1, "length")


def test_never_more_than_the_greatest_number_of_tokens(engine):
    limits = (7, 8, 9, 10, 247)
    responses = engine.generate([request(PROMPT, key, max_new_tokens=limit) for key, limit in enumerate(limits)])
    assert tuple(len(each.output_tokens) for each in responses) == limits


def text_of(tokens):
    return tokenizer().decode(list(tokens))


def spanning_stop(tokens, start):
    """A text that begins inside one token and ends inside a later one."""
    before, inside = text_of(tokens[:start]), text_of(tokens[: start + 3])
    return inside[len(before) + 1 : -1] or inside[len(before) :]


def first_end(tokens, stops, minimum=0):
    for end in range(minimum + 1, len(tokens) + 1):
        if any(stop in text_of(tokens[:end]) for stop in stops):
            return end
    return len(tokens)


def test_a_stop_string_across_tokens_ends_the_response_where_it_is_complete():
    """Also inside a round of steps: later tokens of the round are discarded."""
    for decode_steps, place in [(1, 6), (3, 0), (8, 13)]:
        with case(decode_steps, place):
            with running(decode_steps=decode_steps) as engine:
                [free] = texts(engine.generate([request(PROMPT, 11, max_new_tokens=40)]))
                stop = spanning_stop(free, place)
                sampling = {"max_new_tokens": 40, "stop_strings": ("never in there", stop)}
                [response] = engine.generate([request(PROMPT, 11, **sampling)])
                deltas = run(collect(engine.astream(request(PROMPT, 11, **sampling))))
            end = first_end(free, [stop])
            assert response.output_tokens == free[:end]
            assert response.stop_reason == "stop"
            assert len(response.output_logprobs) == len(response.output_versions) == end
            assert tuple(token for delta in deltas for token in delta.tokens) == free[:end]
            assert deltas[-1].stop_reason == "stop"


def test_a_stop_string_within_the_least_number_of_tokens_does_not_count(engine):
    [free] = texts(engine.generate([request(PROMPT, 11, max_new_tokens=40)]))
    stop = spanning_stop(free, 4)
    assert first_end(free, [stop]) <= 10
    [response] = engine.generate([request(PROMPT, 11, max_new_tokens=40, min_new_tokens=10, stop_strings=(stop,))])
    assert response.output_tokens == free
    assert response.stop_reason == "length"


def test_a_stop_string_that_the_last_token_completes_is_a_stop(engine):
    [free] = texts(engine.generate([request(PROMPT, 11, max_new_tokens=40)]))
    stop = spanning_stop(free, 10)
    end = first_end(free, [stop])
    [response] = engine.generate([request(PROMPT, 11, max_new_tokens=end, stop_strings=(stop,))])
    assert (response.output_tokens, response.stop_reason) == (free[:end], "stop")


def test_of_a_stop_token_and_a_stop_string_the_first_one_counts(engine):
    [free] = texts(engine.generate([request(PROMPT, 11, max_new_tokens=40)]))
    stop = spanning_stop(free, 10)
    for place in (5, 20):
        sampling = {"max_new_tokens": 40, "stop_strings": (stop,), "stop_token_ids": (free[place],)}
        [response] = engine.generate([request(PROMPT, 11, **sampling)])
        assert response.output_tokens == free[: min(first_end(free, [stop]), free.index(free[place]) + 1)]


@pytest.mark.parametrize("gpu_like", [False, True])
def test_the_row_of_a_response_cut_by_the_host_is_free_for_others(gpu_like):
    with running() as engine:
        free = texts(engine.generate([request(PROMPT, key, max_new_tokens=60) for key in range(12)]))
    stops = [spanning_stop(tokens, 5) for tokens in free]
    with stepped(max_sequences=2, gpu_like=gpu_like) as slow:
        answers = [
            slow.submit(request(PROMPT, key, max_new_tokens=60, stop_strings=(stop,))) for key, stop in enumerate(stops)
        ]
        slow.finish()
        cut = [answer.result(LIMIT_S) for answer in answers]
    assert texts(cut) == [tokens[: first_end(tokens, [stop])] for tokens, stop in zip(free, stops, strict=True)]


def test_streamed_tokens_come_in_several_parts_and_add_up(engine):
    [whole] = engine.generate([request(PROMPT, 5, max_new_tokens=100)])
    deltas = run(collect(engine.astream(request(PROMPT, 5, max_new_tokens=100))))
    assert len(deltas) > 5
    assert tuple(token for delta in deltas for token in delta.tokens) == whole.output_tokens
    assert tuple(each for delta in deltas for each in delta.logprobs) == pytest.approx(whole.output_logprobs, abs=1e-4)
    assert [delta.stop_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
