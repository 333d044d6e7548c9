"""Long results are cut to a number of tokens, and have no control tokens."""

from __future__ import annotations

import re

import tiny
from hypothesis import given
from hypothesis import strategies as st
from tools.boxes import ask, call, toolbox

from headwater.tools.result_text import ResultText, truncate


class Words:
    """Tokens are words with the space before them, so they can be very long."""

    eos_token_id = pad_token_id = None

    def encode(self, text, **options):
        return re.findall(r"\s*\S+|\s+$", text)

    def decode(self, tokens, **options):
        return "".join(tokens)


@given(
    st.text("ab é\n😀", max_size=300) | st.text(max_size=200),
    st.integers(1, 80),
    st.sampled_from(["left", "right", "middle"]),
    st.sampled_from([tiny.tokenizer(), Words()]),
)
def test_a_result_never_has_more_tokens_than_its_limit(text, max_tokens, side, tokenizer):
    cut = truncate(text, max_tokens, side, tokenizer)
    assert len(tokenizer.encode(cut, add_special_tokens=False)) <= max_tokens
    if len(tokenizer.encode(text, add_special_tokens=False)) <= max_tokens:
        assert cut == text
        return
    parts = re.split(r"\n\[\.\.\. (\d+) characters removed \.\.\.\]\n", cut)
    if len(parts) == 3:
        head, count, tail = parts
        assert text.startswith(head)
        assert text.endswith(tail)
        assert len(head) + int(count) + len(tail) == len(text)


def test_the_side_that_is_kept():
    text = " ".join(str(number) for number in range(1000))
    assert truncate(text, 12, "right", Words()) == "0 1 2 3 4 5\n[... 3878 characters removed ...]\n"
    assert truncate(text, 12, "left", Words()) == "\n[... 3865 characters removed ...]\n 994 995 996 997 998 999"
    assert truncate(text, 12, "middle", Words()) == "0 1 2\n[... 3872 characters removed ...]\n 997 998 999"
    assert truncate(text, 3, "middle", Words()) == "0 1 2"
    assert truncate(text, 3, "left", Words()) == " 997 998 999"


def test_a_text_of_few_long_tokens_is_kept():
    text = " ".join("x" * 1000 for _ in range(10))
    assert truncate(text, 10, "middle", Words()) == text


def test_megabytes_are_not_encoded():
    encoded = 0

    class Counting(Words):
        def encode(self, text, **options):
            nonlocal encoded
            encoded += len(text)
            return super().encode(text)

    truncate("word " * 2_000_000, 100, "middle", Counting())
    assert encoded < 100_000


def test_a_result_cannot_end_its_message():
    tokenizer = tiny.tokenizer()
    control = [each for each in tokenizer.all_special_tokens if len(each) > 1]
    assert control
    for text in (*control, "".join(control), f"x{control[0]}{control[0]}"):
        safe = ResultText(tokenizer).without_control_tokens(text)
        assert not set(tokenizer.encode(safe, add_special_tokens=False)) & set(tokenizer.all_special_ids)
        assert safe.replace(" ", "") == text
    assert ResultText(tokenizer).without_control_tokens("a < b") == "a < b"

    def fetch() -> str:
        """Fetch a page."""
        return f"page{control[0]}"

    assert ask(toolbox(fetch), call("fetch"))[0].text == f"page{control[0][0]} {control[0][1:]}"
