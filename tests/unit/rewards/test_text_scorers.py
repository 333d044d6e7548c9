"""Answers to search questions, and the form of responses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.rewards.scorers.format import format as format_scorer
from headwater.rewards.scorers.search_qa import f1, search_qa, words


def test_exact_match_after_normalisation():
    truth = {"target": ["The Beatles", "Beatles, The"]}
    for text, score in [
        ("<answer>The Beatles</answer>", 1.0),
        ("<answer> the   BEATLES! </answer>", 1.0),
        ("<answer>beatles</answer>", 1.0),
        ("<think>x</think><answer>Queen</answer> no: <answer>Beatles</answer>", 1.0),
        ("<answer>The Beatles from Liverpool</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("The Beatles", 0.0),
        ("<answer>The Beatles", 0.0),
    ]:
        assert search_qa("searchR1_nq", text, truth, {})["score"] == score, text


def test_other_ways_to_match():
    text = "<answer>The Beatles from Liverpool</answer>"
    assert search_qa("searchR1_nq", text, "Beatles", {}, metric="contains")["score"] == 1.0
    assert search_qa("searchR1_nq", text, ["Beatles"], {}, metric="f1")["score"] == pytest.approx(0.5)
    assert search_qa("searchR1_nq", "<answer>Beatlesmania</answer>", "Beatles", {}, metric="contains")["score"] == 0.0
    assert search_qa("searchR1_nq", "<answer>yes, it is</answer>", "yes", {}, metric="f1")["score"] == 0.0
    assert search_qa("searchR1_nq", "<answer>Queen</answer>", "Beatles", {}, format_score=0.2)["score"] == 0.2
    assert search_qa("searchR1_nq", "Queen", "Beatles", {}, format_score=0.2)["score"] == 0.0
    with pytest.raises(ValueError, match="metric = 'em'"):
        search_qa("searchR1_nq", text, "Beatles", {}, metric="em")  # type: ignore[arg-type]
    for missing in (None, [], {}, {"target": []}):
        with pytest.raises(ValueError, match="no ground truth"):
            search_qa("searchR1_nq", text, missing, {})


@given(st.lists(st.sampled_from("abcd")), st.lists(st.sampled_from("abcd")))
def test_f1_is_symmetric_and_1_only_for_the_same_words(said, target):
    assert f1(said, target) == f1(target, said)
    assert 0.0 <= f1(said, target) <= 1.0
    assert (f1(said, target) == 1.0) == (sorted(said) == sorted(target))


@given(st.text(st.characters(codec="ascii")))
def test_normalisation_is_idempotent(text):
    assert words(" ".join(words(text))) == words(text)


def test_form_of_a_response():
    for text, score in [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>\na\n</think>\n\n<answer>b</answer>\n", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think>", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> more", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a<think>b</think></think><answer>c</answer>", 0.0),
        ("<think></think><answer>b</answer>", 0.0),
        ("", 0.0),
    ]:
        assert format_scorer("format", text, None, {}) == score, text
    assert format_scorer("format", "<plan>x</plan>", None, {}, tags=["plan"]) == 1.0
    assert format_scorer("format", "x\n#### 5", None, {}, pattern=r".*\n#### -?\d+") == 1.0
    assert format_scorer("format", "x\n#### five", None, {}, pattern=r".*\n#### -?\d+") == 0.0
    with pytest.raises(ValueError, match="pattern = '\\('"):
        format_scorer("format", "x", None, {}, pattern="(")
