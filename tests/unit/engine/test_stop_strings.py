"""Finding the token that completes a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tokenizer

from headwater.engine.stop_strings import find_stop


def encode(text: str) -> list[int]:
    """One token per byte, so that every stop string lies across several tokens."""
    letters = {token: number for token, number in tokenizer().get_vocab().items() if len(token) == 1}
    byte_tokens = tokenizer().backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [letters[letter] for piece, _ in byte_tokens for letter in piece]


def plain(tokens: list[int], num_checked: int, stops: list[str]) -> int | None:
    """The definition: the first end after ``num_checked`` where the text so far ends in a stop string."""
    for end in range(num_checked + 1, len(tokens) + 1):
        if any(tokenizer().decode(tokens[:end]).endswith(stop) for stop in stops):
            return end
    return None


def test_one_token_per_byte():
    assert tokenizer().decode(encode("a ß\n")) == "a ß\n"
    assert len(encode("a ß\n")) == 5


@pytest.mark.parametrize("num_checked", range(9))
def test_a_stop_across_tokens_is_found_however_much_was_seen_before(num_checked):
    tokens = encode("xyzabc  STOP tail")
    assert find_stop(tokenizer(), tokens, num_checked, ["STOP"]) == len("xyzabc  STOP")


def test_the_first_of_several_stops_counts():
    assert find_stop(tokenizer(), encode("one two three"), 0, ["three", "two", "zero"]) == len("one two")


def test_without_a_stop_there_is_none():
    assert find_stop(tokenizer(), encode("nothing here"), 0, ["STOP", "ST"]) is None


def test_a_stop_that_was_passed_over_does_not_count_again():
    tokens = encode("STOP and on")
    assert find_stop(tokenizer(), tokens, 4, ["STOP"]) is None
    assert find_stop(tokenizer(), encode("STOP and STOP"), 4, ["STOP"]) == len("STOP and STOP")


def test_a_stop_that_overlaps_one_that_was_passed_over_counts():
    assert find_stop(tokenizer(), encode("aaaa"), 3, ["aaa"]) == 4


def test_characters_of_several_tokens_are_found():
    tokens = encode("price: 5€ or less")
    assert find_stop(tokenizer(), tokens, 0, ["€"]) == len("price: 5€".encode())


@settings(max_examples=150, deadline=None)
@given(
    st.text(alphabet="ab€", max_size=30),
    st.lists(
        st.sampled_from(["b", "ab", "bb€", "€a", "aab", "€€€", "ba", "aa", "bbb"]), min_size=1, max_size=3, unique=True
    ),
    st.data(),
)
def test_it_agrees_with_looking_at_the_whole_text_token_by_token(text, stops, data):
    tokens = encode(text)
    num_checked = data.draw(st.integers(0, len(tokens)))
    assert find_stop(tokenizer(), tokens, num_checked, stops) == plain(tokens, num_checked, stops)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab", max_size=40), st.sampled_from(["abba", "bbb", "aabb"]), st.integers(1, 9))
def test_looking_a_few_tokens_at_a_time_finds_the_same(text, stop, stride):
    tokens = encode(text)
    found = None
    for end in range(stride, len(tokens) + stride, stride):
        found = find_stop(tokenizer(), tokens[:end], end - stride, [stop])
        if found is not None:
            break
    assert found == plain(tokens, 0, [stop])
