"""Samples of a prompt share its computation, also after an interruption, and large groups cost no more per sample."""

from __future__ import annotations

import pytest
from engine.engine_parts import request, running, stepped, texts, tokens_of, weights

from headwater.engine.sequence import EngineSequence

PROMPT = tokens_of(100)
FULL_PAGES = 96
"""Tokens of ``PROMPT`` in full pages of 16."""


def test_after_an_interruption_a_group_computes_its_prompt_once():
    group = [request(PROMPT, key, max_new_tokens=40) for key in range(8)]
    with stepped(max_prefill_tokens=16384) as slow:
        answers = [slow.submit(each) for each in group]
        slow.turn(3)
        before = slow.engine.metrics()
        slow.engine.update_weights(weights(1, 1), "interrupt")
        slow.finish()
        after = slow.engine.metrics()
        assert all(len(answer.result().output_tokens) == 40 for answer in answers)
    assert after.num_interrupted == 8
    computed = after.num_tokens_prefilled - before.num_tokens_prefilled
    own = 8 * (len(PROMPT) - FULL_PAGES + 40)
    assert computed <= FULL_PAGES + own
    assert after.num_tokens_cached - before.num_tokens_cached >= 7 * FULL_PAGES


def test_prompts_that_arrive_together_compute_a_common_start_once():
    prompts = [(*PROMPT[:FULL_PAGES], *tokens_of(10, seed)) for seed in range(6)]
    requests = [request(prompt, seed) for seed, prompt in enumerate(prompts)]
    with running(max_prefill_tokens=16384) as engine, running(prefix_cache=False) as plain:
        assert texts(engine.generate(requests)) == texts(plain.generate(requests))
        metrics = engine.metrics()
    assert metrics.num_tokens_prefilled == FULL_PAGES + 6 * 10
    assert metrics.num_tokens_cached == 5 * FULL_PAGES


@pytest.fixture
def reads(monkeypatch):
    """Records the sequences whose tokens were read one by one."""
    reads: list[EngineSequence] = []
    all_tokens = EngineSequence.all_tokens

    def noted(sequence):
        reads.append(sequence)
        return all_tokens(sequence)

    monkeypatch.setattr(EngineSequence, "all_tokens", noted)
    return reads


def test_members_that_wait_for_rows_are_not_touched_again_and_again(reads):
    with running(max_sequences=4) as engine:
        responses = engine.generate([request(PROMPT, key, max_new_tokens=2) for key in range(200)])
    assert len(responses) == 200
    assert len(reads) <= 2 * 200


def test_an_interruption_goes_through_no_tokens_one_by_one(reads):
    with stepped() as slow:
        for key in range(5):
            slow.submit(request(PROMPT, key, max_new_tokens=60))
        slow.turn(3)
        reads.clear()
        slow.engine.update_weights(weights(1, 1), "interrupt")
        slow.turn(3)
        assert slow.engine.metrics().num_interrupted == 5
        assert slow.engine.metrics().num_running == 5
        assert not reads
