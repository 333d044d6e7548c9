"""``text_decoder`` gives the same text as ``tokenizer.decode``, by the shorter way only if that changes nothing."""

from __future__ import annotations

import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headwater.chat.render import text_decoder

WORDS = ["<end>", "I", "do", "n't", "know", ",", ".", "it", "'s"]


def of_words(**settings: object) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordPiece({word: number for number, word in enumerate(WORDS)}, unk_token="<end>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", **settings)


class Shouting(PreTrainedTokenizerFast):
    def _decode(self, *arguments, **settings):
        return super()._decode(*arguments, **settings).upper()


def test_what_transformers_does_to_the_text_is_kept():
    tokens = [1, 2, 3, 4, 5, 7, 8, 6, 0]
    for clean_up, text in ((True, "I don't know, it's."), (False, "I do n't know , it 's .")):
        tokenizer = of_words(clean_up_tokenization_spaces=clean_up)
        assert text_decoder(tokenizer)(tokens) == text == tokenizer.decode(tokens, skip_special_tokens=True)
    shouting = Shouting(tokenizer_object=tiny.tokenizer().backend_tokenizer)
    assert text_decoder(shouting)(shouting.encode("quiet", add_special_tokens=False)) == "QUIET"


TINY = tiny.tokenizer()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, len(TINY) - 1), max_size=12))
def test_any_tokens(tokens):
    decode = text_decoder(TINY)
    assert decode(tuple(tokens)) == decode(tokens) == TINY.decode(tokens, skip_special_tokens=True)
