"""A custom dataset: a class with `__len__` and `__getitem__`, named in the config.

    headwater train quickstart data.dataset=examples/custom_dataset.py:Doubling

This one generates its rows on access. The rows have `data_source="arithmetic"`, so the built-in scorer of that name
scores the responses. With another name, set reward.function.
"""

from __future__ import annotations

from typing import Any

from headwater.chat.render import encode_rendered, render_chat
from headwater.core.records import Prompt


class Doubling:
    """``2*17=`` for every number below `limit`; every fifth number is held out for evaluation."""

    def __init__(self, *, tokenizer: Any, split: str, seed: int, limit: int = 500, **_: Any) -> None:
        self._tokenizer = tokenizer
        self._split = split
        self._numbers = [number for number in range(limit) if (number % 5 == 0) == (split == "eval")]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int, /) -> Prompt:
        number = self._numbers[index]
        messages = ({"role": "user", "content": f"2*{number}="},)
        text = render_chat(self._tokenizer, messages)
        return Prompt(
            uid=f"doubling/{self._split}/{number}",
            messages=messages,
            text=text,
            tokens=encode_rendered(self._tokenizer, text),
            data_source="arithmetic",
            ground_truth=str(2 * number),
            extra_info={"demonstration": str(2 * number)},
        )
