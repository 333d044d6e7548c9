"""The tiny models' tokenizer: byte-level BPE, trained here on a page of text in milliseconds.

Every byte has a token, so any text survives encoding and decoding. Each digit is a token of its own, so numbers of
equal length take equally many tokens and a model can learn arithmetic column by column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headwater.models.chat_template import TINY_TEMPLATE
from headwater.models.corpus import CORPUS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY_SIZE = 512

PAD_TOKEN = "<|pad|>"
END_TOKEN = "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL_TOKENS = (PAD_TOKEN, END_TOKEN, *(f"<|{role}|>" for role in ROLES))
"""Listed in id order: pad is 0 and end is 1."""


def build_tokenizer() -> Any:
    """A ``PreTrainedTokenizerFast``; the same ids every time, on every machine."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_train_bpe(),
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        extra_special_tokens=list(SPECIAL_TOKENS[2:]),
        chat_template=TINY_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _train_bpe() -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    return tokenizer
