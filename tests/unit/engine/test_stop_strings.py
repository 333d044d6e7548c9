"""Finding the token that completes a stop string."""

from __future__ import annotations

from cases import case
from engine.stop_parts import KINDS, NO_SUCH_TOKEN, first_end, first_end_after, piece, responses, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from headwater.engine.stops import find_stop
from headwater.models.token_pieces import pieces_of


def encode(text: str) -> list[int]:
    """One token per byte, so that every stop string lies across several tokens."""
    letters = {token: number for token, number in tokenizer().get_vocab().items() if len(token) == 1}
    byte_tokens = tokenizer().backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [letters[letter] for piece, _ in byte_tokens for letter in piece]


def plain(tokens: list[int], num_checked: int, stops: list[str]) -> int | None:
    """The definition: the first end after ``num_checked`` at which the text ends with a stop string."""
    for end in range(num_checked + 1, len(tokens) + 1):
        if any(tokenizer().decode(tokens[:end]).endswith(stop) for stop in stops):
            return end
    return None


def test_one_token_per_byte():
    assert tokenizer().decode(encode("a ß\n")) == "a ß\n"
    assert len(encode("a ß\n")) == 5


def test_a_stop_across_tokens_is_found_however_much_was_seen_before():
    for num_checked in range(9):
        with case(num_checked):
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


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=120, deadline=None)
@given(kind=st.sampled_from(KINDS), data=st.data(), stride=st.integers(1, 9))
def test_a_response_ends_with_the_first_token_whose_text_holds_a_stop(kind, data, stride):
    tokens, stops = data.draw(responses(kind))
    expected = first_end(kind, tokens, stops)
    assert find_stop(tokenizer_of(kind), tokens, 0, stops) == expected
    starts = range(0, len(tokens), stride)
    found = (find_stop(tokenizer_of(kind), tokens[: start + stride], start, stops) for start in starts)
    assert next((end for end in found if end is not None), None) == expected


@settings(max_examples=120, deadline=None)
@given(kind=st.sampled_from(KINDS), data=st.data())
def test_what_was_passed_over_does_not_count_for_any_tokenizer(kind, data):
    tokens, stops = data.draw(responses(kind))
    num_checked = data.draw(st.integers(0, len(tokens)))
    expected = first_end_after(kind, tokens, num_checked, stops)
    assert find_stop(tokenizer_of(kind), tokens, num_checked, stops) == expected


def test_a_stop_behind_a_long_run_of_single_bytes_is_found():
    """Decoding must not begin inside a character. Ids without a token do not interrupt a run."""
    run = [*("€" * 20).encode(), *"é".encode()]
    for tokens in (run, [each for byte in run for each in (NO_SUCH_TOKEN, byte)]):
        for start in range(1, len(tokens)):
            assert find_stop(tokenizer_of("fallback"), tokens, start, ["é"]) == len(tokens)


def test_a_space_that_decoding_strips_from_a_part_is_there_in_the_whole():
    kind = "fallback that strips"
    tokens = tokenizer_of(kind).convert_tokens_to_ids(["b", "▁a", "b"])
    assert find_stop(tokenizer_of(kind), tokens, 2, [" ab"]) == 3
    assert find_stop(tokenizer_of(kind), tokens[1:], 0, [" ab"]) is None, "the first space of all is no text"


def test_the_pieces_of_tokens_are_their_bytes():
    for kind in KINDS:
        with case(kind):
            pieces = pieces_of(tokenizer_of(kind))
            assert pieces.pieces == [piece(kind, token) for token in range(len(tokenizer_of(kind)))]


def word_tokenizer(decoder, **settings):
    names = ["a", "##b", " .", "b", "<0x41>"]
    plain = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, "a"))
    plain.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=plain, **settings)


def test_a_tokenizer_that_joins_tokens_in_its_own_way_is_decoded():
    for joined, tokens, stop in [
        (word_tokenizer(decoders.WordPiece()), [0, 1, 3], "ab"),
        (word_tokenizer(decoders.Metaspace()), [0, 3], "ab"),
        (word_tokenizer(decoders.ByteLevel(), clean_up_tokenization_spaces=True), [0, 2], "a."),
        (word_tokenizer(None), [0, 3], "a b"),
    ]:
        with case(joined, tokens, stop):
            assert pieces_of(joined) is None
            assert stop in joined.decode(tokens[:2])
            assert find_stop(joined, tokens, 0, [stop]) == 2
            assert find_stop(joined, tokens, 1, [stop]) == 2


def test_a_stop_of_broken_characters_is_found():
    tokens = encode("ab€")[:-1]
    assert find_stop(tokenizer(), tokens, 0, ["b\ufffd"]) == 3
