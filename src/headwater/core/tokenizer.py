"""What the framework asks of a tokenizer."""

from __future__ import annotations

from typing import Any, Protocol


class Tokenizer(Protocol):
    """What the framework asks of a tokenizer; transformers' tokenizers have all of it."""

    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def pad_token_id(self) -> int | None: ...
    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...
    def encode(self, text: str, **kwargs: Any) -> list[int]: ...
    def decode(self, token_ids: Any, **kwargs: Any) -> str: ...
