"""A transcript holds what the model saw and wrote, and lets nothing else in."""

from __future__ import annotations

import pytest
import tiny

from headwater.core.records import ModelResponse
from headwater.core.transcript import Transcript


def response(seen: tuple[int, ...], *written: int) -> ModelResponse:
    return ModelResponse(seen, written, (-0.5,) * len(written), (3,) * len(written), "stop")


def test_written_tokens_are_trained_and_given_ones_are_not():
    prompt = tiny.prompt()
    transcript = Transcript(prompt, sample=1)
    assert (transcript.tokens, transcript.num_response_tokens) == (prompt.tokens, 0)
    transcript.add_response(response(transcript.tokens, 40, 41))
    transcript.add_given((50, 51, 52))
    transcript.add_response(response(transcript.tokens, 42))
    assert transcript.num_response_tokens == 6
    made = transcript.finish(reward=0.5, stop_reason="stop", turn_rewards=[0.0, 0.5], info={"a": 1})
    before = len(prompt.tokens)
    assert (made.uid, made.sample, made.prompt_length) == ("row", 1, before)
    assert made.response_tokens == (40, 41, 50, 51, 52, 42)
    assert made.loss_mask[before:] == (1, 1, 0, 0, 0, 1)
    assert made.logprobs[before:] == (-0.5, -0.5, 0.0, 0.0, 0.0, -0.5)
    assert made.versions[before:] == (3, 3, -1, -1, -1, 3)
    assert (made.reward, made.turn_rewards, made.info) == (0.5, (0.0, 0.5), {"a": 1})


def test_a_response_to_other_tokens_is_refused():
    transcript = Transcript(tiny.prompt(), sample=0)
    with pytest.raises(ValueError, match="other tokens than the"):
        transcript.add_response(response((*transcript.tokens, 9), 40))
