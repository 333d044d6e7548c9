"""The special tokens of a tokenizer."""

from __future__ import annotations

from headwater.core.protocols import Tokenizer


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Special tokens and their ids: tokens that decoding leaves out with ``skip_special_tokens``."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token.content): int(number) for number, token in added.items() if token.special}
